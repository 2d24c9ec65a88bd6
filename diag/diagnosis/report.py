"""The diagnosis of a server or a fleet as data: everything that a report prints.

A `Snapshot` is a report with the queries that it was made from; `Transitions` are the changes from report to report.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from diag.core.formatting import number
from diag.core.incident import RANK
from diag.core.log_events import LogEnding
from diag.core.subjects import Floats, Subject, instance_name
from diag.diagnosis.diagnose import Diagnosis, Quote, State
from diag.diagnosis.health import HealthEvidence
from diag.diagnosis.progress import INSTANCE, NotJudged, Progress
from diag.diagnosis.proposals import Proposal, Running
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.shared_labels import SharedLabel
from diag.diagnosis.telemetry_checks import FAMILIES, TelemetryDefect
from diag.diagnosis.vitals import CeilingShares, Vitals
from diag.knowledge.formulas import expanded
from diag.knowledge.known_failures import KnownFailure
from diag.sources.observation import PodContainer

if TYPE_CHECKING:
    from diag.diagnosis.roll_call import RollCall

CONFIRMATIONS = 2
"""Observations in a row that must agree before a change is reported."""
FEWEST_REQUESTS = 3
"""Requests below which the signals have no value either."""
SAME_LOAD = 1.33
"""Runs of one load differ by up to 1.21 in requests in flight (engine_stalled, healthy), others from 1.36 on."""
SAME_LENGTHS = 1.5
"""Runs of one load differ by up to 1.07 in mean lengths (kv_cascade, kv_cascade_base), by more if few are long."""
Key = tuple[str, Subject]
Verdict = Literal["healthy", "no_incident", "warning", "critical", "unknown"]


class ObservedServer(NamedTuple):
    """A server with its vLLM release and its model, "" if unknown."""

    name: str
    version: str
    model: str


class Observed(NamedTuple):
    """The source of the evidence; `start` and `end` are unix seconds.

    `defects` are those of the telemetry; `notes` are sentences of the source. `mixed` are servers, each
    with a metric whose series lack the label that tells their parts apart. `endings` are servers of which only a log is
    known, each with how the log ends. `containers` are the running ones of servers in pods, by the server's name.
    """

    source: str
    target: str
    start: float
    end: float
    scrapes: int
    failed_scrapes: int
    servers: tuple[ObservedServer, ...] = ()
    notes: tuple[str, ...] = ()
    not_measured: tuple[str, ...] = ()
    defects: tuple[TelemetryDefect, ...] = ()
    mixed: tuple[tuple[str, str], ...] = ()
    endings: tuple[tuple[str, LogEnding], ...] = ()
    containers: tuple[tuple[str, PodContainer], ...] = ()


class NormalReading(NamedTuple):
    """The speed of a server compared with the normal speed at its load: evidence, never a verdict.

    `normal` is the median of `windows` windows at this load (`given`: texts with their numbers) and `spread` their
    robust standard deviation; `worse` is the direction that is bad for users; `against` names the baseline, `version`
    its release; `notable` is whether the difference exceeds chance and the usual spread.
    """

    subject: Subject
    measure: str
    unit: str
    worse: Literal["higher", "lower"]
    value: float
    normal: float
    spread: float
    given: tuple[tuple[str, float], ...]
    against: str
    version: str
    own_version: str
    windows: int
    notable: bool

    @property
    def ratio(self) -> float | None:
        """The value as a multiple of the normal one."""
        return self.value / self.normal if self.normal else None

    @property
    def load(self) -> str:
        """The load at which both were compared."""
        return " and ".join(text.format(number(value)) for text, value in self.given)


class Normality(NamedTuple):
    """The comparison with a baseline file, or with peers (""); `reasons` say why some servers could not be compared."""

    file: str = ""
    readings: tuple[NormalReading, ...] = ()
    reasons: tuple[str, ...] = ()


class Finding(NamedTuple):
    """A diagnosis with its fixes, and the log lines that decide it.

    `uncomputed` are fixes whose number needs telemetry that is missing; `failure` is the known failure that the quoted
    line shows. `is_of_start` is true if a log shows that a start failed: no server has to be taken out of rotation.
    """

    diagnosis: Diagnosis
    proposals: tuple[Proposal, ...] = ()
    relaunch: str | None = None
    uncomputed: tuple[Proposal, ...] = ()
    quotes: tuple[Quote, ...] = ()
    failure: KnownFailure | None = None
    is_of_start: bool = False

    @property
    def basis(self) -> str:
        """How sure the cause is that a log names, "" if the incident was measured and no line is quoted."""
        if self.failure:
            return self.failure.basis
        return "guess" if self.quotes and any(each.is_search for each in self.proposals) else ""


class Report(NamedTuple):
    """The whole diagnosis.

    `not_judged` has the reasons why finding no incident does not mean health: engines whose forward progress is
    unknown, incidents that could not be judged because the source refused queries or the observation was too short.
    `gone` names vanished servers, `ceilings` has each engine's share of the ceilings of its GPUs, `shared` the labels
    that the ill servers of a fleet have and its healthy ones lack. `slo_is_default` is True if the site has set no SLO.
    `health` has the parts of health that were seen, and the unknown incidents that show in what was measured. `vitals`
    has the vital signs of a few servers; `roll_calls` has the stacks of their processes with --stacks,
    `found_note` what a diag.toml of the working folder has changed.
    """

    observed: Observed
    verdict: Verdict
    progress: tuple[Progress, ...]
    findings: tuple[Finding, ...]
    not_judged: tuple[NotJudged, ...]
    contract: tuple[str, ...]
    health: HealthEvidence = HealthEvidence()
    gone: tuple[str, ...] = ()
    normality: Normality = Normality()
    ceilings: tuple[CeilingShares, ...] = ()
    shared: tuple[SharedLabel, ...] = ()
    slo_is_default: bool = False
    vitals: tuple[Vitals, ...] = ()
    roll_calls: tuple["RollCall", ...] = ()
    found_note: str = ""

    @property
    def present(self) -> tuple[Finding, ...]:
        """The incidents that hold, the primary ones first."""
        return tuple(finding for finding in self.findings if finding.diagnosis.state == "present")

    @property
    def brief(self) -> tuple[Diagnosis, ...]:
        """The incidents with an impact that held for too short to count, beside no other one; a restart is none."""
        held = (finding.diagnosis for finding in self.present)
        present = [one for one in held if RANK[one.incident.severity] and not one.incident.burns]
        short = (one for one in self.diagnoses if one.state == "absent" and one.episodes and not one.incident.outage)
        return tuple(
            one._replace(until=one.episodes[-1][1])
            for one in short
            if RANK[one.incident.severity]
            and not any(
                (d.since or 0) <= one.episodes[-1][1] and (one.episodes[0][0] or 0) <= (d.end or 0) for d in present
            )
        )

    @property
    def is_alarming(self) -> bool:
        """True if an incident with an impact is present."""
        return any(diagnosis.is_alarming for diagnosis in self.diagnoses)

    @property
    def undecided(self) -> tuple[Diagnosis, ...]:
        """The incidents that are unknown although each family of telemetry that they need was collected."""
        families = [rf"\b{FAMILIES[name].metrics}" for name in self.observed.not_measured]

        def needs_family(diagnosis: Diagnosis) -> bool:
            lacking = [reading.condition.signal for reading in diagnosis.symptoms if reading.value is None]
            formulas = [expanded(signal.promql) for signal in lacking]
            return any(re.search(family, formula) for family in families for formula in formulas)

        unknown = (diagnosis for diagnosis in self.diagnoses if diagnosis.state == "unknown")
        return tuple(diagnosis for diagnosis in unknown if not needs_family(diagnosis))

    @property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """The incidents of the findings, as they were judged."""
        return tuple(finding.diagnosis for finding in self.findings)

    @property
    def checked(self) -> frozenset[str]:
        """The incidents that could be judged on some subject."""
        return frozenset(diagnosis.incident.id for diagnosis in self.diagnoses if diagnosis.state != "unknown")

    @property
    def judged_servers(self) -> frozenset[str]:
        """The servers on which some incident could be judged, or that the conditions of a large fleet clear."""
        states: dict[str, set[State]] = {instance_name(why.subject): {"unknown"} for why in self.not_judged}
        for diagnosis in self.diagnoses:
            states.setdefault(diagnosis.server, set()).add(diagnosis.state)
        return frozenset(name for name in self.servers if states.get(name) != {"unknown"})

    @property
    def servers(self) -> tuple[str, ...]:
        """The sorted names of all judged servers; in a large fleet, some were judged for progress only."""
        subjects = [item.subject for items in (self.diagnoses, self.progress, self.not_judged) for item in items]
        logs = dict(self.observed.endings)
        return tuple(sorted({*map(instance_name, filter(None, subjects)), *self.gone, *logs}))

    @property
    def needs_telemetry(self) -> frozenset[str]:
        """The incidents that could be judged on no subject, or are unknown on one that has the telemetry."""
        judged = frozenset(diagnosis.incident.id for diagnosis in self.diagnoses)
        return (judged - self.checked) | {diagnosis.incident.id for diagnosis in self.undecided}

    @property
    def absent(self) -> tuple[str, ...]:
        """The incidents that could be judged and are present on no subject."""
        return tuple(sorted(self.checked - {finding.diagnosis.incident.id for finding in self.present}))


def verdict_of(findings: Sequence[Finding], not_judged: Sequence[NotJudged], health: HealthEvidence) -> Verdict:
    """Return the worst severity that is present; if none is, a warning for a suspect, else what was seen of health.

    Health is never the default: it is what remains if something was seen, and nothing that it needs is missing.
    """
    present = (finding.diagnosis for finding in findings if finding.diagnosis.state == "present")
    worst = max((RANK[diagnosis.severity] for diagnosis in present), default=0)
    if worst:
        return "critical" if worst == RANK["critical"] else "warning"
    if health.suspects:
        return "warning"
    if not_judged:
        return "unknown"
    return "no_incident" if health.missing or health.ignored else "healthy"


# -- a report with its queries ----------------------------------------------------------------------------------------


class Snapshot(NamedTuple):
    """A report, the queries that it was made from, and the facts of each server beside its samples."""

    report: Report
    queries: QueryCache
    running: Mapping[str, Running]

    @property
    def instances(self) -> tuple[str, ...]:
        """The observed servers, by name."""
        return tuple(sorted(map(instance_name, self.queries.subjects(INSTANCE))))

    def server(self, instance: str) -> "ServerSnapshot":
        return ServerSnapshot(instance, self.report, self.queries, self.running.get(instance))


class ServerSnapshot(NamedTuple):
    """One server of a snapshot; `report` and `queries` are those of the whole snapshot."""

    instance: str
    report: Report
    queries: QueryCache
    running: Running | None

    @property
    def present(self) -> list[Finding]:
        """The incidents that are present on it, and on its engines and GPUs."""
        return [finding for finding in self.report.present if self.owns(finding.diagnosis.subject)]

    def value(self, promql: str) -> float | None:
        """Return one number for the server over the whole span; None for no value."""
        row = self.queries.ask(promql, INSTANCE, self.queries.whole).get((("instance", self.instance),))
        return None if row is None or np.isnan(row[-1]) else float(row[-1])

    def series(self, promql: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yield labels and value of each series of the server, for an expression with more labels than `instance`."""
        for subject, row in self.queries.ask(promql, INSTANCE, self.queries.whole).items():
            if self.owns(subject) and not np.isnan(row[-1]):
                yield dict(subject), float(row[-1])

    def histogram(self, name: str) -> list[tuple[float, float]]:
        """Return the upper edge of each bucket and the observations up to it, by edge, over the whole span.

        Series whose edge is no positive number are left out.
        """
        counts: dict[float, float] = {}
        for labels, count in self.series(f"sum by (instance, le) (increase({name}_bucket[$window]))"):
            with suppress(KeyError, ValueError):
                if (edge := float(labels["le"])) > 0:
                    counts[edge] = counts.get(edge, 0.0) + count
        return sorted(counts.items())

    def scraped(self, promql: str) -> Floats:
        """Return the value at every scrape, NaN if it failed; for an expression over samples of one interval."""
        times = self.queries.source.instants
        rows = self.queries.ask(promql, INSTANCE, self.queries.holding(0.0), times)
        return rows.get((("instance", self.instance),), np.full(len(times), np.nan))

    def owns(self, subject: Subject) -> bool:
        """Return True if an engine or a GPU is this server's."""
        return instance_name(subject) == self.instance

    def renamed(self, subject: Subject) -> Subject:
        """Return an engine or a GPU of the other snapshot under this server's name."""
        return tuple(sorted({**dict(subject), "instance": self.instance}.items()))


