"""What is found in a launch command, as data, and how its values are read."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from diag.core.sizes import flag_integer
from diag.vllm.command.parse import Command, Given
from diag.vllm.flags.registry import release

Severity = Literal["error", "warning", "info"]
EXIT = {"error": 2, "warning": 1}
HELP = ("--help", "-h")
"""What argparse itself adds."""


@dataclass(frozen=True)
class Edit:
    """The words of a command in this range become `new`; an empty range is a place to put them."""

    words: range
    new: tuple[str, ...] = ()


@dataclass(frozen=True)
class LintFinding:
    """An error: vLLM does not start. A warning: it starts, but this hurts or does nothing. An info: worth a thought.

    `rule` is its name for a machine, `instead` what to write, `edits` the same as a correction of the command.
    """

    rule: str
    severity: Severity
    what: str
    why: str
    instead: str = ""
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True)
class LintReport:
    """A command judged for a release; `release_from` says why for this one.

    `corrected` is the command with what can be corrected mechanically, "" where that is nothing. `parser` is what the
    real parser said, "" where it accepts the command, None where it was not asked. Nothing in it is secret.
    """

    version: str
    release_from: str
    model: str
    findings: tuple[LintFinding, ...]
    not_checked: tuple[str, ...]
    corrected: str = ""
    parser: str | None = None

    @property
    def status(self) -> int:
        """The exit status: 0 nothing above info, 1 warnings, 2 errors."""
        return max((EXIT.get(each.severity, 0) for each in self.findings), default=0)


Rule = Callable[[Command, str], Iterator[LintFinding]]
"""Looks at a command for a release."""


def is_open(text: str) -> bool:
    """Whether a shell, a template or Kubernetes puts something in later: it cannot be judged."""
    return "$" in text or "`" in text or "{{" in text


def number(text: str | None) -> float | None:
    """A value as vLLM reads it, 8k as 8000 and 8K as 8192; None where it is none, or not a number."""
    if text is None:
        return None
    whole = flag_integer(text.strip())
    if whole is not None:
        return whole
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def ranks(command: Command, flag: str) -> int:
    """How many a parallel size asks for, 1 where it is not given or is none."""
    return max(1, int(number(command.get(flag)) or 1))


def at_least(version: str, since: str) -> bool:
    """Whether a release is that one or a later one."""
    return release(version) >= release(since)


def removal(given: Sequence[Given]) -> tuple[Edit, ...]:
    """The edits that take options away; what a YAML file gives has no words here."""
    return tuple(Edit(each.words) for each in given if each.words)


def shown(given: Given) -> str:
    """An option as the report calls it: by its own name, and where it stands."""
    named = given.spelled if given.name.startswith(given.spelled) else f"{given.spelled} ({given.name})"
    return named if given.words else f"{named} (in the --config file)"
