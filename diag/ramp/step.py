"""One step of a ramp: the load that was offered, and what the server's own counters and histograms show of it."""

import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diag.core.contract import Contract
from diag.core.formatting import quantity
from diag.core.subjects import Floats
from diag.diagnosis.query_cache import QueryCache
from diag.knowledge.signals import ITL, LATENCIES
from diag.sources.observation import Observation, SampleSource
from diag.verify.load import IN_FLIGHT

INSTANCE = ("instance",)
HISTOGRAMS = {
    "TTFT": ("vllm:time_to_first_token_seconds",),
    "inter-token latency": ITL,
    "end-to-end latency": ("vllm:e2e_request_latency_seconds",),
}
SLOS = {"TTFT": "ttft_seconds", "inter-token latency": "itl_seconds", "end-to-end latency": "e2e_seconds"}
CHANCE = 3
"""Fewer late or failed requests than this may be chance."""
SETTLES = 0.15, 5.0
"""The share of a step at its begin in which requests only arrive, and the most seconds of that."""
STEP_TOKENS = "sum by ($by) (increase(vllm:iteration_tokens_total_sum[$window])) / ($engine_steps > 0)"
RATES = {
    "requests_per_second": "$finished_requests",
    "output_tokens_per_second": "$output_tokens",
    "prompt_tokens_per_second": "$prompt_tokens",
}
TOKENS_SO_FAR = "sum by ($by) (last_over_time(vllm:generation_tokens_total[$window]))"


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


class Latency(NamedTuple):
    """Percentiles in seconds and how many were observed; `late` is the share beyond the SLO, None if unknown."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    observed: float = 0.0
    late: float | None = None


class ClientResult(NamedTuple):
    """A step as the load generator reports it; times in seconds.

    `ttft`, `itl` and `e2e` are percentiles 50, 90 and 99, None if not reported. `cores` are the CPU cores that the
    generator used. `start` and `end` are unix seconds, 0 if unknown.
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

    @property
    def failed_share(self) -> float:
        return self.failed / max(self.completed + self.failed, 1)


class Breach(NamedTuple):
    """An SLO that a step misses."""

    what: str
    share: float
    limit: str

    @property
    def sentence(self) -> str:
        """The breach in words: "TTFT is above 2.5 s for 12 % of the requests"."""
        if not self.limit:
            return f"{quantity(self.share, 'share')} of the requests failed"
        tokens = "tokens" if self.what == "inter-token latency" else "requests"
        return f"{self.what} is above {self.limit} for {quantity(self.share, 'share')} of the {tokens}"


class Step(NamedTuple):
    """A step as the server measured it over its steady part; rates are per second.

    `by` is "client" if there are only the results of a load tool. `growth` is the growth of requests in flight from the
    first to the last third of the step, per finished request. `queries` are the samples of the steady part.
    """

    offer: Offer
    seconds: float
    requests: float
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    running: float | None = None
    waiting: float | None = None
    in_flight: float | None = None
    tokens_per_step: float | None = None
    preemptions: float | None = None
    growth: float = 0.0
    ttft: Latency = Latency()
    itl: Latency = Latency()
    e2e: Latency = Latency()
    client: ClientResult | None = None
    queries: QueryCache | None = None
    by: Literal["server", "client"] = "server"

    @property
    def tokens_per_second(self) -> float:
        return self.prompt_tokens_per_second + self.output_tokens_per_second

    @property
    def latencies(self) -> dict[str, Latency]:
        return dict(zip(SLOS, (self.ttft, self.itl, self.e2e), strict=True))

    def breaches(self, contract: Contract) -> list[Breach]:
        """Return the SLOs of which more is late, or fails, than the objective allows; a few may be chance."""
        allowed = 1 - contract.objective
        found = []
        for what, latency in self.latencies.items():
            late = latency.late or 0.0
            if late > allowed and late * latency.observed >= CHANCE - 0.5:
                found.append(Breach(what, late, quantity(getattr(contract, SLOS[what]), "seconds")))
        if self.client and self.client.failed >= CHANCE and self.client.failed_share > allowed:
            found.append(Breach("errors", self.client.failed_share, ""))
        return found

    def counts(self, seconds: float) -> bool:
        """Return True if the step was steady for long enough, with enough requests for its percentiles."""
        return self.seconds >= 0.6 * seconds and self.requests >= FEWEST


FEWEST = 10
"""Finished requests without which not even the 90th percentile is known."""


