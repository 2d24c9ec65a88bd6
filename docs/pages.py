"""The pages of the site that are written when it is built: runbooks with a recorded case, help texts, copied pages.

A link to a page of the repository that is in the site leads there; one to any other file is text.
"""

import os
import re
import tomllib
from contextlib import chdir
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import click
from typer.main import get_command

from diag.cli.app import app
from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.core.formatting import moment
from diag.core.incident import Incident
from diag.knowledge.catalog import load
from diag.report import html, svg, terminal
from diag.report import sentences as words
from diag.report.answer import answers
from diag.report.layout import WIDTH

ROOT = Path(__file__).parent.parent
GENERATED = Path("docs/generated")
COPIED = {
    "alerts/README.md": "alerts.md",
    "bench/accuracy.md": "accuracy.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "runbooks/README.md": "incidents/index.md",
    "runbooks/oncall.md": "incidents/oncall.md",
    "runbooks/promql.md": "incidents/promql.md",
    "runbooks/telemetry.md": "incidents/telemetry.md",
}
"""Pages of other folders, by their name in docs/generated."""
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
FIGURES = 2
SHOWN = 4
"""Incidents of a symptom that the landing page names."""
STYLED = re.compile(
    r"^(?:\.(?:critical|warning|info|healthy|unknown) |svg|\.plot|\.line|\.axis|\.grid|path\.|text\.|\.holds"
    r"|\.fine|\.present|\.scrape|\.reported|\.middle|\.end )"
)
"""The rules of the report's style sheet that its plots need."""
NARROW = """@media (max-width: 46em) {
  .symptoms thead { display: none; }
  .symptoms table.docutils tbody, .symptoms tr, .symptoms td { display: block; border: 0; }
  .symptoms td:first-child { padding-top: 16px; font-weight: 600; }
  .answer img { width: 100%; max-height: 540px; object-fit: cover; object-position: top; }
}"""
"""Rows of symptoms one cell below the other on a phone, and the top of a picture whose text can be read there."""
PRINTED = """
@page { size: A4; margin: 12mm 14mm; }
@media screen and (max-width: 30em) {  /* the longest id of an incident fits into a line */
  h1 { font-size: 1.35em; }
  h2 { font-size: 1.2em; }
  h3 { font-size: 1.05em; }
}
@media print {
  html { font-size: 8.5pt; }
  .content { width: 100%; padding: 0; }
  body, .content > * { min-height: 0; margin-bottom: 0; padding-bottom: 0; }
  .page, .main, .article-container { display: block; padding: 0; }
  aside, footer, header, .theme-toggle-container, .back-to-top, .skip-to-content { display: none !important; }
  dl, ol, p, ul, table { page-break-inside: auto !important; }
  li, tr { break-inside: avoid; }
  h1 { font-size: 1.5em; margin: 0 0 0.4em; }
  h2 { font-size: 1.15em; margin: 0.7em 0 0.2em; break-after: avoid; }
  p, ul, ol, dl, table.docutils { margin: 0.25em 0; line-height: 1.3; }
  li > p { margin: 0.1em 0; }
  pre { font-size: 7.5pt; line-height: 1.25; padding: 0.3em 0.5em; white-space: pre-wrap; margin: 0; }
  div.highlight, div[class*="highlight-"] { margin: 0.2em 0; }
  table.docutils { display: table; width: 100%; font-size: 7.5pt; }
  table.docutils td, table.docutils th { padding: 0 5px; line-height: 1.25; }
  table.docutils p, .table-wrapper { margin: 0 !important; }
  figure.diag { margin: 0.2em 0; padding: 2px; }
  figure.diag .plot { max-height: 32mm; }
}
"""
"""The style of a narrow page, and of a printed one: a runbook has two at most, the on-call card one."""


