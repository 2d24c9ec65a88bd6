"""Sentences about health that was not shown: parts that were not seen, and incidents that cannot be told apart.

Their verdicts are NO INCIDENT FOUND (NO FAILURE FOUND of a log alone) and a WARNING between several incidents.
"""

from typing import NamedTuple

from diag.core.formatting import listed, plural, printable
from diag.core.subjects import instance_name
from diag.diagnosis.decision_table import Reading
from diag.diagnosis.report import Report
from diag.report.sentences import grouped, is_fleet, place

NO_INCIDENT, NO_FAILURE = "NO INCIDENT FOUND", "NO FAILURE FOUND"
MOST_NAMED = 3
"""Incidents, missing signals and readings that one sentence names."""


class Undecided(NamedTuple):
    """Servers on which users are affected by one of several incidents, which the missing signals would tell apart."""

    servers: tuple[str, ...]
    where: str
    incidents: tuple[str, ...]
    missing: tuple[str, ...]
    signs: tuple[Reading, ...]

    @property
    def question(self) -> str:
        """The incidents between which nothing decides: "cannot tell which: kv_cascade or kv_pool_saturated"."""
        named = list(self.incidents[:MOST_NAMED])
        if len(named) == 1:
            return f"cannot tell whether it is {named[0]}"
        more = f" or {len(self.incidents) - MOST_NAMED} more" if len(self.incidents) > MOST_NAMED else ""
        return f"cannot tell which: {', '.join(named[:-1])} or {named[-1]}{more}"

    @property
    def lacking(self) -> str:
        return f"missing {listed(list(self.missing), most=MOST_NAMED)}"

    @property
    def measured(self) -> str:
        """The readings of the impact on users and of the incidents, each with its threshold."""
        shown = (f"{each.condition.signal.name} {each.shown} ({each.threshold})" for each in self.signs[:MOST_NAMED])
        return ", ".join(shown)

    @property
    def sentence(self) -> str:
        return f"{self.where}: {self.question}; {self.lacking}; measured: {self.measured}"


def undecided(report: Report) -> list[Undecided]:
    """Return what cannot be told of servers whose users are affected; servers with the same incidents together."""
    by_server = grouped((instance_name(suspect.diagnosis.subject), suspect) for suspect in report.health.suspects)
    alike = grouped(
        (("" if is_fleet(report) else name, *dict.fromkeys(each.diagnosis.incident.id for each in suspects)), name)
        for name, suspects in by_server.items()
    )
    found = []
    for (_, *incidents), names in alike.items():
        own = by_server[names[0]]
        signs: dict[str, Reading] = {}
        for sign in (sign for suspect in own for sign in suspect.signs):
            signs.setdefault(sign.condition.signal.name, sign)
        subjects = {suspect.diagnosis.subject for suspect in own}
        alone = place(own[0].diagnosis.subject) if len(subjects) == 1 else printable(names[0])
        found.append(
            Undecided(
                servers=tuple(names),
                where=alone if len(names) == 1 else f"{len(names):,} of {plural(len(report.servers), 'server')}",
                incidents=tuple(incidents),
                missing=tuple(dict.fromkeys(name for suspect in own for name in suspect.missing)),
                signs=tuple(signs.values()),
            )
        )
    return found


def pass_without_health(report: Report) -> str:
    """Return the first words of a report that found nothing, and saw less than health needs."""
    if report.observed.endings:
        return NO_FAILURE + in_brackets(ignored=ignored(report))
    return NO_INCIDENT + in_brackets(ignored=ignored(report), **{"not seen": list(report.health.lacking)})


def ignored(report: Report) -> list[str]:
    """List the incidents that are present and that diag.toml accepts."""
    return list(dict.fromkeys(each.incident.id for each in report.health.ignored))


def in_brackets(**lists: list[str]) -> str:
    """Return lists of names behind a verdict: "  (ignored: kv_pool_saturated; not seen: queue)", "" without names."""
    named = "; ".join(f"{head}: {listed(names, most=MOST_NAMED)}" for head, names in lists.items() if names)
    return f"  ({named})" if named else ""


def not_seen(report: Report) -> list[str]:
    """List what health needs and was not seen, each with the telemetry that lacks and the servers."""
    servers = grouped(((missing.name, missing.lacks), missing.server) for missing in report.health.missing)
    lines = []
    for (name, lacks), names in servers.items():
        where = f" on {listed(list(map(printable, names)))}" if len(report.servers) > 1 and names[0] else ""
        lines.append(f"{name}: {lacks}{where}")
    return lines
