"""The whole report for a person at a terminal, as `--verbose` prints it: at most 100 columns."""

from diag.diagnosis.proposals import Proposal
from diag.diagnosis.report import Finding, Report
from diag.report import fleet
from diag.report import sentences as words
from diag.report.actions import actions
from diag.report.evidence import rows
from diag.report.layout import labelled, paragraph, table, verbatim
from diag.report.verdict import verdicts

ROWS = 5
SERVERS = 20
NORMAL = 20


def render(report: Report) -> str:
    """The report as plain text, one line break at its end."""
    shared = [line for text in words.shared(report) for line in paragraph(text)]
    lines = [*verdicts(report), *shared, *_not_judged(report)]
    lines += [*labelled("progress", words.not_busy(report)), *_fleet(report)]
    for finding, *others in words.alike(report):
        lines += ["", *_primary(finding, others, report)]
    lines += _section("also present", words.also(report))
    lines += _section("timeline", words.timeline(report))
    return "\n".join([*lines, "", *_footer(report)]) + "\n"


def _not_judged(report: Report) -> list[str]:
    """Why the verdict is that nothing can be said."""
    return labelled("why", [each.sentence for each in report.not_judged]) if report.verdict == "unknown" else []


def _fleet(report: Report) -> list[str]:
    """A line for each server of a fleet that is not healthy, the worst first."""
    if not words.is_fleet(report):
        return []
    servers = fleet.servers(report, words.time_format(report))
    ill = [server for server in servers if server.verdict != "healthy"]
    rows = [(server.verdict, server.instance, server.summary) for server in ill[:SERVERS]]
    rest = [f"  and {len(ill) - SERVERS:,} more that are not healthy"] if len(ill) > SERVERS else []
    return ["", fleet.counts([server.verdict for server in servers]), *table(rows), *rest]


def _primary(finding: Finding, others: list[Finding], report: Report) -> list[str]:
    diagnosis = finding.diagnosis
    incident = diagnosis.incident
    alike = f", as on {len(others):,} more" if others else ""
    follows = [f"{other.incident.id}: {other.incident.title}" for other in words.consequences(finding, report)]
    return [
        *paragraph(f"{incident.title} ({words.where(diagnosis)}{alike}): {incident.impact}"),
        *table(rows(diagnosis), label="evidence", right=(1,)),
        *labelled("log", words.quoted(finding)),
        *labelled("first sign", words.first_sign(diagnosis, words.time_format(report))),
        *labelled("ruled out", [f"{refuted.name}: {refuted.evidence}" for refuted in diagnosis.refuted]),
        *labelled("not ruled out", [f"{look_alike.name}: {look_alike.distinguish}" for look_alike in diagnosis.open]),
        *labelled("consequences", follows),
        *_actions(finding),
        *labelled("do not", incident.do_not),
        *labelled("runbook", [f"diag explain {incident.id}"]),
    ]


def _actions(finding: Finding) -> list[str]:
    """What to do now, the change that the relaunch line carries, then the alternatives in a line each."""
    chosen = actions(finding)
    return [
        *labelled("next time" if chosen.is_over else "do now", chosen.advice),
        *(_action("mitigation", chosen.now) if chosen.now else []),
        *(_action("fix", chosen.fix) if chosen.fix else []),
        *verbatim("relaunch", finding.relaunch or ""),
        *labelled("alternatives", [_alternative(proposal) for proposal in chosen.alternatives]),
        *labelled("not computed", words.uncomputed(finding)),
    ]


def _action(label: str, proposal: Proposal) -> list[str]:
    fix = proposal.fix
    facts = {
        "expected effect": fix.effect,
        "trade-off": fix.risk,
        "rollback": fix.rollback,
        "rationale": words.why(fix.why),
        "restart": "needed" if fix.restart else "not needed",
        "available in": words.versions(proposal),
        "check first": ", ".join(proposal.needs),
    }
    lines = labelled(label, [text for text in (words.change(proposal), proposal.text) if text])
    return [*lines, *(line for name, text in facts.items() if text for line in labelled(name, [text]))]


def _alternative(proposal: Proposal) -> str:
    risk = proposal.fix.risk and f"Trade-off: {proposal.fix.risk}."
    parts = (words.change(proposal), proposal.text, risk, words.versions(proposal), words.needs(proposal))
    return "  ".join(part for part in parts if part)


def _section(label: str, texts: list[str]) -> list[str]:
    return ["", *labelled(label, texts)] if texts else []


def _footer(report: Report) -> list[str]:
    observed = report.observed
    facts = {
        "source": [words.source(report, words.time_format(report))],
        "server": words.folded(list(observed.servers), ROWS),
        "normal": words.normality(report)[:NORMAL],
        "ceiling": words.ceilings(report),
        "checked": words.checked(report, verbose=True),
        "unknown": words.not_judged(report),
        "not judged": words.undecided(report),
        "not collected": words.not_collected(report),
        "thresholds": ["; ".join(report.contract)],
        "note": list(observed.notes),
    }
    return [line for label, texts in facts.items() for line in labelled(label, texts)]
