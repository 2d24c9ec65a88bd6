"""The answer of a report: verdict, place, start, what to do now, the fix, the evidence, what was ruled out or not seen.

Every surface (terminal, HTML, Markdown, JSON, MCP) lays these fields out, in this order, and decides nothing.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from diag.core.formatting import escaped, listed, printable
from diag.core.subjects import instance_name
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.proposals import Proposal
from diag.diagnosis.relaunch import launchable
from diag.diagnosis.report import FAMILIES, Finding, Report
from diag.report import sentences as words


class Actions(NamedTuple):
    """Actions on a finding: `advice` and `now`, a command or a number, need no restart; then the fix.

    `is_over`: the incident has ended, so advice and command are for the next time. The relaunch line carries the fix.
    """

    is_over: bool = False
    advice: tuple[str, ...] = ()
    now: Proposal | None = None
    fix: Proposal | None = None
    relaunch: str = ""
    alternatives: tuple[Proposal, ...] = ()
    do_not: tuple[str, ...] = ()

    @property
    def do_now(self) -> list[str]:
        """Sentences for the actions that need no restart, the first one first."""
        return [*self.advice, *([words.action(self.now)] if self.now else [])]


def choose_actions(finding: Finding) -> Actions:
    """Sort the proposals, which come the safest first; the fix is the one that the relaunch line carries."""
    incident = finding.diagnosis.incident
    complete = [proposal for proposal in finding.proposals if not proposal.needs]
    safest = list(takewhile(lambda fix: not fix.restart, incident.fixes))
    now = next((p for p in complete if p.fix in safest and (p.computed or p.fix.command)), None)
    starts = incident.lints  # a start that failed serves nobody: its cure comes first
    is_cure = now is not None and (now.computed or now.fix.while_it_lasts)
    rest = [proposal for proposal in (*complete, *finding.proposals) if proposal is not now]
    fix = launchable(finding.proposals) or next(iter(rest), None)
    return Actions(
        is_over=not finding.diagnosis.ongoing,
        advice=() if is_cure or (finding.failure and starts) else incident.mitigate,
        now=now,
        fix=fix,
        relaunch=finding.relaunch or "",
        alternatives=tuple(proposal for proposal in finding.proposals if proposal not in (now, fix)),
        do_not=incident.do_not,
    )


class ReportAnswer(NamedTuple):
    """The answer about one incident, on one server or on those of a fleet that have it, or about finding none.

    `verdict` is the word in capitals that it begins with; `since` is the unix time at which the last episode began, or
    at which it was first watched if it held from then on; `when` is the same in words. `findings` are those of the
    servers, the first one in detail, and `evidence` its values with their thresholds. Without an incident there are
    neither, and `reasons` are why none was found.
    """

    verdict: str
    where: str
    incident: str = ""
    title: str = ""
    impact: str = ""
    since: float | None = None
    when: str = ""
    actions: Actions = Actions()
    findings: tuple[Finding, ...] = ()
    reasons: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    ruled_out: tuple[str, ...] = ()
    not_ruled_out: tuple[str, ...] = ()
    not_seen: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The answer in one sentence; without an incident, one for each reason."""
        if not self.findings:
            return [f"{self.verdict} {reason}" for reason in self.reasons]
        return [f"{self.verdict} {self.incident} on {self.where}, {self.when}: {self.impact}"]


def answers(report: Report, written_as: words.TimeFormat) -> list[ReportAnswer]:
    """Return an answer for each primary incident, the worst first; if there is none, the one about the whole report."""
    families = (FAMILIES[name] for name in report.observed.not_measured)
    hints = words.grouped((family.hint, family.name) for family in families)
    not_seen = tuple(f"{', '.join(names)} ({hint})" for hint, names in hints.items())
    found = [_about(group, report, written_as)._replace(not_seen=not_seen) for group in words.alike(report)]
    if found:
        return found
    target = escaped(report.observed.target)
    if report.verdict == "unknown":
        why = words.folded([escaped(unjudged.sentence) for unjudged in report.not_judged])
        return [ReportAnswer("CANNOT TELL", target, reasons=tuple(why), not_seen=not_seen)]
    healthy = f"{target}: {words.states(report)}; {words.found_nothing(report)}"
    return [ReportAnswer("HEALTHY", target, reasons=(healthy,), not_seen=not_seen)]


def _about(group: Sequence[Finding], report: Report, written_as: words.TimeFormat) -> ReportAnswer:
    first, diagnoses = group[0].diagnosis, [finding.diagnosis for finding in group]
    where, when = words.where(first), words.when(first, written_as)
    if len(group) > 1:
        names = list(dict.fromkeys(printable(instance_name(diagnosis.subject)) for diagnosis in diagnoses))
        where = f"{len(names):,} of {len(report.servers):,} servers ({listed(names)})"
        ongoing = sum(diagnosis.ongoing for diagnosis in diagnoses)
        now = "ongoing" if ongoing == len(group) else f"ongoing on {ongoing} of them" if ongoing else "ended"
        when = f"{now}, first seen {words.began(diagnoses, written_as)}"
    return ReportAnswer(
        verdict=first.severity.upper(),
        where=where,
        incident=first.incident.id,
        title=first.incident.title,
        impact=first.incident.impact,
        since=min(map(_start, diagnoses)),
        when=when,
        actions=choose_actions(group[0]),
        findings=tuple(group),
        evidence=tuple(
            f"{reading.condition.signal.name}: {reading.shown} ({reading.threshold})"
            for reading in words.evidence(first)
        ),
        ruled_out=tuple(refuted.name for refuted in first.refuted),
        not_ruled_out=tuple(look_alike.name for look_alike in first.open),
    )


def _start(diagnosis: Diagnosis) -> float:
    last = diagnosis.one_by_one[-1]
    return last.watched_since if last.since is None else last.since
