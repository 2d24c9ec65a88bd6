"""Two looks -> a verdict for each incident that was there before, and one for the change as a whole.

Each look is judged by the doctor's own machinery. An incident is cured where none of the windows after shows it, at the
same load, and nothing as bad came instead; where it is still there, the first of its signals that moved clearly says
whether it is better or worse.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from diag.core.incident import seconds
from diag.core.subjects import Subject
from diag.diagnosis.decision_table import holds
from diag.diagnosis.diagnose import RANK, Diagnosis, Reading
from diag.diagnosis.report import Finding, Report
from diag.verify.changes import SettingChange, Tried, changes, models, tried
from diag.verify.load import Load, differences, load
from diag.verify.signal_deltas import CLEAR, SignalDelta, expected, signal_deltas
from diag.verify.snapshot import Snapshot, renamed
from diag.verify.user_metrics import UserMetric, user_metrics

Verdict = Literal["cured", "better", "no effect", "worse", "not comparable"]
WORST: tuple[Verdict, ...] = ("worse", "not comparable", "no effect", "better", "cured")
RESTARTS = (
    "max by (instance) (changes(process_start_time_seconds[$window]))"
    " + max by (instance) (resets(vllm:generation_tokens_total[$window]))"
    " or max by (instance) (resets(vllm:generation_tokens_total[$window]))"
)
STARTED = "max by (instance) (last_over_time(process_start_time_seconds[$window]))"
FRESH = 60.0
"""Seconds after its start for which a server's caches are cold (judged)."""


@dataclass(frozen=True)
class IncidentOutcome:
    """What became of one incident; `because` is the sentence that gives the reason."""

    before: Diagnosis
    after: Diagnosis | None
    verdict: Verdict
    because: str
    signal_deltas: tuple[SignalDelta, ...]
    tried: tuple[Tried, ...]


