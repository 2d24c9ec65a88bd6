"""`diag incidents`: what is looked for, a line each."""

from pathlib import Path

from diag.knowledge.catalog import load


def run(folder: Path | None) -> str:
    """One line per incident."""
    incidents = load(folder)
    width = max(len(each.id) for each in incidents)
    return "".join(f"{each.id:<{width}}  {each.severity:<8}  {each.title}\n" for each in incidents)