def write(with_cases: bool = True) -> None:
    """Write every page and the style of the plots into docs/generated, with or without the recorded cases."""
    folder = ROOT / GENERATED
    incidents = load(None)
    pages = {Path(source): GENERATED / name for source, name in COPIED.items()}
    pages |= {Path(f"runbooks/{each.id}.md"): GENERATED / f"incidents/{each.id}.md" for each in incidents}
    for source, target in pages.items():
        text = _linked((ROOT / source).read_text(encoding="utf-8"), source, target, pages)
        (ROOT / target).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / target).write_text(text, encoding="utf-8")
    symptoms = tomllib.loads((ROOT / "docs" / "symptoms.toml").read_text(encoding="utf-8"))["symptom"]
    for incident in incidents:  # a search for the id, or for what one sees, finds the page by its title and its words
        page = folder / "incidents" / f"{incident.id}.md"
        body = page.read_text(encoding="utf-8").partition("\n")[2]
        page.write_text(f"{_terms(incident, symptoms)}# {incident.title} ({incident.id})\n{body}", encoding="utf-8")
    judged = incidents if with_cases else ()
    plots = dict.fromkeys((incident.id for incident in incidents), "")
    plots |= {each.id: _with_real_case(each, folder / "incidents" / f"{each.id}.md") for each in judged}
    (folder / "incidents" / "index.md").write_text(_gallery(incidents, plots, symptoms), encoding="utf-8")
    (folder / "symptoms.md").write_text(_symptoms(incidents, symptoms), encoding="utf-8")
    (folder / "commands.md").write_text(_commands(), encoding="utf-8")
    (folder / "_static").mkdir(exist_ok=True)
    (folder / "_static" / "plots.css").write_text(_style(), encoding="utf-8")


def _linked(text: str, source: Path, target: Path, pages: dict[Path, Path]) -> str:
    def put(found: re.Match[str]) -> str:
        label, address, anchor = found.groups()
        if "://" in address:
            return found[0]
        file = Path(os.path.relpath(ROOT / source.parent / address, ROOT))
        page = pages.get(file, file if file.parent == Path("docs") else None)
        if page is None or page.suffix != ".md":
            return label
        return f"[{label}]({os.path.relpath(page, target.parent)}{anchor or ''})"

    return LINK.sub(put, text)


# -- the gallery of incidents -----------------------------------------------------------------------------------------


@cache
def _recordings() -> tuple[tuple[Path, dict[str, Any]], ...]:
    """Return the recordings, each with what its recording.toml says."""
    files = sorted(ROOT.glob("tests/recordings/*/recording.toml"), key=lambda file: file.parent.name)
    return tuple((file.parent, tomllib.loads(file.read_text(encoding="utf-8"))) for file in files)


def _with_real_case(incident: Incident, page: Path) -> str:
    """Begin the page of an incident with a recorded case; return its first plot, "" if there is no recording."""
    for recording, about in _recordings():
        if incident.id not in about["truth"]["present"]:
            continue
        where = os.path.relpath(recording, ROOT)
        with chdir(ROOT):
            report = doctor.run(ObserveOptions([where]))
        answer = answers(report, moment)[0]
        if answer.incident != incident.id:
            continue
        diagnosis = answer.findings[0].diagnosis
        axis = svg.shared_axis([found.diagnosis for found in report.present], report.vitals)
        figure = f'<figure class="diag {diagnosis.severity}"><figcaption>{{}}</figcaption>{{}}</figure>'
        plots = [
            figure.format(escape(reading.condition.signal.name), svg.plot(reading, diagnosis, axis))
            for reading in words.evidence(diagnosis)[:FIGURES]
        ]
        kind = "a real vLLM" if about["measured"] else "a scripted server, since it needs hardware that was not at hand"
        case = (
            f"\n```{{raw}} html\n{plots[0] if plots else ''}\n<details><summary>A recorded case, from {kind}"
            f" ({about['vllm'] or 'release unknown'}): the report</summary>\n```\n\n```console\n"
            f"$ diag doctor {where}\n{terminal.render(report)}```\n\n"
            f"```{{raw}} html\n{''.join(plots[1:])}\n</details>\n```\n"
        )
        head, section, rest = page.read_text(encoding="utf-8").partition("\n## Impact\n")
        page.write_text(head + case + section + rest, encoding="utf-8")
        return plots[0] if plots else ""
    return ""


def _terms(incident: Incident, symptoms: list[dict[str, Any]]) -> str:
    """Return the words by which people search for an incident, as metadata of its page."""
    terms = ", ".join(f"{each['sees']}, {each['terms']}" for each in symptoms if incident.id in each["incidents"])
    return f'---\nmyst:\n  html_meta:\n    keywords: "{terms}"\n---\n\n' if terms else ""


