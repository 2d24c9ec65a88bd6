"""What clients offered a server: how many requests, how long, and how many of them at once.

Finished requests alone do not tell: a preemption cascade keeps the long ones from finishing. A prompt counts from its
first token on, by `vllm:prompt_tokens_total` and the TTFT histogram, which vLLM increments together, once per request,
also where it preempts the request later. Arrivals are the requests that finished and those by which more are in flight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from diag.core.subjects import Floats
from diag.knowledge.signals import RUNNING, WAITING, endpoint_without_vllm, serves
from diag.verify.snapshot import ServerSnapshot

FLAT = 0.1
"""Variance / mean of requests in flight: 0.00-0.04 for closed-loop clients (kv_cascade_base), 1 by chance alone."""
COUPLED = 0.25
"""`Load.steps`: 0.00-0.10 for closed-loop clients (kv_cascade_base), 0.5 or more where arrivals wait for no answer,
also in a queue so long that it is flat."""
FEWEST = 3
"""Requests below which the signals have no value either."""
ABSURD = 1e12
"""Requests in flight that no server has, and whose sum a float still holds."""

NOW = {gauge: f"sum by ($by) (last_over_time({gauge}[$window]))" for gauge in (RUNNING, WAITING)}
IN_FLIGHT = " + ".join(NOW.values())


@dataclass(frozen=True)
class Lengths:
    """Of prompts (those begun) or of outputs (those finished), in tokens.

    error: the standard error of the mean. per_second: tokens per second. counts: the finished requests by the upper
    edge of their histogram bucket.
    """

    mean: float | None = None
    error: float = 0.0
    per_second: float | None = None
    counts: tuple[tuple[float, float], ...] = ()

    @property
    def longest(self) -> float | None:
        """The bucket edge above the longest request that finished; the last edge where it is beyond that."""
        if not any(count for _, count in self.counts):
            return None
        longest = max(edge for edge, count in self.counts if count)
        return min(longest, max((edge for edge, _ in self.counts if math.isfinite(edge)), default=0.0))


@dataclass(frozen=True)
class Load:
    """What clients offered a server over a whole span, None where it was not measured.

    in_flight: requests running or waiting (mean), and their `variance` over the scrapes. steps: the squares of their
    changes from scrape to scrape, per request that came or went. idle: the share of scrapes without any. arrivals:
    requests per second. finished: requests from the first scrape to the last. seconds: those in which the server was
    observed, each scrape standing for one interval. responded: whether any page was served.
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
        """Whether the server ever published its numbers."""
        return self.in_flight is not None

    @property
    def closed_loop(self) -> bool:
        """Whether clients send the next request when they have their answer: then one comes where another one goes."""
        return self.in_flight is not None and flat(self.in_flight, self.variance) and self.steps < COUPLED

    @property
    def residence(self) -> float | None:
        """Seconds that a request spends in the server, by Little's law; infinite where none arrives or leaves."""
        if self.in_flight is None or self.arrivals is None:
            return None
        return self.in_flight / self.arrivals if self.arrivals else math.inf


def requests_in_flight(server: ServerSnapshot) -> Floats:
    """Running and waiting requests at every scrape, NaN where they are unknown."""
    row = server.scraped(IN_FLIGHT)
    return np.where(np.abs(row) < ABSURD, row, np.nan)


def flat(mean: float, variance: float) -> bool:
    """Whether requests in flight hardly vary."""
    return mean >= 1 and variance < FLAT * mean


def load(server: ServerSnapshot) -> Load:
    """The load on one server."""
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
    arrived = _arrived(finished, in_flight, begun, waiting)
    return Load(
        in_flight=float(in_flight.mean()),
        variance=float(in_flight.var()),
        arrivals=arrived / lasted if lasted else None,
        finished=finished,
        prompts=_prompts(server, seconds),
        outputs=_lengths(server, "generation", ("$finished_output_tokens", "$finished_requests"), seconds),
        seconds=seconds,
        responded=responded,
        steps=float((np.diff(in_flight) ** 2).sum()) / max(arrived + finished, 1.0),
        idle=float((in_flight == 0).mean()),
    )


def _arrived(finished: float, in_flight: Floats, begun: float, waiting: Floats) -> float:
    """Requests that arrived: vLLM counts none as finished that its client gave up, but those of them that had begun."""
    return max(finished + float(in_flight[-1] - in_flight[0]), begun + float(waiting[-1] - waiting[0]), 0.0)


def _prompts(server: ServerSnapshot, seconds: float) -> Lengths:
    """Of the prompts begun; of those finished where the page does not count the others (pooling models)."""
    begun = _lengths(server, "prompt", ("$prompt_tokens", "$first_tokens"), seconds)
    return (
        begun
        if begun.mean is not None
        else _lengths(server, "prompt", ("$finished_prompt_tokens", "$finished_requests"), seconds)
    )


def _lengths(server: ServerSnapshot, kind: str, counters: tuple[str, str], seconds: float) -> Lengths:
    """By the counters of tokens and of requests; how far requests differ is known of the finished ones alone."""
    tokens, requests = map(server.value, counters)
    cumulative = [(0.0, 0.0), *server.histogram(f"vllm:request_{kind}_tokens")]
    counts = [(low, high, upto - before) for (low, before), (high, upto) in pairwise(cumulative)]
    return Lengths(
        mean=tokens / requests if tokens is not None and requests and requests >= FEWEST else None,
        error=_deviation(counts) / math.sqrt(requests) if requests else 0.0,
        per_second=None if tokens is None else tokens / seconds,
        counts=tuple((high, count) for _, high, count in counts),
    )


def _deviation(counts: Sequence[tuple[float, float, float]]) -> float:
    """The standard deviation of what (lower edge, upper edge, count) describe, spread evenly between the edges."""
    low, high, weight = np.array(counts or [(0.0, 0.0, 0.0)]).T
    if weight.sum() <= 0:
        return 0.0
    high = np.where(np.isinf(high), low, high)
    middle, within = (low + high) / 2, (high - low) ** 2 / 12
    mean = np.average(middle, weights=weight)
    return float(np.sqrt(np.average((middle - mean) ** 2 + within, weights=weight)))
