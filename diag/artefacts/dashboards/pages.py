"""All dashboards: an overview, a page per incident, a page of GPUs and ranks, one of capacity and cost.

A panel evaluates the expression of the alert, over the same window, and draws the alert's threshold as a line.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diag.artefacts import grafana
from diag.artefacts.dashboards.resources import capacity_page, gpus_page
from diag.artefacts.dashboards.scope import DashboardScope, legend
from diag.artefacts.dashboards.shared import (
    GENERATED,
    KV_CACHE_USAGE,
    STATES,
    alarm_panel,
    annotations,
    links,
    server_and_gpus,
    signal_panel,
    symptom_panel,
    worst_severity,
)
from diag.artefacts.grafana import BAD, GOOD, NEUTRAL, DashboardPage, PanelHeader, PanelQuery, TableColumn, Threshold
from diag.artefacts.names import GENERATED_MARK, TOKENS_PER_SECOND, dashboard_uid, expression, subject_labels, threshold
from diag.core.contract import Contract
from diag.core.formatting import quantity
from diag.core.incident import Incident, regroup
from diag.knowledge.formulas import formula
from diag.knowledge.incidents.contract_breached import incident as slo_violated
from diag.knowledge.rule_set import rule_set
from diag.knowledge.signals import error_budget_burn_rate

TTFT = "histogram_quantile(0.95, sum by ($by, le) (rate(vllm:time_to_first_token_seconds_bucket[$window])))"
FINISHED = "sum by ($by, finished_reason) (rate(vllm:request_success_total[$window]))"


def dashboards(incidents: Sequence[Incident], contract: Contract) -> dict[str, str]:
    """Return the text of every dashboard by its file."""
    known = {incident.id: incident for incident in incidents}
    series = rule_set(incidents, contract).series
    pages = {incident.id: incident_page(incident, known, contract, series) for incident in incidents}
    pages |= {
        "overview": overview(contract, series),
        "gpus": gpus_page(incidents, contract, series),
        "capacity": capacity_page(contract),
    }
    return {f"dashboards/{name}.json": grafana.render(page) for name, page in pages.items()}


# -- the overview


def overview(contract: Contract, series: Mapping[str, str]) -> DashboardPage:
    """Return the page on all servers: incidents, affected users, and every server in a row."""
    scope = DashboardScope(contract, ("model",), series)
    by = scope.by("incident")
    timeline = grafana.state_timeline(
        PanelHeader("Incidents", "Healthy: empty. A bar is one incident of one server, pending to critical.", width=24),
        [PanelQuery(scope.add_matchers(worst_severity('incident=~".+"', by)), legend(by))],
        STATES,
    )
    return DashboardPage(
        uid=dashboard_uid("overview"),
        title="vLLM / Overview",
        description=f"{GENERATED_MARK}. Incidents, their impact, and every server in a row.",
        rows=[
            ("Current state", _current_state(scope)),
            ("Incidents over time", [timeline]),
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
        return grafana.stat(PanelHeader(title, description, unit, width=4), promql, threshold)

    def firing(severity: str) -> str:
        alerts = f'ALERTS{{alertstate="firing", severity="{severity}", incident=~".+"}}'
        return scope.add_matchers(f"count({alerts}) or vector(0)")

    waiting = scope.fill("sum(last_over_time(vllm:num_requests_waiting[$window]))", ())
    tokens = scope.fill("sum(rate(vllm:generation_tokens_total[$window]))", ())
    servers = scope.fill("count(count by (instance) (vllm:num_requests_running))", ())
    burn = "Healthy: below 1, the rate at which the error budget lasts the month."
    slow = Threshold(slo_violated.burns[-1].factor)
    return [
        stat(("Critical alerts", "Healthy: 0.", "short"), firing("critical"), Threshold(1)),
        stat(("Warning alerts", "Healthy: 0.", "short"), firing("warning"), Threshold(1, GOOD, "orange")),
        stat(("Highest error budget burn rate", burn, "short"), f"max({_burn_rate(scope)})", slow),
        stat(("Servers up", "Healthy: as many as you run.", "short"), servers, Threshold(1, BAD, GOOD)),
        stat(("Requests waiting", "Healthy: 0 most of the time.", "short"), waiting),
        stat(("Generation throughput", "Healthy: in proportion to the load.", TOKENS_PER_SECOND), tokens),
    ]


def _burn_rate(scope: DashboardScope) -> str:
    name = formula(error_budget_burn_rate, ("instance", "engine"), "5m", scope.contract)
    return scope.add_matchers(regroup(name.written_out(scope.series), scope.site.labels))


def _servers(scope: DashboardScope) -> Any:
    by = scope.by()
    present = scope.fill("0 * max by ($by) (vllm:num_requests_running or diag_vllm_up)", by)
    worst = scope.add_matchers(worst_severity('incident=~".+"', by))
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
    return grafana.table(PanelHeader("Servers", description, width=24), columns, STATES, address)


def _service_level(scope: DashboardScope) -> list[Any]:
    by, contract = scope.by("engine"), scope.contract

    def panel(header: tuple[str, str, str], promql: str, slo: float) -> Any:
        return grafana.time_series(PanelHeader(*header), [PanelQuery(promql, legend(by))], Threshold(slo))

    fast, slow = (burn.factor for burn in slo_violated.burns)
    burn = f"Healthy: below 1. Pages above {fast:g} over 1 h, or above {slow:g} over 6 h."
    ttft = f"Healthy: below the SLO of {quantity(contract.ttft_seconds, 'seconds')}."
    latency = (
        f"Healthy: steady, below the SLO of {quantity(contract.itl_seconds, 'seconds')}. A mean hides stalls: see the"
        " dashboard of prefill_decode_contention."
    )
    return [
        panel(("Error budget burn rate", burn, "short"), _burn_rate(scope), fast),
        panel(("Time to first token (TTFT), p95", ttft, "s"), scope.fill(TTFT, by), contract.ttft_seconds),
        panel(
            ("Inter-token latency (ITL), mean", latency, "s"),
            scope.fill("$itl_sum / ($itl_count > 0)", by),
            contract.itl_seconds,
        ),
        grafana.time_series(
            PanelHeader(
                "Finished requests",
                "Healthy: in proportion to the load, few with reason length, none with reason error.",
                "reqps",
            ),
            [PanelQuery(scope.fill(FINISHED, by), legend((*by, "finished_reason")))],
        ),
    ]


# -- the page of an incident


def incident_page(
    incident: Incident, known: Mapping[str, Incident], contract: Contract, series: Mapping[str, str]
) -> DashboardPage:
    """Return the page of an incident; `known` are all incidents by id, `series` the recorded series."""
    scope = DashboardScope(contract, ("model", "engine", "gpu"), series)
    supporting = dict.fromkeys(incident.supports, "Supports the diagnosis")
    if incident.escalates:
        supporting[incident.escalates] = "The alert is critical"
    if incident.crash:
        supporting[incident.crash] = "A server that answers again had crashed, and was not restarted on purpose,"
    cause = " ".join(incident.cause.split())
    address = "http://${instance}" if "instance" in contract.site.labels else "URL"
    introduction = grafana.text(
        f"**{incident.severity}**: {incident.impact}.\n\n{cause}\n\n"
        f"Diagnose now: `diag doctor {address}`. Runbook: `diag explain {incident.id}`."
    )
    by = subject_labels(incident, scope.site)
    judged = expression(incident.conditions[0].signal, incident, incident.window, contract, series)
    promql = worst_severity(f'incident="{incident.id}"', by) + f" or 0 * ({judged})"  # 0: the alert does not fire
    description = f"Green: the alert does not fire. Pending: all symptoms hold, for less than {incident.hold} so far."
    state = grafana.state_timeline(
        PanelHeader("Alert state", description), [PanelQuery(scope.add_matchers(promql), legend(by))], STATES
    )
    rows = {
        incident.title: [introduction, state],
        "Symptoms (all must hold)": [symptom_panel(condition, incident, scope) for condition in incident.symptoms],
        "Supporting evidence": [
            alarm_panel(condition, incident, f"{meaning} when {threshold(condition, contract)}.", scope)
            for condition, meaning in supporting.items()
        ],
        "What looks like it, how to distinguish": _look_alikes(incident, known, scope),
        "Server and GPUs over time": server_and_gpus(scope),
    }
    return DashboardPage(
        uid=dashboard_uid(incident.id),
        title=f"vLLM / {incident.title}",
        description=f"{GENERATED_MARK}. {cause}",
        rows=[(title, grafana.fit(row)) for title, row in rows.items() if row],
        variables=scope.variable_queries(),
        annotations=annotations(scope),
        links=links(incident.id, contract.site),
    )


def _look_alikes(incident: Incident, known: Mapping[str, Incident], scope: DashboardScope) -> list[Any]:
    """Return the condition that excludes each look-alike; if there is none, the look-alike's own first symptom."""
    found = []
    for look in incident.looks_like:
        if look.requires:
            condition, of = look.requires, incident
            prefix = f"Not {look.name}: "
            meaning = f"{incident.id}, otherwise {look.name}"
        elif look.name in known:
            condition, of = known[look.name].symptoms[0], known[look.name]
            prefix, meaning = f"{look.name}: ", f"{look.name} is possible"
        else:
            continue
        texts = (prefix, f"When {threshold(condition, scope.contract)}: {meaning}. {look.distinguish}")
        line = Threshold(scope.contract.limit(condition.limit), NEUTRAL, NEUTRAL)
        found.append(signal_panel(condition, of, texts, line, scope))
    return found
