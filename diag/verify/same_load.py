"""Whether two snapshots of a server saw the same offered load: without that, a fix cannot be told from a quieter hour.

The server itself moves what can be measured: a faster one has fewer requests in flight, and clients that wait for their
answer send more of them. So a number alone proves nothing. Whatever the clients, a server that became faster gets as
many requests per second as before or more, with as many in flight or fewer, and a slower one the reverse: only another
load moves both the same way. The same holds for the requests of each length. Clients that have a request in flight
almost always (closed loop) are as many as before only where as many are in flight, or pause between two requests.
"""

import math
from collections.abc import Iterator

from diag.core.formatting import number, quantity
from diag.verify.load import FEWEST, Lengths, Load

SAME_LOAD = 1.33
"""Runs of one load differ by up to 1.21 in requests in flight (engine_stalled, healthy), others from 1.36 on."""
SAME_LENGTHS = 1.5
"""Runs of one load differ by up to 1.07 in mean lengths (kv_cascade, kv_cascade_base); of a few long ones by more."""
CHANCE = 2.0
"""Standard errors that chance explains, in 95 % of cases; arrivals are counted as Poisson events."""
CHANCE_OF_MANY = 3.0
"""The same where a histogram's dozen of buckets are compared at once."""
MOSTLY_IDLE = 0.5
"""Share of scrapes without a request in flight (judged)."""


def differences(before: Load, after: Load, *, limited: bool = False) -> Iterator[str]:
    """A sentence for each way in which the offered loads differ; `limited`: a gateway limit is the change itself."""
    if not before.measured:
        if before.responded:
            yield "the load before the change was not measured: its page has no running and waiting requests"
        return
    if after.finished < FEWEST:
        finished = f"only {after.finished:.0f} requests finished after the change"
        yield f"{finished} (in {quantity(after.seconds, 'seconds')}): too little traffic to compare"
        return
    if not limited and (amount := _amount(before, after)):
        yield "; ".join(filter(None, (mostly_idle("BEFORE", before), mostly_idle("AFTER", after), amount)))
    faster = direction(SAME_LOAD, after.residence, before.residence)
    for name, old, new in (("prompt", before.prompts, after.prompts), ("output", before.outputs, after.outputs)):
        if not _same_lengths(old, new) and not _explained(faster, old, new, (before.seconds, after.seconds)):
            yield f"{name} lengths differ: mean {_mean(old)} -> {_mean(new)} tokens"


def mostly_idle(side: str, load: Load) -> str:
    """That a server had nothing to do in most scrapes of BEFORE or AFTER, "" where it had."""
    if load.idle <= MOSTLY_IDLE:
        return ""
    if load.idle == 1:
        return f"{side} was idle, without a request in flight in any scrape: observe the server under load"
    share = quantity(load.idle, "share")
    return f"{side} was mostly idle, without a request in flight in {share} of its scrapes: observe it under load"


def _amount(before: Load, after: Load) -> str:
    """How the number of requests differs, "" where it may be the same."""
    moved = direction(SAME_LOAD, before.in_flight, after.in_flight)
    if not moved or (before.closed_loop and _same_clients(before, after)):
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


def _same_clients(before: Load, after: Load) -> bool:
    """Whether closed-loop clients may be as many as before: those with a request in flight, and those that pause.

    Where few pause, as many of them do as the requests in flight vary (Poisson), and more where they send more often.
    """
    if before.in_flight is None or after.in_flight is None or not before.arrivals or after.arrivals is None:
        return False
    pausing = before.variance, before.variance * after.arrivals / before.arrivals
    return not direction(SAME_LOAD, before.in_flight + pausing[0], after.in_flight + pausing[1])


def direction(factor: float, old: float | None, new: float | None) -> int:
    """1 where a value rose by more than a factor, -1 where it fell so far, else 0; unknown values did not move."""
    if old is None or new is None or max(old, new) <= factor * min(old, new):
        return 0
    return 1 if new > old else -1


def _by_chance(errors: float, counts: tuple[float, float], seconds: tuple[float, float]) -> bool:
    """Whether chance explains two rates of Poisson events: so many counted in so many seconds on either side."""
    (one, other), (first, second) = counts, seconds
    error = math.sqrt(one / first**2 + other / second**2)
    return abs(one / first - other / second) <= errors * error


def _same_lengths(old: Lengths, new: Lengths) -> bool:
    """By their means, as far as these are known; else by the longest and by tokens per second.

    Among closed-loop clients, those that a fix unblocks send more often than the others, which moves the mean of all.
    """
    if old.mean is None or not direction(SAME_LENGTHS, old.mean, new.mean):
        return new.mean is not None or old.mean is None
    if new.mean is not None and abs(new.mean - old.mean) <= CHANCE * math.hypot(old.error, new.error):
        return True
    same_longest = old.longest is not None and old.longest == new.longest
    return same_longest and bool(old.per_second) and not direction(SAME_LOAD, old.per_second, new.per_second)


def _explained(faster: int, old: Lengths, new: Lengths, seconds: tuple[float, float]) -> bool:
    """Whether requests of every length moved as the server's own pace explains: none rarer on one that is faster."""
    before, after = dict(old.counts), dict(new.counts)
    edges = before.keys() | after.keys()
    return bool(faster and edges) and not any(
        _moved((before.get(edge, 0.0), after.get(edge, 0.0)), seconds) == -faster for edge in edges
    )


def _moved(counts: tuple[float, float], seconds: tuple[float, float]) -> int:
    """Whether requests of one length became clearly more frequent (1) or rarer (-1)."""
    if _by_chance(CHANCE_OF_MANY, counts, seconds):
        return 0
    return direction(SAME_LOAD, counts[0] / seconds[0], counts[1] / seconds[1])


def _mean(lengths: Lengths) -> str:
    return f"{_shown(lengths.mean)} (± {number(lengths.error)})" if lengths.error else _shown(lengths.mean)


def _shown(value: float | None) -> str:
    return "-" if value is None else number(value)
