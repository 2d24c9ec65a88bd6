"""What became of one incident, and the reason in a sentence.

An incident is fixed where none of the windows after the change shows it, at the same load, and nothing as severe
replaced it; where it is still present, the first of its signals that moved clearly says whether it is better or worse.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from diag.core.formatting import quantity
from diag.core.incident import RANK, seconds
from diag.diagnosis.decision_table import Reading, holds
from diag.diagnosis.diagnose import Diagnosis
from diag.verify.comparison import ServerComparison, Verdict
from diag.verify.signal_deltas import CLEAR, SignalDelta

SHORTEST = 5.0
"""Seconds of an observation of which numbers can be compared: in fewer, single requests decide."""


def judge(
    before: Diagnosis, after: Diagnosis | None, signals: Sequence[SignalDelta], server: ServerComparison
) -> tuple[Verdict, str]:
    """The verdict, and why."""
    if server.down and not server.differences and after and after.state == "present":
        return "no effect", "still present"
    if server.broken and RANK[server.broken.severity] > RANK[before.severity]:
        return "worse", f"{server.broken.incident.id} (critical) appeared: {server.down}"
    if server.reasons:
        return "not comparable", "; ".join(server.reasons)
    if not server.loads[0].responded and (after is None or after.state != "present"):
        return "fixed", "the server responds now"
    if after is None or (lost := _lost(before, after)):
        return "not comparable", f"not measured after the change: {', '.join(lost) if after else 'the engine or GPU'}"
    return _judge_comparable(before, after, signals, server)


def _judge_comparable(
    before: Diagnosis, after: Diagnosis, signals: Sequence[SignalDelta], server: ServerComparison
) -> tuple[Verdict, str]:
    """The verdict on two snapshots that can be compared."""
    worst = max(server.new_incidents, key=lambda diagnosis: RANK[diagnosis.severity], default=None)
    if worst and RANK[worst.severity] > RANK[before.severity]:
        return "worse", f"{worst.incident.id} ({worst.severity}) appeared"
    if not (after.state == "absent" or after.brief) or any(_all_hold(_own_symptoms(after))):
        if server.loads[1].seconds < SHORTEST:
            return "not comparable", _covers_only(server.loads[1].seconds, seconds(before.incident.live_window))
        return _judge_persisting(after, signals)
    if worst and worst.severity == before.severity:
        return "no effect", f"{worst.incident.id} ({worst.severity}) replaced it"
    if too_short := _too_short(before, server.loads[1].seconds):
        return "not comparable", too_short
    return "fixed", f"absent in all {len(after.instants)} windows after the change"


def _judge_persisting(after: Diagnosis, signals: Sequence[SignalDelta]) -> tuple[Verdict, str]:
    """The verdict where it is still present: by the first signal that moved clearly."""
    clear = next((signal for signal in signals if abs(signal.improvement) >= CLEAR), None)
    still = "still present" if after.state == "present" else "its symptoms persist under another incident"
    if clear is None:
        return "no effect", f"{still}; no signal of it moved beyond the noise between two runs of one load"
    name = clear.condition.signal.name
    if clear.improvement > 0:
        return "better", f"{still}; {name} moved towards the threshold"
    return "worse", f"{name} moved away from the threshold"


def _lost(before: Diagnosis, after: Diagnosis) -> Sequence[str]:
    """The symptoms that were measured before and not after: the incident may hide behind them."""
    unmeasured = {symptom.condition for symptom in after.symptoms if all(value is None for value in symptom.history)}
    measured = (symptom for symptom in before.symptoms if symptom.value is not None)
    lost = [symptom.condition.signal.name for symptom in measured if symptom.condition in unmeasured]
    return lost or (after.missing if after.state == "unknown" else ())


def _own_symptoms(diagnosis: Diagnosis) -> list[Reading]:
    """Its symptoms without the conditions that only distinguish it from a look-alike."""
    return [symptom for symptom in diagnosis.symptoms if symptom.condition in diagnosis.incident.symptoms]


def _all_hold(readings: Sequence[Reading]) -> list[bool]:
    """Window by window, whether all of the readings hold at once."""
    values = (np.array([np.nan if value is None else value for value in reading.history]) for reading in readings)
    held = [holds(row, item.condition.op, item.limit) == 1 for row, item in zip(values, readings, strict=True)]
    return [bool(window) for window in np.logical_and.reduce(held)]


def _too_short(before: Diagnosis, lasted: float) -> str:
    """Why an observation of so many seconds without the incident proves nothing, "" where it does."""
    onsets = _onsets(before)
    if _had_ended(before) and len(onsets) == 1:
        return "it ended before the change, so its absence afterwards proves nothing"
    least = 0.9 * seconds(before.incident.live_window)
    apart = max((later - earlier for earlier, later in pairwise(onsets)), default=0.0)
    if lasted >= max(least, apart):
        return ""
    rhythm = f"it recurred after up to {quantity(apart, 'seconds')}; " if apart > least else ""
    return rhythm + _covers_only(lasted, max(1.2 * apart, least / 0.9))


def _covers_only(lasted: float, needed: float) -> str:
    return f"AFTER covers only {quantity(lasted, 'seconds')}: observe the server for {quantity(needed, 'seconds')}"


def _had_ended(before: Diagnosis) -> bool:
    """Whether it was over: one whose causes come and go has moments of health within a window."""
    healthy = 0.0 if before.until is None else before.instants[-1] - before.until
    return not before.ongoing and healthy > seconds(before.incident.live_window)


def _onsets(diagnosis: Diagnosis) -> list[float]:
    """When it began, each time: an intermittent incident will come back."""
    held = pairwise([False, *_all_hold(diagnosis.symptoms)])
    return [at for at, (earlier, now) in zip(diagnosis.instants, held, strict=True) if now and not earlier]
