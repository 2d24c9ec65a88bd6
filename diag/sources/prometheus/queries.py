"""Queries to a Prometheus over one or more instants, and what became of those that it refused."""

import math
import re
from collections import Counter
from threading import Lock

import numpy as np

from diag.core.errors import BadUsage, NotAnswered, Unreachable, Unsupported
from diag.core.formatting import plural, printable
from diag.core.subjects import LARGEST, Floats, Instants
from diag.http.prometheus_api import Refused, Unusable
from diag.promql import parse
from diag.sources.prometheus.client import Prometheus, Series

MOST_TIMEOUTS = 3
MOST_UNUSABLE = 10
_FEW_REFUSALS = 3
_NUMBER = re.compile(r"\d+")


class Queries:
    """Asks one server; `count` says how often. Once it has failed too often, every further query is Unreachable."""

    def __init__(self, prometheus: Prometheus) -> None:
        self.count = 0
        self._prometheus = prometheus
        self._refused: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}
        self._timeouts, self._given_up, self._lock = 0, "", Lock()
        self._unusable: list[str] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """What was rejected, and why."""
        refusals = self._refused.most_common(_FEW_REFUSALS)
        refused = [
            f"Prometheus rejected {plural(count, 'query', 'queries')}: {self._reasons[reason]}"
            for reason, count in refusals
        ]
        others = self._refused.total() - sum(count for _, count in refusals)
        refused += [f"Prometheus rejected {plural(others, 'query', 'queries')} for other reasons"] if others else []
        unusable = f"{plural(len(self._unusable), 'query', 'queries')} got no usable answer"
        return (*refused, *([f"{unusable}: {self._unusable[0]}"] if self._unusable else []))

    def answered(self, promql: str, instants: Instants) -> list[Series]:
        """The series at these instants (unix ms, equally far apart); NotAnswered where the query is refused."""
        self.count += 1
        if self._given_up:
            raise Unreachable(self._given_up)  # several queries run at a time: the next ones need not wait in vain too
        try:
            if len(instants) == 1:
                return self._prometheus.instant(promql, int(instants[0]))
            first, second, last = (int(instants[at]) for at in (0, 1, -1))
            return self._prometheus.range(promql, first, last, second - first)
        except Refused as error:
            self._note(error)
            raise NotAnswered from error
        except Unusable as error:
            self._note_unusable(error)
            raise NotAnswered from error
        except Unreachable as error:
            self._given_up = str(error)
            raise

    def _note_unusable(self, error: Unusable) -> None:
        """One such answer leaves one thing unknown; where there are many, nothing is worth saying."""
        with self._lock:
            self._unusable.append(str(error))
        if len(self._unusable) > MOST_UNUSABLE:
            self._given_up = str(error)
            raise error

    def _note(self, error: Refused) -> None:
        why = _NUMBER.sub("", str(error))  # the length of the query, for one
        with self._lock:
            self._reasons.setdefault(why, str(error))
            self._refused[why] += 1
            self._timeouts += error.timed_out
        if self._timeouts >= MOST_TIMEOUTS:
            hint = "select fewer servers or a shorter --window"
            self._given_up = f"{self._prometheus.shown} times out on queries: {error}; {hint}"
            raise Unreachable(self._given_up) from error


def laid_out(series: Series, instants: Instants) -> Floats:
    """The finite values of a series at the instants; a server may round its times."""
    if "value" in series:
        value = float(series["value"][1])
        return np.array([value if abs(value) < LARGEST else math.nan])
    row = np.full(len(instants), np.nan)
    times, values = np.array(series["values"], np.float64).T
    places = np.rint((times * 1000 - instants[0]) / (instants[1] - instants[0])).astype(np.int64)
    inside = (places >= 0) & (places < len(row)) & (np.abs(values) < LARGEST)
    row[places[inside]] = values[inside]
    return row


def times_of(series: Series) -> Instants:
    """Unix ms of its samples."""
    return np.array([round(float(at) * 1000) for at, _ in series["values"]], np.int64)


def lag(times: Instants, last: int, interval: int) -> int:
    """How late scrapes are on the grid at most: queried that much later, no instant misses its own scrape."""
    late = (times - last + interval // 2) % interval - interval // 2 if interval else np.zeros(1, np.int64)
    return int(late.max(initial=0))


def check(matcher: str) -> None:
    """BadUsage where it is none that PromQL has."""
    try:
        parse(f'rate(up{{{matcher},diag=""}}[1m])')  # as it will be used: among others, in every kind of selector
    except Unsupported as error:
        example = 'cluster="eu" or pod=~"vllm-.*"'
        raise BadUsage(f"--match {printable(matcher)} is not a matcher: write {example}") from error
