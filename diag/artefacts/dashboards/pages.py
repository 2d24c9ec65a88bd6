"""All dashboards: an overview, a page per incident, a page of GPUs and ranks, one of capacity and cost.

A panel evaluates what the alert evaluates, over the same window, and draws the alert's threshold as a line.
"""

from collections.abc import Sequence

from diag.artefacts.dashboards.capacity import capacity_page
from diag.artefacts.dashboards.gpus import gpus_page
from diag.artefacts.dashboards.incident_page import incident_page
from diag.artefacts.dashboards.overview import overview
from diag.artefacts.grafana.page import render
from diag.core.contract import Contract
from diag.core.incident import Incident
from diag.knowledge.rule_set import rule_set


def dashboards(incidents: Sequence[Incident], contract: Contract) -> dict[str, str]:
    """The text of every dashboard by its file."""
    known = {incident.id: incident for incident in incidents}
    series = rule_set(incidents, contract).series
    pages = {incident.id: incident_page(incident, known, contract, series) for incident in incidents}
    pages |= {
        "overview": overview(contract, series),
        "gpus": gpus_page(incidents, contract, series),
        "capacity": capacity_page(contract),
    }
    return {f"dashboards/{name}.json": render(page) for name, page in pages.items()}
