"""Functions over windows of samples: rate, increase, *_over_time and the like."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from diag.promql import numeric
from diag.promql.samples import Block, Floats, Millis
from diag.promql.vector import Vector
from diag.promql.windows import Spans, Windows, chunks


class RangeFunction(NamedTuple):
    """compute: Windows and the scalar argument, if any, of shape (T,) -> values (S, T)."""

    compute: Callable[[Windows, Floats], Floats]
    fewest: int = 1  # samples that a window must hold to have a value


def over_windows(function: RangeFunction, block: Block, spans: Spans, argument: Floats) -> Vector:
    """Evaluate a function for the series of a block without holes."""
    shape = (len(block.labels), spans.asked.size)
    values, present = np.zeros(shape), np.zeros(shape, dtype=bool)
    for rows, instants, windows in chunks(block, spans):
        values[rows, instants] = function.compute(windows, argument[instants])
        present[rows, instants] = windows.count >= function.fewest
    return Vector(block.labels, values, present)


def _extrapolated(windows: Windows, is_counter: bool, per: float = 1.0) -> Floats:
    """Extrapolate the increase to the whole window and divide it by `per` (Prometheus' extrapolatedRate).

    In the order in which Prometheus computes it, so that the last digit is the same: the rate of a rate depends on it.
    """
    (last, last_time), (first, first_time) = windows.nth_last(1), (windows.values[..., 0], windows.times[:, 0])
    increase = last - first
    if is_counter:
        before, now, paired = windows.pairs()
        lost = np.where(paired & (now < before), before, 0.0)
        increase = np.cumsum(np.concatenate([increase[..., np.newaxis], lost], axis=-1), axis=-1)[..., -1]
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
    """Extrapolate all the way to the bound when a sample was due about there, else by half a gap. Seconds."""
    return np.where(distance >= average_gap * 1.1, average_gap / 2, distance)


def _instant_change(windows: Windows, is_counter: bool) -> tuple[Floats, Floats]:
    """Return the change between the last two samples and the seconds between them."""
    (last, last_time), (before, before_time) = windows.nth_last(1), windows.nth_last(2)
    change = np.where(is_counter & (last < before), last, last - before)
    return change, (last_time - before_time) / 1000


def _irate(windows: Windows, _: Floats) -> Floats:
    change, seconds = _instant_change(windows, True)
    return change / seconds


def _regression(windows: Windows, origin: Millis) -> tuple[Floats, Floats]:
    """Fit a line; return its slope per second and its value at `origin` (ms, shape (T,))."""
    x = (windows.times - origin[:, np.newaxis]) / 1000
    y, valid, n = windows.values, windows.valid, windows.count
    sum_x, sum_xx = numeric.total(x, valid), numeric.total(x * x, valid)
    sum_y, sum_xy = numeric.total(y, valid), numeric.total(x * y, valid)
    slope = (sum_xy - sum_x * sum_y / n) / (sum_xx - sum_x * sum_x / n)
    at_origin = sum_y / n - slope * sum_x / n
    first = y[..., 0]
    constant = ((y == first[..., np.newaxis]) | ~valid).all(axis=-1)
    flat = np.where(np.isinf(first), np.nan, 0.0)
    return np.where(constant, flat, slope), np.where(constant, first + flat, at_origin)


def _predict_linear(windows: Windows, seconds: Floats) -> Floats:
    slope, now = _regression(windows, windows.spans.asked)
    return slope * seconds + now


def _resets(windows: Windows, _: Floats) -> Floats:
    before, now, paired = windows.pairs()
    resets: Floats = np.sum(paired & (now < before), axis=-1, dtype=np.float64)
    return resets


def _changes(windows: Windows, _: Floats) -> Floats:
    before, now, paired = windows.pairs()
    differ = (now != before) & ~(np.isnan(now) & np.isnan(before))
    changes: Floats = np.sum(paired & differ, axis=-1, dtype=np.float64)
    return changes


def _extreme(windows: Windows, ufunc: np.ufunc) -> Floats:
    """Reduce by fmin or fmax, which ignore NaN unless there is nothing else."""
    result: Floats = ufunc.reduce(np.where(windows.valid, windows.values, np.nan), axis=-1)
    return result


def _counts(windows: Windows, _: Floats) -> Floats:
    return np.broadcast_to(windows.count.astype(np.float64), windows.values.shape[:2])


RANGE_FUNCTIONS: dict[str, RangeFunction] = {
    "rate": RangeFunction(lambda w, _: _extrapolated(w, True, per=w.spans.length / 1000), fewest=2),
    "increase": RangeFunction(lambda w, _: _extrapolated(w, True), fewest=2),
    "delta": RangeFunction(lambda w, _: _extrapolated(w, False), fewest=2),
    "irate": RangeFunction(_irate, fewest=2),
    "idelta": RangeFunction(lambda w, _: _instant_change(w, False)[0], fewest=2),
    "deriv": RangeFunction(lambda w, _: _regression(w, w.times[:, 0])[0], fewest=2),
    "predict_linear": RangeFunction(_predict_linear, fewest=2),
    "resets": RangeFunction(_resets),
    "changes": RangeFunction(_changes),
    "sum_over_time": RangeFunction(lambda w, _: numeric.total(w.values, w.valid)),
    "avg_over_time": RangeFunction(lambda w, _: numeric.mean(w.values, w.valid)),
    "min_over_time": RangeFunction(lambda w, _: _extreme(w, np.fmin)),
    "max_over_time": RangeFunction(lambda w, _: _extreme(w, np.fmax)),
    "count_over_time": RangeFunction(_counts),
    "last_over_time": RangeFunction(lambda w, _: w.nth_last(1)[0]),
    "present_over_time": RangeFunction(lambda w, _: np.ones(w.values.shape[:2])),
    "absent_over_time": RangeFunction(lambda w, _: np.ones(w.values.shape[:2])),
    "quantile_over_time": RangeFunction(lambda w, q: numeric.quantile(q, w.values, w.valid)),
    "stdvar_over_time": RangeFunction(lambda w, _: numeric.variance(w.values, w.valid)),
    "stddev_over_time": RangeFunction(lambda w, _: np.sqrt(numeric.variance(w.values, w.valid))),
}
