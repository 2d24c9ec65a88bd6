"""Whether two snapshots of a server saw the same load: without that, a change cannot be told from a quieter hour.

Closed-loop clients wait for a response before they send the next request: the number of requests in flight stays the
same, whatever the server does. With open-loop clients the rate at which requests arrive stays the same. One of the two
has to match, and the lengths of prompts and outputs too. Among closed-loop clients, those that a fix unblocks send more
often than the others, which moves the mean of all lengths: then lengths are the same where tokens per second and the
longest request are.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from diag.core.formatting import number, quantity
from diag.knowledge.signals import (
    FINISHED,
    GENERATED_TOKENS,
    PROMPT_TOKENS,
    RUNNING,
    WAITING,
    endpoint_without_vllm,
    serves,
)
from diag.verify.snapshot import ServerSnapshot

SAME_LOAD = 1.33
"""Runs of one load differ by up to 1.21 in requests in flight (engine_stalled, healthy), others from 1.36 on."""
SAME_LENGTHS = 1.5
"""Runs of one load differ by up to 1.07 in mean lengths (kv_cascade, kv_cascade_base); of a few long ones by more."""
FLAT = 0.1
"""Variance / mean of requests in flight: 0.00-0.04 for closed-loop clients (kv_cascade_base), 1 by chance alone."""
FEWEST = 3
"""Finished requests below which the signals have no value either."""
ABSURD = 1e12
"""Requests in flight that no server has, and whose sum a float still holds."""

IN_FLIGHT = " + ".join(f"sum by ($by) (last_over_time({gauge}[$window]))" for gauge in (RUNNING, WAITING))
TOKENS = {"prompt": PROMPT_TOKENS, "generation": GENERATED_TOKENS}


@dataclass(frozen=True)
class Lengths:
    """Of prompts or of outputs, in tokens: their mean, a bucket edge above the longest one, and tokens per second."""

    mean: float | None = None
    longest: float | None = None
    per_second: float | None = None


@dataclass(frozen=True)
class Load:
    """What clients requested of a server over a whole span, None where it was not measured.

    in_flight: requests running or waiting (mean), `flat` where they hardly vary. arrivals: requests per second, those
    that finished and those by which more were in flight at the end. finished: those from the first scrape to the last.
    seconds: those in which the server was observed, each scrape standing for one interval. responded: whether any page
    was served.
    """

    in_flight: float | None
    flat: bool
    arrivals: float | None
    finished: float
    prompts: Lengths
    outputs: Lengths
    seconds: float
    responded: bool = True

    @property
    def measured(self) -> bool:
        """Whether the server ever published its numbers."""
        return self.in_flight is not None


def load(server: ServerSnapshot) -> Load:
    """The load on one server."""
    row = server.scraped(IN_FLIGHT)
    valid = np.flatnonzero(np.abs(row) < ABSURD)
    responded = any((server.value(signal.promql) or 0) > 0 for signal in (serves, endpoint_without_vllm))
    if not len(valid):
        return Load(None, False, None, 0.0, Lengths(), Lengths(), 0.0, responded)
    in_flight, times = row[valid], server.queries.source.instants[valid]
    mean, lasted = float(in_flight.mean()), float(times[-1] - times[0]) / 1000
    seconds = lasted + server.queries.source.interval
    finished = (server.value(FINISHED) or 0.0) * lasted / seconds
    return Load(
        in_flight=mean,
        flat=mean >= 1 and float(in_flight.var()) < FLAT * mean,
        arrivals=max(finished + float(in_flight[-1] - in_flight[0]), 0.0) / lasted if lasted else None,
        finished=finished,
        prompts=_lengths(server, "prompt", seconds),
        outputs=_lengths(server, "generation", seconds),
        seconds=seconds,
    )


def _lengths(server: ServerSnapshot, kind: str, seconds: float) -> Lengths:
    buckets = f"sum by ($by, le) (increase(vllm:request_{kind}_tokens_bucket[$window]))"
    tokens = server.value(TOKENS[kind])
    return Lengths(
        mean=server.value(f"{TOKENS[kind]} / ({FINISHED} >= {FEWEST})"),
        longest=server.value(f"histogram_quantile(1, {buckets})"),
        per_second=None if tokens is None else tokens / seconds,
    )


def differences(before: Load, after: Load) -> Iterator[str]:
    """A sentence for each way in which the loads differ."""
    if not before.measured:
        if before.responded:
            yield "the load before the change was not measured: its page has no running and waiting requests"
        return
    if after.finished < FEWEST:
        finished = f"only {after.finished:.0f} requests finished after the change"
        yield f"{finished} (in {quantity(after.seconds, 'seconds')}): too little traffic to compare"
        return
    if not _same_amount(before, after):
        yield (
            f"the load differs: requests in flight {_shown(before.in_flight)} -> {_shown(after.in_flight)},"
            f" arrivals {_shown(before.arrivals)} -> {_shown(after.arrivals)} per second"
        )
    for name, old, new in (("prompt", before.prompts, after.prompts), ("output", before.outputs, after.outputs)):
        if old.mean is not None and not _same_lengths(old, new):
            yield f"{name} lengths differ: mean {_shown(old.mean)} -> {_shown(new.mean)} tokens"


def _same_lengths(old: Lengths, new: Lengths) -> bool:
    if _within(SAME_LENGTHS, old.mean, new.mean):
        return True
    same_longest = old.longest is not None and old.longest == new.longest
    return same_longest and _within(SAME_LOAD, old.per_second, new.per_second)


def _same_amount(before: Load, after: Load) -> bool:
    """By requests in flight; else by arrivals, unless clients are closed-loop: a saturated server has one rate."""
    if _within(SAME_LOAD, before.in_flight, after.in_flight):
        return True
    return not before.flat and _within(SAME_LOAD, before.arrivals, after.arrivals)


def _within(factor: float, old: float | None, new: float | None) -> bool:
    return bool(old and new and max(old, new) <= factor * min(old, new))


def _shown(value: float | None) -> str:
    return "-" if value is None else number(value)
