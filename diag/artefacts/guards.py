"""Alerts about the telemetry itself: where it is missing, every other alert is silent and says nothing about health."""

from dataclasses import dataclass
from typing import Any

from diag.artefacts.names import runbook_url
from diag.core.contract import Contract
from diag.core.incident import fill, regroup
from diag.knowledge.signals.engine import edge
from diag.promql import pretty

PAGE = "telemetry"
"""The runbook of all of them."""


@dataclass(frozen=True)
class Guard:
    """One alert: `hold` is its `for`; `cure` is what to do about it; `promql` may name entries of the contract."""

    alert: str
    promql: str
    hold: str
    severity: str
    summary: str
    impact: str
    cure: str


SERVER = "{server}"
EDGES = {
    "vllm:time_to_first_token_seconds": "$ttft_seconds",
    "vllm:e2e_request_latency_seconds": "$e2e_seconds",
    "vllm:inter_token_latency_seconds": "$itl_seconds",
    "vllm:request_prefill_time_seconds": "$freeze_seconds",
}
GUARDS = (
    Guard(
        alert="VllmTelemetryAbsent",
        promql="absent_over_time(vllm:num_requests_running[10m]) and absent_over_time(diag_vllm_up[10m])",
        hold="5m",
        severity="warning",
        summary="Prometheus has no metrics of any vLLM server",
        impact="no alert on vLLM can fire: silence says nothing",
        cure="Look at Status > Targets: is the server, or `diag exporter`, among them and up? Then look for `vllm_` "
        "instead of `vllm:` in the names (VllmMetricsRenamed).",
    ),
    Guard(
        alert="VllmMetricsRenamed",
        promql="count by (instance) (last_over_time(vllm_num_requests_running[10m]))",
        hold="5m",
        severity="warning",
        summary=f"The metrics of {SERVER} are stored as vllm_... instead of vllm:...",
        impact="no rule on vllm: sees this server",
        cure="A Prometheus 2 that negotiates OpenMetrics replaces the colon. Scrape `diag exporter`, which always "
        "answers in the text format, or put the relabelling of alerts/relabel.yaml into the scrape configuration.",
    ),
    Guard(
        alert="VllmBucketMissing",
        promql=" or ".join(
            f"max by (instance) (last_over_time({metric}_count[10m]))"
            f" unless on (instance) max by (instance) (last_over_time({metric}_bucket{{{edge(seconds)}}}[10m]))"
            for metric, seconds in EDGES.items()
        ),
        hold="5m",
        severity="warning",
        summary=f"A histogram of {SERVER} lacks an edge that diag.toml promises by",
        impact="VllmContractBreached or VllmPrefillDecodeContention cannot be judged for this server",
        cure="The server was given buckets of its own (vLLM 0.32 and later). Name them in diag.toml, `[contract]`"
        " `buckets = [...]`, promise one of them, and run `diag generate`.",
    ),
    Guard(
        alert="DiagCollectorFailed",
        promql='max by (instance, collector) (max_over_time(diag_scrape_success{collector!="vllm"}[10m])) == 0',
        hold="10m",
        severity="info",
        summary=f"The part {{{{ $labels.collector }}}} of the exporter of {SERVER} fails",
        impact="incidents that need this part cannot be judged",
        cure="Read what `diag exporter` writes on standard error: a driver that does not answer, a log that cannot be "
        "read, or processes of another user.",
    ),
)


def group(contract: Contract) -> dict[str, Any]:
    """The guards as one rule group."""
    return {"name": "diag-telemetry", "interval": "1m", "rules": [_rule(each, contract) for each in GUARDS]}


def asked(guard: Guard, contract: Contract) -> str:
    """A guard as this site's Prometheus evaluates it."""
    return regroup(fill(guard.promql, (), "", contract.values()), contract.site.labels)


def _rule(guard: Guard, contract: Contract) -> dict[str, Any]:
    site = contract.site
    server = "/".join(f"{{{{ $labels.{label} }}}}" for label in site.labels)
    return {
        "alert": guard.alert,
        "expr": pretty(asked(guard, contract)),
        "for": guard.hold,
        "labels": {"severity": guard.severity},
        "annotations": {
            "summary": guard.summary.replace(SERVER, server),
            "description": guard.cure,
            "impact": guard.impact,
            "runbook_url": runbook_url(site, PAGE),
        },
    }
