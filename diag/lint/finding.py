"""What is found in a launch command, as data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from diag.vllm.command import redaction
from diag.vllm.command.command import Given

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""An error: vLLM does not start. A warning: something has no effect or does harm. An info: consider it."""
EXIT = {"error": 2, "warning": 1}


@dataclass(frozen=True)
class Edit:
    """The words of a command in this range become `new`; an empty range is a place to put them."""

    words: range
    new: tuple[str, ...] = ()


@dataclass(frozen=True)
class LintFinding:
    """One finding of the rule with the id `rule`; `edits` are its `fix` as a correction of the command."""

    rule: str
    severity: Severity
    message: str
    why: str
    fix: str = ""
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True)
class LintReport:
    """A command checked for the vLLM release `version`; `version_source` says where that comes from.

    `corrected` is the command with every mechanical correction, "" where there is none; `errors_left` counts the errors
    that only its owner can correct. `parser_error` is what vLLM's
    own parser says, "" where it accepts the command, None where it was not asked. `ignored` are the ids of rules whose
    findings were dropped, once for each finding. Nothing in it is secret.
    """

    version: str
    version_source: str
    model: str
    findings: tuple[LintFinding, ...]
    not_checked: tuple[str, ...]
    corrected: str = ""
    parser_error: str | None = None
    ignored: tuple[str, ...] = ()
    errors_left: int = 0

    @property
    def status(self) -> int:
        """The exit status: 0 nothing above info, 1 warnings, 2 errors."""
        return max((EXIT.get(finding.severity, 0) for finding in self.findings), default=0)


def removal(options: Sequence[Given]) -> tuple[Edit, ...]:
    """The edits that remove options; an option of a YAML file has no words in the command."""
    return tuple(Edit(given.words) for given in options if given.words)


def shown(given: Given) -> str:
    """An option as the report calls it: by its own name, and where it stands; by its place where it is none of vLLM's.

    What is no flag may be a secret: the value of the one before it.
    """
    spelled = redaction.flag(given)
    if not spelled:
        return f"Word {given.words.start + 1}" if given.words else "A key of the --config file"
    named = spelled if given.name.startswith(spelled) else f"{spelled} ({given.name})"
    return named if given.words else f"{named} (in the --config file)"
