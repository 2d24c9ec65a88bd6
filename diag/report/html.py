"""The report for a post-mortem: one HTML page that needs no network, no script and no other file.

The template escapes every text, control characters too. A content security policy forbids the page to run or fetch
anything, should a text slip through.
"""

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from diag import __version__
from diag.core.formatting import escaped, moment, pasted, quantity
from diag.core.incident import RANK
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Report
from diag.report import coverage, svg
from diag.report import sentences as words
from diag.report.answer import answers, choose_actions, count_verdicts, fleet_rows, verdicts
from diag.report.spans import Text, label, spans
from diag.report.tree import action_parts, finding_parts, head_parts, report_parts

TEMPLATE = Path(__file__).with_suffix(".xhtml.j2")
STYLE = Path(__file__).with_suffix(".css")
CLASSES = {"CRITICAL": "critical", "WARNING": "warning", "HEALTHY": "healthy", "CANNOT TELL": "unknown"}
CLASSES |= dict.fromkeys((coverage.NO_INCIDENT, coverage.NO_FAILURE), "unknown")
"""The style of an answer, by its verdict."""
MOST_ROWS = 200


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
        TEMPLATE.name,
        report=report,
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
        version=__version__,
        title=" ".join(verdicts(report)[0].split()),
        runbooks=runbooks if runbooks.startswith(("https://", "http://")) else "",
        local_end="" if here == moment(report.observed.end) else f" (ends {here})",
    )


def page(template: str, **values: object) -> str:
    """Render one of the templates beside this file, in their common style."""
    style = Markup(STYLE.read_text(encoding="utf-8"))
    return _environment().get_template(template).render(style=style, **values)


@cache
def _environment() -> Environment:
    """Return the Jinja2 environment, which escapes every printed value that is not markup."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else escaped(str(value)),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {"drawn": _drawn, "pasted": lambda command: Markup("{}").format(pasted(command))}
    environment.globals |= {
        "action_parts": action_parts,
        "anchor": anchor,
        "choose_actions": choose_actions,
        "classes": CLASSES,
        "coverage": coverage,
        "finding_parts": finding_parts,
        "head_parts": head_parts,
        "label": label,
        "moment": moment,
        "quantity": quantity,
        "svg": svg,
        "words": words,
    }
    return environment


def _drawn(text: Text, is_block: bool = False) -> Markup:
    """Return a text with its commands as code and its web addresses as links; a command alone breaks between words."""
    return Markup("").join(_element(run, role, is_block) for run, role in spans(text))


def _element(run: str, role: str, is_block: bool) -> Markup:
    if role == "command" and is_block:
        words_of = (Markup("<span>{}</span>").format(word) for word in pasted(run).split(" "))
        return Markup('<pre class="command">{}</pre>').format(Markup(" ").join(words_of))
    if role == "command":
        return Markup("<code>{}</code>").format(pasted(run))
    if role == "link" and run.startswith(("https://", "http://")):
        return Markup('<a href="{0}" rel="noreferrer">{0}</a>').format(escaped(run))
    return Markup("{}").format(escaped(run))


def anchor(diagnosis: Diagnosis) -> str:
    text = f"{diagnosis.incident.id}-{words.place(diagnosis.subject)}"
    return "".join(char if char.isalnum() or char == "_" else "-" for char in text)
