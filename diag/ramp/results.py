"""Results of load tools as steps of a ramp: vllm bench serve, guidellm (report v2) and AIPerf (schema 1.x).

Other files, and results that lack a number that a step needs, are refused in one sentence. Times in the files are
milliseconds except guidellm's request latency, which is in seconds.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from diag.core.errors import BadUsage
from diag.core.files import read_json
from diag.core.formatting import printable
from diag.sources.kept_ramp import Latency

MOST_BYTES, MOST_STEPS = 2**28, 1_000
"""Bytes of a report at most, for guidellm writes every request into it; steps of all reports."""
ABSURD = 1e15
"""Numbers from here on are not measurements."""
PERCENTILES = ("p50", "p90", "p99")


class Offer(NamedTuple):
    """The load of a step: so many requests at a time, or so many a second (Poisson); None for a load of others."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def shown(self) -> str:
        """The load in a table: "16" requests at a time, "2.5 /s"; "-" for a load of others."""
        if self.rate is not None:
            return f"{self.rate:.3g} /s"
        return "-" if self.concurrency is None else f"{self.concurrency}"


class GeneratorUse(NamedTuple):
    """CPU seconds that the load generator had used by a moment (unix seconds), and those that it had waited for a CPU.

    `pressure` is the CPU pressure of its host then, 0..1. None: the kernel does not tell.
    """

    at: float
    cpu: float
    waited: float | None = None
    pressure: float | None = None


class ClientResult(NamedTuple):
    """A step as the load generator reports it; times in seconds.

    `ttft`, `itl` and `e2e` are percentiles 50, 90 and 99, None if not reported. `cores` are the CPU cores that the
    generator used, in the steady part if that is known, and `uses` their samples. `start` and `end` are unix seconds, 0
    if unknown.
    """

    completed: int
    failed: int
    seconds: float
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float = 0.0
    ttft: Latency = Latency()
    itl: Latency = Latency()
    e2e: Latency = Latency()
    cores: float | None = None
    start: float = 0.0
    end: float = 0.0
    uses: tuple[GeneratorUse, ...] = ()


Found = tuple[Offer, ClientResult]


class ResultUnreadable(Exception):
    """A result lacks a number that a step needs; the message names it."""


def read(paths: Sequence[Path]) -> list[Found]:
    """Return the steps of all files, by their load; BadUsage for a file that is no result."""
    steps = []
    for path in paths:
        name = printable(str(path))
        try:
            document = read_json(path, MOST_BYTES)
            keys = document.keys() if isinstance(document, dict) else frozenset()
            if "benchmarks" in keys and isinstance(document["benchmarks"], list):
                steps += [
                    _guidellm_step(benchmark) for benchmark in document["benchmarks"] if isinstance(benchmark, dict)
                ]
            elif "aiperf_version" in keys or {"request_throughput", "time_to_first_token"} <= keys:
                steps.append(_aiperf(document))
            elif {"max_concurrency", "completed"} <= keys:
                offer = _offer(document["max_concurrency"], document.get("request_rate"))
                steps.append((offer, parse_vllm_bench(document)))
            else:
                raise ResultUnreadable("not a result of vllm bench serve, guidellm or AIPerf")
        except OSError as error:
            raise BadUsage(f"{name} cannot be read: {error.strerror or error}") from error
        except ResultUnreadable as error:
            raise BadUsage(f"{name}: {error}") from error
        except ValueError as error:
            raise BadUsage(f"{name} is not JSON: expected a result of vllm bench serve, guidellm or AIPerf") from error
    if len(steps) > MOST_STEPS:
        raise BadUsage(f"the results have {len(steps):,} steps: a ramp is of at most {MOST_STEPS:,}")
    return sorted(steps, key=lambda step: (step[0].concurrency or 0, step[0].rate or 0.0))


# -- vllm bench serve --------------------------------------------------------------------------------------------------


def parse_vllm_bench(document: Any) -> ClientResult:
    """Read the output of `vllm bench serve --save-result`; ResultUnreadable if it lacks a number."""
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
    names = (f"{which}_{name}_ms" for which in ("median", "p90", "p99"))
    return _latency(document, names, 1000, _optional(document, "completed") or 0.0)


# -- guidellm ----------------------------------------------------------------------------------------------------------


