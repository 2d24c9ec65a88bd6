"""The report for a post-mortem: one HTML page that needs no network, no script and no other file.

The template escapes every text, control characters too; should one slip through, the page has forbidden itself to run
or to fetch anything.
"""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from diag import __version__
from diag.core.formatting import escaped, moment, pasted, quantity
from diag.core.incident import RANK
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.proposals import Proposal
from diag.diagnosis.readings import Reading
from diag.diagnosis.report import Finding, Report
from diag.report import sentences as words
from diag.report import svg
from diag.report.summary import count_verdicts, fleet_rows

TEMPLATE = Path(__file__).with_suffix(".xhtml.j2")
STYLE = Path(__file__).with_suffix(".css")
VERDICTS = {"CRITICAL": "critical", "WARNING": "warning", "HEALTHY": "healthy", "CANNOT TELL": "unknown"}
MOST_ROWS = 200


def render(report: Report) -> str:
    """The report as one page, which is XML as well; one line break at its end."""
    findings = sorted(words.detailed(report), key=_weight)
    servers = fleet_rows(report, moment) if words.is_fleet(report) else []
    present = [episode for finding in report.present[:MOST_ROWS] for episode in finding.diagnosis.one_by_one]
    return page(
        TEMPLATE.name,
        report=report,
        findings=findings,
        anchors={anchor(finding.diagnosis) for finding in findings},
        headlines=[_headline(line) for line in words.headline(report, moment)],
        servers=servers,
        counts=count_verdicts([server.verdict for server in servers]),
        timeline=sorted(present, key=lambda diagnosis: diagnosis.since or 0.0)[:MOST_ROWS],
        absent=_absent(report),
        version=__version__,
    )


def page(template: str, **values: object) -> str:
    """A page of one of the templates beside this file, in the style of all of them."""
    style = Markup(STYLE.read_text(encoding="utf-8"))
    return _environment().get_template(template).render(style=style, **values)


@cache
def _environment() -> Environment:
    """Everything that a template prints is escaped, unless it is markup already."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {"link_to": _link_to, "pairs": _pairs, "pasted": _pasted, "tuple": tuple}
    environment.globals |= {
        "anchor": anchor,
        "lasted": _lasted,
        "moment": moment,
        "now": _now,
        "quantity": quantity,
        "svg": svg,
        "words": words,
    }
    return environment


def _visible(value: Any) -> Any:
    return value if isinstance(value, Markup) else escaped(str(value))


def _pasted(text: str) -> Markup:
    """A command, whole."""
    return Markup("{}").format(pasted(text))


def _link_to(text: str, reference: str) -> str:
    """The text, in which the reference is a link where it is an address on the web."""
    if not reference.startswith(("https://", "http://")):
        return text
    link = Markup('<a href="{0}" rel="noreferrer">{0}</a>').format(escaped(reference))
    return Markup("").join(
        [link if part == reference else escaped(part) for part in re.split(f"({re.escape(reference)})", text)]
    )


def _pairs(items: Iterable[object], *names: str) -> list[tuple[str, ...]]:
    return [tuple(getattr(item, name) for name in names) for item in items]


def anchor(diagnosis: Diagnosis) -> str:
    """The id of the section on a diagnosis."""
    text = f"{diagnosis.incident.id}-{words.place(diagnosis.subject)}"
    return "".join(char if char.isalnum() or char == "_" else "-" for char in text)


def _weight(finding: Finding) -> tuple[bool, int]:
    """Primary incidents first, then the worse ones."""
    return not finding.diagnosis.primary, -RANK[finding.diagnosis.severity]


def _headline(line: str) -> tuple[str, str, str]:
    """Class, verdict and the rest of a headline."""
    word = next(word for word in VERDICTS if line.startswith(word))
    return VERDICTS[word], word, line.removeprefix(word)


def _lasted(diagnosis: Diagnosis) -> str:
    """Since and until when, or how often; a page is read another day, when "now" is no more."""
    if len(diagnosis.episodes) > 1:
        return words.when(diagnosis, moment)
    until = moment(diagnosis.instants[-1] if diagnosis.until is None else diagnosis.until)
    return f"since {words.began([diagnosis], moment)}, {'ongoing' if diagnosis.ongoing else 'ended'} at {until}"


def _now(finding: Finding, proposal: Proposal) -> str:
    """What the first complete proposal of a primary incident is called, "" for any other."""
    first = next((proposal for proposal in finding.proposals if not proposal.needs), None)
    if proposal is not first or not finding.diagnosis.primary:
        return ""
    return "fix" if proposal.fix.restart else "mitigation"


def _absent(report: Report) -> list[tuple[Diagnosis, Reading, int]]:
    """Each incident that is absent somewhere, the first reading that rules it out, and on how many more subjects."""
    where: dict[str, list[Diagnosis]] = {}
    for finding in report.findings:
        if finding.diagnosis.state == "absent":
            where.setdefault(finding.diagnosis.incident.id, []).append(finding.diagnosis)
    return [
        (found[0], next(reading for reading in found[0].symptoms if reading.holds is False), len(found) - 1)
        for _, found in sorted(where.items())
    ]
