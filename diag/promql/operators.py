"""Operators (arithmetic, comparisons, set operations with vector matching) and aggregations such as sum and topk.

Sums, means, variances and quantiles, also those of histograms, have the rounding and edge cases of Prometheus 3.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from diag.core.errors import QueryFailed
from diag.promql.data import NAME, Bools, Floats, Labels, Matching, Vector, drop_name, merged, scalar, show, stack

_SMALL_DELTA = 1e-12  # relative; a smaller difference between neighbouring buckets is a rounding error
_SMALLEST_NORMAL = np.finfo(np.float64).tiny

Bounds = tuple[float, ...]
Histogram = tuple[Labels, list[int]]  # labels without `le`, and the rows of its buckets by ascending bound
ARITHMETIC: dict[str, Callable[[Floats, Floats], Floats]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "%": np.fmod,
    "^": np.power,
    "atan2": np.arctan2,
}
COMPARISONS: dict[str, Callable[[Floats, Floats], Bools]] = {
    "==": np.equal,
    "!=": np.not_equal,
    ">": np.greater,
    "<": np.less,
    ">=": np.greater_equal,
    "<=": np.less_equal,
}
SET_OPERATIONS = frozenset({"and", "or", "unless"})


def binary(op: str, left: Vector, right: Vector, matching: Matching, return_bool: bool) -> Vector:
    if left.scalar and right.scalar:
        return scalar(_computed(op, left.values[0], right.values[0], True)[0])
    if op in SET_OPERATIONS:
        if op != "and" and not (left.labels and right.labels):
            return right if op == "or" and not left.labels else left
        left_keys, right_keys = _signatures(left, right, matching)
        if op == "or":
            added = right.present & ~_seen(left_keys, left.present, right_keys)
            if not np.count_nonzero(added):
                return left
            values, present = np.concatenate([left.values, right.values]), np.concatenate([left.present, added])
            return merged((*left.labels, *right.labels), values, present)
        seen = _seen(right_keys, right.present, left_keys)
        return Vector(left.labels, left.values, left.present & (seen if op == "and" else ~seen))
    if not left.scalar and not right.scalar:
        if not (left.labels and right.labels):
            return right if left.labels else left
        return _matched(op, left, right, matching, return_bool)
    vector = right if left.scalar else left
    values, kept = _computed(op, left.values, right.values, return_bool)
    present = vector.present & kept
    if op in COMPARISONS and not return_bool:
        return Vector(vector.labels, vector.values, present)
    return merged((drop_name(series) for series in vector.labels), values, present)


def _computed(op: str, left: Floats, right: Floats, return_bool: bool) -> tuple[Floats, Bools | bool]:
    """Return the values and which of them are kept; a comparison that filters keeps the left value."""
    if op in ARITHMETIC:
        return ARITHMETIC[op](left, right), True
    holds = COMPARISONS[op](left, right)
    if return_bool:
        return holds.astype(np.float64), True
    return left if left.shape == holds.shape else np.broadcast_to(left, holds.shape), holds


def _signatures(left: Vector, right: Vector, matching: Matching) -> Sequence[Sequence[frozenset[tuple[str, str]]]]:
    """Return the labels that two series must have in common to match, for each series of both sides."""
    if len(left.labels) == 1 and left.labels == right.labels:  # one subject: whatever they are, they are the same
        return [frozenset()], [frozenset()]
    names, on = {*matching.labels} if matching.on else {*matching.labels, NAME}, matching.on
    return [
        [frozenset(item for item in series.items() if (item[0] in names) == on) for series in side.labels]
        for side in (left, right)
    ]


def _seen(keys: Sequence[object], present: Bools, asked: Sequence[object]) -> Bools:
    """Return for each asked signature and instant whether any series with that signature is present."""
    if keys == asked and len(set(keys)) == len(keys):
        return present
    place = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    seen = np.zeros((len(place) + 1, present.shape[1]), dtype=bool)  # the last row: unknown signatures
    for key, row in zip(keys, present, strict=True):
        seen[place[key]] |= row
    return seen[[place.get(key, -1) for key in asked]]


def _matched(op: str, left: Vector, right: Vector, matching: Matching, return_bool: bool) -> Vector:
    many, one = (right, left) if matching.many == "right" else (left, right)
    many_keys, one_keys = _signatures(many, one, matching)
    _refuse_repeats(one_keys, one, many.present, "Many-to-many matching: more than one series of the one side has")
    rows_by_key: dict[object, list[int]] = {}
    for row, key in enumerate(one_keys):
        rows_by_key.setdefault(key, []).append(row)
    pairs = [(row, other) for row, key in enumerate(many_keys) for other in rows_by_key.get(key, ())]
    many_rows: Any = slice(None)
    one_rows: Any = slice(None)
    if many_keys != one_keys or len(rows_by_key) != len(pairs):  # usually both sides have the same subjects
        many_rows, one_rows = np.array(pairs, dtype=np.intp).reshape(-1, 2).T
    left_rows, right_rows = (one_rows, many_rows) if matching.many == "right" else (many_rows, one_rows)
    values, kept = _computed(op, left.values[left_rows], right.values[right_rows], return_bool)
    present = many.present[many_rows] & one.present[one_rows] & kept
    labels, kept_labels = [], set(matching.labels)
    for row, other in pairs:  # the labels of the many side, with those that group_left or group_right adds
        series = dict(many.labels[row]) if op in COMPARISONS else drop_name(many.labels[row])
        if not matching.many:
            series = {name: value for name, value in series.items() if (name in kept_labels) == matching.on}
        for name in matching.include:
            series.pop(name, None)
            if name in one.labels[other]:
                series[name] = one.labels[other][name]
        labels.append(drop_name(series) if return_bool else series)
    result = Vector(tuple(labels), values, present)
    if not matching.many:
        keys = [many_keys[row] for row, _ in pairs]
        _refuse_repeats(keys, result, present, "More than one series without group_left has")
    return merged(result.labels, result.values, result.present)


def _refuse_repeats(keys: Sequence[object], side: Vector, asked: Bools, complaint: str) -> None:
    """Raise QueryFailed if two series with one signature are present at an instant at which `asked` has a value."""
    if len(set(keys)) == len(keys):
        return
    instants = np.any(asked, axis=0)
    seen: dict[object, Bools] = {}
    for row, key in enumerate(keys):
        present = side.present[row] & instants
        if (seen.get(key, False) & present).any():
            raise QueryFailed(f"{complaint} the labels to match on of {show(side.labels[row])} at one instant.")
        seen[key] = seen.get(key, False) | present


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
        patterns = present[:1]
        if not present.all():  # the distinct rows; np.unique would load numpy.ma for it, a hundredth of a second
            ordered = present[np.lexsort(present.T)]
            patterns = ordered[np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1))]
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


_REDUCTIONS: dict[str, Callable[[Floats, Bools, Floats], Floats]] = {
    "sum": lambda values, mask, _: total(values, mask),
    "avg": lambda values, mask, _: mean(values, mask),
    "min": lambda values, mask, _: np.fmin.reduce(np.where(mask, values, np.nan), axis=-1),
    "max": lambda values, mask, _: np.fmax.reduce(np.where(mask, values, np.nan), axis=-1),
    "count": lambda values, mask, _: mask.sum(axis=-1).astype(np.float64),
    "group": lambda values, mask, _: np.ones(mask.shape[:-1]),
    "stddev": lambda values, mask, _: np.sqrt(variance(values, mask)),
    "stdvar": lambda values, mask, _: variance(values, mask),
    "quantile": lambda values, mask, q: quantile(q, values, mask),
}
"""Each takes the values of the members of each group, (G, T, M), which of them count, and the parameter, (T,)."""

AGGREGATIONS = frozenset(_REDUCTIONS) | {"topk", "bottomk", "count_values"}
_UNCHANGED_BY_ONE = frozenset({"sum", "avg", "min", "max"})
"""Aggregations that return the value of the only member of a group."""


def aggregate(op: str, vector: Vector, labels: Sequence[str], without: bool, param: Floats) -> Vector:
    """Aggregate series by the given labels, or without them. param: of quantile or topk, shape (T,)."""
    if not vector.labels:
        return vector
    dropped = {*labels, NAME}
    found: dict[tuple[tuple[str, str], ...], int] = {}
    of_row = np.empty(len(vector.labels), dtype=np.intp)  # the group of each row
    for row, series in enumerate(vector.labels):
        if without:
            kept = sorted(item for item in series.items() if item[0] not in dropped)
        else:
            kept = [(name, series[name]) for name in labels if name in series]
        of_row[row] = found.setdefault(tuple(kept), len(found))
    groups = tuple(map(dict, found))
    if op in _UNCHANGED_BY_ONE and len(groups) == len(vector.labels):
        return Vector(groups, vector.values, vector.present)

    # the members of each group beside each other, (G, T, M); place: the number of each row within its group
    order, sizes = np.argsort(of_row, kind="stable"), np.bincount(of_row)
    place = np.empty_like(of_row)
    place[order] = np.arange(of_row.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    shape = (len(groups), vector.values.shape[1], int(sizes.max()))
    values, mask = np.zeros(shape), np.zeros(shape, dtype=bool)
    values[of_row, :, place], mask[of_row, :, place] = vector.values, vector.present
    if op in _REDUCTIONS:
        return Vector(groups, _REDUCTIONS[op](values, mask, param), np.any(mask, axis=-1))
    if not (param[mask.any(axis=(0, 2))] < 2**63).all():
        raise QueryFailed(f"The parameter of {op} is not an integer of 64 bits.")

    # Rank the members of each group, NaN last; equal ones keep their order.
    order = np.lexsort((-values if op == "topk" else values, ~mask), axis=-1)
    ranks = np.argsort(order, axis=-1)
    chosen = mask & (ranks < np.trunc(param)[:, np.newaxis])
    present = chosen[of_row, :, place]
    if present.shape[1] != 1:
        return Vector(vector.labels, vector.values, present)
    rows = np.lexsort((ranks[of_row, 0, place], of_row))  # one instant: ordered by rank in each group
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
