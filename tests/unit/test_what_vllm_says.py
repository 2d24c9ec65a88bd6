"""The lines and routes of vLLM's sources against what diag reads, by a table: 0.32 and 0.33."""

import re
import tomllib

import pytest
from support.live import server
from support.paths import TESTS

from diag.log.patterns import recognise
from diag.vllm.routes import is_served

SAYS = tomllib.loads((TESTS / "data" / "vllm_says.toml").read_text(encoding="utf-8"))
LINES = re.compile(r'"(\[(?:FT|Watchdog)\][^"]{5,})"')
ROUTES = re.compile(r'(?:@\w*(?:router|app)\.\w+|\w*router\.add_api_route)\(\s*"(/[^"]*)"')
DUMP = "[Watchdog]Dumped stack to /d/VLLM_STACK_DUMP_for_engine_0_2.log due to "
FILLED = {"[Watchdog]Dumped stack to %s due to %s": DUMP + "feed timeout"}


def told(line: str) -> set[str]:
    """Return the events that a line tells at any level."""
    text = FILLED.get(line, line.replace("%ds", "60s").replace("%d", "3").replace("%s", "RuntimeError"))
    found = (recognise(text, level) for level in ("DEBUG", "INFO", "WARNING", "ERROR"))
    return {pattern.name for pattern in found if pattern}


@pytest.mark.parametrize(("line", "event"), SAYS["events"].items())
def test_a_line_of_0_33_is_an_event(line: str, event: str) -> None:
    assert told(line) == {event}


def test_lines_without_an_event_have_a_reason() -> None:
    assert [line for line, why in SAYS["unread"].items() if told(line) or not why] == []


def test_a_dump_on_request_is_no_stall() -> None:
    for reason in ("shutdown", "SIGTERM"):
        assert not told(DUMP + reason)


def test_routes_of_0_33_are_those_of_inference_or_not() -> None:
    assert [route for route in SAYS["routes"]["inference"] if not is_served(route)] == []
    assert [route for route in SAYS["routes"]["other"] if is_served(route)] == []


@pytest.mark.live
@server.needed
def test_every_line_and_route_of_the_sources_is_in_the_table() -> None:
    for version, package in server.sources().items():
        source = "\n".join(file.read_text(encoding="utf-8") for file in package.rglob("*.py"))
        lines, routes = {*LINES.findall(source)}, {*ROUTES.findall(source)}
        assert len(lines) >= 8 and len(routes) > 70, version
        assert lines - {*SAYS["events"], *SAYS["unread"]} == set(), version
        assert routes - {*SAYS["routes"]["inference"], *SAYS["routes"]["other"]} == set(), version