def _guidellm_step(benchmark: Mapping[str, Any]) -> Found:
    """Read one benchmark of a report; the `successful` requests are measured.

    The totals and the strategy lie in another place in each version of the report.
    """
    metrics = _within(benchmark, "metrics")
    if not metrics:
        raise ResultUnreadable("a benchmark of guidellm lacks metrics: expected a report of version 2")
    totals = (
        ("scheduler_metrics", "requests_made"),
        ("metrics", "request_totals"),
        ("request_totals",),
        ("run_stats", "requests_made"),
    )
    made = next((inside for place in totals if (inside := _within(benchmark, *place))), {})
    places = ("config", "strategy"), ("args", "strategy"), ("scheduler", "strategy")
    strategy = next((inside for place in places if (inside := _within(benchmark, *place))), {})
    streams = _optional(strategy, "streams") or _optional(strategy, "max_concurrency")
    kind = str(strategy.get("type_", ""))
    if kind == "synchronous":
        offer = Offer(concurrency=1)
    elif kind == "concurrent" and streams:
        offer = Offer(concurrency=int(streams))
    else:
        offer = Offer(rate=_optional(strategy, "rate"))
    start, end = (_optional(benchmark, name) or 0.0 for name in ("start_time", "end_time"))
    completed = int(_optional(made, "successful") or 0)
    rate = _mean(metrics, "requests_per_second")
    return offer, ClientResult(
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


def _guidellm_latency(metrics: Mapping[str, Any], name: str, per_second: float) -> Latency:
    spread = _within(metrics, name, "successful")
    observed = _optional(spread, "count")
    return _latency(_within(spread, "percentiles"), PERCENTILES, per_second, observed) if observed else Latency()


def _mean(metrics: Mapping[str, Any], name: str, otherwise: float | None = None) -> float:
    mean = _optional(_within(metrics, name, "successful"), "mean")
    return _needed(mean, otherwise, f"a benchmark of guidellm lacks {name}: expected a report of version 2")


# -- AIPerf ------------------------------------------------------------------------------------------------------------


def _aiperf(document: Mapping[str, Any]) -> Found:
    """Read the one step of `profile_export_aiperf.json`: metrics with `avg` and, if they vary, percentiles.

    The load is that of the last phase, or lies in `loadgen` in older releases.
    """
    phases = _within(document, "input_config").get("phases")
    measured = [phase for phase in phases if isinstance(phase, dict)] if isinstance(phases, list) else []
    load = measured[-1] if measured else _within(document, "input_config", "loadgen")
    offer = _offer(_optional(load, "concurrency"), _optional(load, "rate") or _optional(load, "request_rate"))
    times = []
    for name in ("start_time", "end_time"):  # UTC if it has no zone, as AIPerf writes it; 0 for any other text
        moment = None
        with suppress(ValueError):
            moment = datetime.fromisoformat(str(document.get(name)))
        times.append((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() if moment else 0.0)
    start, end = times
    completed = _average(document, "request_count")
    seconds = _average(document, "benchmark_duration", end - start)
    return offer, ClientResult(
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


def _aiperf_latency(document: Mapping[str, Any], name: str) -> Latency:
    spread = _within(document, name)
    return _latency(spread, PERCENTILES, 1000, _optional(spread, "count") or _average(document, "request_count"))


def _average(document: Mapping[str, Any], name: str, otherwise: float | None = None) -> float:
    average = _optional(_within(document, name), "avg")
    return _needed(average, otherwise, f"a result of AIPerf lacks {name}: expected schema 1.3 or 1.4")


# -- numbers of any document -------------------------------------------------------------------------------------------


def _offer(concurrency: object, rate: object) -> Offer:
    """Return a closed-loop load if the number of requests at a time is bounded, else an open-loop one."""
    if isinstance(concurrency, int | float) and 1 <= concurrency < ABSURD:
        return Offer(concurrency=int(concurrency))
    return Offer(rate=float(rate)) if isinstance(rate, int | float) and 0 < rate < ABSURD else Offer()


def _latency(document: Mapping[str, Any], names: Iterable[str], per_second: float, observed: float) -> Latency:
    """Return the percentiles of these names; `per_second` is 1000 for milliseconds."""
    values = (_optional(document, name) for name in names)
    p50, p90, p99 = (None if value is None else value / per_second for value in values)
    return Latency(p50, p90, p99, observed)


def _within(document: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        inside = document.get(name)
        document = inside if isinstance(inside, dict) else {}
    return document


def _number(document: Mapping[str, Any], name: str) -> float:
    return _needed(_optional(document, name), None, f"a result of vllm bench serve lacks {name}")


def _needed(value: float | None, otherwise: float | None, lacking: str) -> float:
    value = otherwise if value is None else value
    if value is None:
        raise ResultUnreadable(lacking)
    return value


def _optional(document: Mapping[str, Any], name: str) -> float | None:
    value = document.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < ABSURD else None
