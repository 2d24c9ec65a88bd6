"""Decide one incident for every subject at every instant, for all servers of a fleet at once.

Three-valued: 1 holds, 0 does not hold, -1 unknown. The times in which an incident holds are its episodes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diag.core.formatting import quantity, threshold
from diag.core.incident import Comparison, Condition, Incident, Signal, seconds
from diag.core.subjects import Floats, Instants, Rows, Subject, median
from diag.diagnosis.query_cache import QueryCache, Window
from diag.knowledge.formulas import expanded

COMPARE = {">": np.greater, ">=": np.greater_equal, "<": np.less, "<=": np.less_equal}
TRUTH = {1: True, 0: False, -1: None}
LOOK = 30.0
"""Seconds for which a live server is observed by default."""
MANY_FINISHED = 30
"""Requests: if none of so many shows a symptom, less than one in ten has it (95 % confidence, the rule of three)."""
HINDSIGHT = 120_000
"""Milliseconds before an instant at which a condition is false or unknown that count as the same
(`Signal.hindsight`)."""
SCRAPED_BEFORE = "max by ($by) (count_over_time(up[$window] offset $window))"
Trits = NDArray[np.int8]
Places = NDArray[np.int64]
Bools = NDArray[np.bool_]
RECENT = 900.0
"""Seconds for which an ended outage is still a warning: its cause may end the server again."""
Episode = tuple[float | None, float]
"""Unix seconds of the first and the last instant at which an incident held; None: it held from the beginning."""
Run = NDArray[np.int64]
"""The places of the instants of one episode at which the incident held."""
START_TIME = "$latest_start_time"
TOKENS = "$output_tokens_since_start"
PAGE_SEEN = "$engine_seen"


class Evaluated(NamedTuple):
    """The values of a condition and where it held; shapes: (subjects, instants)."""

    values: Floats
    held: Trits


class Evidence:
    """The conditions of an incident over a window, each evaluated when it is first asked for.

    Most incidents are absent because of their first condition; only the JSON report reads their other conditions.
    """

    def __init__(self, incident: Incident, window: Window, queries: QueryCache) -> None:
        self.incident, self.window, self.queries = incident, window, queries
        self.subjects: tuple[Subject, ...] = tuple(queries.subjects(incident.per))
        self.instants = queries.instants(window)
        self._measured: dict[Condition, Evaluated] = {}
        if any(condition.signal.hindsight for condition in incident.every_condition):
            self.ask(PAGE_SEEN)  # now: a report outlives the connection to its source

    def ask(self, query: Signal | str) -> Rows:
        """Return one row per subject of the incident, with a value at every instant."""
        return self.queries.ask(query, self.incident.per, self.window)

    def limit(self, condition: Condition) -> float:
        """Return the number that the condition compares with."""
        return self.queries.contract.limit(condition.limit)

    def of(self, condition: Condition) -> Evaluated:
        """Return the values of a condition and where it held."""
        if condition not in self._measured:
            rows, nothing = self.ask(condition.signal), np.full(len(self.instants), np.nan)
            of_each = [rows.get(subject, nothing) for subject in self.subjects]
            values = of_each[0][None] if len(of_each) == 1 else np.array(of_each, np.float64)  # one is not copied
            values = values.reshape(len(self.subjects), len(self.instants))
            held = holds(values, condition.op, self.limit(condition))
            if condition.signal.hindsight:  # as it is known two minutes later: refuted, or unknown while pages came
                soon, page = (
                    np.searchsorted(self.instants, self.instants + HINDSIGHT, side="right"),
                    self.ask(PAGE_SEEN),
                )
                goes_on = np.array([np.isfinite(page.get(subject, nothing)) for subject in self.subjects], bool)
                doubts, refutals = (
                    np.cumsum(np.pad(marks, ((0, 0), (1, 0))), axis=1)
                    for marks in ((held == -1) & goes_on.reshape(held.shape), held == 0)
                )
                held = np.where(doubts[:, soon] > doubts[:, :-1], -1, held)
                held = np.where(refutals[:, soon] > refutals[:, :-1], 0, held).astype(np.int8)
            self._measured[condition] = Evaluated(values, held)
        return self._measured[condition]


def holds(values: Floats, op: Comparison, limit: float) -> Trits:
    """Compare value by value with the limit; NaN is unknown."""
    return np.where(np.isnan(values), -1, COMPARE[op](values, limit)).astype(np.int8)


class DecisionTable(NamedTuple):
    """One incident decided for all subjects. Shapes: `states` (subjects, instants), others (subjects,).

    early: seconds by which the incident began before it shows, if a symptom has to hold throughout a window.
    watched: seconds before the first instant that are judged as well: a chronic incident is judged over all of its
    window. lasting: those of its symptoms and supporting conditions that have to hold throughout a window.
    runs: the episodes of the subjects that have some: of a present incident those that count, else the notes.
    decided: present if an episode counts, else absent unless it is unknown at the last instant. last: the place of the
    last instant that shows what was decided. ongoing: whether it is present at the last instant that is known. brief:
    whether the observation was too short to call it absent.
    """

    early: float
    watched: float
    lasting: tuple[Condition, ...]
    runs: Mapping[int, Sequence[Run]]
    evidence: Evidence
    states: Trits
    decided: Trits
    last: Places
    ongoing: Bools
    brief: Bools

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """The subjects of the rows."""
        return self.evidence.subjects

    @property
    def instants(self) -> Instants:
        """The times of the columns in unix milliseconds."""
        return self.evidence.instants

    def episodes(self, place: int) -> tuple[Episode, ...]:
        """Return the episodes in which the incident held on the subject at that place.

        If a symptom has to last for a while before it counts, an episode begins with the first window throughout which
        the symptom lasted, and not before the last token: a window over rare scrapes is longer than what lasted.
        """
        episodes: list[Episode] = []
        tokens = self.evidence.ask(TOKENS).of(self.subjects[place]) if self.early else None
        for run in self.runs.get(place, ()):
            broken = [run[0] - 1]
            if self.early:
                held = np.array([self.evidence.of(condition).held[place, : run[0]] for condition in self.lasting])
                broken = np.flatnonzero((held != 1).all(axis=0)).tolist()
            began = int(broken[-1]) + 1 if len(broken) else 0
            since = float(self.instants[began]) / 1000 - self.early if began else None
            if since is not None and self.early and tokens is not None:
                grew = np.flatnonzero(np.diff(tokens[: began + 1]) > 0)[-1:] + 1
                since = max([since, *(self.instants[grew] / 1000).tolist()])
            episodes.append((since, float(self.instants[run[-1]]) / 1000))
        return tuple(episodes)


def decision_table(incident: Incident, window: Window, queries: QueryCache) -> DecisionTable:
    """Evaluate as many conditions of the incident over the window as it takes to decide."""
    evidence = Evidence(incident, window, queries)
    # false beats missing, missing beats true; if all is false already, the other conditions do not matter: symptoms
    # come first, the shortest above all, because the conditions that rule a look-alike out hold on most servers
    symptoms = sorted(incident.symptoms, key=lambda symptom: len(expanded(symptom.signal.promql)))
    states = np.ones((len(evidence.subjects), len(evidence.instants)), np.int8)
    for condition in (*symptoms, *incident.conditions[len(symptoms) :]):
        held_so = evidence.of(condition).held
        states = np.where((states == 0) | (held_so == 0), 0, np.minimum(states, held_so)).astype(np.int8)
        if not states.any():
            break
    known_last = _last(states >= 0)
    now = np.take_along_axis(states, known_last[:, None], axis=1)[:, 0]
    gone = np.array([queries.is_gone(subject) for subject in evidence.subjects], bool)
    apart = window.seconds + queries.source.interval  # a shorter time of health lies within one window and one scrape
    held = np.flatnonzero((states == 1).any(axis=1)).tolist()
    episodes = {at: runs(states[at], evidence.instants, apart) for at in held}
    counted = {at: _counting(states[at], episodes[at], evidence.subjects[at], evidence) for at in held}
    present = np.array([bool(counted.get(at)) for at in range(len(states))], bool)
    absent = np.where(gone, now, states[:, -1]) >= 0  # a server that is gone has no state at the end
    decided = np.where(present, 1, np.where(absent, 0, -1)).astype(np.int8)
    # where all symptoms of an outage held lately, and what tells it from a look-alike was unknown: it may have served
    # nobody, even if it is over
    lately = evidence.instants >= evidence.instants[-1] - RECENT * 1000
    hidden: Bools = (states == -1) & lately & incident.outage
    for symptom in incident.symptoms if hidden.any() else ():
        hidden = hidden & (evidence.of(symptom).held == 1)
    decided = np.where((decided == 0) & hidden.any(axis=1), -1, decided).astype(np.int8)
    last = _last(np.where((hidden.any(axis=1) & (decided == -1))[:, None], hidden, states == decided[:, None]))
    last[present] = [counted[at][-1][-1] for at in np.flatnonzero(present).tolist()]

    # a third of the shortest look is enough if many requests have finished meanwhile; three scrapes never are
    watched, wanted = queries.span + queries.source.interval, shortest_look(incident)
    enough = np.full(len(evidence.subjects), watched >= wanted and not queries.has_few_scrapes)
    if not enough.all() and 3 * watched >= wanted and not queries.has_few_scrapes:
        finished = queries.ask("$finished_requests", ("instance",), queries.whole)
        counts = [finished.of(subject) for subject in evidence.subjects]
        enough = np.array([row is not None and row[-1] >= MANY_FINISHED for row in counts])
    brief = (decided == 0) & ~enough

    early = window.seconds if any(symptom.signal.throughout for symptom in incident.symptoms) else 0.0
    conditions = dict.fromkeys((*incident.symptoms, *incident.supports))
    return DecisionTable(
        early=early,
        watched=window.seconds if incident.severity == "info" else early,
        lasting=tuple(condition for condition in conditions if condition.signal.throughout),
        runs={at: counted[at] or episodes[at] for at in held},
        evidence=evidence,
        states=states,
        decided=np.where(brief, -1, decided).astype(np.int8),
        last=last,
        ongoing=present & (now == 1) & (last == known_last),
        brief=brief,
    )


def _last(where: Bools) -> Places:
    """Return the place of the last true value in each row."""
    last: Places = where.shape[1] - 1 - where[:, ::-1].argmax(axis=1)
    return last


def shortest_look(incident: Incident) -> float:
    """Return the seconds of observation after which an incident that is not seen is absent.

    A chronic incident is judged over all that was observed, up to a longer window; its signals declare what they need.
    """
    return min(seconds(incident.live_window), LOOK)


def slow_burns(incident: Incident, queries: QueryCache) -> Iterator[tuple[Incident, Window]]:
    """Yield the incident with each lower burn rate that its alert has, and the long window to judge it over.

    A slow SLO violation, which no short look shows, holds if the long window and the short window hold: the short one
    shows that it goes on. Samples must reach back beyond the short window: a rate over 6 h of which only 30 s were seen
    is a rate over 30 s. One that rose suddenly is judged over the incident's own window.
    """
    for rising in incident.rising:
        yield rising, queries.window(incident)
    own = queries.contract.limit(incident.symptoms[0].limit)
    for burn in incident.burns:
        short = Window(seconds(burn.short), burn.short)
        if burn.factor < own and queries.ask(SCRAPED_BEFORE, ("instance",), short, queries.source.instants[-1:]):
            whole, *rest = incident.over(burn).symptoms
            name, signal = whole.signal.name, whole.signal
            lately = signal._replace(name=f"{name} over {burn.short}", promql=f"${signal.id}[{burn.short}]")
            long = whole._replace(signal=signal._replace(name=f"{name} over {burn.long}"))
            symptoms = (long, whole._replace(signal=lately), *rest)
            yield incident._replace(symptoms=symptoms, burns=()), Window(seconds(burn.long), burn.long)


class History(Sequence[float | None]):
    """A signal's values at every instant judged, None for a missing one: numbers of Python only where they are read."""

    def __init__(self, values: Floats) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return tuple(None if math.isnan(value) else value for value in self._values[at].tolist())
        value = float(self._values[at])
        return None if math.isnan(value) else value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == tuple(other)

    def __hash__(self) -> int:
        return hash(self[:])


