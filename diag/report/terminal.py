"""The report for a person at a terminal: at most 100 columns, plain where it is none, nothing that a label injects."""

import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from diag.diagnose import Diagnosis, Reading, against, says, show
from diag.fixes import Proposal
from diag.judgement import Finding, Judgement
from diag.report import words

WIDTH = 100
LABEL = 14
ROWS = 5
BARS = "▁▂▃▄▅▆▇█"
BARS_WIDE = 20
STYLES = {"CRITICAL": "bold red", "WARNING": "bold yellow", "HEALTHY": "bold green", "CANNOT": "bold magenta"}


class Tick(Protocol):
    """Called with the share of the watch that is over, 0..1."""

    def __call__(self, share: float) -> None:
        """Show it."""


def render(judgement: Judgement) -> str:
    """The report as plain text, one line break at its end."""
    lines = [*_heads(judgement), *_progress(judgement)]
    for finding in judgement.present:
        if finding.diagnosis.primary:
            lines += ["", *_primary(finding, judgement)]
    return "\n".join([*lines, *_also(judgement), "", *_footer(judgement)]) + "\n"


def write(judgement: Judgement) -> None:
    """Print the report, coloured where standard output is a terminal that wants it."""
    text = Text(render(judgement))
    for word, style in STYLES.items():
        text.highlight_regex(rf"(?m)^{word}(?: TELL)?", style)
    text.highlight_regex(rf"(?m)^  [a-z][a-z ]{{0,{LABEL - 3}}}(?= )", "dim")
    text.highlight_regex(r"--[a-z][a-z-]+ .*-> .*", "bold")
    Console(soft_wrap=True, highlight=False, markup=False, emoji=False).print(text, end="")


@contextmanager
def bar(says: str) -> Iterator[Tick]:
    """A progress bar on standard error while a watch lasts; nothing where that is not a terminal."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(words.printable(says), total=1.0)
        yield lambda share: progress.update(task, completed=share)


def _heads(judgement: Judgement) -> list[str]:
    return [line for head in words.headline(judgement) for line in textwrap.wrap(head, WIDTH, subsequent_indent="  ")]


def _row(label: str, text: str) -> list[str]:
    """`label` in a column of its own, the text wrapped beside it."""
    first = f"  {label:<{LABEL}}"
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False)


def _rows(label: str, texts: list[str]) -> list[str]:
    return [line for at, text in enumerate(texts) for line in _row(label if at == 0 else "", text)]


def _progress(judgement: Judgement) -> list[str]:
    told = [each for each in judgement.progress if each.state in ("slow", "stalled", "starting", "dead", "idle")]
    return _rows("progress", [f"{words.place(each.subject)} is {each.state}: {each.because}" for each in told])


def _primary(finding: Finding, judgement: Judgement) -> list[str]:
    one = finding.diagnosis
    return [
        f"{one.incident.title} ({words.place(one.subject)})",
        *_evidence(one),
        *_rows("ruled out", [f"{each.looks_like}: {each.because}" for each in one.refuted]),
        *_rows("not ruled out", [f"{each.name}: {each.tell}" for each in one.open]),
        *_rows(
            "follows", [f"{each.incident.id}: {each.incident.title}" for each in words.consequences(finding, judgement)]
        ),
        *_actions(finding),
        *_rows("do not", list(one.incident.do_not)),
        *_row("runbook", f"diag explain {one.incident.id}"),
    ]


def _evidence(one: Diagnosis) -> list[str]:
    """At most five rows: the symptoms, then what supports them."""
    symptoms = [each for each in one.symptoms if each.condition in one.incident.symptoms]
    rows = [*symptoms, *(each for each in one.supports if each.holds)][:ROWS]
    return [_reading("because" if at == 0 else "", each) for at, each in enumerate(rows)]


def _reading(label: str, reading: Reading) -> str:
    value = "-" if reading.value is None else show(reading.value)
    name, limit = reading.condition.signal.name, against(reading)
    return f"  {label:<{LABEL}}{name:<38} {value:>8}  {limit:<9} {spark(reading)}".rstrip()


def spark(reading: Reading) -> str:
    """The history as bars from the least to the most value, thinned to the width, a dot where there is none."""
    step = -(-len(reading.history) // BARS_WIDE)
    history = reading.history[(len(reading.history) - 1) % step :: step]
    known = [each for each in history if each is not None]
    if len(known) < 2 or not (sys.stdout.encoding or "").lower().startswith("utf"):
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join("·" if each is None else BARS[int((each - low) / span * (len(BARS) - 1))] for each in history)


def _actions(finding: Finding) -> list[str]:
    """The safest action that is complete first, then the others by their one line."""
    ready = [each for each in finding.proposals if not each.needs]
    first = ready[:1]
    rest = [each for each in finding.proposals if each not in first]
    lines = [line for each in first for line in _action(each)]
    lines += _rows("relaunch", [words.printable(finding.relaunch)]) if finding.relaunch else []
    return [*lines, *[line for at, each in enumerate(rest) for line in _option("or" if at == 0 else "", each)]]


def _action(proposal: Proposal) -> list[str]:
    fix = proposal.fix
    facts = {"effect": fix.effect, "risk": fix.risk, "rollback": fix.rollback, "why": words.why(fix.why)}
    lines = _rows("do now", [each for each in (words.change(proposal), fix.change) if each])
    lines += [line for name, text in facts.items() if text for line in _row(name, text)]
    return [*lines, *_row("restart", "needed" if fix.restart else "not needed")]


def _option(label: str, proposal: Proposal) -> list[str]:
    fix = proposal.fix
    parts = [words.change(proposal), fix.change, fix.risk and f"Price: {fix.risk}.", words.versions(proposal)]
    needs = f"Needs: {', '.join(proposal.needs)}." if proposal.needs else ""
    return _row(label, "  ".join(part for part in (*parts, needs) if part))


def _also(judgement: Judgement) -> list[str]:
    """What is present besides: infos, and incidents in the scope of another primary that it does not explain."""
    others = [e.diagnosis for e in judgement.present if not e.diagnosis.primary and not e.diagnosis.explained_by]
    texts = [
        f"{d.severity}: {d.incident.id} on {words.place(d.subject)}, {words.when(d)}: {says(d.symptoms[0])}"
        for d in others
    ]
    return ["", *_rows("also", texts)] if texts else []


def _footer(judgement: Judgement) -> list[str]:
    seen = judgement.observed
    lines = _row("looked at", words.looked_at(judgement))
    lines += _rows("server", [words.printable(each) for each in seen.servers[:ROWS]])
    lines += _row("checked", words.checked(judgement))
    lines += _rows("cannot tell", words.undecided(judgement))
    lines += _rows("not measured", words.measure(judgement))
    lines += _rows("contract", ["; ".join(judgement.contract)])
    return [*lines, *_rows("note", [words.printable(each) for each in seen.notes])]
