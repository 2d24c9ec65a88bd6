"""Incidents + contract + telemetry -> diagnoses: state, culprits, cause, and onset of each incident.

Every distinct signal is queried once, for all subjects and instants. An incident is decided per subject and instant by
three-valued logic: a condition that is false makes it absent, else one that is missing makes it unknown, else it is
present. `Incident.query()` is the same conjunction for a Prometheus; a property test holds the two equal.
"""

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from diag.core.formatting import quantity
from diag.core.incident import RANK, Incident, LookAlike, Severity, Signal
from diag.core.subjects import Subject, SubjectIndex, filled, instance_name, label_value
from diag.diagnosis.decision_table import COMPARE, RECENT, Episode, Reading, Readings, decision_table, slow_burns
from diag.diagnosis.query_cache import QueryCache, Window
from diag.knowledge.health import LIVES

LAST_LINE = "max by ($by) (last_over_time(diag_vllm_log_last_line_timestamp_seconds[$window]))"
CRASH_LOOP = "crash_loop"
State = Literal["present", "absent", "unknown"]

STATES: dict[int, State] = {1: "present", 0: "absent", -1: "unknown"}


class Refuted(NamedTuple):
    """A look-alike that was considered and ruled out, and the reading that decides against it.

    `by_requirement` is True if the reading fails a condition that the look-alike requires, False if it meets one that
    rules the look-alike out.
    """

    name: str
    reading: Reading
    by_requirement: bool


