"""Two snapshots -> a verdict for each incident that was present before, and one for the change as a whole.

Each snapshot is judged by the doctor's own machinery. An incident is fixed if no window after the change shows it, at
the same load, and no incident as severe replaced it; if it is still present, the first of its signals that moved
clearly decides whether it is better or worse.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from diag.core.formatting import quantity
from diag.core.incident import RANK, seconds
from diag.core.metric_prefix import GENERATED
from diag.diagnosis.decision_table import Reading
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Report, ServerSnapshot, Snapshot
from diag.verify.changes import (
    CLEAR,
    AppliedFix,
    SettingChange,
    SignalDelta,
    UserMetric,
    applied_fixes,
    changes,
    expected,
    gateway_limit,
    gateway_notes,
    models,
    signal_deltas,
    user_metrics,
)
from diag.verify.load import Load, differences, load

Verdict = Literal["fixed", "better", "no effect", "worse", "not comparable"]
WORST: tuple[Verdict, ...] = ("worse", "not comparable", "no effect", "better", "fixed")
RESTARTS = (
    "max by (instance) (changes(process_start_time_seconds[$window]))"
    f" + max by (instance) (resets({GENERATED}[$window]))"
    f" or max by (instance) (resets({GENERATED}[$window]))"
)
STARTED = "max by (instance) (last_over_time(process_start_time_seconds[$window]))"
COLD = 60.0
"""Seconds after its start for which a server's caches are cold (judged)."""
SHORTEST = 5.0
"""Seconds of an observation whose numbers can be compared: in a shorter one, single requests decide."""
CHRONIC = 300.0
"""Seconds after a change that show the end of a chronic incident, whose own window is longer."""


@dataclass(frozen=True)
class IncidentOutcome:
    """The outcome of one incident; `because` is the sentence that gives the reason for the verdict."""

    before: Diagnosis
    after: Diagnosis | None
    verdict: Verdict
    because: str
    signal_deltas: tuple[SignalDelta, ...]
    applied_fixes: tuple[AppliedFix, ...]


