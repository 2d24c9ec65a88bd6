"""Every error that a user can meet; its message is the sentence that the user reads, with what to do about it.

Errors are caught once, in cli.py; any other exception is a defect of diag, with an exit status of its own.
"""

from pathlib import Path

from diag import __version__
from diag.core.formatting import addresses_without_secrets

_PACKAGE = Path(__file__).parents[1]


class DiagError(Exception):
    """Base of the family; `exit_code` is the exit status of the process (sysexits.h).

    Its message has no user, password, query or fragment of an address, wherever a target was taken for something else.
    """

    exit_code = 64

    def __str__(self) -> str:
        return addresses_without_secrets(super().__str__())


class BadUsage(DiagError):
    """Options conflict, or name nothing that exists."""


class NoHostName(BadUsage):
    """The text in the place of a host cannot be the name of one."""


class NoLaunch(BadUsage):
    """A text, a file or a folder starts no vLLM server."""

    exit_code = 65


class Unfollowed(NoLaunch):
    """A container with vLLM's image starts a program that cannot be read."""


class NoFile(BadUsage):
    """A file or a folder does not exist."""

    exit_code = 66


class Unreachable(DiagError):
    """There is no metrics page, no log and no process to read."""

    exit_code = 69


class UnknownHost(Unreachable):
    """No name server resolves the host."""


class Unsupported(DiagError):
    """An expression is not PromQL, or uses a part of it that is not implemented."""


class QueryFailed(DiagError):
    """A supported expression has no result on these samples."""


class BadDeclaration(DiagError):
    """A declaration is invalid: an incident, a signal, a lint rule, a table of known failures."""


class BadContract(DiagError):
    """A diag.toml (SLOs, thresholds, names) is invalid."""


class BadRecording(DiagError):
    """A recording cannot be read or written, or holds no samples."""


class NotAnswered(Exception):
    """A source of telemetry refused one query: what it asks for is unknown. The query cache catches it."""


def internal_error(error: Exception) -> str:
    """Return the sentence about a defect of diag: its kind and its line, but no value, for that may be a secret."""
    import traceback  # noqa: PLC0415  # hardly any run needs it

    kind = type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        kind += f" ({error.strerror})"
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    file, line = [frame for frame in frames if frame[0].is_relative_to(_PACKAGE)][-1]
    return (
        f"internal error: {kind} at {file.relative_to(_PACKAGE.parent)}:{line} of diag {__version__}; this is a defect"
        " of diag and no verdict on the server: please report this line to its maintainers, with the command but"
        " without its secrets"
    )
