"""The output of a terminal session: coloured reports, the lines of a watch, runbooks in a pager, progress bars.

Without a terminal all of it is plain text. Only this file and diag/top/app.py import rich, and only where it is needed.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, ClassVar

from diag.core.formatting import escaped, moment
from diag.diagnosis.report import Report
from diag.report import coverage
from diag.report import sentences as words
from diag.report.answer import answers, verdicts
from diag.report.layout import NARROWEST, WIDTH, columns
from diag.report.plain_text import full_report
from diag.report.short_report import short_report

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.progress import Progress, ProgressColumn
    from rich.text import Text

    from diag.diagnosis.report import Transition
    from diag.sources.source import Tick

COLOUR_ANYWHERE = {"FORCE_COLOR", "TTY_COMPATIBLE"}
"""Environment variables that make rich treat any output as a terminal."""
STYLES = {
    **{"CRITICAL": "bold red", "WARNING": "bold yellow", "HEALTHY": "bold green", "CANNOT TELL": "bold magenta"},
    **dict.fromkeys((coverage.NO_INCIDENT, coverage.NO_FAILURE), "bold blue"),
    **{"UNKNOWN": "magenta", "GONE": "magenta", "label": "bold", "aside": "dim"},
    **dict.fromkeys(("label do_now", "label next_time", "label fix", "label relaunch"), "bold cyan"),
    **{"value": "bold", "history": "yellow", "command": "bold"},
}
"""The style of a part of a line by its role; a label without a style of its own has that of all."""
GONE = ": its server is no longer there, so this does not mean that it was fixed"


# -- the report -------------------------------------------------------------------------------------------------------


def render(report: Report, *, verbose: bool = False, quiet: bool = False) -> str:
    """Render the report as plain text, one line break at its end: short, full, or its first line alone."""
    return "\n".join(_lines(report, verbose=verbose, quiet=quiet)) + "\n"


def _lines(report: Report, *, verbose: bool, quiet: bool) -> list[str]:
    if quiet:
        return verdicts(report)[:1]
    return full_report(report) if verbose else short_report(report)


def write(report: Report, *, verbose: bool = False, quiet: bool = False) -> None:
    """Print the report, coloured if standard output is a terminal that wants it."""
    width = shutil.get_terminal_size((WIDTH, 24)).columns  # COLUMNS, the terminal, or WIDTH for a file or a pipe
    with columns(max(width, NARROWEST), local=sys.stdout.isatty()):
        lines = _lines(report, verbose=verbose, quiet=quiet)
    if sys.stdout.isatty() or not os.environ.keys().isdisjoint(COLOUR_ANYWHERE):
        _console().print(styled(lines), soft_wrap=True)
    else:
        sys.stdout.write("\n".join(lines) + "\n")


def styled(lines: Sequence[str]) -> "Text":
    """Return lines of a report with the styles of their parts; nothing in them is markup."""
    from rich.text import Text

    text = Text("\n".join(lines))
    start = 0
    for line in lines:
        for first, last, role in getattr(line, "roles", ()):
            style = STYLES.get(role) or STYLES.get(role.partition(" ")[0], "")
            text.stylize(style, start + first, start + last)
        start += len(line) + 1
    return text


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


# -- the lines of a watch ---------------------------------------------------------------------------------------------


def watch_started(report: Report) -> str:
    return "".join(watch_line(report.observed.end, head) for head in _heads(report))


def _heads(report: Report) -> list[str]:
    return [line for answer in answers(report, moment) for line in answer.lines]


def watch_changed(change: "Transition") -> str:
    """Print one transition; unless the incident ended, with evidence and impact."""
    diagnosis = change.diagnosis
    holds = f": {diagnosis.symptoms[0].sentence}; {diagnosis.incident.impact}"
    rest = holds if change.what != "ended" else GONE if change.gone else ""
    what = f"{diagnosis.severity.upper()} {diagnosis.incident.id} on {words.where(diagnosis)}"
    return watch_line(change.at, f"{change.what:<6}  {what}{rest}")


def watch_regained(report: Report) -> str:
    return "".join(watch_line(report.observed.end, f"observed again: {head}") for head in _heads(report))


def watch_line(at: float, text: str) -> str:
    return f"{moment(at)}  {escaped(text)}\n"


# -- Markdown in a pager ----------------------------------------------------------------------------------------------


def page(markdown: str) -> None:
    """Show Markdown with its headings, tables and code laid out, through $PAGER (default: less; empty: none)."""
    import pydoc  # loads much that no report needs

    text, pager = laid_out(markdown), os.environ.get("PAGER", "less")
    if shutil.which(pager.partition(" ")[0]):
        os.environ.setdefault("LESS", "FRX")  # colours, and no pager for what fits on one screen
        pydoc.pipepager(text, pager)
    else:
        sys.stdout.write(text)


def laid_out(markdown: str, width: int = WIDTH) -> str:
    """Lay out Markdown for a terminal; code is not wrapped, to be copied, and relative links lose their target."""
    from rich.markdown import CodeBlock, Markdown
    from rich.syntax import ANSI_DARK, ANSISyntaxTheme, Syntax
    from rich.theme import Theme

    # the PromQL lexer marks the colon in a metric name as an error
    colours = ANSISyntaxTheme({token: style for token, style in ANSI_DARK.items() if str(token) != "Token.Error"})

    class Code(CodeBlock):
        def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
            lines = (f"  {line}" for line in str(self.text).rstrip().splitlines())
            code = Syntax("", self.lexer_name, theme=colours).highlight("\n".join(lines))
            code.no_wrap, code.overflow = True, "ignore"
            yield code

    class Runbook(Markdown):
        elements: ClassVar = {**Markdown.elements, "fence": Code, "code_block": Code}

    console = _console()
    console.width = min(console.width, width)
    console.push_theme(Theme({"markdown.code": "bold cyan"}))
    without_links = re.sub(r"\[([^]]+)\]\((?!https?://)[^)]*\)", r"\1", markdown)
    with console.capture() as captured:
        console.print(Runbook(without_links, hyperlinks=False), crop=False)
    return re.sub(r" +$", "", captured.get(), flags=re.MULTILINE)


# -- progress bars ----------------------------------------------------------------------------------------------------


@contextmanager
def bar(description: str) -> Iterator["Tick"]:
    """Show a progress bar while servers are observed; nothing if standard error is not a terminal."""
    from rich.progress import TimeRemainingColumn

    with _progress(TimeRemainingColumn()) as progress:
        task = progress.add_task(escaped(description), total=1.0)
        yield lambda share: progress.update(task, completed=share)


class StepsBar:
    """A progress bar with a changing description; a call shows the step and the share of it that is over, 0..1.

    If standard error is not a terminal, each step is one line with its time instead: a ramp takes minutes.
    """

    def __init__(self) -> None:
        from rich.progress import TimeElapsedColumn

        self._progress = _progress(TimeElapsedColumn())
        self._task = self._progress.add_task("", total=1.0)
        self._line = ""

    def __call__(self, what: str, share: float) -> None:
        if self._progress.disable:
            if what != self._line:
                self._line = what
                with suppress(OSError):  # a closed pipe ends no ramp
                    sys.stderr.write(watch_line(time.time(), what))
                    sys.stderr.flush()
            return
        self._progress.start()
        self._progress.update(self._task, description=escaped(what), completed=min(share, 1.0))

    def pause(self) -> None:
        """Clear the bar for a question."""
        self._progress.stop()


@contextmanager
def steps_bar() -> Iterator[StepsBar]:
    """Show the progress of a ramp's steps on standard error: a bar in a terminal, else lines."""
    shown = StepsBar()
    try:
        yield shown
    finally:
        shown.pause()


def _progress(clock: "ProgressColumn") -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), clock)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
