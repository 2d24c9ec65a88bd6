"""The load that clients offered a server, and whether two snapshots saw the same load.

Finished requests alone do not show the load: a preemption cascade keeps the long ones from finishing. A prompt counts
from its first token on, by `prompt_tokens_total` and the TTFT histogram, which vLLM increments together, once per
request, also if it preempts the request later. Arrivals are the requests that finished and those by which more are in
flight.

Without the same load, a fix cannot be told from a quieter hour. The server itself moves what can be measured: a faster
one has fewer requests in flight, and clients that wait for their answer send more of them. So a number alone proves
nothing. Whatever the clients, a server that became faster gets as many requests per second as before or more, with as
many in flight or fewer, and a slower one the reverse: only another load moves both the same way. The same holds for the
requests of each length. Clients that have a request in flight almost always (closed loop) are as many as before only if
as many are in flight, or pause between two requests.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from diag.core.formatting import number, quantity
from diag.core.metric_prefix import WAITING, metric
from diag.core.subjects import Floats
from diag.diagnosis.report import FEWEST_REQUESTS, SAME_LENGTHS, SAME_LOAD, ServerSnapshot
from diag.knowledge.signals import IN_FLIGHT, NOW, endpoint_without_vllm, serves

FLAT = 0.1
"""Variance / mean of requests in flight: 0.00-0.04 for closed-loop clients (kv_cascade_base), 1 by chance alone."""
COUPLED = 0.25
"""`Load.steps`: 0.00-0.10 for closed-loop clients (kv_cascade_base), 0.5 or more if arrivals do not wait for answers,
also in a queue so long that it is flat."""
ABSURD = 1e12
"""Requests in flight that no server has, and whose sum a float still holds."""
CHANCE = 2.0
"""Standard errors that chance explains, in 95 % of cases; arrivals are counted as Poisson events."""
CHANCE_OF_MANY = 3.0
"""Standard errors that chance explains if the dozen of buckets of a histogram are compared at once."""
MOSTLY_IDLE = 0.5
"""Share of scrapes without a request in flight (judged)."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of prompts (those begun) or of outputs (those finished), in tokens.

    error: the standard error of the mean. per_second: tokens per second. counts: the finished requests by the upper
    edge of their histogram bucket.
    """

    mean: float | None = None
    error: float = 0.0
    per_second: float | None = None
    counts: tuple[tuple[float, float], ...] = ()

    @property
    def longest(self) -> float | None:
        """The bucket edge above the longest request that finished; if that is infinite, the last finite edge."""
        if not any(count for _, count in self.counts):
            return None
        longest = max(edge for edge, count in self.counts if count)
        return min(longest, max((edge for edge, _ in self.counts if math.isfinite(edge)), default=0.0))


@dataclass(frozen=True)
class Load:
    """The load that clients offered a server over a whole span; None: not measured.

    in_flight: requests running or waiting (mean), and their `variance` over the scrapes. steps: the squares of their
    changes from scrape to scrape, per request that arrived or finished. idle: the share of scrapes without any.
    arrivals: requests per second. finished: requests from the first scrape to the last. seconds: those in which the
    server was observed, each scrape standing for one interval. responded: whether any page was served.
    """

    in_flight: float | None
    variance: float
    arrivals: float | None
    finished: float
    prompts: Lengths
    outputs: Lengths
    seconds: float
    responded: bool = True
    steps: float = 0.0
    idle: float = 0.0

    @property
    def measured(self) -> bool:
        """True if the server ever published its numbers."""
        return self.in_flight is not None

    @property
    def closed_loop(self) -> bool:
        """True if clients send the next request when they have their answer: a request arrives as another one ends."""
        return self.in_flight is not None and flat(self.in_flight, self.variance) and self.steps < COUPLED

    @property
    def residence(self) -> float | None:
        """Seconds that a request spends in the server, by Little's law; infinite if none arrives or leaves."""
        if self.in_flight is None or self.arrivals is None:
            return None
        return self.in_flight / self.arrivals if self.arrivals else math.inf


def flat(mean: float, variance: float) -> bool:
    """Return True if requests in flight hardly vary."""
    return mean >= 1 and variance < FLAT * mean


# -- measuring it -----------------------------------------------------------------------------------------------------


