"""Fix + readings + running configuration -> concrete changes with their numbers.

Nothing here changes a server: what comes out is a proposal to read.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from diag.core.formatting import quantity
from diag.core.incident import Condition, Fix, Signal
from diag.core.lazy_regex import lazy
from diag.core.subjects import Subject
from diag.diagnosis.command_words import word
from diag.diagnosis.decision_table import holds
from diag.diagnosis.diagnose import Diagnosis, culprits
from diag.diagnosis.launch_values import given_values
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.quotes import Quote
from diag.knowledge.formulas import expanded
from diag.knowledge.signals import gpu_memory_total, running_value, runs_on_cpu
from diag.vllm.flags.registry import UNSET, default, release, releases

Value = float | str | None
OLDEST = (0, 8, 0)
"""The first release that is judged: a flag that all since have is accepted, whatever runs."""
_WORD = lazy(r"[\w.-]{0,40}")
"""What is shown of a launch command as it is: a plain word."""
_PLACE = lazy(r"((?:/[\w./-]*/)?)\{(\w+)\}((?:/[\w./-]*)?)")
"""What a text of a fix leaves to be filled in; with the path around it, which is one of its own for each value."""
_OF_SERVER = lazy(r"\{(log\w*|launch)\}")
"""What a fix's command needs to know of the server to be one."""
_UNSET = UNSET | {"--compilation-config", "--cudagraph-capture-sizes", "--max-cudagraph-capture-size"}


class FlagChange(NamedTuple):
    """One flag or variable from one value to another; None: not set, or not known.

    `assumed` is whether `before` is the release's own default, which nobody has contradicted.
    """

    name: str
    before: Value
    after: Value
    assumed: bool = False


class Proposal(NamedTuple):
    """A fix made concrete: `before` and `after` are the running and the proposed value (None: not set, not known).

    `needs` names what diag could not measure and has to be checked before the change; `computed` is whether `after`
    came from this server's numbers; `name` is what is changed, a command with everything filled in, and `text` the
    fix's own sentence, likewise. `changes` are the flags or the variable that it sets, its own first.
    """

    fix: Fix
    before: Value
    after: Value
    needs: tuple[str, ...]
    computed: bool
    name: str
    text: str = ""
    assumed: bool = False
    changes: tuple[FlagChange, ...] = ()

    @property
    def is_computed(self) -> bool:
        """Whether all of its numbers are known; one without a number is no offer, only a wish for telemetry."""
        values = [self.after] if isinstance(self.fix.value, Signal) else []
        return None not in [*values, *(change.after for change in self.changes if change.name != self.fix.name)]


class Running(NamedTuple):
    """What is known of a server beyond its samples: vLLM's version ("" unknown) and the command that started it.

    `whole` is whether all that was set is known, so that what nobody set runs at its release's default.
    """

    version: str = ""
    launch: str = ""
    whole: bool = False


def propose(
    diagnosis: Diagnosis, queries: QueryCache, running: Running, quotes: Sequence[Quote] = ()
) -> tuple[Proposal, ...]:
    """The applicable fixes of a present incident, in their order: the safest first."""
    names = (*(quotes[0].names if quotes else ()), *_launch(running))
    signals = _Signals(diagnosis, queries, names)
    fixes = [fix for fix in diagnosis.incident.fixes if not (_is_for_gpus(fix, signals) and signals.value(runs_on_cpu))]
    proposals = (_propose_one(fix, signals, running) for fix in fixes)
    return tuple(proposal for proposal in proposals if proposal is not None)


def _launch(running: Running) -> Subject:
    """The launch command as one word of a shell, where it is known."""
    return (("launch", shlex.quote(running.launch)),) if running.launch else ()


def _is_for_gpus(fix: Fix, found: "_Signals") -> bool:
    """Whether the GPUs of a server decide on it, or give it its number; what is wrong with a GPU itself stays so."""
    if "gpu" in found.diagnosis.incident.per:
        return False
    signals = (*fix.signals, *(condition.signal for condition in fix.only_if))
    return any("diag_gpu_" in expanded(signal.promql) for signal in signals)


class _Signals:
    """The values of signals for one subject at the instant that the diagnosis reports."""

    def __init__(self, diagnosis: Diagnosis, queries: QueryCache, names: Subject) -> None:
        """`names` is what stands in a fix for the place in the log and for the launch command, as words of a shell."""
        self.diagnosis = diagnosis
        self.queries = queries
        self.names = names

    def value(self, signal: Signal) -> float | None:
        incident, window = self.diagnosis.incident, self.queries.window(self.diagnosis.incident)
        row = self.queries.ask(signal, incident.per, window).of(self.diagnosis.subject)
        value = math.nan if row is None else float(row[self.diagnosis.reported])
        return None if math.isnan(value) else value

    def labels(self, fix: Fix) -> dict[str, list[str]]:
        """The labels of the subject and of what the conditions of a fix name, as words of a shell, and the names."""
        values = {name: [word(name, value)] for name, value in self.diagnosis.subject}
        values |= {name: [value] for name, value in self.names}
        for condition in fix.only_if if "{" in fix.command else ():
            for labels, _ in culprits(condition.signal, self.diagnosis, self.queries):
                for name, value in labels.items():
                    values.setdefault(name, []).append(word(name, value))
        return {name: list(dict.fromkeys(found)) for name, found in values.items()}


