"""Starts that failed behind a server that was at work: what they leave has no head of vLLM's, so its page decides."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.paths import LOGS

from diag.exporter.page import CollectionResult, HostCollectors, HostPage
from diag.exporter.vllm_page import Scraped
from diag.exposition import render
from diag.log.corroboration import Measurement
from diag.log.server_log import ServerLog
from diag.log.tail import LogTail

NOW = datetime(2026, 11, 21, 20, tzinfo=UTC).timestamp()
SERVING = [
    *(LOGS / "v1_0.32.0_cpu_small.log").read_text(encoding="utf-8").splitlines(),
    'INFO:     1 - "GET / HTTP/1.1"',
]
API = "(APIServer pid=4711) "
PARSER = [
    "usage: api_server.py [-h]",
    "                     [model_tag]",
    "api_server.py: error: unrecognized arguments: --x",
]
UNKNOWN_MODULE = [
    "Traceback (most recent call last):",
    '  File "/usr/local/bin/vllm", line 5, in <module>',
    "    from vllm.entrypoints.cli.main import main",
    "ModuleNotFoundError: No module named 'torch'",
]
WRONG_SETTING = [
    f"{API}INFO 11-21 19:59:00 [api_utils.py:347] vLLM server version 0.32.0, serving model x",
    f"{API}Traceback (most recent call last):",
    f'{API}  File "/usr/local/bin/vllm", line 8, in <module>',
    f"{API}pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
]
NOT_FOUND = ["/entrypoint.sh: line 3: exec: vllm: not found"]
FAILURES = {"parser": PARSER, "module": UNKNOWN_MODULE, "setting": WRONG_SETTING, "shell": NOT_FOUND}


def feed(state: ServerLog, *lines: str, at: float = NOW, live: bool = True) -> None:
    for line in lines:
        state.feed(line, at, live)


def silent(state: ServerLog, seconds: float = 16.0, live: bool = True) -> None:
    for second in (0.0, seconds / 2, seconds):
        state.page(Measurement(NOW + second, page=False, answers=False), live=live)


def serving(live: bool = True) -> ServerLog:
    state = ServerLog(UTC, "server.log")
    feed(state, *SERVING, at=NOW - 60, live=live)
    state.page(Measurement(NOW - 1, page=True, answers=True), live=live)
    return state


def told(state: ServerLog, after: float = 16.0) -> tuple[float, float, str]:
    """Crashes in a row, failed starts, and the phase."""
    samples = {(name, labels): value for name, labels, value in state.samples(NOW + after)}
    phase = "".join(
        labels[0] for (name, labels), value in samples.items() if name == "diag_vllm_startup_phase" and value
    )
    crashes = samples["diag_vllm_log_consecutive_crashes", ()]
    return crashes, samples["diag_vllm_log_events_total", ("engine_start_failed",)], phase


def quoted(state: ServerLog) -> str:
    samples = state.samples(NOW + 16)
    return "".join(labels[4] for name, labels, _ in samples if name == "diag_vllm_log_error_timestamp_seconds")


AT_WORK = (0, 0, "ready")


@pytest.mark.parametrize("name", FAILURES)
def test_failed_starts_count_where_the_page_is_silent(name: str) -> None:
    state = serving()
    feed(state, *FAILURES[name], *FAILURES[name], *FAILURES[name])
    assert told(state) == AT_WORK
    silent(state)
    assert told(state) == (4, 3, "")
    assert quoted(state).startswith(FAILURES[name][-1][:40].removeprefix(API))


@pytest.mark.parametrize("live", [True, False])
def test_failed_starts_do_not_count_once_the_page_answers(live: bool) -> None:
    state = serving(live)
    feed(state, *PARSER, live=live)
    silent(state, live=live)
    assert told(state)[:2] == (2, 1)
    state.page(Measurement(NOW + 20, page=True, answers=True), live=live)
    assert told(state, after=20) == AT_WORK


def test_a_page_that_was_silent_for_a_moment_proves_no_end() -> None:
    state = serving()
    feed(state, *PARSER)
    silent(state, seconds=14)
    assert told(state, after=14) == AT_WORK


def test_lines_before_the_page_answered_are_no_failed_start() -> None:
    state = serving()
    feed(state, *PARSER)
    state.page(Measurement(NOW, page=True, answers=True))
    silent(state)
    assert told(state) == AT_WORK


def test_in_a_recording_lines_without_a_time_may_be_newer_than_an_answer() -> None:
    state = serving(live=False)
    feed(state, *PARSER, live=False)
    state.page(Measurement(NOW, page=True, answers=True), live=False)
    silent(state, live=False)
    assert told(state)[:2] == (2, 1)


ALIVE = {
    "a request": 'INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK',
    "statistics": "(APIServer pid=24326) INFO 11-21 19:59:00 [loggers.py:1] Engine 000: Avg prompt throughput: 1.0",
}


@pytest.mark.parametrize("name", ALIVE)
def test_server_that_keeps_working_has_not_ended(name: str) -> None:
    state = serving()
    feed(state, *PARSER, *UNKNOWN_MODULE, ALIVE[name])
    silent(state)
    assert told(state) == AT_WORK


OTHERS = {
    "an exception of this server": [f"(APIServer pid=24326) {line}" for line in UNKNOWN_MODULE],
    "an exception that ends no process": [UNKNOWN_MODULE[0], '  File "a.py", line 1, in x', "ValueError: x"],
    "a part of a line": [f"\r{line}" for line in PARSER],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_errors_behind_a_silent_page_are_no_failed_start(name: str) -> None:
    state = serving()
    feed(state, *OTHERS[name])
    silent(state)
    assert told(state) == AT_WORK


def test_successful_start_after_failed_ones_ends_the_crash_loop() -> None:
    state = serving()
    feed(state, *PARSER, *PARSER)
    silent(state)
    again = [line.replace("24326", "99").replace("19:4", "20:0") for line in SERVING]
    ready = next(number for number, line in enumerate(again) if "Application startup complete" in line)
    feed(state, *again[:ready], at=NOW + 16)
    assert told(state)[0] == 3
    feed(state, *again[ready:], at=NOW + 17)
    assert told(state, after=17) == (0, 2, "ready")


def test_the_page_of_the_exporter_tells_its_log_whether_vllm_answers(tmp_path: Path) -> None:
    file, now = tmp_path / "server.log", [NOW - 60]
    file.write_text("\n".join([*SERVING, *PARSER, *PARSER, ""]))
    tail = LogTail(str(file), UTC, clock=lambda: now[0])
    tail.catch_up()
    page = HostPage(HostCollectors(None, tail, None), render, clock=lambda: now[0])
    refused = CollectionResult[Scraped](None, "connection refused", 0.0, answered=False)
    locked = CollectionResult[Scraped](None, "requires credentials (HTTP 401)", 0.0, answered=True)

    def crashes(second: float, scraped: CollectionResult[Scraped]) -> float:
        now[0] = NOW + second
        lines = b"".join(page.parts(scraped, page.collect(), 5.0)).decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("diag_vllm_log_consecutive_crashes "))

    assert [crashes(second, refused) for second in (0, 8, 16, 24)] == [0, 0, 0, 3]
    crashes(30, locked)
    assert [crashes(second, refused) for second in (32, 40, 48, 56)] == [0, 0, 0, 0]


@pytest.mark.parametrize("name", FAILURES)
def test_each_failed_start_counts_in_a_log_without_a_server(name: str) -> None:
    state = ServerLog(UTC, "server.log")
    feed(state, *FAILURES[name], *FAILURES[name], *FAILURES[name])
    assert told(state) == (3, 3, "")


@pytest.mark.parametrize("name", FAILURES)
def test_each_failed_start_counts_behind_a_server_that_was_stopped(name: str) -> None:
    state = serving()
    feed(state, "INFO:     Shutting down", "INFO:     Application shutdown complete.")
    feed(state, *FAILURES[name], *FAILURES[name], *FAILURES[name])
    assert told(state) == AT_WORK
    silent(state)
    assert told(state) == (3, 3, "")