class Reading(NamedTuple):
    """A condition on one subject: `value` at the instant that is reported, `history` at every instant judged.

    `culprits` names what the signal can name beyond the subject: "rank 1".
    """

    condition: Condition
    value: float | None
    limit: float
    holds: bool | None
    history: Sequence[float | None]
    culprits: tuple[str, ...] = ()

    def met_by(self, value: float | None) -> bool | None:
        """Return True if the condition holds for another value of its signal; None for no value."""
        return None if value is None else bool(COMPARE[self.condition.op](value, self.limit))

    @property
    def shown(self) -> str:
        """The value with its unit, "-" for no value."""
        return "-" if self.value is None else quantity(self.value, self.condition.signal.unit)

    @property
    def threshold(self) -> str:
        """The threshold with its comparison: "> 90 %"."""
        return threshold(self.condition.op, self.limit, self.condition.signal.unit)

    @property
    def sentence(self) -> str:
        """The signal's own sentence with the value in it, and the culprits."""
        if self.value is None:
            needs = self.condition.signal.needs
            return f"not measured, it needs at least {needs}" if needs else "not measured"
        sentence = self.condition.signal.sentence.format(value=self.shown)
        return f"{sentence} ({', '.join(self.culprits)})" if self.culprits else sentence


class Readings(Sequence[Reading]):
    """Conditions on the subject at a place of a table, at the last instant that shows what was decided.

    Each is evaluated when it is read: most are of absent incidents, whose readings only the JSON report prints.
    """

    def __init__(self, conditions: tuple[Condition, ...], table: DecisionTable, place: int) -> None:
        self._conditions, self._table, self._place = conditions, table, place

    def __len__(self) -> int:
        return len(self._conditions)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(len(self)))]
        condition = self._conditions[at]
        evidence, last = self._table.evidence, self._table.last[self._place]
        values, held = evidence.of(condition)
        history = History(values[self._place])
        return Reading(
            condition, history[last], evidence.limit(condition), TRUTH[int(held[self._place, last])], history
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Readings) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(self._conditions)


