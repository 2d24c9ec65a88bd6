"""Signals that a fix should move, and user-visible latency and throughput, before and after a change.

User metrics are as exact as a histogram: bucket edges.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from diag.core.incident import Condition, Incident
from diag.diagnosis.decision_table import holds
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.snapshot import ServerSnapshot
from diag.knowledge.signals import (
    ITL,
    TTFT,
    progress,
    requests_finished,
    requests_in_flight_peak,
    requests_running,
    requests_running_median,
    stream_pauses_per_request,
)
from diag.knowledge.signals.features import speculates
from diag.knowledge.signals.gpu import serving
from diag.knowledge.signals.peers import tokens_of_peers
from diag.verify.changes import AppliedFix
from diag.verify.load import Load

CLEAR = 1 / 3
"""Share of the signal's size: preemptions differ by 0.21 between two runs of one load (kv_cascade, kv_cascade_base), by
0.49 if a watermark halves them (cure_watermark)."""
WORK = (
    *(progress, requests_finished, requests_in_flight_peak, requests_running, requests_running_median),
    *(speculates, serving, tokens_of_peers),
)
"""Signals that incidents require so that there is enough traffic to judge: more of it is no symptom."""
RUN_TO_RUN = 1.5
"""Runs of one configuration under one load: 1,375 output tokens/s and 1,706-2,127 in three others (kv_cascade_base)."""


@dataclass(frozen=True)
class SignalDelta:
    """A condition that the fix should bring about, and its signal's mean over the windows judged before and after."""

    condition: Condition
    threshold: float
    before: float | None
    after: float | None

    @property
    def met(self) -> bool | None:
        """True if the condition holds after the change; None: not measured."""
        if self.after is None:
            return None
        return bool(holds(np.array([self.after]), self.condition.op, self.threshold)[0] == 1)

    @property
    def improvement(self) -> float:
        """The distance moved: a share of its size, or of its distance to the threshold; negative if it moved away."""
        if self.before is None or self.after is None:
            return 0.0
        size = max(abs(self.before), abs(self.after), abs(self.before - self.threshold))
        fell = (self.before - self.after) / size if size else 0.0
        return fell if self.condition.op.startswith("<") else -fell


def expected(incident: Incident, fixes: Sequence[AppliedFix]) -> tuple[Condition, ...]:
    """Return the effects of the applied fixes, then that the symptoms no longer hold; one condition per signal."""
    effects = dict.fromkeys(condition for applied in fixes for condition in applied.fix.expects)
    taken = {condition.signal for condition in effects} | {*WORK}
    symptoms = (symptom for symptom in incident.symptoms if symptom.signal not in taken)
    return (*effects, *(symptom.opposite for symptom in symptoms))


def signal_deltas(
    diagnosis: Diagnosis, conditions: Sequence[Condition], before: ServerSnapshot, after: ServerSnapshot
) -> tuple[SignalDelta, ...]:
    """Measure each condition before and after, over windows of one length: a count would grow with them."""
    sides = (before, after)
    spans = [side.queries.span for side in sides if side.queries.span > 0]
    seconds = min([max(side.queries.window(diagnosis.incident).seconds for side in sides), *spans])

    def mean(condition: Condition, server: ServerSnapshot) -> float | None:
        rows = server.queries.ask(condition.signal, diagnosis.incident.per, server.queries.holding(seconds))
        row = rows.of(server.renamed(diagnosis.subject))
        return None if row is None or np.isnan(row).all() else float(np.nanmean(row))

    threshold = before.queries.contract.limit
    return tuple(
        SignalDelta(condition, threshold(condition.limit), mean(condition, before), mean(condition, after))
        for condition in conditions
    )


# -- what users see ---------------------------------------------------------------------------------------------------

Wanted = Literal["lower", "higher"]
Change = Literal["better", "worse", "same", "unknown"]


@dataclass(frozen=True)
class Bounds:
    """A value above `lower` and at or below `upper`; both are the value itself if it is exact."""

    lower: float
    upper: float


