"""The report for a post-mortem: one HTML page that needs no network, no script and no other file.

The template escapes every text, control characters too. A content security policy forbids the page to run or fetch
anything, should a text slip through.
"""

from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup

from diag import __version__
from diag.core.formatting import moment, quantity
from diag.core.incident import RANK
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Report
from diag.report import coverage, svg
from diag.report import sentences as words
from diag.report.answer import answers, choose_actions, count_verdicts, fleet_rows, verdicts
from diag.report.spans import label
from diag.report.templates import environment
from diag.report.tree import action_parts, finding_parts, head_parts, report_parts

STYLE = Path(__file__).with_suffix(".css")
CLASSES = {"CRITICAL": "critical", "WARNING": "warning", "HEALTHY": "healthy", "CANNOT TELL": "unknown"}
CLASSES |= dict.fromkeys((coverage.NO_INCIDENT, coverage.NO_FAILURE), "unknown")
"""The style of an answer, by its verdict."""
MOST_ROWS = 200
HELPERS: Mapping[str, object] = {
    **{"action_parts": action_parts, "choose_actions": choose_actions, "finding_parts": finding_parts},
    **{"head_parts": head_parts, "label": label, "classes": CLASSES, "coverage": coverage, "svg": svg, "words": words},
    **{"moment": moment, "quantity": quantity},
}
"""The functions that the template calls, besides `anchor`."""


def render(report: Report, runbooks: str = "") -> str:
    """Render the report as one page, which is XML as well; one line break at its end.

    If `runbooks` is a web address, each incident links to its runbook there.
    """
    findings = sorted(
        words.detailed(report), key=lambda found: (not found.diagnosis.primary, -RANK[found.diagnosis.severity])
    )
    servers = fleet_rows(report) if words.is_fleet(report) else []
    diagnoses = (finding.diagnosis for finding in report.findings)
    absent = words.grouped((each.incident.id, each) for each in diagnoses if each.state == "absent")
    here = moment._replace(local=True)(report.observed.end)  # in the zone of the host that writes the page
    present = [episode for finding in report.present[:MOST_ROWS] for episode in finding.diagnosis.one_by_one]
    return page(
        "html.xhtml.j2",
        report=report,
        **HELPERS,
        anchor=anchor,
        answers=answers(report, moment),
        primary=[finding for finding in findings if finding.diagnosis.primary],
        others=[finding for finding in findings if not finding.diagnosis.primary],
        below=report_parts(report, moment, verbose=False),
        axis=svg.shared_axis([found.diagnosis for found in findings], report.vitals) if findings else None,
        anchors={anchor(finding.diagnosis) for finding in findings},
        servers=servers,
        counts=count_verdicts([server.verdict for server in servers]),
        timeline=sorted(present, key=lambda diagnosis: diagnosis.since or 0.0)[:MOST_ROWS],
        absent=[
            (found[0], next(reading for reading in found[0].symptoms if reading.holds is False), len(found) - 1)
            for _, found in sorted(absent.items())
        ],
        title=" ".join(verdicts(report)[0].split()),
        runbooks=runbooks if runbooks.startswith(("https://", "http://")) else "",
        local_end="" if here == moment(report.observed.end) else f" (ends {here})",
    )


def page(template: str, **values: object) -> str:
    """Render one of the templates beside this file, in their common style."""
    style = Markup(STYLE.read_text(encoding="utf-8"))
    return environment().get_template(template).render(style=style, version=__version__, **values)


def anchor(diagnosis: Diagnosis) -> str:
    text = f"{diagnosis.incident.id}-{words.place(diagnosis.subject)}"
    return "".join(char if char.isalnum() or char == "_" else "-" for char in text)
