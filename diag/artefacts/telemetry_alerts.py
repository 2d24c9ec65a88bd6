"""Alerts about missing telemetry, without which no other alert can fire."""

from dataclasses import dataclass
from typing import Any

from diag.artefacts.names import alert_label
from diag.core.contract import Contract
from diag.core.incident import regroup
from diag.knowledge.formulas import formula
from diag.knowledge.signals import edge
from diag.promql import pretty

RUNBOOK_PAGE = "telemetry"
"""The runbook of all telemetry alerts."""
SERVER = "{server}"
"""A placeholder for the labels of the server in a summary."""
SLO_BUCKETS = {
    "vllm:time_to_first_token_seconds": "$ttft_seconds",
    "vllm:e2e_request_latency_seconds": "$e2e_seconds",
    "vllm:inter_token_latency_seconds": "$itl_seconds",
    "vllm:request_prefill_time_seconds": "$freeze_seconds",
}
"""The histograms that need a bucket at a threshold of diag.toml."""


@dataclass(frozen=True)
class TelemetryAlert:
    """One alert: `hold` is its `for`, `action` the advice to the reader; `promql` may name entries of the contract."""

    name: str
    title: str
    promql: str
    hold: str
    severity: str
    summary: str
    impact: str
    action: str


TELEMETRY_ALERTS = (
    TelemetryAlert(
        name="VllmTelemetryAbsent",
        title="No metrics from any vLLM server",
        promql="absent_over_time(vllm:num_requests_running[10m]) and absent_over_time(diag_vllm_up[10m])",
        hold="5m",
        severity="warning",
        summary="Prometheus has no metrics from any vLLM server",
        impact="no vLLM alert can fire: silence does not mean healthy",
        action="Check Status > Targets in Prometheus: is the server, or `diag exporter`, listed and up? If so, look "
        "for metric names with `vllm_` instead of `vllm:` (VllmScrapeRenamesMetrics).",
    ),
    TelemetryAlert(
        name="VllmBucketMissing",
        title="Histogram without a bucket at the SLO",
        promql=" or ".join(
            f"max by (instance) (last_over_time({metric}_count[10m]))"
            f" unless on (instance) max by (instance) (last_over_time({metric}_bucket{{{edge(seconds)}}}[10m]))"
            for metric, seconds in SLO_BUCKETS.items()
        ),
        hold="5m",
        severity="warning",
        summary=f"A latency histogram of {SERVER} has no bucket at the threshold set in diag.toml",
        impact="VllmContractBreached or VllmPrefillDecodeContention cannot be judged for this server",
        action="The server runs with custom histogram buckets (vLLM 0.32 and later). List them in diag.toml, as "
        "`buckets = [...]` in `[contract]`, set the threshold to one of them, and run `diag generate` again.",
    ),
    TelemetryAlert(
        name="DiagCollectorFailed",
        title="A collector of the exporter fails",
        promql='max by (instance, collector) (max_over_time(diag_scrape_success{collector!="vllm"}[10m])) == 0',
        hold="10m",
        severity="info",
        summary=f"The exporter's collector {alert_label('collector')} fails on {SERVER}",
        impact="incidents that need this collector cannot be judged",
        action="Read the standard error of `diag exporter`. Usual reasons: the GPU driver does not answer, the log "
        "file is not readable, or the processes belong to another user.",
    ),
)


def telemetry_group(contract: Contract) -> dict[str, Any]:
    """Return the telemetry alerts as one rule group."""
    site = contract.site
    server = "/".join(map(alert_label, site.labels))
    rules = [
        {
            "alert": alert.name,
            "expr": pretty(telemetry_expression(alert, contract)),
            "for": alert.hold,
            "labels": {**site.extra_labels, "severity": alert.severity},
            "annotations": {
                "title": alert.title,
                "summary": alert.summary.replace(SERVER, server),
                "do_now": alert.action,
                "impact": alert.impact,
                "runbook_url": site.runbook_url(RUNBOOK_PAGE),
            },
        }
        for alert in TELEMETRY_ALERTS
    ]
    return {"name": "diag-telemetry", "interval": "1m", "rules": rules}


def telemetry_expression(alert: TelemetryAlert, contract: Contract) -> str:
    """Return the alert's expression as this site's Prometheus evaluates it."""
    return regroup(formula(alert.promql, (), "", contract).text, contract.site.labels)
