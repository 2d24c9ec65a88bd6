"""The dashboards of single incidents, which `diag generate --dashboards incidents` writes.

A panel evaluates the expression of the alert, over the same window, and draws the alert's threshold as a line.
"""

from collections.abc import Mapping
from typing import Any

from diag.artefacts import grafana
from diag.artefacts.dashboards.shared import (
    STATES,
    DashboardScope,
    alarm_panel,
    annotations,
    legend,
    links,
    signal_panel,
    symptom_panel,
    worst_severity,
)
from diag.artefacts.grafana import NEUTRAL, DashboardPage, PanelHeader, PanelQuery, Threshold
from diag.artefacts.names import GENERATED_MARK, dashboard_uid, expression, subject_labels, threshold
from diag.core.contract import Contract
from diag.core.incident import Incident


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
    steps = [*incident.mitigate, *incident.do_not]
    actions = grafana.text(
        f"**{incident.severity}**: {incident.impact}.\n\n**Do now**\n\n"
        + "\n".join(f"- {step}" for step in steps)
        + f"\n\nFixes and when each applies: the runbook, `diag explain {incident.id}`."
    )
    by = subject_labels(incident, scope.site)
    judged = expression(incident.conditions[0].signal, incident, incident.window, contract, series)
    promql = worst_severity(f'incident="{incident.id}"', by) + f" or 0 * ({judged})"  # 0: the alert does not fire
    description = f"Green: the alert does not fire. Pending: all symptoms hold, for less than {incident.hold} so far."
    state = grafana.state_timeline(
        PanelHeader("Alert state", description), [PanelQuery(scope.add_matchers(promql), legend(by))], STATES
    )
    rows = {
        incident.title: [actions, state],
        "Symptoms (all must hold)": [symptom_panel(condition, incident, scope) for condition in incident.symptoms],
        "Supporting evidence": [
            alarm_panel(condition, incident, f"{meaning} when {threshold(condition, contract)}.", scope)
            for condition, meaning in supporting.items()
        ],
        "What looks like it, how to distinguish": _look_alikes(incident, known, scope),
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
