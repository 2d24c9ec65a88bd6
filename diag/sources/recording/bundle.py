"""A bundle: a recording with the log, the report and facts about the host, in one compressed tar archive (.tar.zst).

Only this file imports zstandard. A bundle from elsewhere is foreign input: its members are plain files with plain names
in one folder, their sizes are bounded, and the manifest has the hash of each.
"""

import hashlib
import io
import json
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from diag import __version__
from diag.core.errors import BadRecording
from diag.core.files import opened
from diag.core.formatting import printable

MANIFEST, SCHEMA = "manifest.json", "diag.bundle/1"
MAGIC = b"\x28\xb5\x2f\xfd"
MOST_FILES, MOST_UNPACKED = 64, 2**30
"""Files of a bundle, and their bytes together."""
_CHUNK = 2**20
LEVEL = 12


def is_bundle(path: Path) -> bool:
    """Return True for a regular file that is compressed by Zstandard."""
    try:
        with opened(path) as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def pack(folder: Path, what: Mapping[str, str], left_out: Sequence[str], out: IO[bytes]) -> None:
    """Write the files of a folder, described by `what`, and a manifest with their hashes and what was left out."""
    import zstandard  # noqa: PLC0415 - most recordings are no bundles

    files = {
        name: {"what": text, "bytes": (folder / name).stat().st_size, "sha256": _hash(folder / name)}
        for name, text in what.items()
        if (folder / name).is_file()
    }
    manifest = {
        "schema": SCHEMA,
        "diag": __version__,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": files,
        "left_out": list(left_out),
    }
    compressed = zstandard.ZstdCompressor(level=LEVEL).stream_writer(out, closefd=False)
    with compressed, tarfile.open(fileobj=compressed, mode="w|") as archive:
        text = (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode()
        archive.addfile(_member(MANIFEST, len(text)), io.BytesIO(text))
        for name, about in files.items():
            with (folder / name).open("rb") as stream:
                archive.addfile(_member(name, int(str(about["bytes"]))), stream)


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)  # without owner and mode of this host
    member.size, member.mode = size, 0o644
    return member


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Unpack a bundle into a folder that is there until the end of the block; any other path is yielded as it is.

    Raises BadRecording for an archive that is damaged, too large, or changed since it was made.
    """
    if not is_bundle(path):
        yield path
        return
    import zstandard  # noqa: PLC0415 - most recordings are no bundles

    with tempfile.TemporaryDirectory(prefix="diag-") as place:
        folder = Path(place)
        try:
            with opened(path) as stream, zstandard.ZstdDecompressor().stream_reader(stream) as content:
                _unpack(content, folder)
            _check(folder)
        except (zstandard.ZstdError, tarfile.TarError, OSError, ValueError, EOFError) as error:
            why = printable(str(error), 80) or "its content cannot be read"
            raise BadRecording(f"{printable(str(path))} is no bundle of diag, or damaged: {why}") from error
        yield folder


def _unpack(content: Any, folder: Path) -> None:
    room = MOST_UNPACKED
    with tarfile.open(fileobj=content, mode="r|") as archive:
        for count, member in enumerate(archive):
            if count >= MOST_FILES or not member.isreg() or Path(member.name).name != member.name:
                raise ValueError(f"it holds {member.name!r}, which is no file of a bundle")
            room -= member.size
            if room < 0:
                raise ValueError(f"its files take more than {MOST_UNPACKED >> 20:,} MiB")
            source = archive.extractfile(member)
            assert source is not None  # a regular file has content
            with (folder / member.name).open("xb") as out:
                while chunk := source.read(_CHUNK):
                    out.write(chunk)


def _check(folder: Path) -> None:
    """Compare each file with its hash; ValueError for one that has changed."""
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict):
        raise ValueError("its manifest names no files")
    for name, about in files.items():
        file = folder / Path(name).name
        if not (file.is_file() and isinstance(about, dict) and _hash(file) == about.get("sha256")):
            raise ValueError(f"{name} is missing or has changed since it was made")
