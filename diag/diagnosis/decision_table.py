"""One incident's conditions for every subject at every instant, decided for all of a fleet at once.

Three-valued: 1 holds, 0 does not hold, -1 unknown.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diag.core.incident import Comparison, Condition, Incident, seconds
from diag.core.subjects import Floats, Instants, Subject
from diag.diagnosis.query_cache import QueryCache, Window
from diag.knowledge.formulas import expanded

COMPARE = {">": np.greater, ">=": np.greater_equal, "<": np.less, "<=": np.less_equal}
LOOK = 30.0
"""Seconds that a look lasts unless somebody asks for more."""
MANY_FINISHED = 30
"""Where none of so many requests shows a symptom, it has less than one in ten of them (95 %, the rule of three)."""
HINDSIGHT = 120_000
"""Milliseconds for which what is known at an instant refutes what seemed to be so before."""
Trits = NDArray[np.int8]
Places = NDArray[np.int64]
Episode = tuple[float | None, float]
"""Unix seconds of the first and the last instant at which an incident held; None where it held from the beginning."""


class Evaluated(NamedTuple):
    """What a condition was found to be; shapes: (subjects, instants)."""

    values: Floats
    held: Trits


class Evidence:
    """The conditions of an incident over a window, each evaluated when it is first asked for.

    Most incidents are absent because of their first condition; of the others only JSON tells.
    """

    def __init__(self, incident: Incident, window: Window, queries: QueryCache) -> None:
        self.subjects: tuple[Subject, ...] = tuple(queries.subjects(incident.per))
        self.instants = queries.instants(window)
        self._per, self._window, self._queries = incident.per, window, queries
        self._measured: dict[Condition, Evaluated] = {}

    def limit(self, condition: Condition) -> float:
        """The number that the condition compares with."""
        return self._queries.contract.limit(condition.limit)

    def of(self, condition: Condition) -> Evaluated:
        """Its values and where it held."""
        if condition not in self._measured:
            self._measured[condition] = self._measure(condition)
        return self._measured[condition]

    def _measure(self, condition: Condition) -> Evaluated:
        values = np.full((len(self.subjects), len(self.instants)), np.nan)
        found = self._queries.ask(condition.signal, self._per, self._window)
        for subject, row in zip(self.subjects, values, strict=True):
            row[:] = found.get(subject, np.nan)
        held = holds(values, condition.op, self.limit(condition))
        return Evaluated(values, _in_hindsight(held, self.instants) if condition.signal.hindsight else held)


class DecisionTable(NamedTuple):
    """Shapes: `states` (subjects, instants), others (subjects,).

    early: seconds by which the incident began before it shows, where a symptom has to hold throughout a window.
    watched: seconds before the first instant that are judged as well: what is chronic is judged over all of its window.
    lasting: those of its symptoms and supporting conditions that have to hold throughout a window.
    apart: seconds of health from which on two episodes are two: what is shorter lies within one window and one scrape.
    decided: whether the incident was present at some instant, else absent at the last one: what cannot be denied at
    the end is unknown. first, last: the places of the first and last instants that show what was decided.
    ongoing: whether it is present at the last instant that is known. brief: whether too little was seen to call it
    absent.
    """

    early: float
    watched: float
    lasting: tuple[Condition, ...]
    apart: float
    evidence: Evidence
    states: Trits
    decided: Trits
    first: Places
    last: Places
    ongoing: NDArray[np.bool_]
    brief: NDArray[np.bool_]

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """What the rows are about."""
        return self.evidence.subjects

    @property
    def instants(self) -> Instants:
        """When the columns are."""
        return self.evidence.instants

    def episodes(self, place: int) -> tuple[Episode, ...]:
        """When the incident held on the subject at that place."""
        states, seconds = self.states[place], self.instants / 1000
        at = np.flatnonzero(states == 1)
        health = np.diff(np.cumsum(states == 0)[at]) > 0
        breaks = np.flatnonzero(health & (np.diff(seconds[at]) > self.apart)) + 1
        runs = np.split(at, breaks)
        return tuple((self._since(place, run[0]), float(seconds[run[-1]])) for run in runs)

    def _since(self, place: int, shows: int) -> float | None:
        """When it began that shows at this instant, None where it may have held from the beginning.

        What has to last for a while before it counts began with the first window throughout which it was so.
        """
        broken = [shows - 1]
        if self.early:
            lasting = np.array([self.evidence.of(condition).held[place, :shows] for condition in self.lasting])
            broken = np.flatnonzero((lasting != 1).all(axis=0)).tolist()
        at = int(broken[-1]) + 1 if len(broken) else 0
        return float(self.instants[at]) / 1000 - self.early if at else None


def decision_table(incident: Incident, window: Window, queries: QueryCache) -> DecisionTable:
    """Evaluate as many conditions of the incident over the window as it takes to decide."""
    evidence = Evidence(incident, window, queries)
    states = _states(incident, evidence)
    gone = np.array([queries.is_gone(subject) for subject in evidence.subjects], bool)
    decided, first, last, ongoing = _decided(states, gone)
    brief = (decided == 0) & ~_seen_enough(incident, evidence.subjects, queries)
    decided = np.where(brief, -1, decided).astype(np.int8)
    early = window.seconds if any(symptom.signal.throughout for symptom in incident.symptoms) else 0.0
    own = dict.fromkeys((*incident.symptoms, *incident.supports))
    lasting = tuple(condition for condition in own if condition.signal.throughout)
    apart = window.seconds + queries.source.interval
    watched = window.seconds if incident.severity == "info" else early
    return DecisionTable(early, watched, lasting, apart, evidence, states, decided, first, last, ongoing, brief)


def shortest_look(incident: Incident) -> float:
    """Seconds for which to look before an incident that is not seen is absent.

    What is chronic is judged over all that was watched, up to a longer window; its signals say what they need.
    """
    return min(seconds(incident.live_window), LOOK)


def _seen_enough(incident: Incident, subjects: Sequence[Subject], queries: QueryCache) -> NDArray[np.bool_]:
    """Whether an incident that is not seen on a subject is absent: after a long enough look, or a third of that where
    many requests have finished meanwhile; never after three scrapes."""
    watched, wanted = queries.span + queries.source.interval, shortest_look(incident)
    enough = np.full(len(subjects), watched >= wanted and not queries.has_few_scrapes)
    if enough.all() or 3 * watched < wanted or queries.has_few_scrapes:
        return enough
    finished = queries.ask("$finished_requests", ("instance",), queries.whole)
    counts = [finished.of(subject) for subject in subjects]
    return np.array([row is not None and row[-1] >= MANY_FINISHED for row in counts])


def holds(values: Floats, op: Comparison, limit: float) -> Trits:
    """Whether the comparison holds, value by value."""
    return np.where(np.isnan(values), -1, COMPARE[op](values, limit)).astype(np.int8)


def _in_hindsight(held: Trits, instants: Instants) -> Trits:
    """The same, false also for a while before it is false."""
    soon = np.searchsorted(instants, instants + HINDSIGHT, side="right")
    refuted = np.cumsum(np.pad(held == 0, ((0, 0), (1, 0))), axis=1)
    return np.where(refuted[:, soon] > refuted[:, :-1], 0, held).astype(np.int8)


def _states(incident: Incident, evidence: Evidence) -> Trits:
    """The conjunction of its conditions per subject and instant: false beats missing, missing beats true.

    Where all is false already, it does not matter what the others are: symptoms come first, the shortest of them above
    all, since what rules a look-alike out holds on most servers.
    """
    symptoms = sorted(incident.symptoms, key=lambda symptom: len(expanded(symptom.signal.promql)))
    states = np.ones((len(evidence.subjects), len(evidence.instants)), np.int8)
    for condition in (*symptoms, *incident.conditions[len(symptoms) :]):
        held = evidence.of(condition).held
        states = np.where((states == 0) | (held == 0), 0, np.minimum(states, held)).astype(np.int8)
        if not states.any():
            break
    return states


def _decided(states: Trits, gone: NDArray[np.bool_]) -> tuple[Trits, Places, Places, NDArray[np.bool_]]:
    """Of a server that is gone there is nothing to know at the end: it is absent where it was last known to be."""
    known_last = _last(states >= 0)
    now = np.take_along_axis(states, known_last[:, None], axis=1)[:, 0]
    present, absent = (states == 1).any(axis=1), np.where(gone, now, states[:, -1]) == 0
    decided = np.where(present, 1, np.where(absent, 0, -1)).astype(np.int8)
    shows = states == decided[:, None]
    return decided, shows.argmax(axis=1), _last(shows), present & (now == 1)


def _last(where: NDArray[np.bool_]) -> Places:
    """The place of the last true one in each row."""
    last: Places = where.shape[1] - 1 - where[:, ::-1].argmax(axis=1)
    return last
