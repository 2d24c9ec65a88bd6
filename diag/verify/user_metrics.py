"""What users feel, before and after, as exactly as a histogram knows it: between which of its edges."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from diag.knowledge.signals import (
    FINISHED,
    ITL,
    PREEMPTIONS,
    RUNNING,
    WAITING,
    counted,
    freezes_per_request,
    gauge,
)
from diag.verify.load import Load
from diag.verify.snapshot import Snapshot

RUN_TO_RUN = 1.5
"""Runs of one configuration under one load: 1,375 output tokens/s and 1,706-2,127 in three others (kv_cascade_base)."""

Wanted = Literal["lower", "higher", "either"]
Change = Literal["better", "worse", "same", "unknown"]


@dataclass(frozen=True)
class Bounds:
    """A value that lies above `least` and at or below `most`; both are the value itself where it is exact."""

    least: float
    most: float


@dataclass(frozen=True)
class UserMetric:
    """One line of what users feel; `change` is "worse" only where it cannot be the chance of a run."""

    name: str
    unit: str
    before: Bounds | None
    after: Bounds | None
    change: Change


@dataclass(frozen=True)
class _Asks:
    """What is asked: one number, or a quantile of histograms of which the page has one.

    `notable` is the least difference that anybody notices (judged).
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
TOKENS = "vllm:generation_tokens_total"
ASKS = (
    _Asks("output tokens / s", "1/s", "higher", 1.0, counted(TOKENS)),
    _Asks("time to first token p50", "seconds", "lower", 0.1, histograms=TTFT, quantile=0.5),
    _Asks("time to first token p95", "seconds", "lower", 0.1, histograms=TTFT, quantile=0.95),
    _Asks("gap between tokens p99.9", "seconds", "lower", 0.1, histograms=ITL, quantile=0.999),
    _Asks("longest gap between tokens", "seconds", "lower", 0.1, histograms=ITL, quantile=1.0),
    _Asks("freezes / finished request", "ratio", "lower", 0.1, freezes_per_request.promql),
    _Asks("whole answer (mean)", "seconds", "lower", 0.3, f"{counted(f'{E2E}_sum')} / ({counted(f'{E2E}_count')} > 0)"),
    _Asks("preemptions / finished request", "ratio", "lower", 0.1, f"{PREEMPTIONS} / ({FINISHED} >= 3)"),
    _Asks("requests waiting (mean)", "requests", "lower", 1.0, gauge("avg_over_time(", WAITING)),
    _Asks("requests running (mean)", "requests", "either", 1.0, gauge("avg_over_time(", RUNNING)),
)


def user_metrics(before: tuple[Snapshot, str, Load], after: tuple[Snapshot, str, Load]) -> tuple[UserMetric, ...]:
    """What the users of one server feel; each side is a look, the server's name in it, and its load."""
    lasted = before[2].seconds, after[2].seconds
    found = ((each, _span(each, *before), _span(each, *after)) for each in ASKS)
    return tuple(
        UserMetric(each.name, each.unit, one, two, _change(each, one, two, lasted)) for each, one, two in found
    )


def _span(asks: _Asks, side: Snapshot, instance: str, load: Load) -> Bounds | None:
    if asks.histograms:
        return next(filter(None, (_quantile(asks.quantile, side, instance, each) for each in asks.histograms)), None)
    value = side.value(asks.promql, instance)
    if value is not None and asks.unit == "1/s":
        value = value / load.seconds if load.seconds else None
    return None if value is None else Bounds(value, value)


def _quantile(share: float, side: Snapshot, instance: str, histogram: str) -> Bounds | None:
    """The bucket that the quantile lies in; the last one with anything in it for the longest of all."""
    promql = f"sum by (instance, le) (increase({histogram}_bucket[$window]))"
    return bucket(share, list(_edges(side.series(promql, instance))))


def _edges(series: Iterable[tuple[dict[str, str], float]]) -> Iterator[tuple[float, float]]:
    """Upper edge and count of each bucket, without what has no such number for an edge."""
    for labels, count in series:
        with suppress(KeyError, ValueError):
            if (edge := float(labels["le"])) > 0:
                yield edge, count


def bucket(share: float, counts: Sequence[tuple[float, float]]) -> Bounds | None:
    """Between which edges a share of all lies; `counts` are (upper edge, how many up to it), in any order."""
    edges = [(0.0, 0.0), *sorted(counts)]
    wanted = share * edges[-1][1]
    if not wanted:
        return None
    return next(Bounds(low, high) for (low, _), (high, count) in pairwise(edges) if count >= wanted * (1 - 1e-9))


def _change(asks: _Asks, before: Bounds | None, after: Bounds | None, lasted: tuple[float, float]) -> Change:
    """The longest of all grows with the time for which one looks."""
    if before is None or after is None or asks.wanted == "either":
        return "unknown"
    if asks.quantile == 1 and max(lasted) > RUN_TO_RUN * min(lasted):
        return "unknown"
    grew, fell = _beyond(before, after, asks.notable), _beyond(after, before, asks.notable)
    if not grew and not fell:
        return "same"
    return "better" if grew == (asks.wanted == "higher") else "worse"


def _beyond(low: Bounds, high: Bounds, notable: float) -> bool:
    """Whether the one is more than the other, by the least that both can be apart."""
    return not math.isinf(low.most) and high.least >= RUN_TO_RUN * low.most and high.least - low.most >= notable
