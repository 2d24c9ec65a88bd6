"""The overview: what is wrong where, who is affected, every server in a row."""

from collections.abc import Mapping
from typing import Any

from diag.artefacts.dashboards.scope import DashboardScope, legend
from diag.artefacts.dashboards.shared import (
    GENERATED,
    KV_CACHE_USAGE,
    STATES,
    annotations,
    links,
    server_and_gpus,
    worst_severity,
)
from diag.artefacts.grafana import panels
from diag.artefacts.grafana.page import DashboardPage
from diag.artefacts.grafana.panels import BAD, GOOD, PanelHeader, PanelQuery, TableColumn, Threshold
from diag.artefacts.names import GENERATED_MARK, dashboard_uid
from diag.artefacts.units import TOKENS_PER_SECOND
from diag.core.contract import Contract
from diag.core.formatting import quantity
from diag.core.incident import regroup
from diag.knowledge.formulas import formula
from diag.knowledge.signals import error_budget_burn_rate

TTFT = "histogram_quantile(0.95, sum by ($by, le) (rate(vllm:time_to_first_token_seconds_bucket[$window])))"
FINISHED = "sum by ($by, finished_reason) (rate(vllm:request_success_total[$window]))"


def overview(contract: Contract, series: Mapping[str, str]) -> DashboardPage:
    """The page on all servers."""
    scope = DashboardScope(contract, ("model",), series)
    return DashboardPage(
        uid=dashboard_uid("overview"),
        title="vLLM / Overview",
        description=f"{GENERATED_MARK}. Incidents, their impact, and every server in a row.",
        rows=[
            ("Current state", _current_state(scope)),
            ("Incidents over time", [_timeline(scope)]),
            ("Servers, worst first", [_servers(scope)]),
            ("Latency SLO and throughput", _service_level(scope)),
            ("Load and GPUs", server_and_gpus(scope, width=12)),
        ],
        variables=scope.variable_queries(),
        annotations=annotations(scope),
        links=links("README", contract.site),
    )


def _current_state(scope: DashboardScope) -> list[Any]:
    def stat(header: tuple[str, str, str], promql: str, threshold: Threshold | None = None) -> Any:
        title, description, unit = header
        return panels.stat(PanelHeader(title, description, unit, width=4), promql, threshold)

    def firing(severity: str) -> str:
        alerts = f'ALERTS{{alertstate="firing", severity="{severity}", incident=~".+"}}'
        return scope.narrow(f"count({alerts}) or vector(0)")

    waiting = scope.fill("sum(last_over_time(vllm:num_requests_waiting[$window]))", ())
    tokens = scope.fill("sum(rate(vllm:generation_tokens_total[$window]))", ())
    servers = scope.fill("count(count by (instance) (vllm:num_requests_running))", ())
    burn = "Healthy: below 1, the rate at which the error budget lasts the month."
    return [
        stat(("Critical alerts", "Healthy: 0.", "short"), firing("critical"), Threshold(1)),
        stat(("Warning alerts", "Healthy: 0.", "short"), firing("warning"), Threshold(1, GOOD, "orange")),
        stat(("Highest error budget burn rate", burn, "short"), f"max({_burn_rate(scope)})", Threshold(6)),
        stat(("Servers up", "Healthy: as many as you run.", "short"), servers, Threshold(1, BAD, GOOD)),
        stat(("Requests waiting", "Healthy: 0 most of the time.", "short"), waiting),
        stat(("Generation throughput", "Healthy: in proportion to the load.", TOKENS_PER_SECOND), tokens),
    ]


def _burn_rate(scope: DashboardScope) -> str:
    name = formula(error_budget_burn_rate, ("instance", "engine"), "5m", scope.contract)
    return scope.narrow(regroup(name.written_out(scope.series), scope.site.labels))


def _timeline(scope: DashboardScope) -> Any:
    by = scope.by("incident")
    description = "Healthy: empty. A bar is one incident of one server, pending to critical."
    query = PanelQuery(scope.narrow(worst_severity('incident=~".+"', by)), legend(by))
    return panels.state_timeline(PanelHeader("Incidents", description, width=24), [query], STATES)


def _servers(scope: DashboardScope) -> Any:
    by = scope.by()
    present = scope.fill("0 * max by ($by) (vllm:num_requests_running or diag_vllm_up)", by)
    worst = scope.narrow(worst_severity('incident=~".+"', by))
    columns = {
        "state": TableColumn(f"{worst} or {present}"),
        "running": TableColumn(scope.fill("sum by ($by) (vllm:num_requests_running)", by)),
        "waiting": TableColumn(scope.fill("sum by ($by) (vllm:num_requests_waiting)", by)),
        "KV cache usage": TableColumn(scope.fill(KV_CACHE_USAGE, by), "percentunit"),
        "throughput": TableColumn(scope.fill(GENERATED, by), TOKENS_PER_SECOND),
        "TTFT p95": TableColumn(scope.fill(TTFT, by), "s"),
        "error budget burn rate": TableColumn(f"max by ({', '.join(by)}) ({_burn_rate(scope)})"),
    }
    description = (
        "Healthy: state ok, no request waits, KV cache usage below 90 %, burn rate below 1."
        " A cell opens this page for its server alone."
    )
    chosen = "&".join(f"var-{label}=${{__data.fields.{label}:percentencode}}" for label in by)
    address = f"/d/{dashboard_uid('overview')}?{chosen}&${{__url_time_range}}"
    return panels.table(PanelHeader("Servers", description, width=24), columns, STATES, address)


def _service_level(scope: DashboardScope) -> list[Any]:
    by, contract = scope.by("engine"), scope.contract

    def panel(header: tuple[str, str, str], promql: str, slo: float) -> Any:
        return panels.time_series(PanelHeader(*header), [PanelQuery(promql, legend(by))], Threshold(slo))

    burn = "Healthy: below 1. Pages above 14.4 over 1 h, or above 6 over 6 h."
    ttft = f"Healthy: below the SLO of {quantity(contract.ttft_seconds, 'seconds')}."
    latency = (
        f"Healthy: steady, below the SLO of {quantity(contract.itl_seconds, 'seconds')}. A mean hides stalls: see the"
        " dashboard of prefill_decode_contention."
    )
    return [
        panel(("Error budget burn rate", burn, "short"), _burn_rate(scope), 14.4),
        panel(("Time to first token (TTFT), p95", ttft, "s"), scope.fill(TTFT, by), contract.ttft_seconds),
        panel(
            ("Inter-token latency (ITL), mean", latency, "s"),
            scope.fill("$itl_sum / ($itl_count > 0)", by),
            contract.itl_seconds,
        ),
        panels.time_series(
            PanelHeader(
                "Finished requests",
                "Healthy: in proportion to the load, few with reason length, none with reason error.",
                "reqps",
            ),
            [PanelQuery(scope.fill(FINISHED, by), legend((*by, "finished_reason")))],
        ),
    ]
