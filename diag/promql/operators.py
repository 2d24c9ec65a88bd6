"""Operators: arithmetic, comparisons and set operations with vector matching, and aggregations such as sum and topk."""

from collections.abc import Callable, Sequence

import numpy as np

from diag.core.errors import QueryFailed
from diag.promql import numeric
from diag.promql.nodes import Matching
from diag.promql.samples import NAME, Bools, Floats, Labels, Vector, drop_name, merged, scalar, show

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
        left_keys, right_keys = (_signatures(side.labels, matching) for side in (left, right))
        if op == "or":
            added = right.present & ~_seen(left_keys, left.present, right_keys)
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
    return np.broadcast_to(left, holds.shape), holds


def _signatures(labels: Sequence[Labels], matching: Matching) -> list[frozenset[tuple[str, str]]]:
    """Return the labels that two series must have in common to match, for each series."""
    names = set(matching.labels)
    if matching.on:
        return [frozenset((name, series[name]) for name in names if name in series) for series in labels]
    names.add(NAME)
    return [frozenset(item for item in series.items() if item[0] not in names) for series in labels]


def _seen(keys: Sequence[object], present: Bools, asked: Sequence[object]) -> Bools:
    """Return for each asked signature and instant whether any series with that signature is present."""
    place = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    seen = np.zeros((len(place) + 1, present.shape[1]), dtype=bool)  # the last row: unknown signatures
    for key, row in zip(keys, present, strict=True):
        seen[place[key]] |= row
    return seen[[place.get(key, -1) for key in asked]]


def _matched(op: str, left: Vector, right: Vector, matching: Matching, return_bool: bool) -> Vector:
    many, one = (right, left) if matching.many == "right" else (left, right)
    many_keys, one_keys = (_signatures(side.labels, matching) for side in (many, one))
    _refuse_repeats(one_keys, one, many.present, "Many-to-many matching: more than one series of the one side has")
    rows_by_key: dict[object, list[int]] = {}
    for row, key in enumerate(one_keys):
        rows_by_key.setdefault(key, []).append(row)
    pairs = [(row, other) for row, key in enumerate(many_keys) for other in rows_by_key.get(key, ())]
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
        keys = [many_keys[row] for row in many_rows]
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
