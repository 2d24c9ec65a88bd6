"""What a person at a terminal sees: colour, a pager, a progress bar; plain text where there is no terminal."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Protocol

from diag.core.formatting import escaped
from diag.core.lazy_regex import lazy
from diag.diagnosis.report import Report
from diag.report import full, short
from diag.report.layout import WIDTH
from diag.report.verdict import verdicts

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

_RELATIVE_LINK = lazy(r"\[([^]]+)\]\((?!https?://)[^)]*\)")
COLOUR_ANYWHERE = {"FORCE_COLOR", "TTY_COMPATIBLE"}
"""Environment variables by which rich takes anything for a terminal."""
STYLES = {
    r"^CRITICAL +\w*": "bold red",
    r"^WARNING +\w*": "bold yellow",
    r"^HEALTHY": "bold green",
    r"^CANNOT TELL": "bold magenta",
    r"^  (?:Do now|Fix|Relaunch)(?= {2})": "bold cyan",
    r"^  [A-Z][A-Za-z ]{1,12}(?= {2})": "bold",
    r"^  [a-z][a-z -]{0,14}(?= )": "dim",
    r"^  (?:Ruled out|Not seen|More) {2}.*$": "dim",
    r"\bcritical(?=  )": "red",
    r"\bwarning(?=  )": "yellow",
    r"(?<=  )\S+(?: \S+)?(?=  +(?:[<>]=?|=) )": "bold",
    r"[▁▂▃▄▅▆▇█·]{2,}": "yellow",
    r"(?:remove )?--[a-z][a-z0-9.-]+ .*-> \S+|remove --[a-z][a-z0-9.-]+": "bold",
}
"""What stands out: a pattern in a line of a report, and its style."""


class Tick(Protocol):
    """Called with the share of the observation that is over, 0..1."""

    def __call__(self, share: float) -> None:
        """Show it."""


def render(report: Report, *, verbose: bool = False, quiet: bool = False) -> str:
    """The report as plain text, one line break at its end: short, whole, or its first line alone."""
    if quiet:
        return verdicts(report)[0] + "\n"
    return full.render(report) if verbose else short.render(report)


def write(report: Report, *, verbose: bool = False, quiet: bool = False) -> None:
    """Print the report, coloured where standard output is a terminal that wants it."""
    text = render(report, verbose=verbose, quiet=quiet)
    if sys.stdout.isatty() or not os.environ.keys().isdisjoint(COLOUR_ANYWHERE):
        _write_coloured(text)
    else:
        sys.stdout.write(text)


def _write_coloured(plain: str) -> None:
    _console().print(styled(plain), end="", soft_wrap=True)


def styled(plain: str) -> "Text":
    """The text of a report with its styles; nothing in it is markup."""
    from rich.text import Text

    text = Text(plain)
    for pattern, style in STYLES.items():
        text.highlight_regex(f"(?m){pattern}", style)
    return text


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
    """Markdown for a terminal; code is not wrapped, to be copied, and links within the documentation are left out."""
    from rich.markdown import CodeBlock, Markdown
    from rich.syntax import ANSI_DARK, ANSISyntaxTheme, Syntax
    from rich.theme import Theme

    # its lexer takes the colon in a metric's name for an error
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
    with console.capture() as captured:
        console.print(Runbook(_RELATIVE_LINK.sub(r"\1", markdown), hyperlinks=False), crop=False)
    return re.sub(r" +$", "", captured.get(), flags=re.MULTILINE)


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


@contextmanager
def bar(description: str) -> Iterator[Tick]:
    """A progress bar on standard error while servers are observed; nothing where that is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(escaped(description), total=1.0)
        yield lambda share: progress.update(task, completed=share)


class StepsBar(Protocol):
    """Called with what is done and the share of it that is over, 0..1; `pause` takes it off the screen."""

    def __call__(self, what: str, share: float) -> None:
        """Show it."""

    def pause(self) -> None:
        """Leave the screen to a question."""


@contextmanager
def steps_bar() -> Iterator[StepsBar]:
    """A progress bar on standard error that changes its description; nothing where that is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    class Shown:
        def __init__(self) -> None:
            console = Console(file=sys.stderr)
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
            self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
            self.task = self.progress.add_task("", total=1.0)

        def __call__(self, what: str, share: float) -> None:
            self.progress.start()
            self.progress.update(self.task, description=escaped(what), completed=min(share, 1.0))

        def pause(self) -> None:
            self.progress.stop()

    shown = Shown()
    try:
        yield shown
    finally:
        shown.pause()
