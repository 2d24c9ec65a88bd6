"""Two pools of servers by prompt length: where to split, how many servers, and with what effect on TTFT.

A pool is proposed only if the model of `pool_model.py` reproduces the server as it is, if each pool stays below its
bounds for the worst combination of prompts and outputs that the histograms allow, and if it is clearly better for short
prompts than the same number of servers that share all requests. In every other case the answer is the reason why not.

A server that preempts requests, is saturated, or has clients that wait for answers does not show what its load would
be on more servers, so it gets no pools.
"""

import math
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from diag.core.formatting import quantity
from diag.core.metric_prefix import FINISHED, PROMPTED, RUNNING, WAITING, metric
from diag.core.subjects import Floats, Subject, instance_name, label_value
from diag.diagnosis.onset import FEW
from diag.diagnosis.pool_model import (
    SIGMAS,
    LengthHistogram,
    LoadOfServer,
    ServerCosts,
    TimeToFirstToken,
    queue_prefills,
)
from diag.diagnosis.query_cache import QueryCache, Window

MOST_ERROR = 0.25
"""Relative error of the model of the present beyond which it is wrong."""
MOST_MISPLACED = 0.15
"""Share of requests that the model may put on the wrong side of an edge of the TTFT histogram."""
MOST_PREFILL = 0.6
"""Utilisation by prefill of a pool at most: a queue at random arrivals is then on average 1.5 prefills long at most
(Pollaczek-Khinchine), and a load that grows by half is still served."""
MOST_PRESENT = 0.9
"""Utilisation of the present server above which finished requests underestimate the arriving ones."""
MOST_KV = 0.9
"""Share of the KV cache that the mean and three deviations may take."""
MOST_BATCH = 1.1
"""Requests that decode at once, as a multiple of today's: a larger batch has steps of unknown length."""
CLEARLY = 0.5
"""TTFT p90 of short prompts, as a share of what the same servers give that share all requests."""
LEAST_GAIN = 0.2
"""Seconds of TTFT p90 that short prompts gain at least: users do not notice less."""
MOST_CACHED = 0.3
"""Share of cached prompt tokens beyond which it matters which lengths have the hits, and pools change the hits."""
STEADY = 0.3
"""Deviation of the requests in flight, in roots of their mean, below which clients wait for answers."""
BURSTY = 2.0
"""Dispersion of arrivals from which on they are not random, beside three standard errors of it."""
FEWEST = 20
"""Requests with long prompts, and intervals between scrapes, below which an estimate is unreliable."""
STRIDE = 3
"""Intervals between scrapes over which counters are compared: a long prompt is counted when its prefill ends."""
MOST_SECONDS = 1800.0
MORE_SERVERS = 3
"""Servers at most beyond those that are there."""
SHORTEST_STEP, LONGEST = 1e-4, 1e7
"""Plausible limits: the least seconds of a step, the most tokens of a request."""

PER = ("instance", "engine")
PROMPTS, OUTPUTS, TTFT = "request_prompt_tokens", "request_generation_tokens", "time_to_first_token_seconds"
COUNTERS = {
    "finished": FINISHED,
    "steps": metric("iteration_tokens_total_count"),
    "prefilled": PROMPTED,
    "preempted": metric("num_preemptions_total"),
    "ttft": metric(f"{TTFT}_sum"),
    "prompt_tokens": metric(f"{PROMPTS}_sum"),
    "computed": metric("request_prefill_kv_computed_tokens_sum"),
    "output_tokens": metric(f"{OUTPUTS}_sum"),
    "running": RUNNING,
    "waiting": WAITING,
    "usage": metric("kv_cache_usage_perc"),
}
"""Series of an engine, read at every scrape."""


class Pools(NamedTuple):
    """Two pools: prompts up to `edge` tokens on `short` servers, longer ones on `long`.

    `seen` servers share the load today. `error` is the model's error about them. `shared` and `split` are the TTFT with
    all servers sharing the requests, and in the pools; `now` is the TTFT of today.
    """

    edge: float
    short: int
    long: int
    seen: int
    error: float
    now: TimeToFirstToken
    shared: TimeToFirstToken
    split: tuple[TimeToFirstToken, TimeToFirstToken]

    @property
    def benefit(self) -> float:
        """Share of requests with short prompts, times the logarithm by which their TTFT p90 falls."""
        shared, split = (ttft.percentile(0.9, long=False) for ttft in (self.shared, self.split[0]))
        return float((~self.shared.is_long).mean()) * math.log(shared / split)

    @property
    def text(self) -> str:
        """The proposal in words, with TTFT of short and long prompts."""
        total = self.short + self.long
        more = f", {total - self.seen} more than today," if total > self.seen else ", as many as today,"
        effects = []
        for name, long, pool in (("short", False, self.split[0]), ("long", True, self.split[1])):
            now, shared, split = (
                quantity(ttft.percentile(0.9, long=long), "seconds") for ttft in (self.now, self.shared, pool)
            )
            all_share = f"{shared} if {total} servers share all requests"
            effects.append(f"{name} prompts {now} now, {all_share}, {split} in pools")
        return (
            f"With {total} servers{more} serve prompts up to {self.edge:,.0f} tokens on {self.short} and longer ones "
            f"on {self.long}. TTFT p90, computed from the lengths of this server (model error "
            f"{100 * self.error:.0f} %): {'; '.join(effects)}."
        )


