"""What was found in a launch command in print: plain text of at most 100 columns, and JSON.

Its schema, "diag.lint/1", is held by diag.lint.schema.json beside this file.
"""

import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from diag import __version__
from diag.core.formatting import plural, printable
from diag.lint.finding import LintFinding, LintReport

SCHEMA = "diag.lint/1"
WIDTH = 100
LABEL = 15
MOST = 2000
_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|\\.|[^\s'"\\])+""")
"""A word of a shell with its quotation marks."""


def text(told: LintReport) -> str:
    """The report for a terminal."""
    lines = [*_wrapped("", _head(told))]
    for each in told.findings:
        lines += ["", *_finding(each)]
    if told.corrected:
        lines += ["", *_command("corrected", told.corrected)]
    notes = [*_parser(told), *(("not checked", each) for each in told.not_checked)]
    lines += [""] * bool(notes) + [line for label, each in notes for line in _wrapped(label, each)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _head(told: LintReport) -> str:
    counts = {name: sum(each.severity == name for each in told.findings) for name in ("error", "warning", "info")}
    said = ", ".join(plural(count, name) for name, count in counts.items() if count) or "nothing found"
    name = told.model or "a server"
    return f"{name} with vLLM {told.version} ({told.release_from}): {said}"


def _finding(one: LintFinding) -> Iterator[str]:
    yield from _wrapped(one.severity.upper(), one.what, "")
    yield from _wrapped("why", one.why)
    if one.instead:
        yield from _wrapped("instead", one.instead)


def _wrapped(label: str, said: str, indent: str = "  ") -> list[str]:
    """A label in a column of its own and the text beside it; without a label over the whole width."""
    first = f"{indent}{label}".ljust(LABEL) if label else ""
    later = " " * (len(first) or 2)
    return textwrap.wrap(
        printable(said, MOST), WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False
    )


def _command(label: str, command: str) -> list[str]:
    """A command over several lines that a shell reads as one: broken between its words only."""
    lines = [""]
    for word in _WORD.findall(command):
        longer = f"{lines[-1]} {word}".lstrip()
        fits = len(longer) <= WIDTH - LABEL - len(" \\")
        lines = [*lines[:-1], longer] if fits or not lines[-1] else [*lines, word]
    heads = [f"  {label}".ljust(LABEL), *[" " * LABEL] * len(lines)]
    ends = [*[" \\"] * (len(lines) - 1), ""]
    return [head + printable(line, MOST) + end for head, line, end in zip(heads, lines, ends, strict=False)]


def _parser(told: LintReport) -> Iterator[tuple[str, str]]:
    if told.parser is not None:
        said = f"refuses it: {told.parser}" if told.parser else "accepts the command"
        yield "parser", f"that of the installed vLLM {told.version} {said}"


def render(told: LintReport) -> str:
    """The report as indented JSON, one line break at its end."""
    return json.dumps(document(told), indent=1, ensure_ascii=False) + "\n"


def document(told: LintReport) -> dict[str, Any]:
    """The report as plain values; `corrected` is null where nothing can be corrected mechanically."""
    return {
        "schema": SCHEMA,
        "diag": __version__,
        "version": told.version,
        "version_from": told.release_from,
        "model": told.model,
        "status": told.status,
        "findings": [
            {
                "rule": each.rule,
                "severity": each.severity,
                "what": each.what,
                "why": each.why,
                "instead": each.instead,
                "corrected": bool(each.edits) and each.severity != "info",
            }
            for each in told.findings
        ],
        "corrected": told.corrected or None,
        "parser": told.parser,
        "not_checked": list(told.not_checked),
    }
