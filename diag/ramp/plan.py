"""Plan of a ramp: requests like the server's own, the load of the next step, and when the ramp is over.

Nothing is run here: samples and steps in, lengths, an offer or a reason out. The number of requests at a time doubles
until a step misses the SLO, or until more load only makes requests wait. Then open-loop steps, whose requests arrive
like those of users, bracket the ceiling.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from diag.core.contract import Contract
from diag.core.formatting import plural, quantity
from diag.core.metric_prefix import metric
from diag.diagnosis.query_cache import QueryCache
from diag.knowledge.formulas import formula
from diag.promql import Formula
from diag.ramp.results import Offer
from diag.ramp.step import FEWEST_SCRAPES, RATES, Step, value
from diag.sources.observation import Observation, SampleSource

ASSUMED = 512, 128
"""Tokens of prompt and answer if the server has not finished a request yet."""
WIDEST = 0.9
"""Lengths vary from a tenth of their mean to nearly twice that at most."""
_KINDS = ("prompt", "generation")
_TOTAL = f"sum(last_over_time({metric('request_{0}_tokens_{1}')}[1h]))"
_QUANTILE = f"histogram_quantile({{1}}, sum by (le) (last_over_time({metric('request_{0}_tokens_bucket')}[1h])))"
_CACHE = f"sum(last_over_time({metric('prefix_cache_{0}_total')}[1h]))"


class OwnTraffic(NamedTuple):
    """The server's traffic before the ramp, per second."""

    requests_per_second: float
    output_tokens_per_second: float


class RequestLengths(NamedTuple):
    """Tokens of a request: prompt (with `prefix` of them shared by all) and answer, each spread by a share of its mean.

    `source` names their origin in words.
    """

    prompt: int
    output: int
    source: str
    prefix: int = 0
    spread: float = 0.0

    @property
    def shown(self) -> str:
        spread = f" +- {quantity(self.spread, 'share')}" if self.spread >= 0.01 else ""
        prefix = f", {self.prefix} of them a shared prefix" if self.prefix else ""
        return f"{self.prompt} + {self.output} tokens a request{spread}{prefix} ({self.source})"


def own_traffic(observed: Observation, contract: Contract) -> OwnTraffic:
    """Return the mean traffic over the whole observation, idle moments included."""
    queries = QueryCache(observed, contract)
    seconds = queries.span + observed.interval
    return OwnTraffic(*((value(queries, RATES[name]) or 0.0) / seconds for name in OwnTraffic._fields))


