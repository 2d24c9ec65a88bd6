"""Incidents + contract + telemetry -> diagnoses: state, culprits, cause, and onset of each incident.

Every distinct signal is queried once, for all subjects and instants. An incident is decided per subject and instant by
three-valued logic: a condition that is false makes it absent, else one that is missing makes it unknown, else it is
present. `Incident.query()` is the same conjunction for a Prometheus; a property test holds the two equal.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np

from diag.core.formatting import quantity
from diag.core.incident import RANK, Incident, LookAlike, Severity, Signal, seconds
from diag.core.subjects import Subject, SubjectIndex, filled
from diag.diagnosis.decision_table import COMPARE, LOOK, RECENT, Episode, Reading, Readings, decision_table, slow_burns
from diag.diagnosis.query_cache import FEWEST_INTERVALS, QueryCache, SourceAtInstants, Window
from diag.knowledge.formulas import expanded

State = Literal["present", "absent", "unknown"]

STATES: dict[int, State] = {1: "present", 0: "absent", -1: "unknown"}
MOST_DATED = 12
"""Incidents to date: each takes a few queries more."""
MOST_EPISODES = 4
"""Episodes of one incident to date, the last ones."""
AVERAGES = re.compile(r"\b(rate|avg_over_time)\(")
FEW = 5
"""Servers up to which incidents are dated."""


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
    def missing(self) -> tuple[str, ...]:
        """The signals of its conditions that have no value at the instant that is reported."""
        readings = {reading.condition: reading for reading in (*self.symptoms, *self.supports, *self.escalation)}
        return tuple(condition.signal.name for condition, reading in readings.items() if reading.value is None)

    @property
    def watched_since(self) -> float:
        """The beginning of the telemetry that was judged: what held from the start began before that."""
        return self.instants[0] - self.watched

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


def diagnose(incidents: Sequence[Incident], queries: QueryCache) -> tuple[Diagnosis, ...]:
    """Judge every incident for every subject; present ones first, the primary first of all.

    An incident that is not present over its own window is judged over the long windows in which an SLO burns slowly.
    """

    def with_culprits(readings: Sequence[Reading], diagnosis: Diagnosis) -> tuple[Reading, ...]:
        named = (culprits(reading.condition.signal, diagnosis, queries) for reading in readings)
        return tuple(
            reading._replace(culprits=tuple(dict.fromkeys(text for _, text in found))) if found else reading
            for reading, found in zip(readings, named, strict=True)
        )

    diagnoses: list[Diagnosis] = []
    for incident in incidents:
        slow = [
            found for burning, window in slow_burns(incident, queries) for found in _decide(burning, window, queries)
        ]
        holds = {found.subject: found for found in slow if found.ongoing}
        for found in _decide(incident, queries.window(incident), queries):
            decided = found if found.state == "present" else holds.get(found.subject, found)
            if decided.state == "present":
                symptoms, supports = (with_culprits(each, decided) for each in (decided.symptoms, decided.supports))
                decided = decided._replace(symptoms=symptoms, supports=supports)
            diagnoses.append(decided)
    others = SubjectIndex((found.subject, found) for found in diagnoses)
    return _order(_explain([_rule_out(found, others) if found.state == "present" else found for found in diagnoses]))


def without_the_past(diagnoses: Sequence[Diagnosis]) -> tuple[Diagnosis, ...]:
    """Return the diagnoses with ended incidents as absent; incidents that they explained stand for themselves."""
    now = [
        found._replace(state="absent" if found.state == "present" and not found.ongoing else found.state)
        for found in diagnoses
    ]
    return _order(_explain(now))


def _decide(incident: Incident, window: Window, queries: QueryCache) -> Iterator[Diagnosis]:
    """Yield one diagnosis per subject: present if it held at some instant, else absent if not at the last one."""
    table = decision_table(incident, window, queries)
    instants = tuple((table.instants / 1000).tolist())
    for place, subject in enumerate(table.subjects):
        state = STATES[int(table.decided[place])]
        episodes = table.episodes(place)
        ongoing = bool(table.ongoing[place]) and not queries.is_gone(subject)
        symptoms = Readings(incident.conditions, table, place)
        escalation = Readings((incident.escalates,) if incident.escalates else (), table, place)
        missing = (  # every reading is a query: they are read only where a query was refused
            [reading.condition.signal for reading in symptoms if reading.value is None]
            if state == "unknown" and queries.unanswered
            else []
        )
        refused = all(signal.promql in queries.unanswered for signal in missing)
        if incident.began and state == "present":
            when = queries.ask(incident.began, incident.per, window).get(subject)
            if when is not None and when[table.last[place]] > 0:
                episodes = ((float(when[table.last[place]]), episodes[-1][1]),)
        severity: Severity = "critical" if any(reading.holds for reading in escalation) else incident.severity
        if state == "present" and not ongoing:
            ended = queries.source.instants[-1] / 1000 - episodes[-1][1]
            breather = queries.live(incident.live_window).seconds + queries.source.interval
            if (
                incident.outage or incident.burns or ended > breather
            ):  # a condition that has just ended may hold again at the next scrape
                is_recent = incident.outage and ended <= RECENT
                severity = min(severity, "warning" if is_recent else "info", key=RANK.__getitem__)
        yield Diagnosis(
            incident=incident,
            subject=subject,
            state=state,
            severity=severity,
            severity_alone=severity,
            since=episodes[0][0] if state == "present" else None,
            until=instants[int(table.last[place])] if state == "present" else None,
            episodes=episodes,
            ongoing=ongoing,
            instants=instants,
            symptoms=symptoms,
            supports=Readings(incident.supports, table, place),
            escalation=escalation,
            unanswered=tuple(signal.name for signal in missing) if refused else (),
            brief=bool(table.brief[place]),
            watched=table.watched,
        )


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


# -- which incident is the cause, and which comes first ---------------------------------------------------------------


def _rule_out(diagnosis: Diagnosis, others: SubjectIndex[Diagnosis]) -> Diagnosis:
    """Decide for every look-alike of a present incident whether it was ruled out, and by which reading.

    The symptoms of another incident count as they were when this one last held: later values rule nothing out. A
    look-alike that is present as well is neither ruled out nor open.
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
                is_unknown |= value is None
                if value is not None and not COMPARE[reading.condition.op](value, reading.limit):
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