class NoPools(Exception):
    """The reason why no pools are proposed."""


class _Telemetry:
    """Series of an engine at every scrape up to an instant."""

    def __init__(self, subject: Subject, end: float, queries: QueryCache) -> None:
        self.queries, self.subject = queries, subject
        end = round(end * 1000)
        times = queries.source.instants
        self.at = times[(times <= end) & (times >= end - MOST_SECONDS * 1000)]
        self.latest = queries.holding(2 * queries.source.interval)
        self.rows: dict[str, Floats] = {}
        for name, series in COUNTERS.items():
            promql = f"sum by ($by) (last_over_time({series}[$window]))"
            row = queries.ask(promql, PER, self.latest, self.at).of(subject)
            if row is not None:
                self.rows[name] = row

    @property
    def seconds(self) -> float:
        """Time between the first and the last scrape."""
        return float(self.at[-1] - self.at[0]) / 1000

    def grown(self, name: str) -> float:
        """Growth of a counter."""
        return float(self.rows[name][-1] - self.rows[name][0])

    def strides(self, name: str) -> Floats:
        """Growth of a counter from each third scrape to the next."""
        return np.diff(self.rows[name][::STRIDE])

    def histogram(self, family: str) -> tuple[list[float], list[float]]:
        """Return the edges of a histogram, and the observations up to each."""
        promql = f"sum by ($by, le) (last_over_time({metric(family)}_bucket[$window]))"
        counts = {}
        for labels, row in self.queries.ask(promql, PER, self.latest, self.at).like(self.subject):
            with suppress(ValueError):
                counts[float(label_value(labels, "le"))] = float(row[-1] - row[0])
        return sorted(counts), [counts[edge] for edge in sorted(counts)]

    def value(self, promql: str) -> float:
        """Return the value of an expression at the last scrape, NaN if there is none."""
        row = self.queries.ask(promql, PER, self.latest, self.at[-1:]).of(self.subject)
        return math.nan if row is None else float(row[-1])

    def rates_of_its_model(self) -> list[float]:
        """Return the requests that each server of its model finished, its own first."""
        window = Window(self.seconds, f"{max(1, round(self.seconds))}s")
        promql = f"sum by ($by) (increase({FINISHED}[$window]))"
        rows = self.queries.ask(promql, ("instance", "model_name"), window, self.at[-1:])
        models = {label_value(labels, "model_name") for labels, _ in rows.like(self.subject)}
        rates = {
            instance_name(labels): float(row[-1])
            for labels, row in rows.items()
            if label_value(labels, "model_name") in models
        }
        return [rates.pop(instance_name(self.subject)), *rates.values()]


class _Present(NamedTuple):
    """Load and costs of the server as it is; `worst` are the costs with two standard errors more."""

    load: LoadOfServer
    costs: ServerCosts
    worst: ServerCosts
    prompts: LengthHistogram
    computed: float
    error: float


def find_pools(
    subject: Subject, end: float, queries: QueryCache, budget: float | None, cap: float | None
) -> Pools | str:
    """Return the pools that help an engine most, or the reason why there are none.

    `end` is the unix time up to which its telemetry is read. `budget` and `cap` are the running
    --max-num-batched-tokens and --max-num-seqs.
    """
    instances, engines = len(queries.subjects(("instance",))), len(queries.subjects(PER))
    if instances > FEW or engines > instances:
        return "the load of many servers, or of several engines behind one address, is not looked at"
    if budget is None or cap is None:
        return "--max-num-batched-tokens and --max-num-seqs are unknown"
    telemetry = _Telemetry(subject, end, queries)
    try:
        present = _measure(telemetry, budget, cap)
    except NoPools as reason:
        return str(reason)
    peers = telemetry.rates_of_its_model()
    if max(abs(rate - peers[0]) for rate in peers) > MOST_ERROR * peers[0]:
        return "the servers of this model do not share its requests evenly"
    servers = len(peers)
    slo = queries.contract.ttft_seconds if "ttft_seconds" in queries.contract.stated else 0.0
    for total in range(max(2, servers), MORE_SERVERS + servers + 1):
        candidates = [
            pools
            for place in range(len(present.prompts.edges) - 1)
            for long in range(1, total)
            if (pools := _pools(present, place, (total - long, long), servers, slo))
        ]
        if candidates:
            return max(candidates, key=lambda pools: pools.benefit)
    return "every split is too tight for one of its pools, or hardly better than servers that share all requests"


