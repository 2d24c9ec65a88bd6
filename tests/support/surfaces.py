"""A report as each surface shows it: terminal, page, ticket; and what no text of any surface has."""

import html as web
import re

from support.reports import judged

from diag.knowledge.catalog import load
from diag.report import html, markdown, terminal


def plain(text: str) -> str:
    """Return text with blanks only between words, without the line breaks of a layout."""
    return re.sub(r"\s+", " ", text)


def page(name: str) -> str:
    """Return what a browser shows."""
    body = html.render(judged(name)).partition("<body>")[2]
    return plain(web.unescape(re.sub(r"<svg.*?</svg>", "", re.sub(r"<(?!svg|/svg)[^>]*>", " ", body), flags=re.S)))


def ticket(name: str) -> str:
    """Return Markdown without its escapes."""
    return plain(re.sub(r"\\(?=[\W_])|<!-- -->", "", markdown.render(judged(name))))


def shown_surfaces(name: str) -> dict[str, str]:
    report = judged(name)
    return {
        "terminal": plain(terminal.render(report)),
        "verbose": plain(terminal.render(report, verbose=True)),
        "HTML": page(name),
        "Markdown": ticket(name),
    }


IDS = "|".join(incident.id for incident in load())
FALSE = {
    "a growth below zero": r"\bby -\d",
    "other than nothing": r"\b[Nn]o other (?:incident|failure)",
    "one of many": r"(?<![\d.,])(?<![=>] )1 (?:engine|server|fixe|scrape|request|replica|incident|step|time)s\b",
    "a metric or a variable": r"\bdiag_\w+|\bvllm:\w+|\w+_seconds\b(?! in diag\.toml)",
    "a bare id": rf"(?<!diag explain )(?<![(/])\b(?:{IDS})\b(?!\))",
    "half a word": r"\w…\w",
    "two ends of a sentence": r"(?<!\.)[.,;:][;,]|(?<!\.)\.\.(?!\.)",
}
"""Regular expressions of what no sentence has."""


def false_sentences(text: str, name: str = "\0") -> dict[str, list[str]]:
    """Return what a text has that none may have; the paths of the recording `name` in it do not count."""
    text = re.sub(rf"\S*recordings/{name}\S*", "", re.sub(r"\n +", " ", text))
    found = {what: [text[at.start() - 30 : at.end()] for at in re.finditer(FALSE[what], text)] for what in FALSE}
    return {what: places for what, places in found.items() if places}
