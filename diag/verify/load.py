"""Whether two looks at a server saw the same load: without that, no change can be told from a quieter hour.

Clients that wait for an answer before they ask again keep the number of requests in flight, whatever the server does;
clients that do not care keep the rate at which requests arrive. So one of the two has to be the same, and the lengths
of prompts and answers too. Among clients that wait, those that a fix frees ask more often than the others, and the mean
of all moves: then as many tokens a second, and the longest as long as before, are the same lengths.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from diag.core.formatting import number
from diag.knowledge.signals import (
    FINISHED,
    GENERATED_TOKENS,
    PROMPT_TOKENS,
    RUNNING,
    WAITING,
    other_page,
    serves,
)
from diag.verify.snapshot import Snapshot

SAME_LOAD = 1.33
"""Runs of one load differ by up to 1.21 in requests in flight (engine_stalled, healthy), others from 1.36 on."""
SAME_LENGTHS = 1.5
"""Runs of one load differ by up to 1.07 in mean lengths (kv_cascade, kv_cascade_base); of a few long ones by more."""
FLAT = 0.1
"""Variance / mean of requests in flight: 0.00-0.04 where clients keep it up (kv_cascade_base), 1 by chance alone."""
FEWEST = 3
"""Finished requests below which the signals say nothing either."""
ABSURD = 1e12
"""Requests in flight that nobody has, and whose sum a float still holds."""

IN_FLIGHT = " + ".join(f"sum by ($by) (last_over_time({each}[$window]))" for each in (RUNNING, WAITING))
TOKENS = {"prompt": PROMPT_TOKENS, "generation": GENERATED_TOKENS}


@dataclass(frozen=True)
class Lengths:
    """Of prompts or of answers, in tokens: their mean, an edge above the longest one, and how many came a second."""

    mean: float | None = None
    longest: float | None = None
    a_second: float | None = None


@dataclass(frozen=True)
class Load:
    """What clients asked of a server over a whole span, None where it was not seen.

    in_flight: requests running or waiting (mean), `flat` where they hardly vary. arrivals: requests a second, those
    that finished and those by which more were in flight at the end. finished: those from the first scrape to the last.
    seconds: those in which the server was seen, each scrape standing for one interval. answered: whether any page was.
    """

    in_flight: float | None
    flat: bool
    arrivals: float | None
    finished: float
    prompts: Lengths
    answers: Lengths
    seconds: float
    answered: bool = True

    @property
    def served(self) -> bool:
        """Whether the server ever answered with its numbers."""
        return self.in_flight is not None


def load(side: Snapshot, instance: str) -> Load:
    """The load on one server."""
    row = side.scraped(IN_FLIGHT, instance)
    seen = np.flatnonzero(np.abs(row) < ABSURD)
    answered = any((side.value(each.promql, instance) or 0) > 0 for each in (serves, other_page))
    if not len(seen):
        return Load(None, False, None, 0.0, Lengths(), Lengths(), 0.0, answered)
    known, times = row[seen], side.asked.source.instants[seen]
    mean, lasted = float(known.mean()), float(times[-1] - times[0]) / 1000
    seconds = lasted + side.asked.source.interval
    finished = (side.value(FINISHED, instance) or 0.0) * lasted / seconds
    return Load(
        in_flight=mean,
        flat=mean >= 1 and float(known.var()) < FLAT * mean,
        arrivals=max(finished + float(known[-1] - known[0]), 0.0) / lasted if lasted else None,
        finished=finished,
        prompts=_lengths(side, instance, "prompt", seconds),
        answers=_lengths(side, instance, "generation", seconds),
        seconds=seconds,
    )


def _lengths(side: Snapshot, instance: str, kind: str, seconds: float) -> Lengths:
    buckets = f"sum by ($by, le) (increase(vllm:request_{kind}_tokens_bucket[$window]))"
    tokens = side.value(TOKENS[kind], instance)
    return Lengths(
        mean=side.value(f"{TOKENS[kind]} / ({FINISHED} >= {FEWEST})", instance),
        longest=side.value(f"histogram_quantile(1, {buckets})", instance),
        a_second=None if tokens is None else tokens / seconds,
    )


def differences(before: Load, after: Load) -> Iterator[str]:
    """A sentence for each thing that makes the loads two different ones."""
    if not before.served:
        if before.answered:
            yield "the load before was not measured: its page has no requests running and waiting"
        return
    if after.finished < FEWEST:
        yield f"only {after.finished:.0f} requests finished after in {after.seconds:.0f} s: too little traffic to tell"
        return
    if not _same_amount(before, after):
        yield (
            f"not the same load: requests in flight {_shown(before.in_flight)} -> {_shown(after.in_flight)}"
            f" and arrivals {_shown(before.arrivals)} -> {_shown(after.arrivals)} a second"
        )
    for name, one, other in (("prompts", before.prompts, after.prompts), ("answers", before.answers, after.answers)):
        if one.mean is not None and not _same_lengths(one, other):
            yield f"{name} of another length: {_shown(one.mean)} -> {_shown(other.mean)} tokens (mean)"


def _same_lengths(one: Lengths, other: Lengths) -> bool:
    if _within(SAME_LENGTHS, one.mean, other.mean):
        return True
    return one.longest is not None and one.longest == other.longest and _within(SAME_LOAD, one.a_second, other.a_second)


def _same_amount(before: Load, after: Load) -> bool:
    """By what is in flight; else by the rate, unless clients kept the former up: a server at its limit has one rate."""
    if _within(SAME_LOAD, before.in_flight, after.in_flight):
        return True
    return not before.flat and _within(SAME_LOAD, before.arrivals, after.arrivals)


def _within(factor: float, one: float | None, other: float | None) -> bool:
    return bool(one and other and max(one, other) <= factor * min(one, other))


def _shown(value: float | None) -> str:
    return "-" if value is None else number(value)
