"""Incidents + contract + telemetry -> diagnoses.

Every distinct signal is asked once, for all subjects and instants. An incident is decided per subject and instant by
three-valued logic: a condition that is false makes it absent, else one that is missing makes it unknown, else it is
present. That is what `Incident.query()` says to a Prometheus; a property test holds the two equal.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from diag.core.formatting import quantity
from diag.core.incident import RANK, Incident, LookAlike, Severity, Signal
from diag.core.subjects import Subject, SubjectIndex
from diag.diagnosis.burn_rates import slow_burns
from diag.diagnosis.decision_table import COMPARE, DecisionTable, Episode, decision_table
from diag.diagnosis.query_cache import QueryCache, Window
from diag.diagnosis.readings import Reading, Readings

State = Literal["present", "absent", "unknown"]

STATES: dict[int, State] = {1: "present", 0: "absent", -1: "unknown"}


class Refuted(NamedTuple):
    """A look-alike that was considered and ruled out, and the evidence against it: a sentence with its number."""

    name: str
    evidence: str


class Diagnosis(NamedTuple):
    """One incident judged for one subject; times are unix seconds.

    `since` is None where it already held at the first instant; `episodes` are the times in which it held, each with
    health before it, the first from `since` on and the last to `until`; `escalation` is the condition that makes it
    critical; `open` names look-alikes that could not be ruled out; `instants` are those of the readings' histories.
    `unanswered` names the signals for want of which alone it is unknown, because the source refused their queries;
    `brief` is whether too little was seen to call it absent; `watched` are the seconds before the first instant that
    were judged as well.
    """

    incident: Incident
    subject: Subject
    state: State
    severity: Severity
    since: float | None
    until: float | None
    episodes: tuple[Episode, ...]
    ongoing: bool
    instants: tuple[float, ...]
    symptoms: Sequence[Reading]
    supports: Sequence[Reading]
    escalation: Sequence[Reading]
    refuted: tuple[Refuted, ...] = ()
    open: tuple[LookAlike, ...] = ()
    unanswered: tuple[str, ...] = ()
    brief: bool = False
    watched: float = 0.0
    explained_by: str | None = None
    primary: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """The signals of its conditions that have no value at the instant that is reported."""
        readings = {reading.condition: reading for reading in (*self.symptoms, *self.supports, *self.escalation)}
        return tuple(condition.signal.name for condition, reading in readings.items() if reading.value is None)

    @property
    def lacking(self) -> tuple[str, ...]:
        """The conditions without a value at the instant that is reported, each in a few words."""
        return tuple(f"{r.condition.signal.name} {r.sentence}" for r in self.symptoms if r.value is None)

    @property
    def watched_since(self) -> float:
        """The first moment of which something is known: what held from the start began before that."""
        return self.instants[0] - self.watched

    @property
    def reported(self) -> int:
        """The place of the instant whose readings are told of a present incident, the last one of any other."""
        return len(self.instants) - 1 if self.until is None else self.instants.index(self.until)

    @property
    def one_by_one(self) -> "tuple[Diagnosis, ...]":
        """A diagnosis for each of its episodes."""
        last = len(self.episodes) - 1
        return tuple(
            self._replace(since=since, until=until, episodes=((since, until),), ongoing=self.ongoing and at == last)
            for at, (since, until) in enumerate(self.episodes)
        )

    @property
    def culprits(self) -> tuple[str, ...]:
        """What the symptoms name beyond the subject: a rank, an event."""
        return tuple(dict.fromkeys(name for reading in self.symptoms if reading.holds for name in reading.culprits))


def diagnose(incidents: Sequence[Incident], queries: QueryCache) -> tuple[Diagnosis, ...]:
    """Judge every incident for every subject; present ones first, the primary first of all."""
    diagnoses = [_name(found, queries) for incident in incidents for found in _judge(incident, queries)]
    return _order(_explain(_rule_out(diagnoses)))


def without_the_past(diagnoses: Sequence[Diagnosis]) -> tuple[Diagnosis, ...]:
    """The same where an incident that has ended is absent: what it explained stands for itself."""
    now = [
        found._replace(
            state="absent" if found.state == "present" and not found.ongoing else found.state,
            explained_by=None,
            primary=False,
        )
        for found in diagnoses
    ]
    return _order(_explain(now))


def _judge(incident: Incident, queries: QueryCache) -> Iterator[Diagnosis]:
    """One diagnosis per subject: by what was watched, else by the long windows in which an SLO burns slowly."""
    slow = [found for burning in slow_burns(incident, queries) for found in _decide(*burning, queries)]
    holds = {found.subject: found for found in slow if found.ongoing}
    for found in _decide(incident, queries.window(incident), queries):
        yield found if found.state == "present" else holds.get(found.subject, found)


def _decide(incident: Incident, window: Window, queries: QueryCache) -> Iterator[Diagnosis]:
    """One diagnosis per subject."""
    table = decision_table(incident, window, queries)
    instants = tuple((table.instants / 1000).tolist())
    for place in range(len(table.subjects)):
        found = _decide_one(incident, table, place, instants, queries)
        yield found._replace(ongoing=False) if found.ongoing and queries.is_gone(found.subject) else found


def _decide_one(
    incident: Incident, table: DecisionTable, place: int, instants: tuple[float, ...], queries: QueryCache
) -> Diagnosis:
    """Present when it held at some instant, else absent when it did not hold at the last one."""
    last = int(table.last[place])
    state = STATES[int(table.decided[place])]
    episodes = table.episodes(place) if state == "present" else ()
    escalation = Readings((incident.escalates,) if incident.escalates else (), table, place)
    symptoms = Readings(incident.conditions, table, place)
    return Diagnosis(
        incident=incident,
        subject=table.subjects[place],
        state=state,
        severity="critical" if any(reading.holds for reading in escalation) else incident.severity,
        since=episodes[0][0] if episodes else None,
        until=instants[last] if state == "present" else None,
        episodes=episodes,
        ongoing=bool(table.ongoing[place]),
        instants=instants,
        symptoms=symptoms,
        supports=Readings(incident.supports, table, place),
        escalation=escalation,
        unanswered=_unanswered(symptoms, queries) if state == "unknown" else (),
        brief=bool(table.brief[place]),
        watched=table.watched,
    )


def _unanswered(symptoms: Iterable[Reading], queries: QueryCache) -> tuple[str, ...]:
    """The signals that are missing, where all of them are because their queries were refused."""
    missing = [reading.condition.signal for reading in symptoms if reading.value is None]
    refused = all(signal.promql in queries.unanswered for signal in missing)
    return tuple(signal.name for signal in missing) if refused else ()


def _name(diagnosis: Diagnosis, queries: QueryCache) -> Diagnosis:
    """Have the readings of a present incident name their culprits."""
    if diagnosis.state != "present":
        return diagnosis

    def named(reading: Reading) -> Reading:
        found = culprits(reading.condition.signal, diagnosis, queries)
        return reading._replace(culprits=tuple(dict.fromkeys(text for _, text in found))) if found else reading

    return diagnosis._replace(
        symptoms=tuple(map(named, diagnosis.symptoms)), supports=tuple(map(named, diagnosis.supports))
    )


def culprits(signal: Signal, diagnosis: Diagnosis, queries: QueryCache) -> list[tuple[Mapping[str, str], str]]:
    """What a signal of a present incident names: the labels of each, and its text."""
    if not signal.culprit_promql:
        return []
    rows = queries.ask(signal.culprit_promql, diagnosis.incident.per, queries.window(diagnosis.incident))
    series = ((dict(labels), row[diagnosis.reported]) for labels, row in rows.like(diagnosis.subject))
    return [
        (labels, signal.culprit_label.format_map({**labels, "value": quantity(value, signal.culprit_unit)}))
        for labels, value in series
        if not np.isnan(value)
    ]


def _rule_out(diagnoses: list[Diagnosis]) -> list[Diagnosis]:
    """Decide of every look-alike of a present incident whether it was ruled out, and by which number."""
    others = SubjectIndex((diagnosis.subject, diagnosis) for diagnosis in diagnoses)
    return [_rule_out_one(found, others) if found.state == "present" else found for found in diagnoses]


def _rule_out_one(diagnosis: Diagnosis, others: SubjectIndex[Diagnosis]) -> Diagnosis:
    refuted, left = [], []
    same_scope = {other.incident.id: other for _, other in reversed(list(others.like(diagnosis.subject)))}
    for look_alike in diagnosis.incident.looks_like:
        evidence = _evidence_against(look_alike, diagnosis, same_scope.get(look_alike.name))
        if evidence is None:
            left.append(look_alike)
        elif evidence:
            refuted.append(Refuted(look_alike.name, evidence))
    return diagnosis._replace(refuted=tuple(refuted), open=tuple(left))


def _evidence_against(look_alike: LookAlike, diagnosis: Diagnosis, other: Diagnosis | None) -> str | None:
    """What rules a look-alike out; "" when it is present as well, None when nothing decides."""
    decides = look_alike.requires or look_alike.refuted_by
    if decides:
        readings = (*diagnosis.symptoms, *diagnosis.supports)
        reading = next(reading for reading in readings if reading.condition == decides)
        return f"{reading.sentence}; {reading.threshold} rules it out" if reading.holds else None
    if other is None:
        return None
    against = next((reading for reading in _readings_at(other, diagnosis.until) if reading.holds is False), None)
    if against:
        return f"{against.sentence}; it requires {against.threshold.removeprefix('= ')}"
    return None if any(reading.holds is None for reading in _readings_at(other, diagnosis.until)) else ""


def _readings_at(diagnosis: Diagnosis, instant: float | None) -> Iterator[Reading]:
    """The symptoms as they were at that time, or last before it: what held later rules nothing out."""
    at = max((i for i, unix in enumerate(diagnosis.instants) if instant is None or unix <= instant), default=0)
    return (_reading_at(reading, at) for reading in diagnosis.symptoms)


def _reading_at(reading: Reading, at: int) -> Reading:
    value = reading.history[at]
    held = None if value is None else bool(COMPARE[reading.condition.op](value, reading.limit))
    return reading._replace(value=value, holds=held, culprits=())


def _explain(diagnoses: list[Diagnosis]) -> list[Diagnosis]:
    """Nest what follows from a present cause under it: under one that follows from nothing itself, if there is any."""
    present = SubjectIndex((found.subject, found) for found in diagnoses if found.state == "present")
    causes = [_causes(found, present) if found.state == "present" else [] for found in diagnoses]
    follows = {id(found) for found, why in zip(diagnoses, causes, strict=True) if why}
    best = [min(why, key=lambda c: (id(c) in follows, *_weight(c)), default=None) for why in causes]
    return [
        found._replace(explained_by=cause.incident.id) if cause else found
        for found, cause in zip(diagnoses, best, strict=True)
    ]


def _causes(diagnosis: Diagnosis, present: SubjectIndex[Diagnosis]) -> list[Diagnosis]:
    return [cause for _, cause in present.like(diagnosis.subject) if diagnosis.incident.id in cause.incident.explains]


def _weight(diagnosis: Diagnosis) -> tuple[float | str, ...]:
    """What comes first of two that nothing explains: the worse, the one that lasts, the wider, the better supported."""
    tie: tuple[float, ...] = ()
    if diagnosis.state == "present":
        known = [reading.holds for reading in diagnosis.supports if reading.holds is not None]
        supported = sum(known) / max(1, len(known))
        tie = (-len(diagnosis.incident.explains), -supported)
    return (-RANK[diagnosis.severity], not diagnosis.ongoing, len(diagnosis.subject), *tie, diagnosis.incident.id)


def _order(diagnoses: list[Diagnosis]) -> tuple[Diagnosis, ...]:
    """Present first, the worst first; one primary per scope, and an engine lies within its instance's scope.

    A violated SLO says what users feel and not why: whatever else has an impact comes before it.
    """
    states = ("present", "unknown", "absent")
    ranked = sorted(
        diagnoses,
        key=lambda d: (
            states.index(d.state),
            d.explained_by is not None,
            RANK[d.severity] == 0,
            d.incident.telemetry,
            bool(d.incident.burns),
            *_weight(d),
            d.subject,
        ),
    )
    primaries: SubjectIndex[None] = SubjectIndex()
    ordered = []
    for diagnosis in ranked:
        is_primary = _has_impact(diagnosis) and not any(primaries.like(diagnosis.subject))
        if is_primary:
            primaries.add(diagnosis.subject, None)
        ordered.append(diagnosis._replace(primary=True) if is_primary else diagnosis)
    return tuple(ordered)


def _has_impact(diagnosis: Diagnosis) -> bool:
    return diagnosis.state == "present" and diagnosis.severity != "info"
