"""The lines and routes of vLLM's sources against what diag reads, by a table: 0.32 and 0.33."""

import re
import subprocess
import sys
import tomllib
import urllib.request
from contextlib import suppress

import pytest
from support.bad_servers import pages, serving
from support.exporter_server import vllms_page
from support.live import server
from support.paths import TESTS
from support.waiting import until

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


@pytest.mark.nightly
@pytest.mark.live
@server.needed
def test_every_line_and_route_of_the_sources_is_in_the_table() -> None:
    for version, package in server.sources().items():
        source = "\n".join(file.read_text(encoding="utf-8") for file in package.rglob("*.py"))
        lines, routes = {*LINES.findall(source)}, {*ROUTES.findall(source)}
        assert len(lines) >= 8 and len(routes) > 70, version
        assert lines - {*SAYS["events"], *SAYS["unread"]} == set(), version
        assert routes - {*SAYS["routes"]["inference"], *SAYS["routes"]["other"]} == set(), version


EXTRAS = {
    "diag.exporter.process.stacks",
    "diag.diagnosis.roll_call",
    "py_spy",
    "pandas",
    "textual",
    "mcp",
    "jinja2",
    "yaml",
}
ASKED = {"/metrics", "/health", "/version", "/v1/models", "/server_info?config_format=json"}


def page_of(exporter: str) -> bytes:
    """Return the exporter's page, nothing before it listens."""
    with suppress(OSError), urllib.request.urlopen(f"http://{exporter}/metrics", timeout=60) as answer:
        return bytes(answer.read())
    return b""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["doctor {url} --for 0", "exporter --vllm {url} --listen {listen}"])
def test_nothing_is_imported_or_asked_without_its_option(command: str) -> None:
    """No stacks are read and no route of 0.33, such as /fault_tolerance/status, is asked unless somebody says so."""
    with serving(pages(vllms_page())) as vllm:
        listen = f"127.0.0.1:{server.free_port()}"
        words = [sys.executable, "-X", "importtime", "-m", "diag", *command.format(url=vllm.url, listen=listen).split()]
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            if "exporter" in command:
                until(lambda: page_of(listen))
                process.terminate()
            _, imported = process.communicate(timeout=120)
    loaded = {line.rpartition("|")[2].strip() for line in imported.splitlines() if line.startswith("import time:")}
    assert "diag.cli.app" in loaded
    assert loaded & EXTRAS == set()
    assert {request.path for request in vllm.requests} <= ASKED
    assert {request.method for request in vllm.requests} == {"GET"}
