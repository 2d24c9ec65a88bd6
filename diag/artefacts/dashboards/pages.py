"""All dashboards: Fleet, Server, GPUs and ranks, Capacity; on request one per incident.

A panel about an incident evaluates the expression of the alert, over the same window, and draws the alert's threshold
as a line. The panels that only draw lines are rows of panels.toml, beside this file.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from diag.artefacts import grafana
from diag.artefacts.dashboards.shared import (
    BUCKETS,
    GPU_COST,
    KV_CACHE_USAGE,
    OUTPUT_RATE,
    STATES,
    DashboardScope,
    LinePanel,
    alarm_panel,
    burn_rate,
    legend,
    line_panels,
    page_of,
    quantiles,
    signal_panel,
    worst_severity,
)
from diag.artefacts.grafana import (
    GOOD,
    NEUTRAL,
    PLAIN,
    DashboardPage,
    PanelHeader,
    PanelQuery,
    QueryVariable,
    TableColumn,
    Threshold,
)
from diag.artefacts.names import (
    GRAFANA_UNITS,
    TOKENS_PER_SECOND,
    capitalized,
    claim,
    dashboard_uid,
    expression,
    in_words,
    subject_labels,
    threshold,
)
from diag.artefacts.recording_rules import THRESHOLD
from diag.core.contract import Contract
from diag.core.declarations import PACKAGE, read
from diag.core.formatting import quantity
from diag.core.incident import Incident
from diag.core.metric_prefix import GENERATED, RUNNING, WAITING, metric
from diag.knowledge.formulas import rule_set
from diag.knowledge.signals import FAST_BURN, SLOW_BURN, bandwidth_share
from diag.report.spans import label

NO, YES = 10, 11
"""The states of a condition that is true or false, beside those of an alert."""
LATENCIES = {
    "TTFT": ("Time to first token (TTFT)", "ttft_seconds"),
    "ITL": ("Inter-token latency (ITL)", "itl_seconds"),
    "E2E": ("End-to-end latency", "e2e_seconds"),
    "queue": ("Queue time", ""),
}
"""Titles, and the SLOs that diag.toml may state."""
NO_INCIDENT = 'label_replace(vector(0), "incident", "no incident", "", "")'
"""The expression of a row that stands where no alert fires."""
PRESENT = f"0 * max by ($by) ({RUNNING} or diag_vllm_up)"
"""Zero for each server that is there."""
ANY = 'incident=~".+"'
GPUS = "count by ($by) (diag_gpu_power_watts unless on (instance, gpu) diag_gpu_serving == 0)"
LENGTHS = {"Prompt length": "prompt", "Answer length": "generation"}


@cache
def panels() -> Mapping[str, tuple[LinePanel, ...]]:
    """Return the panels with lines by the row of a page that has them."""
    return read(PACKAGE / "artefacts" / "dashboards" / "panels.toml", dict[str, tuple[LinePanel, ...]])


def dashboards(incidents: Sequence[Incident], contract: Contract, per_incident: bool = False) -> dict[str, str]:
    """Return the text of every dashboard by its file."""
    series = rule_set(incidents, contract).series
    pages = {
        "fleet": fleet_page(contract, series),
        "server": server_page(contract, series),
        "gpus": gpus_page(contract, series),
        "capacity": capacity_page(contract, series),
    }
    if per_incident:
        known = {incident.id: incident for incident in incidents}
        pages |= {incident.id: incident_page(incident, known, contract, series) for incident in incidents}
    return {f"dashboards/{name}.json": grafana.render(page) for name, page in pages.items()}


# -- all servers


def fleet_page(contract: Contract, series: Mapping[str, str]) -> DashboardPage:
    """Return the page on all servers: which one has which incident, since when."""
    scope = DashboardScope(contract, ("model",), series)
    # a row for each incident whose alert fires: severity, where, model, since when; links to act on it
    parts, by = scope.by("engine", "gpu", "incident"), scope.by()
    incident_labels, server = ", ".join(parts), ", ".join(by)
    worst = scope.add_matchers(worst_severity(ANY, parts, pending=False))
    models = scope.add_matchers(f"group by ({server}, model_name) (last_over_time({RUNNING}[1h]))")
    with_model = f"{worst} * on ({server}) group_left (model_name) topk by ({server}) (1, {models})"
    since = scope.add_matchers(
        f"min by ({incident_labels}) (1000 * ALERTS_FOR_STATE{{{ANY}}})"
        f' and on ({incident_labels}) ALERTS{{alertstate="firing", {ANY}}}'
    )
    columns = {
        "severity": TableColumn(f"{with_model} or on ({incident_labels}) {worst} or on () {NO_INCIDENT}"),
        "since": TableColumn(since, "dateTimeAsIso"),
    }
    links = {
        "signals": row_url(scope, "var-incident=${__data.fields.incident}"),
        "runbook": scope.site.runbook_url("${__data.fields.incident}"),
    }
    description = "Healthy: one row without an incident. A row opens the server with the signals of its incident."
    header = PanelHeader("Incidents now", description, width=24)
    incidents = grafana.table(header, columns, STATES, links, height=7)
    worst = scope.add_matchers(worst_severity(ANY, by))
    running = f"{RUNNING} or on ($by) 0 * last_over_time({RUNNING}[1d])"  # a dead server has its model, too
    columns = {
        "state": TableColumn(f"{worst} or {scope.fill(PRESENT, by)}"),
        "running": TableColumn(scope.fill(f"sum by ($by, model_name) ({running})", by)),
        "waiting": TableColumn(scope.fill(f"sum by ($by) ({WAITING})", by)),
        "KV cache usage": TableColumn(scope.fill(KV_CACHE_USAGE, by), "percentunit"),
        "throughput": TableColumn(scope.fill(OUTPUT_RATE, by), TOKENS_PER_SECOND),
        "TTFT p50": TableColumn(scope.fill(quantiles(BUCKETS["TTFT"])["p50"], by), "s"),
        "TTFT p99": TableColumn(scope.fill(quantiles(BUCKETS["TTFT"])["p99"], by), "s"),
        "ITL p99": TableColumn(scope.fill(quantiles(BUCKETS["ITL"])["p99"], by), "s"),
        "burn rate": TableColumn(f"max by ({server}) ({burn_rate(scope)})"),
    }
    description = "Healthy: state ok, no request waits, KV cache usage below 90 %, burn rate below 1."
    header = PanelHeader("Servers", description, width=24)
    servers = grafana.table(header, columns, STATES, {"this server": row_url(scope)})
    firing = scope.add_matchers(worst_severity(ANY, scope.by("incident")))
    description = "Healthy: one green bar. Else a bar for each incident of a server."
    query = PanelQuery(f"{firing} or on () {NO_INCIDENT}", legend(("incident", *by)))
    header = PanelHeader("Incidents over time", description, width=24)
    timeline = grafana.state_timeline(header, [query], STATES)
    return page_of(
        scope,
        "fleet",
        "Fleet",
        "Which server has which incident, since when; every server in a row.",
        {
            "Current state": _current_state(scope),
            "Incidents, worst first": [incidents, timeline],
            "Servers, worst first": [servers],
        },
    )


def _current_state(scope: DashboardScope) -> list[Any]:
    def stat(title: str, description: str, promql: str, threshold: Threshold | None = None, unit: str = "short") -> Any:
        return grafana.stat(PanelHeader(title, description, unit, width=4), promql, threshold)

    def firing(severity: str) -> str:
        alerts = f'ALERTS{{alertstate="firing", severity="{severity}", {ANY}}}'
        return scope.add_matchers(f"count({alerts}) or vector(0)")

    # "1 / 2" in red if one of two servers does not answer
    by = ", ".join(scope.by())
    measured = f"last_over_time({RUNNING}[1d])"
    there = scope.fill(f"count(count by ({by}) (up and on ({by}) {measured})) or vector(0)", ())
    answers = f"{RUNNING} unless on ({by}) diag_vllm_up == 0"
    up = scope.fill(f"count(count by ({by}) ({answers})) or vector(0)", ())
    counts = f'count_values("answering", {up}) * on () group_left (known) count_values("known", {there})'
    servers_up = grafana.stat(
        PanelHeader(
            "Servers up / all",
            "Healthy: all of them. A target of Prometheus counts that had metrics of vLLM in the last day.",
            width=4,
        ),
        f"({there}) - ({up}) + on () group_left (answering, known) 0 * {counts}",
        Threshold(1),
        name="{{answering}} / {{known}}",
    )

    waiting = scope.fill(f"sum(last_over_time({WAITING}[$window]))", ())
    tokens = scope.fill(f"sum(rate({GENERATED}[$window]))", ())
    burn = "Of the error budget. Healthy: below 1, the rate at which it lasts the month."
    slow = Threshold(SLOW_BURN.factor, PLAIN)  # a rate below it is no news beside a critical alert
    return [
        stat("Critical alerts", "Healthy: 0.", firing("critical"), Threshold(1)),
        stat("Warning alerts", "Healthy: 0.", firing("warning"), Threshold(1, GOOD, "orange")),
        stat("Highest burn rate", burn, f"max({burn_rate(scope)})", slow),
        servers_up,
        stat("Requests waiting", "Healthy: 0 most of the time.", waiting),
        stat("Generation throughput", "Healthy: in proportion to the load.", tokens, unit=TOKENS_PER_SECOND),
    ]


def row_url(scope: DashboardScope, *values: str) -> str:
    """Return the address of the dashboard Server for the server of a row in a table, with more variables."""
    labels = (f"var-{label}=${{__data.fields.{label}:percentencode}}" for label in scope.by())
    return f"/d/{dashboard_uid('server')}?{'&'.join((*values, *labels))}&${{__url_time_range}}"


# -- one server


def server_page(contract: Contract, series: Mapping[str, str]) -> DashboardPage:
    """Return the page of one server; the variable `incident` chooses whose signals it begins with."""
    scope = DashboardScope(contract, ("model", "engine", "gpu"), series)
    conditions = f'query_result({THRESHOLD}{{incident="$incident", unit%s"bool"}})'
    parts = '/condition="(?<text>[^"]+)".*series="(?<value>[^"]+)"/'
    chosen = {
        "incident": QueryVariable(f"label_values({THRESHOLD}, incident)", initial="contract_breached"),
        "signal": QueryVariable(conditions % "!=", parts, hidden=True),
        "state": QueryVariable(conditions % "=", parts, hidden=True),
    }
    by = scope.by("incident")
    firing, present = scope.add_matchers(worst_severity(ANY, by)), scope.fill(PRESENT, scope.by())
    incidents = grafana.state_timeline(
        PanelHeader("Incidents of this server", "Healthy: one green bar. Pending to critical, each a bar.", width=24),
        [PanelQuery(f"{firing} or on ({', '.join(scope.by())}) {present}", legend((*scope.by(), "incident")))],
        STATES,
        height=5,
    )
    fast, slow = FAST_BURN.factor, SLOW_BURN.factor
    burn = grafana.time_series(
        PanelHeader(
            "Error budget burn rate", f"Healthy: below 1. Pages above {fast:g} over 1 h, or above {slow:g} over 6 h."
        ),
        [PanelQuery(burn_rate(scope), legend(scope.by("engine")))],
        Threshold(slow),
    )
    latencies = []
    for name, (title, entry) in LATENCIES.items():
        limit = getattr(contract, entry) if entry in contract.stated else None
        below = f", below the SLO of {quantity(limit, 'seconds')}" if limit else ""
        series_of_it = quantiles(BUCKETS[name])
        latencies.append(LinePanel(title, f"Healthy: steady{below}.", ("engine",), series_of_it, "s", threshold=limit))
    return page_of(
        scope,
        "server",
        "Server",
        "Incidents, latency, load and GPUs of a server on one time axis.",
        {
            "Incidents": [incidents],
            "Signals of $incident": _signals(scope),
            "Latency": line_panels(latencies, scope),
            "Load": [*line_panels(panels()["load"], scope), burn],
            "GPUs": grafana.fit(line_panels(panels()["server_gpus"], scope)),
        },
        runbook="${incident}",
        more=chosen,
    )


def _signals(scope: DashboardScope) -> list[Any]:
    """Return the state of the incident's alert and of its yes-or-no conditions, then a panel for each number."""
    by = ", ".join(scope.by())
    alert = scope.add_matchers(worst_severity('incident="$incident"', scope.by()))
    yes_or_no = f'{{__name__=~"none|${{state:pipe}}", {scope.server}}}'
    named = f'label_replace({_of_part(yes_or_no)}, "condition", "$1", "__name__", "[^:]*:([^:]*).*") + {NO}'
    title = "Alert and yes-or-no conditions of $incident"
    description = "Green: the alert does not fire. Pending: all conditions hold, not yet for long enough."
    timeline = grafana.state_timeline(
        PanelHeader(title, description, width=24),
        [
            PanelQuery(f"{alert} or on ({by}) {scope.fill(PRESENT, scope.by())}", f"alert {legend(scope.by())}"),
            PanelQuery(named, f"{{{{condition}}}} {legend(scope.by())}{{{{part}}}}"),
        ],
        {**STATES, NO: ("no", "light-blue"), YES: ("yes", "dark-blue")},
        height=5,
    )
    limit = f'max by (unit) ({THRESHOLD}{{incident="$incident", series="$signal"}})'
    value = _of_part(f'{{__name__="$signal", {scope.server}}} + on () group_left (unit) 0 * {limit}')
    signals = grafana.repeated(
        PanelHeader("$signal", "The title is the condition, the dashed line its threshold.", width=24),
        [
            PanelQuery(value, f"{legend(scope.by())}{{{{part}}}} ({{{{unit}}}})"),
            PanelQuery(limit, "threshold ({{unit}})"),
        ],
        "signal",
        GRAFANA_UNITS,
    )
    return [timeline, signals]


