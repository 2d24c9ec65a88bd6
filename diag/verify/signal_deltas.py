"""Whether the signals that a fix should move did move, and how far."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diag.core.incident import OPPOSITE, Condition, Incident
from diag.diagnosis.decision_table import holds
from diag.diagnosis.diagnose import Diagnosis
from diag.knowledge.signals import (
    progress,
    requests_finished,
    requests_in_flight_peak,
    requests_running,
    requests_running_median,
)
from diag.knowledge.signals.features import speculates
from diag.knowledge.signals.gpu import serving
from diag.knowledge.signals.peers import tokens_of_peers
from diag.verify.changes import AppliedFix
from diag.verify.snapshot import ServerSnapshot

CLEAR = 1 / 3
"""Of the signal's size: preemptions differ by 0.21 between two runs of one load (kv_cascade, kv_cascade_base), and by
0.49 where a watermark halves them (cure_watermark)."""
WORK = (
    *(progress, requests_finished, requests_in_flight_peak, requests_running, requests_running_median),
    *(speculates, serving, tokens_of_peers),
)
"""What incidents require so that there is enough traffic to judge: more of it is no symptom."""


@dataclass(frozen=True)
class SignalDelta:
    """A condition that the fix should bring about, and its signal's mean over the windows judged before and after."""

    condition: Condition
    threshold: float
    before: float | None
    after: float | None

    @property
    def met(self) -> bool | None:
        """Whether it holds after the change; None where that was not measured."""
        if self.after is None:
            return None
        return bool(holds(np.array([self.after]), self.condition.op, self.threshold)[0] == 1)

    @property
    def improvement(self) -> float:
        """How far it moved: a share of its size, or of its distance to the threshold; negative where it moved away."""
        if self.before is None or self.after is None:
            return 0.0
        size = max(abs(self.before), abs(self.after), abs(self.before - self.threshold))
        fell = (self.before - self.after) / size if size else 0.0
        return fell if self.condition.op.startswith("<") else -fell


def expected(incident: Incident, fixes: Sequence[AppliedFix]) -> tuple[Condition, ...]:
    """What the applied fixes should bring about, then that the symptoms no longer hold; one condition per signal."""
    effects = dict.fromkeys(condition for applied in fixes for condition in applied.fix.expects)
    taken = {condition.signal for condition in effects} | {*WORK}
    symptoms = (symptom for symptom in incident.symptoms if symptom.signal not in taken)
    return (*effects, *(symptom._replace(op=OPPOSITE[symptom.op]) for symptom in symptoms))


def signal_deltas(
    diagnosis: Diagnosis, conditions: Sequence[Condition], before: ServerSnapshot, after: ServerSnapshot
) -> tuple[SignalDelta, ...]:
    """Each condition before and after, over windows of one length, or a count would grow with them."""
    sides = (before, after)
    spans = [side.queries.span for side in sides if side.queries.span > 0]
    seconds = min([max(side.queries.window(diagnosis.incident).seconds for side in sides), *spans])
    threshold = before.queries.contract.limit
    return tuple(
        SignalDelta(
            condition, threshold(condition.limit), *(_mean(condition, diagnosis, side, seconds) for side in sides)
        )
        for condition in conditions
    )


def _mean(condition: Condition, diagnosis: Diagnosis, server: ServerSnapshot, seconds: float) -> float | None:
    rows = server.queries.ask(condition.signal, diagnosis.incident.per, server.queries.holding(seconds))
    row = rows.of(server.renamed(diagnosis.subject))
    return None if row is None or np.isnan(row).all() else float(np.nanmean(row))
