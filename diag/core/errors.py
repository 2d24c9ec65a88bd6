"""Every error that a user can meet; its message is the sentence that they read, with what to do about it.

DiagError
├── BadUsage        options that contradict each other, or name nothing that exists
│   └── NoHostName  no name that a host could have
├── Unreachable     no metrics page, no log and no process
│   └── UnknownHost a host that nobody knows
├── Unsupported     not PromQL, or PromQL that the evaluator does not fully implement
├── QueryFailed     PromQL without a result on these samples (many-to-many matching, for example)
├── BadIncident     an incident file that is invalid
├── BadContract     a diag.toml that is invalid
└── BadRecording    a recording that cannot be read or written

They are caught once, in cli.py; any other exception is a defect of diag, and has an exit status of its own there.
"""


class DiagError(Exception):
    """Base of the family; `exit_code` is the exit status of the process (sysexits.h)."""

    exit_code = 64


class BadUsage(DiagError):
    """Options contradict each other, or name nothing that exists."""


class NoHostName(BadUsage):
    """What stands in the place of a host cannot be the name of one."""


class Unreachable(DiagError):
    """There is no metrics page, no log and no process to read."""

    exit_code = 69


class UnknownHost(Unreachable):
    """Nobody knows a host of that name."""


class Unsupported(DiagError):
    """An expression is not PromQL, or uses a part of it that is not implemented."""


class QueryFailed(DiagError):
    """A supported expression has no result on these samples."""


class BadIncident(DiagError):
    """An incident file is invalid."""


class BadContract(DiagError):
    """A diag.toml (SLOs, thresholds, names) is invalid."""


class BadRecording(DiagError):
    """A recording cannot be read or written, or holds no samples."""


class NotAnswered(Exception):
    """A source of telemetry refused one query: what it asks for is unknown. The query cache catches it."""
