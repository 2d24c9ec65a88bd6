"""Sums, means, variances and quantiles over the last axis as Prometheus computes them; `mask` says what counts."""

import numpy as np

from diag.promql.samples import Bools, Floats


def total(values: Floats, mask: Bools) -> Floats:
    """Sum with the Kahan-Neumaier correction."""
    running, correction = _running_sum(np.where(mask, values, 0.0))
    result: Floats = running[..., -1] + correction
    return result


def mean(values: Floats, mask: Bools) -> Floats:
    """Average with the Kahan-Neumaier correction; incrementally where the sum overflows."""
    running, correction = _running_sum(np.where(mask, values, 0.0))
    count = mask.sum(axis=-1)
    result: Floats = running[..., -1] / count + correction / count
    overflowed = np.isinf(running).any(axis=-1)
    if overflowed.any():
        counted = np.broadcast_to(mask, values.shape)[overflowed]
        result[overflowed] = _incremental_mean(values[overflowed], counted)
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


def _incremental_mean(values: Floats, mask: Bools) -> Floats:
    """Average rows of shape (K, N) without ever holding their sum."""
    count, average, correction = np.zeros((3, len(values)))
    for value, counted in zip(values.T, mask.T, strict=True):
        count = count + counted
        keep = (count - 1) / count
        updated = _add(value / count, keep * average, keep * correction)
        average, correction = (
            np.where(counted, new, old) for new, old in zip(updated, (average, correction), strict=True)
        )
    return average + correction


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
    # Ascending, NaN first, what does not count last: numpy sorts NaN last, so sort the negatives and turn them round.
    ordered = -np.sort(np.where(mask, -values, -np.inf), axis=-1)[..., ::-1]
    last = np.maximum(mask.sum(axis=-1) - 1, 0)
    rank = np.where((q >= 0) & (q <= 1), q, 0.0) * last
    lower = np.floor(rank).astype(np.intp)
    upper = np.minimum(lower + 1, last)
    weight = rank - lower
    low, high = (np.take_along_axis(ordered, place[..., np.newaxis], axis=-1)[..., 0] for place in (lower, upper))
    return np.select([np.isnan(q), q < 0, q > 1], [np.nan, -np.inf, np.inf], low * (1 - weight) + high * weight)
