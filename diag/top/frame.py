"""One picture of all servers: what the doctor's engine says of them now, and their numbers of the last minutes."""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from diag.core.formatting import clock, quantity
from diag.core.incident import RANK
from diag.core.subjects import Instants, Subject
from diag.diagnosis.decision_table import LOOK
from diag.diagnosis.diagnose import Diagnosis, without_the_past
from diag.diagnosis.progress import NotJudged
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Finding, Report, verdict_of
from diag.report import sentences as words
from diag.report.summary import FleetRow, fleet_rows
from diag.top.columns import MEASURES, measured

POINTS = 60
"""Values of a sparkline: five minutes at one scrape every 5 s."""
Numbers = Mapping[str, float]


class ServerRow(NamedTuple):
    """One server; `since` is when the worst that holds on it began, unix seconds, with `before` where it did earlier.

    `runs` says which release and model it is. `values` are those of `MEASURES` that are known, `history` the last ones
    of each, None for holes.
    """

    instance: str
    runs: str
    verdict: str
    state: str
    incidents: tuple[str, ...]
    since: float | None
    before: bool
    values: Numbers
    history: Mapping[str, Sequence[float | None]]
    throttled: tuple[str, ...] = ()


class Frame(NamedTuple):
    """What is shown until the next one; `at` is the time of the last samples, unix seconds.

    `queries` are those that it was judged by; `lost` says why there is nothing newer.
    """

    at: float
    report: Report
    queries: QueryCache
    rows: tuple[ServerRow, ...]
    lost: str = ""


class Histories:
    """The last values of each measure of each server; a server that is gone is forgotten."""

    def __init__(self, points: int = POINTS) -> None:
        self._points = points
        self._values: dict[str, dict[str, deque[float | None]]] = {}

    def add(self, queries: QueryCache, instants: Instants) -> None:
        """Add the values at these instants, which are later than those before."""
        found = measured(queries, instants)
        servers = {name for rows in found.values() for name in rows}
        self._values = {name: self._values.get(name) or self._empty() for name in servers}
        for key, rows in found.items():
            for name, values in self._values.items():
                row = rows.get(name)
                values[key] += [None] * len(instants) if row is None else [_known(value) for value in row.tolist()]

    def _empty(self) -> dict[str, deque[float | None]]:
        return {key: deque(maxlen=self._points) for key in MEASURES}

    def of(self, server: str) -> Mapping[str, Sequence[float | None]]:
        """The values of one server, the last ones at the end."""
        return {key: tuple(values) for key, values in self._values.get(server, {}).items()}


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


class Onsets:
    """Since when each incident holds, over many judgements: one sees no further back than its samples."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, Subject], tuple[float, bool]] = {}

    def carried(self, report: Report) -> Report:
        """The report of now: what has ended is absent, what goes on began when it was first seen."""
        by_key = {_key(finding.diagnosis): finding for finding in report.findings}
        now = without_the_past([finding.diagnosis for finding in report.findings])
        findings = tuple(self._finding(by_key[_key(diagnosis)]._replace(diagnosis=diagnosis)) for diagnosis in now)
        kept = {_key(finding.diagnosis) for finding in findings if finding.diagnosis.state != "absent"}
        self._since = {key: since for key, since in self._since.items() if key in kept}
        return report._replace(findings=findings, verdict=verdict_of(findings, report.not_judged))

    def _finding(self, finding: Finding) -> Finding:
        diagnosis = finding.diagnosis
        if diagnosis.state != "present":
            return Finding(diagnosis)
        began = diagnosis.one_by_one[-1].since
        new = (diagnosis.watched_since, True) if began is None else (began, False)
        since, before = self._since[_key(diagnosis)] = min(new, self._since.get(_key(diagnosis), new))
        return finding._replace(diagnosis=_began(diagnosis, since, before))


def _key(diagnosis: Diagnosis) -> tuple[str, Subject]:
    return diagnosis.incident.id, diagnosis.subject


def _began(diagnosis: Diagnosis, since: float, before: bool) -> Diagnosis:
    known = None if before else since
    until = diagnosis.episodes[-1][1]
    watched = diagnosis.instants[0] - since if before else diagnosis.watched
    return diagnosis._replace(since=known, episodes=((known, until),), watched=watched)


def too_early(report: Report, seen: float) -> Report:
    """The report of the first seconds: nothing is said to be present before as much was seen as the doctor looks at."""
    findings = tuple(map(_undecided, report.findings))
    why = f"too little seen: {quantity(round(seen), 'seconds')} of the {quantity(LOOK, 'seconds')} that a verdict needs"
    return report._replace(findings=findings, not_judged=(NotJudged(why),), verdict="unknown")


def _undecided(finding: Finding) -> Finding:
    diagnosis = finding.diagnosis
    if diagnosis.state != "present":
        return finding
    return Finding(diagnosis._replace(state="unknown", primary=False, explained_by=None))


def rows(report: Report, histories: Histories, throttled: Mapping[str, tuple[str, ...]]) -> tuple[ServerRow, ...]:
    """A row for each server, the worst first; `throttled` is why the clocks of its GPUs are held down."""
    worst: dict[str, Diagnosis] = {}
    for diagnosis in (finding.diagnosis for finding in report.present if RANK[finding.diagnosis.severity]):
        worst.setdefault(words.instance(diagnosis.subject), diagnosis)
    names = frozenset(words.instances(report))
    runs = {about(line, names): line for line in report.observed.servers}
    not_judged = {words.instance(each.subject) for each in report.not_judged}
    return tuple(
        _row(server, runs.get(server.name, ""), worst.get(server.name), histories.of(server.name))._replace(
            verdict="unknown" if server.verdict == "healthy" and not_judged & {"", server.name} else server.verdict,
            throttled=throttled.get(server.name, ()),
        )
        for server in fleet_rows(report, clock)
    )


def about(sentence: str, names: Collection[str]) -> str:
    """Which of these servers a sentence of a report begins with; "" where it is about all of them."""
    name = sentence.partition(": ")[0].partition(" ")[0]
    return name if name in names else ""


def _row(
    server: FleetRow, runs: str, worst: Diagnosis | None, history: Mapping[str, Sequence[float | None]]
) -> ServerRow:
    last = {key: values[-1] for key, values in history.items() if values}
    return ServerRow(
        instance=server.name,
        runs=runs,
        verdict=server.verdict,
        state=server.states,
        incidents=tuple(filter(None, server.incidents.split(", "))),
        since=None if worst is None else worst.watched_since if worst.since is None else worst.since,
        before=worst is not None and worst.since is None,
        values={key: value for key, value in last.items() if value is not None},
        history=history,
    )
