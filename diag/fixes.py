"""Fix + readings + running configuration -> concrete changes with their numbers.

Nothing here changes a server: what comes out is a proposal to read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from diag.asking import Asked, Subject
from diag.diagnose import Diagnosis
from diag.errors import BadUsage
from diag.incident import Condition, Fix, Signal
from diag.signals import gpu_memory_total, running_value
from diag.table import holds
from diag.vllm.command import Command, parse
from diag.vllm.defaults import UNSET, default
from diag.vllm.flags import release, releases

Value = float | str | None


@dataclass(frozen=True)
class Change:
    """One flag or variable from one value to another; None: not set, or not known.

    `assumed` is whether `before` is the release's own default, which nobody has contradicted.
    """

    name: str
    before: Value
    after: Value
    assumed: bool = False


@dataclass(frozen=True)
class Proposal:
    """A fix made concrete: `before` and `after` are the running and the proposed value (None: not set, not known).

    `needs` says what has to be measured before the proposal can be trusted; `computed` is whether `after` came from
    this server's numbers; `name` is what is changed, a command with everything filled in, and `text` the fix's own
    sentence, likewise. `changes` are the flags or the variable that it sets, its own first.
    """

    fix: Fix
    before: Value
    after: Value
    needs: tuple[str, ...]
    computed: bool
    name: str
    text: str = ""
    assumed: bool = False
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Running:
    """What is known of a server beyond its samples: vLLM's version ("" unknown) and the command that started it.

    `whole` is whether all that was set is known, so that what nobody set runs at its release's default.
    """

    version: str = ""
    launch: str = ""
    whole: bool = False


def propose(diagnosis: Diagnosis, asked: Asked, running: Running) -> tuple[Proposal, ...]:
    """The applicable fixes of a present incident, in their order: the safest first."""
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
    met = [(each, _met(each, bench, running)) for each in fix.only_if]
    if any(held is False for _, held in met) or not available(fix, running.version):
        return None
    needs = [each.signal.name for each, held in met if held is None]
    before, assumed = _before(fix.flag, bench, running)
    after, lacking = _after(fix, bench)
    if not _moves(fix, before, after):
        return None
    if fix.direction and before is None and fix.flag and not assumed:
        lacking.append(f"the running {fix.flag}")
    also, lost = _also(fix, bench, running)
    own = (Change(fix.name, before, after, assumed),) if fix.flag or fix.environment else ()
    return Proposal(
        fix=fix,
        before=before,
        after=after,
        needs=tuple(dict.fromkeys((*needs, *lacking, *lost))),
        computed=isinstance(fix.value, Signal) and after is not None,
        name=_filled(fix.name, after, bench.diagnosis.subject),
        text=_filled(fix.change, after, bench.diagnosis.subject),
        assumed=assumed,
        changes=(*own, *also),
    )


def _filled(text: str, after: Value, subject: Subject) -> str:
    for label, value in (*subject, ("value", "?" if after is None else written(after))):
        text = text.replace(f"{{{label}}}", value)
    return text


def _met(condition: Condition, bench: _Bench, running: Running) -> bool | None:
    value = bench.value(condition.signal)
    if value is None and condition.signal.name.startswith("--"):
        value = _not_given(condition.signal.name, bench, running)
    if value is None:
        return None
    return bool(holds(np.array([value]), condition.op, bench.asked.contract.limit(condition.limit))[0] == 1)


def _not_given(flag: str, bench: _Bench, running: Running) -> float | None:
    """What runs where all that was set is known, and the flag is not; 0 where there is no such bound then."""
    if not running.whole:
        return None
    return 0.0 if flag in UNSET else default(flag, running.version, bench.value(gpu_memory_total))


def _before(flag: str, bench: _Bench, running: Running) -> tuple[float | None, bool]:
    """The running value of a flag, and whether it is only the release's default."""
    if not flag:
        return None, False
    value = bench.value(running_value(flag.removeprefix("--").replace("-", "_")))
    if value is not None:
        return value, False
    value = default(flag, running.version, bench.value(gpu_memory_total))
    return value, value is not None or flag in UNSET


def _also(fix: Fix, bench: _Bench, running: Running) -> tuple[list[Change], list[str]]:
    """The flags that change along with the fix, and what is lacking to compute them."""
    changes, lacking = [], []
    for flag, signal in fix.also:
        value = bench.value(signal)
        lacking += [] if value is not None else [signal.name]
        changes.append(Change(flag, _before(flag, bench, running)[0], None if value is None else float(round(value))))
    return changes, lacking


def _after(fix: Fix, bench: _Bench) -> tuple[Value, list[str]]:
    """The value within its bounds, and the names of the signals that are lacking to compute it or to bound it."""
    if not isinstance(fix.value, Signal):
        return fix.value, []
    value = bench.value(fix.value)
    if value is None:
        return None, [fix.value.name]
    least, most = (_bound(each, bench) for each in (fix.least, fix.most))
    lacking = [
        each.name for each, at in ((fix.least, least), (fix.most, most)) if isinstance(each, Signal) and at is None
    ]
    bounded = max(_rounded(value, fix), 0.0 if least is None else least)
    return float(bounded if most is None else min(bounded, most)), lacking


def _bound(bound: float | Signal | None, bench: _Bench) -> float | None:
    return bench.value(bound) if isinstance(bound, Signal) else bound


def _rounded(value: float, fix: Fix) -> float:
    if fix.rounding == "power_of_two_below":
        return float(2 ** math.floor(math.log2(value))) if value >= 1 else 1.0
    if fix.rounding == "hundredth_below":
        return math.floor(value * 100 + 1e-9) / 100
    return float(math.ceil(value - 1e-9) if fix.rounding == "up" else round(value))


def _moves(fix: Fix, before: Value, after: Value) -> bool:
    """Whether the proposal moves the running value the way the fix means; 0 stands for "off" where lower is meant."""
    if not isinstance(before, float) or not isinstance(after, int | float):
        return True
    if fix.direction == "lower":
        return before == 0 or after < before
    return after > before if fix.direction == "raise" else after != before


@lru_cache(maxsize=256)  # every fix asks
def command_in(launch: str) -> Command | None:
    """The launch command; None where none is known, or none can be read (a note has said so)."""
    try:
        return parse(launch) if launch else None
    except BadUsage:
        return None


def available(fix: Fix, version: str) -> bool:
    """Whether a release accepts the fix's flags or reads its variable; a release that is not known counts as yes."""
    if not all(_within(releases(flag), version) for flag in (fix.flag, *(flag for flag, _ in fix.also)) if flag):
        return False
    if fix.instead_of and release(version) and _within(releases(fix.instead_of), version):
        return False
    return _within(fix.versions, version)


def _within(ends: tuple[str, str], version: str) -> bool:
    first, last = map(release, ends)
    at = release(version)
    return not at or ((not first or first <= at) and (not last or at <= last))


def written(value: Value) -> str:
    """A value as it stands on a command line: counts whole, shares as they are."""
    if isinstance(value, float):
        return f"{value:g}" if value < 1 else f"{value:.0f}"
    return str(value)


def by_subject(running: Mapping[str, Running], subject: Subject) -> Running:
    """What is known of a subject's instance."""
    return running.get(dict(subject).get("instance", ""), Running())