@dataclass(frozen=True)
class ServerComparison:
    """One server before and after, by its name on either side; `new_incidents` are present only after.

    down: why it does not serve after the change, "" if it does. differences: what else makes the two snapshots
    incomparable. unknown_before: why its state before is unknown. notes: caveats for a reader of the numbers.
    """

    before: str
    after: str
    loads: tuple[Load, Load]
    down: str
    differences: tuple[str, ...]
    changes: tuple[SettingChange, ...]
    user_metrics: tuple[UserMetric, ...]
    outcomes: tuple[IncidentOutcome, ...]
    new_incidents: tuple[Diagnosis, ...]
    unknown_before: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons why before and after cannot be compared."""
        return (*((self.down,) if self.down else ()), *self.differences)

    @property
    def first(self) -> IncidentOutcome | None:
        """The worst outcome among the most severe incidents, without those that another incident explains."""
        causes = [outcome for outcome in self.outcomes if outcome.before.explained_by is None] or self.outcomes
        highest = max((RANK[outcome.before.severity] for outcome in causes), default=0)
        most_severe = (outcome for outcome in causes if RANK[outcome.before.severity] == highest)
        return min(most_severe, key=lambda outcome: WORST.index(outcome.verdict), default=None)

    @property
    def verdict(self) -> Verdict:
        """The verdict of the first outcome; "worse" if there are new incidents only."""
        if self.first:
            return self.first.verdict
        return "worse" if self.broken or (self.new_incidents and not self.reasons) else "not comparable"

    @property
    def broken(self) -> Diagnosis | None:
        """The new incident that stopped the server: a different load before does not excuse that."""
        critical = (diagnosis for diagnosis in self.new_incidents if diagnosis.severity == "critical")
        return next(critical, None) if self.down else None

    @property
    def is_bystander(self) -> bool:
        """True if the server had no incident, before or after."""
        return not (self.outcomes or self.new_incidents or self.down or self.unknown_before)

    @property
    def trade_offs(self) -> tuple[UserMetric, ...]:
        """The metrics that got worse for users; empty if they cannot be compared."""
        return () if self.reasons else tuple(metric for metric in self.user_metrics if metric.change == "worse")


@dataclass(frozen=True)
class Verification:
    """The whole comparison, the worst server first; `unmatched` names the servers that only one side has."""

    before: Report
    after: Report
    verdict: Verdict
    servers: tuple[ServerComparison, ...]
    unmatched: tuple[str, ...]


def compare(before: Snapshot, after: Snapshot) -> Verification:
    """Compare two snapshots, server by server: by name, or whatever their names if each side has only one."""
    pairs = [(name, name) for name in before.instances if name in after.instances]
    if len(before.instances) == len(after.instances) == 1:
        pairs = [(before.instances[0], after.instances[0])]
    servers = [_compare_server(before.server(old), after.server(new)) for old, new in pairs]
    missing = set(before.instances) - {old for old, _ in pairs}
    new = set(after.instances) - {name for _, name in pairs}
    relevant = [server for server in servers if not server.is_bystander]
    verdicts: list[Verdict] = [server.verdict for server in relevant or servers]
    if missing or not pairs:
        verdicts.append("not comparable")
    unmatched = [f"{name} is missing after the change" for name in missing]
    unmatched += [f"{name} was missing before the change" for name in new]
    return Verification(
        before.report,
        after.report,
        min(verdicts, key=WORST.index),
        tuple(sorted(servers, key=lambda server: (server.is_bystander, WORST.index(server.verdict)))),
        tuple(sorted(unmatched)),
    )


def _compare_server(before: ServerSnapshot, after: ServerSnapshot) -> ServerComparison:
    loads = load(before), load(after)
    down = _down(after, loads[0])
    limit = gateway_limit(before, after, loads[0])
    incomparable: list[str] = []
    served = models(before), models(after)
    if all(served) and served[0] != served[1]:
        incomparable.append(f"a different model is served: {served[0]} -> {served[1]}")
    for server, when in ((before, "before"), (after, "after")):
        if server.value(RESTARTS):
            again = f"the server restarted during the observation {when} the change: observe it again once it is up"
            incomparable.append(again)
    notes: list[str] = []
    began, start = after.report.observed.start, after.value(STARTED)
    if began < before.report.observed.start:
        notes.append("AFTER was observed earlier than BEFORE: check the order of the two arguments")
    if start and began - start < COLD:
        up = f"{max(began - start, 0):.0f} s"
        notes.append(f"the server was up for only {up} when AFTER began: caches were still cold")
    causes = [finding.diagnosis for finding in after.present if finding.diagnosis.explained_by is None]
    compared = ServerComparison(
        before=before.instance,
        after=after.instance,
        loads=loads,
        down=down,
        differences=(*incomparable, *(() if down else differences(*loads, limited=bool(limit)))),
        changes=(*changes(before, after), *((limit,) if limit else ())),
        user_metrics=user_metrics(before, after, loads),
        outcomes=(),
        new_incidents=tuple(
            diagnosis
            for diagnosis in causes
            if diagnosis.is_alarming and ((old := _counterpart(diagnosis, before)) is None or old.state == "absent")
        ),
        unknown_before=_unknown_progress(before),
        notes=(*notes, *(gateway_notes(limit, after, loads) if limit else ())),
    )
    outcomes = []
    for finding in [item for item in before.present if item.diagnosis.is_alarming] or before.present:
        diagnosis, later = finding.diagnosis, _counterpart(finding.diagnosis, after)
        fixes = applied_fixes(finding, compared.changes)
        signals = signal_deltas(diagnosis, expected(diagnosis.incident, fixes), before, after)
        verdict = _judge(diagnosis, later, signals, compared)
        outcomes.append(IncidentOutcome(diagnosis, later, *verdict, signals, fixes))
    return replace(compared, outcomes=tuple(outcomes))


def _down(after: ServerSnapshot, load_before: Load) -> str:
    """Return why a server does no work after the change; that it is idle matters only if it had load before."""
    engines = [engine for engine in after.report.progress if after.owns(engine.subject)]
    if not engines:
        return "the state of the server after the change is unknown: " + "; ".join(_unknown_progress(after))
    for engine in engines:
        if engine.state in ("dead", "starting", "stalled", "faulted", "asleep"):
            return f"the server is {engine.state} after the change: {engine.reason}"
    if load_before.measured and all(engine.state == "idle" for engine in engines):
        return "the server is idle after the change: no request is in flight; observe it under the load of BEFORE"
    return ""


def _unknown_progress(server: ServerSnapshot) -> tuple[str, ...]:
    """Return why the state of a server cannot be judged, if its forward progress is unknown."""
    if any(server.owns(progress.subject) for progress in server.report.progress):
        return ()
    return tuple(reason.sentence for reason in server.report.not_judged if server.owns(reason.subject))


def _counterpart(diagnosis: Diagnosis, other: ServerSnapshot) -> Diagnosis | None:
    """Return the diagnosis of the same incident on the same engine or GPU of the other snapshot."""
    incident, subject = diagnosis.incident.id, other.renamed(diagnosis.subject)
    candidates = (finding.diagnosis for finding in other.report.findings)
    return next((found for found in candidates if found.incident.id == incident and found.subject == subject), None)


# -- the verdict on one incident --------------------------------------------------------------------------------------


def _judge(
    before: Diagnosis, after: Diagnosis | None, signals: Sequence[SignalDelta], server: ServerComparison
) -> tuple[Verdict, str]:
    """Return the verdict, and why."""
    if server.down and not server.differences and after and after.state == "present":
        return "no effect", "still present"
    if server.broken and RANK[server.broken.severity] > RANK[before.severity]:
        return "worse", f"{server.broken.incident.id} (critical) appeared: {server.down}"
    if server.reasons:
        return "not comparable", "; ".join(server.reasons)
    if not server.loads[0].responded and (after is None or after.state != "present"):
        return "fixed", "the server responds now"
    if after is None:
        return "not comparable", "not measured after the change: the engine or GPU"
    # the incident may hide behind symptoms that were measured before and are not after
    unmeasured = {symptom.condition for symptom in after.symptoms if all(value is None for value in symptom.history)}
    measured = (symptom.condition for symptom in before.symptoms if symptom.value is not None)
    lost = [condition.signal.name for condition in measured if condition in unmeasured]
    if lost := lost or [*(after.missing if after.state == "unknown" else ())]:
        return "not comparable", f"not measured after the change: {', '.join(lost)}"

    # the two snapshots can be compared
    worst = max(server.new_incidents, key=lambda diagnosis: RANK[diagnosis.severity], default=None)
    if worst and RANK[worst.severity] > RANK[before.severity]:
        return "worse", f"{worst.incident.id} ({worst.severity}) appeared"
    # without the conditions that only rule a look-alike out
    own_symptoms = [symptom for symptom in after.symptoms if symptom.condition in after.incident.symptoms]
    if not (after.state == "absent" or after.brief) or any(_all_hold(own_symptoms)):
        if server.loads[1].seconds < SHORTEST:
            return "not comparable", _covers_only(server.loads[1].seconds, _least_seconds(before))
        clear = next((signal for signal in signals if abs(signal.improvement) >= CLEAR), None)
        still = "still present" if after.state == "present" else "its symptoms persist under another incident"
        if clear is None:
            return "no effect", f"{still}; no signal of it moved beyond the noise between two runs of one load"
        if clear.improvement > 0:
            return "better", f"{still}; {clear.condition.signal.name} moved towards the threshold"
        return "worse", f"{clear.condition.signal.name} moved away from the threshold"
    if worst and worst.severity == before.severity:
        return "no effect", f"{worst.incident.id} ({worst.severity}) replaced it"
    if too_short := _too_short(before, server.loads[1].seconds):
        return "not comparable", too_short
    windows = len(after.instants)
    return "fixed", f"absent {f'in all {windows} windows' if windows > 1 else 'in the window'} after the change"


def _all_hold(readings: Sequence[Reading]) -> list[bool]:
    """Return for each window whether all of the readings hold at once."""
    held = ([reading.met_by(value) for value in reading.history] for reading in readings)
    return [all(window) for window in zip(*held, strict=True)]


def _least_seconds(before: Diagnosis) -> float:
    """Return the seconds after a change that prove something; a chronic incident is judged over all of them."""
    return min(seconds(before.incident.live_window), CHRONIC)


def _too_short(before: Diagnosis, lasted: float) -> str:
    """Return why an observation of so many seconds without the incident proves nothing, "" if it does.

    An intermittent incident will come back: it has to be absent for as long as between two onsets. An incident that was
    over before the change proves nothing; one whose causes come and go is healthy at times within a window.
    """
    live = _least_seconds(before)
    held = pairwise([False, *_all_hold(before.symptoms)])
    onsets = [at for at, (earlier, now) in zip(before.instants, held, strict=True) if now and not earlier]
    healthy = 0.0 if before.until is None else before.instants[-1] - before.until
    if not before.ongoing and healthy > live and len(onsets) == 1:
        return "it ended before the change, so its absence afterwards proves nothing"
    least = 0.9 * live
    apart = max((later - earlier for earlier, later in pairwise(onsets)), default=0.0)
    if lasted >= max(least, apart):
        return ""
    rhythm = f"it recurred after up to {quantity(apart, 'seconds')}; " if apart > least else ""
    return rhythm + _covers_only(lasted, max(1.2 * apart, least / 0.9))


def _covers_only(lasted: float, needed: float) -> str:
    return f"AFTER covers only {quantity(lasted, 'seconds')}: observe the server for {quantity(needed, 'seconds')}"