def _measure(telemetry: _Telemetry, budget: float, cap: float) -> _Present:
    """Return the present server; NoPools if the model does not fit it."""
    rows, grown = telemetry.rows, telemetry.grown
    if missing := COUNTERS.keys() - rows.keys():
        raise NoPools(f"{', '.join(sorted(missing))}: not measured")
    if len(telemetry.at) < FEWEST * STRIDE or not all(np.isfinite(row).all() for row in rows.values()):
        raise NoPools("too few scrapes")
    gauges = {"running", "waiting", "usage"}
    if any((np.diff(row) < 0).any() for name, row in rows.items() if name not in gauges):
        raise NoPools("the server was restarted")
    capacity = telemetry.value("$config_kv_cache_size_tokens")
    histograms = [telemetry.histogram(family) for family in (PROMPTS, OUTPUTS)]
    if not capacity > 0 or any(len(e) < 3 or not math.isinf(e[-1]) or not 0 < c[-1] < math.inf for e, c in histograms):
        raise NoPools("the size of the KV cache or the lengths of requests are unknown")
    prompts, outputs = (
        LengthHistogram(edges, counts, grown(name))
        for (edges, counts), name in zip(histograms, ("prompt_tokens", "output_tokens"), strict=True)
    )
    if min(prompts.count, outputs.count) < FEWEST or max(prompts.edges[-1], outputs.edges[-1]) > LONGEST:
        raise NoPools("too few requests have finished")
    if grown("preempted") > 0.01 * prompts.count:
        raise NoPools("requests are preempted: the KV cache does not show what the load would hold")
    computed = grown("computed") / max(grown("prompt_tokens"), 1.0)
    if not 1 - MOST_CACHED <= computed <= 1.001:
        raise NoPools("much of the prompts is cached, and the histograms do not tell which lengths have the hits")
    in_flight = rows["running"] + rows["waiting"]
    if in_flight.std() < STEADY * math.sqrt(in_flight.mean()):
        raise NoPools(
            "the number of requests in flight stays the same: clients wait for answers, and send more to faster servers"
        )
    arrivals = telemetry.strides("finished") + np.diff(in_flight[::STRIDE])
    dispersion = float(arrivals.var() / max(arrivals.mean(), 1e-9))
    if dispersion > BURSTY or dispersion > 1 + 3 * math.sqrt(2 / len(arrivals)) + 0.3:
        raise NoPools("requests come in bursts, or their rate changes")
    # the time of steps and of prefilled tokens by least squares, and with two standard errors more
    seconds = np.diff(telemetry.at[::STRIDE]) / 1000
    matrix = np.stack([telemetry.strides("steps"), telemetry.strides("prefilled") * computed], axis=1)
    if np.linalg.matrix_rank(matrix) < 2:
        raise NoPools("steps and prefilled tokens cannot be told apart")
    factors, *_ = np.linalg.lstsq(matrix, seconds, rcond=None)
    left = seconds - matrix @ factors
    errors = np.sqrt(np.diag(np.linalg.inv(matrix.T @ matrix)) * (left @ left) / max(1, len(seconds) - 2))
    if factors[0] < SHORTEST_STEP or factors[1] <= 0 or (errors > MOST_ERROR * factors).any():
        raise NoPools("the time of steps and of prefilled tokens cannot be told from the scrapes")
    costs, worst = (
        ServerCosts(float(step), float(token), capacity, budget, cap) for step, token in (factors, factors + 2 * errors)
    )
    rate = float(arrivals.sum()) / (float(telemetry.at[::STRIDE][-1] - telemetry.at[0]) / 1000)
    load = LoadOfServer(rate, prompts.lengths, prompts.lengths * computed, outputs.lengths, max(1.0, dispersion))
    error = _error(telemetry, load, costs)
    return _Present(load, costs, worst, prompts, computed, error)