def _symptoms(incidents: tuple[Incident, ...], symptoms: list[dict[str, Any]]) -> str:
    """Return the table of the landing page: what one sees, the incidents behind it, the command that tells."""
    titles = {incident.id: incident.title for incident in incidents}
    rows = []
    for each in symptoms:
        links = [f"[{titles[name]}](generated/incidents/{name}.md)" for name in each["incidents"][:SHOWN]]
        rest = len(each["incidents"]) - SHOWN
        more = f", [{rest} more](generated/incidents/index.md#{_anchor(each['sees'])})" if rest > 0 else ""
        rows.append(f"| {each['sees']} | {', '.join(links)}{more} | `{each['command']}` |")
    head = "```{container} symptoms\n| what do you see? | mostly one of | ask |\n|---|---|---|"
    return "\n".join([head, *rows, "```", ""])


def _anchor(heading: str) -> str:
    """Return the anchor that MyST gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _gallery(incidents: tuple[Incident, ...], plots: dict[str, str], symptoms: list[dict[str, Any]]) -> str:
    """Return a page with a card for each incident by what one sees; its plot of a recorded case is drawn once."""
    known, drawn, sections = {incident.id: incident for incident in incidents}, set(), []
    for symptom in symptoms:
        cards = []
        for incident in (known[name] for name in symptom["incidents"]):
            names = f"<b>{escape(incident.title)}</b><br><code>{incident.id}</code>, {incident.severity}"
            plot = "" if incident.id in drawn else plots[incident.id]
            text = f"{names}<p>{escape(incident.impact)}.</p>{plot}"
            cards.append(f'<a class="diag-card" href="{incident.id}.html">{text}</a>')
            drawn.add(incident.id)
        gallery = '<div class="diag-gallery">' + "\n".join(cards) + "</div>"
        sections.append(f"## {symptom['sees']}\n\nAsk: `{symptom['command']}`\n\n```{{raw}} html\n{gallery}\n```")
    head = (
        "# All incidents\n\nBy what one sees; an incident that shows in several ways stands in several places."
        " Each page has the meaning, what to do now, look-alikes, fixes, how to silence its alert, and a recorded case."
    )
    telemetry = (
        "Alerts about missing telemetry have [a page of their own](telemetry.md). To print:"
        " [the on-call card](oncall.md). The definition of every series: [PromQL](promql.md)."
    )
    gallery = "\n\n".join(sections)
    pages = "\n".join([*(incident.id for incident in incidents), "telemetry", "oncall", "promql"])
    return f"{head} {telemetry}\n\n{gallery}\n\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


# -- the commands and the style ---------------------------------------------------------------------------------------


def _commands() -> str:
    """Return the help of every command."""
    parts = ["# Command line\n\nThe help texts of `diag` and of each of its commands.\n"]
    group = get_command(app)
    context = click.Context(group, info_name="diag", terminal_width=WIDTH, max_content_width=WIDTH)
    for name, command in (("", group), *group.commands.items()):
        own = context if not name else click.Context(command, info_name=name, parent=context, terminal_width=WIDTH)
        parts.append(f"\n## diag {name}".rstrip() + f"\n\n```text\n{command.get_help(own).rstrip()}\n```\n")
    return "".join(parts)


def _style() -> str:
    """Return the colours of the report and the rules of its plots."""
    css = html.STYLE.read_text(encoding="utf-8")
    colours, rest = css.partition("\n\nbody ")[::2]
    rules = [line for line in rest.splitlines() if STYLED.match(line)]
    return "\n".join(
        [
            colours,
            *rules,
            "figure.diag { margin: 0 0 16px; padding: 8px; background: var(--paper); overflow-x: auto; }",
            "figure.diag .plot { min-width: 520px; }",
            ".diag-gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(280px, 1fr)); gap: 16px; }",
            ".diag-card { padding: 12px; border: 1px solid var(--rule); color: inherit; text-decoration: none; }",
            ".diag-card figure.diag .plot { min-width: 0; }",
            ".diag-card figcaption { display: none; }",
            "table.docutils { display: block; overflow-x: auto; }",
            NARROW,
            ".content { width: 52em; max-width: 100%; }",
            PRINTED,
        ]
    )