def request_lengths(observed: Observation, prompt: int | None, output: int | None) -> RequestLengths:
    """Return the lengths as given, else like all requests that the server has finished; never beyond its context."""
    # the last scrape, with counters since the server's start
    last = SampleSource(observed.samples, observed.instants[-1:], observed.interval)
    mean = {kind: _ratio(last, _TOTAL.format(kind, "sum"), _TOTAL.format(kind, "count")) for kind in _KINDS}
    if prompt and output:
        lengths = RequestLengths(prompt, output, "as given")
    elif all(mean.values()):
        prompt, output = prompt or round(mean["prompt"]), output or round(mean["generation"])
        # half the range of a uniform distribution with the same 10th and 90th percentiles, as a share of the mean
        spreads = []
        for kind in _KINDS:
            low, high = (_last_value(last, _QUANTILE.format(kind, share)) for share in (0.1, 0.9))
            spreads.append(min(max(high - low, 0.0) / (1.6 * mean[kind]), WIDEST))
        hit_rate = min(_ratio(last, _CACHE.format("hits"), _CACHE.format("queries")), 0.95)
        prefix, spread = math.floor(prompt * hit_rate), sum(spreads) / len(spreads)
        lengths = RequestLengths(prompt, output, "as this server's own", prefix, spread)
    else:
        lengths = RequestLengths(prompt or ASSUMED[0], output or ASSUMED[1], "assumed: it has finished none")

    longest = _last_value(last, formula("$config_max_model_len", ("instance",), "1h", Contract()))
    room = longest - 16  # a tokenizer adds some tokens
    if not longest or (lengths.prompt + lengths.output) * (1 + lengths.spread) <= room:
        return lengths
    # the answer is cut to a quarter of --max-model-len, the prompt to the rest
    output = max(1, min(lengths.output, round(room / 4)))
    prompt = max(1, min(lengths.prompt, round(room) - output))
    return RequestLengths(prompt, output, f"{lengths.source}, cut to --max-model-len", min(lengths.prefix, prompt // 2))


def _ratio(source: SampleSource, above: str, below: str) -> float:
    total = _last_value(source, below)
    return _last_value(source, above) / total if total else 0.0


def _last_value(source: SampleSource, promql: Formula | str) -> float:
    """Return a number of the last scrape; 0 if it has none."""
    rows = list(source.ask(promql, source.instants).values())
    return float(rows[0][-1]) if rows and math.isfinite(rows[0][-1]) else 0.0


GAIN = 1.1
"""If requests/s rise by less than this factor from one step to the next, they have reached their top."""
TOP = 0.9
"""Share of the highest rate from which on a step is at the knee."""
REACHED = 0.7
"""Share of the offered requests in flight below which the client is slower than the server."""
FIRST_RATE, HIGHER, LOWER = 0.9, 1.15, 0.8
"""Open-loop rates: the first as a share of the highest closed-loop rate, the next as shares of the last one."""
QUEUES = 0.1
"""Growth of requests in flight, per finished one, up to which the server keeps up with an open-loop step."""


class Limits(NamedTuple):
    """Seconds that a step needs to count, the most requests at a time, how many open-loop steps, and the SLOs.

    `ttft` is the median TTFT in seconds at which a queue that only grows ends the ramp.
    """

    contract: Contract
    seconds: float = 30.0
    most: int = 1024
    brackets: int = 2
    ttft: float = 2.5


class ServingCeiling(NamedTuple):
    """The step that served the highest rate inside the SLO, and the knee before it."""

    step: Step
    knee: Step | None

    @property
    def concurrency(self) -> float | None:
        return self.step.in_flight


def next_offer(steps: Sequence[Step], limits: Limits, first: int = 1) -> Offer | None:
    """Return the load of the next step; None if the ceiling is known as well as it will be.

    Once the number of requests at a time is not doubled any more, the next open-loop rate lies between one that the
    server kept up with and one that it did not, if there are both.
    """
    if not steps:
        return Offer(concurrency=first)
    if not why_enough(steps, limits):
        last = max(step.offer.concurrency or 0 for step in steps)
        return Offer(concurrency=min(2 * last, limits.most))

    tried = [step for step in steps if step.offer.rate is not None]
    top = max((step.requests_per_second for step in closed(steps) if holds(step, limits)), default=0.0)
    if len(tried) >= limits.brackets or not top or any(client_is_slow(step, limits) for step in closed(steps)):
        return None
    kept = [step.offer.rate or 0.0 for step in tried if holds(step, limits)]
    lost = [step.offer.rate or 0.0 for step in tried if not holds(step, limits)]
    if kept and lost:
        rate = (max(kept) + min(lost)) / 2
    elif not tried:
        rate = FIRST_RATE * top
    else:
        rate = HIGHER * max(kept) if kept else LOWER * min(lost)
    return Offer(rate=float(f"{rate:.3g}"))  # as it stands on a command line


def why_enough(steps: Sequence[Step], limits: Limits) -> str:
    """Return why the number of requests at a time is not doubled again; "" if it is."""
    rising = [step for step in closed(steps) if step.is_usable]
    if not rising:
        return ""
    last, before = rising[-1], rising[-2] if len(rising) > 1 else None
    reasons = [breach.sentence for breach in last.breaches(limits.contract)]
    if before and client_is_slow(last, limits) and last.requests_per_second < GAIN * before.requests_per_second:
        reasons.append("fewer requests are in flight than were offered, and none waits")
    ttft, earlier = last.ttft.p50 or 0.0, (before.ttft.p50 or 0.0) if before else 0.0
    serves_more = before is None or last.requests_per_second >= GAIN * before.requests_per_second
    if ttft > limits.ttft and ttft > earlier and not serves_more:
        reasons.append(f"median TTFT is {quantity(ttft, 'seconds')} and only rises with the concurrency")
    if len(rising) > 2 and last.requests_per_second < GAIN * rising[-3].requests_per_second:
        reasons.append("requests/s did not rise over two doublings")
    if (last.offer.concurrency or 0) >= limits.most:
        reasons.append(f"{plural(limits.most, 'request')} at a time is the most that was allowed")
    return "; ".join(reasons[:1])


def client_is_slow(step: Step, limits: Limits) -> bool:
    """Return True if fewer requests are in flight than were offered, although none of them waits in the server."""
    offered = step.offer.concurrency
    if not offered or step.in_flight is None or not step.counts(limits.seconds):
        return False
    return step.in_flight < REACHED * offered and (step.waiting or 0.0) < 0.1 * offered


def closed(steps: Sequence[Step]) -> list[Step]:
    """Return the closed-loop steps, by their concurrency."""
    return sorted((step for step in steps if step.offer.concurrency), key=lambda step: step.offer.concurrency or 0)


def holds(step: Step, limits: Limits) -> bool:
    """Return True if a step counts and meets the SLO; open-loop, only if the server also kept up with the arrivals."""
    if not step.counts(limits.seconds) or step.breaches(limits.contract):
        return False
    return step.offer.rate is None or (step.growth < QUEUES and (step.ttft.p50 or 0.0) <= limits.ttft)


def ceiling(steps: Sequence[Step], limits: Limits) -> ServingCeiling | None:
    """Return the highest rate that was served inside the SLO: of open-loop steps if one held, else of all steps."""
    held = [step for step in steps if holds(step, limits)]
    if not held:
        return None
    opened = [step for step in held if step.offer.rate is not None]
    best = max(opened or held, key=lambda step: step.requests_per_second)
    return ServingCeiling(best, knee(steps, limits))


def knee(steps: Sequence[Step], limits: Limits) -> Step | None:
    """Return the closed-loop step with the fewest requests at a time that serves nearly the highest rate."""
    held = [step for step in closed(steps) if holds(step, limits)]
    top = max((step.requests_per_second for step in held), default=0.0)
    return next((step for step in held if step.requests_per_second >= TOP * top), None)


def prompts(offer: Offer, steps: Sequence[Step], warm: float, limits: Limits) -> int:
    """Return how many requests make a step long enough: by the rate so far, and what twice the load may make of it.

    `warm` is the rate in requests/s at one request at a time.
    """
    if offer.rate is not None:
        return max(20, math.ceil(1.2 * limits.seconds * offer.rate))
    rates = [step.requests_per_second for step in closed(steps)]
    concurrency = offer.concurrency or 1
    gain = rates[-1] / rates[-2] if len(rates) > 1 and rates[-2] > 0 else 2.0
    expected = rates[-1] * min(max(1.1 * gain, 1.1), 2.0) if rates else warm * concurrency
    return max(20, 3 * concurrency, math.ceil(1.2 * limits.seconds * expected))


def requests_for_repeat(step: Step, sent: int, limits: Limits) -> int:
    """Return how many requests make a step that was too short long enough, or repeat it on a host that was crowded.

    0: the step counts, or was long enough.
    """
    if step.crowded:
        return sent
    if step.counts(limits.seconds) or (step.seconds >= 0.6 * limits.seconds and not step.is_short):
        return 0
    return math.ceil(sent * min(1.5 * limits.seconds / max(step.seconds, 1.0), 10.0))


def why_unusable(step: Step, limits: Limits) -> str:
    """Return why nothing is concluded from a step, with the longer --step-seconds that it needs; "" if it is usable."""
    if step.crowded:
        return f"{step.crowded}: the host is crowded, and the step shows no limit of the server's own"
    if not step.is_short:
        return ""
    what = "all offered requests were in flight" if step.offer.concurrency else "the load was steady"
    longer = math.ceil(max(2 * limits.seconds, limits.seconds + 2 * FEWEST_SCRAPES * step.interval))
    return (
        f"{what} at {plural(step.scrapes or 0, 'scrape')}, and {FEWEST_SCRAPES} are needed: the step is too short, give"
        f" --step-seconds {longer}"
    )
