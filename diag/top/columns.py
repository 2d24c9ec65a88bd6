"""What the view shows of each server beside its verdict: numbers by expressions over its last samples."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from diag.core.subjects import Floats, Instants
from diag.diagnosis.query_cache import QueryCache
from diag.knowledge.signals import ITL, RUNNING, WAITING, kv_cache_usage_peak

INSTANCE = ("instance",)
SERVING = " unless on (instance, gpu) $gpus_not_serving"
NOW, MINUTE = 15.0, 60.0
"""Seconds: of what changes with every scrape, and of what needs some events."""
TTFT = ("vllm:time_to_first_token_seconds",)
REASONS = 'reason!~"gpu_idle|applications_clocks"'
THROTTLED = (
    f"max by (instance, gpu, reason) (max_over_time(diag_gpu_throttle_active{{{REASONS}}}[$window]){SERVING}"
    f" or rate(diag_gpu_throttle_seconds_total{{{REASONS}}}[$window]){SERVING}) > 0"
)
"""Why the clocks of each GPU are held down, but for what idleness or a person asked for."""


def _percentile(share: float, histograms: tuple[str, ...]) -> str:
    """A quantile of the first of these histograms that a server has."""
    quantiles = (f"histogram_quantile({share}, sum by ($by, le) (rate({name}_bucket[$window])))" for name in histograms)
    return " or ".join(quantiles)


class ServerMeasure(NamedTuple):
    """A number of each server; `seconds` of samples that it is made of, `unit` as signals have them."""

    title: str
    unit: str
    promql: str
    seconds: float = NOW


MEASURES: Mapping[str, ServerMeasure] = {
    "running": ServerMeasure("requests running", "requests", f"sum by ($by) (last_over_time({RUNNING}[$window]))"),
    "waiting": ServerMeasure("requests waiting", "requests", f"sum by ($by) (last_over_time({WAITING}[$window]))"),
    "kv": ServerMeasure(kv_cache_usage_peak.name, "share", kv_cache_usage_peak.promql),
    "tokens": ServerMeasure("output tokens / s", "", "sum by ($by) (rate(vllm:generation_tokens_total[$window]))"),
    "ttft50": ServerMeasure("TTFT p50", "seconds", _percentile(0.5, TTFT), MINUTE),
    "ttft95": ServerMeasure("TTFT p95", "seconds", _percentile(0.95, TTFT), MINUTE),
    "itl50": ServerMeasure("ITL p50", "seconds", _percentile(0.5, ITL), MINUTE),
    "itl95": ServerMeasure("ITL p95", "seconds", _percentile(0.95, ITL), MINUTE),
    "preemptions": ServerMeasure("preemptions / min", "", "$preemptions", MINUTE),
    "power": ServerMeasure(
        "GPU power",
        "watts",
        f"sum by ($by) (last_over_time(diag_gpu_power_watts[$window]){SERVING})",
    ),
    "clock": ServerMeasure(
        "SM clock (slowest GPU)",
        "MHz",
        f'min by ($by) (last_over_time(diag_gpu_clock_hertz{{clock="sm"}}[$window]){SERVING}) / 1e6',
    ),
    "temperature": ServerMeasure(
        "GPU temperature (hottest)",
        "celsius",
        f"max by ($by) (last_over_time(diag_gpu_temperature_celsius[$window]){SERVING})",
    ),
}


def measured(queries: QueryCache, instants: Instants) -> dict[str, dict[str, Floats]]:
    """By measure and server: its values at these instants, NaN where there is none."""
    found = {}
    for key, measure in MEASURES.items():
        rows = queries.ask(measure.promql, INSTANCE, queries.holding(measure.seconds), instants)
        found[key] = {dict(subject).get("instance", ""): row for subject, row in rows.items()}
    return found


def throttle_reasons(queries: QueryCache, instants: Instants) -> dict[str, tuple[str, ...]]:
    """By server, why the clocks of its GPUs are held down at the last of these instants."""
    found: dict[str, set[str]] = {}
    for subject, row in sorted(queries.ask(THROTTLED, (), queries.holding(NOW), instants[-1:]).items()):
        labels = dict(subject)
        if not np.isnan(row[-1]):
            found.setdefault(labels.get("instance", ""), set()).add(labels.get("reason", ""))
    return {name: tuple(sorted(reasons, key=_is_usual)) for name, reasons in found.items()}


def _is_usual(reason: str) -> tuple[bool, str]:
    """A power cap is; the others come before it."""
    return reason == "sw_power_cap", reason
