"""A recording as somebody would have seen it who scrapes more rarely, in memory: it is read and parsed once."""

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from diag.promql import Block, Samples
from diag.promql.data import Millis
from diag.sources.observation import Observation

CADENCES = (2, 5, 10, 15, 30)
"""Seconds between two scrapes that servers are judged at."""


def truth(folder: Path) -> dict[str, Any]:
    """Return [truth] of a recording: its verdict, and the incidents that are present, absent and undecided."""
    found: dict[str, Any] = tomllib.loads((folder / "recording.toml").read_text(encoding="utf-8"))["truth"]
    return found


def thinned(observation: Observation, seconds: float, offset: float) -> Observation:
    """Return the recording scraped every so many seconds, for the first time `offset` seconds after the start.

    Of each target the scrape nearest to each of those moments is kept. Whatever the observation says beside its samples
    (notes, settings) stays as it is. ValueError where no scrape is left.
    """
    start = int(observation.instants[0]) + round(1000 * offset)
    blocks = [_thinned(block, start, round(1000 * seconds)) for block in observation.samples.select([])]
    instants = _nearest(observation.instants, start, round(1000 * seconds))
    if not len(instants):
        raise ValueError(f"{observation.target} ends before {offset} s")
    return replace(
        observation,
        samples=Samples(blocks),
        instants=observation.instants[instants],
        interval=seconds if len(instants) > 1 else observation.interval,
        scrapes=len(instants) * len(observation.instances),
    )


def offsets(observation: Observation, seconds: float, most: int) -> Iterator[float]:
    """At most so many moments of the first interval to begin at, evenly apart: every scrape where that many suffice."""
    span = min(seconds, float(observation.instants[-1] - observation.instants[0]) / 1000)
    count = min(most, max(1, round(span / observation.interval)))
    return (round(at * span / count, 3) for at in range(count))


def _thinned(block: Block, start: int, step: int) -> Block:
    kept = _nearest(block.times, start, step)
    return Block(block.labels, block.times[kept], block.values[:, kept])


def _nearest(times: Millis, start: int, step: int) -> Millis:
    """The places of the times that are nearest to start, start + step, ..., each once."""
    moments = np.arange(start, int(times[-1]) + 1, step)
    after = np.clip(np.searchsorted(times, moments), 1, max(1, len(times) - 1))
    before_is_nearer = moments - times[after - 1] <= times[np.minimum(after, len(times) - 1)] - moments
    return np.unique(np.where(before_is_nearer, after - 1, after))
