"""Aggregation over series: sum by (...), topk, count_values and the like."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diag.core.errors import QueryFailed
from diag.promql import numeric
from diag.promql.samples import NAME, Bools, Floats, Labels
from diag.promql.vector import Vector, merged

Rows = npt.NDArray[np.intp]

# Values of the members of each group, (G, T, M), which of them count, and the parameter, (T,) -> values (G, T).
_REDUCTIONS: dict[str, Callable[[Floats, Bools, Floats], Floats]] = {
    "sum": lambda values, mask, _: numeric.total(values, mask),
    "avg": lambda values, mask, _: numeric.mean(values, mask),
    "min": lambda values, mask, _: np.fmin.reduce(np.where(mask, values, np.nan), axis=-1),
    "max": lambda values, mask, _: np.fmax.reduce(np.where(mask, values, np.nan), axis=-1),
    "count": lambda values, mask, _: mask.sum(axis=-1).astype(np.float64),
    "group": lambda values, mask, _: np.ones(mask.shape[:-1]),
    "stddev": lambda values, mask, _: np.sqrt(numeric.variance(values, mask)),
    "stdvar": lambda values, mask, _: numeric.variance(values, mask),
    "quantile": lambda values, mask, q: numeric.quantile(q, values, mask),
}

AGGREGATIONS = frozenset(_REDUCTIONS) | {"topk", "bottomk", "count_values"}


_OF_ONE_ITSELF = frozenset({"sum", "avg", "min", "max"})


class _Groups(NamedTuple):
    """labels: of each group. of_row: the group of each row."""

    labels: tuple[Labels, ...]
    of_row: Rows

    def places(self) -> Rows:
        """The number of each row within its group, from 0, in their order."""
        order = np.argsort(self.of_row, kind="stable")
        sizes = np.bincount(self.of_row)
        place = np.empty_like(self.of_row)
        place[order] = np.arange(self.of_row.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return place

    def members(self, vector: Vector) -> tuple[Floats, Bools]:
        """Lay the rows out as (G, T, M) and tell which of these cells are present."""
        place = self.places()
        shape = (len(self.labels), int(place.max()) + 1, vector.values.shape[1])
        values, mask = np.zeros(shape), np.zeros(shape, dtype=bool)
        values[self.of_row, place], mask[self.of_row, place] = vector.values, vector.present
        return values.swapaxes(1, 2), mask.swapaxes(1, 2)


def aggregate(op: str, vector: Vector, labels: Sequence[str], without: bool, param: Floats) -> Vector:
    """Aggregate the series that agree in, or without, the given labels. param: of quantile or topk, shape (T,)."""
    if not vector.labels:
        return vector
    groups = _groups(vector.labels, labels, without)
    if op in _OF_ONE_ITSELF and len(groups.labels) == len(vector.labels):
        return Vector(groups.labels, vector.values, vector.present)
    values, mask = groups.members(vector)
    if op in _REDUCTIONS:
        return Vector(groups.labels, _REDUCTIONS[op](values, mask, param), np.any(mask, axis=-1))
    if not (param[mask.any(axis=(0, 2))] < 2**63).all():
        raise QueryFailed(f"The parameter of {op} is not an integer of 64 bits.")
    ranks = _ranks(-values if op == "topk" else values, mask)
    chosen = mask & (ranks < np.trunc(param)[:, np.newaxis])
    return _kept(vector, groups, ranks, chosen)


def _groups(labels: Sequence[Labels], names: Sequence[str], without: bool) -> _Groups:
    dropped = {*names, NAME}
    groups: dict[tuple[tuple[str, str], ...], int] = {}
    of_row = np.empty(len(labels), dtype=np.intp)
    for row, series in enumerate(labels):
        if without:
            kept = sorted(item for item in series.items() if item[0] not in dropped)
        else:
            kept = [(name, series[name]) for name in names if name in series]
        of_row[row] = groups.setdefault(tuple(kept), len(groups))
    return _Groups(tuple(dict(group) for group in groups), of_row)


def _ranks(values: Floats, mask: Bools) -> Rows:
    """Rank the members of each group, the smallest first and NaN last; equal ones keep their order."""
    order = np.lexsort((values, ~mask), axis=-1)
    return np.argsort(order, axis=-1)


def _kept(vector: Vector, groups: _Groups, ranks: Rows, chosen: Bools) -> Vector:
    """Return the chosen cells of the vector; a single instant's answer is ordered by rank within each group."""
    place = groups.places()
    present = chosen[groups.of_row, :, place]
    if present.shape[1] != 1:
        return Vector(vector.labels, vector.values, present)
    rows = np.lexsort((ranks[groups.of_row, 0, place], groups.of_row))
    return Vector(tuple(vector.labels[row] for row in rows), vector.values[rows], present[rows])


def count_values(vector: Vector, label: str, labels: Sequence[str], without: bool) -> Vector:
    """Count the series that have the same value; the value becomes a label."""
    parts = [
        ({**series, label: _number(value)}, cells)
        for series, values, present in zip(vector.labels, vector.values, vector.present, strict=True)
        for value in np.unique(values[present])
        for cells in [present & ((values == value) | (np.isnan(values) & np.isnan(value)))]
    ]
    shape = (len(parts), vector.values.shape[1])
    cells = np.array([cells for _, cells in parts], dtype=bool).reshape(shape)
    counted = Vector(tuple(series for series, _ in parts), np.ones(shape), cells)
    grouping = labels if without else (*labels, label)
    result = aggregate("count", counted, grouping, without, np.empty(0))
    return merged(result.labels, result.values, result.present)


def _number(value: float) -> str:
    """Write a float as Go's FormatFloat(value, 'f', -1, 64) does."""
    if np.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if np.isnan(value) else np.format_float_positional(value, trim="-")
