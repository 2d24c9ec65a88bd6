"""Incidents + contract + answers -> diagnoses.

Every distinct signal is asked once, for all subjects and instants. An incident is decided per subject and instant by
three-valued logic: a condition that is false makes it absent, else one that is missing makes it unknown, else it is
present. That is what `Incident.query()` says to a Prometheus; a property test holds the two equal.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from diag.core.formatting import quantity, threshold
from diag.core.incident import Condition, Incident, LookAlike, Severity
from diag.core.subjects import Subject, SubjectIndex
from diag.diagnosis.decision_table import COMPARE, DecisionTable, decision_table
from diag.diagnosis.query_cache import QueryCache

State = Literal["present", "absent", "unknown"]

STATES: dict[int, State] = {1: "present", 0: "absent", -1: "unknown"}
TRUTH = {1: True, 0: False, -1: None}
RANK: dict[Severity, int] = {"info": 0, "warning": 1, "critical": 2}


@dataclass(frozen=True)
class Reading:
    """A condition as it was found: `value` at the instant that is reported, `history` at every instant judged.

    `which` names what is meant where the signal can: "rank 1".
    """

    condition: Condition
    value: float | None
    limit: float
    holds: bool | None
    history: tuple[float | None, ...]
    which: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The value with its unit, "-" where there is none."""
        return "-" if self.value is None else quantity(self.value, self.condition.signal.unit)


@dataclass(frozen=True)
class Refuted:
    """A look-alike that was considered and ruled out, with the number that did it."""

    looks_like: str
    because: str


@dataclass(frozen=True)
class Diagnosis:
    """One incident judged for one subject; times are unix seconds.

    `since` is None where it already held at the first instant; `open` names look-alikes that could not be ruled out;
    `instants` are those of the readings' histories.
    """

    incident: Incident
    subject: Subject
    state: State
    severity: Severity
    since: float | None
    until: float | None
    ongoing: bool
    instants: tuple[float, ...]
    symptoms: tuple[Reading, ...]
    supports: tuple[Reading, ...]
    refuted: tuple[Refuted, ...] = ()
    open: tuple[LookAlike, ...] = ()
    missing: tuple[str, ...] = ()
    explained_by: str | None = None
    primary: bool = False

    @property
    def reported(self) -> int:
        """The place of the instant whose readings are told of a present incident, the last one of any other."""
        return len(self.instants) - 1 if self.until is None else self.instants.index(self.until)

    @property
    def culprits(self) -> tuple[str, ...]:
        """What the symptoms name beyond the subject: a rank, an event."""
        return tuple(dict.fromkeys(name for each in self.symptoms if each.holds for name in each.which))


def diagnose(incidents: Sequence[Incident], asked: QueryCache) -> tuple[Diagnosis, ...]:
    """Judge every incident for every subject; present ones first, the primary first of all."""
    found = [_name(each, asked) for incident in incidents for each in _decide(incident, asked)]
    return _order(_explain(_rule_out(found)))


def _decide(incident: Incident, asked: QueryCache) -> Iterator[Diagnosis]:
    """One diagnosis per subject."""
    told = decision_table(incident, asked)
    instants = tuple((told.instants / 1000).tolist())
    for place, readings in enumerate(_readings(told)):
        one = _decide_one(incident, told, place, readings, instants)
        yield replace(one, ongoing=False) if one.ongoing and asked.is_gone(one.subject) else one


def _readings(told: DecisionTable) -> Iterator[dict[Condition, Reading]]:
    """Of each subject, its conditions at the last instant that shows what was decided."""
    plain = told.values.astype(object)
    plain[np.isnan(told.values)] = None
    held = told.held[:, np.arange(len(told.subjects)), told.last].T.tolist()
    for last, histories, holds in zip(told.last.tolist(), plain.swapaxes(0, 1).tolist(), held, strict=True):
        conditions = zip(told.conditions, told.limits, histories, holds, strict=True)
        yield {
            each: Reading(each, history[last], limit, TRUTH[truth], tuple(history))
            for each, limit, history, truth in conditions
        }


def _decide_one(
    incident: Incident,
    told: DecisionTable,
    place: int,
    readings: Mapping[Condition, Reading],
    instants: tuple[float, ...],
) -> Diagnosis:
    """Present when it held at some instant, else absent when it could be judged at some instant."""
    first, last = int(told.first[place]), int(told.last[place])
    state = STATES[int(told.decided[place])]
    worse = incident.escalates is not None and readings[incident.escalates].holds
    return Diagnosis(
        incident=incident,
        subject=told.subjects[place],
        state=state,
        severity="critical" if worse else incident.severity,
        since=instants[first] if state == "present" and first else None,
        until=instants[last] if state == "present" else None,
        ongoing=bool(told.ongoing[place]),
        instants=instants,
        symptoms=tuple(readings[each] for each in incident.conditions),
        supports=tuple(readings[each] for each in incident.supports),
        missing=tuple(each.condition.signal.name for each in readings.values() if each.value is None),
    )