# -- episodes
#
# An episode counts if it lasted as long as its alert waits (`Incident.hold`), or if so little was observed that none
# could last so long: an episode that goes on at the end counts if nothing in the last `hold` refutes it. An outage
# counts for 15 minutes after its end in any case. A server that came back as another process, without a sign of a
# crash, was restarted: that counts only if it repeats.


def runs(states: Trits, times: Instants, apart: float) -> list[Run]:
    """Return the episodes of one subject: health for more than `apart` seconds separates two of them."""
    at = np.flatnonzero(states == 1)
    health = np.diff(np.cumsum(states == 0)[at]) > 0
    return np.split(at, np.flatnonzero(health & (np.diff(times[at]) > apart * 1000)) + 1) if len(at) else []


def _counting(states: Trits, episodes: Sequence[Run], subject: Subject, evidence: Evidence) -> list[Run]:
    """Return the episodes of a subject that count as the incident; the others are notes."""
    incident, times, queries = evidence.incident, evidence.instants, evidence.queries
    hold, last = seconds(incident.hold), len(times) - 1
    # a day of a fleet is judged at few instants: what holds at one of them held for about as long as they are apart
    apart = max(queries.source.interval, median(np.diff(times)) / 1000 if last else 0.0)
    needed = hold - apart / 2
    could_hold = bool((states[times >= times[-1] - needed * 1000] != 0).all())
    could_last = queries.span >= max(seconds(incident.window), evidence.window.seconds) + hold

    def lasted(run: Run) -> bool:
        """Return True if it held for its `hold`, or goes on and held for as long as a look at a live server takes.

        The verdict then does not turn from a warning to health while the span grows, and nothing changes.
        """
        unbroken = np.split(run, np.flatnonzero(np.diff(run) > 1) + 1)
        lengths = [float(times[part[-1]] - times[part[0]]) / 1000 for part in unbroken]
        goes_on = run[-1] == last and (could_hold or lengths[-1] >= LOOK)
        return max(lengths) >= needed or goes_on

    def counts(run: Run) -> bool:
        is_over = run[-1] < last
        if not incident.outage:
            return lasted(run) or not could_last
        if incident.crash is not None and is_over:
            sign = evidence.ask(incident.crash.signal).get(subject)
            crashed = sign is not None and (sign[run[0] :] >= evidence.limit(incident.crash)).any()
            near = [other for other in episodes if abs(float(times[run[0]] - times[other[0]])) <= RECENT * 1000]
            return bool(crashed or len(near) > 1 or (lasted(run) and _stood_still(run, subject, evidence)))
        return not is_over or float(times[last] - times[run[-1]]) <= RECENT * 1000 or lasted(run)

    return [run for run in episodes if counts(run)]


