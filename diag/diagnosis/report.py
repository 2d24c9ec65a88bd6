"""Everything the doctor has to say, as data: what a report prints and nothing that it has to compute."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from diag.core.incident import Incident
from diag.diagnosis.diagnose import RANK, Diagnosis, diagnose
from diag.diagnosis.onset import dated
from diag.diagnosis.progress import Progress, judge
from diag.diagnosis.proposals import Proposal, Running, by_subject, propose
from diag.diagnosis.query_cache import GPUS, QueryCache
from diag.diagnosis.relaunch import relaunch

Verdict = Literal["healthy", "warning", "critical", "unknown"]
FAMILIES = {
    "gpu": (
        "diag_gpu_.+",
        "throttling, power, memory and faults of the GPUs; run on its host, or scrape diag exporter",
    ),
    "log": ("diag_vllm_(startup|log)_.+", "start-up phases and errors; name the server's log with --log"),
    "process": ("diag_vllm_process_.+", "stopped or spinning workers; run on its host, or scrape diag exporter"),
}
"""Telemetry that a page of vLLM's own lacks as a whole: its metrics, what they would tell, and how to get it."""


@dataclass(frozen=True)
class Observed:
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


@dataclass(frozen=True)
class Finding:
    """A diagnosis with what to do about it."""

    diagnosis: Diagnosis
    proposals: tuple[Proposal, ...] = ()
    relaunch: str | None = None


@dataclass(frozen=True)
class Report:
    """The whole answer; `blind` says whose forward progress cannot be judged and why, `gone` who is there no more."""

    observed: Observed
    verdict: Verdict
    progress: tuple[Progress, ...]
    findings: tuple[Finding, ...]
    blind: tuple[str, ...]
    contract: tuple[str, ...]
    gone: tuple[str, ...] = ()

    @property
    def present(self) -> tuple[Finding, ...]:
        """The incidents that hold, the primary ones first."""
        return tuple(each for each in self.findings if each.diagnosis.state == "present")

    @property
    def undecided(self) -> tuple[Diagnosis, ...]:
        """What could not be judged although the telemetry that it needs was there."""
        blind = [FAMILIES[name][0] for name in self.observed.not_measured]
        unknown = (each.diagnosis for each in self.findings if each.diagnosis.state == "unknown")
        return tuple(each for each in unknown if not _needs(each, blind))


def build_report(
    observed: Observed, incidents: Sequence[Incident], asked: QueryCache, running: Mapping[str, Running]
) -> Report:
    """Judge progress and incidents, and propose fixes for what is present."""
    progress, blind = judge(asked)
    findings = tuple(_finding(each, asked, running) for each in dated(diagnose(incidents, asked), asked))
    return Report(
        observed=observed,
        verdict=_verdict(findings, blind),
        progress=progress,
        findings=findings,
        blind=blind,
        contract=tuple(asked.contract.lines()),
        gone=tuple(sorted(asked.gone)),
    )


def server(name: str, version: str | None, model: str | None) -> str:
    """What runs where, in a line."""
    return f"{name}: vLLM {version or 'version not known'}, {model or 'model not known'}"


def not_measured(asked: QueryCache) -> tuple[str, ...]:
    """The families of telemetry that are absent as a whole."""
    return tuple(name for name, (metrics, _) in FAMILIES.items() if not _has(metrics, asked))


def _has(metrics: str, asked: QueryCache) -> bool:
    """Whether some server has some of these metrics; of GPUs it is known who has any."""
    if metrics == FAMILIES["gpu"][0]:
        return bool(asked.ask(GPUS, (), asked.whole))
    query = f'count by (instance) (last_over_time({{__name__=~"{metrics}"}}[$window]))'
    return bool(asked.ask(query, (), asked.whole))


def _finding(diagnosis: Diagnosis, asked: QueryCache, running: Mapping[str, Running]) -> Finding:
    if diagnosis.state != "present":
        return Finding(diagnosis)
    known = by_subject(running, diagnosis.subject)
    proposals = propose(diagnosis, asked, known)
    return Finding(diagnosis, proposals, relaunch(known.launch, proposals))


def _needs(diagnosis: Diagnosis, families: Sequence[str]) -> bool:
    """Whether a condition lacks a value that only these families of metrics could give."""
    lacking = [each.condition.signal.promql for each in diagnosis.symptoms if each.value is None]
    return any(re.search(rf"\b{family}", promql) for family in families for promql in lacking)


def _verdict(findings: Sequence[Finding], blind: Sequence[str]) -> Verdict:
    """The worst severity that is present; "unknown" where nothing is, but some engine could not be judged at all."""
    worst = max((RANK[each.diagnosis.severity] for each in findings if each.diagnosis.state == "present"), default=0)
    if worst:
        return "critical" if worst == RANK["critical"] else "warning"
    return "unknown" if blind else "healthy"