@dataclass(frozen=True)
class ServerComparison:
    """One server before and after, by its names; `came` is what is wrong only now.

    down: why it does not serve after, "" where it does. unlike: what else makes the two looks incomparable. blind: why
    nobody can tell what was wrong before. notes: what has to be known to read the numbers.
    """

    before: str
    after: str
    load: tuple[Load, Load]
    down: str
    unlike: tuple[str, ...]
    changes: tuple[SettingChange, ...]
    user_metrics: tuple[UserMetric, ...]
    outcomes: tuple[IncidentOutcome, ...]
    came: tuple[Diagnosis, ...]
    blind: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why before and after cannot be compared."""
        return (*((self.down,) if self.down else ()), *self.unlike)

    @property
    def first(self) -> IncidentOutcome | None:
        """The worst outcome of the gravest incidents, without those that only followed from another one."""
        own = [each for each in self.outcomes if each.before.explained_by is None] or self.outcomes
        gravest = max((RANK[each.before.severity] for each in own), default=0)
        grave = (each for each in own if RANK[each.before.severity] == gravest)
        return min(grave, key=lambda each: WORST.index(each.verdict), default=None)

    @property
    def verdict(self) -> Verdict:
        """That of the first; worse where only something new is wrong."""
        if self.first:
            return self.first.verdict
        return "worse" if self.broken or (self.came and not self.reasons) else "not comparable"

    @property
    def broken(self) -> Diagnosis | None:
        """What came and stopped the server: no load before excuses that."""
        critical = (each for each in self.came if each.severity == "critical")
        return next(critical, None) if self.down else None

    @property
    def is_bystander(self) -> bool:
        """Whether nothing was wrong with it, before or after."""
        return not (self.outcomes or self.came or self.down or self.blind)

    @property
    def price(self) -> tuple[UserMetric, ...]:
        """What got worse for users; nothing where it cannot be compared."""
        return () if self.reasons else tuple(each for each in self.user_metrics if each.change == "worse")


@dataclass(frozen=True)
class Verification:
    """The whole comparison, the worst server first; `alone` are servers that only one side has."""

    before: Report
    after: Report
    verdict: Verdict
    servers: tuple[ServerComparison, ...]
    alone: tuple[str, ...]


def compare(before: Snapshot, after: Snapshot) -> Verification:
    """Compare two looks, server by server: by name, or whatever they are called where each side has only one."""
    pairs = list(_pairs(before.instances, after.instances))
    servers = [_server((before, old), (after, new)) for old, new in pairs]
    gone = set(before.instances) - {old for old, _ in pairs}
    new = set(after.instances) - {name for _, name in pairs}
    alone = [*(f"{each} is not there after" for each in gone), *(f"{each} was not there before" for each in new)]
    concerned = [each for each in servers if not each.is_bystander]
    verdicts: list[Verdict] = [each.verdict for each in concerned or servers]
    if gone or not pairs:
        verdicts.append("not comparable")
    return Verification(
        before.report,
        after.report,
        min(verdicts, key=WORST.index),
        tuple(sorted(servers, key=lambda each: (each.is_bystander, WORST.index(each.verdict)))),
        tuple(sorted(alone)),
    )


def _pairs(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[str, str]]:
    if len(before) == len(after) == 1:
        yield before[0], after[0]
        return
    yield from ((each, each) for each in before if each in after)


def _server(one: tuple[Snapshot, str], other: tuple[Snapshot, str]) -> ServerComparison:
    (before, old), (after, new) = one, other
    loads = load(before, old), load(after, new)
    down = _down(after, new, loads[0])
    compared = ServerComparison(
        before=old,
        after=new,
        load=loads,
        down=down,
        unlike=tuple(_unlike(one, other, () if down else loads)),
        changes=changes(before, old, after, new),
        user_metrics=user_metrics((before, old, loads[0]), (after, new, loads[1])),
        outcomes=(),
        came=tuple(_came(before, old, after, new)),
        blind=_blind(before.report, old),
        notes=tuple(_notes(before, after, new)),
    )
    ill = [each for each in before.report.present if dict(each.diagnosis.subject).get("instance") == old]
    harmful = [each for each in ill if each.diagnosis.severity != "info"]
    return replace(compared, outcomes=tuple(_outcome(each, before, after, compared) for each in harmful or ill))


def _blind(report: Report, instance: str) -> tuple[str, ...]:
    """Why nobody can tell what is wrong with a server, where nothing is known of its progress."""
    if any(dict(each.subject).get("instance") == instance for each in report.progress):
        return ()
    return tuple(each for each in report.blind if each.startswith((f"{instance}:", f"{instance} ")))


def _down(after: Snapshot, new: str, earlier: Load) -> str:
    """Why a server does no work after; that it has none to do matters only where it had some before."""
    states = [each for each in after.report.progress if dict(each.subject).get("instance") == new]
    if not states:
        return "what the server does after cannot be told: " + "; ".join(_blind(after.report, new))
    ill = [each for each in states if each.state in ("dead", "starting", "stalled")]
    if not ill and earlier.served and all(each.state == "idle" for each in states):
        ill = states
    return f"the server is {ill[0].state} after: {ill[0].reason}" if ill else ""


def _unlike(one: tuple[Snapshot, str], other: tuple[Snapshot, str], loads: Sequence[Load]) -> Iterator[str]:
    """What makes two looks at a server two different things."""
    served = [models(*each) for each in (one, other)]
    if all(served) and served[0] != served[1]:
        yield f"another model is served: {served[0]} -> {served[1]}"
    for (side, name), when in ((one, "before"), (other, "after")):
        if side.value(RESTARTS, name):
            yield f"the server was restarted within the look {when}: take one from after its start"
    if loads:
        yield from differences(*loads)


def _notes(before: Snapshot, after: Snapshot, new: str) -> Iterator[str]:
    began, start = after.report.observed.start, after.value(STARTED, new)
    if began < before.report.observed.start:
        yield "what was named as after is older than what was named as before: is that their order?"
    if start and began - start < FRESH:
        yield f"it had started {max(began - start, 0):.0f} s before the look after: cold caches are in those numbers"


def _came(before: Snapshot, old: str, after: Snapshot, new: str) -> Iterator[Diagnosis]:
    """What is wrong now and certainly was not before, without what only follows from something else."""
    for each in (found.diagnosis for found in after.report.present):
        mine = dict(each.subject).get("instance") == new
        if mine and each.severity != "info" and each.explained_by is None:
            earlier = _same(each.incident.id, renamed(each.subject, old), before.report)
            if earlier is None or earlier.state == "absent":
                yield each


def _same(incident: str, subject: Subject, report: Report) -> Diagnosis | None:
    found = (each.diagnosis for each in report.findings)
    return next((each for each in found if each.incident.id == incident and each.subject == subject), None)


def _outcome(finding: Finding, before: Snapshot, after: Snapshot, server: ServerComparison) -> IncidentOutcome:
    one = finding.diagnosis
    later = _same(one.incident.id, renamed(one.subject, server.after), after.report)
    fixes = tried(finding, server.changes)
    signals = signal_deltas(one, expected(one.incident, fixes), ((before, server.before), (after, server.after)))
    return IncidentOutcome(one, later, *_decided(one, later, signals, server), signals, fixes)


def _decided(
    one: Diagnosis, later: Diagnosis | None, signals: Sequence[SignalDelta], server: ServerComparison
) -> tuple[Verdict, str]:
    """The verdict, and why."""
    if server.down and not server.unlike and later and later.state == "present":
        return "no effect", "it is still there"
    if server.broken and RANK[server.broken.severity] > RANK[one.severity]:
        return "worse", f"{server.broken.incident.id} (critical) came: {server.down}"
    if server.reasons:
        return "not comparable", "; ".join(server.reasons)
    if not server.load[0].answered and (later is None or later.state != "present"):
        return "cured", "the server answers now"
    if later is None or (lost := _lost(one, later)):
        why = f"not measured after: {', '.join(lost)}" if later else "what it was found on is not there after"
        return "not comparable", why
    return _judged(one, later, signals, server)


def _judged(
    one: Diagnosis, later: Diagnosis, signals: Sequence[SignalDelta], server: ServerComparison
) -> tuple[Verdict, str]:
    """The verdict on two looks that can be compared."""
    worst = max(server.came, key=lambda each: RANK[each.severity], default=None)
    gone = later.state == "absent" and not any(_held([each for each in later.symptoms if _is_own(each, later)]))
    if worst and RANK[worst.severity] > RANK[one.severity]:
        return "worse", f"{worst.incident.id} ({worst.severity}) came"
    if not gone:
        return _left(later, signals)
    if worst and worst.severity == one.severity:
        return "no effect", f"{worst.incident.id} ({worst.severity}) took its place"
    if too_early := _too_early(one, server.load[1].seconds):
        return "not comparable", too_early
    return "cured", f"none of {len(later.instants)} windows after shows it"


def _left(later: Diagnosis, signals: Sequence[SignalDelta]) -> tuple[Verdict, str]:
    """The verdict where it is still there: by the first signal that moved clearly."""
    clear = next((each for each in signals if abs(each.way) >= CLEAR), None)
    still = "it is still there" if later.state == "present" else "its symptoms are still there, under another name"
    if clear is None:
        return "no effect", f"{still}, and no signal of it moved by more than two runs of one load differ"
    name = clear.condition.signal.name
    return ("better", f"{still}; {name} moved towards its limit") if clear.way > 0 else ("worse", f"{name} moved away")


def _lost(one: Diagnosis, later: Diagnosis) -> Sequence[str]:
    """The symptoms that were measured before and not after: an incident may hide behind them."""
    gone = {each.condition for each in later.symptoms if all(value is None for value in each.history)}
    lost = [each.condition.signal.name for each in one.symptoms if each.condition in gone and each.value is not None]
    return lost or (later.missing if later.state == "unknown" else ())


def _is_own(reading: Reading, one: Diagnosis) -> bool:
    """Whether it is a symptom, and not what tells the incident from a look-alike."""
    return reading.condition in one.incident.symptoms


def _held(readings: Sequence[Reading]) -> list[bool]:
    """Window by window, whether all of the readings hold at once."""
    values = (np.array([np.nan if value is None else value for value in each.history]) for each in readings)
    held = [holds(row, each.condition.op, each.limit) == 1 for row, each in zip(values, readings, strict=True)]
    return [bool(each) for each in np.logical_and.reduce(held)]


def _too_early(one: Diagnosis, lasted: float) -> str:
    """Why a look of so many seconds that does not show an incident tells nothing, "" where it does."""
    began = _began(one)
    if not one.ongoing and len(began) == 1:
        return "it had ended before the change, so that its absence after says nothing about that"
    least = 0.9 * seconds(one.incident.live_window)
    apart = max((after - before for before, after in pairwise(began)), default=0.0)
    if lasted < max(least, apart):
        rhythm = f"it came and went, {apart:.0f} s apart, and " if apart > least else ""
        return f"{rhythm}the look after lasted {lasted:.0f} s: look again for {max(1.2 * apart, least / 0.9):.0f} s"
    return ""


def _began(one: Diagnosis) -> list[float]:
    """When it began, each time: what comes and goes will come again."""
    held = pairwise([False, *_held(one.symptoms)])
    return [at for at, (then, now) in zip(one.instants, held, strict=True) if now and not then]
