"""Calendar functions of unix seconds, in UTC."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from diag.promql.samples import Floats

_FAR = 1e11  # seconds; beyond the year 5000 nothing is a date
Moments = npt.NDArray[np.datetime64]


def _since(whole: str, part: str, first: int) -> Callable[[Moments], npt.NDArray[Any]]:
    """Count the parts since the start of the whole, beginning at `first`."""

    def counted(moments: Moments) -> npt.NDArray[Any]:
        parts: npt.NDArray[Any] = moments.astype(f"M8[{part}]") - moments.astype(f"M8[{whole}]").astype(f"M8[{part}]")
        return parts.astype(np.int64) + first

    return counted


def _days_in_month(moments: Moments) -> npt.NDArray[Any]:
    month = moments.astype("M8[M]")
    days: npt.NDArray[Any] = (month + np.timedelta64(1, "M")).astype("M8[D]") - month.astype("M8[D]")
    return days


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
    "day_of_week": _date(
        lambda moments: (moments.astype("M8[D]").astype(np.int64) + 4) % 7
    ),  # 1970 began on a Thursday
    "day_of_month": _date(_since("M", "D", 1)),
    "day_of_year": _date(_since("Y", "D", 1)),
    "days_in_month": _date(_days_in_month),
    "month": _date(_since("Y", "M", 1)),
    "year": _date(lambda moments: moments.astype("M8[Y]").astype(np.int64) + 1970),
}
