"""`diag explain`: the runbook of one incident."""

from pathlib import Path

from diag.artefacts.runbooks import runbook
from diag.core.contract_file import find
from diag.core.errors import BadUsage
from diag.core.site_overrides import apply_overrides
from diag.knowledge.catalog import load


def run(name: str, folder: Path | None) -> str:
    """The runbook of one incident."""
    contract = find(None)
    known = {each.id: each for each in apply_overrides(load(folder), contract)}
    if name not in known:
        raise BadUsage(f"no incident is called '{name}'; there are {', '.join(known)}")
    return runbook(known[name], tuple(known.values()), contract)
