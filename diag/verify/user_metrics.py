"""User-visible latency and throughput, before and after, as exactly as a histogram knows it: by bucket edges."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from diag.knowledge.signals import ITL, stream_pauses_per_request
from diag.verify.load import Load
from diag.verify.snapshot import ServerSnapshot

RUN_TO_RUN = 1.5
"""Runs of one configuration under one load: 1,375 output tokens/s and 1,706-2,127 in three others (kv_cascade_base)."""

Wanted = Literal["lower", "higher"]
Change = Literal["better", "worse", "same", "unknown"]


@dataclass(frozen=True)
class Bounds:
    """A value above `lower` and at or below `upper`; both are the value itself where it is exact."""

    lower: float
    upper: float


@dataclass(frozen=True)
class UserMetric:
    """One user-visible metric; `change` is "worse" only where it cannot be the noise between two runs."""

    name: str
    unit: str
    before: Bounds | None
    after: Bounds | None
    change: Change


@dataclass(frozen=True)
class _Metric:
    """How a metric is measured: one number, or a quantile of the first of these histograms that the page has.

    `notable` is the least difference that a user notices (judged).
    """

    name: str
    unit: str
    wanted: Wanted
    notable: float
    promql: str = ""
    histograms: tuple[str, ...] = ()
    quantile: float = 0.0


TTFT = ("vllm:time_to_first_token_seconds",)
E2E = "vllm:e2e_request_latency_seconds"
E2E_MEAN = f"$end_to_end_seconds_total / (sum by ($by) (increase({E2E}_count[$window])) > 0)"
TOKENS = "vllm:generation_tokens_total"
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
    """User-visible latency and throughput of one server under its load before and after."""
    lasted = loads[0].seconds, loads[1].seconds
    measured = ((metric, _bounds(metric, before, lasted[0]), _bounds(metric, after, lasted[1])) for metric in METRICS)
    return tuple(
        UserMetric(metric.name, metric.unit, old, new, _change(metric, old, new, lasted))
        for metric, old, new in measured
    )


def _bounds(metric: _Metric, server: ServerSnapshot, seconds: float) -> Bounds | None:
    if metric.histograms:
        quantiles = (_quantile(metric.quantile, server, histogram) for histogram in metric.histograms)
        return next(filter(None, quantiles), None)
    value = server.value(metric.promql)
    if value is not None and metric.unit == "1/s":
        value = value / seconds if seconds else None
    return None if value is None else Bounds(value, value)


def _quantile(share: float, server: ServerSnapshot, histogram: str) -> Bounds | None:
    """The bucket that the quantile lies in; for the maximum the last one with anything in it."""
    return bucket(share, server.histogram(histogram))


def bucket(share: float, counts: Sequence[tuple[float, float]]) -> Bounds | None:
    """The bucket with a quantile; `counts` are (upper edge, observations up to it), in any order."""
    edges = [(0.0, 0.0), *sorted(counts)]
    wanted = share * edges[-1][1]
    if not wanted:
        return None
    return next(Bounds(low, high) for (low, _), (high, count) in pairwise(edges) if count >= wanted * (1 - 1e-9))


def _change(metric: _Metric, before: Bounds | None, after: Bounds | None, lasted: tuple[float, float]) -> Change:
    """Whether it got better or worse; a maximum grows with the time observed and is compared over like spans only."""
    if before is None or after is None:
        return "unknown"
    if metric.quantile == 1 and max(lasted) > RUN_TO_RUN * min(lasted):
        return "unknown"
    grew, fell = _exceeds(after, before, metric.notable), _exceeds(before, after, metric.notable)
    if not grew and not fell:
        return "same"
    return "better" if grew == (metric.wanted == "higher") else "worse"


def _exceeds(high: Bounds, low: Bounds, notable: float) -> bool:
    """Whether one value is clearly above another, by the least that both can be apart."""
    return not math.isinf(low.upper) and high.lower >= RUN_TO_RUN * low.upper and high.lower - low.upper >= notable
