"""The verdict of health: which of its parts were seen, and which incidents may be there although they are unknown.

Finding no incident is not health: `HealthEvidence.missing` names what was not seen. An unknown incident whose measured
symptoms all hold is a suspect. If users are affected as well, it is reported; otherwise it was not seen, too.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from diag.core.formatting import clock, plural, quantity
from diag.core.incident import RANK, Signal, seconds
from diag.core.metric_prefix import OWN
from diag.core.subjects import agree, instance_name
from diag.diagnosis.decision_table import COMPARE, RECENT, START_TIME, Reading, shortest_look
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.progress import FAILED, INSTANCE, Progress
from diag.diagnosis.query_cache import QueryCache, Window
from diag.diagnosis.telemetry_checks import FAMILIES
from diag.knowledge.formulas import expanded, formula
from diag.knowledge.health import CONTRADICTED, LIVES, PARTS
from diag.promql import may_have_value, metric_names, parse
from diag.promql.data import Expression, Selector
from diag.vllm.metric_names import SUFFIX, known, newest

LAST_IN_FLIGHT = "$running_last + $waiting_last"
"""Requests on the last page before a restart: a server that was drained had some on the pages before."""

RECENT_TOKENS = "5m"
"""A token within so long shows that an idle engine lives: the windows of most alerts."""


class NotSeen(NamedTuple):
    """Missing evidence of health: a part, or an incident that stays possible; the telemetry that lacks; the server."""

    name: str
    lacks: str
    server: str


class Suspect(NamedTuple):
    """An unknown incident whose measured symptoms all hold, on a server whose users are affected; or an info like it.

    `signs` are the readings that show it, those of the impact on users first; `missing` are signals without a value,
    and `metrics` what they read and the server has no sample of.
    """

    diagnosis: Diagnosis
    signs: tuple[Reading, ...]
    missing: tuple[str, ...]
    metrics: tuple[str, ...]


class HealthEvidence(NamedTuple):
    """The parts of health that were seen on every server, what was not seen, and the suspects, the worst first.

    `ignored` are incidents that are present and that diag.toml accepts.
    """

    seen: tuple[str, ...] = ()
    missing: tuple[NotSeen, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    ignored: tuple[Diagnosis, ...] = ()

    def of(self, server: str) -> "HealthEvidence":
        """Return the health of one server."""
        missing = tuple(item for item in self.missing if item.server in ("", server))
        names = {item.name for item in missing}
        seen = tuple(part.name for part in PARTS if part.name not in names)
        suspects = tuple(suspect for suspect in self.suspects if suspect.diagnosis.server == server)
        ignored = tuple(diagnosis for diagnosis in self.ignored if diagnosis.server == server)
        return HealthEvidence(seen, missing, suspects, ignored)

    @property
    def lacking(self) -> tuple[str, ...]:
        """The names of what was not seen, each once."""
        return tuple(dict.fromkeys(missing.name for missing in self.missing))


OF_A_LOG = HealthEvidence(missing=tuple(NotSeen(part.name, part.lacks, "") for part in PARTS))
"""Health by a log alone, which shows failures."""


def health(
    diagnoses: Sequence[Diagnosis], progress: Sequence[Progress], queries: QueryCache, not_measured: Sequence[str] = ()
) -> HealthEvidence:
    """Judge the parts of health on every server that is still there, and the incidents that stay possible.

    `not_measured` are the families of telemetry that health does not need and no server has: an incident that only they
    would decide is not missing.
    """
    lately = queries.live("30s")
    judged = {instance_name(engine.subject) for engine in progress}  # a headless node has no page of its own
    missing = []
    for part in PARTS:
        rows = queries.ask(part.evidence, part.per, lately)
        for subject in queries.subjects(part.per):
            row, name = rows.of(subject), instance_name(subject)
            if (row is None or np.isnan(row[-1])) and name in judged and not queries.is_gone(subject):
                missing.append(NotSeen(part.name, part.lacks, name))
    present = {diagnosis.server for diagnosis in diagnoses if diagnosis.is_alarming}
    missing += [
        NotSeen(PARTS[0].name, "progress of the requests in flight", instance_name(engine.subject))
        for engine in progress
        if engine.state in FAILED and instance_name(engine.subject) not in present
    ]
    missing += _unshown_engines(progress, queries, lately)
    missing += _breaks(diagnoses, queries, has_log="log" not in not_measured)
    missing += _gaps(queries) if "log" in not_measured else ()
    for part, condition, wanted in CONTRADICTED:
        rows, limit = queries.ask(condition.signal, INSTANCE, lately), queries.contract.limit(condition.limit)
        for engine in progress:
            row, name = rows.of(engine.subject), instance_name(engine.subject)
            if name not in present and row is not None and COMPARE[condition.op](row[-1], limit):
                lacks = wanted.format(value=quantity(row[-1], condition.signal.unit))
                missing.append(NotSeen(part.name, lacks, name))

    suspects: list[Suspect] = []
    watched = queries.span + queries.source.interval
    uncollected = [re.compile(rf"\b{FAMILIES[name].metrics}") for name in not_measured]
    for diagnosis in sorted(diagnoses, key=lambda each: not RANK[each.severity]):
        if diagnosis.server in present or not (signs := _signs(diagnosis)):  # what is present explains them
            continue
        if not RANK[diagnosis.severity] and not any(_is_alike(diagnosis, each.diagnosis) for each in suspects):
            continue  # alone, an info leaves a server healthy
        if any(_has_just_ended(other, diagnosis, queries) for other in diagnoses):
            continue
        signals = dict.fromkeys(r.condition.signal for r in diagnosis.symptoms if r.holds is None)
        lacking = tuple(signal.name for signal in signals)
        is_short = queries.has_few_scrapes or watched < shortest_look(diagnosis.incident)
        if harm := [] if is_short else [*_harm(diagnosis, queries)]:
            first: dict[str, Reading] = {}
            for reading in (*harm, *signs):
                first.setdefault(reading.condition.signal.name, reading)
            suspects.append(Suspect(diagnosis, tuple(first.values()), lacking, _unseen(signals, diagnosis, queries)))
        elif any(signal.needs or not _lacks_only(uncollected, signal, diagnosis, queries) for signal in signals):
            missing.append(NotSeen(diagnosis.incident.id, ", ".join(lacking), diagnosis.server))
    names = {item.name for item in missing}
    return HealthEvidence(
        seen=tuple(part.name for part in PARTS if part.name not in names),
        missing=tuple(dict.fromkeys(missing)),
        suspects=tuple(sorted(suspects, key=lambda suspect: -RANK[suspect.diagnosis.severity])),
    )


def _is_alike(other: Diagnosis, suspect: Diagnosis) -> bool:
    """Return whether another incident looks like a suspect, where that is."""
    names = {look.incident for look in suspect.incident.looks_like}
    return other.incident.id in names and agree(other.subject, suspect.subject)


def _has_just_ended(other: Diagnosis, suspect: Diagnosis, queries: QueryCache) -> bool:
    """Return whether another incident with the signs of a suspect has ended, and is in the suspect's window still."""
    is_over = _is_alike(other, suspect) and other.state == "present" and not other.ongoing
    began = queries.source.instants[-1] / 1000 - queries.window(suspect.incident).seconds
    return is_over and (other.until or 0) > began


