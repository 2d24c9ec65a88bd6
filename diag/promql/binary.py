"""Binary operations: arithmetic, comparisons and set operations, with vector matching."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from diag.core.errors import QueryFailed
from diag.promql.nodes import Matching
from diag.promql.samples import NAME, Bools, Floats, Labels
from diag.promql.vector import Vector, drop_name, merged, scalar, show

Rows = npt.NDArray[np.intp]

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
    """Apply a binary operator."""
    if left.scalar and right.scalar:
        return scalar(_computed(op, left.values[0], right.values[0], True)[0])
    if left.scalar or right.scalar:
        return _with_scalar(op, left, right, return_bool)
    if op in SET_OPERATIONS:
        return _set_operation(op, left, right, matching)
    return _matched(op, left, right, matching, return_bool)


def _computed(op: str, left: Floats, right: Floats, return_bool: bool) -> tuple[Floats, Bools | bool]:
    """Return the values and which of them are kept; a comparison that filters keeps the left value."""
    if op in ARITHMETIC:
        return ARITHMETIC[op](left, right), True
    holds = COMPARISONS[op](left, right)
    if return_bool:
        return holds.astype(np.float64), True
    return np.broadcast_to(left, holds.shape), holds


def _with_scalar(op: str, left: Vector, right: Vector, return_bool: bool) -> Vector:
    vector = right if left.scalar else left
    values, kept = _computed(op, left.values, right.values, return_bool)
    present = vector.present & kept
    if op in COMPARISONS and not return_bool:
        return Vector(vector.labels, vector.values, present)
    return merged((drop_name(series) for series in vector.labels), values, present)


def _signatures(labels: Sequence[Labels], matching: Matching) -> list[frozenset[tuple[str, str]]]:
    """Return what two series must have in common to match."""
    names = set(matching.labels)
    if matching.on:
        return [frozenset((name, series[name]) for name in names if name in series) for series in labels]
    names.add(NAME)
    return [frozenset(item for item in series.items() if item[0] not in names) for series in labels]


def _set_operation(op: str, left: Vector, right: Vector, matching: Matching) -> Vector:
    if op != "and" and not (left.labels and right.labels):
        return right if op == "or" and not left.labels else left
    left_keys, right_keys = (_signatures(side.labels, matching) for side in (left, right))
    if op == "or":
        added = right.present & ~_seen(left_keys, left.present, right_keys)
        values, present = np.concatenate([left.values, right.values]), np.concatenate([left.present, added])
        return merged((*left.labels, *right.labels), values, present)
    seen = _seen(right_keys, right.present, left_keys)
    return Vector(left.labels, left.values, left.present & (seen if op == "and" else ~seen))


def _seen(keys: Sequence[object], present: Bools, asked: Sequence[object]) -> Bools:
    """Tell for each asked signature and instant whether any series with it is present."""
    place = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    seen = np.zeros((len(place) + 1, present.shape[1]), dtype=bool)  # the last row: signatures that there are not
    for key, row in zip(keys, present, strict=True):
        seen[place[key]] |= row
    return seen[[place.get(key, -1) for key in asked]]


def _matched(op: str, left: Vector, right: Vector, matching: Matching, return_bool: bool) -> Vector:
    many, one = (right, left) if matching.many == "right" else (left, right)
    many_keys, one_keys = (_signatures(side.labels, matching) for side in (many, one))
    _refuse_repeats(one_keys, one, many.present, "Many-to-many matching: more than one series of the one side has")
    many_rows, one_rows = _pairs(many_keys, one_keys)
    left_rows, right_rows = (one_rows, many_rows) if matching.many == "right" else (many_rows, one_rows)
    values, kept = _computed(op, left.values[left_rows], right.values[right_rows], return_bool)
    present = many.present[many_rows] & one.present[one_rows] & kept
    labels = [
        _result_labels(op, many.labels[i], one.labels[j], matching) for i, j in zip(many_rows, one_rows, strict=True)
    ]
    if return_bool:
        labels = [drop_name(series) for series in labels]
    result = Vector(tuple(labels), values, present)
    if not matching.many:
        keys = [many_keys[row] for row in many_rows]
        _refuse_repeats(keys, result, present, "More than one series without group_left has")
    return merged(result.labels, result.values, result.present)


def _pairs(many: Sequence[object], one: Sequence[object]) -> tuple[Rows, Rows]:
    """Return the rows of both sides whose signatures are equal, pair by pair."""
    rows_by_key: dict[object, list[int]] = {}
    for row, key in enumerate(one):
        rows_by_key.setdefault(key, []).append(row)
    pairs = [(row, other) for row, key in enumerate(many) for other in rows_by_key.get(key, ())]
    rows = np.array(pairs, dtype=np.intp).reshape(-1, 2)
    return rows[:, 0], rows[:, 1]


def _refuse_repeats(keys: Sequence[object], side: Vector, asked: Bools, complaint: str) -> None:
    """Fail when two series with one signature are present at an instant at which anything is asked."""
    if len(set(keys)) == len(keys):
        return
    instants = np.any(asked, axis=0)
    seen: dict[object, Bools] = {}
    for row, key in enumerate(keys):
        present = side.present[row] & instants
        if (seen.get(key, False) & present).any():
            raise QueryFailed(f"{complaint} the labels to match on of {show(side.labels[row])} at one instant.")
        seen[key] = seen.get(key, False) | present


def _result_labels(op: str, many: Labels, one: Labels, matching: Matching) -> Labels:
    """Return the labels of a result: those of the side that may have many, with what the other side adds."""
    labels = dict(many) if op in COMPARISONS else drop_name(many)
    if not matching.many:
        kept = set(matching.labels)
        return {name: value for name, value in labels.items() if (name in kept) == matching.on}
    for name in matching.include:
        labels.pop(name, None)
        if name in one:
            labels[name] = one[name]
    return labels
