"""Whether the signals that a cure should move did move, and how far."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from diag.core.incident import OPPOSITE, Condition, Incident
from diag.core.subjects import Subject
from diag.diagnosis.decision_table import holds
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.query_cache import QueryCache
from diag.knowledge.signals import (
    progress,
    requests_finished,
    requests_in_flight_peak,
    requests_running,
    requests_running_median,
)
from diag.knowledge.signals.features import draft_tokens
from diag.knowledge.signals.gpu import serving
from diag.knowledge.signals.peers import tokens_of_peers
from diag.verify.changes import Tried
from diag.verify.snapshot import Snapshot, renamed

CLEAR = 1 / 3
"""Of the signal's size: evictions differ by 0.21 between two runs of one load (kv_cascade, kv_cascade_base), and by
0.49 where a watermark halves them (cure_watermark)."""
WORK = (
    *(progress, requests_finished, requests_in_flight_peak, requests_running, requests_running_median),
    *(draft_tokens, serving, tokens_of_peers),
)
"""What incidents ask for so that there is enough to judge by: more of it is no symptom."""


@dataclass(frozen=True)
class SignalDelta:
    """A condition that the cure should bring about, and its signal's mean over the windows judged on both sides."""

    condition: Condition
    limit: float
    before: float | None
    after: float | None

    @property
    def met(self) -> bool | None:
        """Whether it holds after; None where that was not measured."""
        if self.after is None:
            return None
        return bool(holds(np.array([self.after]), self.condition.op, self.limit)[0] == 1)

    @property
    def way(self) -> float:
        """How far it went as a share of its size, or of its way to the limit; negative where it went away from that."""
        if self.before is None or self.after is None:
            return 0.0
        size = max(abs(self.before), abs(self.after), abs(self.before - self.limit))
        fell = (self.before - self.after) / size if size else 0.0
        return fell if self.condition.op.startswith("<") else -fell


def expected(incident: Incident, fixes: Sequence[Tried]) -> tuple[Condition, ...]:
    """What the fixes that were tried promise, then that the symptoms no longer hold; one condition of each signal."""
    promised = dict.fromkeys(each for one in fixes for each in one.fix.expects)
    told = {each.signal for each in promised}
    others = (each for each in incident.symptoms if each.signal not in {*told, *WORK})
    return (*promised, *(replace(each, op=OPPOSITE[each.op]) for each in others))


def signal_deltas(
    one: Diagnosis, conditions: Sequence[Condition], sides: Sequence[tuple[Snapshot, str]]
) -> tuple[SignalDelta, ...]:
    """Each condition before and after; `sides` are the two looks, and what the server is called in each.

    Both are asked over windows of one length, or a count would grow with them.
    """
    spans = [side.asked.span for side, _ in sides if side.asked.span > 0]
    seconds = min([max(side.asked.window(one.incident).seconds for side, _ in sides), *spans])
    limit = sides[0][0].asked.contract.limit
    return tuple(
        SignalDelta(each, limit(each.limit), *(_mean(each, one, side.asked, name, seconds) for side, name in sides))
        for each in conditions
    )


def _mean(condition: Condition, one: Diagnosis, asked: QueryCache, instance: str, seconds: float) -> float | None:
    subject: Subject = renamed(one.subject, instance)
    row = asked.ask(condition.signal.promql, one.incident.per, asked.holding(seconds)).of(subject)
    return None if row is None or np.isnan(row).all() else float(np.nanmean(row))
