"""Every error a user can meet; the message is the sentence they read, with what to do about it.

DiagError
├── BadUsage        a combination of options that makes no sense
├── Unreachable     nothing answered: no page, no log, no process
├── Unsupported     PromQL that the evaluator does not fully implement, by name
├── QueryFailed     PromQL that is valid but has no answer (many-to-many matching, for one)
├── BadIncident     an incident declaration that is refused
├── BadContract     a diag.toml that is refused
└── BadRecording    a recording that cannot be judged

They are caught once, in cli.py.
"""


class DiagError(Exception):
    """Base of the family; `exit_code` is what the process ends with (sysexits.h)."""

    exit_code = 64


class BadUsage(DiagError):
    """Options that contradict each other or point nowhere."""


class Unreachable(DiagError):
    """No page, no log and no process could be seen."""

    exit_code = 69


class Unsupported(DiagError):
    """An expression is not PromQL, or uses a part of PromQL that is not implemented."""


class QueryFailed(DiagError):
    """A supported expression has no answer on these samples."""


class BadIncident(DiagError):
    """An incident file was refused."""


class BadContract(DiagError):
    """A measurement contract (diag.toml) was refused."""


class BadRecording(DiagError):
    """A recording cannot be read or holds nothing to judge."""
