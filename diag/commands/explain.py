"""`diag explain`: the runbook of an incident, or the page of a lint rule."""

import sys
from difflib import get_close_matches
from pathlib import Path

from diag.artefacts.lint_rules import page
from diag.artefacts.runbook import runbook
from diag.commands.site import site
from diag.core.errors import BadUsage
from diag.lint.rules import RULES


def show(name: str, folder: Path | None, as_markdown: bool) -> None:
    """Print the page as Markdown, or laid out where standard output is a terminal."""
    text = run(name, folder)
    if as_markdown or not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    from diag.report import terminal

    terminal.page(text)


def run(name: str, folder: Path | None) -> str:
    """The runbook of the incident with that id, else the page of the lint rule with that id."""
    contract, incidents = site(folder, None)
    by_id = {incident.id: incident for incident in incidents}
    if name in by_id:
        return runbook(by_id[name], incidents, contract)
    if name in RULES:
        return page(RULES[name])
    close = get_close_matches(name, [*by_id, *RULES], n=1)
    suggestion = f" (did you mean {close[0]}?)" if close else ""
    raise BadUsage(
        f"there is no incident or lint rule '{name}'{suggestion}; diag incidents lists the incidents,"
        " docs/lint-rules.md the rules"
    )