class Diagnosis(NamedTuple):
    """One incident judged for one subject; times are unix seconds.

    `severity` is the present one: an ended outage is a warning for 15 minutes, any other incident that ended more than
    a live window ago an info, and a cause is as grave as what it has caused; `severity_alone` leaves that out. `since`
    is None if the incident already held at the first instant. `episodes` are the times in which it held, with health
    between them, the first from `since` on and the last to `until`; those of an absent incident were too short to
    count, or restarts. `escalation` is the condition that makes it critical; `open` has the look-alikes that could not
    be ruled out; `instants` are those of the readings' histories. `unanswered` names the missing signals if the
    incident is unknown only because the source refused their queries; `brief` is True if the observation was too short
    to call it absent; `watched` has the seconds before the first instant that were judged too.
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
    severity_alone: Severity = "info"

    @property
    def server(self) -> str:
        """The server of its subject."""
        return instance_name(self.subject)

    @property
    def is_alarming(self) -> bool:
        """True if it is present, with an impact."""
        return self.state == "present" and bool(RANK[self.severity])

    @property
    def missing(self) -> tuple[str, ...]:
        """The signals of its conditions that have no value at the instant that is reported."""
        readings = {reading.condition: reading for reading in (*self.symptoms, *self.supports, *self.escalation)}
        return tuple(condition.signal.name for condition, reading in readings.items() if reading.value is None)

    @property
    def full_severity(self) -> Severity:
        """The severity while it goes on."""
        if any(reading.holds for reading in self.escalation):
            return "critical"
        serious = self.incident.serious
        holds = [reading.holds for reading in self.supports if reading.condition == serious]
        is_mild = serious and True not in holds and (self.state == "present" or None not in holds)
        return "info" if is_mild else self.incident.severity

    @property
    def watched_since(self) -> float:
        """The beginning of the telemetry that was judged: what held from the start began before that."""
        return self.instants[0] - self.watched

    @property
    def end(self) -> float | None:
        """The end of its last episode, None if it is not present; the readings are those at `until`."""
        return None if self.until is None else self.episodes[-1][1]

    @property
    def reported(self) -> int:
        """The place of the instant whose readings are reported: for a present incident its last, else the last one."""
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
        """The names in the symptoms beyond the subject: a rank, an event."""
        return tuple(dict.fromkeys(name for reading in self.symptoms if reading.holds for name in reading.culprits))


class Quote(NamedTuple):
    """A line of a log: `file` is "" and `line` None if unknown.

    `process` is the process of vLLM that wrote it, `cause` the exception that it was raised from, and `frames` the
    innermost frames of its traceback; "" for none.
    """

    text: str
    file: str
    line: int | None
    process: str
    cause: str
    frames: str = ""

    @property
    def place(self) -> str:
        """File and line: "server.log:71"; "" if unknown."""
        return f"{self.file}:{self.line}" if self.line is not None else self.file

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """Values for a command that reads the file, as a shell takes them.

        Empty if the place is unknown. The tilde of a home folder, which is not named, has to stand outside of quotes.
        """
        if not self.file or self.line is None:
            return ()
        home, rest = re.match(r"((?:~/)?)(.*)", self.file, re.DOTALL).groups()  # type: ignore[union-attr]
        return (("log", f"{home}{shlex.quote(rest)}"),)


def diagnose(incidents: Sequence[Incident], queries: QueryCache) -> tuple[Diagnosis, ...]:
    """Judge every incident for every subject; present ones first, the primary first of all.

    An incident that is not present over its own window is judged over the long windows in which an SLO burns slowly.
    """

    def with_culprits(readings: Sequence[Reading], diagnosis: Diagnosis) -> tuple[Reading, ...]:
        named = ((reading, culprits(reading.condition.signal, diagnosis, queries)) for reading in readings)
        return tuple(
            reading._replace(culprits=tuple(dict.fromkeys(text for _, text in names))) if names else reading
            for reading, names in named
        )

    diagnoses: list[Diagnosis] = []
    for incident in incidents:
        burning = {  # what rose suddenly is told after its end, too: no long window has to remember it
            one.subject: one
            for burn, window in slow_burns(incident, queries)
            for one in _decide(burn, window, queries)
            if one.ongoing or (one.state == "present" and burn in incident.rising)
        }
        for diagnosis in _decide(incident, queries.window(incident), queries):
            slow = burning.get(diagnosis.subject, diagnosis)  # what still burns slowly has not ended with its fast burn
            goes_on = slow.ongoing and slow.incident in incident.rising
            decided = slow if diagnosis.state != "present" or (goes_on and not diagnosis.ongoing) else diagnosis
            if decided.state == "present":
                symptoms, supports = (with_culprits(some, decided) for some in (decided.symptoms, decided.supports))
                decided = decided._replace(symptoms=symptoms, supports=supports)
            diagnoses.append(decided)
    others = SubjectIndex((other.subject, other) for other in diagnoses)
    return ranked([rule_out(one, others, queries) if one.state == "present" else one for one in diagnoses])


def without_the_past(diagnoses: Sequence[Diagnosis]) -> tuple[Diagnosis, ...]:
    """Return the diagnoses with ended incidents as absent; incidents that they explained stand for themselves."""
    ended = (diagnosis.state == "present" and not diagnosis.ongoing for diagnosis in diagnoses)
    return ranked([one._replace(state="absent") if over else one for one, over in zip(diagnoses, ended, strict=True)])


def _decide(incident: Incident, window: Window, queries: QueryCache) -> Iterator[Diagnosis]:
    """Yield one diagnosis per subject: present if it held at some instant, else absent if not at the last one."""
    table = decision_table(incident, window, queries)
    instants = queries.times(window)
    escalating = (incident.escalates,) if incident.escalates else ()
    for place, subject in enumerate(table.subjects):
        state, last = STATES[int(table.decided[place])], int(table.last[place])
        is_present = state == "present"
        episodes = table.episodes(place)
        symptoms = Readings(incident.conditions, table, place)
        missing = (  # every reading is a query: they are read only where a query was refused
            [reading.condition.signal for reading in symptoms if reading.value is None]
            if state == "unknown" and queries.unanswered
            else []
        )
        refused = all(signal.promql in queries.unanswered for signal in missing)
        if incident.began and is_present:
            when = queries.ask(incident.began, incident.per, window).get(subject)
            if when is not None and when[last] > 0:
                episodes = ((float(when[last]), episodes[-1][1]),)
        ongoing = bool(table.ongoing[place]) and not queries.is_gone(subject)
        is_worse = any(reading.holds for reading in Readings(escalating, table, place))
        if incident.ended and is_present and not is_worse:
            row = queries.ask(incident.ended, incident.per, window).get(subject)
            if row is not None and not np.isnan(row[last]):
                began = episodes[-1][0] or 0.0
                gap = next((at for at in range(last) if np.isnan(row[at]) and instants[at] > began), last)
                back = next(at for at in range(gap, last + 1) if not np.isnan(row[at]))
                end = instants[back] if gap < last else max(float(row[last]), began)  # no page shows it without a gap
                ongoing, episodes = False, (*episodes[:-1], (episodes[-1][0], end))
        if ongoing:  # the last instants may leave it unknown
            episodes = (*episodes[:-1], (episodes[-1][0], instants[-1]))
        diagnosis = Diagnosis(
            incident=incident,
            subject=subject,
            state=state,
            severity=incident.severity,
            since=episodes[0][0] if is_present else None,
            until=instants[last] if is_present else None,
            episodes=episodes,
            ongoing=ongoing,
            instants=instants,
            symptoms=symptoms,
            supports=Readings(incident.supports, table, place),
            escalation=Readings(escalating, table, place),
            unanswered=tuple(signal.name for signal in missing) if refused else (),
            brief=bool(table.brief[place]),
            watched=table.watched,
        )
        yield with_severity(diagnosis, queries)


def with_severity(diagnosis: Diagnosis, queries: QueryCache) -> Diagnosis:
    """Return a diagnosis with the severity that it has now: an incident that has ended is an info, or soon one."""
    severity, incident = diagnosis.full_severity, diagnosis.incident
    if diagnosis.state == "present" and not diagnosis.ongoing:
        ended = queries.source.instants[-1] / 1000 - diagnosis.episodes[-1][1]
        breather = queries.live(incident.live_window).seconds + queries.source.interval
        # a condition that has just ended may hold again at the next scrape
        lasts = incident.outage or incident.ended
        if lasts or incident.burns or ended > breather:
            is_recent = lasts and ended <= RECENT
            severity = min(severity, "warning" if is_recent else "info", key=RANK.__getitem__)
    return diagnosis._replace(severity=severity, severity_alone=severity)


def culprits(signal: Signal, diagnosis: Diagnosis, queries: QueryCache) -> list[tuple[Mapping[str, str], str]]:
    """Return the labels and the text of each culprit that a signal of a present incident names."""
    return [
        (labels, name)
        for labels, value in culprit_series(signal, diagnosis, queries)
        if (name := filled(signal.culprit_label, labels, value=quantity(value, signal.culprit_unit)))
    ]


def culprit_series(signal: Signal, diagnosis: Diagnosis, queries: QueryCache) -> Iterator[tuple[dict[str, str], float]]:
    """Yield labels and value of each series that the signal's culprit query has at the instant that is reported."""
    if signal.culprit_promql:
        rows = queries.ask(signal.culprit_promql, diagnosis.incident.per, queries.window(diagnosis.incident))
        for labels, row in rows.like(diagnosis.subject):
            if not np.isnan(row[diagnosis.reported]):
                yield dict(labels), float(row[diagnosis.reported])