def _propose_one(fix: Fix, signals: _Signals, running: Running) -> Proposal | None:
    """The proposal, or None where the fix does not apply here."""
    met = [(condition, _met(condition, signals, running)) for condition in fix.only_if]
    if any(held is False for _, held in met) or not available(fix, running.version):
        return None
    if not dict(signals.names).keys() >= set(_OF_SERVER.findall(fix.command)):
        return None
    if fix.while_it_lasts and not signals.diagnosis.ongoing:
        return None
    needs = [condition.signal.name for condition, held in met if held is None]
    needs += [] if _in_all(fix) or fix.value is None or release(running.version) else ["the vLLM version"]
    before, assumed = _before(fix, signals, running)
    after, lacking = _after(fix, signals, running)
    if not _moves(fix, before, after):
        return None
    if fix.direction and before is None and fix.flag and not assumed:
        lacking.append(f"the current {fix.flag}")
    also, lost = _also(fix, signals, running)
    labels = signals.labels(fix)
    own = (FlagChange(fix.name, before, after, assumed),) if fix.flag or fix.environment else ()
    return Proposal(
        fix=fix,
        before=before,
        after=after,
        needs=tuple(dict.fromkeys((*needs, *lacking, *lost))),
        computed=isinstance(fix.value, Signal) and after is not None,
        name=_filled(fix.name, "?" if after is None else written(after), labels),
        text=_filled(fix.change, _prose(fix, after), labels),
        assumed=assumed,
        changes=(*own, *also),
    )


def _filled(text: str, value: str, labels: Mapping[str, Sequence[str]]) -> str:
    """A text with the labels and the value in the places that are left for them."""
    known = {**labels, "value": [value]}
    return _PLACE.sub(lambda at: " ".join(at[1] + each + at[3] for each in known.get(at[2], [f"{{{at[2]}}}"])), text)


def _prose(fix: Fix, after: Value) -> str:
    """The value as a sentence has it, with its unit."""
    if isinstance(fix.value, Signal) and isinstance(after, float):
        return quantity(after, fix.value.unit)
    return "?" if after is None else written(after)


def _met(condition: Condition, signals: _Signals, running: Running) -> bool | None:
    value = _value(condition.signal, signals, running)
    if value is None:
        return None
    return bool(holds(np.array([value]), condition.op, signals.queries.contract.limit(condition.limit))[0] == 1)


def _value(signal: Signal, signals: _Signals, running: Running) -> float | None:
    """A signal's value; of a flag that no source publishes, what the command gives: 1 where that is no number.

    Where all that was set is known, and the flag is not, its default; 0 where there is no such bound then.
    """
    value, flag = signals.value(signal), signal.name
    if value is not None or not flag.startswith("--"):
        return value
    given = given_values(running.launch).get(flag)
    if given is not None:
        return given if isinstance(given, float) else 1.0
    if not running.whole:
        return None
    if flag in _UNSET or not _within(releases(flag), running.version):
        return 0.0
    return default(flag, running.version, signals.value(gpu_memory_total))


def _before(fix: Fix, signals: _Signals, running: Running) -> tuple[Value, bool]:
    """The running value of a flag or a variable, and whether it is only the release's default."""
    name = fix.flag or fix.environment
    if not name:
        return None, False
    value = signals.value(running_value(name.removeprefix("--").replace("-", "_"))) if fix.flag else None
    given = given_values(running.launch).get(name) if value is None else value
    if isinstance(given, float) or (given is not None and _WORD.fullmatch(given)):
        return given, False
    value = default(name, running.version, signals.value(gpu_memory_total))
    return value, value is not None or name in UNSET or (running.whole and name in _UNSET)


def _also(fix: Fix, signals: _Signals, running: Running) -> tuple[list[FlagChange], list[str]]:
    """The flags that change along with the fix, and what is lacking to compute them."""
    changes, lacking = [], []
    for flag, signal in fix.also:
        value = signals.value(signal)
        lacking += [] if value is not None else [signal.name]
        before, _ = _before(fix._replace(flag=flag), signals, running)
        after = None if value is None else float(round(value))
        changes += [FlagChange(flag, before, after)] if after is None or after != before else []
    return changes, lacking


def _after(fix: Fix, signals: _Signals, running: Running) -> tuple[Value, list[str]]:
    """The value within its bounds, and the names of the signals that are lacking to compute it or to bound it."""
    if not isinstance(fix.value, Signal):
        return fix.value, []
    value = signals.value(fix.value)
    if value is None:
        return None, [fix.value.name]
    least, most = (_bound(bound, signals, running) for bound in (fix.least, fix.most))
    bounds = ((fix.least, least), (fix.most, most))
    lacking = [bound.name for bound, at in bounds if isinstance(bound, Signal) and at is None]
    bounded = max(_rounded(value, fix), 0.0 if least is None else least)
    return float(bounded if most is None else min(bounded, most)), lacking


def _bound(bound: float | Signal | None, signals: _Signals, running: Running) -> float | None:
    return _value(bound, signals, running) if isinstance(bound, Signal) else bound


def _rounded(value: float, fix: Fix) -> float:
    if fix.rounding == "power_of_two_below":
        return float(2 ** math.floor(math.log2(value))) if value >= 1 else 1.0
    if fix.rounding == "hundredth_below":
        return math.floor(value * 100 + 1e-9) / 100
    return float(math.ceil(value - 1e-9) if fix.rounding == "up" else round(value))


def _moves(fix: Fix, before: Value, after: Value) -> bool:
    """Whether the proposal moves the running value the way the fix means; 0 stands for "off" where lower is meant."""
    if not isinstance(before, float) or not isinstance(after, int | float):
        return before is None or written(before) != written(after)
    if fix.direction == "lower":
        return before == 0 or after < before
    return after > before if fix.direction == "raise" else after != before


def _in_all(fix: Fix) -> bool:
    """Whether every release that is judged accepts its flags; a variable that is not read is refused by none."""
    ends = [releases(fix.flag, fix.versions) if fix.flag else ("", ""), *(releases(flag) for flag, _ in fix.also)]
    return all(release(first) <= OLDEST and not last for first, last in ends)


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
