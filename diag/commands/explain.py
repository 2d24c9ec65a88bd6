"""`diag explain`: the runbook of an incident, the definition of a signal, or the page of a lint rule."""

import re
import sys
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

from diag.artefacts.reference import declared, lint_rule_page, signal_page
from diag.artefacts.runbook import runbook
from diag.commands.site import site
from diag.core.errors import BadUsage
from diag.core.formatting import printable
from diag.knowledge.rule_set import rule_set
from diag.lint.rules import RULES

_LIKELY, _FEW = 0.75, 5


def show(name: str, folder: Path | None, as_markdown: bool) -> None:
    """Print the page as Markdown, or laid out where standard output is a terminal."""
    text = run(name, folder)
    if as_markdown or not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    from diag.report import terminal

    terminal.page(text)


def run(name: str, folder: Path | None) -> str:
    """Return the runbook of the incident, the page of the signal or part, or that of the lint rule with that id.

    A signal is found by its name, its id and the series that rules record of it. BadUsage where there is none.
    """
    contract, incidents = site(folder, None)
    by_id = {incident.id: incident for incident in incidents}
    if name in by_id:
        return runbook(by_id[name], incidents, contract, rule_set(incidents, contract))
    if name in RULES:
        return lint_rule_page(RULES[name])
    signals = declared(incidents)
    found = next((id for id, signal in signals.items() if name in (id, signal.name) or f":{id}:" in f"{name}:"), "")
    if found:
        return signal_page(signals[found], incidents, contract)
    close = near(name, [*by_id, *RULES, *signals])
    suggestion = f" (did you mean {', '.join(close)}?)" if close else ""
    raise BadUsage(
        f"there is no incident, signal or lint rule '{printable(name, 40)}'{suggestion}; diag incidents lists the"
        " incidents, docs/lint-rules.md the rules"
    )


def near(name: str, ids: Sequence[str]) -> list[str]:
    """The ids that may be meant, the likeliest first: "kv" begins a word of some, "sats" nearly does."""
    words = [word for word in re.split(r"[\W_]+", name.lower()) if word]
    scores = {id: [max(_likeness(word, part) for part in id.split("_")) for word in words] for id in ids}
    likely = [id for id in ids if min(scores[id], default=0.0) >= _LIKELY]
    return sorted(likely, key=lambda id: -sum(scores[id]))[:_FEW]


def _likeness(word: str, part: str) -> float:
    """0..1: how much of a word is the part, or begins it."""
    return max(SequenceMatcher(None, word, text).ratio() for text in (part, part[: len(word)]))
