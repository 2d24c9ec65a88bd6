"""What a site has made of diag: its SLOs, and every incident with its thresholds."""

from pathlib import Path

from diag.core.contract import Contract
from diag.core.contract_file import find
from diag.core.incident import Incident
from diag.core.site_overrides import apply_overrides
from diag.knowledge.catalog import load


def site(incident_folder: Path | None, contract_file: Path | None) -> tuple[Contract, tuple[Incident, ...]]:
    """The contract, and diag's incidents with the site's own under its thresholds."""
    contract = find(contract_file)
    return contract, apply_overrides(load(incident_folder), contract)