@dataclass(frozen=True)
class UserMetric:
    """One user-visible metric; `change` is "worse" only if it exceeds the noise between two runs."""

    name: str
    unit: str
    before: Bounds | None
    after: Bounds | None
    change: Change


@dataclass(frozen=True)
class _Metric:
    """The measurement of a metric: one number, or a quantile of the first of these histograms that the page has.

    `notable` is the least difference that a user notices (judged).
    """

    name: str
    unit: str
    wanted: Wanted
    notable: float
    promql: str = ""
    histograms: tuple[str, ...] = ()
    quantile: float = 0.0


E2E = "vllm:e2e_request_latency_seconds"
E2E_MEAN = f"$end_to_end_seconds_total / (sum by ($by) (increase({E2E}_count[$window])) > 0)"
METRICS = (
    _Metric("output tokens / s", "1/s", "higher", 1.0, "$output_tokens"),
    _Metric("TTFT p50", "seconds", "lower", 0.1, histograms=TTFT, quantile=0.5),
    _Metric("TTFT p95", "seconds", "lower", 0.1, histograms=TTFT, quantile=0.95),
    _Metric("ITL p99.9", "seconds", "lower", 0.1, histograms=ITL, quantile=0.999),
    _Metric("ITL (maximum)", "seconds", "lower", 0.1, histograms=ITL, quantile=1.0),
    _Metric("stream pauses / finished request", "ratio", "lower", 0.1, stream_pauses_per_request.promql),
    _Metric("end-to-end latency (mean)", "seconds", "lower", 0.3, E2E_MEAN),
    _Metric("preemptions / finished request", "ratio", "lower", 0.1, "$preemptions / ($finished_requests >= 3)"),
)


def user_metrics(before: ServerSnapshot, after: ServerSnapshot, loads: tuple[Load, Load]) -> tuple[UserMetric, ...]:
    """Measure user-visible latency and throughput of one server under its load before and after."""
    lasted = loads[0].seconds, loads[1].seconds
    measured = []
    for metric in METRICS:
        old, new = _bounds(metric, before, lasted[0]), _bounds(metric, after, lasted[1])
        change: Change = "unknown"
        # a maximum grows with the time observed: it is compared over like spans only
        is_like = metric.quantile < 1 or max(lasted) <= RUN_TO_RUN * min(lasted)
        if old is not None and new is not None and is_like:
            grew, fell = _exceeds(new, old, metric.notable), _exceeds(old, new, metric.notable)
            better = grew == (metric.wanted == "higher")
            change = "same" if not grew and not fell else "better" if better else "worse"
        measured.append(UserMetric(metric.name, metric.unit, old, new, change))
    return tuple(measured)


def _bounds(metric: _Metric, server: ServerSnapshot, seconds: float) -> Bounds | None:
    if metric.histograms:
        quantiles = (bucket(metric.quantile, server.histogram(histogram)) for histogram in metric.histograms)
        return next(filter(None, quantiles), None)
    value = server.value(metric.promql)
    if value is not None and metric.unit == "1/s":
        value = value / seconds if seconds else None
    return None if value is None else Bounds(value, value)


def bucket(share: float, counts: Sequence[tuple[float, float]]) -> Bounds | None:
    """Return the bucket with a quantile: for the maximum, the last one that is not empty.

    `counts` are (upper edge, observations up to it), in any order.
    """
    edges = [(0.0, 0.0), *sorted(counts)]
    wanted = share * edges[-1][1]
    if not wanted:
        return None
    return next(Bounds(low, high) for (low, _), (high, count) in pairwise(edges) if count >= wanted * (1 - 1e-9))


def _exceeds(high: Bounds, low: Bounds, notable: float) -> bool:
    """Return True if one value is clearly above another, by the least distance that the bounds allow."""
    return not math.isinf(low.upper) and high.lower >= RUN_TO_RUN * low.upper and high.lower - low.upper >= notable
