"""How many crashes in a row a log shows: what counts as one, and what ends the row."""

from datetime import UTC, datetime, timedelta

import pytest

from diag.log.server_log import ServerLog

BEGIN = datetime(2026, 11, 21, 2, tzinfo=UTC)


def crashes(log: str, after: float = 0.0) -> float:
    """The number that the exporter shows so many seconds after the last of these lines; each begins with its second."""
    state, at = ServerLog(UTC), 0.0
    for line in filter(str.strip, log.splitlines()):
        second, text = line.strip().split(" ", 1)
        at = float(second)
        level, _, said = text.partition(" ")
        clock = (BEGIN + timedelta(seconds=at)).strftime("%m-%d %H:%M:%S")
        file = "core_client.py" if "died" in said else "launcher.py" if "FastAPI" in said else "api_server.py"
        state.feed(f"(APIServer pid=1) {level} {clock} [{file}:1] {said}", BEGIN.timestamp() + at, False)
    samples = {name: value for name, _, value in state.samples(BEGIN.timestamp() + at + after)}
    return samples["diag_vllm_log_consecutive_crashes"]


START = "INFO vLLM API server version 0.32.0"
READY = "INFO Application startup complete"
FAILED = "ERROR EngineCore failed to start."
DEAD = "ERROR Engine core proc EngineCore_0 died unexpectedly, shutting down client."
STOPPED = "INFO Shutting down FastAPI HTTP server."


@pytest.mark.parametrize(
    ("log", "count"),
    [
        (f"0 {START}", 0),
        (f"0 {START}\n 20 {READY}", 0),
        (f"0 {START}\n 20 {FAILED}", 1),
        (f"0 {START}\n 20 {FAILED}\n 21 RuntimeError Engine core initialization failed.", 1),
        (f"0 {START}\n 20 {FAILED}\n 30 {START}\n 50 {FAILED}\n 60 {START}", 2),
        (f"0 {START}\n 20 {READY}\n 30 {DEAD}\n 31 {STOPPED}", 1),
        (f"0 {START}\n 20 {READY}\n 30 {STOPPED}\n 40 {START}\n 60 {READY}", 0),
        (f"0 {START}\n 9 INFO Starting to load model x\n 30 {START}\n 60 {START}", 2),
    ],
    ids=[
        "a start",
        "a server that serves",
        "a failed start",
        "a failure that several lines tell",
        "failed twice, starting",
        "a dead engine whose server ends with it",
        "stopped and started",
        "killed twice while it started, which no line tells",
    ],
)
def test_unrequested_end_is_a_crash(log: str, count: int) -> None:
    assert crashes(log) == count


def test_a_server_that_is_ready_after_failed_starts_is_over_them() -> None:
    failed = "\n".join(f"{20 * n} {START}\n {20 * n + 9} {FAILED}" for n in range(4))
    assert crashes(failed) == 4
    assert crashes(f"{failed}\n 100 {START}\n 120 {READY}") == 0


def test_crash_count_resets_after_ten_minutes_of_serving() -> None:
    died = "\n".join(f"{60 * n} {START}\n {60 * n + 20} {READY}\n {60 * n + 50} {DEAD}" for n in range(3))
    again = f"{died}\n 200 {START}\n 220 {READY}"
    assert (crashes(again), crashes(again, after=599), crashes(again, after=600)) == (3, 3, 0)
    assert crashes(f"{again}\n 900 {DEAD}") == 1


def test_orderly_stop_resets_the_crash_count() -> None:
    failed = "\n".join(f"{60 * n} {START}\n {60 * n + 20} {READY}\n {60 * n + 50} {DEAD}" for n in range(2))
    assert crashes(f"{failed}\n 200 {START}\n 220 {READY}\n 230 {STOPPED}") == 0
