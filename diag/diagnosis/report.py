"""The diagnosis of a server or a fleet as data: what a report prints and nothing that it has to compute."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from diag.core.formatting import listed, number, plural, printable, quantity
from diag.core.incident import RANK, Incident
from diag.core.subjects import Subject
from diag.diagnosis.ceilings import CeilingShares, ceiling_shares
from diag.diagnosis.decision_table import shortest_look
from diag.diagnosis.diagnose import Diagnosis, diagnose
from diag.diagnosis.onset import dated
from diag.diagnosis.progress import NotJudged, Progress, judge
from diag.diagnosis.proposals import Proposal, Running, by_subject, propose
from diag.diagnosis.query_cache import FEWEST_INTERVALS, GPUS, INSTANCES, PARTS, QueryCache
from diag.diagnosis.quotes import Quote, quotes
from diag.diagnosis.relaunch import relaunch
from diag.diagnosis.shared_labels import SharedLabel
from diag.knowledge.formulas import expanded

Verdict = Literal["healthy", "warning", "critical", "unknown"]
HOST = "run diag on the server's host, or scrape diag exporter"


class TelemetryFamily(NamedTuple):
    """Telemetry that vLLM's own /metrics page lacks as a whole: its metrics, what they show, and how to get them.

    `usual` is one of the metrics of which a server has few series, so that it is cheap to ask for.
    """

    metrics: str
    usual: str
    name: str
    shows: str
    hint: str


FAMILIES = {
    "gpu": TelemetryFamily("diag_gpu_.+", "diag_gpu_power_watts", "GPUs", "throttling, power, memory and faults", HOST),
    "log": TelemetryFamily(
        "diag_vllm_(startup|log)_.+",
        "diag_vllm_startup_last_progress_timestamp_seconds",
        "server log",
        "start-up phases and errors",
        "--log FILE",
    ),
    "process": TelemetryFamily(
        "diag_vllm_process_.+",
        "diag_vllm_process_cpu_seconds_total",
        "processes",
        "stopped or busy-waiting workers",
        HOST,
    ),
}


class Observed(NamedTuple):
    """Where the evidence comes from; `start` and `end` are unix seconds, `servers` says what runs where."""

    source: str
    target: str
    start: float
    end: float
    scrapes: int
    failed_scrapes: int
    servers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    not_measured: tuple[str, ...] = ()


class NormalReading(NamedTuple):
    """How fast a server is against what is normal at its load: evidence, never a verdict.

    `normal` is the median of `windows` windows at this load (`given`: texts with their numbers) and `spread` their
    robust standard deviation; `worse` is the direction that users would not like; `against` says whose normal it is,
    `version` of which release; `notable` is whether more than chance and the usual spread is between the two.
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
        """The value as a multiple of what is normal."""
        return self.value / self.normal if self.normal else None

    @property
    def load(self) -> str:
        """The load at which it was compared."""
        return " and ".join(text.format(number(value)) for text, value in self.given)

    @property
    def sentence(self) -> str:
        """The comparison in words, with the load and the release."""
        times = "" if self.ratio is None else f"{number(self.ratio)}x "
        now = f" (now {printable(self.own_version)})" if self.own_version not in ("", self.version) else ""
        version = f", vLLM {printable(self.version)}{now}" if self.version else ""
        usual = f"{quantity(self.normal, self.unit)} ± {quantity(self.spread, self.unit)}"
        shown = quantity(self.value, self.unit)
        return (
            f"{self.measure} {shown}: {times}{self.against} ({usual}){' at ' if self.given else ''}{self.load}{version}"
        )


class Normality(NamedTuple):
    """The comparison with a baseline file, or with peers (""); `reasons` say why some could not be compared."""

    file: str = ""
    readings: tuple[NormalReading, ...] = ()
    reasons: tuple[str, ...] = ()


class Finding(NamedTuple):
    """A diagnosis with what to do about it, and the log lines that decide it.

    `uncomputed` are fixes whose number needs telemetry that is missing.
    """

    diagnosis: Diagnosis
    proposals: tuple[Proposal, ...] = ()
    relaunch: str | None = None
    uncomputed: tuple[Proposal, ...] = ()
    quotes: tuple[Quote, ...] = ()


class Report(NamedTuple):
    """All that was found; `gone` are vanished servers, `ceilings` how near the engines are to those of their GPUs,
    `shared` the labels that the ill servers of a fleet have and its healthy ones lack.

    `not_judged` is why finding nothing does not mean health: engines whose forward progress is unknown, incidents that
    could not be judged because the source refused queries or too little was seen.
    """

    observed: Observed
    verdict: Verdict
    progress: tuple[Progress, ...]
    findings: tuple[Finding, ...]
    not_judged: tuple[NotJudged, ...]
    contract: tuple[str, ...]
    gone: tuple[str, ...] = ()
    normality: Normality = Normality()
    ceilings: tuple[CeilingShares, ...] = ()
    shared: tuple[SharedLabel, ...] = ()

    @property
    def present(self) -> tuple[Finding, ...]:
        """The incidents that hold, the primary ones first."""
        return tuple(finding for finding in self.findings if finding.diagnosis.state == "present")

    @property
    def undecided(self) -> tuple[Diagnosis, ...]:
        """What is unknown although each family of telemetry that it needs was collected."""
        lacking = [FAMILIES[name].metrics for name in self.observed.not_measured]
        unknown = (finding.diagnosis for finding in self.findings if finding.diagnosis.state == "unknown")
        return tuple(diagnosis for diagnosis in unknown if not _needs(diagnosis, lacking))

    @property
    def checked(self) -> frozenset[str]:
        """The incidents that could be judged on some subject."""
        return frozenset(f.diagnosis.incident.id for f in self.findings if f.diagnosis.state != "unknown")

    @property
    def needs_telemetry(self) -> frozenset[str]:
        """The incidents that could be judged on no subject, or are unknown on one that has the telemetry."""
        known = frozenset(finding.diagnosis.incident.id for finding in self.findings)
        return (known - self.checked) | {diagnosis.incident.id for diagnosis in self.undecided}

    @property
    def absent(self) -> tuple[str, ...]:
        """The incidents that could be judged and are present on no subject."""
        return tuple(sorted(self.checked - {finding.diagnosis.incident.id for finding in self.present}))