def _of_part(promql: str) -> str:
    """Return an expression with the label `part`: the engine or GPU of a series, empty for a whole server."""
    for name, text in (("engine", " engine"), ("gpu", " GPU")):
        promql = f'label_replace({promql}, "part", "{text} $1", "{name}", "(.+)")'
    return promql


# -- GPUs and ranks; capacity and cost


def gpus_page(contract: Contract, series: Mapping[str, str]) -> DashboardPage:
    """Return the page of GPUs and tensor-parallel ranks: which one differs from its peers.

    A GPU is named by the rank that runs on it, if it is known.
    """
    scope = DashboardScope(contract, ("gpu",), series)

    def gpu_rows(title: str, description: str, promql: str) -> Any:
        header = PanelHeader(title, description, "percentunit", 24)
        ranked = f"{promql} * on (instance, gpu) group_left (rank) $rank_of_gpu or on (instance, gpu) {promql}"
        named = f'label_replace({scope.fill(ranked, scope.by("gpu"))}, "rank", " rank $1", "rank", "(.+)")'
        return grafana.heatmap(header, PanelQuery(named, f"{legend(scope.by('gpu'))}{{{{rank}}}}"))

    busy, power, power_limit = (
        f"max by ($by) (avg_over_time(diag_gpu_{metric}[$window]))"
        for metric in ("utilization_ratio", "power_watts", "power_limit_watts")
    )
    by_worker = scope.by("rank")
    worker_cores = 'sum by ($by) (rate(diag_vllm_process_cpu_seconds_total{role="worker"}[$window]))'
    cores = PanelHeader(
        "CPU cores used per worker", "Healthy: all rows alike. 0 beside 1: this rank stands still.", width=24
    )
    by_rank = [
        gpu_rows("GPU utilisation", "Healthy: all rows alike. 0 % beside full peers: this rank is missing.", busy),
        gpu_rows(
            "GPU power / limit",
            "Healthy: all rows alike. High utilisation at low power: busy-waiting.",
            f"({power} / ({power_limit} > 0))",
        ),
        grafana.heatmap(cores, PanelQuery(scope.fill(worker_cores, by_worker), legend(by_worker))),
    ]
    return page_of(
        scope,
        "gpus",
        "GPUs and ranks",
        "Which GPU or rank differs from its peers.",
        {"By rank: look for the row that differs": by_rank, "GPUs": line_panels(panels()["gpus"], scope)},
    )


