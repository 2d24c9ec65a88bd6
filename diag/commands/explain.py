"""`diag explain`: the runbook of one incident."""

from pathlib import Path

from diag.artefacts.runbooks import runbook
from diag.commands.site import site
from diag.core.errors import BadUsage


def run(name: str, folder: Path | None) -> str:
    """The runbook of one incident."""
    contract, incidents = site(folder, None)
    by_id = {incident.id: incident for incident in incidents}
    if name not in by_id:
        raise BadUsage(f"there is no incident '{name}'{_closest(name, [*by_id])}; diag incidents lists them")
    return runbook(by_id[name], incidents, contract)


def _closest(name: str, known: list[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