# -- changes from report to report ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transition:
    """A change of an incident, and its diagnosis now, or when it held last; `at` is when the change was observed.

    `gone` is set if it ended because its server is no longer there, which fixes nothing.
    """

    what: Literal["began", "worse", "milder", "ended"]
    diagnosis: Diagnosis
    at: float
    gone: bool = False


@dataclass
class Transitions:
    """Remembers which incidents hold; an incident that is unknown in an observation keeps its last state.

    The first observation is the beginning: an incident that holds then is no change.
    """

    holding: dict[Key, Diagnosis] = field(default_factory=dict)
    _streaks: dict[Key, int] = field(default_factory=dict)
    _has_begun: bool = False

    def observe(self, report: Report) -> list[Transition]:
        """Return the changes that this observation confirms, in the order of its diagnoses, the worst first."""
        alarming = (finding.diagnosis for finding in report.findings if RANK[finding.diagnosis.severity])
        observed = {(diagnosis.incident.id, diagnosis.subject): diagnosis for diagnosis in alarming}
        if not self._has_begun:
            self._has_begun = True
            self.holding = {key: diagnosis for key, diagnosis in observed.items() if _level(diagnosis)}
            return []
        keys = dict.fromkeys([*observed, *sorted(self.holding)])
        self._streaks = {key: count for key, count in self._streaks.items() if key in keys}
        changes, at = [], report.observed.end
        for key in keys:
            diagnosis = observed.get(key)  # None: its server is gone
            before, level = self.holding.get(key), _level(diagnosis)
            if diagnosis and diagnosis.state == "unknown":
                continue
            if level == _level(before):
                self._streaks.pop(key, None)
                continue
            self._streaks[key] = self._streaks.get(key, 0) + 1
            if self._streaks[key] < CONFIRMATIONS:
                continue

            del self._streaks[key]
            if diagnosis and level:
                self.holding[key] = diagnosis
                worse = level > _level(before)
                changes.append(Transition("began" if not before else "worse" if worse else "milder", diagnosis, at))
            else:
                ended = self.holding.pop(key)
                gone = diagnosis is None or instance_name(diagnosis.subject) in report.gone
                changes.append(Transition("ended", ended, at, gone))
        return changes

    @property
    def is_calm(self) -> bool:
        """True if no incident holds, and no change awaits confirmation."""
        return not self.holding and not self._streaks


def _level(diagnosis: Diagnosis | None) -> int:
    """Return the rank of its severity, 0 if it does not hold now."""
    return RANK[diagnosis.severity] if diagnosis and diagnosis.is_alarming and diagnosis.ongoing else 0
