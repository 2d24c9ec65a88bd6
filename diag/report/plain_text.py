"""The full report as plain text (`--verbose`), the conditions of one incident (`--why`), and parts of any report."""

from collections.abc import Iterable

from diag.core.formatting import plural
from diag.diagnosis.report import Report
from diag.report import coverage
from diag.report import sentences as words
from diag.report.answer import count_verdicts, fleet_rows, reading_row, verdicts
from diag.report.layout import LABEL, labelled, paragraph, table, verbatim
from diag.report.spans import ReportPart, Span, Text, label, states
from diag.report.tree import finding_parts, head_parts, report_parts

SERVERS = 20
"""Rows of the full report for the servers of a fleet."""
SUBJECTS = 20
"""Subjects of an incident that `--why` explains."""


def full_report(report: Report) -> list[str]:
    """Return the lines of the report."""
    written_as = words.time_format(report)
    lines = verdicts(report)
    lines += [line for text in words.shared(report) for line in paragraph(text)]
    for each in coverage.suspected(report):
        signs = table([reading_row(sign) for sign in each.signs], label=label("evidence"))
        lines += ["", *paragraph(each.sentence), *signs]
    lines += drawn(head_parts(report).values())
    if words.is_fleet(report):
        servers = fleet_rows(report)
        ill = [server for server in servers if server.verdict != "healthy"]
        rows = [
            (Span(row.verdict, row.verdict.upper()), row.instance, f"{row.found}  {row.when}".rstrip())
            for row in ill[:SERVERS]
        ]
        lines += ["", count_verdicts([server.verdict for server in servers]), *table(rows)]
        lines += [f"  and {len(ill) - SERVERS:,} more that are not healthy"] if len(ill) > SERVERS else []

    for finding, *others in words.alike(report):
        incident, where = finding.diagnosis.incident, words.where(finding.diagnosis)
        alike = f", as on {len(others):,} more" if others else ""
        lines += ["", *paragraph(f"{words.titled(incident)} on {where}{alike}: {words.impact(finding, report)}")]
        lines += drawn(finding_parts(finding, report, written_as, others).values())
    for name, texts in (("also", words.also(report)), ("timeline", words.timeline(report))):
        lines += ["", *labelled(label(name), texts)] if texts else []
    return [*lines, "", *drawn(report_parts(report, written_as).values()), *roll_call_lines(report)]


def drawn(parts: Iterable[ReportPart], width: int = LABEL) -> list[str]:
    """Draw parts as lines, their labels in a column of this width; a head that begins with the label is left out.

    What is known about a change has lines of its own; about one of several changes, it is in the sentence.
    """
    lines: list[str] = []
    for part in parts:
        head = [part.head] if part.head and part.head[0] != part.label else []
        texts: list[Text] = list(part.texts)
        if len(part.parts) == 1:
            lines += labelled(part.label, [*texts, *part.parts[0].texts], width) + drawn(part.parts[0].parts, width)
        elif part.rows:
            lines += table([*head, *part.rows], label=part.label, width=width, right=(1,) if not head else ())
        elif part.name == "relaunch":
            lines += verbatim(part.label, "".join(texts[0]), width)
        else:
            lines += labelled(part.label, [*texts, *(each.whole for each in part.parts)], width)
    return lines


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
            (
                role,
                reading.condition.signal.name,
                reading.shown,
                reading.threshold,
                states("condition")[str(reading.holds)],
            )
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
