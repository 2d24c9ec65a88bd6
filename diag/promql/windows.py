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


@dataclass(frozen=True, eq=False, repr=False)
class Windows:
    """The samples of a block in each window: those from `first` on and before `after`, both of shape (T,).

    values: (S, N). times: ms, (N,). All series of a block share their times, so what depends on time alone is computed
    once for all of them.
    """

    values: Floats
    times: Millis
    first: Millis
    after: Millis
    spans: Spans

    @property
    def count(self) -> Millis:
        """Number of samples in each window, (T,)."""
        return self.after - self.first

    def earliest(self) -> tuple[Floats, Millis]:
        """Return values (S, T) and times (T,) of the first sample of each window; garbage where there is none."""
        return self._at(np.minimum(self.first, self.times.size - 1))

    def nth_last(self, n: int) -> tuple[Floats, Millis]:
        """Return values (S, T) and times (T,) of the n-th last sample of each window; garbage where there are fewer."""
        return self._at(np.maximum(self.after - n, 0))

    def _at(self, place: Millis) -> tuple[Floats, Millis]:
        return self.values[:, place], self.times[place]

    def with_both(self, place: int) -> slice:
        """Return the instants whose windows hold the sample at this place and the next one; instants ascend."""
        return slice(np.searchsorted(self.after, place + 2), np.searchsorted(self.first, place, side="right"))

    def gathered(self) -> "Gathered":
        """Return the samples of each window beside each other."""
        place = self.first[:, np.newaxis] + np.arange(self.count.max(initial=1))
        valid = place < self.after[:, np.newaxis]
        place = np.minimum(place, self.times.size - 1)
        return Gathered(self.values[:, place], self.times[place], valid, self.count, self.spans)


@dataclass(frozen=True, eq=False, repr=False)
class Gathered:
    """The samples in each window, left-aligned: a window has `count` of them, its further places hold garbage.

    values: (S, T, W). times: ms, (T, W). valid: which places hold a sample, (T, W). count: (T,).
    """

    values: Floats
    times: Millis
    valid: Bools
    count: Millis
    spans: Spans

    def pairs(self) -> tuple[Floats, Floats, Bools]:
        """Return neighbouring values, before and after, and which places hold such a pair."""
        return self.values[..., :-1], self.values[..., 1:], self.valid[..., 1:]


def windows_of(block: Block, spans: Spans) -> Windows:
    """The windows of a block without holes."""
    return Windows(block.values, block.times, *spans.bounds(block.times), spans)


def chunks(whole: Windows) -> Iterator[tuple[slice, slice, Gathered]]:
    """Gather windows, of which one holds a sample, by slices of series and instants that fit into memory."""
    width, instants = int(whole.count.max()), whole.first.size
    instants_at_once = max(1, min(instants, _MOST_CELLS // width))
    series_at_once = max(1, _MOST_CELLS // (width * instants_at_once))
    for row in range(0, len(whole.values), series_at_once):
        for instant in range(0, instants, instants_at_once):
            rows, at = slice(row, row + series_at_once), slice(instant, instant + instants_at_once)
            spans = whole.spans._replace(asked=whole.spans.asked[at])
            yield rows, at, Windows(whole.values[rows], whole.times, whole.first[at], whole.after[at], spans).gathered()
