"""One frame of the view: a row for each server, with its present verdict and the numbers of the last minutes."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from diag.core.formatting import clock, quantity
from diag.core.incident import RANK
from diag.core.subjects import UNKNOWN, Instants, Subject, instance_name, label_value
from diag.diagnosis.decision_table import LOOK
from diag.diagnosis.diagnose import Diagnosis, without_the_past
from diag.diagnosis.progress import NotJudged
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Finding, Report, verdict_of
from diag.diagnosis.vitals import MEASURES, NOW, SERVING, measured
from diag.report import sentences as words
from diag.report.summary import fleet_rows

POINTS = 60
"""Values of a sparkline: five minutes at one scrape every 5 s."""
REASONS = 'reason!~"gpu_idle|applications_clocks"'
THROTTLED = (
    f"max by (instance, gpu, reason) (max_over_time(diag_gpu_throttle_active{{{REASONS}}}[$window]){SERVING}"
    f" or rate(diag_gpu_throttle_seconds_total{{{REASONS}}}[$window]){SERVING}) > 0"
)
"""Throttle reasons of each GPU, except idle and user-set clocks."""


# -- the numbers of a server ------------------------------------------------------------------------------------------


class Histories:
    """The last `POINTS` values of each measure of each server; a server without samples is dropped."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, deque[float | None]]] = {}

    def add(self, queries: QueryCache, instants: Instants) -> None:
        """Add the values at these instants, which must be later than the earlier ones."""
        found = measured(queries, instants)
        self._values = {
            name: self._values.get(name) or {key: deque(maxlen=POINTS) for key in MEASURES}
            for name in {name for servers in found.values() for name in servers}
        }
        for name, history in self._values.items():
            for key, servers in found.items():
                new = servers[name].tolist() if name in servers else [math.nan] * len(instants)
                history[key] += [None if math.isnan(value) else value for value in new]

    def of_server(self, name: str) -> Mapping[str, Sequence[float | None]]:
        """Return the values of one server by measure, the latest at the end."""
        return {key: tuple(values) for key, values in self._values.get(name, {}).items()}


def throttle_reasons(queries: QueryCache, instants: Instants) -> dict[str, tuple[str, ...]]:
    """Return the throttle reasons at the last instant by server; a power cap, which is usual, comes last."""
    found: dict[str, set[str]] = {}
    for subject, values in queries.ask(THROTTLED, (), queries.holding(NOW), instants[-1:]).items():
        if not np.isnan(values[-1]):
            found.setdefault(instance_name(subject), set()).add(label_value(subject, "reason") or UNKNOWN)
    return {
        name: tuple(sorted(reasons, key=lambda reason: (reason == "sw_power_cap", reason)))
        for name, reasons in found.items()
    }


# -- the verdict of now -----------------------------------------------------------------------------------------------


class Onsets:
    """Remembers over many judgements when each incident began: one judgement sees no further back than its samples."""

    def __init__(self) -> None:
        self._onsets: dict[tuple[str, Subject], tuple[float, bool]] = {}

    def carry_over(self, report: Report) -> Report:
        """Return the report of now: an ended incident is absent, an ongoing one began when it was first seen."""
        by_key = {_key(finding.diagnosis): finding for finding in report.findings}
        findings, onsets = [], {}
        for diagnosis in without_the_past([finding.diagnosis for finding in report.findings]):
            key, finding = _key(diagnosis), Finding(diagnosis)
            known = self._onsets.get(key)
            if diagnosis.state == "present":
                began = diagnosis.one_by_one[-1].since
                new = (diagnosis.watched_since, True) if began is None else (began, False)
                start, before = known = min(new, known or new)
                since = None if before else start
                watched = diagnosis.instants[0] - start if before else diagnosis.watched
                episodes = ((since, diagnosis.episodes[-1][1]),)
                finding = by_key[key]._replace(
                    diagnosis=diagnosis._replace(since=since, episodes=episodes, watched=watched)
                )
            if known and diagnosis.state != "absent":
                onsets[key] = known
            findings.append(finding)
        self._onsets = onsets
        return report._replace(findings=tuple(findings), verdict=verdict_of(findings, report.not_judged))


def _key(diagnosis: Diagnosis) -> tuple[str, Subject]:
    return diagnosis.incident.id, diagnosis.subject


def without_verdict(report: Report, seen: float) -> Report:
    """Return the report of the first `seen` seconds: present incidents are unknown until the doctor has enough data."""
    findings = tuple(
        Finding(finding.diagnosis._replace(state="unknown", primary=False, explained_by=None))
        if finding.diagnosis.state == "present"
        else finding
        for finding in report.findings
    )
    why = f"too little seen: {quantity(round(seen), 'seconds')} of the {quantity(LOOK, 'seconds')} that a verdict needs"
    return report._replace(findings=findings, not_judged=(NotJudged(why),), verdict="unknown")


# -- the rows ---------------------------------------------------------------------------------------------------------


class ServerRow(NamedTuple):
    """One server; its worst present incident began at `since`, unix seconds, or earlier if `before` is set.

    `runs` describes release and model. `values` are the known ones of `MEASURES`, `history` the last ones of each, None
    for holes.
    """

    instance: str
    runs: str
    verdict: str
    state: str
    incidents: tuple[str, ...]
    since: float | None
    before: bool
    values: Mapping[str, float]
    history: Mapping[str, Sequence[float | None]]
    throttled: tuple[str, ...] = ()


class Frame(NamedTuple):
    """The content of the view until the next frame; `at` is the time of the last samples, unix seconds.

    `queries` answered the judgement; `lost` is the reason why no newer samples arrive.
    """

    at: float
    report: Report
    queries: QueryCache
    rows: tuple[ServerRow, ...]
    lost: str = ""


def server_rows(
    report: Report, histories: Histories, throttled: Mapping[str, tuple[str, ...]]
) -> tuple[ServerRow, ...]:
    """Return a row for each server, the worst first; `throttled` are the throttle reasons by server."""
    worst: dict[str, Diagnosis] = {}
    for diagnosis in (finding.diagnosis for finding in report.present if RANK[finding.diagnosis.severity]):
        worst.setdefault(instance_name(diagnosis.subject), diagnosis)
    runs = {server.name: line for server, line in zip(report.observed.servers, words.servers(report), strict=True)}

    rows = []
    for server in fleet_rows(report, clock):
        incident, history = worst.get(server.name), histories.of_server(server.name)
        last = {key: values[-1] for key, values in history.items() if values}
        since = incident and (incident.watched_since if incident.since is None else incident.since)
        rows.append(
            ServerRow(
                instance=server.name,
                runs=runs.get(server.name, ""),
                verdict=server.verdict,
                state=server.states,
                incidents=tuple(filter(None, server.incidents.split(", "))),
                since=since,
                before=incident is not None and incident.since is None,
                values={key: value for key, value in last.items() if value is not None},
                history=history,
                throttled=throttled.get(server.name, ()),
            )
        )
    return tuple(rows)
