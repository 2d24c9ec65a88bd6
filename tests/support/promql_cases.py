"""Expressions and samples on which two PromQL engines are compared."""

import numpy as np

from diag.promql import STALE, Block, Labels, functions
from diag.promql.functions import DATES

START = 1_700_000_000_001  # ms


HOUR = 3_600_000


BOUNDS = ("0.005", "0.01", "0.05", "0.1", "0.5", "1.0", "2.5", "+Inf")


def _counter(random: np.random.Generator, length: int, step: float, resets: int) -> np.ndarray:
    """Make a counter that falls to zero a few times."""
    increments = random.poisson(step, length).astype(float)
    values = np.cumsum(increments)
    for at in sorted(random.integers(1, length, resets)):
        values[at:] -= values[at] - increments[at] * random.integers(0, 2)
    return values


def _histogram(random: np.random.Generator, length: int) -> np.ndarray:
    buckets = np.cumsum(
        np.cumsum(random.poisson(3 * random.random((len(BOUNDS), 1)), (len(BOUNDS), length)), axis=1), axis=0
    )
    reset = int(random.integers(1, length))
    buckets[:, reset:] -= buckets[:, reset : reset + 1]
    return buckets.astype(float)


def _series(random: np.random.Generator, length: int) -> list[tuple[Labels, np.ndarray]]:
    """Make what one server exposes: (labels without the instance, values)."""
    series: list[tuple[Labels, np.ndarray]] = [({"__name__": "up"}, np.ones(length))]
    for engine in ("0", "1"):
        for reason in ("stop", "length", "error"):
            labels = {"__name__": "requests_total", "engine": engine, "reason": reason}
            series.append((labels, _counter(random, length, 4 if reason != "error" else 0.05, 2)))
        late = np.where(np.arange(length) < length // 3, STALE, _counter(random, length, 0.1, 0) + 1)
        series.append(({"__name__": "preemptions_total", "engine": engine}, late))
        series.append(({"__name__": "kv_usage", "engine": engine}, random.random(length)))
        series.append(({"__name__": "waiting", "engine": engine}, random.poisson(1.5, length).astype(float)))
        series.append(
            ({"__name__": "running", "engine": engine}, np.repeat(random.poisson(9, length // 4 + 1), 4)[:length])
        )
        buckets = _histogram(random, length)
        for bound, values in zip(BOUNDS, buckets, strict=True):
            series.append(({"__name__": "latency_bucket", "engine": engine, "le": bound}, values))
        series.append(({"__name__": "latency_count", "engine": engine}, buckets[-1]))
        series.append(({"__name__": "latency_sum", "engine": engine}, buckets[-1] * 0.37))
    odd = random.choice([np.nan, np.inf, -np.inf, 0.0, -1.5, 2.5, 1e300, 7], length)
    series += [
        ({"__name__": "odd"}, odd),
        ({"__name__": "temperature", "gpu": "0"}, 60 + np.cumsum(random.normal(0, 1, length))),
        ({"__name__": "temperature", "gpu": "1"}, np.full(length, 61.25)),
        ({"__name__": "depth"}, -20 * random.random(length)),
        ({"__name__": "tide"}, np.round(random.normal(0, 3, length), 1)),
        ({"__name__": "typed", "__type__": "gauge", "__unit__": "bytes"}, random.random(length)),
        ({"__name__": "config", "flag": "max-num-seqs"}, np.full(length, 256.0)),
        ({"__name__": "config", "flag": "block-size"}, np.full(length, 16.0)),
        ({"__name__": "start_time_seconds"}, np.where(np.arange(length) < length // 2, 1.6999e9, 1.7000018e9)),
    ]
    return series


def _target(seed: int, instance: str, start: int, every: int, length: int) -> Block:
    random = np.random.default_rng(seed)
    series = _series(random, length)
    series.append(({"__name__": "build_info", "version": f"0.{seed % 2}", "model": "m"}, np.ones(length)))
    labels = tuple(labels | {"instance": instance} for labels, _ in series)
    times = start + every * np.arange(length) + 10 * random.integers(0, every // 100, length)
    return Block(labels, times, np.array([values for _, values in series], dtype=float))


def blocks() -> list[Block]:
    """Make four servers: one steady, one with failed scrapes, one that missed scrapes, one young and short-lived."""
    steady, failing = _target(1, "a:8000", START, 15_000, 240), _target(2, "b:8000", START + 70, 10_000, 360)
    missed, young = _target(3, "c:8000", START + 40, 15_000, 240), _target(4, "d:8000", START + HOUR // 2, 5_000, 120)
    failing.values[1:, 100:130] = STALE  # but for `up`
    failing.values[0, 100:130] = 0
    failing.values[5:20, 200:] = STALE
    steady.values[10, :120] = STALE  # a bucket is born late
    kept = np.r_[0:90, 130:240]
    renamed = tuple(
        series | {"__name__": series["__name__"].replace("kv_usage", "old_kv_usage")} for series in young.labels
    )
    return [
        steady,
        failing,
        Block(missed.labels, missed.times[kept], missed.values[:, kept]),
        Block(renamed, young.times, young.values),
    ]


NEAR_A_BIRTH = [START + 6 + at for at in (0, 61_230, 2_000_340, 2_222_220)]


SETTLED = [START + 6 + at for at in (600_000, 1_105_500, 1_255_550, 1_501_110, 2_395_000)]


AT_THE_END = [START + 6 + HOUR + at for at in (-9_000, 200_000, 290_000, 400_000)]


RANGE_FUNCTIONS = sorted(set(functions.RANGE_FUNCTIONS) - {"quantile_over_time", "predict_linear"})


FUNCTIONS = ("abs", "ceil", "floor", "exp", "sqrt", "ln", "log2", "log10", "sgn", "round")


AGGREGATIONS = ("sum", "avg", "min", "max", "count", "group", "stddev", "stdvar")


ARITHMETIC = ("+", "-", "*", "/", "%", "^")


COMPARISONS = ("==", "!=", ">", "<", ">=", "<=")


EXPRESSIONS = [
    *(f"{f}(requests_total[{span}])" for f in RANGE_FUNCTIONS for span in ("1m", "5m")),
    *(f"{f}(waiting[{span}])" for f in RANGE_FUNCTIONS for span in ("1m", "5m")),
    *(f'{f}(preemptions_total{{instance=~"[ab].*"}}[7m30s])' for f in RANGE_FUNCTIONS),
    *(f"{f}(odd[90s])" for f in RANGE_FUNCTIONS if f not in ("deriv", "stddev_over_time", "stdvar_over_time")),
    *(f"{f}(temperature)" for f in FUNCTIONS),
    *(f"{f}(depth)" for f in FUNCTIONS),
    *(f"{f}(start_time_seconds)" for f in DATES),
    *(f"{f}()" for f in DATES),
    *(f"{f} (requests_total)" for f in AGGREGATIONS),
    *(f"{f} by (reason, engine) (requests_total)" for f in AGGREGATIONS),
    *(f"{f} without (instance, reason) (requests_total)" for f in AGGREGATIONS),
    *(f"histogram_quantile({q}, rate(latency_bucket[5m]))" for q in (0, 0.1, 0.5, 0.9, 0.99, 1, -1, 2, "NaN")),
    *(f"quantile by (engine) ({q}, waiting)" for q in (0, 0.3, 0.5, 0.95, 1, -0.1, 1.1)),
    *(f"quantile_over_time({q}, kv_usage[4m])" for q in (0, 0.3, 0.5, 0.95, 1, -0.1, 1.1)),
    *(f"requests_total {op} 400" for op in (*ARITHMETIC, *COMPARISONS)),
    *(f"3 {op} waiting" for op in (*ARITHMETIC, *COMPARISONS)),
    *(f"waiting {op} running" for op in (*ARITHMETIC, *COMPARISONS)),
    *(f"waiting {op} bool running" for op in COMPARISONS),
    *(f"odd {op} bool 2.5" for op in COMPARISONS),
    *(f"waiting > 1 {op} on (instance, engine) running > 9" for op in ("and", "or", "unless")),
    *(f"waiting {op} ignoring (engine, gpu) temperature" for op in ("and", "or", "unless")),
    *(f"{f}({metric}[2m])" for f in ("rate", "increase", "irate") for metric in ("depth", "tide")),
    # what a diagnosis asks
    "histogram_quantile(0.9, sum by (instance, engine, le) (increase(latency_bucket[5m])))",
    "histogram_quantile(0.99, sum by (le) (rate(latency_bucket[3m])))",
    "sum by (instance) (increase(latency_sum[5m])) / sum by (instance) (increase(latency_count[5m]))",
    "sum by (engine) (increase(preemptions_total[5m])) / sum by (engine) (increase(requests_total[5m])) > 0",
    "sum by (instance) (increase(preemptions_total[5m])) / (sum by (instance) (increase(requests_total[5m])) > 500)",
    "max by (instance, engine) (max_over_time(kv_usage[1m]) or max_over_time(old_kv_usage[1m]))",
    "avg_over_time((waiting > bool 0)[5m:15s])",
    "count_over_time((kv_usage > 0.5)[5m:10s]) / count_over_time(kv_usage[5m])",
    "max_over_time(sum by (instance) (waiting)[10m:30s])",
    "deriv(sum by (instance) (kv_usage)[10m:30s])",
    "rate(requests_total[5m:])",
    "rate(requests_total[5m:20s] offset 2m)",
    "increase(sum by (instance) (requests_total)[8m:1m])",
    "sum_over_time(rate(requests_total[1m])[5m:1m] offset -1m)",
    "max_over_time(max_over_time(waiting[1m])[5m:30s])",
    "min_over_time((waiting - waiting offset 1m)[3m:10s])",
    "avg_over_time(vector(time())[5m:1m])",
    "last_over_time(kv_usage[30s]) * on (instance) group_left (version, model) build_info",
    "build_info * on (instance) group_right (version) waiting",
    "temperature + on (instance) group_left () depth",
    "waiting > on (instance) group_left () (depth + 22)",
    "waiting > bool on (instance) group_left (version) (build_info * 2)",
    "temperature * ignoring (gpu) group_left (version) (build_info * 0 + 1)",
    "requests_total / on (instance, engine) group_left () sum without (reason) (requests_total)",
    'config{flag="max-num-seqs"} - on (instance) sum by (instance) (running)',
    'config{flag="max-num-seqs"} * on (instance) group_right (flag) running',
    'sum by (instance) (running) / on (instance) config{flag="max-num-seqs"}',
    "temperature - on (instance) waiting",  # no answer: many-to-many
    "running + on (instance) build_info",  # no answer: needs group_left
    'rate({__name__=~"latency_count|latency_sum"}[5m])',  # no answer: the same labels twice
    'label_replace(waiting, "engine", "x", "engine", ".*")',  # no answer: likewise
    "-{__name__=~'running|waiting'}",  # no answer: likewise
    'label_replace(requests_total, "class", "${1}-$2$$", "reason", "(.).*(.)")',
    'label_replace(requests_total, "instance", "$host", "instance", "(?P<host>[a-z]):[0-9]+")',
    'label_replace(sum by (instance) (waiting), "port", "$1", "instance", "(?:[^:]+):(\\\\d+)")',
    'label_replace(waiting, "engine", "", "engine", "0")',
    'label_replace(waiting, "added", "$1", "nothing", "(.*)")',
    'label_join(waiting, "both", "/", "instance", "engine", "nothing")',
    'label_join(waiting, "instance", "")',
    'absent(waiting{engine="7", instance="a:8000"})',
    'absent(waiting{engine="7", engine=~"8", instance="a:8000"})',
    "absent(sum(nothing))",
    "absent(waiting)",
    'absent_over_time(waiting{instance="d:8000"}[1m])',
    'absent_over_time(nothing{instance="d:8000", job=~"x.*"}[1m])',
    'absent_over_time(waiting{instance="d:8000"}[2m:30s])',
    'topk(3, requests_total{reason!="error"} + 0.1 * kv_usage * on (instance, engine) group_right () requests_total)',
    "topk(2, kv_usage)",
    "topk by (instance) (1, kv_usage)",
    'bottomk(2, temperature{gpu="0"})',
    "bottomk by (instance) (1, depth)",
    "topk(0, kv_usage)",
    "topk(scalar(count(up) or vector(2)), kv_usage)",
    "topk(+Inf, kv_usage)",
    'count_values("value", waiting)',
    'count_values by (instance) ("value", running)',
    'count_values without (engine) ("value", round(kv_usage, 0.25))',
    'count_values("value", odd)',
    "sort(kv_usage)",
    "sort_desc(kv_usage)",
    "scalar(waiting)",
    'scalar(waiting{instance="a:8000", engine="0"}) + vector(1)',
    "vector(scalar(sum(waiting)))",
    "timestamp(waiting)",
    "timestamp(waiting offset 1m)",
    "timestamp(sum by (instance) (waiting))",
    "time()",
    "time() - start_time_seconds",
    "time() - timestamp(up)",
    "vector(1) - 1",
    "1 + 2 * 3 ^ 2 % 5",
    "2 > bool 1",
    "-waiting",
    "-(1 + 1)",
    "+waiting",
    "waiting offset 5m",
    "waiting offset -3m",
    "rate(requests_total[2m] offset 3m)",
    "predict_linear(temperature[10m], 600)",
    "predict_linear(temperature[10m] offset 2m, 600)",
    "stdvar_over_time((time() + kv_usage)[5m:10s])",
    "histogram_quantile(0.5, latency_bucket)",
    'histogram_quantile(0.5, latency_bucket{le!="+Inf"})',
    'histogram_quantile(0.5, latency_bucket{le="+Inf"})',
    'waiting{engine="0"} * on (instance) group_left (engine) build_info',
    "(waiting > 1e9) + on (instance) waiting",  # nothing to match, so the repeats of the right side do not matter
    "depth % 3",
    "topk(2.7, kv_usage)",
    "clamp_min(odd, NaN)",
    "clamp_max(odd, NaN)",
    "clamp(odd, NaN, 1)",
    "predict_linear(kv_usage[5m], time() / 1e9)",
    "clamp(depth, -15, -5)",
    "clamp(depth, -5, -15)",
    "clamp_min(depth, -5)",
    "clamp_max(depth, -5)",
    "clamp_max(odd, 1)",
    "round(temperature, 0.5)",
    "round(temperature, 7)",
    "round(-depth, 0)",
    'waiting{instance!="a:8000", engine=~"0|1", gpu=""}',
    '{__name__=~"wait.*|runn.*", engine!~"1.*"}',
    '{instance="a:8000", engine="0"}',
    "sum by (nothing) (waiting)",
    "sum without () (waiting)",
    "sum by (__name__) ({engine='0'})",
    "count by (instance) ({__name__!=''})",
    "count({__name__=~'.+'})",
    "group by (instance) (requests_total > 100)",
    "sum(odd)",
    "avg(odd)",
    "min(odd)",
    "max(odd)",
    "up == 0",
    "changes(up[10m])",
    "resets(start_time_seconds[20m])",
    "max_over_time(start_time_seconds[5m]) - min_over_time(start_time_seconds[5m]) > 0",
]