def _name(one: Diagnosis, asked: QueryCache) -> Diagnosis:
    """Have the readings of a present incident name what they mean."""
    if one.state != "present":
        return one

    def named(reading: Reading) -> Reading:
        signal = reading.condition.signal
        if not signal.culprit_promql:
            return reading
        rows = asked.ask(signal.culprit_promql, one.incident.per, asked.window(one.incident))
        then = ((labels, row[one.reported]) for labels, row in rows.like(one.subject))
        mine = ((labels, value) for labels, value in then if not np.isnan(value))
        texts = (
            signal.culprit_label.format_map({**dict(labels), "value": quantity(value, signal.culprit_unit)})
            for labels, value in mine
        )
        return replace(reading, which=tuple(dict.fromkeys(texts)))

    return replace(one, symptoms=tuple(map(named, one.symptoms)), supports=tuple(map(named, one.supports)))


def _rule_out(found: list[Diagnosis]) -> list[Diagnosis]:
    """Say of every look-alike of a present incident whether it was ruled out, and by which number."""
    others = SubjectIndex((each.subject, each) for each in found)
    return [_rule_out_one(each, others) if each.state == "present" else each for each in found]


def _rule_out_one(one: Diagnosis, others: SubjectIndex[Diagnosis]) -> Diagnosis:
    refuted, left = [], []
    same_scope = {each.incident.id: each for _, each in reversed(list(others.like(one.subject)))}
    for look in one.incident.looks_like:
        because = _because(look, one, same_scope.get(look.name))
        if because is None:
            left.append(look)
        elif because:
            refuted.append(Refuted(look.name, because))
    return replace(one, refuted=tuple(refuted), open=tuple(left))


def _because(look: LookAlike, one: Diagnosis, other: Diagnosis | None) -> str | None:
    """Why a look-alike is ruled out; "" when it is present as well, None when nothing tells."""
    decides = look.requires or look.refuted_by
    if decides:
        reading = next(each for each in (*one.symptoms, *one.supports) if each.condition == decides)
        return f"{says(reading)} (ruled out by {against(reading)})" if reading.holds else None
    if other is None:
        return None
    then = _readings_at(other, one.until)
    against_it = next((each for each in then if each.holds is False), None)
    if against_it:
        return f"{says(against_it)} (it takes {against(against_it)})"
    return None if any(each.holds is None for each in then) else ""


def _readings_at(one: Diagnosis, instant: float | None) -> list[Reading]:
    """The symptoms as they were at that time, or last before it: what held later rules nothing out."""
    at = max((i for i, each in enumerate(one.instants) if instant is None or each <= instant), default=0)
    return [_reading_at(each, at) for each in one.symptoms]


def _reading_at(reading: Reading, at: int) -> Reading:
    value = reading.history[at]
    held = None if value is None else bool(COMPARE[reading.condition.op](value, reading.limit))
    return replace(reading, value=value, holds=held, which=())


def onset(reading: Reading, one: Diagnosis) -> float | None:
    """Since when a condition of a present incident held without a break, up to the instant that is reported.

    Unix seconds, the first instant judged where it held from the start; None where it does not hold. A hole breaks
    nothing.
    """
    if one.until is None:
        return None
    at = one.reported + 1
    began = None
    for instant, value in zip(reversed(one.instants[:at]), reversed(reading.history[:at]), strict=True):
        if value is not None and not COMPARE[reading.condition.op](value, reading.limit):
            break
        began = instant if value is not None else began
    return began


def says(reading: Reading) -> str:
    """The signal's own sentence, read out with its number, and what it names."""
    if reading.value is None:
        return "not measured"
    sentence = reading.condition.signal.sentence.format(value=reading.shown)
    return f"{sentence} ({', '.join(reading.which)})" if reading.which else sentence


def against(reading: Reading) -> str:
    """The threshold that the value is compared with: ">= 4"."""
    return threshold(reading.condition.op, reading.limit, reading.condition.signal.unit)


def _explain(found: list[Diagnosis]) -> list[Diagnosis]:
    """Nest what follows from a present cause under it."""
    present = SubjectIndex((each.subject, each) for each in found if each.state == "present")
    return [replace(each, explained_by=_cause(each, present)) if each.state == "present" else each for each in found]


def _cause(one: Diagnosis, present: SubjectIndex[Diagnosis]) -> str | None:
    causes = (cause for _, cause in present.like(one.subject) if one.incident.id in cause.incident.explains)
    return next((cause.incident.id for cause in causes), None)


def _order(found: list[Diagnosis]) -> tuple[Diagnosis, ...]:
    """Present first, the worst first; one primary per scope, and an engine lies within its instance's scope."""
    states = ("present", "unknown", "absent")
    ranked = sorted(
        found,
        key=lambda d: (
            states.index(d.state),
            d.explained_by is not None,
            -RANK[d.severity],
            not d.ongoing,
            len(d.subject),
            d.incident.id,
            d.subject,
        ),
    )
    primaries: SubjectIndex[None] = SubjectIndex()
    out = []
    for each in ranked:
        first = _harms(each) and not any(primaries.like(each.subject))
        if first:
            primaries.add(each.subject, None)
        out.append(replace(each, primary=True) if first else each)
    return tuple(out)


def _harms(one: Diagnosis) -> bool:
    return one.state == "present" and one.severity != "info"
