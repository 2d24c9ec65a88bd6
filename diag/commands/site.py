"""What a site has made of diag: its SLOs, and every incident with its thresholds."""

import sys
from pathlib import Path

from diag.core.contract import Contract
from diag.core.contract_file import apply_overrides, find, renamed_thresholds
from diag.core.incident import Incident
from diag.knowledge.catalog import load


def site(incident_folder: Path | None, contract_file: Path | None) -> tuple[Contract, tuple[Incident, ...]]:
    """The contract, and diag's incidents with the site's own under its thresholds."""
    contract, incidents = find(contract_file), load(incident_folder)
    for sentence in renamed_thresholds(incidents, contract):
        print(f"diag: {sentence}", file=sys.stderr)  # the report itself goes to standard output
    return contract, apply_overrides(incidents, contract)
