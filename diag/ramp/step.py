"""One step of a ramp: what the server's own counters and histograms show of the load that was offered.

A load generator starts with one request alone and then sends all at once, and at its end the last requests finish one
after the other: neither shows the server at the offered load. The server's own counters tell the steady part, in which
all offered requests are in flight; the generator's clock does not.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diag.core.contract import Contract
from diag.core.formatting import quantity
from diag.core.metric_prefix import FINISHED, GENERATED, PROMPTED, metric
from diag.core.subjects import Floats, label_value
from diag.diagnosis.query_cache import QueryCache
from diag.knowledge.signals import E2E, IN_FLIGHT, ITL, LATENCIES, TTFT
from diag.ramp.results import ClientResult, GeneratorUse, Offer
from diag.sources.kept_ramp import Latency
from diag.sources.observation import Observation, SampleSource

INSTANCE = ("instance",)
HISTOGRAMS = {"TTFT": TTFT, "inter-token latency": ITL, "end-to-end latency": E2E}
SLOS = {"TTFT": "ttft_seconds", "inter-token latency": "itl_seconds", "end-to-end latency": "e2e_seconds"}
CHANCE = 3
"""Fewer late or failed requests than this may be chance."""
CROWDED = 0.5
"""Share of the time for which a process waits for a CPU, and CPU pressure, above which a host is crowded: a server that
gets half of the CPU time it asks for serves what its neighbours leave."""
FEWEST_SCRAPES = 4
"""Scrapes in the steady part below which a step is too short: nothing is concluded from fewer."""
SETTLES = 0.15, 5.0
"""The share of the steady part at its begin that is left out, for requests that were sent at once are prefilled at
once; and the most seconds of that."""
ALL = 0.9
"""Share of the offered requests that counts as all of them: a request that has just ended and the one that takes its
place are both in no gauge."""
PLATEAU = 0.5
"""Share of the usual rate of tokens from which on a server serves at its plateau; a neighbour may halve it."""
STEP_TOKENS = f"sum by ($by) (increase({metric('iteration_tokens_total_sum')}[$window])) / ($engine_steps > 0)"
RATES = {
    "requests_per_second": "$finished_requests",
    "output_tokens_per_second": "$output_tokens",
    "prompt_tokens_per_second": "$prompt_tokens",
}
SO_FAR = {
    "tokens": f"sum by ($by) (last_over_time({PROMPTED}[$window]))"
    f" + sum by ($by) (last_over_time({GENERATED}[$window]))",
    "finished": f"sum by ($by) (last_over_time({FINISHED}[$window]))",
    "aborted": f'sum by ($by) (last_over_time({FINISHED}{{finished_reason="abort"}}[$window]))',
}


class Failures(NamedTuple):
    """Failed requests of a step, of how many; `by` is "server" for HTTP answers, "client" for a load tool's count."""

    failed: float
    of: float
    by: Literal["server", "client"]

    @property
    def share(self) -> float:
        return self.failed / max(self.of, 1.0)


ERRORS = {"server": "answers are HTTP errors (4xx or 5xx)", "client": "requests failed, as the load generator counts"}
"""Sentences about failed requests, by the counter."""


class Breach(NamedTuple):
    """An SLO that a step misses; without a limit, `what` is the sentence about the failed requests."""

    what: str
    share: float
    limit: str

    @property
    def sentence(self) -> str:
        """The breach in words: "TTFT is above 2.5 s for 12 % of the requests"."""
        if not self.limit:
            return f"{quantity(self.share, 'share')} of the {self.what}"
        tokens = "tokens" if self.what == "inter-token latency" else "requests"
        return f"{self.what} is above {self.limit} for {quantity(self.share, 'share')} of the {tokens}"