def _explain(diagnoses: list[Diagnosis]) -> list[Diagnosis]:
    """Nest each present incident under its cause: if there are several, under one that has no cause itself."""
    present = SubjectIndex((found.subject, found) for found in diagnoses if found.state == "present")
    causes = [
        [cause for _, cause in present.like(found.subject) if _is_cause(cause, found)]
        if found.state == "present"
        else []
        for found in diagnoses
    ]
    follows = {id(found) for found, why in zip(diagnoses, causes, strict=True) if why}
    best = [min(why, key=lambda c: (id(c) in follows, *_weight(c)), default=None) for why in causes]
    caused: dict[int, Severity] = {}
    for found, cause in zip(diagnoses, best, strict=True):
        if cause and found.incident.id not in cause.incident.explains:
            caused[id(cause)] = max(caused.get(id(cause), "info"), found.severity_alone, key=RANK.__getitem__)
    return [
        found._replace(
            explained_by=cause.incident.id if cause else None,
            primary=False,
            severity=max(found.severity_alone, caused.get(id(found), "info"), key=RANK.__getitem__),
        )
        for found, cause in zip(diagnoses, best, strict=True)
    ]


def _weight(diagnosis: Diagnosis) -> tuple[float | str, ...]:
    """Return the sort key of two incidents that nothing explains: first the worse, the ongoing, the wider, the better
    supported."""
    tie: tuple[float, ...] = ()
    if diagnosis.state == "present":
        known = [reading.holds for reading in diagnosis.supports if reading.holds is not None]
        supported = sum(known) / max(1, len(known))
        tie = (-len(diagnosis.incident.explains), -supported)
    return (-RANK[diagnosis.severity], not diagnosis.ongoing, len(diagnosis.subject), *tie, diagnosis.incident.id)


