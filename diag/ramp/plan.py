"""Which load comes next, and when a ramp has seen enough: steps in, an offer or a reason out. Nothing is run here.

The number of requests at a time doubles until a step breaks the measurement contract, or until more load only makes
requests wait. Then open-loop steps, whose requests arrive like those of users, bracket the ceiling.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from diag.core.contract import Contract
from diag.core.formatting import plural, quantity
from diag.ramp.step import Offer, Step

GAIN = 1.1
"""Requests per second that rise by less than this from one step to the next have reached their top."""
TOP = 0.9
"""From this share of the highest rate on, a step is at the knee."""
REACHED = 0.7
"""A client that keeps fewer of its requests in flight than this is slower than the server."""
FIRST_RATE, HIGHER, LOWER = 0.9, 1.15, 0.8
"""Open-loop rates, of the highest rate that closed-loop steps have served, and of the last one."""
QUEUES = 0.1
"""Requests in flight may grow by this share of the finished ones in an open-loop step that is kept up with."""


class Limits(NamedTuple):
    """What a step needs to count, in seconds; the most requests at a time, how many open-loop steps, and the SLOs.

    `ttft` are the seconds of a median TTFT at which a queue that only grows ends the ramp.
    """

    contract: Contract
    seconds: float = 30.0
    most: int = 1024
    brackets: int = 2
    ttft: float = 2.5


class ServingCeiling(NamedTuple):
    """The most that was served inside the measurement contract, the step that served it, and how many ran there."""

    step: Step
    knee: Step | None

    @property
    def concurrency(self) -> float | None:
        """Requests in flight."""
        return self.step.in_flight


def next_offer(steps: Sequence[Step], limits: Limits, first: int = 1) -> Offer | None:
    """The load of the next step; None where the ceiling is known as well as it will be."""
    if not steps:
        return Offer(concurrency=first)
    if not why_enough(steps, limits):
        last = max(step.offer.concurrency or 0 for step in steps)
        return Offer(concurrency=min(2 * last, limits.most))
    return _bracket(steps, limits)


def why_enough(steps: Sequence[Step], limits: Limits) -> str:
    """Why the number of requests at a time is not doubled again; "" where it is."""
    rising = closed(steps)
    if not rising:
        return ""
    last, before = rising[-1], rising[-2] if len(rising) > 1 else None
    reasons = [breach.sentence for breach in last.breaches(limits.contract)]
    if before and client_is_slow(last, limits) and last.requests_per_second < GAIN * before.requests_per_second:
        reasons.append("fewer requests are in flight than were offered, and none waits")
    if before and _only_waits(before, last, limits):
        reasons.append(
            f"median TTFT is {quantity(last.ttft.p50 or 0.0, 'seconds')} and only rises with the concurrency"
        )
    if len(rising) > 2 and last.requests_per_second < GAIN * rising[-3].requests_per_second:
        reasons.append("requests/s did not rise over two doublings")
    if (last.offer.concurrency or 0) >= limits.most:
        reasons.append(f"{plural(limits.most, 'request')} at a time is the most that was allowed")
    return "; ".join(reasons[:1])


def _only_waits(before: Step, last: Step, limits: Limits) -> bool:
    ttft = last.ttft.p50 or 0.0
    more = last.requests_per_second >= GAIN * before.requests_per_second
    return ttft > limits.ttft and ttft > (before.ttft.p50 or 0.0) and not more


def client_is_slow(step: Step, limits: Limits) -> bool:
    """Whether the generator has fewer requests in flight than it was told, although none of them has to wait."""
    offered = step.offer.concurrency
    if not offered or step.in_flight is None or not step.counts(limits.seconds):
        return False
    return step.in_flight < REACHED * offered and (step.waiting or 0.0) < 0.1 * offered


def closed(steps: Sequence[Step]) -> list[Step]:
    """The closed-loop steps, by their concurrency."""
    return sorted((step for step in steps if step.offer.concurrency), key=lambda step: step.offer.concurrency or 0)


def _bracket(steps: Sequence[Step], limits: Limits) -> Offer | None:
    """The next open-loop rate: between one that was kept up with and one that was not, where there are both."""
    tried = [step for step in steps if step.offer.rate is not None]
    top = max((step.requests_per_second for step in closed(steps) if holds(step, limits)), default=0.0)
    if len(tried) >= limits.brackets or not top or any(client_is_slow(step, limits) for step in closed(steps)):
        return None
    kept = [step.offer.rate or 0.0 for step in tried if holds(step, limits)]
    lost = [step.offer.rate or 0.0 for step in tried if not holds(step, limits)]
    if kept and lost:
        return Offer(rate=_rounded((max(kept) + min(lost)) / 2))
    if not tried:
        return Offer(rate=_rounded(FIRST_RATE * top))
    return Offer(rate=_rounded(HIGHER * max(kept) if kept else LOWER * min(lost)))


def holds(step: Step, limits: Limits) -> bool:
    """Whether a step counts and keeps the contract; an open-loop one also if the server kept up with its arrivals."""
    if not step.counts(limits.seconds) or step.breaches(limits.contract):
        return False
    return step.offer.rate is None or (step.growth < QUEUES and (step.ttft.p50 or 0.0) <= limits.ttft)


def ceiling(steps: Sequence[Step], limits: Limits) -> ServingCeiling | None:
    """The highest rate that was served inside the contract: of open-loop steps if one held, else of all steps."""
    held = [step for step in steps if holds(step, limits)]
    if not held:
        return None
    opened = [step for step in held if step.offer.rate is not None]
    best = max(opened or held, key=lambda step: step.requests_per_second)
    return ServingCeiling(best, knee(steps, limits))


def knee(steps: Sequence[Step], limits: Limits) -> Step | None:
    """The closed-loop step with the fewest requests at a time that serves nearly the highest rate."""
    held = [step for step in closed(steps) if holds(step, limits)]
    top = max((step.requests_per_second for step in held), default=0.0)
    return next((step for step in held if step.requests_per_second >= TOP * top), None)


def prompts(offer: Offer, steps: Sequence[Step], warm: float, limits: Limits) -> int:
    """How many requests make a step long enough: by the rate so far, and what it may become with twice the load.

    `warm` are the requests/s that one request at a time made.
    """
    if offer.rate is not None:
        return max(20, math.ceil(1.2 * limits.seconds * offer.rate))
    rates = [step.requests_per_second for step in closed(steps)]
    concurrency = offer.concurrency or 1
    gain = rates[-1] / rates[-2] if len(rates) > 1 and rates[-2] > 0 else 2.0
    expected = rates[-1] * min(max(1.1 * gain, 1.1), 2.0) if rates else warm * concurrency
    return max(20, 3 * concurrency, math.ceil(1.2 * limits.seconds * expected))


def again(step: Step, sent: int, limits: Limits) -> int:
    """How many requests make a step that was too short long enough; 0 where it counts."""
    if step.counts(limits.seconds) or step.seconds >= 0.6 * limits.seconds:
        return 0
    return math.ceil(sent * min(1.5 * limits.seconds / max(step.seconds, 1.0), 10.0))


def _rounded(rate: float) -> float:
    """With three digits, as it stands on a command line."""
    return float(f"{rate:.3g}")
