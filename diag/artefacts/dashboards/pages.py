"""All dashboards: an overview, a page per incident, a page of GPUs and ranks, one of capacity and cost.

A panel evaluates the expression of the alert, over the same window, and draws the alert's threshold as a line.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diag.artefacts import grafana
from diag.artefacts.dashboards.resources import capacity_page, gpus_page
from diag.artefacts.dashboards.shared import (
    GENERATED,
    KV_CACHE_USAGE,
    STATES,
    DashboardScope,
    alarm_panel,
    annotations,
    legend,
    links,
    server_and_gpus,
    signal_panel,
    symptom_panel,
    worst_severity,
)
from diag.artefacts.grafana import GOOD, NEUTRAL, DashboardPage, PanelHeader, PanelQuery, TableColumn, Threshold
from diag.artefacts.names import (
    GENERATED_MARK,
    TOKENS_PER_SECOND,
    dashboard_uid,
    expression,
    fix_in_markdown,
    subject_labels,
    threshold,
)
from diag.core.contract import Contract, Site
from diag.core.formatting import quantity
from diag.core.incident import Incident
from diag.knowledge.formulas import rule_set
from diag.knowledge.incidents.contract_breached import incident as slo_violated
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
        "capacity": capacity_page(contract, series),
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
            ("What is wrong, worst first", [_firing(scope)]),
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


def _firing(scope: DashboardScope) -> Any:
    """Return a row for each incident whose alert fires: severity, where, since when; a link to its page."""
    by = scope.by("engine", "gpu", "incident")
    columns = {
        "severity": TableColumn(scope.add_matchers(worst_severity('incident=~".+"', by, pending=False))),
        "since": TableColumn(
            scope.add_matchers(
                f'min by ({", ".join(by)}) (1000 * ALERTS_FOR_STATE{{incident=~".+"}})'
                f' and on ({", ".join(by)}) ALERTS{{alertstate="firing", incident=~".+"}}'
            ),
            "dateTimeAsIso",
        ),
    }
    chosen = "&".join(f"var-{label}=${{__data.fields.{label}:percentencode}}" for label in scope.by())
    page = dashboard_uid("${__data.fields.incident}")
    description = "Healthy: empty. A row opens the incident's page at its server: what to do, evidence, look-alikes."
    link = "what to do about it", f"/d/{page}?{chosen}&${{__url_time_range}}"
    return grafana.table(PanelHeader("Incidents now", description, width=24), columns, STATES, link, height=7)


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
        stat(("Highest error budget burn rate", burn, "short"), f"max({_burn_rate(scope)})", slow),
        _servers_up(scope),
        stat(("Requests waiting", "Healthy: 0 most of the time.", "short"), waiting),
        stat(("Generation throughput", "Healthy: in proportion to the load.", TOKENS_PER_SECOND), tokens),
    ]


def _burn_rate(scope: DashboardScope) -> str:
    return scope.recorded(error_budget_burn_rate, ("instance", "engine"))


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
    return grafana.table(PanelHeader("Servers", description, width=24), columns, STATES, ("this server alone", address))


def _service_level(scope: DashboardScope) -> list[Any]:
    by, contract = scope.by("engine"), scope.contract

    def panel(header: tuple[str, str, str], promql: str, slo: float | None) -> Any:
        line = None if slo is None else Threshold(slo)
        return grafana.time_series(PanelHeader(*header), [PanelQuery(promql, legend(by))], line)

    def stated(entry: str) -> float | None:  # the default only rules out a server that is of no use, and is no aim
        return getattr(contract, entry) if entry in contract.stated else None

    fast, slow = (burn.factor for burn in slo_violated.burns)
    burn = f"Healthy: below 1. Pages above {fast:g} over 1 h, or above {slow:g} over 6 h."
    ttft = f"Healthy: steady{_below_the_slo('ttft_seconds', contract)}."
    latency = (
        f"Healthy: steady{_below_the_slo('itl_seconds', contract)}. A mean hides stalls: see the dashboard of"
        " prefill_decode_contention."
    )
    return [
        panel(("Error budget burn rate", burn, "short"), _burn_rate(scope), fast),
        panel(("Time to first token (TTFT), p95", ttft, "s"), scope.fill(TTFT, by), stated("ttft_seconds")),
        panel(
            ("Inter-token latency (ITL), mean", latency, "s"),
            scope.fill("$itl_sum / ($itl_count > 0)", by),
            stated("itl_seconds"),
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


def _below_the_slo(entry: str, contract: Contract) -> str:
    """Return the SLO as a limit, if the site has one."""
    if entry not in contract.stated:
        return " (no SLO is set in diag.toml)"
    return f", below the SLO of {quantity(getattr(contract, entry), 'seconds')}"


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
    introduction = grafana.text(
        f"**{incident.severity}**: {incident.impact}.\n\n{cause}\n\n"
        f"Diagnose what this page shows:\n\n`{_doctor(contract.site)}`\n\nRunbook: `diag explain {incident.id}`."
    )
    actions = grafana.text(
        "\n".join(
            [
                "**Do now**\n",
                *(f"- {step}" for step in incident.mitigate),
                "\n**Fix**, in this order; `diag doctor` computes the values\n",
                *(f"- {fix_in_markdown(fix)}" for fix in incident.fixes),
                *(["\n**Do not**\n"] if incident.do_not else []),
                *(f"- {warning}" for warning in incident.do_not),
            ]
        )
    )
    by = subject_labels(incident, scope.site)
    judged = expression(incident.conditions[0].signal, incident, incident.window, contract, series)
    promql = worst_severity(f'incident="{incident.id}"', by) + f" or 0 * ({judged})"  # 0: the alert does not fire
    description = f"Green: the alert does not fire. Pending: all symptoms hold, for less than {incident.hold} so far."
    state = grafana.state_timeline(
        PanelHeader("Alert state", description), [PanelQuery(scope.add_matchers(promql), legend(by))], STATES
    )
    rows = {
        incident.title: [actions, introduction, state],
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


def _doctor(site: Site) -> str:
    """Return the command that judges the chosen servers over the time that the page shows, also for All of them."""
    prometheus = site.prometheus_url if site.prometheus_url.startswith("http") else "URL_OF_PROMETHEUS"
    servers = " ".join(f"--match '{label}=~\"${{{label}:regex}}\"'" for label in site.labels)
    span = "--from ${__from:date:seconds} --to ${__to:date:seconds}"
    return f"diag doctor --prometheus {prometheus} {servers} {span}"


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
