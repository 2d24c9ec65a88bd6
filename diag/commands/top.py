"""`diag top`: live servers in a terminal, judged again and again as `diag doctor` judges them."""

import importlib.util
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from diag.commands.observe import ObserveOptions, judge_observation, scrape_plan, without_credentials
from diag.commands.site import site
from diag.commands.watch import refuse_the_past
from diag.core.errors import BadUsage

if TYPE_CHECKING:
    from diag.sources.observation import Observation
    from diag.top.app import TopApp
    from diag.top.feed import Judged

M_ARENA_MAX = -8
"""Of malloc.h."""


def run(options: ObserveOptions, *, here: bool) -> None:
    """Show servers until the user quits; `here`: those that run on this host, where there are any."""
    refuse_the_past(options, "diag top")
    if importlib.util.find_spec("textual") is None:
        raise BadUsage("diag top needs textual: pip install 'diag[top]'")
    if options.log == "-":
        raise BadUsage("diag top reads keys from standard input: name the file of the log")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadUsage("diag top needs a terminal: diag doctor --watch prints lines as incidents begin and end")
    _share_memory()
    app = make_app(on_this_host(options) if here else options)
    app.run(mouse=False)  # the terminal's own selection stays, to copy a command
    if app.feed.failed:
        raise app.feed.failed


def _share_memory() -> None:
    """Scrapes run in threads that come and go: give each no memory of its own to keep (glibc's malloc)."""
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def on_this_host(options: ObserveOptions) -> ObserveOptions:
    """The same for the servers whose processes are seen here; as it is where none is."""
    from diag.exporter.process.server import servers_here

    return replace(options, targets=servers_here() or options.targets)


def make_app(options: ObserveOptions) -> "TopApp":
    """The view, and the thread behind it."""
    from diag.commands import explain
    from diag.top.app import TopApp
    from diag.top.feed import KEPT, Feed, QueryFeed, ScrapeFeed

    contract, incidents = site(options.incidents, options.contract)
    feed: Feed
    if options.prometheus:
        from diag.commands.doctor import look

        feed, waits_for = QueryFeed(partial(look, options, contract, incidents)), "asking the Prometheus"
    else:
        from diag.sources.live.scrape import UNTIL_STOPPED, Watch
        from diag.top.memory import PageMemory

        def judge(seen: "Observation") -> "Judged":
            snapshot = judge_observation(seen, contract, incidents)
            return snapshot.report, snapshot.queries

        memory = PageMemory(max(KEPT, options.every))
        plan = scrape_plan(replace(options, watch=UNTIL_STOPPED), lambda share: None)
        feed = ScrapeFeed(Watch(options.targets, plan, memory), memory, options.every, judge)
        waits_for = f"scraping {without_credentials(options.targets)} every {options.every:g} s"
    return TopApp(feed, partial(explain.run, folder=options.incidents), waits_for)
