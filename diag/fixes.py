"""Fix + readings + running configuration -> a concrete flag, value and relaunch line.

Nothing here changes a server: what comes out is a proposal to read.
"""

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from diag.asking import Asked, Subject
from diag.diagnose import Diagnosis
from diag.incident import Condition, Fix, Signal
from diag.signals import running_value
from diag.table import holds

Value = float | str | None


@dataclass(frozen=True)
class Proposal:
    """A fix made concrete: `before` and `after` are the running and the proposed value (None: not set, not known).

    `needs` says what has to be measured before the proposal can be trusted; `computed` is whether `after` came from
    this server's numbers; `name` is what is changed, a command with everything filled in.
    """

    fix: Fix
    before: Value
    after: Value
    needs: tuple[str, ...]
    computed: bool
    name: str


@dataclass(frozen=True)
class Running:
    """What is known of a server beyond its samples: vLLM's version ("" unknown) and the command that started it."""

    version: str = ""
    launch: str = ""


def propose(diagnosis: Diagnosis, asked: Asked, running: Running) -> tuple[Proposal, ...]:
    """The applicable fixes of a present incident, in their order."""
    bench = _Bench(diagnosis, asked)
    found = (_propose_one(fix, bench, running) for fix in diagnosis.incident.fixes)
    return tuple(each for each in found if each is not None)


class _Bench:
    """Asks a signal for one subject at the instant that the diagnosis reports."""

    def __init__(self, diagnosis: Diagnosis, asked: Asked) -> None:
        self.diagnosis = diagnosis
        self.asked = asked

    def value(self, signal: Signal) -> float | None:
        one = self.diagnosis
        row = self.asked.ask(signal.promql, one.incident.per, self.asked.window(one.incident)).of(one.subject)
        value = math.nan if row is None else float(row[one.reported])
        return None if math.isnan(value) else value


def _propose_one(fix: Fix, bench: _Bench, running: Running) -> Proposal | None:
    """The proposal, or None where the fix does not apply here."""
    met = [(each, _met(each, bench)) for each in fix.only_if]
    if any(held is False for _, held in met) or not available(fix.versions, running.version):
        return None
    needs = [each.signal.name for each, held in met if held is None]
    before = _before(fix, bench)
    after, computed = _after(fix, bench)
    if fix.value is not None and after is None:
        needs.append(f"{fix.value.name}" if isinstance(fix.value, Signal) else fix.name)
    if not _moves(fix, before, after):
        return None
    return Proposal(fix, before, after, tuple(needs), computed, _named(fix, after, bench.diagnosis.subject))


def _named(fix: Fix, after: Value, subject: Subject) -> str:
    name = fix.name
    for label, text in (*subject, ("value", "?" if after is None else written(after))):
        name = name.replace(f"{{{label}}}", text)
    return name


def _met(condition: Condition, bench: _Bench) -> bool | None:
    value = bench.value(condition.signal)
    if value is None:
        return None
    return bool(holds(np.array([value]), condition.op, bench.asked.contract.limit(condition.limit))[0] == 1)


def _before(fix: Fix, bench: _Bench) -> float | None:
    return bench.value(running_value(fix.flag.removeprefix("--").replace("-", "_"))) if fix.flag else None


def _after(fix: Fix, bench: _Bench) -> tuple[Value, bool]:
    if not isinstance(fix.value, Signal):
        return fix.value, False
    value = bench.value(fix.value)
    return (None, False) if value is None else (float(max(fix.least, _rounded(value, fix))), True)


def _rounded(value: float, fix: Fix) -> float:
    if fix.rounding == "power_of_two_below":
        return float(2 ** math.floor(math.log2(value))) if value >= 1 else 1.0
    if fix.rounding == "hundredth_below":
        return math.floor(value * 100 + 1e-9) / 100
    return float(round(value))


def _moves(fix: Fix, before: Value, after: Value) -> bool:
    """Whether the proposal moves the running value the way the fix means; 0 stands for "off" where lower is meant."""
    if not isinstance(before, float) or not isinstance(after, int | float):
        return True
    if fix.direction == "lower":
        return before == 0 or after < before
    return after > before if fix.direction == "raise" else after != before


def available(versions: tuple[str, str], running: str) -> bool:
    """Whether a flag exists in the running release; an unknown release counts as yes."""
    first, last = versions
    if not release(running):
        return True
    return (not first or release(first) <= release(running)) and (not last or release(running) <= release(last))


def release(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, (0, 32, 0); empty where there are none."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(part or 0) for part in found.groups()) if found else ()


def relaunch(launch: str, proposals: Iterable[Proposal]) -> str | None:
    """The launch command with the first complete proposal of a flag in it; None without a command or a proposal."""
    chosen = next((p for p in proposals if p.fix.flag and not p.needs), None)
    if not launch or chosen is None:
        return None
    try:
        words = shlex.split(launch)
    except ValueError:
        return None
    return _join(_with_flag(words, chosen))


def _with_flag(words: list[str], chosen: Proposal) -> list[str]:
    """The words without the flag, then with its new value; a removed flag only goes."""
    flag, kept, skip = chosen.fix.flag, [], False
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name == flag:
            skip = "=" not in word
            continue
        if not (skip and not word.startswith("-")):
            kept.append(word)
        skip = False
    if chosen.fix.value is None:
        return kept
    return [*kept, flag, *([written(chosen.after)] if chosen.after not in ("", None) else [])]


def _join(words: list[str]) -> str:
    """Quote for a shell; of `NAME=value` only the value, or it would be no assignment."""
    return " ".join(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    name, equals, value = word.partition("=")
    return f"{name}={shlex.quote(value)}" if equals and name.isidentifier() else shlex.quote(word)


def written(value: Value) -> str:
    """A value as it stands on a command line: counts whole, shares as they are."""
    if isinstance(value, float):
        return f"{value:g}" if value < 1 else f"{value:.0f}"
    return str(value)


def by_subject(running: Mapping[str, Running], subject: Subject) -> Running:
    """What is known of a subject's instance."""
    return running.get(dict(subject).get("instance", ""), Running())
