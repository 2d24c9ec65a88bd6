"""`diag incidents`: the incidents that are looked for, a line each."""

from pathlib import Path

from diag.knowledge.catalog import load


def run(folder: Path | None) -> str:
    """One line for each incident: id, severity, title."""
    incidents = load(folder)
    width = max(len(incident.id) for incident in incidents)
    return "".join(f"{incident.id:<{width}}  {incident.severity:<8}  {incident.title}\n" for incident in incidents)
