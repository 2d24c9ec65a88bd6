"""A lint rule, declared once: its id, its page and its check."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from diag.lint.finding import Edit, LintFinding, Severity
from diag.lint.target import LintTarget


@dataclass(frozen=True)
class Match:
    """What a check found; an empty text, or no severity, is that of the rule."""

    message: str = ""
    why: str = ""
    fix: str = ""
    edits: tuple[Edit, ...] = ()
    severity: Severity | None = None


@dataclass(frozen=True)
class Example:
    """A command in which the rule finds something with this release.

    `requires` names what is seen only on the host itself, "" where the command alone is enough.
    """

    command: str
    version: str = "0.32.0"
    requires: str = ""


@dataclass(frozen=True)
class LintRule:
    """`title`, `finds`, `why`, `example` and `fix` are the page that `diag explain ID` prints.

    `check` looks at a command for a release.
    """

    id: str
    severity: Severity
    title: str
    finds: str
    why: str
    fix: str
    example: Example
    check: Callable[[LintTarget], Iterator[Match]]

    def findings(self, target: LintTarget) -> Iterator[LintFinding]:
        """Each match of the check with the texts of the rule where it has none of its own."""
        for match in self.check(target):
            yield LintFinding(
                self.id,
                match.severity or self.severity,
                match.message or self.title,
                match.why or self.why,
                match.fix or self.fix,
                match.edits,
            )