def quotes(diagnosis: Diagnosis, queries: QueryCache) -> tuple[Quote, ...]:
    """Return the newest line that the server logged about a present incident, as it was when it was last present."""
    signal = diagnosis.incident.quotes
    if signal is None or diagnosis.state != "present":
        return ()
    newest = max(culprit_series(signal, diagnosis, queries), key=lambda pair: pair[1], default=None)
    if newest is None:
        return ()
    text, file, number, process, cause, frames = (
        label_value(newest[0], name) for name in ("text", "file", "line", "process", "cause", "frames")
    )
    line = int(number) if number.isdecimal() and len(number) < 12 else None
    return (Quote(text, file, line, process, cause, frames),)


# -- which incident is the cause, and which comes first ---------------------------------------------------------------


def ranked(diagnoses: list[Diagnosis]) -> tuple[Diagnosis, ...]:
    """Return the diagnoses with the cause of each present one, in the order of a report.

    Present ones come first, the worst first; one is primary per scope, and an engine lies within its instance's scope.
    A violated latency SLO shows the impact on users and not the cause: any other incident with an impact comes first.
    """
    states = ("present", "unknown", "absent")
    ordered = sorted(
        _explain(diagnoses),
        key=lambda d: (
            states.index(d.state),
            d.explained_by is not None,
            RANK[d.severity] == 0,
            d.incident.telemetry,
            bool(d.incident.burns) and d.incident.escalates is None,
            *_weight(d),
            d.subject,
        ),
    )
    primaries: SubjectIndex[None] = SubjectIndex()
    for place, diagnosis in enumerate(ordered):
        if diagnosis.is_alarming and not any(primaries.like(diagnosis.subject)):
            primaries.add(diagnosis.subject, None)
            ordered[place] = diagnosis._replace(primary=True)
    return tuple(ordered)


def rule_out(diagnosis: Diagnosis, others: SubjectIndex[Diagnosis], queries: QueryCache) -> Diagnosis:
    """Decide for every look-alike of a present incident whether it was ruled out, and by which reading.

    The symptoms of another incident count as they were when this one last held: later values rule nothing out. A
    look-alike that is present as well is neither ruled out nor open. A page alone shows no death of an engine, so that
    no evidence of one rules it out only if /health, the engine's processes or the log are seen.
    """
    refuted, left = [], []
    same_scope = {other.incident.id: other for _, other in reversed(list(others.like(diagnosis.subject)))}
    for look_alike in diagnosis.incident.looks_like:
        other = same_scope.get(look_alike.name)
        if decides := look_alike.requires or look_alike.refuted_by:
            readings = (*diagnosis.symptoms, *diagnosis.supports)
            reading = next(reading for reading in readings if reading.condition == decides)
            if reading.holds:
                refuted.append(Refuted(look_alike.name, reading, by_requirement=False))
            else:
                left.append(look_alike)
        elif other is None:
            left.append(look_alike)
        else:
            until = diagnosis.until
            at = max((place for place, unix in enumerate(other.instants) if until is None or unix <= until), default=0)
            is_unknown = False
            for reading in other.symptoms:
                value = reading.history[at]
                # it counts only where the death of an engine would be seen: by /health, its processes or the log
                if other.incident.crash is not None and reading.condition.op == ">=":
                    asked, window = ("$does_not_answer", LAST_LINE, *LIVES), queries.window(other.incident)
                    rows = (queries.ask(query, other.incident.per, window).of(other.subject) for query in asked)
                    value = value if any(row is not None and row[at] > 0 for row in rows) else None
                is_unknown |= value is None
                if reading.met_by(value) is False:
                    against = reading._replace(value=value, culprits=())
                    refuted.append(Refuted(look_alike.name, against, by_requirement=True))
                    break
            else:
                left += [look_alike] if is_unknown else []
    return diagnosis._replace(refuted=tuple(refuted), open=tuple(left))


