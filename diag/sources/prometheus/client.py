"""Queries to a Prometheus, Thanos, Mimir or VictoriaMetrics, their results and their refusals.

This is the only importer of prometheus-api-client. By itself it puts a query of any length into the URL, reads a
response of any size, lets a .netrc replace the credentials and drops the server's error message; its requests are
therefore sent by diag's own HTTP client, through a session that sends nothing itself.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from threading import Lock
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import numpy as np
from prometheus_api_client import PrometheusConnect
from requests import Response, Session

from diag.core.errors import BadUsage, NotAnswered, Unreachable, Unsupported
from diag.core.formatting import plural, printable
from diag.core.subjects import LARGEST, Floats, Instants
from diag.http import failure
from diag.http.address import Address, Credentials
from diag.http.failure import PROMETHEUS, Failure
from diag.http.prometheus_api import NO_API, PrometheusApi, Refused, Unusable
from diag.promql import parse
from diag.promql.data import Matcher
from diag.promql.facts import selectors

T = TypeVar("T")
Series = Mapping[str, Any]
"""A series of a response in the API's form: `metric`, and `value` or `values` of (unix seconds, text)."""
MOST_TIMEOUTS = 3
MOST_UNUSABLE = 10
_LONGEST = 3600.0
_LATEST = 1e11
_FEW_REFUSALS = 3
_NUMBER = re.compile(r"\d+")


class _Reply(Response):
    """A successful response whose document is decoded already."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        super().__init__()
        self.status_code, self._document = 200, document

    def json(self, **_: Any) -> Mapping[str, Any]:
        return self._document


class _Session(Session):
    """Sends the library's requests with diag's HTTP client, as forms: requests would quote each query into a URL."""

    def __init__(self, api: PrometheusApi) -> None:
        super().__init__()
        self._api = api

    def request(self, method: str, url: str, params: Any = (), **_: Any) -> Response:  # type: ignore[override]
        """Send a query; raises Refused or Unreachable, which pass through the library."""
        return _Reply(self._api.query(method, urlsplit(url).path, urlencode(params, doseq=True)))


class Prometheus:
    """One server; raises Unreachable if it returns nothing usable, and Refused if it rejects the query.

    `seconds` limits each wait for a response. Times are unix milliseconds.
    """

    def __init__(self, address: Address, access: Credentials, seconds: float = 30.0) -> None:
        url = address.shown.rstrip("/").removesuffix("/api/v1")
        limit = min(_LONGEST, seconds)
        self.shown = printable(url)
        self._api = PrometheusApi(self.shown, address, access, limit)
        self._library = PrometheusConnect(url, session=_Session(self._api), method="POST")
        self._limit = {"timeout": f"{round(limit * 1000)}ms"}

    @property
    def warnings(self) -> list[str]:
        """The server's distinct warnings, for example of partial results."""
        return [printable(warning) for warning in self._api.warnings]

    def now(self) -> int:
        """Return the server's own time: samples are stamped by its clock, or by one that it trusts."""
        series = self._read(lambda: _checked_series(self._library.custom_query("vector(time())"), "value")[0])
        seconds = float(series["value"][1])
        if not 0 < seconds < _LATEST:
            raise self._unusable("returned an invalid time")
        return round(seconds * 1000)

    def instant(self, promql: str, at: int) -> list[Series]:
        """Evaluate at one instant; a range selector returns the raw samples."""
        exact, key = {"time": _seconds(at), **self._limit}, "values" if promql.endswith("]") else "value"
        return self._read(lambda: _checked_series(self._library.custom_query(promql, exact), key))

    def range(self, promql: str, start: int, end: int, step: int) -> list[Series]:
        """Evaluate from `start` to `end`; nocache keeps VictoriaMetrics from moving both to multiples of the step."""
        exact = {"start": _seconds(start), "end": _seconds(end), "nocache": "1", **self._limit}
        query, rounded = self._library.custom_query_range, (_utc(start), _utc(end), _seconds(step))
        return self._read(lambda: _checked_series(query(promql, *rounded, params=exact), "values"))

    def series(self, matches: Sequence[str], start: int, end: int) -> list[Mapping[str, str]]:
        """Return the labels of series in a time range; whole blocks are searched, so some may have ended earlier."""
        span, selectors = (_utc(start), _utc(end)), {"match[]": list(matches)}
        series = self._read(lambda: _checked_list(self._library.get_series(*span, selectors)))
        return self._read(lambda: [_checked_labels(labels) for labels in series])

    def _read(self, answer: Callable[[], T]) -> T:
        """Return what an answer holds; Unusable for a document of another shape."""
        try:
            return answer()
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self._unusable(NO_API) from error

    def _unusable(self, what: str) -> Unusable:
        return Unusable(failure.sentence(self.shown, Failure(what, PROMETHEUS.address)))


