"""Functions of instant vectors, scalars and strings."""

from collections.abc import Callable
from functools import partial

import numpy as np

from diag.promql import regex
from diag.promql.dates import DATES
from diag.promql.histogram import histogram_quantile
from diag.promql.samples import Bools, Floats, Labels, Millis
from diag.promql.vector import Vector, merged, nameless, scalar, single


def _round(values: Floats, nearest: Floats | None = None) -> Floats:
    """Round half up; by the inverse of `nearest`, as Prometheus does."""
    inverse = 1.0 if nearest is None else 1.0 / nearest
    result: Floats = np.floor(values * inverse + 0.5) / inverse
    return result


def _larger(values: Floats, limit: Floats) -> Floats:
    """Choose as Go's math.Max does: infinity wins over NaN, NaN over numbers."""
    return np.where(np.isposinf(values) | np.isposinf(limit), np.inf, np.maximum(values, limit))


def _smaller(values: Floats, limit: Floats) -> Floats:
    return -_larger(-values, -limit)


# Each takes values of shape (S, T) and then scalars of shape (T,).
_ELEMENTWISE: dict[str, Callable[..., Floats]] = {
    "abs": np.abs,
    "ceil": np.ceil,
    "floor": np.floor,
    "round": _round,
    "sqrt": np.sqrt,
    "exp": np.exp,
    "ln": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "sgn": np.sign,
    "clamp": lambda values, low, high: _larger(_smaller(values, high), low),
    "clamp_min": _larger,
    "clamp_max": _smaller,
    **DATES,
}


def _elementwise(function: str, vector: Vector, *scalars: Vector) -> Vector:
    """Apply a function to every value; the metric's name goes."""
    limits = [limit.values[0] for limit in scalars]
    present = vector.present
    if function == "clamp":
        present = present & ~(limits[1] < limits[0])
    return nameless(Vector(vector.labels, _ELEMENTWISE[function](vector.values, *limits), present))


def seconds(instants: Millis) -> Vector:
    """Return the time of evaluation (time)."""
    return scalar(instants / 1000)


def to_scalar(vector: Vector) -> Vector:
    """Return the value of the only series, NaN unless there is exactly one (scalar)."""
    alone = vector.present.sum(axis=0) == 1
    return scalar(np.where(alone, np.where(vector.present, vector.values, 0.0).sum(axis=0), np.nan))


def to_vector(value: Vector) -> Vector:
    """Return a scalar as one series without labels (vector)."""
    return Vector(value.labels, value.values, value.present)


def absent(vector: Vector, labels: Labels) -> Vector:
    """Tell where no series is present (absent, absent_over_time)."""
    missing: Bools = ~np.any(vector.present, axis=0)
    return single(labels, np.ones(missing.size), missing)


def sort(vector: Vector, descending: bool) -> Vector:
    """Order the series by value, NaN last; only a single instant has an order."""
    if vector.values.shape[1] != 1:
        return vector
    values = vector.values[:, 0]
    order = np.argsort(-values if descending else values, kind="stable")
    return Vector(tuple(vector.labels[row] for row in order), vector.values[order], vector.present[order])


def label_replace(vector: Vector, target: str, replacement: str, source: str, pattern: str) -> Vector:
    """Set a label by a pattern on another; series whose label does not match stay as they are."""

    def replaced(series: Labels) -> Labels:
        match = regex.compiled(pattern).fullmatch(series.get(source, ""))
        return _with(series, target, regex.expand(replacement, match)) if match else series

    return merged((replaced(series) for series in vector.labels), vector.values, vector.present)


def label_join(vector: Vector, target: str, separator: str, *sources: str) -> Vector:
    """Set a label to the values of others, joined."""

    def joined(series: Labels) -> Labels:
        return _with(series, target, separator.join(series.get(source, "") for source in sources))

    return merged((joined(series) for series in vector.labels), vector.values, vector.present)


def _with(labels: Labels, name: str, value: str) -> Labels:
    others = {other: kept for other, kept in labels.items() if other != name}
    return others | {name: value} if value else others


# Each takes its arguments as vectors and strings.
CALLS: dict[str, Callable[..., Vector]] = {
    "histogram_quantile": histogram_quantile,
    "label_join": label_join,
    "label_replace": label_replace,
    "scalar": to_scalar,
    "sort": partial(sort, descending=False),
    "sort_desc": partial(sort, descending=True),
    "vector": to_vector,
    **{function: partial(_elementwise, function) for function in _ELEMENTWISE},
}
