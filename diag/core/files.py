"""Files that others wrote, read within bounds: only regular files, and none larger than its reader says.

A pipe or a device can hold up its reader for ever, /dev/zero never ends, and a sparse file claims any size.
docs/limits.md lists the bounds.
"""

import errno
import os
import re
import select
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from diag.core.sizes import MIB

PIPE_SECONDS = 60.0
_PIPE = re.compile(r"/dev/fd/(\d{1,6})", re.ASCII)
_KINDS = {stat.S_IFDIR: "it is a folder", stat.S_IFIFO: "it is a pipe", stat.S_IFSOCK: "it is a socket"}


@contextmanager
def opened(file: str | Path) -> Iterator[BinaryIO]:
    """A regular file, open for reading; OSError with the reason in `strerror` where there is none of that name."""
    try:
        _refuse_others(Path(file).stat(), file)
    except ValueError as error:
        raise OSError(errno.EINVAL, "no file can have a name with a NUL in it", str(file)) from error
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY), "rb") as stream:
        _refuse_others(os.fstat(stream.fileno()), file)  # it may be another one by now
        yield stream


def read_bytes(file: str | Path, most: int, piped: bool = False) -> bytes:
    """The whole content; OSError where it cannot be read or is larger than `most` bytes.

    `piped`: it may be a pipe that a shell has opened for this program, as in `--contract <(...)`.
    """
    descriptor = _PIPE.fullmatch(str(file)) if piped else None
    if descriptor and _is_pipe(int(descriptor[1])):
        content = _drained(int(descriptor[1]), most + 1, file)
    else:
        with opened(file) as stream:
            content = stream.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most / MIB:g} MiB", str(file))
    return content


def read_text(file: str | Path, most: int, piped: bool = False) -> str:
    """The same as UTF-8; UnicodeDecodeError, a ValueError, where it is none."""
    return read_bytes(file, most, piped).decode("utf-8")


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except (OSError, OverflowError):
        return False


def _drained(pipe: int, most: int, file: str | Path) -> bytes:
    """What comes out of a pipe until its writer ends, at most so many bytes; OSError where that takes too long."""
    content, until = b"", time.monotonic() + PIPE_SECONDS
    while len(content) < most:
        if not select.select([pipe], [], [], max(0, until - time.monotonic()))[0]:
            raise OSError(errno.ETIMEDOUT, f"its writer has not ended within {PIPE_SECONDS:g} s", str(file))
        part = os.read(pipe, most - len(content))
        if not part:
            break
        content += part
    return content


def read_ends(file: str | Path, first: int, last: int) -> tuple[bytes, bytes]:
    """The first and the last bytes of a file; all of it, and nothing, where it is not larger than both together."""
    with opened(file) as stream:
        if os.fstat(stream.fileno()).st_size <= first + last:
            return stream.read(first + last), b""
        beginning = stream.read(first)
        stream.seek(-last, os.SEEK_END)
        return beginning, stream.read(last)


def exists(file: str | Path) -> bool:
    """Whether there is anything of that name; what can be no name names nothing."""
    try:
        return Path(file).exists()
    except (OSError, ValueError):  # too long, or with a NUL
        return False


def _refuse_others(status: os.stat_result, file: str | Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "it is a device")
        raise OSError(errno.EINVAL, f"{kind}, not a regular file", str(file))
