"""The verdict of health: which of its parts were seen, and which incidents may be there although they are unknown.

Finding no incident is not health: `HealthEvidence.missing` names what was not seen. An unknown incident whose measured
symptoms all hold is a suspect. If users are affected as well, it is reported; otherwise it was not seen, too.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from diag.core.formatting import plural
from diag.core.incident import RANK
from diag.core.subjects import Subject, instance_name
from diag.diagnosis.decision_table import COMPARE, RECENT, Reading, shortest_look
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.progress import FAILED, Progress
from diag.diagnosis.query_cache import QueryCache, Window
from diag.diagnosis.telemetry_checks import FAMILIES
from diag.knowledge.formulas import expanded
from diag.knowledge.health import GOOD, HEALTH, PARTS, HealthPart

INSTANCE = ("instance",)
LAST_IN_FLIGHT = "$running_last + $waiting_last"
"""Requests on the last page before a restart: a server that was drained had some on the pages before."""


class NotSeen(NamedTuple):
    """Missing evidence of health: a part, or an incident that stays possible; the telemetry that lacks; the server."""

    name: str
    lacks: str
    server: str


class Suspect(NamedTuple):
    """An unknown incident whose measured symptoms all hold, on a server whose users are affected.

    `signs` are the readings that show it, those of the impact on users first; `missing` are signals without a value.
    """

    diagnosis: Diagnosis
    signs: tuple[Reading, ...]
    missing: tuple[str, ...]


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
        missing = tuple(each for each in self.missing if each.server in ("", server))
        names = {each.name for each in missing}
        seen = tuple(part.name for part in PARTS if part.name not in names)
        suspects = (each for each in self.suspects if instance_name(each.diagnosis.subject) == server)
        ignored = (each for each in self.ignored if instance_name(each.subject) == server)
        return HealthEvidence(seen, missing, tuple(suspects), tuple(ignored))

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
    missing = [
        NotSeen(part.name, part.lacks, instance_name(subject))
        for part in PARTS
        for subject in _blind(part, lately, queries)
        if instance_name(subject) in judged
    ]
    present = {instance_name(each.subject) for each in diagnoses if each.state == "present" and RANK[each.severity]}
    missing += [
        NotSeen(PARTS[0].name, "progress of the requests in flight", instance_name(engine.subject))
        for engine in progress
        if engine.state in FAILED and instance_name(engine.subject) not in present
    ]
    if "log" in not_measured:
        missing += _unexplained_restarts(diagnoses, queries)
    answers = queries.ask(HEALTH, INSTANCE, lately)
    for engine in progress:
        status = answers.of(engine.subject)
        if status is not None and not np.isnan(status[-1]) and status[-1] != GOOD:
            lacks = f"an answer of 200 from /health, which answered {status[-1]:.0f}"
            missing.append(NotSeen(PARTS[0].name, lacks, instance_name(engine.subject)))

    suspects = []
    watched = queries.span + queries.source.interval
    uncollected = [re.compile(rf"\b{FAMILIES[name].metrics}") for name in not_measured]
    for diagnosis in diagnoses:
        name = instance_name(diagnosis.subject)
        if name in present or not (signs := _signs(diagnosis)):  # the incident that is present explains them
            continue
        signals = dict.fromkeys(r.condition.signal for r in diagnosis.symptoms if r.holds is None)
        lacking = tuple(signal.name for signal in signals)
        is_short = queries.has_few_scrapes or watched < shortest_look(diagnosis.incident)
        if harm := () if is_short else tuple(_harm(diagnosis, queries)):
            suspects.append(Suspect(diagnosis, tuple(_each_once((*harm, *signs))), lacking))
        elif any(
            signal.needs or not any(family.search(expanded(signal.promql)) for family in uncollected)
            for signal in signals
        ):
            missing.append(NotSeen(diagnosis.incident.id, ", ".join(lacking), name))
    found = tuple(dict.fromkeys(missing))
    names = {each.name for each in found}
    return HealthEvidence(
        seen=tuple(part.name for part in PARTS if part.name not in names),
        missing=found,
        suspects=tuple(sorted(suspects, key=lambda suspect: -RANK[suspect.diagnosis.severity])),
    )


def _blind(part: HealthPart, window: Window, queries: QueryCache) -> Iterable[Subject]:
    """Yield the subjects on which a part has no evidence at the last instant; they exist still."""
    rows = queries.ask(part.evidence, part.per, window)
    for subject in queries.subjects(part.per):
        row = rows.of(subject)
        if not queries.is_gone(subject) and (row is None or np.isnan(row[-1])):
            yield subject


def _unexplained_restarts(diagnoses: Sequence[Diagnosis], queries: QueryCache) -> Iterable[NotSeen]:
    """Yield the restarts of the last 15 minutes that may have cut off requests: no page shows how those ended."""
    step, end = round(queries.source.interval * 1000), float(queries.source.instants[-1]) / 1000
    for diagnosis in diagnoses:
        if diagnosis.incident.crash is None or diagnosis.state != "absent":
            continue
        began = (since for since, _ in diagnosis.episodes if since is not None and end - since <= RECENT)
        for at in (np.array([round(since * 1000) - step]) for since in began):
            rows = queries.ask(LAST_IN_FLIGHT, INSTANCE, queries.live("15s"), at).like(diagnosis.subject)
            cut = max((row[-1] for _, row in rows if not np.isnan(row[-1])), default=0.0)
            if cut:
                lacks = f"the log of a restart with up to {plural(round(cut), 'request')} in flight"
                yield NotSeen("requests before a restart", lacks, instance_name(diagnosis.subject))


def _signs(diagnosis: Diagnosis) -> list[Reading]:
    """Return what was measured of an unknown incident and shows it; an info leaves a server healthy."""
    if diagnosis.state != "unknown" or diagnosis.brief or not RANK[diagnosis.severity]:
        return []
    incident = diagnosis.incident  # conditions that rule a look-alike out hold in health, too
    own = ((incident.symptoms, diagnosis.symptoms), (incident.supports, diagnosis.supports))
    telling = (
        readings[at]
        for conditions, readings in own
        for at, condition in enumerate(conditions)
        if condition.op.startswith(">") and not condition.signal.context
    )
    return [reading for reading in telling if reading.holds]


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


def _each_once(readings: Iterable[Reading]) -> Iterable[Reading]:
    """Yield the readings, the first one of each signal."""
    first: dict[str, Reading] = {}
    for reading in readings:
        first.setdefault(reading.condition.signal.name, reading)
    return first.values()
