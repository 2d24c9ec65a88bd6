"""Conflicts between flags, as vLLM 0.32 checks them (vllm/config and engine/arg_utils.py), made into rules.

Only what the command itself gives is compared: a rule that does not know one side is silent.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from diag.lint.finding import Severity, removal
from diag.lint.rule import Example, LintRule, Match
from diag.lint.target import LintTarget
from diag.vllm.command.command import Command
from diag.vllm.command.redaction import value
from diag.vllm.flags.registry import known


@dataclass(frozen=True)
class Conflict:
    """What makes a rule of a conflict: `holds` in a command, from the release `since` on and before `until`.

    `{flag}` in `message` and `fix` is the value of --flag; the correction removes the flags `removes`.
    """

    id: str
    title: str
    holds: Callable[[LintTarget], object]
    why: str
    fix: str
    example: Example
    message: str = ""
    since: str = ""
    until: str = ""
    severity: Severity = "error"
    removes: tuple[str, ...] = ()


def as_rule(conflict: Conflict) -> LintRule:
    """The rule that finds a conflict."""
    since, until = conflict.since, conflict.until

    def check(target: LintTarget) -> Iterator[Match]:
        in_span = (not since or target.since(since)) and not (until and target.since(until))
        if in_span and conflict.holds(target):
            command = target.command
            removed = [given for flag in conflict.removes for given in command.all(flag)]
            yield Match(_filled(conflict.message, command), "", _filled(conflict.fix, command), removal(removed))

    releases = f", from vLLM {since} {f'until {until}' if until else 'on'}" if since else ""
    finds = f"{conflict.title}{releases}. Values that the command does not give are not compared."
    fix = _general(conflict.fix)
    return LintRule(conflict.id, conflict.severity, conflict.title, finds, conflict.why, fix, conflict.example, check)


def is_more(value: float | None, other: float | None) -> bool:
    """Whether one number is above the other, both known."""
    return value is not None and other is not None and value > other


def _filled(text: str, command: Command) -> str:
    for flag in known():
        if "{" + flag[2:] + "}" in text:
            text = text.replace("{" + flag[2:] + "}", _value(command, flag))
    return text


def _value(command: Command, flag: str) -> str:
    given = command.all(flag)[-1:]
    return " ".join(value(given[0], text) for text in given[0].values) if given else "1"


def _general(text: str) -> str:
    """The text without values: {max-num-seqs} becomes the value of --max-num-seqs."""
    for flag in known():
        text = text.replace("{" + flag[2:] + "}", f"the value of {flag}")
    return text