def requests_in_flight(server: ServerSnapshot) -> Floats:
    """Return the running and waiting requests at every scrape, NaN if unknown."""
    row = server.scraped(IN_FLIGHT)
    return np.where(np.abs(row) < ABSURD, row, np.nan)


def load(server: ServerSnapshot) -> Load:
    """Measure the load on one server."""
    row = requests_in_flight(server)
    valid = np.flatnonzero(np.isfinite(row))
    responded = any((server.value(signal.promql) or 0) > 0 for signal in (serves, endpoint_without_vllm))
    if not len(valid):
        return Load(None, 0.0, None, 0.0, Lengths(), Lengths(), 0.0, responded)
    in_flight, times = row[valid], server.queries.source.instants[valid]
    lasted = float(times[-1] - times[0]) / 1000
    seconds = lasted + server.queries.source.interval
    finished, begun = (
        (server.value(counter) or 0.0) * lasted / seconds for counter in ("$finished_requests", "$first_tokens")
    )
    waiting = server.scraped(NOW[WAITING])[valid]
    # vLLM counts a request that its client gave up not as finished, but as begun if it had begun
    ended_or_new = finished + float(in_flight[-1] - in_flight[0])
    begun_or_queued = begun + float(waiting[-1] - waiting[0])
    arrived = max(ended_or_new, begun_or_queued, 0.0)
    prompts = _lengths(server, "prompt", ("$prompt_tokens", "$first_tokens"), seconds)
    if prompts.mean is None:  # the page of a pooling model counts finished prompts alone
        prompts = _lengths(server, "prompt", ("$finished_prompt_tokens", "$finished_requests"), seconds)
    return Load(
        in_flight=float(in_flight.mean()),
        variance=float(in_flight.var()),
        arrivals=arrived / lasted if lasted else None,
        finished=finished,
        prompts=prompts,
        outputs=_lengths(server, "generation", ("$finished_output_tokens", "$finished_requests"), seconds),
        seconds=seconds,
        responded=responded,
        steps=float((np.diff(in_flight) ** 2).sum()) / max(arrived + finished, 1.0),
        idle=float((in_flight == 0).mean()),
    )


def _lengths(server: ServerSnapshot, kind: str, counters: tuple[str, str], seconds: float) -> Lengths:
    """Measure lengths by the counters of tokens and of requests, their deviation by the finished requests alone.

    The requests of a histogram bucket are spread evenly between its edges.
    """
    tokens, requests = map(server.value, counters)
    cumulative = [(0.0, 0.0), *server.histogram(metric(f"request_{kind}_tokens"))]
    counts = [(low, high, upto - before) for (low, before), (high, upto) in pairwise(cumulative)]
    low, high, weight = np.array(counts or [(0.0, 0.0, 0.0)]).T
    deviation = 0.0
    if weight.sum() > 0:
        high = np.where(np.isinf(high), low, high)
        middle, within = (low + high) / 2, (high - low) ** 2 / 12
        mean = np.average(middle, weights=weight)
        deviation = float(np.sqrt(np.average((middle - mean) ** 2 + within, weights=weight)))
    return Lengths(
        mean=tokens / requests if tokens is not None and requests and requests >= FEWEST_REQUESTS else None,
        error=deviation / math.sqrt(requests) if requests else 0.0,
        per_second=None if tokens is None else tokens / seconds,
        counts=tuple((edge, count) for _, edge, count in counts),
    )


# -- comparing two of them --------------------------------------------------------------------------------------------


