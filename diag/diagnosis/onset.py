"""When an incident began: judged again, over a short window, within the first long window that shows it.

An incident judged over five minutes shows up to five minutes after its onset; over half a minute, it can be dated.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from diag.core.subjects import Floats, Instants, Subject
from diag.diagnosis.decision_table import COMPARE
from diag.diagnosis.diagnose import Diagnosis, diagnose
from diag.diagnosis.query_cache import QueryCache, TelemetrySource
from diag.diagnosis.readings import Reading
from diag.promql import Formula

MOST_DATED = 12
"""Incidents to date: each takes a few queries more."""
MOST_EPISODES = 4
"""Episodes of one incident to date, the last ones."""
FEW = 5
"""Servers up to which it is worth it."""


class SourceAtInstants(NamedTuple):
    """The same source at other instants; keeps the protocol `TelemetrySource`."""

    source: TelemetrySource
    instants: Instants

    @property
    def first(self) -> int:
        """The first of the instants."""
        return int(self.instants[0])

    @property
    def interval(self) -> float:
        """The usual time between two samples of one target."""
        return self.source.interval

    def ask(self, promql: Formula, instants: Instants) -> Mapping[Subject, Floats]:
        """One row per subject."""
        return self.source.ask(promql, instants)


def onset(reading: Reading, diagnosis: Diagnosis) -> float | None:
    """Since when a condition of a present incident held without a break, up to the instant that is reported.

    Unix seconds, the first instant judged where it held from the start; None where it does not hold. A hole breaks
    nothing.
    """
    if diagnosis.until is None:
        return None
    at = diagnosis.reported + 1
    began = None
    for instant, value in zip(reversed(diagnosis.instants[:at]), reversed(reading.history[:at]), strict=True):
        if value is not None and not COMPARE[reading.condition.op](value, reading.limit):
            break
        began = instant if value is not None else began
    return began


def dated(diagnoses: Sequence[Diagnosis], queries: QueryCache) -> tuple[Diagnosis, ...]:
    """The diagnoses, each episode that began within the span with the time at which it really did."""
    if len(queries.subjects(("instance",))) > FEW:
        return tuple(diagnoses)
    late = [diagnosis for diagnosis in diagnoses if _is_late(diagnosis, queries)][:MOST_DATED]
    return tuple(_dated(diagnosis, queries) if diagnosis in late else diagnosis for diagnosis in diagnoses)


def _is_late(diagnosis: Diagnosis, queries: QueryCache) -> bool:
    """Whether it began meanwhile, and was judged over more than a live window."""
    live = queries.live(diagnosis.incident.live_window)
    began = any(since is not None for since, _ in diagnosis.episodes)
    return began and queries.window(diagnosis.incident).seconds > live.seconds


def _dated(diagnosis: Diagnosis, queries: QueryCache) -> Diagnosis:
    """The last episodes are those that are asked about first."""
    known = diagnosis.episodes[:-MOST_EPISODES]
    for since, until in diagnosis.episodes[-MOST_EPISODES:]:
        after = known[-1][1] if known else None
        known = (*known, (since if since is None else _onset(diagnosis, since, after, queries), until))
    return diagnosis._replace(since=known[0][0], episodes=known)


def _onset(diagnosis: Diagnosis, shown: float, after: float | None, queries: QueryCache) -> float:
    """When the episode began that showed at that time, `after` the end of the one before it."""
    close = QueryCache(SourceAtInstants(queries.source, _before(diagnosis, shown, queries)), queries.contract)
    again = diagnose([diagnosis.incident], close)
    found = next(other for other in again if other.subject == diagnosis.subject)
    starts = (found.instants[0] if since is None else since for since, _ in found.episodes)
    return next((start for start in starts if after is None or start > after), shown)


def _before(diagnosis: Diagnosis, shown: float, queries: QueryCache) -> Instants:
    """Every scrape of the window in which it showed first, and of the live window before that."""
    seconds = queries.window(diagnosis.incident).seconds + queries.live(diagnosis.incident.live_window).seconds
    step = round(queries.source.interval * 1000)
    back = np.arange(int(seconds * 1000) // step, -1, -1, dtype=np.int64)
    return round(shown * 1000) - step * back
