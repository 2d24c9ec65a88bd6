"""The full report as plain text (`--verbose`), and the conditions of one incident (`--why`)."""

from diag.core.formatting import plural
from diag.diagnosis.report import Finding, Report
from diag.report import coverage
from diag.report import sentences as words
from diag.report.answer import (
    choose_actions,
    count_verdicts,
    evidence_rows,
    fleet_rows,
    line_period,
    reading_row,
    verdicts,
)
from diag.report.layout import labelled, paragraph, table, verbatim

SERVERS = 20
"""Rows of the full report for the servers of a fleet."""
DESCRIBED = 5
"""Lines of the full report that describe servers: release, model, launch."""
NORMAL = 20
SUBJECTS = 20
"""Subjects of an incident that `--why` explains."""
HELD = {True: "holds", False: "does not hold", None: "not measured"}


def full_report(report: Report) -> str:
    lines = verdicts(report)
    lines += [line for text in words.shared(report) for line in paragraph(text)]
    if report.verdict == "unknown":
        lines += labelled("why", [each.sentence for each in report.not_judged])
    for each in coverage.suspected(report):
        lines += ["", *paragraph(each.sentence), *table([reading_row(sign) for sign in each.signs], label="evidence")]
    lines += labelled("not shown", coverage.not_seen(report) if not report.observed.endings else [])
    lines += labelled("progress", words.not_busy(report))
    if words.is_fleet(report):
        servers = fleet_rows(report)
        ill = [server for server in servers if server.verdict != "healthy"]
        rows = [
            (row.verdict, row.instance, f"{row.incidents or row.states}  {row.when}".rstrip()) for row in ill[:SERVERS]
        ]
        lines += ["", count_verdicts([server.verdict for server in servers]), *table(rows)]
        lines += [f"  and {len(ill) - SERVERS:,} more that are not healthy"] if len(ill) > SERVERS else []

    for finding, *others in words.alike(report):
        lines += ["", *_finding_lines(finding, others, report)]
    for label, texts in (("also present", words.also(report)), ("timeline", words.timeline(report))):
        lines += ["", *labelled(label, texts)] if texts else []

    footer = {
        "source": [coverage.source(report, words.time_format(report))],
        "server": words.folded(coverage.servers(report), DESCRIBED),
        "load": coverage.vitals(report),
        "normal": coverage.normality(report)[:NORMAL],
        "GPU limits": words.ceilings(report),
        "checked": coverage.checked(report, verbose=True),
        "unknown": coverage.not_judged(report),
        "not judged": coverage.undecided(report),
        "not collected": coverage.not_collected(report),
        "thresholds": ["; ".join(report.contract)],
        "note": coverage.notes(report),
    }
    lines += ["", *(line for label, texts in footer.items() for line in labelled(label, texts))]
    return "\n".join([*lines, *roll_call_lines(report)]) + "\n"


def _finding_lines(finding: Finding, others: list[Finding], report: Report) -> list[str]:
    """Describe an incident: evidence, look-alikes, consequences, then mitigation, fix, relaunch line, alternatives."""
    diagnosis, incident = finding.diagnosis, finding.diagnosis.incident
    alike = f", as on {len(others):,} more" if others else ""
    follows = [words.titled(other.incident) for other in words.consequences(finding, report)]
    lines = [
        *paragraph(f"{incident.title} ({words.where(diagnosis)}{alike}): {incident.impact}"),
        *labelled("when", [line_period([finding, *others], report)[0]]),
        *table(evidence_rows(diagnosis), label="evidence", right=(1,)),
        *labelled("log", words.quoted(finding)),
        *labelled("first sign", words.first_sign(diagnosis, words.time_format(report))),
        *labelled("ruled out", [": ".join(pair) for pair in words.ruled_out_by_evidence(diagnosis, report)]),
        *labelled("not ruled out", [": ".join(pair) for pair in words.not_ruled_out(diagnosis, report)]),
        *labelled("consequences", follows),
    ]

    actions = choose_actions(finding, report)
    lines += labelled("next time" if actions.is_over else "do now", actions.advice)
    for label, proposal in (("mitigation", actions.now), ("fix", actions.fix)):
        if proposal:
            fix = proposal.fix
            lines += labelled(label, [text for text in (words.change(proposal), proposal.text) if text])
            facts = {
                "expected effect": fix.effect,
                "trade-off": fix.risk,
                "rollback": fix.rollback,
                "rationale": words.why(fix.why),
                "restart": "needed" if fix.restart else "not needed",
                "available in": words.released(fix),
                "check first": ", ".join(proposal.needs),
            }
            lines += [line for name, text in facts.items() if text for line in labelled(name, [text])]
    lines += verbatim("relaunch", actions.relaunch)
    alternatives = []
    for proposal in actions.alternatives:
        fix = proposal.fix
        risk = words.effects(fix).get("Trade-off", "")
        texts = (words.change(proposal), proposal.text, risk, words.released(fix), words.needs(proposal))
        alternatives.append("  ".join(text for text in texts if text))
    lines += labelled("alternatives", alternatives)
    lines += labelled("not computed", words.uncomputed(finding))
    return [*lines, *labelled("do not", actions.do_not), *labelled("runbook", [f"diag explain {incident.id}"])]


# -- the conditions of an incident ------------------------------------------------------------------------------------


def render_why(report: Report, incident: str) -> str:
    """Return a paragraph and a table of conditions for each subject; the present and the unknown ones come first."""
    found = [finding.diagnosis for finding in report.findings if finding.diagnosis.incident.id == incident]
    if not found:
        return f"{incident}: nothing that it could be judged on was seen.\n"
    lines = []
    for diagnosis in found[:SUBJECTS]:
        symptoms = len(diagnosis.incident.symptoms)
        groups = {
            "symptom": diagnosis.symptoms[:symptoms],
            "required": diagnosis.symptoms[symptoms:],  # by a look-alike too
            "supports": diagnosis.supports,
            "escalates": diagnosis.escalation,
        }
        rows = [
            (role, reading.condition.signal.name, reading.shown, reading.threshold, HELD[reading.holds])
            for role, readings in groups.items()
            for reading in readings
        ]
        if diagnosis.state == "present":
            state = f"present, {words.when(diagnosis, words.time_format(report))}: all of its conditions hold"
        elif diagnosis.brief:
            state = "unknown: too little was observed to rule it out"
        else:  # the conditions that do not hold, or that have no value
            facts = (
                f"{reading.condition.signal.name} is {reading.sentence}"
                if reading.value is None
                else f"{reading.condition.signal.name} is {reading.shown}, not {words.required(reading)}"
                for reading in diagnosis.symptoms
                if reading.holds is (False if diagnosis.state == "absent" else None)
            )
            state = f"{diagnosis.state}: {'; '.join(facts)}"
        lines += [*paragraph(f"{incident} on {words.where(diagnosis)}: {state}"), *table(rows), ""]
    if len(found) > SUBJECTS:
        lines += [f"  and {plural(len(found) - SUBJECTS, 'more subject')}", ""]
    return "\n".join(lines[:-1]) + "\n"


def roll_call_lines(report: Report) -> list[str]:
    """Lay out where the processes of each server stand, those that stand together in one row, the suspects first."""
    lines: list[str] = []
    for call in report.roll_calls:
        title = "Stacks" if len(report.roll_calls) == 1 else call.server
        lines += ["", *paragraph(f"{title}: {words.roll_call(call)}")]
        lines += table(words.standing_rows(call)) if call.standing else []
        lines += verbatim("", call.command, 0)
    return lines
