"""The report for a person at a terminal: at most 100 columns, plain where it is none, nothing that a label injects."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from diag.core.formatting import escaped
from diag.diagnosis.diagnose import Diagnosis, Reading
from diag.diagnosis.proposals import Proposal
from diag.diagnosis.relaunch import launchable
from diag.diagnosis.report import Finding, Report
from diag.report import fleet
from diag.report import sentences as words
from diag.report.layout import LABEL, labelled, paragraph, table, verbatim

ROWS = 5
SERVERS = 20
BARS = "▁▂▃▄▅▆▇█"
BARS_WIDE = 20
COLOUR_ANYWHERE = {"FORCE_COLOR", "TTY_COMPATIBLE"}
"""Environment variables by which rich takes anything for a terminal."""
STYLES = {"CRITICAL": "bold red", "WARNING": "bold yellow", "HEALTHY": "bold green", "CANNOT": "bold magenta"}


class Tick(Protocol):
    """Called with the share of the observation that is over, 0..1."""

    def __call__(self, share: float) -> None:
        """Show it."""


def render(report: Report, verbose: bool = False) -> str:
    """The report as plain text, one line break at its end; `verbose` names the incidents that are absent or unknown."""
    lines = [*_headlines(report), *labelled("progress", words.not_busy(report)), *_fleet(report)]
    for finding, *others in words.alike(report):
        lines += ["", *_primary(finding, others, report)]
    lines += _section("also present", words.also(report))
    lines += _section("timeline", words.timeline(report))
    return "\n".join([*lines, "", *_footer(report, verbose)]) + "\n"


def write(report: Report, verbose: bool = False) -> None:
    """Print the report, coloured where standard output is a terminal that wants it."""
    text = render(report, verbose)
    if sys.stdout.isatty() or not os.environ.keys().isdisjoint(COLOUR_ANYWHERE):
        _write_coloured(text)
    else:
        sys.stdout.write(text)


def _write_coloured(plain: str) -> None:
    from rich.console import Console
    from rich.text import Text

    text = Text(plain)
    for word, style in STYLES.items():
        text.highlight_regex(rf"(?m)^{word}(?: TELL)?", style)
    text.highlight_regex(rf"(?m)^  [a-z][a-z -]{{0,{LABEL - 3}}}(?= )", "dim")
    text.highlight_regex(r"--[a-z][a-z-]+ .*-> .*", "bold")
    Console(soft_wrap=True, highlight=False, markup=False, emoji=False).print(text, end="")


@contextmanager
def bar(description: str) -> Iterator[Tick]:
    """A progress bar on standard error while servers are observed; nothing where that is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(escaped(description), total=1.0)
        yield lambda share: progress.update(task, completed=share)


def _headlines(report: Report) -> list[str]:
    return [line for head in words.headline(report, words.time_format(report)) for line in paragraph(head)]


def _fleet(report: Report) -> list[str]:
    """A line for each server of a fleet that is not healthy, the worst first."""
    if not words.is_fleet(report):
        return []
    servers = fleet.servers(report, words.time_format(report))
    ill = [server for server in servers if server.verdict != "healthy"]
    rows = [(server.verdict, server.instance, server.summary) for server in ill[:SERVERS]]
    rest = [f"  and {len(ill) - SERVERS:,} more that are not healthy"] if len(ill) > SERVERS else []
    return ["", fleet.counts(servers), *table(rows), *rest]


def _primary(finding: Finding, others: list[Finding], report: Report) -> list[str]:
    diagnosis = finding.diagnosis
    incident = diagnosis.incident
    alike = f", as on {len(others):,} more" if others else ""
    follows = [f"{other.incident.id}: {other.incident.title}" for other in words.consequences(finding, report)]
    return [
        *paragraph(f"{incident.title} ({words.place(diagnosis.subject)}{alike})"),
        *_evidence(diagnosis),
        *labelled("first sign", words.first_sign(diagnosis, words.time_format(report))),
        *labelled("ruled out", [f"{refuted.name}: {refuted.evidence}" for refuted in diagnosis.refuted]),
        *labelled("not ruled out", [f"{look_alike.name}: {look_alike.distinguish}" for look_alike in diagnosis.open]),
        *labelled("consequences", follows),
        *_actions(finding),
        *labelled("do not", incident.do_not),
        *labelled("runbook", [f"diag explain {incident.id}"]),
    ]


def _evidence(diagnosis: Diagnosis) -> list[str]:
    """At most five rows: the symptoms, then what supports them."""
    rows = [
        (reading.condition.signal.name, reading.shown, reading.threshold, spark(reading))
        for reading in words.evidence(diagnosis)[:ROWS]
    ]
    return table(rows, label="evidence", right=(1,))


def spark(reading: Reading) -> str:
    """The history as bars from the least to the most value, a dot where there is none.

    Of many instants each bar shows the one nearest to the incident, or an hour of trouble would vanish in a day.
    """
    step = -(-len(reading.history) // BARS_WIDE)
    worst = max if reading.condition.op.startswith(">") else min
    parts = [reading.history[at : at + step] for at in range(0, len(reading.history), step)]
    history = [worst((value for value in part if value is not None), default=None) for part in parts]
    known = [value for value in history if value is not None]
    if len(known) < 2 or not (sys.stdout.encoding or "").lower().startswith("utf"):
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join("·" if value is None else BARS[int((value - low) / span * (len(BARS) - 1))] for value in history)


def _actions(finding: Finding) -> list[str]:
    """The safest complete action, the change that the relaunch line carries, then the alternatives in a line each."""
    first = next((proposal for proposal in finding.proposals if not proposal.needs), None)
    change = launchable(finding.proposals)
    lines = _action("fix" if first.fix.restart else "mitigation", first) if first else []
    lines += _action("fix", change) if change and change is not first else []
    lines += verbatim("relaunch", finding.relaunch or "")
    others = [proposal for proposal in finding.proposals if proposal not in (first, change)]
    return [*lines, *labelled("alternatives", [_alternative(proposal) for proposal in others])]


def _action(label: str, proposal: Proposal) -> list[str]:
    fix = proposal.fix
    facts = {
        "expected effect": fix.effect,
        "trade-off": fix.risk,
        "rollback": fix.rollback,
        "rationale": words.why(fix.why),
        "restart": "needed" if fix.restart else "not needed",
    }
    lines = labelled(label, [text for text in (words.change(proposal), proposal.text) if text])
    return [*lines, *(line for name, text in facts.items() if text for line in labelled(name, [text]))]


def _alternative(proposal: Proposal) -> str:
    risk = proposal.fix.risk and f"Trade-off: {proposal.fix.risk}."
    parts = (words.change(proposal), proposal.text, risk, words.versions(proposal), words.needs(proposal))
    return "  ".join(part for part in parts if part)


def _section(label: str, texts: list[str]) -> list[str]:
    return ["", *labelled(label, texts)] if texts else []


def _footer(report: Report, verbose: bool) -> list[str]:
    observed = report.observed
    facts = {
        "source": [words.source(report, words.time_format(report))],
        "server": words.folded(list(observed.servers), ROWS),
        "checked": words.checked(report, verbose),
        "unknown": [*words.blind(report), *(words.undecided(report) if verbose else [])],
        "not collected": words.not_collected(report),
        "thresholds": ["; ".join(report.contract)],
        "note": list(observed.notes),
    }
    return [line for label, texts in facts.items() for line in labelled(label, texts)]
