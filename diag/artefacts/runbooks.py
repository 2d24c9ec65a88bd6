"""All runbooks: one per incident, one about missing telemetry, and their index."""

import re
from collections.abc import Sequence

from diag.artefacts.names import GENERATED_MARK, alert_name
from diag.artefacts.runbook import linked, runbook
from diag.artefacts.telemetry_alerts import RUNBOOK_PAGE, SERVER, TELEMETRY_ALERTS, expression_of
from diag.core.contract import Contract
from diag.core.incident import Incident
from diag.knowledge.rule_set import rule_set
from diag.promql import pretty


def runbooks(incidents: Sequence[Incident], contract: Contract) -> dict[str, str]:
    """The text of every runbook by its file, and their index."""
    rules = rule_set(incidents, contract)
    pages = {incident.id: runbook(incident, incidents, contract, rules) for incident in incidents}
    pages |= {RUNBOOK_PAGE: _telemetry(contract), "README": _index(incidents)}
    return {f"runbooks/{name}.md": text for name, text in pages.items()}


def _telemetry(contract: Contract) -> str:
    """The runbook of the alerts about the telemetry itself."""
    parts = [
        f"\n## {alert.name}\n\n{_without_labels(alert.summary)}. Impact: {alert.impact}.\n\n{alert.action}\n\n"
        f"```promql\n{pretty(expression_of(alert, contract))}\n```\n"
        for alert in TELEMETRY_ALERTS
    ]
    head = f"# Missing telemetry\n\n*{GENERATED_MARK}.* Missing telemetry means unknown, not healthy.\n"
    return head + "".join(parts)


def _without_labels(template: str) -> str:
    """A template of an alert with names in the place of its labels."""
    return re.sub(r"\{\{ \$labels\.(\w+) .*?\}\}", r"`<\1>`", template.replace(SERVER, "`<server>`"))


def _index(incidents: Sequence[Incident]) -> str:
    rows = "".join(
        f"| {linked([incident.id])} | {alert_name(incident.id)} | {incident.severity} | {', '.join(incident.per)}"
        f" | {incident.title} |\n"
        for incident in incidents
    )
    return (
        f"# Runbooks\n\n*{GENERATED_MARK}.* One runbook per alert. Alerts about missing telemetry:"
        f" [{RUNBOOK_PAGE}]({RUNBOOK_PAGE}.md).\n\n"
        f"| incident | alert | severity | evaluated per | title |\n|---|---|---|---|---|\n{rows}"
    )