def capacity_page(contract: Contract, series: Mapping[str, str]) -> DashboardPage:
    """Return the page on capacity: which ceiling binds first, how long requests are, what a token costs."""
    scope = DashboardScope(contract, ("model", "engine"), series)
    bands = "Finished requests by tokens. Two bands: two kinds of traffic, which may want servers of their own."

    def length(title: str, kind: str) -> Any:
        promql = scope.fill(f"sum by (le) (increase({metric(f'request_{kind}_tokens_bucket')}[$window]))", ())
        return grafana.heatmap(PanelHeader(title, bands), PanelQuery(promql, "{{le}}"), of_buckets=True)

    gpu_seconds = scope.fill(f"{GPUS} / ({OUTPUT_RATE} > 0) * 1e6", scope.by())
    now = f"${GPU_COST} / 3600 * {gpu_seconds}"
    busiest = f"max by ({', '.join(scope.by())}) ({scope.recorded(bandwidth_share, ('instance', 'engine'))})"
    cost = grafana.time_series(
        PanelHeader(
            "Cost per million output tokens",
            "All GPUs of the server at the cost above, and if their memory bandwidth were used up.",
            "currencyUSD",
        ),
        [
            PanelQuery(now, f"{legend(scope.by())} now"),
            PanelQuery(f"{now} * {busiest}", f"{legend(scope.by())} at the bandwidth ceiling"),
        ],
    )
    return page_of(
        scope,
        "capacity",
        "Capacity and cost",
        "Headroom to every ceiling, lengths of requests, energy and cost of tokens.",
        {
            "Headroom: the highest line binds first": line_panels(panels()["headroom"], scope),
            "Lengths of requests": [length(title, kind) for title, kind in LENGTHS.items()],
            "Energy and cost": [*line_panels(panels()["energy"], scope), cost],
        },
        inputs={GPU_COST: ("$ per GPU and hour", "1")},
    )


