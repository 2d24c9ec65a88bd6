"""The sentence about a defect of diag: where it is and where to report it, but no value, for that may be a secret."""

import traceback
from pathlib import Path

from diag import __version__

_HERE = Path(__file__).parents[1]


def internal_error(error: Exception) -> str:
    """What the user reads: the kind of the exception and the line of diag, without its message."""
    return (
        f"internal error: {_kind(error)} at {_place(error)} of diag {__version__}; this is a defect of diag and no"
        " verdict on the server: please report this line to its maintainers, with the command but without its secrets"
    )


def _kind(error: Exception) -> str:
    """Of the operating system's errors its own fixed words too."""
    return f"{type(error).__name__}{f' ({error.strerror})' if isinstance(error, OSError) and error.strerror else ''}"


def _place(error: Exception) -> str:
    """The last line of ours that the exception came through."""
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    file, line = [frame for frame in frames if frame[0].is_relative_to(_HERE)][-1]
    return f"{file.relative_to(_HERE.parent)}:{line}"
