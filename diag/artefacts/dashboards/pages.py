"""All dashboards: Fleet, Server, GPUs and ranks, Capacity; on request one per incident."""

from collections.abc import Sequence

from diag.artefacts import grafana
from diag.artefacts.dashboards.fleet import fleet_page
from diag.artefacts.dashboards.incidents import incident_page
from diag.artefacts.dashboards.resources import capacity_page, gpus_page
from diag.artefacts.dashboards.server import server_page
from diag.core.contract import Contract
from diag.core.incident import Incident
from diag.knowledge.formulas import rule_set


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