# -- one incident


def incident_page(
    incident: Incident, known: Mapping[str, Incident], contract: Contract, series: Mapping[str, str]
) -> DashboardPage:
    """Return the page of an incident; `known` are all incidents by id, `series` the recorded series."""
    scope = DashboardScope(contract, ("model", "engine", "gpu"), series)
    supporting, pending = dict.fromkeys(incident.supports, "Supports the diagnosis"), "all symptoms hold,"
    if incident.serious:
        supporting[incident.serious] = "The alert fires only"
        pending += f" and {claim(incident.serious, contract)},"
    if incident.escalates:
        supporting[incident.escalates] = "The alert is critical"
    if incident.sudden:
        supporting[incident.sudden] = "It rose suddenly"
    if incident.crash:
        supporting[incident.crash] = "A server that answers again had crashed, and was not restarted on purpose,"
    steps = [*incident.mitigate, *incident.do_not]
    actions = grafana.text(
        f"**{incident.severity}**: {incident.impact}.\n\n**{label('do_now')}**\n\n"
        + "\n".join(f"- {step}" for step in steps)
        + f"\n\nFixes and when each applies: the runbook, `diag explain {incident.id}`."
    )
    by = subject_labels(incident, contract.site)
    judged = expression(incident.conditions[0].signal, incident, incident.window, contract, series)
    promql = worst_severity(f'incident="{incident.id}"', by) + f" or 0 * ({judged})"  # 0: the alert does not fire
    description = f"Green: the alert does not fire. Pending: {pending} for less than {incident.hold} so far."
    state = grafana.state_timeline(
        PanelHeader("Alert state", description), [PanelQuery(scope.add_matchers(promql), legend(by))], STATES
    )
    symptoms = [(condition, in_words(condition.opposite, contract)) for condition in incident.symptoms]
    # the condition that excludes each look-alike; if there is none, the look-alike's own first symptom
    look_alikes = []
    for look in incident.looks_like:
        if look.requires:
            condition, of, prefix = look.requires, incident, f"Not {look.name}: "
            meaning = f"{incident.id}, otherwise {look.name}"
        elif look.name in known:
            condition, of, prefix = known[look.name].symptoms[0], known[look.name], f"{look.name}: "
            meaning = f"{look.name} is possible"
        else:
            continue
        texts = (prefix, f"When {threshold(condition, contract)}: {meaning}. {look.distinguish}")
        line = Threshold(contract.limit(condition.limit), NEUTRAL, NEUTRAL)
        look_alikes.append(signal_panel(condition, of, texts, line, scope))
    rows = {
        incident.title: [actions, state],
        "Symptoms (all must hold)": [
            alarm_panel(condition, incident, f"{capitalized(other_side)} rules out {incident.id}.", scope)
            for condition, other_side in symptoms
        ],
        "Supporting evidence": [
            alarm_panel(condition, incident, f"{meaning} when {threshold(condition, contract)}.", scope)
            for condition, meaning in supporting.items()
        ],
        "What looks like it, how to distinguish": look_alikes,
    }
    cause = " ".join(incident.cause.split())
    fitted = {title: grafana.fit(row) for title, row in rows.items() if row}
    return page_of(scope, incident.id, incident.title, cause, fitted, runbook=incident.id)
