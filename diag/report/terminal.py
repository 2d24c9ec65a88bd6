"""The report for a person at a terminal: at most 100 columns, plain where it is none, nothing that a label injects."""

import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.text import Text

from diag.diagnosis.diagnose import Diagnosis, Reading, against
from diag.diagnosis.proposals import Proposal
from diag.diagnosis.relaunch import relaunched
from diag.diagnosis.report import Finding, Report
from diag.report import fleet
from diag.report import sentences as words

WIDTH = 100
LABEL = 14
ROWS = 5
SERVERS = 20
BARS = "▁▂▃▄▅▆▇█"
BARS_WIDE = 20
STYLES = {"CRITICAL": "bold red", "WARNING": "bold yellow", "HEALTHY": "bold green", "CANNOT": "bold magenta"}


class Tick(Protocol):
    """Called with the share of the watch that is over, 0..1."""

    def __call__(self, share: float) -> None:
        """Show it."""


def render(report: Report) -> str:
    """The report as plain text, one line break at its end."""
    lines = [*_heads(report), *_rows("progress", words.restless(report)), *_fleet(report)]
    for finding, *others in words.alike(report):
        lines += ["", *_primary(finding, others, report)]
    return (
        "\n".join(
            [
                *lines,
                *_section("also", words.also(report)),
                *_section("timeline", words.timeline(report)),
                "",
                *_footer(report),
            ]
        )
        + "\n"
    )


def write(report: Report) -> None:
    """Print the report, coloured where standard output is a terminal that wants it."""
    text = Text(render(report))
    for word, style in STYLES.items():
        text.highlight_regex(rf"(?m)^{word}(?: TELL)?", style)
    text.highlight_regex(rf"(?m)^  [a-z][a-z ]{{0,{LABEL - 3}}}(?= )", "dim")
    text.highlight_regex(r"--[a-z][a-z-]+ .*-> .*", "bold")
    Console(soft_wrap=True, highlight=False, markup=False, emoji=False).print(text, end="")


@contextmanager
def bar(says: str) -> Iterator[Tick]:
    """A progress bar on standard error while a watch lasts; nothing where that is not a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(words.printable(says), total=1.0)
        yield lambda share: progress.update(task, completed=share)


def _heads(report: Report) -> list[str]:
    return [line for head in words.headline(report, words.told(report)) for line in _sentence(head)]


def _sentence(text: str) -> list[str]:
    """Text over the whole width; a name with hyphens stays whole, to be copied."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _row(label: str, text: str) -> list[str]:
    """`label` in a column of its own, the text wrapped beside it."""
    first = f"  {label:<{LABEL}}"
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False)


def _rows(label: str, texts: list[str]) -> list[str]:
    return [line for at, text in enumerate(texts) for line in _row(label if at == 0 else "", text)]


def _fleet(report: Report) -> list[str]:
    """A line for each server of a fleet that is not healthy, the worst first."""
    if not words.is_fleet(report):
        return []
    lines = fleet.servers(report, words.told(report))
    ill = [each for each in lines if each.verdict != "healthy"]
    wide = max((len(each.instance) for each in ill[:SERVERS]), default=0)
    rows = [
        f"  {each.verdict:<10}{each.instance:<{wide + 2}}{each.incidents or each.states}  {each.since}".rstrip()
        for each in ill[:SERVERS]
    ]
    rest = [f"  and {len(ill) - SERVERS:,} more that are ill"] if len(ill) > SERVERS else []
    return ["", fleet.counts(lines), *(row for each in rows for row in _wrapped(each)), *rest]


def _wrapped(row: str) -> list[str]:
    return textwrap.wrap(row, WIDTH, subsequent_indent=" " * 14, break_on_hyphens=False, drop_whitespace=True)


