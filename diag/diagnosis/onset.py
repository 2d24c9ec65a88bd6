"""When an incident began: looked for closely in the first wide window that shows it.

An incident judged over five minutes is seen up to five minutes after its onset; over half a minute, it can be dated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from diag.core.subjects import Floats, Instants, Subject
from diag.diagnosis.diagnose import Diagnosis, diagnose
from diag.diagnosis.query_cache import QueryCache, TelemetrySource

MOST_LOOKS = 12
"""Incidents to date: each takes a few queries more."""
FEW = 5
"""Servers up to which it is worth it."""


@dataclass(frozen=True)
class SourceAtInstants:
    """The same answers at instants of one's own; keeps the protocol `TelemetrySource`."""

    answers: TelemetrySource
    instants: Instants

    @property
    def interval(self) -> float:
        """The usual time between two samples of one target."""
        return self.answers.interval

    def ask(self, promql: str, instants: Instants) -> Mapping[Subject, Floats]:
        """One row per subject."""
        return self.answers.ask(promql, instants)


def dated(found: Sequence[Diagnosis], asked: QueryCache) -> tuple[Diagnosis, ...]:
    """The diagnoses, those that began within what was looked at with the time at which they really did."""
    if len(asked.subjects(("instance",))) > FEW:
        return tuple(found)
    looks = [each for each in found if _is_late(each, asked)][:MOST_LOOKS]
    return tuple(_dated(each, asked) if each in looks else each for each in found)


def _is_late(one: Diagnosis, asked: QueryCache) -> bool:
    """Whether it began meanwhile, and was judged over more than a live window."""
    return one.since is not None and asked.window(one.incident).seconds > asked.live(one.incident.live_window).seconds


def _dated(one: Diagnosis, asked: QueryCache) -> Diagnosis:
    close = QueryCache(SourceAtInstants(asked.answers, _before(one, asked)), asked.contract)
    seen = next(each for each in diagnose([one.incident], close) if each.subject == one.subject)
    if seen.state != "present":
        return one
    return replace(one, since=seen.instants[0] if seen.since is None else seen.since)


def _before(one: Diagnosis, asked: QueryCache) -> Instants:
    """Every scrape of the window in which it showed first, and of the live window before that."""
    assert one.since is not None
    seconds = asked.window(one.incident).seconds + asked.live(one.incident.live_window).seconds
    step = round(asked.answers.interval * 1000)
    back = np.arange(int(seconds * 1000) // step, -1, -1, dtype=np.int64)
    return round(one.since * 1000) - step * back