def _unshown_engines(progress: Sequence[Progress], queries: QueryCache, lately: Window) -> Iterable[NotSeen]:
    """Yield the engines that have been idle and of which nothing but the page of their API server is seen lately."""
    idle = [engine.subject for engine in progress if engine.state == "idle"]
    if not idle:
        return
    lives = [queries.ask(signal, INSTANCE, lately) for signal in LIVES]
    lives.append(queries.ask(PARTS[0].evidence, INSTANCE, queries.live(RECENT_TOKENS)))
    for subject in idle:
        if not any((row := rows.of(subject)) is not None and row[-1] > 0 for rows in lives):
            yield NotSeen(PARTS[0].name, "an answer from /health", instance_name(subject))


def _breaks(diagnoses: Sequence[Diagnosis], queries: QueryCache, *, has_log: bool) -> Iterable[NotSeen]:
    """Yield what the pages of the last 15 minutes leave open: how the requests in flight before a restart ended if no
    log tells, and what happened during a gap that is as long as an outage, after which the same process answers."""
    instants = queries.source.instants[queries.source.instants >= queries.source.instants[-1] - RECENT * 1000]
    ended = queries.ask("$samples_of_a_former_process", INSTANCE, queries.live("5m"), instants)
    starts, loads = (queries.ask(one, INSTANCE, queries.live("5m"), instants) for one in (START_TIME, LAST_IN_FLIGHT))
    for diagnosis in (each for each in diagnoses if each.incident.crash is not None and each.state == "absent"):
        row, began, load = (rows.of(diagnosis.subject) for rows in (ended, starts, loads))
        goes_on = [
            began is not None and bool(np.nanmax(began[at:], initial=0) <= began[at] + 1.0)
            for at in range(len(instants))
        ]
        for since, until in ((begin, end) for begin, end in diagnosis.episodes if begin is not None):
            is_long = until - since >= seconds(diagnosis.incident.hold) and until * 1000 >= instants[0]
            if is_long and goes_on[int(np.searchsorted(instants, since * 1000))]:
                lacks = f"pages of {clock.span(since, until)}: the same process answers again"
                yield NotSeen(PARTS[0].name, lacks, diagnosis.server)
        for at in () if row is None or has_log else np.flatnonzero((row[1:] > 0) > (row[:-1] > 0)).tolist():
            if not goes_on[at] and load is not None and load[at] > 0:
                started = float(instants[at + 1] / 1000 if began is None else np.nanmax(began[at:]))
                requests = plural(round(load[at]), "request")
                lacks = f"the log of the restart at {clock(started)}, before which up to {requests} were in flight"
                yield NotSeen("requests before a restart", lacks, diagnosis.server)


