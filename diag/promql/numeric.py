"""Sums, means, variances and quantiles, also of histograms, with the rounding and edge cases of Prometheus 3."""

import math

import numpy as np

from diag.promql.samples import Bools, Floats, Labels, Vector, drop_name, merged, stack

_SMALL_DELTA = 1e-12  # relative; a smaller difference between neighbouring buckets is a rounding error
_SMALLEST_NORMAL = np.finfo(np.float64).tiny

Bounds = tuple[float, ...]
Histogram = tuple[Labels, list[int]]  # labels without `le`, and the rows of its buckets by ascending bound


def total(values: Floats, mask: Bools) -> Floats:
    """Sum with the Kahan-Neumaier correction."""
    running, correction = _running_sum(np.where(mask, values, 0.0))
    result: Floats = running[..., -1] + correction
    return result


def mean(values: Floats, mask: Bools) -> Floats:
    """Average with the Kahan-Neumaier correction; incrementally if the sum overflows."""
    running, correction = _running_sum(np.where(mask, values, 0.0))
    count = mask.sum(axis=-1)
    result: Floats = running[..., -1] / count + correction / count
    overflowed = np.isinf(running).any(axis=-1)
    if overflowed.any():
        rows, masks = values[overflowed], np.broadcast_to(mask, values.shape)[overflowed]
        count, average, correction = np.zeros((3, len(rows)))
        for value, counted in zip(rows.T, masks.T, strict=True):
            count = count + counted
            keep = (count - 1) / count
            updated = _add(value / count, keep * average, keep * correction)
            average, correction = (
                np.where(counted, new, old) for new, old in zip(updated, (average, correction), strict=True)
            )
        result[overflowed] = average + correction
    return result


def _running_sum(values: Floats) -> tuple[Floats, Floats]:
    """Return all partial sums and the correction of the last one, which is 0 for an infinite sum."""
    running = np.cumsum(values, axis=-1)
    before = np.zeros_like(running)
    before[..., 1:] = running[..., :-1]
    lost = np.cumsum(_lost(before, values, running), axis=-1)[..., -1]
    return running, np.where(np.isfinite(running[..., -1]), lost, 0.0)


def _lost(before: Floats, value: Floats, after: Floats) -> Floats:
    """Return what rounding took from `after` = `before` + `value` (Neumaier)."""
    larger_before = np.abs(before) >= np.abs(value)
    return np.where(larger_before, (before - after) + value, (value - after) + before)


def _add(value: Floats, before: Floats, correction: Floats) -> tuple[Floats, Floats]:
    after = before + value
    return after, np.where(np.isinf(after), 0.0, correction + _lost(before, value, after))


def variance(values: Floats, mask: Bools) -> Floats:
    """Compute the population variance by Welford's method with corrected sums; of equal values it is exactly 0."""
    mask = np.broadcast_to(mask, values.shape)
    count, average, lost, squares, lost_squares = np.zeros((5, *values.shape[:-1]))
    for place in range(values.shape[-1]):
        value, counted = values[..., place], mask[..., place]
        count = count + counted
        delta = np.where(counted, value - (average + lost), 0.0)
        average, lost = _add(np.where(counted, delta / count, 0.0), average, lost)
        squared = np.where(counted, delta * (value - (average + lost)), 0.0)
        squares, lost_squares = _add(squared, squares, lost_squares)
    result: Floats = (squares + lost_squares) / count
    return result


def quantile(q: Floats, values: Floats, mask: Bools) -> Floats:
    """Interpolate between the two nearest values; NaN is the smallest value. q: shape (T,), values: shape (S, T, N)."""
    mask = np.broadcast_to(mask, values.shape)
    # Ascending, NaN first, masked values last: numpy sorts NaN last, so sort the negatives and reverse them.
    ordered = -np.sort(np.where(mask, -values, -np.inf), axis=-1)[..., ::-1]
    last = np.maximum(mask.sum(axis=-1) - 1, 0)
    rank = np.where((q >= 0) & (q <= 1), q, 0.0) * last
    lower = np.floor(rank).astype(np.intp)
    upper = np.minimum(lower + 1, last)
    weight = rank - lower
    low, high = (np.take_along_axis(ordered, place[..., np.newaxis], axis=-1)[..., 0] for place in (lower, upper))
    return np.select([np.isnan(q), q < 0, q > 1], [np.nan, -np.inf, np.inf], low * (1 - weight) + high * weight)