def measure(offer: Offer, observed: Observation | None, contract: Contract, client: ClientResult | None) -> Step | None:
    """Return a step from the samples that were taken while it lasted; None if they show no load."""
    if observed is None:
        return None
    whole = QueryCache(observed, contract)
    in_flight, tokens = _scraped(whole, IN_FLIGHT), _scraped(whole, TOKENS_SO_FAR)
    moved = np.diff(tokens, prepend=np.nan) > 0
    steady = steady_part(in_flight, moved, observed.instants.astype(float) / 1000)
    if steady.stop - steady.start < 2:
        return None
    source = SampleSource(observed.samples, observed.instants[steady], observed.interval)
    queries = QueryCache(source, contract)
    seconds = queries.span + queries.source.interval
    rates = {name: (value(queries, promql) or 0.0) / seconds for name, promql in RATES.items()}
    finished = rates["requests_per_second"] * seconds
    known = in_flight[steady][np.isfinite(in_flight[steady])]
    third = len(known) // 3
    growth = float(known[-third:].mean() - known[:third].mean()) / finished if third and finished > 0 else 0.0
    ttft, itl, e2e = (_latency(queries, name) for name in SLOS)
    return Step(
        offer,
        queries.span,
        finished,
        rates["requests_per_second"],
        rates["output_tokens_per_second"],
        rates["prompt_tokens_per_second"],
        value(queries, "$requests_running_mean"),
        value(queries, "$requests_waiting_mean"),
        in_flight=float(known.mean()) if len(known) else None,
        tokens_per_step=value(queries, STEP_TOKENS),
        preemptions=value(queries, "$preemptions"),
        growth=growth,
        ttft=ttft,
        itl=itl,
        e2e=e2e,
        client=client,
        queries=queries,
    )


def steady_part(in_flight: Floats, moved: NDArray[np.bool_], times: Floats) -> slice:
    """Return the scrapes between the arrival of the first requests and the departure of the last ones.

    `moved` is True if tokens were generated since the scrape before: short requests may be in flight at no scrape.
    """
    active = (np.nan_to_num(in_flight) > 0) | moved
    if not active.any():
        return slice(0, 0)
    level = np.median(np.nan_to_num(in_flight[active])) / 2
    loaded = np.flatnonzero(active & (np.nan_to_num(in_flight) >= level))
    first, last = int(loaded[0]), int(loaded[-1])
    begin = times[first] + min(SETTLES[0] * (times[last] - times[first]), SETTLES[1])
    return slice(int(np.searchsorted(times, begin)), last + 1)


def _scraped(queries: QueryCache, promql: str) -> Floats:
    """Return a value at every scrape of the one server, NaN if the scrape failed."""
    times = queries.source.instants
    rows = list(queries.ask(promql, INSTANCE, queries.holding(0.0), times).values())
    return rows[0] if rows else np.full(len(times), np.nan)


def _latency(queries: QueryCache, name: str) -> Latency:
    """Read a latency off its histogram; each release has one of its names."""

    def quantile(share: float) -> float | None:
        found = (
            value(queries, f"histogram_quantile({share}, sum by ($by, le) (increase({metric}_bucket[$window])))")
            for metric in HISTOGRAMS[name]
        )
        return next((seconds for seconds in found if seconds is not None), None)

    p50, p90, p99 = map(quantile, (0.5, 0.9, 0.99))
    count, in_time = (value(queries, promql) for promql in LATENCIES[name])
    late = max(0.0, 1 - in_time / count) if count and in_time is not None else None
    return Latency(p50, p90, p99, count or 0.0, late)


def value(queries: QueryCache, promql: str) -> float | None:
    """Return a number of the one server over all samples; None if there is none."""
    rows = list(queries.ask(promql, INSTANCE, queries.whole).values())
    return float(rows[0][-1]) if rows and math.isfinite(rows[0][-1]) else None


def step_from_client(offer: Offer, client: ClientResult, contract: Contract) -> Step:
    """Return a step that only a load tool has measured."""
    in_flight = client.requests_per_second * client.e2e.p50 if client.e2e.p50 else None
    return Step(
        offer,
        client.seconds,
        client.completed,
        client.requests_per_second,
        client.output_tokens_per_second,
        client.prompt_tokens_per_second,
        in_flight=in_flight if offer.concurrency is None else float(offer.concurrency),
        ttft=_judged(client.ttft, contract.ttft_seconds),
        itl=_judged(client.itl, contract.itl_seconds),
        e2e=_judged(client.e2e, contract.e2e_seconds),
        client=client,
        by="client",
    )


def _judged(latency: Latency, slo: float) -> Latency:
    """Fill in `late`: a tool gives percentiles, so at least the share above the first one beyond the SLO is late."""
    known = ((0.5, latency.p50), (0.9, latency.p90), (0.99, latency.p99))
    beyond = (1 - share for share, at in known if at is not None and at > slo)
    return latency._replace(late=max(beyond, default=0.0))