def _gaps(queries: QueryCache) -> Iterable[NotSeen]:
    """Yield the gaps without pages, longer than any window, behind which another process answers lately: its
    predecessor had requests in flight on its last page, or most of the time is missing."""
    instants = queries.source.instants
    starts = queries.ask(START_TIME, INSTANCE, queries.live("5m"), instants)
    loads = queries.ask(LAST_IN_FLIGHT, INSTANCE, queries.holding(queries.source.interval), instants)
    for subject in queries.subjects(INSTANCE):
        start, load = starts.of(subject), loads.of(subject)
        if start is None or load is None:
            continue
        for last, first in pairwise(np.flatnonzero(~np.isnan(load)).tolist()):
            gap = instants[first] - instants[last]
            is_recent = gap > 300_000 and instants[first] >= instants[-1] - RECENT * 1000
            if is_recent and start[first] > start[last] + 1 and (load[last] > 0 or gap > queries.span * 500):
                span = clock.span(instants[last] / 1000, instants[first] / 1000)
                requests = plural(round(load[last]), "request")
                lacks = f"pages of {span}, in which a process with {requests} in flight ended"
                yield NotSeen("requests before a restart", lacks, instance_name(subject))


def _lacks_only(families: Sequence[re.Pattern[str]], signal: Signal, diagnosis: Diagnosis, queries: QueryCache) -> bool:
    """Return True if a signal has no value because these families of telemetry are not collected, and for nothing else.

    With them it might have one; where other samples that it needs are missing as well, it would not.
    """

    def has_samples(selector: Selector) -> bool:
        return any(family.search(selector.text) for family in families) or _is_seen(selector.text, diagnosis, queries)

    if not any(family.search(expanded(signal.promql)) for family in families):
        return False
    return may_have_value(_written(signal, diagnosis, queries).node, has_samples)


def _unseen(signals: Iterable[Signal], diagnosis: Diagnosis, queries: QueryCache) -> tuple[str, ...]:
    """Return the metrics that signals read by name and their server has no sample of, without those of the past."""
    read = {name for signal in signals for name in metric_names(_written(signal, diagnosis, queries))}
    named = (name for name in read if not name.startswith("{"))
    unseen = {SUFFIX.sub("", name) for name in named if not _is_seen(name, diagnosis, queries)}
    current = (name for name in unseen if known().get(name, ("", newest()))[1] == newest())
    return tuple(sorted(current, key=lambda name: (not name.startswith(OWN), name)))


def _is_seen(selector: str, diagnosis: Diagnosis, queries: QueryCache) -> bool:
    query = f"count by (instance) (last_over_time({selector}[$window]))"
    rows = queries.ask(query, INSTANCE, queries.whole, queries.source.instants[-1:])
    return rows.of((("instance", diagnosis.server),)) is not None


def _written(signal: Signal, diagnosis: Diagnosis, queries: QueryCache) -> Expression:
    window = queries.window(diagnosis.incident).text
    return parse(formula(signal, diagnosis.incident.per, window, queries.contract).written_out())


def _signs(diagnosis: Diagnosis) -> list[Reading]:
    """Return what was measured of an unknown incident and shows it."""
    if diagnosis.state != "unknown" or diagnosis.brief:
        return []
    incident = diagnosis.incident  # conditions that rule a look-alike out hold in health, too
    return [
        reading
        for conditions, readings in ((incident.symptoms, diagnosis.symptoms), (incident.supports, diagnosis.supports))
        for condition, reading in zip(conditions, readings, strict=False)
        if reading.holds and condition.op.startswith(">") and not condition.signal.context
    ]


def _harm(diagnosis: Diagnosis, queries: QueryCache) -> Iterable[Reading]:
    """Yield the conditions that show that the users of this server are affected, over the incident's own window."""
    window = queries.window(diagnosis.incident)
    for part in PARTS:
        for condition in part.harm:
            limit = queries.contract.limit(condition.limit)
            for _, row in queries.ask(condition.signal, part.per, window).like(diagnosis.subject):
                if not np.isnan(row[-1]) and COMPARE[condition.op](row[-1], limit):
                    history = [None if np.isnan(value) else float(value) for value in row]
                    yield Reading(condition, history[-1], limit, True, history)
                    break