def _is_cause(cause: Diagnosis, effect: Diagnosis) -> bool:
    """Return True if one present incident explains another one, always or under conditions that hold."""
    if effect.incident.id in cause.incident.explains:
        return True
    edge = next((edge for edge in cause.incident.may_explain if edge.incident == effect.incident.id), None)
    if edge is None or (effect.ongoing and not cause.ongoing):
        return False
    began, other_began = cause.since or -math.inf, effect.since or -math.inf
    either_may = any(back.incident == cause.incident.id for back in effect.incident.may_explain)
    is_later = effect.since is None or began > other_began or (either_may and began == other_began)
    if edge.began_first and is_later:
        return False
    for condition in edge.where:
        readings = (*effect.symptoms, *effect.supports, *cause.symptoms, *cause.supports, *cause.escalation)
        value = next(reading.value for reading in readings if reading.condition.signal == condition.signal)
        if value is None or not COMPARE[condition.op](value, float(condition.limit)):
            return False
    return True


def _explain(diagnoses: list[Diagnosis]) -> Iterator[Diagnosis]:
    """Nest each present incident under its cause: if there are several, under one that has no cause itself.

    A cause goes on while the outage or the crash loop does that it brought about: a killed server is still down.
    """
    present = SubjectIndex((diagnosis.subject, diagnosis) for diagnosis in diagnoses if diagnosis.state == "present")
    causes = {
        id(effect): [cause for _, cause in present.like(effect.subject) if _is_cause(cause, effect)]
        for effect in diagnoses
        if effect.state == "present"
    }
    best = {
        effect: min(several, key=lambda cause: (bool(causes[id(cause)]), *_weight(cause)))
        for effect, several in causes.items()
        if several
    }
    caused: dict[int, Severity] = {}
    lasting = set()
    for effect in diagnoses:
        if cause := best.get(id(effect)):
            mild = cause.ongoing and cause.severity_alone == "info"  # what it brings about shows its impact
            worst = effect.severity_alone if mild or effect.incident.id not in cause.incident.explains else "info"
            is_over = not (effect.ongoing or cause.ongoing)  # the SLO was violated a few minutes ago
            if effect.incident.burns and is_over and effect.instants[-1] - effect.episodes[-1][1] <= RECENT:
                worst = "warning"
            caused[id(cause)] = max(caused.get(id(cause), "info"), worst, key=RANK.__getitem__)
            lasts = effect.ongoing and (effect.incident.outage or effect.incident.id == CRASH_LOOP)
            if lasts and (effect.since or -math.inf) <= cause.episodes[-1][1]:
                lasting.add(id(cause))
    for diagnosis in diagnoses:
        goes_on, why = id(diagnosis) in lasting, best.get(id(diagnosis))
        alone = diagnosis.full_severity if goes_on else diagnosis.severity_alone
        yield diagnosis._replace(
            explained_by=why.incident.id if why else None,
            primary=False,
            ongoing=diagnosis.ongoing or goes_on,
            severity_alone=alone,
            severity=max(alone, caused.get(id(diagnosis), "info"), key=RANK.__getitem__),
        )


def _weight(diagnosis: Diagnosis) -> tuple[float | str, ...]:
    """Return the sort key of two incidents that nothing explains: first the worse, the ongoing, the wider, the better
    supported."""
    tie: tuple[float, ...] = ()
    if diagnosis.state == "present":
        decided = [reading.holds for reading in diagnosis.supports if reading.holds is not None]
        tie = (-len(diagnosis.incident.explains), -sum(decided) / max(1, len(decided)))
    return (-RANK[diagnosis.severity], not diagnosis.ongoing, len(diagnosis.subject), *tie, diagnosis.incident.id)
