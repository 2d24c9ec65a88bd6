"""`diag top` in a terminal that nobody sees, over recorded servers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from support import rewriting
from textual.pilot import Pilot

from diag.commands import explain
from diag.commands.observe import ObserveOptions, judge_observation, site
from diag.commands.top import make_app
from diag.sources.observation import Observation
from diag.top.app import TopApp
from diag.top.frame import Feed, ServerRow

NARROW, WIDE = (80, 24), (240, 24)


class RecordedFeed(Feed):
    """The frames of an observation: of its first scrapes, of some more with each call of `goes_on`."""

    def __init__(self, seen: Observation, *ends: int) -> None:
        super().__init__()
        self._seen, self._ends = seen, iter(ends or [len(seen.instants)])
        self.goes_on()

    def _watch(self) -> None:
        """There is a frame already."""

    def goes_on(self) -> None:
        contract, incidents = site(None, None)
        part = replace(self._seen, instants=self._seen.instants[: next(self._ends)])
        snapshot = judge_observation(part, contract, incidents)
        self._show((snapshot.report, snapshot.queries))


def last_minute(name: str) -> list[rewriting.Scrape]:
    """The end of a recording."""
    # an idle server is healthy by its /health
    asked = "diag_vllm_health_status 200\n" if name == "idle" else ""
    scrapes = list(rewriting.changed(rewriting.scrapes(name), lambda page: rewriting.of_model(page, name) + asked))
    return [scrape for scrape in scrapes if scrape[0] > scrapes[-1][0] - 60]


@asynccontextmanager
async def shown(feed: Feed, size: tuple[int, int] = NARROW) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    """The view once it has drawn something."""
    app = TopApp(feed, partial(explain.run, folder=None), "scraping")
    async with app.run_test(size=size, notifications=True) as pilot:
        await until(pilot, lambda: app.frame is not None or feed.failed)
        yield app, pilot


async def until(pilot: Pilot[None], holds: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until something is so."""
    for _ in range(int(seconds / 0.05)):
        if holds():
            return
        await pilot.pause(0.05)
    raise AssertionError("it never was so")


def first_judged(options: ObserveOptions) -> tuple[ServerRow, str]:
    """Return the state and the view of `diag top` for a live server at its first verdict."""

    async def look() -> tuple[ServerRow, str]:
        async with shown(make_app(options).feed, WIDE) as (app, pilot):
            await until(pilot, lambda: app.frame and app.frame.report.verdict != "unknown", 90)
            assert app.frame
            return app.frame.rows[0], screen(app)[5]

    return asyncio.run(look())


async def press(pilot: Pilot[None], *keys: str, shows: str = "") -> list[str]:
    """The screen once these keys were pressed, and once it shows this text."""
    await pilot.press(*keys)
    await pilot.pause()
    await until(pilot, lambda: any(shows in line for line in screen(pilot.app)))
    return screen(pilot.app)


def screen(app: object) -> list[str]:
    """The lines of what is on the screen."""
    assert isinstance(app, TopApp)
    return ["".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips()]


def run(look: Coroutine[None, None, None]) -> None:
    """Run a test's coroutine."""
    asyncio.run(look)


def recorded(folder: Path, *names: str) -> Path:
    """The last minute of recordings as servers that ran side by side."""
    return rewriting.write(folder, rewriting.side_by_side(*map(last_minute, names)))