def _error(telemetry: _Telemetry, load: LoadOfServer, costs: ServerCosts) -> float:
    """Return the largest relative error of the model of the present; NoPools if it does not reproduce a figure."""
    if load.utilisation(costs) > MOST_PRESENT:
        raise NoPools("the server is saturated: what it serves is less than what clients send")
    ttft = queue_prefills(load, costs, math.inf).seconds
    edges, counts = telemetry.histogram(TTFT)
    shares = np.array(counts) / max(counts[-1], 1e-9)
    misplaced = max(abs(float((ttft <= edge).mean()) - share) for edge, share in zip(edges, shares, strict=True))
    mean, mean_ttft = float(ttft.mean()), telemetry.grown("ttft") / max(counts[-1], 1e-9)
    in_flight = float((telemetry.rows["running"] + telemetry.rows["waiting"]).mean())
    figures = {
        "TTFT": (mean, mean_ttft),
        "the number of requests": (load.decoding(costs) + load.rate * mean, in_flight),
    }
    errors = {name: abs(model - real) / max(real, 1e-9) for name, (model, real) in figures.items()}
    least, most = (load.kv_tokens(costs, mean, longest_together=way)[0] for way in (False, True))
    usage = float(telemetry.rows["usage"].mean()) * costs.capacity
    if not least * (1 - MOST_ERROR) <= usage <= most * (1 + MOST_ERROR):
        raise NoPools("the model does not reproduce the KV cache usage of this server")
    name = max(errors, key=errors.__getitem__)
    if errors[name] > MOST_ERROR or misplaced > MOST_MISPLACED:
        raise NoPools(f"the model does not reproduce {name if errors[name] > MOST_ERROR else 'TTFT'} of this server")
    return float(max(errors[name], misplaced))


def _pools(present: _Present, place: int, servers: tuple[int, int], seen: int, slo: float) -> Pools | None:
    """Return the pools if both stay within their bounds and help; `slo` is that of TTFT, 0 if none is set."""
    prompts, load = present.prompts, present.load
    edge, long_count = float(prompts.edges[place]), float(prompts.counts[place + 1 :].sum())
    if long_count < FEWEST or prompts.count - long_count < FEWEST:
        return None
    share_long, split = long_count / prompts.count, []
    for long, many in zip((False, True), servers, strict=True):
        inside = (load.kv > edge) == long
        share = share_long if long else 1 - share_long
        if not inside.any():
            return None
        expected = load._replace(rate=load.rate * share * seen / many, kv=load.kv[inside], work=load.work[inside])
        ttft = queue_prefills(expected, present.costs, edge)
        # the pool stays below its bounds with the longest prompts and outputs that the histograms allow
        longer = prompts.most_mean(place, beyond=long) / float(expected.kv.mean())
        work = min(float(expected.work.mean()) / present.computed * longer, load.work.mean() / share)
        worst = expected._replace(
            rate=expected.rate * (1 + 2 * math.sqrt(load.dispersion / (prompts.count * share))),
            kv=expected.kv * longer,
            work=np.full(len(expected.work), work),
            outputs=np.sort(load.outputs)[-max(1, math.ceil(share * len(load.outputs))) :],
        )
        if worst.utilisation(present.worst) > MOST_PREFILL:
            return None
        mean, deviation = worst.kv_tokens(present.worst, float(ttft.seconds.mean()))
        decoding = worst.decoding(present.worst)
        if not (
            mean + SIGMAS * deviation <= MOST_KV * present.worst.capacity
            and decoding + SIGMAS * math.sqrt(decoding) <= present.worst.cap
            and expected.decoding(present.costs) <= MOST_BATCH * load.decoding(present.costs)
        ):
            return None
        split.append(ttft)
    total = sum(servers)
    everything = load._replace(rate=load.rate * seen / total)
    shared, now = (queue_prefills(some, present.costs, edge) for some in (everything, load))
    pools = Pools(edge, *servers, seen, present.error, now, shared, (split[0], split[1]))
    in_pool, in_shared = (ttft.percentile(0.9, long=False) for ttft in (split[0], shared))
    helps = in_pool <= min(CLEARLY * in_shared, in_shared - LEAST_GAIN)
    helps &= share_long * split[1].seconds.mean() + (1 - share_long) * split[0].seconds.mean() <= shared.seconds.mean()
    keeps = split[1].percentile(0.9, long=True) <= now.percentile(0.9, long=True)
    keeps |= split[1].percentile(0.99, long=True) <= CLEARLY * slo
    return pools if helps and keeps else None
