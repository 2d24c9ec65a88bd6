"""Results of load tools as steps of a ramp: vllm bench serve, guidellm (report v2) and AIPerf (schema 1.x).

A file that is none of them, or lacks what a step needs, is refused in one sentence. Times in the files are milliseconds
but for guidellm's request latency, which is seconds.
"""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diag.core.errors import BadUsage
from diag.core.files import read_text
from diag.core.formatting import printable
from diag.ramp.step import ClientResult, Latency, Offer

MOST_BYTES = 2**30
"""A report with every request in it is large; guidellm writes them into it."""
ABSURD = 1e15
"""A number that no load tool measures."""
Found = tuple[Offer, ClientResult]


class ResultUnreadable(Exception):
    """A result lacks what a step needs; the message says what."""


def read(paths: Sequence[Path]) -> list[Found]:
    """The steps of all files, by their load; BadUsage for a file that is no result."""
    found = [step for path in paths for step in _read(path)]
    return sorted(found, key=lambda step: (step[0].concurrency or 0, step[0].rate or 0.0))


def _read(path: Path) -> list[Found]:
    shown = printable(str(path))
    try:
        document = json.loads(read_text(str(path), MOST_BYTES))
    except OSError as error:
        raise BadUsage(f"{shown} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise BadUsage(f"{shown} is not JSON: expected a result of vllm bench serve, guidellm or AIPerf") from error
    try:
        return _steps(document)
    except ResultUnreadable as error:
        raise BadUsage(f"{shown}: {error}") from error


def _steps(document: Any) -> list[Found]:
    if not isinstance(document, dict):
        raise ResultUnreadable("not a result of vllm bench serve, guidellm or AIPerf")
    if isinstance(document.get("benchmarks"), list):
        return _guidellm(document)
    if "aiperf_version" in document or {"request_throughput", "time_to_first_token"} <= document.keys():
        return [_aiperf(document)]
    if "max_concurrency" in document and "completed" in document:
        return [(_offer(document.get("max_concurrency"), document.get("request_rate")), of_vllm_bench(document))]
    raise ResultUnreadable("not a result of vllm bench serve, guidellm or AIPerf")


# -- vllm bench serve --------------------------------------------------------------------------------------------------


def of_vllm_bench(document: Any) -> ClientResult:
    """What `vllm bench serve --save-result` writes; ResultUnreadable where it lacks a number."""
    if not isinstance(document, dict):
        raise ResultUnreadable("not a result of vllm bench serve")
    seconds = _number(document, "duration")
    return ClientResult(
        completed=int(_number(document, "completed")),
        failed=int(_optional(document, "failed") or 0),
        seconds=seconds,
        requests_per_second=_number(document, "request_throughput"),
        output_tokens_per_second=_number(document, "output_throughput"),
        prompt_tokens_per_second=(_optional(document, "total_input_tokens") or 0.0) / max(seconds, 1e-9),
        ttft=_bench_latency(document, "ttft"),
        itl=_bench_latency(document, "itl"),
        e2e=_bench_latency(document, "e2el"),
    )


def _bench_latency(document: Mapping[str, Any], name: str) -> Latency:
    known = (_optional(document, f"{which}_{name}_ms") for which in ("median", "p90", "p99"))
    p50, p90, p99 = (None if value is None else value / 1000 for value in known)
    return Latency(p50, p90, p99, _optional(document, "completed") or 0.0)


# -- guidellm ----------------------------------------------------------------------------------------------------------


def _guidellm(document: Mapping[str, Any]) -> list[Found]:
    """One step for each benchmark; its `successful` requests are those that are measured."""
    return [_guidellm_step(benchmark) for benchmark in document["benchmarks"] if isinstance(benchmark, dict)]


def _guidellm_step(benchmark: Mapping[str, Any]) -> Found:
    metrics, made = _table(benchmark, "metrics"), _totals(benchmark)
    start, end = (_optional(benchmark, name) or 0.0 for name in ("start_time", "end_time"))
    completed = int(_optional(made, "successful") or 0)
    rate = _mean(metrics, "requests_per_second")
    strategy = _strategy(benchmark)
    return _guidellm_offer(strategy), ClientResult(
        completed=completed,
        failed=int(_optional(made, "errored") or 0),
        seconds=end - start if end > start else completed / rate if rate else 0.0,
        requests_per_second=rate,
        output_tokens_per_second=_mean(metrics, "output_tokens_per_second"),
        prompt_tokens_per_second=_mean(metrics, "prompt_tokens_per_second", 0.0),
        ttft=_guidellm_latency(metrics, "time_to_first_token_ms", 1000),
        itl=_guidellm_latency(metrics, "inter_token_latency_ms", 1000),
        e2e=_guidellm_latency(metrics, "request_latency", 1),
        start=start,
        end=end,
    )


def _totals(benchmark: Mapping[str, Any]) -> Mapping[str, Any]:
    """How many requests were successful and errored, wherever the version of the report keeps them."""
    places = (
        ("scheduler_metrics", "requests_made"),
        ("metrics", "request_totals"),
        ("request_totals",),
        ("run_stats", "requests_made"),
    )
    return next((found for place in places if (found := _within(benchmark, *place))), {})


def _strategy(benchmark: Mapping[str, Any]) -> Mapping[str, Any]:
    places = ("config", "strategy"), ("args", "strategy"), ("scheduler", "strategy")
    return next((found for place in places if (found := _within(benchmark, *place))), {})


def _guidellm_offer(strategy: Mapping[str, Any]) -> Offer:
    streams = _optional(strategy, "streams") or _optional(strategy, "max_concurrency")
    kind = str(strategy.get("type_", ""))
    if kind == "synchronous":
        return Offer(concurrency=1)
    if kind == "concurrent" and streams:
        return Offer(concurrency=int(streams))
    return Offer(rate=_optional(strategy, "rate"))


def _guidellm_latency(metrics: Mapping[str, Any], name: str, per_second: float) -> Latency:
    spread = _within(metrics, name, "successful")
    percentiles = _within(spread, "percentiles")
    values = [_optional(percentiles, name) for name in ("p50", "p90", "p99")]
    p50, p90, p99 = (None if value is None else value / per_second for value in values)
    observed = _optional(spread, "count") or 0.0
    return Latency(p50, p90, p99, observed) if observed else Latency()


def _mean(metrics: Mapping[str, Any], name: str, otherwise: float | None = None) -> float:
    value = _optional(_within(metrics, name, "successful"), "mean")
    if value is None:
        value = otherwise
    if value is None:
        raise ResultUnreadable(f"a benchmark of guidellm lacks {name}: expected a report of version 2")
    return value


# -- AIPerf ------------------------------------------------------------------------------------------------------------


def _aiperf(document: Mapping[str, Any]) -> Found:
    """The one step of `profile_export_aiperf.json`; each of its metrics has `avg` and, where it varies, percentiles."""
    start, end = (_unix(document.get(name)) for name in ("start_time", "end_time"))
    completed = _average(document, "request_count")
    seconds = _average(document, "benchmark_duration", end - start)
    return _aiperf_offer(document), ClientResult(
        completed=int(completed),
        failed=int(_average(document, "error_request_count", 0.0)),
        seconds=seconds,
        requests_per_second=_average(document, "request_throughput"),
        output_tokens_per_second=_average(document, "output_token_throughput"),
        prompt_tokens_per_second=_average(document, "total_isl", 0.0) / max(seconds, 1e-9),
        ttft=_aiperf_latency(document, "time_to_first_token"),
        itl=_aiperf_latency(document, "inter_token_latency"),
        e2e=_aiperf_latency(document, "request_latency"),
        start=start,
        end=end,
    )


def _aiperf_offer(document: Mapping[str, Any]) -> Offer:
    """Of the phase that was measured, or of the older way to write it."""
    phases = _within(document, "input_config").get("phases")
    measured = [phase for phase in phases if isinstance(phase, dict)] if isinstance(phases, list) else []
    load = measured[-1] if measured else _within(document, "input_config", "loadgen")
    return _offer(_optional(load, "concurrency"), _optional(load, "rate") or _optional(load, "request_rate"))


def _aiperf_latency(document: Mapping[str, Any], name: str) -> Latency:
    spread = _within(document, name)
    values = [_optional(spread, percentile) for percentile in ("p50", "p90", "p99")]
    p50, p90, p99 = (None if value is None else value / 1000 for value in values)
    return Latency(p50, p90, p99, _optional(spread, "count") or _average(document, "request_count"))


def _average(document: Mapping[str, Any], name: str, otherwise: float | None = None) -> float:
    value = _optional(_within(document, name), "avg")
    value = otherwise if value is None else value
    if value is None:
        raise ResultUnreadable(f"a result of AIPerf lacks {name}: expected schema 1.3 or 1.4")
    return value


def _unix(text: object) -> float:
    """A local time without a zone, as AIPerf writes it, is taken as UTC where it has none; 0 for anything else."""
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return 0.0
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


# -- of any ------------------------------------------------------------------------------------------------------------


def _offer(concurrency: object, rate: object) -> Offer:
    """Closed-loop where the number of requests at a time is bounded, else open-loop."""
    if isinstance(concurrency, int | float) and concurrency >= 1:
        return Offer(concurrency=int(concurrency))
    known = isinstance(rate, int | float) and math.isfinite(rate) and rate > 0
    return Offer(rate=float(rate)) if known else Offer()  # type: ignore[arg-type]


def _within(document: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        inside = document.get(name)
        document = inside if isinstance(inside, dict) else {}
    return document


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = _within(document, name)
    if not found:
        raise ResultUnreadable(f"a benchmark of guidellm lacks {name}: expected a report of version 2")
    return found


def _number(document: Mapping[str, Any], name: str) -> float:
    value = _optional(document, name)
    if value is None:
        raise ResultUnreadable(f"a result of vllm bench serve lacks {name}")
    return value


def _optional(document: Mapping[str, Any], name: str) -> float | None:
    value = document.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value) if 0 <= value < ABSURD else None
