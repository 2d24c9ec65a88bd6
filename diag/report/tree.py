"""The tree of a report: the labelled parts of an incident and of the report as a whole, for every surface to draw."""

from collections.abc import Mapping, Sequence

from diag.core.formatting import TimeFormat
from diag.diagnosis.proposals import Proposal
from diag.diagnosis.report import Finding, Report
from diag.report import coverage
from diag.report import sentences as words
from diag.report.answer import Actions, choose_actions, evidence_rows, line_period
from diag.report.spans import ReportPart, Text, label, phrases

MOST_EVIDENCE = 5
NORMAL = 20
"""The most lines of a comparison with what is normal."""
Parts = Mapping[str, ReportPart]
"""Parts in their order, by the name of their label; those without content are left out."""


def _parts(**content: ReportPart | Sequence[Text]) -> dict[str, ReportPart]:
    """Label texts by their name; what is empty is left out."""
    named = {
        name: part if isinstance(part, ReportPart) else ReportPart(label(name), [text for text in part if text])
        for name, part in content.items()
    }
    return {name: part for name, part in named.items() if part.texts or part.rows or part.parts}


def proposal_part(proposal: Proposal) -> ReportPart:
    """Return a change and what it is for, and as parts what is known about it."""
    fix = proposal.fix
    facts = _parts(
        effect=[fix.effect],
        trade_off=[phrases(fix.risk)] if fix.risk else [],
        rollback=[phrases(fix.rollback)] if fix.rollback else [],
        rationale=[words.why(fix.why)],
        restart=["needed" if fix.restart else "not needed"] if fix.restart or fix.kind != "advice" else [],
        releases=[words.released(fix)],
        needs=[(", ".join(proposal.needs),)] if proposal.needs else [],
    )
    return ReportPart(texts=[words.action(proposal)], parts=list(facts.values()))


def action_parts(actions: Actions) -> dict[str, ReportPart]:
    """Return what to do: without a restart, or the next time if the incident has ended; the fix, its command line."""
    first = label("next_time" if actions.is_over else "do_now")
    is_alone = not actions.do_now and actions.fix and (actions.is_over or not actions.fix.changes)
    return _parts(
        do_now=ReportPart(first, actions.advice, parts=[proposal_part(actions.now)] if actions.now else ()),
        fix=ReportPart(first if is_alone else label("fix"), parts=[proposal_part(actions.fix)] if actions.fix else ()),
        relaunch=[words.command(actions.relaunch)],
    )


def finding_parts(finding: Finding, report: Report, written_as: TimeFormat, others: Sequence[Finding] = ()) -> Parts:
    """Return all about an incident, and when it held also on `others`, servers that are not reported one by one."""
    diagnosis, actions = finding.diagnosis, choose_actions(finding, report)
    pairs = {
        name: [": ".join(pair) for pair in found]
        for name, found in (
            ("ruled_out", words.ruled_out_by_evidence(diagnosis, report)),
            ("possible", words.not_ruled_out(diagnosis, report)),
        )
    }
    alternatives = ReportPart(
        label("alternatives"), parts=[proposal_part(proposal) for proposal in actions.alternatives]
    )
    return _parts(
        when=[line_period([finding, *others], report, written_as).full],
        **action_parts(actions),
        evidence=ReportPart(label("evidence"), rows=evidence_rows(words.evidence(diagnosis)[:MOST_EVIDENCE])),
        log=words.quoted(finding),
        means=[phrases(finding.failure.means)] if finding.failure else [],
        sure=[words.how_sure(finding)],
        first_sign=words.first_sign(diagnosis, written_as),
        **pairs,
        consequences=[words.titled(other.incident) for other in words.consequences(finding, report)],
        alternatives=alternatives,
        not_computed=words.uncomputed(finding),
        do_not=actions.do_not,
        runbook=[words.command(f"diag explain {diagnosis.incident.id}")],
    )


def head_parts(report: Report) -> Parts:
    """Return what stands before the incidents: why health is unknown or was not shown, and which engines stand idle."""
    return _parts(
        why=[each.sentence for each in report.not_judged] if report.verdict == "unknown" else [],
        not_shown=coverage.not_seen(report) if not report.observed.endings else [],
        progress=words.not_busy(report),
    )


def report_parts(report: Report, written_as: TimeFormat, *, verbose: bool = True) -> Parts:
    """Return what stands behind the incidents; `verbose` names the incidents that are absent or unknown."""
    return _parts(
        source=[coverage.source(report, written_as)],
        server=words.folded(coverage.servers(report), words.FEW_SERVERS),
        load=coverage.vitals(report),
        normal=coverage.normality(report)[:NORMAL],
        gpu_limits=words.ceilings(report),
        checked=coverage.checked(report, verbose=verbose),
        unknown=coverage.not_judged(report),
        not_judged=coverage.undecided(report) if verbose else [],
        not_seen=coverage.not_collected(report),
        thresholds=report.contract,
        note=coverage.notes(report),
    )