def differences(before: Load, after: Load, *, limited: bool = False) -> Iterator[str]:
    """Yield a sentence for each difference of the offered loads; `limited`: a gateway limit is the change itself."""
    if not before.measured:
        if before.responded:
            yield "the load before the change was not measured: its page has no running and waiting requests"
        return
    if after.finished < FEWEST_REQUESTS:
        finished = f"only {after.finished:.0f} requests finished after the change"
        yield f"{finished} (in {quantity(after.seconds, 'seconds')}): too little traffic to compare"
        return
    if not limited and (amount := _amount_difference(before, after)):
        yield "; ".join(filter(None, (mostly_idle("BEFORE", before), mostly_idle("AFTER", after), amount)))
    faster = direction(SAME_LOAD, after.residence, before.residence)
    for name, old, new in (("prompt", before.prompts, after.prompts), ("output", before.outputs, after.outputs)):
        if _same_lengths(old, new):
            continue
        # the server's pace explains how requests of every length moved if none is rarer on a faster one
        counts, seconds = (dict(old.counts), dict(new.counts)), (before.seconds, after.seconds)
        pairs = [(counts[0].get(edge, 0.0), counts[1].get(edge, 0.0)) for edge in counts[0].keys() | counts[1].keys()]
        is_rarer = any(
            not _by_chance(CHANCE_OF_MANY, pair, seconds)
            and direction(SAME_LOAD, pair[0] / seconds[0], pair[1] / seconds[1]) == -faster
            for pair in pairs
        )
        if not faster or not pairs or is_rarer:
            means = [_shown(part.mean) + (f" (± {number(part.error)})" if part.error else "") for part in (old, new)]
            yield f"{name} lengths differ: mean {means[0]} -> {means[1]} tokens"


def mostly_idle(side: str, load: Load) -> str:
    """Return a sentence if a server had no request in most scrapes of BEFORE or AFTER, else ""."""
    if load.idle <= MOSTLY_IDLE:
        return ""
    if load.idle == 1:
        return f"{side} was idle, without a request in flight in any scrape: observe the server under load"
    share = quantity(load.idle, "share")
    return f"{side} was mostly idle, without a request in flight in {share} of its scrapes: observe it under load"


def _amount_difference(before: Load, after: Load) -> str:
    """Return how the number of requests differs, "" if it may be the same."""
    moved = direction(SAME_LOAD, before.in_flight, after.in_flight)
    if not moved or before.in_flight is None or after.in_flight is None:
        return ""
    if before.closed_loop and before.arrivals and after.arrivals is not None:
        # few clients that pause vary as the requests in flight do (Poisson), and more if they send more often
        pausing = before.variance, before.variance * after.arrivals / before.arrivals
        if not direction(SAME_LOAD, before.in_flight + pausing[0], after.in_flight + pausing[1]):
            return ""
    in_flight = f"{_shown(before.in_flight)} -> {_shown(after.in_flight)}"
    arrivals = f"arrivals {_shown(before.arrivals)} -> {_shown(after.arrivals)} per second"
    if before.closed_loop:
        return f"the load differs: {in_flight} requests in flight of closed-loop clients, {arrivals}"
    if before.arrivals is None or after.arrivals is None:
        return f"the load differs: {arrivals}, requests in flight {in_flight}"
    if direction(SAME_LOAD, before.arrivals, after.arrivals) != moved:
        return ""
    seconds = before.seconds, after.seconds
    if _by_chance(CHANCE, (before.arrivals * seconds[0], after.arrivals * seconds[1]), seconds):
        return f"too few requests arrived to tell their rates apart ({arrivals}): observe for longer"
    return f"the load differs: {arrivals}, and requests in flight with them {in_flight}"


def direction(factor: float, old: float | None, new: float | None) -> int:
    """Return 1 if a value rose by more than a factor, -1 if it fell so far, else 0; unknown values did not move."""
    if old is None or new is None or max(old, new) <= factor * min(old, new):
        return 0
    return 1 if new > old else -1


def _by_chance(errors: float, counts: tuple[float, float], seconds: tuple[float, float]) -> bool:
    """Return True if chance explains the difference of two rates: Poisson events counted in so many seconds."""
    (one, other), (first, second) = counts, seconds
    error = math.sqrt(one / first**2 + other / second**2)
    return abs(one / first - other / second) <= errors * error


def _same_lengths(old: Lengths, new: Lengths) -> bool:
    """Compare the means, as far as these are known; else the longest requests and the tokens per second.

    Among closed-loop clients, those that a fix unblocks send more often than the others, which moves the mean of all.
    """
    if old.mean is None or not direction(SAME_LENGTHS, old.mean, new.mean):
        return new.mean is not None or old.mean is None
    if new.mean is not None and abs(new.mean - old.mean) <= CHANCE * math.hypot(old.error, new.error):
        return True
    same_longest = old.longest is not None and old.longest == new.longest
    return same_longest and bool(old.per_second) and not direction(SAME_LOAD, old.per_second, new.per_second)


def _shown(value: float | None) -> str:
    return "-" if value is None else number(value)
