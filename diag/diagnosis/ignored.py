"""Incidents that a site accepts in diag.toml, [ignore]: no part of the verdict, and named in every report."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from diag.core.contract import Contract, Ignored
from diag.core.incident import Incident
from diag.diagnosis.diagnose import Diagnosis


def ignored_at(contract: Contract, time: float) -> dict[str, Ignored]:
    """Return the incidents that are ignored at that unix time."""
    day = datetime.fromtimestamp(time, UTC).date()
    return {name: entry for name, entry in contract.ignored.items() if day <= entry.until}


def without_ignored(incidents: Sequence[Incident], contract: Contract, end: float) -> tuple[Incident, ...]:
    """Return the incidents as they count at that unix time: an ignored one is an info and never escalates."""
    ignored = ignored_at(contract, end)
    return tuple(
        incident._replace(severity="info", escalates=None) if incident.id in ignored else incident
        for incident in incidents
    )


def ignored_notes(diagnoses: Sequence[Diagnosis], contract: Contract, end: float) -> Iterator[str]:
    """Yield a note for each incident that is present and that [ignore] names, or named until a day that is over."""
    ignored = ignored_at(contract, end)
    for name in dict.fromkeys(each.incident.id for each in diagnoses if each.state == "present"):
        entry = contract.ignored.get(name)
        if entry and name in ignored:
            yield f"{name} is ignored until {entry.until}: {entry.reason} ({contract.origin})"
        elif entry:
            yield f"{name} counts again: [ignore.{name}] of {contract.origin} ended on {entry.until}; remove it"


def ignored_present(diagnoses: Sequence[Diagnosis], contract: Contract, end: float) -> tuple[Diagnosis, ...]:
    """Return the ignored incidents that are present: their servers are accepted as they are, and not healthy."""
    ignored = ignored_at(contract, end)
    return tuple(each for each in diagnoses if each.state == "present" and each.incident.id in ignored)
