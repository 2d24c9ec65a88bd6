"""A Prometheus, or whatever speaks its HTTP API: Thanos, Mimir, VictoriaMetrics (the only importer of its client)."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from prometheus_api_client import PrometheusConnect

from diag.core.formatting import printable
from diag.http import failure
from diag.http.address import Address
from diag.http.credentials import Credentials
from diag.http.failure import PROMETHEUS, Failure
from diag.http.prometheus_api import NO_API, Session, Unusable

T = TypeVar("T")
Series = Mapping[str, Any]
"""A series of an answer as the API has it: `metric`, and `value` or `values` of (unix seconds, text)."""
_LONGEST = 3600.0
_LATEST = 1e11
_UNLIKE = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading a document of another shape raises."""


class Prometheus:
    """One server; raises Unreachable where it returns nothing usable, and Refused where it rejects the query.

    `seconds`: how long it may stay silent. Times are unix milliseconds.
    """

    def __init__(self, address: Address, access: Credentials, seconds: float = 30.0) -> None:
        url = address.shown.rstrip("/").removesuffix("/api/v1")
        limit = min(_LONGEST, seconds)
        self.shown = printable(url)
        self._session = Session(self.shown, address, access, limit)
        self._library = PrometheusConnect(url, session=cast(Any, self._session), method="POST")
        self._limit = {"timeout": f"{round(limit * 1000)}ms"}

    @property
    def warnings(self) -> list[str]:
        """The server's warnings, for example of partial results; each once."""
        return [printable(warning) for warning in self._session.warnings]

    def now(self) -> int:
        """The server's own clock: the samples are stamped by it, or by one that it trusts."""
        seconds = float(
            self._read(lambda: _series(self._library.custom_query("vector(time())"), "value")[0]["value"][1])
        )
        if not 0 < seconds < _LATEST:
            raise self._unlike("returned an invalid time")
        return round(seconds * 1000)

    def instant(self, promql: str, at: int) -> list[Series]:
        """Evaluate at one instant; a range selector gives the raw samples."""
        exact, holds = {"time": _seconds(at), **self._limit}, "values" if promql.endswith("]") else "value"
        return self._read(lambda: _series(self._library.custom_query(promql, exact), holds))

    def range(self, promql: str, start: int, end: int, step: int) -> list[Series]:
        """Evaluate from `start` to `end`; VictoriaMetrics would move both to multiples of the step for its cache."""
        exact = {"start": _seconds(start), "end": _seconds(end), "nocache": "1", **self._limit}
        query, rounded = self._library.custom_query_range, (_moment(start), _moment(end), _seconds(step))
        return self._read(lambda: _series(query(promql, *rounded, params=exact), "values"))

    def series(self, matches: Sequence[str], start: int, end: int) -> list[Mapping[str, str]]:
        """The labels of the series that a time may have; whole blocks count, so some may have ended before."""
        span, these = (_moment(start), _moment(end)), {"match[]": list(matches)}
        return self._read(lambda: [_labels(labels) for labels in _list(self._library.get_series(*span, these))])

    def _read(self, answer: Callable[[], T]) -> T:
        try:
            return answer()
        except _UNLIKE as error:
            raise self._unlike(NO_API) from error

    def _unlike(self, what: str) -> Unusable:
        return Unusable(failure.sentence(self.shown, Failure(what, PROMETHEUS.address)))


def _series(result: Sequence[Series], holds: str) -> list[Series]:
    """The series that have numbers: native histograms are left out."""
    return [_checked(series) for series in _list(result) if series.get(holds)]


def _list(given: Sequence[T]) -> Sequence[T]:
    if not isinstance(given, list):
        raise TypeError("no list")
    return given


def _checked(series: Series) -> Series:
    _labels(series["metric"])
    for at, text in series.get("values") or [series["value"]]:
        float(text)
        if not abs(float(at)) < _LATEST:
            raise ValueError("a time that is none")
    return series


def _labels(given: Mapping[str, str]) -> Mapping[str, str]:
    if not all(isinstance(value, str) for value in given.values()):
        raise ValueError("a label that is no text")
    return given


def _seconds(millis: int) -> str:
    return f"{millis / 1000:.3f}"


def _moment(millis: int) -> datetime:
    return datetime.fromtimestamp(millis / 1000, UTC)
