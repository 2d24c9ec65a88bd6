"""The dashboard Server: the signals of one incident, latency, load and GPUs on one time axis."""

from collections.abc import Mapping
from typing import Any

from diag.artefacts import grafana
from diag.artefacts.dashboards.shared import (
    BUCKETS,
    GENERATED,
    KV_CACHE_USAGE,
    PROMPT,
    SM_CLOCK,
    STATES,
    DashboardScope,
    LinePanel,
    annotations,
    burn_rate,
    legend,
    line_panels,
    links,
    quantiles,
    worst_severity,
)
from diag.artefacts.grafana import DashboardPage, PanelHeader, PanelQuery, QueryVariable, Threshold
from diag.artefacts.names import GENERATED_MARK, GRAFANA_UNITS, TOKENS_PER_SECOND, dashboard_uid
from diag.artefacts.recording_rules import THRESHOLD
from diag.core.contract import Contract
from diag.core.formatting import quantity
from diag.knowledge.incidents.contract_breached import incident as slo_violated

NO, YES = 10, 11
"""The states of a condition that is true or false, beside those of an alert."""
LATENCIES = {
    "TTFT": ("Time to first token (TTFT)", "ttft_seconds"),
    "ITL": ("Inter-token latency (ITL)", "itl_seconds"),
    "E2E": ("End-to-end latency", "e2e_seconds"),
    "queue": ("Queue time", ""),
}
"""Titles, and the SLOs that diag.toml may state."""
LOAD = (
    LinePanel(
        PanelHeader("Requests", "Healthy: few requests wait; the running ones follow the load."),
        ("engine",),
        {state: f"sum by ($by) (vllm:num_requests_{state})" for state in ("running", "waiting")},
    ),
    LinePanel(
        PanelHeader("Token throughput", "Healthy: above 0 while requests run.", TOKENS_PER_SECOND),
        ("engine",),
        {"generated": GENERATED, "prompt": PROMPT},
    ),
    LinePanel(
        PanelHeader("KV cache usage", "Healthy: below 90 %, or full without preemptions.", "percentunit"),
        ("engine",),
        {"": KV_CACHE_USAGE},
        Threshold(0.9),
    ),
    LinePanel(
        PanelHeader("Preemptions", "Healthy: 0. Each one recomputes a request.", "ops"),
        ("engine",),
        {"": "sum by ($by) (rate(vllm:num_preemptions_total[$window]))"},
    ),
    LinePanel(
        PanelHeader("Finished requests", "Healthy: in proportion to the load, none with reason error.", "reqps"),
        ("engine",),
        {"": "sum by ($by, finished_reason) (rate(vllm:request_success_total[$window]))"},
    ),
)
GPUS = (
    LinePanel(
        PanelHeader("GPU utilisation", "Healthy: high under load. At low power: busy-waiting.", "percentunit"),
        ("gpu",),
        {"": "max by ($by) (diag_gpu_utilization_ratio)"},
    ),
    LinePanel(
        PanelHeader("GPU power", "Normal: at the limit under load. Low at high utilisation: busy-waiting.", "watt"),
        ("gpu",),
        {"drawn": "max by ($by) (diag_gpu_power_watts)", "limit": "max by ($by) (diag_gpu_power_limit_watts)"},
    ),
    LinePanel(
        PanelHeader("SM clock", "Healthy: steady under load. A sawtooth: thermal throttling.", "hertz"),
        ("gpu",),
        {"": SM_CLOCK},
    ),
)


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
    return DashboardPage(
        uid=dashboard_uid("server"),
        title="vLLM / Server",
        description=f"{GENERATED_MARK}. Incidents, latency, load and GPUs of a server on one time axis.",
        rows=[
            ("Incidents", [_incidents(scope)]),
            ("Signals of $incident", _signals(scope)),
            ("Latency", _latencies(scope)),
            ("Load", [*line_panels(LOAD, scope), _burn_rate(scope)]),
            ("GPUs", grafana.fit(line_panels(GPUS, scope))),
        ],
        variables={**scope.variable_queries(), **chosen},
        annotations=annotations(scope),
        links=links("${incident}", contract.site),
    )


def _incidents(scope: DashboardScope) -> Any:
    by = scope.by("incident")
    present = scope.fill("0 * max by ($by) (vllm:num_requests_running or diag_vllm_up)", scope.by())
    firing = scope.add_matchers(worst_severity('incident=~".+"', by))
    header = PanelHeader(
        "Incidents of this server", "Healthy: one green bar. Pending to critical, each a bar.", width=24
    )
    query = PanelQuery(f"{firing} or on ({', '.join(scope.by())}) {present}", legend((*scope.by(), "incident")))
    return grafana.state_timeline(header, [query], STATES, height=5)


def _signals(scope: DashboardScope) -> list[Any]:
    """Return the state of the incident's alert and of its yes-or-no conditions, then a panel for each number."""
    by = ", ".join(scope.by())
    alert = scope.add_matchers(worst_severity('incident="$incident"', scope.by()))
    present = scope.fill("0 * max by ($by) (vllm:num_requests_running or diag_vllm_up)", scope.by())
    yes_or_no = f'{{__name__=~"none|${{state:pipe}}", {scope.server}}}'
    named = f'label_replace({yes_or_no}, "condition", "$1", "__name__", "[^:]*:([^:]*).*") + {NO}'
    states = {**STATES, NO: ("no", "light-blue"), YES: ("yes", "dark-blue")}
    title = "Alert and yes-or-no conditions of $incident"
    description = "Green: the alert does not fire. Pending: all conditions hold, not yet for long enough."
    timeline = grafana.state_timeline(
        PanelHeader(title, description, width=24),
        [
            PanelQuery(f"{alert} or on ({by}) {present}", f"alert {legend(scope.by())}"),
            PanelQuery(named, f"{{{{condition}}}} {legend(scope.by('engine', 'gpu'))}"),
        ],
        states,
        height=5,
    )
    limit = f'max by (unit) ({THRESHOLD}{{incident="$incident", series="$signal"}})'
    value = f'{{__name__="$signal", {scope.server}}} + on () group_left (unit) 0 * {limit}'
    signals = grafana.repeated(
        PanelHeader("$signal", "The title is the condition, the dashed line its threshold.", width=24),
        [
            PanelQuery(value, f"{legend(scope.by('engine', 'gpu'))} ({{{{unit}}}})"),
            PanelQuery(limit, "threshold ({{unit}})"),
        ],
        "signal",
        GRAFANA_UNITS,
    )
    return [timeline, signals]


def _latencies(scope: DashboardScope) -> list[Any]:
    panels = []
    for name, (title, entry) in LATENCIES.items():
        contract, line, text = scope.contract, None, "Healthy: steady."
        if entry in contract.stated:
            line = Threshold(getattr(contract, entry))
            text = f"Healthy: steady, below the SLO of {quantity(line.value, 'seconds')}."
        panels.append(LinePanel(PanelHeader(title, text, "s"), ("engine",), quantiles(BUCKETS[name]), line))
    return line_panels(panels, scope)


def _burn_rate(scope: DashboardScope) -> Any:
    fast, slow = (burn.factor for burn in slo_violated.burns)
    text = f"Healthy: below 1. Pages above {fast:g} over 1 h, or above {slow:g} over 6 h."
    header = PanelHeader("Error budget burn rate", text)
    return grafana.time_series(header, [PanelQuery(burn_rate(scope), legend(scope.by("engine")))], Threshold(slow))
