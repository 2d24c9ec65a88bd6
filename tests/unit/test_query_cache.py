"""The window for the samples, the series of a subject, and the subjects that are gone."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from support.paths import RECORDINGS

from diag.core.contract import Contract
from diag.core.errors import BadUsage
from diag.core.subjects import Floats, Instants, Rows, Subject, SubjectIndex
from diag.diagnosis.diagnose import diagnose
from diag.diagnosis.query_cache import QueryCache
from diag.knowledge.catalog import load
from diag.sources.prometheus.scope import TimeSpan
from diag.sources.recording.reader import read

INCIDENTS = {each.id: each for each in load()}
NOW = 1_790_000_000_000


@dataclass(frozen=True)
class Scraped:
    """A source that was scraped every so many seconds for so many seconds, and has nothing to say."""

    interval: float
    span: float

    first = 0

    @property
    def instants(self) -> Instants:
        return np.arange(0, self.span * 1000 + 1, self.interval * 1000).astype(np.int64)

    def ask(self, promql: str, instants: Instants) -> Mapping[Subject, Floats]:
        return {}


@pytest.mark.parametrize(
    ("incident", "interval", "span", "window"),
    [
        ("kv_eviction_cascade", 2, 60, "32s"),
        ("kv_eviction_cascade", 2, 86_400, "5m"),
        ("kv_eviction_cascade", 15, 900, "5m"),
        ("kv_eviction_cascade", 15, 585, "1m"),
        ("kv_eviction_cascade", 60, 900, "5m"),
        ("kv_eviction_cascade", 60, 120, "3m"),
        ("kv_eviction_cascade", 120, 86_400, "8m"),
        ("engine_stalled", 15, 900, "1m"),
        ("engine_stalled", 30, 900, "2m"),
        ("engine_dead", 2, 110, "17s"),
    ],
)
def test_the_alerts_window_is_taken_where_the_samples_span_it_twice(
    incident: str, interval: float, span: float, window: str
) -> None:
    assert QueryCache(Scraped(interval, span), Contract()).window(INCIDENTS[incident]).text == window


A, B = ("instance", "a"), ("instance", "b")


def test_series_that_match_a_subject_are_found() -> None:
    filed = SubjectIndex([((A,), 1), ((("engine", "0"), A), 2), ((("engine", "1"), A), 3), ((B,), 4), ((), 5)])
    assert [thing for _, thing in filed.like((("engine", "0"), A))] == [1, 2, 5]
    assert [thing for _, thing in filed.like((A,))] == [1, 2, 3, 5]
    assert [thing for _, thing in filed.like((("engine", "1"),))] == [1, 3, 4, 5]


def test_exact_row_of_a_subject_comes_before_a_matching_one() -> None:
    own, other = np.array([1.0]), np.array([2.0])
    rows = Rows({(("engine", "1"), A): other, (A,): own})
    assert rows.of((A,)) is own
    assert rows.of((("engine", "1"), A)) is other
    assert rows.of((("engine", "0"), A)) is own
    assert rows.of((B,)) is None


def test_no_query_is_sent_without_subjects() -> None:
    seen = read(RECORDINGS / "kv_cascade")
    asked = QueryCache(seen, Contract())
    asked.gone = frozenset(seen.instances)
    cascade = diagnose([INCIDENTS["kv_eviction_cascade"]], asked)[0]
    assert (cascade.state, cascade.ongoing) == ("present", False)


@pytest.mark.parametrize(
    ("span", "start", "end"),
    [
        (TimeSpan(), NOW - 900_000, NOW),
        (TimeSpan(window="1h30m"), NOW - 5_400_000, NOW),
        (TimeSpan(at="-2h", window="90s"), NOW - 7_290_000, NOW - 7_200_000),
        (TimeSpan(since="1789999000"), 1_789_999_000_000, NOW),
        (TimeSpan(since="-1d", until="-23h"), NOW - 86_400_000, NOW - 82_800_000),
        (TimeSpan(since="-1h", until="2099-01-01"), NOW - 3_600_000, NOW),
        (TimeSpan(at="2026-09-21T12:00:00+02:00"), 1_789_984_800_000 - 900_000, 1_789_984_800_000),
    ],
)
def test_a_span_ends_no_later_than_now(span: TimeSpan, start: int, end: int) -> None:
    assert span.resolved(NOW) == (start, end)


@pytest.mark.parametrize(
    "span", [TimeSpan(at="-1h", since="-2h"), TimeSpan(since="-1h", until="-2h"), TimeSpan(since="2099-01-01")]
)
def test_empty_time_range_is_refused(span: TimeSpan) -> None:
    with pytest.raises(BadUsage):
        span.resolved(NOW)
