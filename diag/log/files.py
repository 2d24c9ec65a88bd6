"""Choose the logs that targets name, and read their bytes within bounds: of a large log its beginning and its end."""

import os
import re
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from diag.core.errors import BadRecording
from diag.core.files import STEP, Gunzip, exists, opened, piped_descriptor, read_ends
from diag.core.formatting import printable

STDIN = "-"
NAMED = ("*.log", "*.log.gz", "*.txt", "*.out", "*.err")
"""Files that are read of a folder."""
PAGES = ("metrics.prom.gz", "metrics.prom")
"""Files of a recording."""
MOST_FILES = 256
FIRST, LAST = 4 * 2**20, 16 * 2**20
"""Bytes read of the beginning and of the end of a log."""
_PAGE = re.compile(rb"(?m)^# (?:scrape|HELP|TYPE) ")
"""Lines of a recording, or of a page of metrics that was saved."""
_GZIP, _ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def is_log(target: str) -> bool:
    """Return True for standard input, a shell's `<(...)`, a file that is no page of a recording, a folder of such."""
    path = Path(target)
    if is_stream(target):
        return True
    if not exists(target):
        return False
    if path.is_dir():
        return not any((path / name).exists() for name in PAGES) and any(_files(path))
    if not path.is_file() or path.name in PAGES:
        return False
    try:
        with opened(path) as stream:
            head = stream.read(STEP)
        if head.startswith(_ZSTANDARD):
            return False  # a bundle
        text = next(Gunzip().feed(head), b"") if head.startswith(_GZIP) else head
    except (OSError, zlib.error):
        return False
    text = _plain(text)
    is_page = bool(_PAGE.search(text)) or text.lstrip()[:9].lower().startswith((b"<!doctype", b"<html"))
    return not is_page


def _plain(data: bytes) -> bytes:
    """Return text as UTF-8, which PowerShell does not write, without the NULs of a file truncated under its writer."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        data = data.decode("utf-16", "replace").encode("utf-8", "replace")
    return data.replace(b"\0", b"")


def is_stream(target: str) -> bool:
    """Return True for standard input and a shell's `<(...)`, which can be read only once."""
    return target == STDIN or piped_descriptor(target) is not None


class LogBytes(NamedTuple):
    """The first and the last bytes of a log, nothing for the last if all of it was read, and when it was last written.

    `name` distinguishes it from other logs; `path` is "" for standard input and for a pipe; `written` is unix time.
    """

    name: str
    path: str
    first: bytes
    last: bytes
    written: float


def read_logs(targets: Sequence[str]) -> Iterator[LogBytes]:
    """Yield the logs one by one; BadRecording if one cannot be read."""
    paths = [path for target in targets for path in (_files(Path(target)) if Path(target).is_dir() else [Path(target)])]
    if len(paths) > MOST_FILES:
        raise BadRecording(f"{len(paths):,} logs are more than {MOST_FILES}: name fewer of them")
    pipes = [0 if str(path) == STDIN else piped_descriptor(path) for path in paths]
    names = [
        path.name if pipe is None else "standard input" if not pipe else "pipe"
        for path, pipe in zip(paths, pipes, strict=True)
    ]
    for path, pipe, name in zip(paths, pipes, names, strict=True):
        unique = name if names.count(name) == 1 else str(path)
        first, last, written = _ends(path, pipe)
        yield LogBytes(unique, str(path) if pipe is None else "", _plain(first), _plain(last), written)


def _files(folder: Path) -> list[Path]:
    return sorted({path for pattern in NAMED for path in folder.glob(pattern) if path.is_file()})


def _ends(path: Path, pipe: int | None) -> tuple[bytes, bytes, float]:
    """Return the first and the last bytes of a log, and the unix time at which it was last written to."""
    try:
        if str(path) == STDIN:
            return *_kept(iter(lambda: sys.stdin.buffer.read(STEP), b"")), time.time()
        if pipe is not None:
            return *_kept(iter(lambda: os.read(pipe, STEP), b"")), time.time()
        with opened(path) as stream:
            written, is_gzip = os.fstat(stream.fileno()).st_mtime, stream.read(len(_GZIP)) == _GZIP
            stream.seek(0)
            gunzip, chunks = Gunzip(), iter(lambda: stream.read(STEP), b"")
            pieces = (piece for chunk in chunks for piece in gunzip.feed(chunk))
            return *(_kept(pieces) if is_gzip else read_ends(path, FIRST, LAST)), written
    except OSError as error:
        raise BadRecording(f"{printable(str(path))} cannot be read: {error.strerror or error}") from error
    except zlib.error as error:
        raise BadRecording(f"{printable(str(path))} is damaged: {error}") from error


def _kept(chunks: Iterable[bytes]) -> tuple[bytes, bytes]:
    """Return the first and the last bytes of a stream, read to its end: its writer must not be stopped by a pipe."""
    first, rest = bytearray(), bytearray()
    for chunk in chunks:
        room = FIRST - len(first)
        first += chunk[:room]
        rest += chunk[room:]
        if len(rest) > 2 * LAST:
            del rest[:-LAST]
    return (bytes(first + rest), b"") if len(rest) <= LAST else (bytes(first), bytes(rest[-LAST:]))
