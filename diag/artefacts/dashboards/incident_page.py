"""The dashboard of one incident: is it here, which symptoms hold, what else it could be."""

from collections.abc import Mapping
from typing import Any

from diag.artefacts.dashboards.scope import DashboardScope, legend
from diag.artefacts.dashboards.shared import (
    STATES,
    alarm_panel,
    annotations,
    links,
    server_and_gpus,
    signal_panel,
    symptom_panel,
    worst_severity,
)
from diag.artefacts.grafana import panels
from diag.artefacts.grafana.page import DashboardPage
from diag.artefacts.grafana.panels import NEUTRAL, PanelHeader, PanelQuery, Threshold
from diag.artefacts.names import GENERATED_MARK, dashboard_uid, expression, subject_labels, threshold
from diag.core.contract import Contract, Site
from diag.core.incident import Condition, Incident, LookAlike


def incident_page(
    incident: Incident, known: Mapping[str, Incident], contract: Contract, series: Mapping[str, str]
) -> DashboardPage:
    """Return the page of an incident; `known` are all incidents by id, `series` the recorded series."""
    scope = DashboardScope(contract, ("model", "engine", "gpu"), series)
    rows = {
        incident.title: [_introduction(incident, contract.site), _state(incident, scope)],
        "Symptoms (all must hold)": [symptom_panel(condition, incident, scope) for condition in incident.symptoms],
        "Supporting evidence": _supporting(incident, scope),
        "What looks like it, how to distinguish": _look_alikes(incident, known, scope),
        "Server and GPUs over time": server_and_gpus(scope),
    }
    return DashboardPage(
        uid=dashboard_uid(incident.id),
        title=f"vLLM / {incident.title}",
        description=f"{GENERATED_MARK}. {' '.join(incident.cause.split())}",
        rows=[(title, panels.fit(row)) for title, row in rows.items() if row],
        variables=scope.variable_queries(),
        annotations=annotations(scope),
        links=links(incident.id, contract.site),
    )


def _introduction(incident: Incident, site: Site) -> Any:
    address = "http://${instance}" if "instance" in site.labels else "URL"
    return panels.text(
        f"**{incident.severity}**: {incident.impact}.\n\n{' '.join(incident.cause.split())}\n\n"
        f"Diagnose now: `diag doctor {address}`. Runbook: `diag explain {incident.id}`."
    )


def _state(incident: Incident, scope: DashboardScope) -> Any:
    """The alert for every subject that is judged, also where it does not fire."""
    by = subject_labels(incident, scope.site)
    first = expression(incident.conditions[0].signal, incident, incident.window, scope.contract, scope.series)
    promql = scope.narrow(worst_severity(f'incident="{incident.id}"', by) + f" or 0 * ({first})")
    description = f"Green: the alert does not fire. Pending: all symptoms hold, for less than {incident.hold} so far."
    return panels.state_timeline(PanelHeader("Alert state", description), [PanelQuery(promql, legend(by))], STATES)


def _supporting(incident: Incident, scope: DashboardScope) -> list[Any]:
    """What makes the incident more likely, and what makes it critical."""

    def panel(condition: Condition, meaning: str) -> Any:
        text = f"{meaning} when {threshold(condition, scope.contract)}."
        return alarm_panel(condition, incident, text, scope)

    meanings = dict.fromkeys(incident.supports, "Supports the diagnosis")
    if incident.escalates:
        meanings[incident.escalates] = "The alert is critical"
    return [panel(condition, meaning) for condition, meaning in meanings.items()]


def _look_alikes(incident: Incident, known: Mapping[str, Incident], scope: DashboardScope) -> list[Any]:
    """What must hold for this incident and not for a look-alike; else a look-alike's own first symptom."""
    panels_of = (_look_alike(look, incident, known, scope) for look in incident.looks_like)
    return [panel for panel in panels_of if panel]


def _look_alike(look: LookAlike, incident: Incident, known: Mapping[str, Incident], scope: DashboardScope) -> Any:
    if look.requires:
        when = threshold(look.requires, scope.contract)
        texts = (f"Not {look.name}: ", f"When {when}: {incident.id}, otherwise {look.name}. {look.distinguish}")
        return signal_panel(look.requires, incident, texts, _blue_line(look.requires, scope), scope)
    if look.name in known:
        first = known[look.name].symptoms[0]
        texts = (
            f"{look.name}: ",
            f"When {threshold(first, scope.contract)}: {look.name} is possible. {look.distinguish}",
        )
        return signal_panel(first, known[look.name], texts, _blue_line(first, scope), scope)
    return None


def _blue_line(condition: Condition, scope: DashboardScope) -> Threshold:
    return Threshold(scope.contract.limit(condition.limit), NEUTRAL, NEUTRAL)