def _stood_still(run: Run, subject: Subject, evidence: Evidence) -> bool:
    """Return True if the process that answered before an episode answers after it, and had made no tokens meanwhile.

    A gap in the scrapes proves no outage: tokens at half of the usual rate or more show that requests were served.
    """
    starts, tokens = evidence.ask(START_TIME).get(subject), evidence.ask(TOKENS).get(subject)
    if starts is not None and (places := _around(run, starts)) and starts[places[1] :].max() > starts[places[0]] + 1.0:
        return False
    if tokens is None or not (places := _around(run, tokens)):
        return False
    last, first = places
    pages = np.flatnonzero(np.isfinite(tokens))
    seconds_between = np.diff(evidence.instants[pages]) / 1000
    grown = np.diff(tokens[pages])
    gap = (pages[:-1] >= last) & (pages[1:] <= first)
    usual = grown[~gap].clip(0).sum() / max(seconds_between[~gap].sum(), 1.0)
    return bool((grown >= 0).all() and grown[gap].sum() < 0.5 * usual * seconds_between[gap].sum())


def _around(run: Run, row: Floats) -> tuple[int, int] | None:
    """Return the places of the last value before an episode and of the first one after it; None without one."""
    pages = np.flatnonzero(np.isfinite(row))
    before, after = pages[pages < run[0]], pages[pages > run[-1]]
    return (int(before[-1]), int(after[0])) if len(before) and len(after) else None
