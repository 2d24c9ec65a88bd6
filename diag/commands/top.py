"""`diag top`: live servers in a terminal, diagnosed again and again as by `diag doctor`."""

import importlib.util
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from diag.commands.observe import ObserveOptions, judge_observation, look, site
from diag.core.errors import BadUsage
from diag.log.files import is_stream
from diag.sources.source import refuse_the_past, scrape_plan, shown_targets

if TYPE_CHECKING:
    from diag.sources.observation import Observation
    from diag.top.app import TopApp
    from diag.top.frame import Judged

M_ARENA_MAX = -8
"""M_ARENA_MAX of malloc.h."""


def run(options: ObserveOptions, *, here: bool) -> None:
    """Show servers until the user quits; with `here`, the servers of this host if there are any."""
    if options.kind != "log":  # which may be written on
        refuse_the_past(options, "diag top")
    if importlib.util.find_spec("textual") is None:
        raise BadUsage("diag top needs textual: pip install 'diag[top]'")
    if options.log == "-" or any(map(is_stream, options.targets)):
        raise BadUsage("diag top reads keys from standard input, and a log again and again: name the file of the log")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadUsage("diag top needs a terminal: diag doctor --watch prints lines as incidents begin and end")
    import ctypes

    with suppress(OSError, AttributeError):  # one memory arena for the threads of all scrapes (glibc's malloc)
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    app = make_app(on_this_host(options) if here else options)
    app.run(mouse=False)  # the terminal's own selection stays, to copy a command
    if app.feed.failed:
        raise app.feed.failed


def on_this_host(options: ObserveOptions) -> ObserveOptions:
    """Return the options with the servers whose processes are visible on this host; unchanged if there is none."""
    from diag.exporter.process.server import find_local_servers

    return replace(options, targets=find_local_servers() or options.targets)


def make_app(options: ObserveOptions) -> "TopApp":
    """Return the view, with the feed behind it."""
    from diag.commands import explain
    from diag.top.app import TopApp
    from diag.top.frame import KEPT, Feed, PageMemory, QueryFeed, ScrapeFeed

    contract, incidents = site(options.incidents, options.contract)
    feed: Feed
    if options.prometheus or options.kind == "log":
        feed = QueryFeed(lambda: look(options, contract, incidents)[:2])
        waits_for = "asking the Prometheus" if options.prometheus else "reading the log again and again"
    else:
        from diag.sources.live.scrape import UNTIL_STOPPED, Scraper

        def judge(seen: "Observation") -> "Judged":
            return judge_observation(seen, contract, incidents)[:2]

        memory = PageMemory(max(KEPT, options.every))
        plan = scrape_plan(replace(options, duration=UNTIL_STOPPED), lambda share: None)
        feed = ScrapeFeed(Scraper(options.targets, plan, memory), memory, options.every, judge)
        waits_for = f"scraping {shown_targets(options.targets)} every {options.every:g} s"
    return TopApp(feed, partial(explain.run, folder=options.incidents), waits_for)
