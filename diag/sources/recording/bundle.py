"""A bundle: a recording with the log, the report and facts about the host, in one compressed tar archive (.tar.zst).

Only this file imports zstandard. A bundle from elsewhere is foreign input: its files have known names in one folder,
their sizes are bounded, and the manifest, which comes first, has the hash of each.
"""

import hashlib
import io
import json
import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from diag import __version__
from diag.core.errors import BadRecording
from diag.core.files import opened, parse_json
from diag.core.formatting import printable

MANIFEST, SCHEMA = "manifest.json", "diag.bundle/1"
MAGIC = b"\x28\xb5\x2f\xfd"
MOST_FILES, MOST_UNPACKED, MOST_MANIFEST = 64, 2**29, 2**20
"""Files of a bundle, their bytes together, and the bytes of its manifest."""
LEVEL, MOST_WINDOW = 12, 2**24
"""The level of compression, and the bytes of memory that decompression may take."""
_CHUNK, _BLOCK = 2**20, tarfile.BLOCKSIZE
_NAME = re.compile(
    r"(?:metrics\.prom(?:\.gz)?|recording\.toml|server\.log|report\.html|(?:host|doctor|pod-[\w.-]{1,90})\.json|pod-[\w.-]{1,90}\.log)",
    re.ASCII,
)
"""Names of the files of a bundle (`WHAT` and `OF_A_POD` of diag/commands/bundle.py)."""


def pack(folder: Path, what: Mapping[str, str], left_out: Sequence[str], out: IO[bytes]) -> None:
    """Write the files of a folder, described by `what`, and a manifest with their hashes and what was left out.

    Raises BadRecording for files that a bundle does not hold: nobody could read it.
    """
    import zstandard  # noqa: PLC0415 - most recordings are no bundles

    files = {}
    for name in filter(lambda name: (folder / name).is_file(), what):
        with (folder / name).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            files[name] = {"what": what[name], "bytes": stream.tell(), "sha256": digest}
    if (size := sum(int(str(about["bytes"])) for about in files.values())) > MOST_UNPACKED:
        raise BadRecording(
            f"the files take {size >> 20:,} MiB, and a bundle holds {MOST_UNPACKED >> 20:,} MiB: record a shorter time"
        )
    manifest = {
        "schema": SCHEMA,
        "diag": __version__,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": files,
        "left_out": list(left_out),
    }
    compressed = zstandard.ZstdCompressor(level=LEVEL).stream_writer(out, closefd=False)
    with compressed, tarfile.open(fileobj=compressed, mode="w|", format=tarfile.USTAR_FORMAT) as archive:
        text = (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode()
        archive.addfile(_member(MANIFEST, len(text)), io.BytesIO(text))
        for name, about in files.items():
            with (folder / name).open("rb") as stream:
                archive.addfile(_member(name, int(str(about["bytes"]))), stream)


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)  # without owner and mode of this host
    member.size, member.mode = size, 0o644
    return member


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Unpack a bundle into a folder that is there until the end of the block; any other path is yielded as it is.

    Raises BadRecording for an archive that is damaged, too large, or changed since it was made.
    """
    start = b""
    with suppress(OSError), opened(path) as stream:
        start = stream.read(len(MAGIC))
    if start != MAGIC:  # not compressed by Zstandard
        yield path
        return
    import zstandard  # noqa: PLC0415 - most recordings are no bundles

    with tempfile.TemporaryDirectory(prefix="diag-") as place:
        folder = Path(place)
        try:
            decompressor = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW)
            with opened(path) as stream, decompressor.stream_reader(stream) as content:
                _unpack(content, folder)
        except (zstandard.ZstdError, tarfile.TarError, OSError, ValueError) as error:
            why = printable(str(error), 80) or "its content cannot be read"
            raise BadRecording(f"{printable(str(path))} is no bundle of diag, or damaged: {why}") from error
        yield folder


def _unpack(content: Any, folder: Path) -> None:
    """Write the files that the manifest names, which comes first; ValueError for anything else in the archive."""
    name, size = _read_header(content)
    if name != MANIFEST or size > MOST_MANIFEST:
        raise ValueError(f"it does not begin with a manifest of at most {MOST_MANIFEST >> 20} MiB")
    manifest = parse_json(_read(content, size).decode("utf-8"))
    expected = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(expected, dict):
        raise ValueError("its manifest names no files")
    _read(content, -size % _BLOCK)
    room = MOST_UNPACKED
    for _ in range(MOST_FILES):
        name, size = _read_header(content)
        if not name:
            break
        about, room = expected.pop(name, None), room - size
        if not _NAME.fullmatch(name) or not isinstance(about, dict):
            raise ValueError(f"it holds {name!r}, which is no file of a bundle")
        if room < 0:
            raise ValueError(f"its files take more than {MOST_UNPACKED >> 20:,} MiB")
        digest = hashlib.sha256()
        with (folder / name).open("xb") as out:
            for start in range(0, size, _CHUNK):
                chunk = _read(content, min(_CHUNK, size - start))
                digest.update(chunk)
                out.write(chunk)
        if digest.hexdigest() != about.get("sha256"):
            raise ValueError(f"{name} has changed since it was made")
        _read(content, -size % _BLOCK)
    else:
        raise ValueError(f"it holds more than {MOST_FILES} files")
    if expected:
        raise ValueError(f"{next(iter(expected))} is missing")


def _read_header(content: Any) -> tuple[str, int]:
    """Read the name and the size of the next file, as `pack` writes them; "" at the end of the archive.

    Other kinds of headers are refused: those with a longer name or more fields make tarfile read without a bound.
    """
    block = _read(content, _BLOCK)
    if block == bytes(_BLOCK):
        return "", 0
    member = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    if member.type != tarfile.REGTYPE or member.size < 0:
        raise ValueError(f"it holds {member.name!r}, which is no file of a bundle")
    return member.name, member.size


def _read(content: Any, size: int) -> bytes:
    """Read exactly so many bytes of the decompressed archive."""
    parts = list[bytes]()
    while size:
        part = content.read(size)
        if not part:
            raise ValueError("it ends in the middle")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