def _checked_series(result: Sequence[Series], key: str) -> list[Series]:
    """Check the series that have numbers; native histograms are left out."""
    numeric = [series for series in _checked_list(result) if series.get(key)]
    for series in numeric:
        _checked_labels(series["metric"])
        for at, text in series.get("values") or [series["value"]]:
            float(text)
            if not abs(float(at)) < _LATEST:
                raise ValueError("an implausible time")
    return numeric


def _checked_list(items: Sequence[T]) -> Sequence[T]:
    if not isinstance(items, list):
        raise TypeError("not a list")
    return items


def _checked_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    if not all(isinstance(value, str) for value in labels.values()):
        raise ValueError("a label that is not a string")
    return labels


def _seconds(millis: int) -> str:
    return f"{millis / 1000:.3f}"


def _utc(millis: int) -> datetime:
    return datetime.fromtimestamp(millis / 1000, UTC)


class Queries:
    """The queries to one server and their number; after too many failures every further query is Unreachable."""

    def __init__(self, prometheus: Prometheus) -> None:
        self.count = 0
        self._prometheus = prometheus
        self._refused: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}
        self._timeouts, self._given_up, self._lock = 0, "", Lock()
        self._unusable: list[str] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about rejected queries and unusable responses."""

        def queries(count: int) -> str:
            return plural(count, "query", "queries")

        refusals = self._refused.most_common(_FEW_REFUSALS)
        notes = [f"Prometheus rejected {queries(count)}: {self._reasons[reason]}" for reason, count in refusals]
        if others := self._refused.total() - sum(count for _, count in refusals):
            notes.append(f"Prometheus rejected {queries(others)} for other reasons")
        if self._unusable:
            notes.append(f"{queries(len(self._unusable))} got no usable answer: {self._unusable[0]}")
        return tuple(notes)

    def answered(self, promql: str, instants: Instants) -> list[Series]:
        """Return the series at the instants (unix ms, equally spaced); NotAnswered if the query is refused."""
        self.count += 1
        if self._given_up:
            raise Unreachable(self._given_up)  # several queries run at a time: the others fail at once
        try:
            if len(instants) == 1:
                return self._prometheus.instant(promql, int(instants[0]))
            first, second, last = (int(instants[at]) for at in (0, 1, -1))
            return self._prometheus.range(promql, first, last, second - first)
        except Refused as error:
            why = _NUMBER.sub("", str(error))  # a reason may contain numbers that differ, such as the query's length
            with self._lock:
                self._reasons.setdefault(why, str(error))
                self._refused[why] += 1
                self._timeouts += error.timed_out
            if self._timeouts >= MOST_TIMEOUTS:
                hint = "select fewer servers or a shorter --window"
                self._given_up = f"{self._prometheus.shown} times out on queries: {error}; {hint}"
                raise Unreachable(self._given_up) from error
            raise NotAnswered from error
        except Unusable as error:
            with self._lock:
                self._unusable.append(str(error))
            if len(self._unusable) > MOST_UNUSABLE:  # a few leave single signals unknown; many leave nothing to report
                self._given_up = str(error)
                raise
            raise NotAnswered from error
        except Unreachable as error:
            self._given_up = str(error)
            raise


def values_at(series: Series, instants: Instants) -> Floats:
    """Return the finite values of a series at the instants, else NaN; servers may round the times."""
    row = np.full(len(instants), np.nan)
    if "value" in series:
        value = float(series["value"][1])
        row[-1] = value if abs(value) < LARGEST else math.nan
        return row
    times, values = np.array(series["values"], np.float64).T
    places = np.rint((times * 1000 - instants[0]) / (instants[1] - instants[0])).astype(np.int64)
    inside = (places >= 0) & (places < len(row)) & (np.abs(values) < LARGEST)
    row[places[inside]] = values[inside]
    return row


def sample_times(series: Series) -> Instants:
    """Return the times of a series' samples in unix ms."""
    return np.array([round(float(at) * 1000) for at, _ in series["values"]], np.int64)


def scrape_lag(times: Instants, last: int, interval: int) -> int:
    """Return the largest delay of a scrape after its instant; queries at instants plus this lag include the scrape."""
    late = (times - last + interval // 2) % interval - interval // 2 if interval else np.zeros(1, np.int64)
    return int(late.max(initial=0))


def label_matchers(matchers: str) -> tuple[Matcher, ...]:
    """Return the matchers of a selector; none if they have a pattern that only the server can read."""
    try:
        (selector,) = selectors(parse(f"up{{{matchers}}}"))
    except Unsupported:
        return ()
    return tuple(matcher for matcher in selector.matchers if matcher.label != "__name__")


def check_matcher(matcher: str) -> None:
    """Raise BadUsage if PromQL cannot parse a matcher."""
    try:
        parse(f'rate(up{{{matcher},diag=""}}[1m])')  # in a selector with other matchers, as it will be used
    except Unsupported as error:
        example = 'cluster="eu" or pod=~"vllm-.*"'
        raise BadUsage(f"--match {printable(matcher)} is not a matcher: write {example}") from error
