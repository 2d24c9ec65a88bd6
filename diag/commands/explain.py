"""Declarations as text: `diag explain` (runbook, signal, lint rule, flag), `diag incidents` and `diag generate`."""

import re
import sys
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

from diag.core.errors import BadUsage
from diag.core.formatting import printable
from diag.knowledge.catalog import load

_LIKELY, _FEW = 0.75, 8


def show(name: str, folder: Path | None, as_markdown: bool) -> None:
    """Print a page as Markdown, or laid out if standard output is a terminal."""
    text = run(name, folder)
    if as_markdown or not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    from diag.report import terminal

    terminal.page(text)


def run(name: str, folder: Path | None) -> str:
    """Return the page of the incident, lint rule, preflight check, signal or part, wrong advice, or flag of vLLM.

    A signal is found by its name, its id and the series that rules record of it. BadUsage if nothing has that name.
    """
    from diag.artefacts.advice import advice_or_flag, wrong_advice
    from diag.artefacts.promql_page import judgement
    from diag.artefacts.reference import declared, lint_rule_page, preflight_page, signal_page
    from diag.artefacts.runbook import runbook
    from diag.commands.observe import site
    from diag.knowledge.formulas import rule_set
    from diag.lint.rules import RULES
    from diag.preflight.checks import CHECKS

    contract, incidents = site(folder, None)
    by_id = {incident.id: incident for incident in incidents}
    if name in by_id:
        incident, rules = by_id[name], rule_set(incidents, contract)
        page = runbook(incident, incidents, contract, rules)
        return f"{page}\n## Thresholds and PromQL\n\n{judgement(incident, incidents, contract, rules)}"
    if name in RULES:
        return lint_rule_page(RULES[name])
    if name in CHECKS:
        return preflight_page(CHECKS[name])
    signals = declared(incidents)
    found = next((id for id, signal in signals.items() if name in (id, signal.name)), "")
    if not found and (page := advice_or_flag(name)):
        return page
    found = found or next((id for id in signals if f":{id}:" in f"{name}:"), "")
    if found:
        return signal_page(signals[found], incidents, contract)
    close = [*near(name, list(by_id)), *near(name, [*RULES, *CHECKS, *signals, *wrong_advice()])][:_FEW]
    suggestion = f" (did you mean {', '.join(close)}?)" if close else ""
    raise BadUsage(
        f"there is no incident, signal, lint rule, check or vLLM flag '{printable(name, 40)}'{suggestion}; diag"
        " incidents lists the incidents, docs/lint-rules.md the rules, docs/preflight.md the checks"
    )


def near(name: str, ids: Sequence[str]) -> list[str]:
    """Return similar ids, the likeliest first: "kv" begins a word of some, "sats" nearly does."""

    def likeness(word: str, part: str) -> float:
        return max(SequenceMatcher(None, word, text).ratio() for text in (part, part[: len(word)]))

    words = [word for word in re.split(r"[\W_]+", name.lower()) if word]
    scores = {id: [max(likeness(word, part) for part in id.split("_")) for word in words] for id in ids}
    likely = [id for id in ids if min(scores[id], default=0.0) >= _LIKELY]
    return sorted(likely, key=lambda id: -sum(scores[id]))[:_FEW]


def list_incidents(folder: Path | None) -> str:
    """Return a line for each incident: id, severity, title."""
    incidents = load(folder)
    width = max(len(incident.id) for incident in incidents)
    return "".join(f"{incident.id:<{width}}  {incident.severity:<8}  {incident.title}\n" for incident in incidents)


def generate(
    root: Path,
    check: bool,
    folder: Path | None,
    contract_file: Path | None,
    only: Sequence[str] = (),
    per_incident: bool = False,
) -> tuple[str, int]:
    """Write alerts, dashboards, runbooks and reference pages, or only compare them; return text and exit status."""
    from diag.artefacts.generate import differences, files, write
    from diag.commands.observe import site

    contract, incidents = site(folder, contract_file)
    texts = files(incidents, contract, only, per_incident)
    if not check:
        changed = write(root, texts)
        return "\n".join([*changed, f"{root}: {len(texts)} files, {len(changed)} of them changed"]), 0
    outdated = [f"{name}: {difference}" for name, difference in differences(root, texts)]
    if outdated:
        return "\n".join(
            [*outdated, f"{root}: {len(outdated)} of {len(texts)} files are out of date; run diag generate"]
        ), 1
    return f"{root}: all {len(texts)} files are up to date", 0