class Step(NamedTuple):
    """A step as the server measured it over its steady part; rates are per second.

    `by` is "client" if there are only the results of a load tool. `growth` is the growth of requests in flight from the
    first to the last third of the step, per finished request. `queries` are the samples of the steady part, and
    `scrapes` how many there are, None if there is no server. `crowded` is the sentence about a host whose CPUs others
    use, "" otherwise. `quarters` are the tokens/s in each quarter of the steady part, empty if it has too few scrapes.
    `cpu_wait` is the share of the time for which a process of vLLM waited for a CPU under pressure, None if unknown.
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
    failures: Failures | None = None
    scrapes: int | None = None
    interval: float = 0.0
    crowded: str = ""
    quarters: tuple[float, ...] = ()
    cpu_wait: float | None = None

    @property
    def is_short(self) -> bool:
        """True if the steady part has too few scrapes to conclude anything."""
        return self.scrapes is not None and self.scrapes < FEWEST_SCRAPES

    @property
    def is_usable(self) -> bool:
        return not self.is_short and not self.crowded

    @property
    def tokens_per_second(self) -> float:
        return self.prompt_tokens_per_second + self.output_tokens_per_second

    @property
    def latencies(self) -> dict[str, Latency]:
        return dict(zip(SLOS, (self.ttft, self.itl, self.e2e), strict=True))

    def breaches(self, contract: Contract) -> list[Breach]:
        """Return the SLOs of which more is late, or fails, than the objective allows; a few may be chance."""
        allowed = 1 - contract.objective
        breaches = []
        for what, latency in self.latencies.items():
            late = latency.late or 0.0
            if late > allowed and late * latency.observed >= CHANCE - 0.5:
                breaches.append(Breach(what, late, quantity(getattr(contract, SLOS[what]), "seconds")))
        failures = self.failures
        if failures and failures.failed >= CHANCE - 0.5 and failures.share > allowed:
            breaches.append(Breach(ERRORS[failures.by], failures.share, ""))
        return breaches

    def counts(self, seconds: float) -> bool:
        """Return True if the step was steady for long enough, with enough requests for its percentiles."""
        return self.is_usable and self.seconds >= 0.6 * seconds and self.requests >= FEWEST


FEWEST = 10
"""Finished requests without which not even the 90th percentile is known."""


def measure(offer: Offer, observed: Observation | None, contract: Contract, client: ClientResult | None) -> Step | None:
    """Return a step from the samples that were taken while it lasted; None if they show no load.

    Averages, rates and latencies are those of the steady part, failures those of the whole step.
    """
    if observed is None:
        return None
    whole = QueryCache(observed, contract)
    times = observed.instants.astype(float) / 1000
    so_far = {name: _scraped(whole, promql) for name, promql in SO_FAR.items()}
    in_flight = _scraped(whole, IN_FLIGHT)
    counted = Counted(times, in_flight, so_far["finished"], so_far["tokens"])
    steady = steady_part(counted, offer.concurrency, generated=offer != Offer())
    if not np.nan_to_num(in_flight).any() and not (np.diff(so_far["tokens"]) > 0).any():
        return None

    flight = in_flight[steady][np.isfinite(in_flight[steady])]
    failures = _failures(whole, client, so_far["aborted"][max(steady.stop - 1, 0) :])
    if len(flight) < FEWEST_SCRAPES:
        base = step_from_client(offer, client, contract) if client else Step(offer, 0.0, 0.0, 0.0, 0.0, 0.0)
        seconds = float(times[steady][-1] - times[steady][0]) if len(flight) else 0.0
        return base._replace(seconds=seconds, scrapes=len(flight), interval=observed.interval, failures=failures)

    source = SampleSource(observed.samples, observed.instants[steady], observed.interval)
    queries = QueryCache(source, contract)
    seconds = queries.span + queries.source.interval
    rates = {name: (value(queries, promql) or 0.0) / seconds for name, promql in RATES.items()}
    finished = rates["requests_per_second"] * seconds
    waits = value(queries, "$longest_cpu_wait"), value(queries, "$cpu_pressure_mean")
    third = len(flight) // 3
    growth = float(flight[-third:].mean() - flight[:third].mean()) / finished if third and finished > 0 else 0.0
    ttft, itl, e2e = (_latency(queries, name) for name in SLOS)
    uses = [use for use in client.uses if times[steady][0] <= use.at <= times[steady][-1]] if client else []
    if client and len(uses) > 1:
        client = client._replace(cores=(uses[-1].cpu - uses[0].cpu) / (uses[-1].at - uses[0].at))
    return Step(
        offer,
        queries.span,
        finished,
        rates["requests_per_second"],
        rates["output_tokens_per_second"],
        rates["prompt_tokens_per_second"],
        value(queries, "$requests_running_mean"),
        value(queries, "$requests_waiting_mean"),
        in_flight=float(flight.mean()),
        tokens_per_step=value(queries, STEP_TOKENS),
        preemptions=value(queries, "$preemptions"),
        growth=growth,
        ttft=ttft,
        itl=itl,
        e2e=e2e,
        client=client,
        queries=queries,
        failures=failures,
        scrapes=len(flight),
        interval=observed.interval,
        crowded=_crowd("a process of vLLM", *waits) or generator_crowded(uses),
        quarters=_quarters(times[steady], so_far["tokens"][steady]),
        cpu_wait=None if waits[0] is None or waits[1] is None else min(waits[0], waits[1]),
    )


def _quarters(times: Floats, tokens: Floats) -> tuple[float, ...]:
    """Return the tokens/s in each quarter; none if a quarter would be shorter than two scrape intervals."""
    scraped = np.isfinite(tokens)
    times, tokens = times[scraped], tokens[scraped]
    if len(times) < 9:
        return ()
    edges = np.linspace(0, len(times) - 1, 5).round().astype(int)
    rates = np.diff(tokens[edges]) / np.diff(times[edges])
    return tuple(map(float, rates)) if (rates >= 0).all() else ()


def _failures(whole: QueryCache, client: ClientResult | None, aborted: Floats) -> Failures | None:
    """Count what the server answered with an error, else what the generator counts without the requests that it cut.

    `aborted` are the requests whose client hung up so far, from the last steady scrape on: a generator may cut those
    that are in flight at its end, and counts them as failed.
    """
    errors = [value(whole, promql) for promql in ("$failed_http", "$refused_total")]
    if any(count is not None for count in errors):
        failed = sum(filter(None, errors))
        return Failures(failed, failed + (value(whole, "$served_answers") or 0.0), "server")
    if client is None:
        return None
    counts = aborted[np.isfinite(aborted)]
    cut = min(float(counts[-1] - counts[0]) if len(counts) else 0.0, client.failed)
    return Failures(client.failed - cut, client.completed + client.failed - cut, "client")


def generator_crowded(uses: Sequence[GeneratorUse]) -> str:
    """Return the sentence about a load generator that waited for a CPU most of the time; "" if it did not."""
    waited = [(use.at, use.waited) for use in uses if use.waited is not None]
    pressures = [use.pressure for use in uses if use.pressure is not None]
    if len(waited) < 2 or not pressures:
        return ""
    (begin, before), (end, after) = waited[0], waited[-1]
    return _crowd("the load generator", (after - before) / (end - begin), sum(pressures) / len(pressures))


def _crowd(who: str, waited: float | None, pressure: float | None) -> str:
    """Return the sentence about processes that waited for a CPU most of the time; "" if none did.

    Waiting alone is none: processes of one server that spin on the same core wait for each other and serve well.
    """
    if waited is None or pressure is None or min(waited, pressure) <= CROWDED:
        return ""
    shares = quantity(waited, "share"), quantity(pressure, "share")
    return f"{who} waited for a CPU for {shares[0]} of the time, under a CPU pressure of {shares[1]}"


def _scraped(queries: QueryCache, promql: str) -> Floats:
    """Return a value at every scrape of the one server, NaN if the scrape failed."""
    times = queries.source.instants
    rows = list(queries.ask(promql, INSTANCE, queries.holding(0.0), times).values())
    return rows[0] if rows else np.full(len(times), np.nan)


def _latency(queries: QueryCache, name: str) -> Latency:
    """Read a latency off its histogram."""
    histogram = HISTOGRAMS[name]
    buckets = f"sum by ($by, le) (increase({histogram}_bucket[$window]))"
    p50, p90, p99 = (value(queries, f"histogram_quantile({share}, {buckets})") for share in (0.5, 0.9, 0.99))
    count, in_time = (value(queries, promql) for promql in LATENCIES[name])
    late = max(0.0, 1 - in_time / count) if count and in_time is not None else None
    return Latency(p50, p90, p99, count or 0.0, late, _bucket(queries, histogram))


def _bucket(queries: QueryCache, metric: str) -> tuple[float, float | None] | None:
    """Return the edges of the bucket in which the 99th percentile of a histogram lies; None without observations."""
    rows = queries.ask(f"sum by (le) (increase({metric}_bucket[$window]))", (), queries.whole)
    with suppress(ValueError):  # an edge that is no number
        counts = sorted((float(label_value(subject, "le")), row[-1]) for subject, row in rows.items())
        if counts and counts[-1][1] > 0:
            at = next(place for place, (_, count) in enumerate(counts) if count >= 0.99 * counts[-1][1])
            upper = counts[at][0]
            return counts[at - 1][0] if at else 0.0, upper if math.isfinite(upper) else None
    return None


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
        failures=Failures(client.failed, client.completed + client.failed, "client"),
    )


def _judged(latency: Latency, slo: float) -> Latency:
    """Fill in `late`: a tool gives percentiles, so at least the share above the first one beyond the SLO is late."""
    percentiles = ((0.5, latency.p50), (0.9, latency.p90), (0.99, latency.p99))
    beyond = (1 - share for share, at in percentiles if at is not None and at > slo)
    return latency._replace(late=max(beyond, default=0.0))


# -- the steady part ---------------------------------------------------------------------------------------------------


class Counted(NamedTuple):
    """The server's counters at each scrape of a step, NaN if the scrape failed; `times` in seconds.

    `tokens` are those of prompts and answers.
    """

    times: Floats
    in_flight: Floats
    finished: Floats
    tokens: Floats


def steady_part(counted: Counted, concurrency: int | None, *, generated: bool) -> slice:
    """Return the steady scrapes; an empty slice if none shows any load.

    `concurrency` are the requests that a closed loop keeps in flight. A load that was not generated for this step, of
    other clients, has no start and no end: all scrapes with at least half of its usual requests in flight are steady.
    """
    in_flight, times = np.nan_to_num(counted.in_flight), counted.times
    growth = np.nan_to_num(np.diff(counted.tokens, prepend=np.nan) / np.diff(times, prepend=np.nan))
    active = (in_flight > 0) | (growth > 0)  # short requests may be in flight at no scrape
    if not active.any():
        return slice(0, 0)
    if not generated:
        return _settled(active & (in_flight >= np.median(in_flight[active]) / 2), times)

    arriving, arrived = active, counted.finished + counted.in_flight
    scraped = np.flatnonzero(np.isfinite(arrived))
    if len(scraped):  # another request arrived after the scrape; if no counter tells, after all
        last = np.flatnonzero(arrived < arrived[scraped[-1]] - 0.5)
        arriving = active & (np.arange(len(arrived)) <= (last[-1] if len(last) else -1))
    if concurrency is None:
        return _settled(arriving, times)
    full = in_flight >= ALL * concurrency
    if not arriving.any() or full[arriving].mean() >= 0.5:
        return _settled(full, times)
    # while requests still arrive, fewer are in flight than were offered: the client is slow, or requests are so short
    # that the gauges miss many
    usual = np.quantile(growth[arriving & (growth > 0)], 0.75) if (arriving & (growth > 0)).any() else 0.0
    return _settled(arriving & (growth >= PLATEAU * usual), times)


def _settled(loaded: NDArray[np.bool_], times: Floats) -> slice:
    """Return the scrapes from the first loaded one, once it has settled, to the last one."""
    at = np.flatnonzero(loaded)
    if not len(at):
        return slice(0, 0)
    first, last = int(at[0]), int(at[-1])
    begin = times[first] + min(SETTLES[0] * (times[last] - times[first]), SETTLES[1])
    return slice(int(np.searchsorted(times, begin)), last + 1)
