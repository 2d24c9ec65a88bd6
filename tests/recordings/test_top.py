"""`diag top` over recorded servers: what the view shows, and what its keys do."""

import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
from support import rewriting
from support.paths import RECORDINGS
from support.top_views import NARROW, WIDE, RecordedFeed, last_minute, press, recorded, run, screen, shown

from diag.core.errors import BadUsage
from diag.sources.observation import Observation
from diag.sources.recording.reader import read
from diag.top import texts

NAMES = ("healthy", "kv_cascade", "gpu_thermal_throttling", "idle")


@cache
def _seen(folder: Path) -> Observation:
    return read(recorded(folder, *NAMES))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Observation:
    return _seen(tmp_path_factory.mktemp("servers"))


@pytest.fixture
def feed(seen: Observation) -> RecordedFeed:
    return RecordedFeed(seen, 12, len(seen.instants))


def servers(lines: list[str]) -> list[str]:
    """The names in the table, from above."""
    return [line.split()[0] for line in lines if line.strip().startswith("r")]


def test_the_worst_server_is_first_and_every_column_that_matters_fits_into_80(feed: RecordedFeed) -> None:
    async def look() -> None:
        feed.goes_on()
        async with shown(feed, NARROW) as (app, _):
            lines = screen(app)
            assert lines[0].startswith(" CRITICAL  kv_eviction_cascade   r1:8000 engine 0   for at least ")
            assert "4 servers: 2 critical, 2 healthy" in lines[2]
            assert [word in lines[3] for word in ("verdict", "state", "incident", "run", "wait", "KV", "TTFT")]
            assert servers(lines) == ["r1:8000", "r2:8000", "r0:8000", "r3:8000"]
            assert lines[5].split()[1:3] == ["critical", "busy"]
            assert len(lines[5].rstrip()) <= 80
            assert lines[5].split()[3] == "kv_eviction_cascade"
            assert lines[5].split()[4:7] == ["11", "15", "100%"]
            assert "q Quit" in lines[-1]
            assert "r Record" in lines[-1]

    run(look())


def test_a_wide_window_has_every_column(feed: RecordedFeed) -> None:
    async def look() -> None:
        feed.goes_on()
        async with shown(feed, WIDE) as (app, _):
            _, hot = (line for line in screen(app) if line.strip().startswith(("r1", "r2")))
            assert {"gpu_thermal_throttling", "critical", "sw_thermal"} <= set(hot.replace(",", " ").split())
            assert "°C" in hot
            assert "▁" in hot or "█" in hot

    run(look())


def test_enter_opens_the_full_report_of_a_server(feed: RecordedFeed) -> None:
    async def look() -> None:
        feed.goes_on()
        async with shown(feed, (120, 200)) as (_, pilot):
            page = "\n".join(await press(pilot, "enter", shows="Evidence"))
            for part in ("CRITICAL  kv_eviction_cascade", "Evidence", "Ruled out", "Fix ", "last minutes", "TTFT p95"):
                assert part in page
            assert "r2:8000" not in page
            page = "\n".join(await press(pilot, "escape", "down", "enter", shows="sw_thermal"))
            assert "gpu_thermal_throttling" in page
            assert "GPUs" in page
            assert "sw_thermal" in page
            assert servers(await press(pilot, "escape"))[0] == "r1:8000"

    run(look())


def test_idle_is_not_shown_as_a_throttle_reason(tmp_path: Path) -> None:
    swapped = {"sw_power_cap": "gpu_idle", "gpu_idle": "sw_power_cap"}
    idle = partial(re.sub, "sw_power_cap|gpu_idle", lambda found: swapped[found[0]])
    pages = rewriting.changed(last_minute("gpu_thermal_throttling"), idle)
    frame = RecordedFeed(read(rewriting.write(tmp_path, pages))).latest
    assert frame
    page = "\n".join(texts.page(frame, frame.rows[0], 120))
    assert "sw_thermal" in page
    assert "gpu_idle" not in page


def test_keys_sort_filter_choose_columns_and_open_the_runbook(feed: RecordedFeed) -> None:
    async def look() -> None:
        feed.goes_on()
        async with shown(feed) as (_, pilot):
            assert servers(await press(pilot, "s")) == ["r0:8000", "r1:8000", "r2:8000", "r3:8000"]
            lines = await press(pilot, "slash", *"therm")
            assert servers(lines) == ["r2:8000"]
            assert "1 with 'therm'" in lines[2]
            assert servers(await press(pilot, "enter")) == ["r2:8000"]
            assert "temp" in "".join((await press(pilot, "g"))[3:5])
            await press(pilot, "o", shows="VllmGpuThermalThrottling")
            assert len(servers(await press(pilot, "escape", "escape"))) == 4
            await press(pilot, "end", "o", shows="no incident holds")

    run(look())


def test_verdict_needs_30_seconds_cursor_stays_on_its_server_and_pause_holds(feed: RecordedFeed) -> None:
    async def look() -> None:
        async with shown(feed) as (app, pilot):
            before = await press(pilot, "end", "p")
            assert "PAUSED" in before[2]
            assert before[0].startswith(" CANNOT TELL")
            feed.goes_on()
            await pilot.pause(0.6)
            assert screen(app) == before
            after = await press(pilot, "p")
            assert "PAUSED" not in after[2]
            assert after[0].startswith(" CRITICAL")
            assert app.servers.selected is not None
            assert app.servers.selected.instance == servers(before)[-1]

    run(look())


def test_ongoing_incident_is_dated_from_its_first_observation(seen: Observation) -> None:
    feed = RecordedFeed(seen, len(seen.instants) - 4, len(seen.instants))
    first = feed.latest
    feed._seen = replace(seen, instants=seen.instants[5:])
    feed.goes_on()
    assert first
    assert feed.latest
    assert feed.latest.at > first.at
    assert [row.since for row in feed.latest.rows[:2]] == [row.since for row in first.rows[:2]]


def test_ended_incident_is_not_shown() -> None:
    feed = RecordedFeed(read(RECORDINGS / "engine_stalled"), 4, 28, 1000, 1000)
    for verdict, incidents in (("unknown", ()), ("critical", ("engine_stalled",)), ("healthy", ())):
        assert feed.latest
        (row,) = feed.latest.rows
        assert (feed.latest.report.verdict, row.verdict, row.incidents) == (verdict, verdict, incidents)
        feed.goes_on()


def test_internal_error_ends_the_view_and_is_reported_by_the_command(feed: RecordedFeed) -> None:
    def broken(_: str) -> str:
        raise BadUsage("no such incident")

    async def look() -> None:
        feed.goes_on()
        async with shown(feed) as (app, pilot):
            app._runbook = broken
            await pilot.press("o")
            await pilot.pause()

    with pytest.raises(BadUsage):
        run(look())
    assert isinstance(feed.failed, BadUsage)


@pytest.mark.parametrize("no_color", [True, False])
def test_no_color_is_respected(feed: RecordedFeed, no_color: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")

    async def look() -> None:
        async with shown(feed) as (app, _):
            drawn = (segment for strip in app.screen._compositor.render_strips() for segment in strip)
            colours = [style.color for segment in drawn if (style := segment.style)]
            assert any(colour and not colour.is_default for colour in colours) is not no_color

    run(look())
