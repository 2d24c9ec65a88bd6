"""Samples in memory, indexed by metric name."""

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diag.promql.nodes import Matcher

Labels = dict[str, str]
Floats = npt.NDArray[np.float64]
Millis = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NAME = "__name__"
_STALE_BITS = np.uint64(0x7FF0000000000002)
STALE: np.float64 = _STALE_BITS.view(np.float64)


def is_stale(values: Floats) -> Bools:
    """Tell stale markers from other NaNs, which are real values."""
    stale: Bools = np.ascontiguousarray(values).view(np.uint64) == _STALE_BITS
    return stale


def distinct(times: Millis) -> Millis:
    """Sort times and keep one of equal ones; np.unique would load numpy.ma for it, a hundredth of a second."""
    ordered = np.sort(times)
    first: Bools = np.concatenate([[True], ordered[1:] != ordered[:-1]])[: ordered.size]
    return ordered[first]


class Block(NamedTuple):
    """Series that share their sample times, as one scrape target's do.

    times: ms since 1970, ascending, shape (N,). values: shape (S, N); a hole is the stale marker.
    """

    labels: tuple[Labels, ...]
    times: Millis
    values: Floats

    def rows(self, rows: Sequence[int]) -> "Block":
        """Return the block of these rows only."""
        if len(rows) == len(self.labels):
            return self
        return Block(tuple(self.labels[row] for row in rows), self.times, self.values[list(rows)])


class Samples:
    """Blocks indexed by metric name; a series may be in one block only."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._blocks: dict[str, list[Block]] = {}
        self._dense: dict[str, list[Block]] = {}
        for block in blocks:
            for name, part in _by_name(block):
                self._blocks.setdefault(name, []).append(part)
        for name, parts in self._blocks.items():
            _refuse_twins(name, parts)

    @property
    def names(self) -> AbstractSet[str]:
        """The metrics that have a series."""
        return self._blocks.keys()

    def select(self, matchers: Sequence[Matcher]) -> list[Block]:
        """Return the series that all matchers accept, holes included."""
        return [part for name in self._names(matchers) for part in _matching(self._blocks[name], matchers)]

    def select_dense(self, matchers: Sequence[Matcher]) -> list[Block]:
        """Return the series that all matchers accept, in blocks that have no holes."""
        return [part for name in self._names(matchers) for part in _matching(self._dense_blocks(name), matchers)]

    def _names(self, matchers: Sequence[Matcher]) -> list[str]:
        on_name = [matcher for matcher in matchers if matcher.label == NAME]
        for matcher in on_name:
            if matcher.op == "=":
                return [name for name in (matcher.value,) if name in self._blocks and _accept(on_name, {NAME: name})]
        return [name for name in self._blocks if _accept(on_name, {NAME: name} if name else {})]

    def _dense_blocks(self, name: str) -> list[Block]:
        if name not in self._dense:
            self._dense[name] = [
                dense
                for block in self._blocks[name]
                for dense in without_holes(block.labels, block.times, block.values, ~is_stale(block.values))
            ]
        return self._dense[name]


def without_holes(labels: Sequence[Labels], times: Millis, values: Floats, present: Bools) -> Iterator[Block]:
    """Split series by where their holes are, so that the series of each block returned share all their times."""
    if present.all():
        yield Block(tuple(labels), times, values)
        return
    patterns: dict[bytes, list[int]] = {}
    for row, pattern in enumerate(np.packbits(present, axis=1)):
        patterns.setdefault(pattern.tobytes(), []).append(row)
    for rows in patterns.values():
        kept = np.flatnonzero(present[rows[0]])
        if kept.size:
            yield Block(tuple(labels[row] for row in rows), times[kept], values[rows][:, kept])


def _by_name(block: Block) -> Iterator[tuple[str, Block]]:
    """Split a block by metric name; an empty label is no label."""
    labels = [{name: value for name, value in series.items() if value} for series in block.labels]
    values = np.asarray(block.values, dtype=np.float64)
    times = np.asarray(block.times, dtype=np.int64)
    if values.shape != (len(labels), times.size) or not (np.diff(times) > 0).all():
        raise ValueError("a block needs one row for each series, one column for each time, and times that ascend")
    rows: dict[str, list[int]] = {}
    for row, series in enumerate(labels):
        rows.setdefault(series.get(NAME, ""), []).append(row)
    for name, chosen in rows.items():
        yield name, Block(tuple(labels[row] for row in chosen), times, values[chosen])


def _refuse_twins(name: str, blocks: Sequence[Block]) -> None:
    seen = {frozenset(series.items()) for block in blocks for series in block.labels}
    if len(seen) != sum(len(block.labels) for block in blocks):
        raise ValueError(f"two series of {name} have the same labels")


def _matching(blocks: Iterable[Block], matchers: Sequence[Matcher]) -> Iterator[Block]:
    others = [matcher for matcher in matchers if matcher.label != NAME]
    if not others:
        yield from blocks
        return
    for block in blocks:
        rows = [row for row, series in enumerate(block.labels) if _accept(others, series)]
        if rows:
            yield block.rows(rows)


def _accept(matchers: Sequence[Matcher], series: Labels) -> bool:
    return all(matcher.accepts(series.get(matcher.label, "")) for matcher in matchers)
