"""Many servers at once: a line for each, the worst first."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from diag.core.formatting import listed, plural, printable
from diag.core.incident import RANK
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Report
from diag.diagnosis.shared_labels import SharedLabel
from diag.report import sentences as words

VERDICTS = ("critical", "warning", "unknown", "gone", "healthy")


class FleetRow(NamedTuple):
    """One server's line: its verdict, the states of its engines, what is present on it, and since when.

    `name` is its label as it is, `instance` as it may be printed.
    """

    instance: str
    verdict: str
    states: str
    incidents: str
    when: str
    name: str = ""

    @property
    def summary(self) -> str:
        """Its incidents or else the states of its engines, and when."""
        return f"{self.incidents or self.states}  {self.when}".rstrip()


def servers(report: Report, written_as: words.TimeFormat) -> list[FleetRow]:
    """Every server, the worst first."""
    present: dict[str, list[Diagnosis]] = {}
    for finding in report.present:
        if RANK[finding.diagnosis.severity]:
            present.setdefault(words.instance(finding.diagnosis.subject), []).append(finding.diagnosis)
    states: dict[str, list[str]] = {}
    for progress in report.progress:
        states.setdefault(words.instance(progress.subject), []).append(progress.state)
    states |= {name: ["gone"] for name in set(report.gone) - states.keys()}
    refused = {words.instance(found.diagnosis.subject) for found in report.findings if found.diagnosis.unanswered}
    rows = [
        _server(name, present.get(name, []), states.get(name, []), name in refused, written_as)
        for name in words.instances(report)
    ]
    return sorted(rows, key=lambda row: (VERDICTS.index(row.verdict), row.instance))


def causes(report: Report, rows: Sequence[FleetRow], written_as: words.TimeFormat, most: int = 3) -> list[FleetRow]:
    """The rows, with one instead of many for the servers whose first incident comes with the same shared label."""
    shared = {
        (found.incident, name): found
        for found in report.shared
        if found.property.kind != "hour"
        for name in found.servers
    }
    groups: dict[SharedLabel | str, list[FleetRow]] = {}
    for row in rows:
        incident = row.incidents.partition(", ")[0]
        groups.setdefault(shared.get((incident, row.name), row.name), []).append(row)
    return [
        group[0] if isinstance(cause, str) else _cause(cause, group, report, written_as, most)
        for cause, group in groups.items()
    ]


def _cause(
    cause: SharedLabel, group: Sequence[FleetRow], report: Report, written_as: words.TimeFormat, most: int
) -> FleetRow:
    names = {row.name for row in group}
    label = words.shared_label(cause.property, cause.value)
    incidents = dict.fromkeys(incident for row in group for incident in row.incidents.split(", "))
    states = {state for row in group for state in row.states.split(", ")}
    present = (found.diagnosis for found in report.present if found.diagnosis.incident.id == cause.incident)
    began = words.began([found for found in present if words.instance(found.subject) in names], written_as)
    return FleetRow(
        instance=f"{label}: {listed([row.instance for row in group], most=most)}",
        verdict=group[0].verdict,
        states=", ".join(sorted(states)),
        incidents=", ".join(incidents),
        when=f"first seen {began}",
    )


def _server(
    name: str, present: Sequence[Diagnosis], states: Sequence[str], refused: bool, written_as: words.TimeFormat
) -> FleetRow:
    """The line of one server; `refused` is whether an incident is unknown on it because queries were refused."""
    worst = max((RANK[diagnosis.severity] for diagnosis in present), default=0)
    without = "gone" if "gone" in states else "unknown" if refused or not states else "healthy"
    causes = [diagnosis for diagnosis in present if not diagnosis.explained_by]
    return FleetRow(
        instance=printable(name),
        verdict=(without, "warning", "critical")[worst],
        states=", ".join(sorted(set(states))),
        incidents=", ".join(dict.fromkeys(diagnosis.incident.id for diagnosis in causes)),
        when=words.when(causes[0], written_as) if causes else "",
        name=name,
    )


def counts(verdicts: Sequence[str]) -> str:
    """How many servers have which verdict: "1,000 servers: 3 critical, 40 warning, 957 healthy"."""
    counted = Counter(verdicts)
    shown = ", ".join(f"{counted[verdict]:,} {verdict}" for verdict in VERDICTS if counted[verdict])
    return f"{plural(len(verdicts), 'server')}: {shown}"