def histogram_quantile(q: Vector, vector: Vector) -> Vector:
    """Estimate a quantile for each group of series that differ in `le` only.

    At an instant at which a bucket has no sample, the other buckets of its histogram count.
    """
    parts = []
    for layout, members in _histograms(vector.labels).items():
        bounds = np.array(layout)
        rows = np.array([rows for _, rows in members])
        shape = (len(members), q.values[0].size)
        counts = np.moveaxis(vector.values[rows], 1, -1).reshape(-1, bounds.size)
        present = np.moveaxis(vector.present[rows], 1, -1).reshape(-1, bounds.size)
        patterns = present[:1] if present.all() else np.unique(present, axis=0)

        wanted = np.broadcast_to(q.values[0], shape).ravel()
        result = np.full(wanted.size, np.nan)
        for buckets in patterns:
            if buckets.any():
                cells = (present == buckets).all(axis=1)
                result[cells] = bucket_quantile(wanted[cells], bounds[buckets], counts[cells][:, buckets])
        labels = tuple(series for series, _ in members)
        parts.append(Vector(labels, result.reshape(shape), present.any(axis=1).reshape(shape)))
    whole = stack(parts, vector.values.shape[1])
    return merged((drop_name(series) for series in whole.labels), whole.values, whole.present)


def _histograms(labels: tuple[Labels, ...]) -> dict[Bounds, list[Histogram]]:
    """Group buckets into histograms, and histograms by their bounds; a series without a bound is left out."""
    groups: dict[frozenset[tuple[str, str]], list[tuple[float, int]]] = {}
    for row, series in enumerate(labels):
        try:
            bound = float(series.get("le", ""))
        except ValueError:
            continue
        if not math.isnan(bound):
            others = frozenset((name, value) for name, value in series.items() if name != "le")
            groups.setdefault(others, []).append((bound, row))
    layouts: dict[Bounds, list[Histogram]] = {}
    for others, buckets in groups.items():
        buckets.sort()
        bounds = tuple(bound for bound, _ in buckets)
        layouts.setdefault(bounds, []).append((dict(others), [row for _, row in buckets]))
    return layouts


def bucket_quantile(q: Floats, bounds: Floats, counts: Floats) -> Floats:
    """Estimate quantiles. q: (C,), bounds: upper bounds, ascending, (B,), counts: cumulative, (C, B).

    Interpolates linearly in the bucket that holds the rank; the lowest begins at 0 unless its bound is below that.
    """
    starts = np.flatnonzero(np.diff(bounds, prepend=np.nan))  # equal bounds, written differently, are one bucket
    bounds, counts = bounds[starts], _monotonic(np.add.reduceat(counts, starts, axis=1))
    inside = np.full(q.size, np.nan)
    if np.isposinf(bounds[-1]) and bounds.size > 1:
        rank = q * counts[:, -1]
        # the first bucket whose count reaches the rank, else the last, by the same bisection as Go's sort.Search
        bucket, high = np.zeros(q.size, dtype=np.intp), np.full(q.size, bounds.size - 1)
        while (bucket < high).any():
            middle = (bucket + high) // 2
            reached = counts[np.arange(q.size), middle] >= rank
            done = reached | (bucket >= high)
            bucket, high = np.where(done, bucket, middle + 1), np.where(reached, middle, high)

        lower = np.where(bucket > 0, bounds[bucket - 1], 0.0)
        upper, cell = bounds[bucket], np.arange(q.size)
        below = np.where(bucket > 0, counts[cell, bucket - 1], 0.0)
        value = lower + (upper - lower) * ((rank - below) / (counts[cell, bucket] - below))
        at_bottom = (bucket == 0) & (bounds[0] <= 0)
        inside = np.select([bucket == bounds.size - 1, at_bottom], [bounds[-2], bounds[0]], value)
    return np.select([np.isnan(q), q < 0, q > 1, counts[:, -1] == 0], [np.nan, -np.inf, np.inf, np.nan], inside)


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
