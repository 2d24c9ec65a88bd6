"""The diagnosis of a server or a fleet as data: everything that a report prints."""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from diag.core.formatting import number
from diag.core.incident import RANK
from diag.core.log_events import LogEnding
from diag.core.subjects import Subject, instance_name
from diag.diagnosis.diagnose import Diagnosis, Quote, State
from diag.diagnosis.health import HealthEvidence
from diag.diagnosis.progress import NotJudged, Progress
from diag.diagnosis.proposals import Proposal
from diag.diagnosis.roll_call import RollCall
from diag.diagnosis.shared_labels import SharedLabel
from diag.diagnosis.telemetry_checks import FAMILIES, TelemetryDefect
from diag.diagnosis.vitals import CeilingShares, Vitals
from diag.knowledge.formulas import expanded
from diag.knowledge.known_failures import KnownFailure
from diag.sources.observation import PodContainer

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
    roll_calls: tuple[RollCall, ...] = ()
    found_note: str = ""

    @property
    def present(self) -> tuple[Finding, ...]:
        """The incidents that hold, the primary ones first."""
        return tuple(finding for finding in self.findings if finding.diagnosis.state == "present")

    @property
    def is_alarming(self) -> bool:
        """True if an incident with an impact is present."""
        return any(RANK[finding.diagnosis.severity] for finding in self.present)

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
