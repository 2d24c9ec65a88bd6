"""histogram_quantile over classic buckets, with the edge cases of Prometheus 3 (promql/quantile.go)."""

import math

import numpy as np

from diag.promql.samples import Bools, Floats, Labels
from diag.promql.vector import Vector, drop_name, merged, stack

_SMALL_DELTA = 1e-12  # relative; a smaller difference between neighbouring buckets is a rounding error
_SMALLEST_NORMAL = np.finfo(np.float64).tiny

Bounds = tuple[float, ...]
Histogram = tuple[Labels, list[int]]  # labels without `le`, and the rows of its buckets by ascending bound


def histogram_quantile(q: Vector, vector: Vector) -> Vector:
    """Estimate a quantile for each group of series that differ in `le` only."""
    layouts = _histograms(vector.labels).items()
    parts = [_quantiles_of_layout(q.values[0], np.array(bounds), members, vector) for bounds, members in layouts]
    result = stack(parts, vector.values.shape[1])
    return merged((drop_name(series) for series in result.labels), result.values, result.present)


def _histograms(labels: tuple[Labels, ...]) -> dict[Bounds, list[Histogram]]:
    """Group buckets into histograms, and histograms by their bounds; a series without a bound is left out."""
    groups: dict[frozenset[tuple[str, str]], list[tuple[float, int]]] = {}
    for row, series in enumerate(labels):
        bound = _bound(series.get("le", ""))
        if bound is not None:
            others = frozenset((name, value) for name, value in series.items() if name != "le")
            groups.setdefault(others, []).append((bound, row))
    layouts: dict[Bounds, list[Histogram]] = {}
    for others, buckets in groups.items():
        buckets.sort()
        bounds = tuple(bound for bound, _ in buckets)
        layouts.setdefault(bounds, []).append((dict(others), [row for _, row in buckets]))
    return layouts


def _bound(text: str) -> float | None:
    try:
        bound = float(text)
    except ValueError:
        return None
    return None if math.isnan(bound) else bound


def _quantiles_of_layout(q: Floats, bounds: Floats, members: list[Histogram], vector: Vector) -> Vector:
    """Estimate for histograms that share their bounds; buckets that an instant lacks do not count there."""
    rows = np.array([rows for _, rows in members])
    shape = (len(members), q.size)
    counts = np.moveaxis(vector.values[rows], 1, -1).reshape(-1, bounds.size)
    present = np.moveaxis(vector.present[rows], 1, -1).reshape(-1, bounds.size)
    wanted = np.broadcast_to(q, shape).ravel()
    result = np.full(wanted.size, np.nan)
    for buckets in _patterns(present):
        cells = (present == buckets).all(axis=1)
        result[cells] = bucket_quantile(wanted[cells], bounds[buckets], counts[cells][:, buckets])
    labels = tuple(series for series, _ in members)
    return Vector(labels, result.reshape(shape), present.any(axis=1).reshape(shape))


def _patterns(present: Bools) -> list[Bools]:
    """Return the distinct rows that have any bucket."""
    if present.all():
        return [present[0]] if len(present) else []
    return [row for row in np.unique(present, axis=0) if row.any()]


def bucket_quantile(q: Floats, bounds: Floats, counts: Floats) -> Floats:
    """Estimate quantiles. q: (C,), bounds: upper bounds, ascending, (B,), counts: cumulative, (C, B)."""
    starts = np.flatnonzero(np.diff(bounds, prepend=np.nan))  # equal bounds, written differently, are one bucket
    bounds, counts = bounds[starts], _monotonic(np.add.reduceat(counts, starts, axis=1))
    inside = np.full(q.size, np.nan)
    if np.isposinf(bounds[-1]) and bounds.size > 1:
        inside = _interpolated(q, bounds, counts)
    return np.select([np.isnan(q), q < 0, q > 1, counts[:, -1] == 0], [np.nan, -np.inf, np.inf, np.nan], inside)


def _interpolated(q: Floats, bounds: Floats, counts: Floats) -> Floats:
    """Interpolate linearly in the bucket that holds the rank; the lowest begins at 0 unless its bound is below that."""
    rank = q * counts[:, -1]
    bucket = _first_reaching(rank, counts)
    lower = np.where(bucket > 0, bounds[bucket - 1], 0.0)
    upper, cell = bounds[bucket], np.arange(q.size)
    below = np.where(bucket > 0, counts[cell, bucket - 1], 0.0)
    value = lower + (upper - lower) * ((rank - below) / (counts[cell, bucket] - below))
    at_bottom = (bucket == 0) & (bounds[0] <= 0)
    return np.select([bucket == bounds.size - 1, at_bottom], [bounds[-2], bounds[0]], value)


def _first_reaching(rank: Floats, counts: Floats) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Find the first bucket whose count reaches the rank, else the last, by the same bisection as Go's sort.Search."""
    low = np.zeros(rank.size, dtype=np.intp)
    high = np.full(rank.size, counts.shape[1] - 1)
    while (low < high).any():
        middle = (low + high) // 2
        reached = counts[np.arange(rank.size), middle] >= rank
        low, high = np.where(reached | (low >= high), low, middle + 1), np.where(reached, middle, high)
    return low


def _monotonic(counts: Floats) -> Floats:
    """Lift buckets that are below their predecessor, or differ from it by a rounding error only, to its count."""
    before, after = counts[:, :-1], counts[:, 1:]
    suspect = ((after < before) | ((after != before) & _almost_equal(before, after))).any(axis=1)
    if not suspect.any():
        return counts
    fixed = counts.copy()
    previous = fixed[suspect, 0]
    for bucket in range(1, counts.shape[1]):
        current = fixed[suspect, bucket]
        previous = np.where((current < previous) | _almost_equal(previous, current), previous, current)
        fixed[suspect, bucket] = previous
    return fixed


def _almost_equal(a: Floats, b: Floats) -> Bools:
    """Compare as Prometheus' almost.Equal does."""
    difference, size = np.abs(a - b), np.abs(a) + np.abs(b)
    tiny = (a == 0) | (b == 0) | (size < _SMALLEST_NORMAL)
    limit = np.where(tiny, _SMALL_DELTA * _SMALLEST_NORMAL, _SMALL_DELTA * size)
    same: Bools = (a == b) | (difference < limit) | (np.isnan(a) & np.isnan(b))
    return same