def _primary(finding: Finding, others: list[Finding], report: Report) -> list[str]:
    one = finding.diagnosis
    alike = f", as on {len(others):,} more" if others else ""
    return [
        *_sentence(f"{one.incident.title} ({words.place(one.subject)}{alike})"),
        *_evidence(one),
        *_rows("first sign", words.first_sign(one, words.told(report))),
        *_rows("ruled out", [f"{each.looks_like}: {each.because}" for each in one.refuted]),
        *_rows("not ruled out", [f"{each.name}: {each.distinguish}" for each in one.open]),
        *_rows(
            "follows", [f"{each.incident.id}: {each.incident.title}" for each in words.consequences(finding, report)]
        ),
        *_actions(finding),
        *_rows("do not", list(one.incident.do_not)),
        *_row("runbook", f"diag explain {one.incident.id}"),
    ]


def _evidence(one: Diagnosis) -> list[str]:
    """At most five rows: the symptoms, then what supports them."""
    rows = words.evidence(one)[:ROWS]
    return [_reading("because" if at == 0 else "", each) for at, each in enumerate(rows)]


def _reading(label: str, reading: Reading) -> str:
    value = reading.shown
    name, limit = reading.condition.signal.name, against(reading)
    return f"  {label:<{LABEL}}{name:<38} {value:>8}  {limit:<9} {spark(reading)}".rstrip()


def spark(reading: Reading) -> str:
    """The history as bars from the least to the most value, a dot where there is none.

    Of many instants each bar shows the one nearest to the incident, or an hour of trouble would vanish in a day.
    """
    step = -(-len(reading.history) // BARS_WIDE)
    worst = max if reading.condition.op.startswith(">") else min
    parts = [reading.history[at : at + step] for at in range(0, len(reading.history), step)]
    history = [worst((each for each in part if each is not None), default=None) for part in parts]
    known = [each for each in history if each is not None]
    if len(known) < 2 or not (sys.stdout.encoding or "").lower().startswith("utf"):
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join("·" if each is None else BARS[int((each - low) / span * (len(BARS) - 1))] for each in history)


def _actions(finding: Finding) -> list[str]:
    """The safest action that is complete first, then the others by their one line."""
    ready = [each for each in finding.proposals if not each.needs]
    now, then = ready[:1], [each for each in finding.proposals if each is relaunched(finding.proposals)]
    rest = [each for each in finding.proposals if each not in (*now, *then)]
    lines = [line for each in now for line in _action("do now", each)]
    lines += [line for each in then if each not in now for line in _action("then", each)]
    # in one line, however long: what is broken here is broken where it is pasted
    lines += [f"  {'relaunch':<{LABEL}}{words.printable(finding.relaunch)}"] if finding.relaunch else []
    return [*lines, *[line for at, each in enumerate(rest) for line in _option("or" if at == 0 else "", each)]]


def _action(label: str, proposal: Proposal) -> list[str]:
    fix = proposal.fix
    facts = {"effect": fix.effect, "risk": fix.risk, "rollback": fix.rollback, "why": words.why(fix.why)}
    lines = _rows(label, [each for each in (words.change(proposal), proposal.text) if each])
    lines += [line for name, text in facts.items() if text for line in _row(name, text)]
    return [*lines, *_row("restart", "needed" if fix.restart else "not needed")]


def _option(label: str, proposal: Proposal) -> list[str]:
    fix = proposal.fix
    parts = [words.change(proposal), proposal.text, fix.risk and f"Price: {fix.risk}.", words.versions(proposal)]
    needs = f"Needs: {', '.join(proposal.needs)}." if proposal.needs else ""
    return _row(label, "  ".join(part for part in (*parts, needs) if part))


def _section(label: str, texts: list[str]) -> list[str]:
    return ["", *_rows(label, texts)] if texts else []


def _footer(report: Report) -> list[str]:
    seen = report.observed
    lines = _row("looked at", words.looked_at(report, words.told(report)))
    lines += _rows("server", words.folded([words.printable(each) for each in seen.servers], ROWS))
    lines += _row("checked", words.checked(report))
    lines += _rows("cannot tell", [*words.blind(report), *words.undecided(report)])
    lines += _rows("not measured", words.measure(report))
    lines += _rows("contract", ["; ".join(report.contract)])
    return [*lines, *_rows("note", [words.printable(each) for each in seen.notes])]