def _order(diagnoses: list[Diagnosis]) -> tuple[Diagnosis, ...]:
    """Sort present ones first, the worst first; one primary per scope, and an engine lies within its instance's scope.

    A violated latency SLO shows the impact on users and not the cause: any other incident with an impact comes first.
    """
    states = ("present", "unknown", "absent")
    ranked = sorted(
        diagnoses,
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
    ordered = []
    for diagnosis in ranked:
        has_impact = diagnosis.state == "present" and diagnosis.severity != "info"
        is_primary = has_impact and not any(primaries.like(diagnosis.subject))
        if is_primary:
            primaries.add(diagnosis.subject, None)
        ordered.append(diagnosis._replace(primary=True) if is_primary else diagnosis)
    return tuple(ordered)


# -- when it began ----------------------------------------------------------------------------------------------------


def onset(reading: Reading, diagnosis: Diagnosis) -> float | None:
    """Return the time from which a condition of a present incident held without a break up to the reported instant.

    Unix seconds; the first instant judged if it held from the start; None if it does not hold. A missing value is no
    break.
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


def _first_sign(diagnosis: Diagnosis, since: float, window: float) -> float:
    """Return the time of the first sign of an episode: the first of its symptoms to hold without a break from then on.

    A median or a mean over a window holds up to a window later than what it measures, so that the onset lies in the
    window before it. A symptom that has held for longer was there before, and is no sign of this episode.
    """
    if since not in diagnosis.instants or seconds(diagnosis.incident.live_window) > LOOK:
        return since
    instants, signs = diagnosis.instants, [since]
    place = instants.index(since)
    for reading in diagnosis.symptoms:
        if reading.condition in diagnosis.incident.symptoms:
            values = reading.history[: place + 1]
            broken = [value is None or not COMPARE[reading.condition.op](value, reading.limit) for value in values]
            first = place + 1 - broken[::-1].index(True) if True in broken else 0
            if 0 < first <= place and instants[first] > since - window:
                signs.append(instants[first] - window * _share_of_window(reading, first, instants, window))
    return max(min(signs), since - window)


def _share_of_window(reading: Reading, first: int, instants: Sequence[float], window: float) -> float:
    """Return the share of its window for which a mean had been off before it crossed its threshold.

    A mean of a value that jumps goes in a straight line from the old value to the new one within a window.
    """
    signal = reading.condition.signal
    if signal.unit == "bool" or signal.window_scaling == "peak" or not AVERAGES.search(expanded(signal.promql)):
        return 0.0
    before = max((at for at in range(first) if instants[at] <= instants[first] - window), default=0)
    after = min((at for at in range(first, len(instants)) if instants[at] >= instants[first] + window), default=-1)
    old, new = reading.history[before], reading.history[after]
    if old is None or new is None or not COMPARE[reading.condition.op](new, reading.limit) or new == old:
        return 0.0
    return min(max((reading.limit - old) / (new - old), 0.0), 1.0)


def dated(diagnoses: Sequence[Diagnosis], queries: QueryCache) -> tuple[Diagnosis, ...]:
    """Return the diagnoses; each episode that began within the span has the time at which it really began.

    An incident judged over five minutes shows up to five minutes after its onset. Judged again over the live window,
    at every scrape of the first long window that shows it, its onset can be dated to half a minute: by its first sign.
    The onsets decide which incident is the cause.
    """
    if len(queries.subjects(("instance",))) > FEW:
        return tuple(diagnoses)
    found = [*diagnoses]
    late = (
        place
        for place, diagnosis in enumerate(diagnoses)
        if any(since is not None for since, _ in diagnosis.episodes) and diagnosis.incident.began is None
    )
    step = round(queries.source.interval * 1000)
    for place in islice(late, MOST_DATED):
        diagnosis, incident = found[place], found[place].incident
        live = queries.live(incident.live_window).seconds
        is_long = queries.window(incident).seconds > live
        span = int((queries.window(incident).seconds + live) * 1000)
        episodes = diagnosis.episodes[:-MOST_EPISODES]
        for since, until in diagnosis.episodes[-MOST_EPISODES:]:
            began, after = since, episodes[-1][1] if episodes else None
            if since is not None and not is_long:
                began = _first_sign(diagnosis, since, live)
            elif since is not None:
                instants = round(since * 1000) - step * np.arange(span // step, -1, -1, dtype=np.int64)
                close = QueryCache(SourceAtInstants(queries.source, instants), queries.contract)
                again = (other for other in diagnose([incident], close) if other.subject == diagnosis.subject)
                starts = (  # none if nothing was seen of it then
                    other.instants[0] if start is None else _first_sign(other, start, live)
                    for other in again
                    for start, _ in other.episodes
                )
                began = next((start for start in starts if after is None or start > after), since)
            episodes = (*episodes, (began, until))
        since = episodes[0][0] if diagnosis.state == "present" else None  # the episodes of an absent one are notes
        found[place] = diagnosis._replace(since=since, episodes=episodes)
    return _order(_explain(found))


def begun(diagnoses: Sequence[Diagnosis], incidents: Sequence[Incident], queries: QueryCache) -> tuple[Diagnosis, ...]:
    """Return the diagnoses; if nothing is wrong over the windows of the alerts, with what the last live windows show.

    Over five minutes, an incident of one minute is not present yet. A look at the end, which lasts as long as that of
    `diag doctor URL`, shows it.
    """
    is_ill = any(found.state == "present" and RANK[found.severity] for found in diagnoses)
    if is_ill or len(queries.subjects(("instance",))) > FEW:
        return tuple(diagnoses)
    live = {each.id: queries.live(each.live_window).seconds for each in incidents if seconds(each.live_window) <= LOOK}
    late = [each for each in incidents if live.get(each.id, math.inf) < queries.window(each).seconds]
    if not late:
        return tuple(diagnoses)
    step, longest = round(queries.source.interval * 1000), max(live.values())
    instants = queries.source.instants[-1] - step * np.arange(math.ceil(1000 * longest / step), -1, -1, dtype=np.int64)
    close = QueryCache(SourceAtInstants(queries.source, instants), queries.contract)
    close.gone = queries.gone
    now = {
        (found.incident.id, found.subject): found
        for found in diagnose(late, close)
        if found.state == "present" and found.ongoing and RANK[found.severity]
    }
    if not now:
        return tuple(diagnoses)
    return _order(_explain([now.get((found.incident.id, found.subject), found) for found in diagnoses]))


def by_scrapes(diagnosis: Diagnosis, queries: QueryCache) -> Diagnosis:
    """Return a diagnosis from a short observation with onset and histories in the shortest windows.

    An observation of half a minute has one live window, which shows neither how a value changed nor when.
    """
    is_chronic = seconds(diagnosis.incident.live_window) > LOOK
    if len(diagnosis.instants) > 1 or is_chronic or len(queries.subjects(("instance",))) > FEW:
        return diagnosis
    shortest = f"{math.ceil(FEWEST_INTERVALS * queries.source.interval - 0.01)}s"  # the interval is measured
    incident = diagnosis.incident._replace(window=shortest, live_window=shortest)
    again = next((other for other in diagnose([incident], queries) if other.subject == diagnosis.subject), None)
    if again is None or len(again.instants) < 2:
        return diagnosis

    def drawn(readings: Sequence[Reading], closer: Sequence[Reading]) -> tuple[Reading, ...]:
        return tuple(one._replace(history=other.history) for one, other in zip(readings, closer, strict=True))

    episodes = diagnosis.episodes
    if again.ongoing and diagnosis.incident.began is None:
        episodes = ((again.episodes[-1][0], episodes[-1][1]),)
    return diagnosis._replace(
        since=episodes[0][0],
        episodes=episodes,
        instants=again.instants,
        symptoms=drawn(diagnosis.symptoms, again.symptoms),
        supports=drawn(diagnosis.supports, again.supports),
    )
