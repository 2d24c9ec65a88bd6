"""Lint rules: the declaration of a rule, and the findings of its check in a launch command."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from diag.lint.target import LintTarget
from diag.vllm.command import redaction
from diag.vllm.command.command import Given

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""An error: vLLM does not start. A warning: something has no effect or does harm. An info: consider it."""
EXIT = {"error": 2, "warning": 1}


@dataclass(frozen=True)
class Edit:
    """Replaces the words of a command in this range with `new`; an empty range is a place to insert them."""

    words: range
    new: tuple[str, ...] = ()


@dataclass(frozen=True)
class Match:
    """One place in which a check found something; without a text or severity the rule's is used."""

    message: str = ""
    why: str = ""
    fix: str = ""
    edits: tuple[Edit, ...] = ()
    severity: Severity | None = None


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
    """All findings in a command for the vLLM release `version`; no value in it is secret.

    `version_source` names what the release was taken from. `corrected` is the command with every mechanical
    correction, "" if there is none; `errors_left` counts the errors that only the user can correct. `parser_error` is
    the message of vLLM's own parser, "" if it accepts the command, None if it was not run. `ignored` holds the rule
    id of each finding that was dropped.
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


@dataclass(frozen=True)
class Example:
    """A command in which the rule finds something for the release `version`.

    `requires` names what the host must have, "" if the command alone is enough.
    """

    command: str
    version: str = "0.32.0"
    requires: str = ""


Check = Callable[[LintTarget], Iterator[Match]]


@dataclass(frozen=True)
class LintRule:
    """A rule: its `check`, and the texts of the page that `diag explain ID` prints."""

    id: str
    severity: Severity
    title: str
    finds: str
    why: str
    fix: str
    example: Example
    check: Check

    def findings(self, target: LintTarget) -> Iterator[LintFinding]:
        """Yield a finding for each match, with the texts of the rule if the match has none."""
        for match in self.check(target):
            yield LintFinding(
                self.id,
                match.severity or self.severity,
                match.message or self.title,
                match.why or self.why,
                match.fix or self.fix,
                match.edits,
            )


def rule(
    severity: Severity, title: str, finds: str, why: str, fix: str, example: Example
) -> Callable[[Check], LintRule]:
    """Make the decorated check a rule; the name of the function is the rule's id."""
    return lambda check: LintRule(check.__name__, severity, title, finds, why, fix, example, check)


def removal(options: Sequence[Given]) -> tuple[Edit, ...]:
    """Return the edits that remove options; an option of a YAML file has no words in the command."""
    return tuple(Edit(given.words) for given in options if given.words)


def shown(given: Given) -> str:
    """Name an option in a report, and say if it stands in the --config file.

    A word that is no flag of vLLM may be a secret, such as the value of the flag before it: it is named by its
    position.
    """
    spelled = redaction.flag(given)
    if not spelled:
        return f"Word {given.words.start + 1}" if given.words else "A key of the --config file"
    named = spelled if given.name.startswith(spelled) else f"{spelled} ({given.name})"
    return named if given.words else f"{named} (in the --config file)"
