"""The dashboard Fleet: which server, which incident, since when; every server in a row."""

from collections.abc import Mapping
from typing import Any

from diag.artefacts import grafana
from diag.artefacts.dashboards.shared import (
    BUCKETS,
    GENERATED,
    KV_CACHE_USAGE,
    STATES,
    DashboardScope,
    annotations,
    burn_rate,
    legend,
    links,
    quantiles,
    worst_severity,
)
from diag.artefacts.grafana import GOOD, DashboardPage, PanelHeader, PanelQuery, TableColumn, Threshold
from diag.artefacts.names import CARD, GENERATED_MARK, TOKENS_PER_SECOND, dashboard_uid
from diag.core.contract import Contract
from diag.knowledge.incidents.contract_breached import incident as slo_violated

SERVER = dashboard_uid("server")


def fleet_page(contract: Contract, series: Mapping[str, str]) -> DashboardPage:
    """Return the page on all servers."""
    scope = DashboardScope(contract, ("model",), series)
    by = scope.by("incident")
    firing = scope.add_matchers(worst_severity('incident=~".+"', by))
    timeline = grafana.state_timeline(
        PanelHeader(
            "Incidents over time", "Healthy: one green bar. Else a bar for each incident of a server.", width=24
        ),
        [PanelQuery(f"{firing} or on () {_no_incident()}", legend(("incident", *scope.by())))],
        STATES,
    )
    return DashboardPage(
        uid=dashboard_uid("fleet"),
        title="vLLM / Fleet",
        description=f"{GENERATED_MARK}. Which server has which incident, since when; every server in a row.",
        rows=[
            ("Current state", _current_state(scope)),
            ("Incidents, worst first", [_firing(scope), timeline]),
            ("Servers, worst first", [_servers(scope)]),
        ],
        variables=scope.variable_queries(),
        annotations=annotations(scope),
        links=links(CARD, contract.site),
    )


def _no_incident() -> str:
    """Return the expression of a row that stands where no alert fires."""
    return 'label_replace(vector(0), "incident", "no incident", "", "")'


def _firing(scope: DashboardScope) -> Any:
    """Return a row for each incident whose alert fires: severity, where, model, since when; links to act on it."""
    by, server = scope.by("engine", "gpu", "incident"), ", ".join(scope.by())
    worst = scope.add_matchers(worst_severity('incident=~".+"', by, pending=False))
    models = scope.add_matchers(f"group by ({server}, model_name) (last_over_time(vllm:num_requests_running[1h]))")
    with_model = f"{worst} * on ({server}) group_left (model_name) topk by ({server}) (1, {models})"
    since = scope.add_matchers(
        f'min by ({", ".join(by)}) (1000 * ALERTS_FOR_STATE{{incident=~".+"}})'
        f' and on ({", ".join(by)}) ALERTS{{alertstate="firing", incident=~".+"}}'
    )
    columns = {
        "severity": TableColumn(f"{with_model} or on ({', '.join(by)}) {worst} or on () {_no_incident()}"),
        "since": TableColumn(since, "dateTimeAsIso"),
    }
    chosen = "&".join(f"var-{label}=${{__data.fields.{label}:percentencode}}" for label in scope.by())
    shown = {"signals": f"/d/{SERVER}?var-incident=${{__data.fields.incident}}&{chosen}&${{__url_time_range}}"}
    shown["runbook"] = scope.site.runbook_url("${__data.fields.incident}")
    description = "Healthy: one row without an incident. A row opens the server with the signals of its incident."
    return grafana.table(PanelHeader("Incidents now", description, width=24), columns, STATES, shown, height=7)


def _servers_up(scope: DashboardScope) -> Any:
    """Return "1 / 2" in red if one of two servers does not answer."""
    by = ", ".join(scope.by())
    known = "last_over_time(vllm:num_requests_running[1d])"
    there = scope.fill(f"count(count by ({by}) (up and on ({by}) {known})) or vector(0)", ())
    answers = f"vllm:num_requests_running unless on ({by}) diag_vllm_up == 0"
    up = scope.fill(f"count(count by ({by}) ({answers})) or vector(0)", ())
    down = f"({there}) - ({up})"
    counts = f'count_values("answering", {up}) * on () group_left (known) count_values("known", {there})'
    promql = f"{down} + on () group_left (answering, known) 0 * {counts}"
    description = "Healthy: all of them. A target of Prometheus counts that had metrics of vLLM in the last day."
    header = PanelHeader("Servers up / all", description, width=4)
    return grafana.stat(header, promql, Threshold(1), name="{{answering}} / {{known}}")


def _current_state(scope: DashboardScope) -> list[Any]:
    def stat(header: tuple[str, str, str], promql: str, threshold: Threshold | None = None) -> Any:
        title, description, unit = header
        return grafana.stat(PanelHeader(title, description, unit, width=4), promql, threshold)

    def firing(severity: str) -> str:
        alerts = f'ALERTS{{alertstate="firing", severity="{severity}", incident=~".+"}}'
        return scope.add_matchers(f"count({alerts}) or vector(0)")

    waiting = scope.fill("sum(last_over_time(vllm:num_requests_waiting[$window]))", ())
    tokens = scope.fill("sum(rate(vllm:generation_tokens_total[$window]))", ())
    burn = "Healthy: below 1, the rate at which the error budget lasts the month."
    slow = Threshold(slo_violated.burns[-1].factor)
    return [
        stat(("Critical alerts", "Healthy: 0.", "short"), firing("critical"), Threshold(1)),
        stat(("Warning alerts", "Healthy: 0.", "short"), firing("warning"), Threshold(1, GOOD, "orange")),
        stat(("Highest error budget burn rate", burn, "short"), f"max({burn_rate(scope)})", slow),
        _servers_up(scope),
        stat(("Requests waiting", "Healthy: 0 most of the time.", "short"), waiting),
        stat(("Generation throughput", "Healthy: in proportion to the load.", TOKENS_PER_SECOND), tokens),
    ]


def _servers(scope: DashboardScope) -> Any:
    by = scope.by()
    present = scope.fill("0 * max by ($by) (vllm:num_requests_running or diag_vllm_up)", by)
    worst = scope.add_matchers(worst_severity('incident=~".+"', by))
    columns = {
        "state": TableColumn(f"{worst} or {present}"),
        "running": TableColumn(scope.fill("sum by ($by, model_name) (vllm:num_requests_running)", by)),
        "waiting": TableColumn(scope.fill("sum by ($by) (vllm:num_requests_waiting)", by)),
        "KV cache usage": TableColumn(scope.fill(KV_CACHE_USAGE, by), "percentunit"),
        "throughput": TableColumn(scope.fill(GENERATED, by), TOKENS_PER_SECOND),
        "TTFT p50": TableColumn(scope.fill(quantiles(BUCKETS["TTFT"])["p50"], by), "s"),
        "TTFT p99": TableColumn(scope.fill(quantiles(BUCKETS["TTFT"])["p99"], by), "s"),
        "ITL p99": TableColumn(scope.fill(quantiles(BUCKETS["ITL"])["p99"], by), "s"),
        "error budget burn rate": TableColumn(f"max by ({', '.join(by)}) ({burn_rate(scope)})"),
    }
    description = "Healthy: state ok, no request waits, KV cache usage below 90 %, burn rate below 1."
    chosen = "&".join(f"var-{label}=${{__data.fields.{label}:percentencode}}" for label in by)
    shown = {"this server": f"/d/{SERVER}?{chosen}&${{__url_time_range}}"}
    return grafana.table(PanelHeader("Servers", description, width=24), columns, STATES, shown)
