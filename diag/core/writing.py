"""Files that are written whole or not at all, and folders with one writer at a time."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from diag.core.errors import BadUsage
from diag.core.formatting import printable


@contextmanager
def written_whole(file: Path, newline: str | None = None) -> Iterator[TextIO]:
    """A text file that takes the place of `file` once all of it is written; until then, and on an error, that stays.

    A device, a pipe, or a file in a folder that takes no new ones, is written directly. OSError where it cannot be
    written.
    """
    if file.exists() and not (file.is_file() and os.access(file.resolve().parent, os.W_OK)):
        with file.open("w", encoding="utf-8", newline=newline) as out:
            yield out
        return
    goal = file.resolve()  # a link stays a link
    new = goal.with_name(f".{goal.name}.tmp")
    try:
        with new.open("w", encoding="utf-8", newline=newline) as out:
            yield out
        if goal.exists():
            new.chmod(goal.stat().st_mode & 0o777)
        _put(new, goal)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _put(new: Path, goal: Path) -> None:
    """Have one file take the place of another; it is copied into one that is mounted alone, as containers have it."""
    try:
        new.replace(goal)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        goal.write_bytes(new.read_bytes())
        new.unlink()


@contextmanager
def refused_in_words(file: Path) -> Iterator[None]:
    """BadUsage with the reason where this file of the user cannot be written; a pipe that closed stays one."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BadUsage(f"{printable(str(file))} cannot be written: {error.strerror}") from error


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Nobody else who asks for this writes to the folder meanwhile; BadUsage where somebody does already.

    The lock ends with the process. On a file system without locks there is none.
    """
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(held)
        raise BadUsage(f"another diag is writing to {folder}: wait for it, or name another folder") from error
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(held)
