"""A queueing model of servers that share a load: TTFT by prompt length, and bounds of what the load takes.

Prefill is a queue of one server: prompts come at random, each takes the time of its tokens, and steps are shared with
the requests that decode. Decoding requests are in the server at random, so their number and the KV cache that they hold
have a mean and a deviation. vLLM counts prompts and outputs in two histograms, and no series tells which output belongs
to which prompt: every bound takes the outputs that are worst for it (Frechet's bounds).
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from diag.core.subjects import Floats

SAMPLES = 400
"""Lengths that stand for a histogram."""
REQUESTS = 12_000
"""Requests that are queued: the 90th percentile of TTFT then varies by about 3 %."""
SIGMAS = 3.0
OPEN_BUCKET = 2.5
"""Largest length in the last bucket, as a multiple of its lower edge: the next edge of vLLM's 1, 2, 5 series."""


class LengthHistogram:
    """Requests of a length up to each edge, the last one infinite, and the sum of all lengths."""

    def __init__(self, edges: Sequence[float], cumulative: Sequence[float], total: float) -> None:
        last = edges[-2] * OPEN_BUCKET
        self.edges = np.array([*edges[:-1], last])
        self.counts = np.diff(np.array(cumulative), prepend=0.0)
        self.total = total
        self.lower = np.array([0.0, *edges[:-1]])

    @property
    def count(self) -> float:
        """Number of requests."""
        return float(self.counts.sum())

    @cached_property
    def lengths(self) -> Floats:
        """Lengths at even quantiles, inside their buckets, with the mean of the histogram."""
        shares = np.cumsum(self.counts) / self.count
        quantiles = (np.arange(SAMPLES) + 0.5) / SAMPLES
        at = np.minimum(np.searchsorted(shares, quantiles), len(shares) - 1)
        below = np.where(at > 0, shares[at - 1], 0.0)
        inside = np.clip((quantiles - below) / np.maximum(shares[at] - below, 1e-9), 0.0, 1.0)
        low, high = -5.0, 5.0
        for _ in range(24):
            power = (low + high) / 2
            lengths = self.lower[at] + (self.edges[at] - self.lower[at]) * inside ** math.exp(power)
            low, high = (power, high) if lengths.mean() > self.total / self.count else (low, power)
        at_least_one: Floats = np.maximum(lengths, 1.0)
        return at_least_one

    def most_mean(self, place: int, *, beyond: bool) -> float:
        """Return the largest possible mean of the lengths up to an edge, or beyond it."""
        below, above = slice(place + 1), slice(place + 1, None)
        inside, outside = (above, below) if beyond else (below, above)
        count = max(float(self.counts[inside].sum()), 1e-9)
        by_edges = float(self.counts[inside] @ self.edges[inside]) / count
        by_total = (self.total - float(self.counts[outside] @ self.lower[outside])) / count
        return max(1.0, min(by_edges, by_total))


class ServerCosts(NamedTuple):
    """Costs and limits of one server.

    Seconds of a step and of a prefilled token; tokens of the KV cache and of a step; sequences.
    """

    step: float
    token: float
    capacity: float
    budget: float
    cap: float

    @property
    def prefill(self) -> float:
        """Seconds of prefill for each token: its own, and its part of a step."""
        return self.token + self.step / self.budget


class LoadOfServer(NamedTuple):
    """Requests per second at one server, and their prompts; `outputs` are those of all requests, sorted.

    `kv` are tokens that a prompt holds, `work` the tokens of it that are prefilled, `dispersion` is the variance of
    arrivals as a multiple of their mean.
    """

    rate: float
    kv: Floats
    work: Floats
    outputs: Floats
    dispersion: float = 1.0

    def utilisation(self, costs: ServerCosts) -> float:
        """Return the share of time that prefill takes."""
        return self.rate * float(self.work.mean()) * costs.prefill

    def decoding(self, costs: ServerCosts) -> float:
        """Return the mean number of requests that decode."""
        return self.rate * float(self.outputs.mean()) * self._pace(costs)

    def kv_tokens(self, costs: ServerCosts, ttft: float, *, longest_together: bool = True) -> tuple[float, float]:
        """Return mean and deviation of the tokens in the KV cache, with long outputs at long or at short prompts."""
        prompts = np.sort(self.kv)
        outputs = np.sort(
            np.interp(np.linspace(0, 1, len(prompts)), np.linspace(0, 1, len(self.outputs)), self.outputs)
        )
        outputs = outputs if longest_together else outputs[::-1]
        pace = self._pace(costs)
        mean = self.rate * float((pace * outputs * (prompts + outputs / 2) + ttft * prompts).mean())
        square = pace * outputs * (prompts**2 + prompts * outputs + outputs**2 / 3) + ttft * prompts**2
        return mean, math.sqrt(self.dispersion * self.rate * float(square.mean()))

    def _pace(self, costs: ServerCosts) -> float:
        return costs.step / max(1e-9, 1 - self.utilisation(costs))


class TimeToFirstToken(NamedTuple):
    """TTFT of simulated requests, and whether each has a long prompt."""

    seconds: Floats
    is_long: np.ndarray

    def percentile(self, share: float, *, long: bool) -> float:
        """Return a percentile of the requests with short or with long prompts."""
        seconds = self.seconds[self.is_long == long]
        return float(np.quantile(seconds, share)) if len(seconds) else math.nan


def queue_prefills(load: LoadOfServer, costs: ServerCosts, longest_short: float) -> TimeToFirstToken:
    """Queue the prefills of a server in the order of their arrival; chance has a fixed seed."""
    chance = np.random.default_rng(1)
    pick = chance.integers(0, len(load.work), REQUESTS)
    work = load.work[pick] * costs.prefill
    gaps = chance.exponential(1 / load.rate, REQUESTS)
    drift = np.concatenate([[0.0], np.cumsum(work[:-1] - gaps[1:])])
    waits = drift - np.minimum.accumulate(drift)
    busy = min(1.0, load.decoding(costs) + load.utilisation(costs))  # a request waits for the step that runs
    steps = costs.step * (1 + busy * chance.random(REQUESTS))
    warm = REQUESTS // 10
    return TimeToFirstToken((waits + work + steps)[warm:], (load.kv[pick] > longest_short)[warm:])
