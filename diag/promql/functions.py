"""Functions: over windows of samples (rate, increase, *_over_time), of instant vectors, scalars and strings."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from diag.promql.data import Block, Bools, Floats, Labels, Millis, Vector, compiled, expand, merged, nameless, scalar
from diag.promql.operators import histogram_quantile, mean, quantile, total, variance

_MOST_CELLS = 2_000_000  # of one gathered (S, T, W) array: 16 MB
_FAR = 1e11  # seconds; beyond the year 5000 nothing is a date
Moments = npt.NDArray[np.datetime64]


class Spans(NamedTuple):
    """The windows (asked - offset - length, asked - offset], open on the left. All in ms; asked: shape (T,)."""

    asked: Millis
    length: int
    offset: int

    @property
    def end(self) -> Millis:
        """Last time of each window, ms."""
        return self.asked - self.offset

    @property
    def start(self) -> Millis:
        """Time before each window, ms."""
        return self.end - self.length


@dataclass(eq=False, repr=False)
class Windows:
    """The samples of a block in each window: from index `first` up to but not including `after`, both of shape (T,).

    values: (S, N). times: ms, (N,). All series of a block share their times, so results that depend on time alone are
    computed once for all of them.
    """

    values: Floats
    times: Millis
    first: Millis
    after: Millis
    spans: Spans

    @property
    def count(self) -> Millis:
        """Number of samples in each window, (T,)."""
        return self.after - self.first

    def nth_last(self, n: int) -> tuple[Floats, Millis]:
        """Return values (S, T) and times (T,) of the n-th last sample of each window; garbage where there are fewer."""
        place = np.maximum(self.after - n, 0)
        return self.values.take(place, axis=1), self.times[place]

    def with_both(self, place: int) -> slice:
        """Return the instants whose windows hold the sample at this place and the next one; instants ascend."""
        return slice(np.searchsorted(self.after, place + 2), np.searchsorted(self.first, place, side="right"))

    def gathered(self) -> "Gathered":
        """Return the samples of each window beside each other."""
        place = self.first[:, np.newaxis] + np.arange(self.count.max(initial=1))
        valid = place < self.after[:, np.newaxis]
        place = np.minimum(place, self.times.size - 1)
        return Gathered(self.values[:, place], self.times[place], valid, self.count, self.spans)


@dataclass(eq=False, repr=False)
class Gathered:
    """The samples in each window, left-aligned: a window has `count` of them, its further places hold garbage.

    values: (S, T, W). times: ms, (T, W). valid: True for places that hold a sample, (T, W). count: (T,).
    """

    values: Floats
    times: Millis
    valid: Bools
    count: Millis
    spans: Spans


class RangeFunction(NamedTuple):
    """A function over windows.

    compute: takes Windows, or Gathered if it `gathers` (reads every sample of each window), and the scalar argument of
    shape (T,), garbage if the function has none; returns values (S, T). of_sum: takes the sums of the windows (S, T)
    and their counts (T,), for samples whose sums are exact in any order.
    """

    compute: Callable[[Any, Floats], Floats]
    fewest: int = 1  # samples that a window must hold to have a value
    gathers: bool = False
    of_sum: Callable[[Floats, Millis], Floats] | None = None


def over_windows(function: RangeFunction, block: Block, spans: Spans, argument: Floats) -> Vector:
    """Evaluate a function for the series of a block without holes."""
    first, after = (block.times.searchsorted(bound, side="right") for bound in (spans.start, spans.end))
    windows = Windows(block.values, block.times, first, after, spans)
    shape = len(block.labels), spans.asked.size
    present = np.empty(shape, dtype=bool)
    present[:] = windows.count >= function.fewest
    values = np.zeros(shape)
    if not np.count_nonzero(present):
        return Vector(block.labels, values, present)
    if not function.gathers:
        return Vector(block.labels, function.compute(windows, argument), present)
    # overlapping windows of whole numbers, as most gauges are, of which no sum is too large for a double, need not be
    # summed one by one
    is_small = function.of_sum and np.abs(block.values).sum(axis=-1).max(initial=0) < 2**53
    if function.of_sum and is_small and (np.trunc(block.values) == block.values).all():
        sums = np.zeros((shape[0], block.times.size + 1))
        np.cumsum(block.values + 0.0, axis=-1, out=sums[:, 1:])  # no sum is -0
        return Vector(block.labels, function.of_sum(sums[:, after] - sums[:, first], windows.count), present)

    width = int(windows.count.max())  # gather slices of series and instants that fit into memory
    instants_at_once = max(1, min(spans.asked.size, _MOST_CELLS // width))
    series_at_once = max(1, _MOST_CELLS // (width * instants_at_once))
    for row, instant in product(range(0, shape[0], series_at_once), range(0, shape[1], instants_at_once)):
        rows, at = slice(row, row + series_at_once), slice(instant, instant + instants_at_once)
        part = spans._replace(asked=spans.asked[at])
        gathered = Windows(block.values[rows], block.times, first[at], after[at], part).gathered()
        values[rows, at] = function.compute(gathered, argument[at])
    return Vector(block.labels, values, present)


def _extrapolated(windows: Windows, is_counter: bool, per: float = 1.0) -> Floats:
    """Extrapolate the increase to the whole window and divide it by `per` (Prometheus' extrapolatedRate).

    The order of operations is that of Prometheus, so that the last digit is the same: the rate of a rate depends on it.
    """
    earliest = np.minimum(windows.first, windows.times.size - 1)
    first, first_time = windows.values[:, earliest], windows.times[earliest]
    last, last_time = windows.nth_last(1)
    increase = last - first
    if is_counter:
        before, fell = windows.values[:, :-1], windows.values[:, 1:] < windows.values[:, :-1]
        for place in np.flatnonzero(fell.any(axis=0)).tolist():
            increase[..., windows.with_both(place)] += np.where(fell[:, place], before[:, place], 0.0)[:, np.newaxis]
    sampled = (last_time - first_time) / 1000
    average_gap = sampled / (windows.count - 1)
    to_start = _reach((first_time - windows.spans.start) / 1000, average_gap)
    if is_counter:
        to_zero = sampled * (first / increase)
        to_start = np.where((increase > 0) & (first >= 0) & (to_zero < to_start), to_zero, to_start)
    to_end = _reach((windows.spans.end - last_time) / 1000, average_gap)
    result: Floats = increase * ((sampled + to_start + to_end) / sampled / per)
    return result


def _reach(distance: Floats, average_gap: Floats) -> Floats:
    """Extrapolate to the window's bound if the nearest sample is within 1.1 gaps of it, else by half a gap. Seconds."""
    return np.where(distance >= average_gap * 1.1, average_gap / 2, distance)


def _instant_change(windows: Windows, is_counter: bool) -> tuple[Floats, Floats]:
    """Return the change between the last two samples and the seconds between them."""
    (last, last_time), (before, before_time) = windows.nth_last(1), windows.nth_last(2)
    change = np.where(is_counter & (last < before), last, last - before)
    return change, (last_time - before_time) / 1000


def _regression(windows: Gathered, origin: Millis) -> tuple[Floats, Floats]:
    """Fit a line; return its slope per second and its value at `origin` (ms, shape (T,))."""
    x = (windows.times - origin[:, np.newaxis]) / 1000
    y, valid, n = windows.values, windows.valid, windows.count
    sum_x, sum_xx = total(x, valid), total(x * x, valid)
    sum_y, sum_xy = total(y, valid), total(x * y, valid)
    slope = (sum_xy - sum_x * sum_y / n) / (sum_xx - sum_x * sum_x / n)
    at_origin = sum_y / n - slope * sum_x / n
    first = y[..., 0]
    constant = ((y == first[..., np.newaxis]) | ~valid).all(axis=-1)
    flat = np.where(np.isinf(first), np.nan, 0.0)
    return np.where(constant, flat, slope), np.where(constant, first + flat, at_origin)


def _predict_linear(windows: Gathered, seconds: Floats) -> Floats:
    slope, now = _regression(windows, windows.spans.asked)
    return slope * seconds + now


def _changes(windows: Windows, _: Floats) -> Floats:
    before, now = windows.values[:, :-1], windows.values[:, 1:]
    return _count_pairs((now != before) & ~(np.isnan(now) & np.isnan(before)), windows)


def _count_pairs(differ: Bools, windows: Windows) -> Floats:
    """Count the neighbouring samples in each window that differ. differ: shape (S, N - 1)."""
    counted = np.zeros(windows.values.shape)
    differ.cumsum(axis=1, out=counted[:, 1:])
    first, last = np.minimum(windows.first, windows.times.size - 1), np.maximum(windows.after - 1, 0)
    result: Floats = counted[:, last] - counted[:, first]
    return result


def _extreme(windows: Gathered, ufunc: np.ufunc) -> Floats:
    """Reduce by fmin or fmax, which ignore NaN unless all values are NaN."""
    result: Floats = ufunc.reduce(np.where(windows.valid, windows.values, np.nan), axis=-1)
    return result


def _everywhere(values: Floats | float, windows: Windows) -> Floats:
    """Repeat values of shape (T,) for every series."""
    return np.broadcast_to(values, (len(windows.values), windows.first.size))


RANGE_FUNCTIONS: dict[str, RangeFunction] = {
    "rate": RangeFunction(lambda w, _: _extrapolated(w, True, per=w.spans.length / 1000), fewest=2),
    "increase": RangeFunction(lambda w, _: _extrapolated(w, True), fewest=2),
    "delta": RangeFunction(lambda w, _: _extrapolated(w, False), fewest=2),
    "irate": RangeFunction(lambda w, _: np.divide(*_instant_change(w, True)), fewest=2),
    "idelta": RangeFunction(lambda w, _: _instant_change(w, False)[0], fewest=2),
    "deriv": RangeFunction(lambda w, _: _regression(w, w.times[:, 0])[0], fewest=2, gathers=True),
    "predict_linear": RangeFunction(_predict_linear, fewest=2, gathers=True),
    "resets": RangeFunction(lambda w, _: _count_pairs(w.values[:, 1:] < w.values[:, :-1], w)),
    "changes": RangeFunction(_changes),
    "sum_over_time": RangeFunction(lambda w, _: total(w.values, w.valid), gathers=True, of_sum=lambda sums, _: sums),
    "avg_over_time": RangeFunction(lambda w, _: mean(w.values, w.valid), gathers=True, of_sum=np.divide),
    "min_over_time": RangeFunction(lambda w, _: _extreme(w, np.fmin), gathers=True),
    "max_over_time": RangeFunction(lambda w, _: _extreme(w, np.fmax), gathers=True),
    "count_over_time": RangeFunction(lambda w, _: _everywhere(w.count.astype(np.float64), w)),
    "last_over_time": RangeFunction(lambda w, _: w.nth_last(1)[0]),
    "present_over_time": RangeFunction(lambda w, _: _everywhere(1.0, w)),
    "absent_over_time": RangeFunction(lambda w, _: _everywhere(1.0, w)),
    "quantile_over_time": RangeFunction(lambda w, q: quantile(q, w.values, w.valid), gathers=True),
    "stdvar_over_time": RangeFunction(lambda w, _: variance(w.values, w.valid), gathers=True),
    "stddev_over_time": RangeFunction(lambda w, _: np.sqrt(variance(w.values, w.valid)), gathers=True),
}


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


def _days_in_month(moments: Moments) -> npt.NDArray[Any]:
    month = moments.astype("M8[M]")
    days: npt.NDArray[Any] = (month + np.timedelta64(1, "M")).astype("M8[D]") - month.astype("M8[D]")
    return days


DATES: dict[str, Callable[[Floats], Floats]] = {
    "minute": _date(_since("h", "m", 0)),
    "hour": _date(_since("D", "h", 0)),
    # 1970 began on a Thursday.
    "day_of_week": _date(lambda moments: (moments.astype("M8[D]").astype(np.int64) + 4) % 7),
    "day_of_month": _date(_since("M", "D", 1)),
    "day_of_year": _date(_since("Y", "D", 1)),
    "days_in_month": _date(_days_in_month),
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
