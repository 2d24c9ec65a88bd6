"""The samples that a range selector sees at each instant, as one array."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from diag.promql.samples import Block, Bools, Floats, Millis

_MOST_CELLS = 2_000_000  # of one gathered (S, T, W) array: 16 MB


class Spans(NamedTuple):
    """Where the windows lie: (asked - offset - length, asked - offset], open on the left. ms; asked: shape (T,)."""

    asked: Millis
    length: int
    offset: int

    @property
    def end(self) -> Millis:
        """Last time of each window, ms."""
        return self.asked - self.offset

    @property
    def start(self) -> Millis:
        """Time before each window, ms."""
        return self.end - self.length

    def bounds(self, times: Millis) -> tuple[Millis, Millis]:
        """Return the index of the first sample in each window and of the first after it."""
        return np.searchsorted(times, self.start, side="right"), np.searchsorted(times, self.end, side="right")


@dataclass(frozen=True)
class Windows:
    """The samples in each window, left-aligned: a window has `count` of them, its further places hold garbage.

    values: (S, T, W). times: ms, (T, W). valid: which places hold a sample, (T, W). count: (T,). All series of a block
    share their times, so what depends on time alone is computed once for all of them.
    """

    values: Floats
    times: Millis
    valid: Bools
    count: Millis
    spans: Spans

    def nth_last(self, n: int) -> tuple[Floats, Millis]:
        """Return values (S, T) and times (T,) of the n-th last sample of each window; garbage where there are fewer."""
        place = np.maximum(self.count - n, 0)
        instant = np.arange(place.size)
        return self.values[:, instant, place], self.times[instant, place]

    def pairs(self) -> tuple[Floats, Floats, Bools]:
        """Return neighbouring values, before and after, and which places hold such a pair."""
        return self.values[..., :-1], self.values[..., 1:], self.valid[..., 1:]


def chunks(block: Block, spans: Spans) -> Iterator[tuple[slice, slice, Windows]]:
    """Gather the windows of a block without holes, by slices of series and instants that fit into memory."""
    first, after = spans.bounds(block.times)
    width = int((after - first).max(initial=0))
    if not width:
        return
    instants_at_once = max(1, min(spans.asked.size, _MOST_CELLS // width))
    series_at_once = max(1, _MOST_CELLS // (width * instants_at_once))
    for row in range(0, len(block.labels), series_at_once):
        for instant in range(0, spans.asked.size, instants_at_once):
            rows, instants = slice(row, row + series_at_once), slice(instant, instant + instants_at_once)
            part = Spans(spans.asked[instants], spans.length, spans.offset)
            yield rows, instants, _gather(block.times, block.values[rows], part)


def _gather(times: Millis, values: Floats, spans: Spans) -> Windows:
    first, after = spans.bounds(times)
    place = first[:, np.newaxis] + np.arange((after - first).max(initial=1))
    valid = place < after[:, np.newaxis]
    place = np.minimum(place, times.size - 1)
    return Windows(values[:, place], times[place], valid, after - first, spans)