def build_report(
    observed: Observed,
    incidents: Sequence[Incident],
    queries: QueryCache,
    running: Mapping[str, Running],
    judged: QueryCache | None = None,
    *,
    with_ceilings: bool = True,
) -> Report:
    """Judge progress and incidents, and propose fixes for what is present.

    The incidents are judged by the queries in `judged`, which may know fewer servers; None for those in `queries`.
    """
    progress, unknown = judge(queries)
    judged = judged or queries
    findings = tuple(_finding(diagnosis, judged, running) for diagnosis in dated(diagnose(incidents, judged), judged))
    not_judged = (*unknown, *_refused(findings, judged), *_brief(findings, judged))
    return Report(
        observed=observed,
        verdict=verdict_of(findings, not_judged),
        progress=progress,
        findings=findings,
        not_judged=not_judged,
        contract=tuple(queries.contract.lines()),
        gone=tuple(sorted(queries.gone)),
        ceilings=ceiling_shares(queries) if with_ceilings else (),
    )


def server(name: str, version: str | None, model: str | None) -> str:
    """What runs where, in a line."""
    return f"{name}: vLLM {version or '(version unknown)'}, {model or 'model unknown'}"


def not_measured(queries: QueryCache) -> tuple[str, ...]:
    """The families of telemetry that are absent as a whole."""
    return tuple(name for name, family in FAMILIES.items() if not _has(family, queries))


def _has(family: TelemetryFamily, queries: QueryCache) -> bool:
    """Return whether some server has, or may have, metrics of a family; of GPUs it is known who has any."""
    usual = f"count by (instance) (last_over_time({family.usual}[$window]))"
    if queries.ask(usual, (), queries.whole):
        return True
    query = f'count by (instance) (last_over_time({{__name__=~"{family.metrics}"}}[$window]))'
    query = GPUS if family == FAMILIES["gpu"] else query
    return bool(queries.ask(query, (), queries.whole)) or query in queries.unanswered


def _refused(findings: Sequence[Finding], queries: QueryCache) -> Iterator[NotJudged]:
    """What could not be judged because the source refused queries: without an answer, nothing found is not health."""
    if not queries.unanswered.isdisjoint((INSTANCES, *PARTS.values())):
        yield NotJudged("queries refused: it is unknown which servers, engines and GPUs there are")
    ids = sorted({finding.diagnosis.incident.id for finding in findings if finding.diagnosis.unanswered})
    if ids:
        unknown = plural(len(ids), "incident")
        yield NotJudged(f"queries refused: {unknown} unknown for want of an answer ({listed(ids, most=5)})")


def _brief(findings: Sequence[Finding], queries: QueryCache) -> Iterator[NotJudged]:
    """That too little was seen to call anything absent."""
    brief = (finding.diagnosis.incident for finding in findings if finding.diagnosis.brief)
    windows = {incident.id: shortest_look(incident) for incident in brief}
    if windows:
        longest = max(*windows.values(), FEWEST_INTERVALS * queries.source.interval)
        seen, wanted = quantity(round(queries.span), "seconds"), quantity(longest, "seconds")
        unruled = plural(len(windows), "incident")
        yield NotJudged(f"too little seen: {seen} do not rule out {unruled}; observe for {wanted}")


def _finding(diagnosis: Diagnosis, queries: QueryCache, running: Mapping[str, Running]) -> Finding:
    if diagnosis.state != "present":
        return Finding(diagnosis)
    known = by_subject(running, diagnosis.subject)
    quoted = quotes(diagnosis, queries)
    found = propose(diagnosis, queries, known, quoted)
    if diagnosis.incident.lints:  # after what only reads
        from diag.diagnosis.lint_findings import lint_findings  # noqa: PLC0415  # loads every rule of diag lint

        found = tuple(sorted((*lint_findings(known, quoted), *found), key=lambda proposal: proposal.fix.restart))
    proposals = tuple(proposal for proposal in found if proposal.is_computed)
    uncomputed = tuple(proposal for proposal in found if not proposal.is_computed)
    return Finding(diagnosis, proposals, relaunch(known.launch, proposals), uncomputed, quoted)


def _needs(diagnosis: Diagnosis, families: Sequence[str]) -> bool:
    """Whether a condition lacks a value that only these families of metrics could give."""
    lacking = [expanded(reading.condition.signal.promql) for reading in diagnosis.symptoms if reading.value is None]
    return any(re.search(rf"\b{family}", promql) for family in families for promql in lacking)


def verdict_of(findings: Sequence[Finding], not_judged: Sequence[NotJudged]) -> Verdict:
    """The worst severity that is present; "unknown" where nothing is, but something could not be judged."""
    present = (finding.diagnosis for finding in findings if finding.diagnosis.state == "present")
    worst = max((RANK[diagnosis.severity] for diagnosis in present), default=0)
    if worst:
        return "critical" if worst == RANK["critical"] else "warning"
    return "unknown" if not_judged else "healthy"
