"""Many servers at once: a line for each, the worst first."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from diag.diagnosis.diagnose import RANK, Diagnosis
from diag.diagnosis.report import Report
from diag.report import sentences as words

VERDICTS = ("critical", "warning", "unknown", "gone", "healthy")


@dataclass(frozen=True)
class FleetRow:
    """One server's line: its verdict, the states of its engines, what is present on it, and since when."""

    instance: str
    verdict: str
    states: str
    incidents: str
    since: str


def servers(report: Report, told: words.Told) -> list[FleetRow]:
    """Every server, the worst first."""
    present: dict[str, list[Diagnosis]] = {}
    for each in report.present:
        if RANK[each.diagnosis.severity]:
            present.setdefault(words.instance(each.diagnosis.subject), []).append(each.diagnosis)
    states: dict[str, list[str]] = {}
    for state in report.progress:
        states.setdefault(words.instance(state.subject), []).append(state.state)
    lines = [
        _server(name, present.get(name, []), states.get(name, ["gone"] if name in report.gone else []), told)
        for name in words.instances(report)
    ]
    return sorted(lines, key=lambda each: (VERDICTS.index(each.verdict), each.instance))


def _server(name: str, present: Sequence[Diagnosis], states: Sequence[str], told: words.Told) -> FleetRow:
    worst = max((RANK[each.severity] for each in present), default=0)
    calm = "unknown" if not states else "gone" if "gone" in states else "healthy"
    verdict = (calm, "warning", "critical")[worst]
    causes = [each for each in present if not each.explained_by]
    return FleetRow(
        instance=words.printable(name),
        verdict=verdict,
        states=", ".join(sorted(set(states))),
        incidents=", ".join(dict.fromkeys(each.incident.id for each in causes)),
        since=words.when(causes[0], told) if causes else "",
    )


def counts(lines: Sequence[FleetRow]) -> str:
    """How many servers have which verdict: "1,000 servers: 3 critical, 40 warning, 957 healthy"."""
    by_verdict = Counter(each.verdict for each in lines)
    told = ", ".join(f"{by_verdict[verdict]:,} {verdict}" for verdict in VERDICTS if by_verdict[verdict])
    return f"{len(lines):,} servers: {told}"
