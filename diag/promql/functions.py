"""Functions of instant vectors, scalars and strings."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from diag.promql.nodes import compiled, expand
from diag.promql.numeric import histogram_quantile
from diag.promql.samples import Bools, Floats, Labels, Vector, merged, nameless, scalar

_FAR = 1e11  # seconds; beyond the year 5000 nothing is a date
Moments = npt.NDArray[np.datetime64]


def _since(whole: str, part: str, first: int) -> Callable[[Moments], npt.NDArray[Any]]:
    """Count the parts since the start of the whole, beginning at `first`."""

    def counted(moments: Moments) -> npt.NDArray[Any]:
        parts: npt.NDArray[Any] = moments.astype(f"M8[{part}]") - moments.astype(f"M8[{whole}]").astype(f"M8[{part}]")
        return parts.astype(np.int64) + first

    return counted


def _date(part: Callable[[Moments], npt.NDArray[Any]]) -> Callable[[Floats], Floats]:
    """Make a function of unix seconds, cut to whole ones; NaN is no date."""

    def function(values: Floats) -> Floats:
        known = np.abs(values) < _FAR
        moments = np.where(known, np.trunc(values), 0).astype(np.int64).astype("M8[s]")
        return np.where(known, part(moments).astype(np.float64), np.nan)

    return function


DATES: dict[str, Callable[[Floats], Floats]] = {
    "minute": _date(_since("h", "m", 0)),
    "hour": _date(_since("D", "h", 0)),
    # 1970 began on a Thursday.
    "day_of_week": _date(lambda moments: (moments.astype("M8[D]").astype(np.int64) + 4) % 7),
    "day_of_month": _date(_since("M", "D", 1)),
    "day_of_year": _date(_since("Y", "D", 1)),
    "days_in_month": _date(
        lambda moments: (moments.astype("M8[M]") + 1).astype("M8[D]") - moments.astype("M8[M]").astype("M8[D]")
    ),
    "month": _date(_since("Y", "M", 1)),
    "year": _date(lambda moments: moments.astype("M8[Y]").astype(np.int64) + 1970),
}
"""Calendar functions of unix seconds, in UTC."""


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
"""Each takes values of shape (S, T) and then scalars of shape (T,)."""


def _elementwise(function: str, vector: Vector, *scalars: Vector) -> Vector:
    """Apply a function to every value; drop the metric's name."""
    limits = [limit.values[0] for limit in scalars]
    present = vector.present
    if function == "clamp":
        present = present & ~(limits[1] < limits[0])
    return nameless(Vector(vector.labels, _ELEMENTWISE[function](vector.values, *limits), present))


def to_scalar(vector: Vector) -> Vector:
    """Return the value of the only series, NaN unless there is exactly one (scalar)."""
    alone = vector.present.sum(axis=0) == 1
    return scalar(np.where(alone, np.where(vector.present, vector.values, 0.0).sum(axis=0), np.nan))


def absent(vector: Vector, labels: Labels) -> Vector:
    """Return 1 at the instants at which no series is present (absent, absent_over_time)."""
    missing: Bools = ~np.any(vector.present, axis=0)
    return Vector((labels,), np.ones((1, missing.size)), missing[np.newaxis, :])


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
        match = compiled(pattern).fullmatch(series.get(source, ""))
        return _with(series, target, expand(replacement, match)) if match else series

    return merged((replaced(series) for series in vector.labels), vector.values, vector.present)


def label_join(vector: Vector, target: str, separator: str, *sources: str) -> Vector:
    def joined(series: Labels) -> Labels:
        return _with(series, target, separator.join(series.get(source, "") for source in sources))

    return merged((joined(series) for series in vector.labels), vector.values, vector.present)


def _with(labels: Labels, name: str, value: str) -> Labels:
    others = {other: kept for other, kept in labels.items() if other != name}
    return others | {name: value} if value else others


CALLS: dict[str, Callable[..., Vector]] = {
    "histogram_quantile": histogram_quantile,
    "label_join": label_join,
    "label_replace": label_replace,
    "scalar": to_scalar,
    "sort": partial(sort, descending=False),
    "sort_desc": partial(sort, descending=True),
    "vector": lambda value: value._replace(scalar=False),
    **{function: partial(_elementwise, function) for function in _ELEMENTWISE},
}
"""Each takes its arguments as vectors and strings."""
