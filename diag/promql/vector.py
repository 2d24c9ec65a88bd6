"""What a node yields: a value for each series and instant."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from diag.core.errors import QueryFailed
from diag.promql.samples import NAME, Bools, Floats, Labels

_METADATA = frozenset({NAME, "__type__", "__unit__"})


class Vector(NamedTuple):
    """Series x instants.

    values: shape (S, T). present: shape (S, T), because NaN can be a real value. A scalar is one series without labels,
    present everywhere, with `scalar` set.
    """

    labels: tuple[Labels, ...]
    values: Floats
    present: Bools
    scalar: bool = False


def scalar(values: Floats) -> Vector:
    """Make a scalar of values of shape (T,)."""
    return Vector(({},), values[np.newaxis, :], np.ones((1, values.size), dtype=bool), scalar=True)


def single(labels: Labels, values: Floats, present: Bools) -> Vector:
    """Make a vector of one series from arrays of shape (T,)."""
    return Vector((labels,), values[np.newaxis, :], present[np.newaxis, :])


def stack(parts: Sequence[Vector], instants: int) -> Vector:
    """Put vectors over the same instants below each other; their label sets must differ."""
    labels = tuple(series for part in parts for series in part.labels)
    if not labels:
        return Vector((), np.empty((0, instants)), np.empty((0, instants), dtype=bool))
    return Vector(labels, np.concatenate([p.values for p in parts]), np.concatenate([p.present for p in parts]))


def merged(labels: Iterable[Labels], values: Floats, present: Bools) -> Vector:
    """Make a vector of rows that may have equal label sets.

    Equal ones become one row. Two that are present at one instant have no answer, as in a Prometheus asked at it.
    """
    labels = tuple(labels)
    if len(labels) < 2:
        return Vector(labels, values, present)
    places: dict[frozenset[tuple[str, str]], int] = {}
    index = [places.setdefault(frozenset(series.items()), len(places)) for series in labels]
    if len(places) == len(labels):
        return Vector(labels, values, present)
    shape = (len(places), present.shape[1])
    out, seen = np.zeros(shape), np.zeros(shape, dtype=bool)
    for row, place in enumerate(index):
        if (seen[place] & present[row]).any():
            raise QueryFailed(f"Two series of a result have the same labels {show(labels[row])} at one instant.")
        seen[place] |= present[row]
        out[place] = np.where(present[row], values[row], out[place])
    first = {place: row for row, place in reversed(list(enumerate(index)))}
    return Vector(tuple(labels[first[place]] for place in range(len(places))), out, seen)


def nameless(vector: Vector) -> Vector:
    """Drop the metric's name, as everything that makes a new quantity does."""
    if vector.scalar:
        return vector
    return merged((drop_name(series) for series in vector.labels), vector.values, vector.present)


def drop_name(labels: Labels) -> Labels:
    """Return the labels without those that name the metric."""
    return {name: value for name, value in labels.items() if name not in _METADATA}


def show(labels: Labels) -> str:
    """Write a label set as PromQL does."""
    return "{" + ", ".join(f'{name}="{value}"' for name, value in sorted(labels.items())) + "}"
