"""A server's log: its times, its start, its events and its configuration; and the file it is in, followed."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paths import LOGS, RECORDINGS

from diag.core.metric_families import families
from diag.exposition import render
from diag.log import tail as following
from diag.log.parse_line import LineParser, read_timed_lines
from diag.log.patterns import EVENTS, PHASES
from diag.log.server_log import ServerLog
from diag.log.tail import MOST_LINE, LineSplitter, LogTail
from diag.log.trackers import parse_settings
from diag.vllm.running_config import ServerFacts

QUOTE = "diag_vllm_log_error_timestamp_seconds"
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp()


def at(clock: str, day: str = "11-21") -> float:
    return datetime.strptime(f"2026-{day} {clock} +0000", "%Y-%m-%d %H:%M:%S %z").timestamp()


def head(clock: str, level: str = "INFO", process: str = "EngineCore", file: str = "core.py") -> str:
    return f"({process} pid=1) {level} 11-21 {clock} [{file}:1] "


class Told:
    """The samples of a log, by family."""

    def __init__(self, state: ServerLog | LogTail, now: float = NOW) -> None:
        samples = state.samples(now) if isinstance(state, ServerLog) else state.collect().samples
        render(samples)
        assert all(len(labels) == len(families()[name].labels) for name, labels, _ in samples)
        self._of = {(name, labels): value for name, labels, value in samples}
        assert len(self._of) == len(samples)

    def one(self, name: str, *labels: str) -> float | None:
        return self._of.get((name, labels))

    def all(self, name: str) -> dict[str, float]:
        return {labels[-1]: value for (each, labels), value in self._of.items() if each == name}

    @property
    def phase(self) -> str | None:
        """The present one; "" where all are 0, None where no start was seen."""
        phases = self.all("diag_vllm_startup_phase")
        assert set(phases) in (set(), set(PHASES))
        assert sum(phases.values()) <= 1
        return next((phase for phase, value in phases.items() if value), "") if phases else None

    @property
    def spent(self) -> dict[str, float]:
        return self.all("diag_vllm_startup_phase_seconds")

    @property
    def events(self) -> dict[str, float]:
        """Return the events that happened."""
        counts, times = self.all("diag_vllm_log_events_total"), self.all("diag_vllm_log_event_last_timestamp_seconds")
        assert set(counts) == set(times) == set(EVENTS)
        assert all((counts[event] == 0) == (times[event] == 0) for event in EVENTS)
        return {event: count for event, count in counts.items() if count}

    @property
    def moved(self) -> float | None:
        return self.one("diag_vllm_startup_last_progress_timestamp_seconds")

    @property
    def ratio(self) -> float | None:
        return self.one("diag_vllm_startup_progress_ratio")


def fed(*lines: str, read_at: float = NOW, live: bool = False) -> ServerLog:
    state = ServerLog(UTC)
    for line in lines:
        state.feed(line, read_at, live)
    return state


def told(*lines: str, now: float = NOW, read_at: float = NOW, live: bool = False) -> Told:
    return Told(fed(*lines, read_at=read_at, live=live), now)


def replayed(path: Path) -> tuple[ServerLog, Told]:
    state, known = ServerLog(UTC), read_timed_lines(path, UTC, NOW)
    for moment, line, number, _ in known:
        state.feed(line, moment, number=number)
    return state, Told(state, known[-1][0])


BANNER = head("02:00:00", process="APIServer", file="api_server.py") + "vLLM API server version 0.24.0"
LOADS = head("02:00:10") + "Starting to load model /models/x..."
LOADED = head("02:00:30") + "Model loading took 14.99 GiB memory and 3.5 seconds"
PROFILED = head("02:01:00") + "torch.compile took 20.00 s in total"
POOL = head("02:01:10") + "GPU KV cache size: 16,384 tokens"
READY = "INFO:     Application startup complete."
SERVED = 'INFO:     127.0.0.1:35926 - "POST /v1/completions HTTP/1.1" 200 OK'
GRAPHS = "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE)"
WAITS = "No available shared memory broadcast block found in 60 seconds. This typically happens when"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB"


def bar(done: int, total: int, what: str = GRAPHS) -> str:
    return f"{what}:  {100 * done // total}%|███       | {done}/{total} [00:10<00:14,  2.70it/s]"


# -- times ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=11828) INFO 11-21 02:32:18 [core.py:133] text",
        "INFO 11-21 02:32:18 [core.py:58] text",
        "INFO 11-21 02:32:18 core.py:58] text",
        "DEBUG 11-21 02:32:18 [v1/engine/core.py:58] text",
        "(VllmWorker rank=0 pid=123) INFO 11-21 02:32:18 [core.py:58] text",
        "(RayWorkerWrapper pid=123, ip=10.0.0.2) INFO 11-21 02:32:18 [core.py:58] text",
        "(EngineCore_DP0 pid=1) INFO 11-21 02:32:18 [core.py:58] text",
        "\x1b[0;36m(Worker pid=1)\x1b[0;0m \x1b[32mINFO\x1b[0m \x1b[90m11-21 02:32:18\x1b[0m [a.py:1] text",
        "2026-11-21T02:32:18Z text",
        "2026-11-21T03:32:18.000000000+01:00 INFO 11-20 00:00:00 [core.py:58] text",
        "2026-11-21T02:32:18.000000000Z stdout F INFO:     text",
        "Nov 21 02:32:18 host vllm[123]: text",
        "2026-11-21T03:32:18+0100 host vllm[123]: text",
        "vllm-1  | INFO 11-21 02:32:18 [core.py:58] text",
        "vllm-1  | 2026-11-21T02:32:18.000Z text",
        "[pod/vllm-0/server] 2026-11-21T02:32:18Z text",
        '{"log":"text\\n","stream":"stderr","time":"2026-11-21T02:32:18.000000000Z"}',
        '{"asctime":"2026-11-21 02:32:18,000","levelname":"INFO","message":"text"}',
        '{"asctime":"11-21 02:32:18","levelname":"INFO","message":"text"}',
        "[rank0]:[E1121 02:32:18.123456789 ProcessGroupNCCL.cpp:629] text",
        "W1121 02:32:18.095000 26197 torch/_library/triton.py:53] text",
    ],
)
def test_line_is_parsed_with_any_prefix(line: str) -> None:
    (found,) = LineParser(UTC).parse(line, NOW)
    assert found.text == "text"
    assert found.at == pytest.approx(at("02:32:18"), abs=1)


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("ERROR 11-21 02:32:18 [core.py:58] text", "ERROR"),
        ("ERROR:    text", "ERROR"),
        ("(APIServer pid=1) INFO:     text", "INFO"),
        ("[rank0]:[E1121 02:32:18.123456789 ProcessGroupNCCL.cpp:629] text", "ERROR"),
        ("[E ProcessGroupNCCL.cpp:474] text", "ERROR"),
        ("(Worker_TP0 pid=1) text", ""),
        ("[rank0]: text", ""),
        ("text", ""),
    ],
)
def test_the_level_of_a_line_is_read(line: str, level: str) -> None:
    (found,) = LineParser(UTC).parse(line, NOW)
    assert (found.text, found.level) == ("text", level)


@pytest.mark.parametrize(
    ("line", "read_at", "expected"),
    [
        ("INFO 12-31 23:59:59 [a.py:1] x", (2027, 1, 1, 0, 0, 5), (2026, 12, 31, 23, 59, 59)),
        ("INFO 01-01 00:00:01 [a.py:1] x", (2026, 12, 31, 23, 59, 59), (2027, 1, 1, 0, 0, 1)),
        ("INFO 11-22 01:00:00 [a.py:1] x", (2026, 11, 21, 2, 0, 0), (2026, 11, 22, 1, 0, 0)),
        ("INFO 11-23 01:00:00 [a.py:1] x", (2026, 11, 21, 2, 0, 0), (2025, 11, 23, 1, 0, 0)),
        ("INFO 02-29 01:00:00 [a.py:1] x", (2026, 11, 21, 2, 0, 0), (2024, 2, 29, 1, 0, 0)),
    ],
)
def test_the_year_is_the_latest_that_is_not_more_than_a_day_ahead(
    line: str, read_at: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    moment = datetime(*read_at, tzinfo=UTC).timestamp()  # type: ignore[arg-type, misc]
    (found,) = LineParser(UTC).parse(line, moment)
    assert found.at == datetime(*expected, tzinfo=UTC).timestamp()  # type: ignore[arg-type, misc]


def test_invalid_time_of_a_line_is_not_read() -> None:
    for line in ("INFO 13-41 23:59:59 [a.py:1] x", "2026-99-21T02:32:18Z x", "Foo 21 02:32:18 host vllm[1]: x"):
        assert LineParser(UTC).parse(line, NOW)[0].at is None
    parser = LineParser(UTC)
    times = [parser.parse(f"INFO 11-21 02:00:{seconds} [a.py:1] x", NOW)[0].at for seconds in (59, 60)]
    assert times == [at("02:00:59"), None]


def test_a_time_without_a_zone_is_in_the_zone_of_the_log() -> None:
    berlin = LineParser(ZoneInfo("Europe/Berlin"))
    assert berlin.parse("INFO 11-21 03:32:18 [a.py:1] x", NOW)[0].at == at("02:32:18")
    assert berlin.parse("INFO 07-21 04:32:18 [a.py:1] x", NOW)[0].at == at("02:32:18", "07-21")
    assert (
        LineParser().parse("INFO 11-21 03:32:18 [a.py:1] x", NOW)[0].at == datetime(2026, 11, 21, 3, 32, 18).timestamp()
    )


def last_line(state: ServerLog) -> float | None:
    return Told(state).one("diag_vllm_log_last_line_timestamp_seconds")


def test_a_line_without_a_time_takes_that_of_the_line_before_in_history_and_now_live() -> None:
    history = fed(head("02:00:00") + "x", READY)
    assert last_line(history) == at("02:00:00")
    live = fed(head("02:00:00") + "x", READY, live=True)
    assert last_line(live) == NOW


def test_first_line_without_a_time_has_the_time_of_reading() -> None:
    assert last_line(fed(SERVED)) == NOW


def test_a_line_of_a_process_that_is_late_does_not_turn_back_the_time() -> None:
    late = head("02:00:08") + "Starting to load model /models/x..."
    assert last_line(fed(LOADS, late)) == at("02:00:10")
    assert told(LOADS, late).moved == at("02:00:10")


def test_no_line_is_of_the_future_and_a_wrong_zone_shows() -> None:
    state = fed("INFO 11-21 14:00:00 [a.py:1] x", live=True)
    assert last_line(state) == NOW
    assert state.current.clock.ahead == 7200


def test_a_log_that_was_never_written_to_has_no_last_line() -> None:
    assert last_line(fed()) is None


def test_a_record_in_parts_is_put_together() -> None:
    parts = ["P (EngineCore pid=1) ERROR 11-21 02:00:00 [core.py:1] EngineCore failed", "F  to start."]
    assert told(*(f"2026-11-21T02:00:00Z stderr {part}" for part in parts)).events == {"engine_start_failed": 1}
    docker = ["ValueError: No available memory", " for the cache blocks.\n"]
    records = (json.dumps({"log": part, "time": "2026-11-21T02:00:00Z"}) for part in docker)
    assert told(*records).events == {"no_kv_cache_memory": 1}


def test_a_bar_redrawn_within_a_record_is_read_to_its_end() -> None:
    record = json.dumps({"log": f"\r{bar(1, 4)}\r{bar(2, 4)}\n", "time": "2026-11-21T02:00:00Z"})
    assert told(record).ratio == 0.5


def test_text_of_another_process_after_a_progress_bar_is_a_separate_line() -> None:
    seen = told(bar(3, 67) + head("02:05:00") + WAITS)
    assert seen.events == {"shm_broadcast_wait": 1}
    assert seen.ratio == pytest.approx(3 / 67)


def test_the_lines_of_a_recording_come_with_times_that_never_go_back(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(f"first\n{head('02:00:05')}a\r{bar(1, 2)}\n{head('02:00:04')}b\n{READY}\n{head('02:00:06')}c\n")
    found = read_timed_lines(path, UTC, NOW)
    assert [moment - at("02:00:00") for moment, *_ in found] == [5, 5, 5, 5, 5, 6]
    assert found[3][1] == head("02:00:04") + "b"


def test_answers_without_a_time_are_spread_up_to_the_next_one(tmp_path: Path) -> None:
    """An idle server that refuses every request logs nothing else: its last answers belong to all of the recording."""
    answer = 'INFO:     10.0.0.1:4000 - "POST /v1/completions HTTP/1.1" 401 Unauthorized\n'
    path = tmp_path / "server.log"
    path.write_text(f"{answer}{head('02:00:00')}a\n{answer}b\n{answer}{head('02:00:30')}c\n" + 2 * answer)
    spread = read_timed_lines(path, UTC, NOW, at("02:01:00"))
    assert [moment - at("02:00:00") for moment, *_ in spread] == [0, 0, 10, 10, 20, 30, 40, 50]
    assert [moment - at("02:00:00") for moment, *_ in read_timed_lines(path, UTC, NOW)][-2:] == [30, 30]


def test_scrapes_in_the_log_date_the_answers_between_them(tmp_path: Path) -> None:
    """Scrapes come evenly; ten errors at once are no errors of all the time up to the next line with a time."""
    refused = 'INFO:     10.0.0.1:4000 - "POST /v1/completions HTTP/1.1" 401 Unauthorized\n'
    scrape = 'INFO:     10.0.0.9:4000 - "GET /metrics HTTP/1.1" 200 OK\n'
    path, end = tmp_path / "server.log", at("02:10:00")
    path.write_text(head("02:00:00") + "a\n" + scrape + 10 * refused + 18 * scrape)
    lines = read_timed_lines(path, UTC, NOW, end)
    assert [line.at - at("02:00:00") for line in lines if " 401 " in line.text] == [30] * 10
    assert not any(line.is_guess for line in lines)
    path.write_text(head("02:00:00") + "a\n" + 10 * refused)
    assert [line.is_guess for line in read_timed_lines(path, UTC, NOW, end)] == [False] + [True] * 10
    assert not any(line.is_guess for line in read_timed_lines(path, UTC, NOW, at("02:00:59")))


def test_a_recording_can_be_fed_up_to_any_moment() -> None:
    known = read_timed_lines(RECORDINGS / "tp2_long_stall/server.log", UTC, NOW)
    state = ServerLog(UTC)
    stall = at("02:30:22")
    for moment, line, *_ in known:
        if moment < stall:
            state.feed(line, moment)
    assert (Told(state, stall).phase, Told(state, stall).events) == ("ready", {})
    for moment, line, *_ in known:
        if moment == stall:
            state.feed(line, moment)
    assert Told(state, stall).all("diag_vllm_log_event_last_timestamp_seconds")["shm_broadcast_wait"] == stall


# -- the start --------------------------------------------------------------------------------------------------------


def test_a_start_is_in_the_phase_of_its_last_line_and_the_present_one_takes_time() -> None:
    seen = told(BANNER, LOADS, LOADED, now=at("02:00:45"))
    assert seen.phase == "compile"
    assert seen.spent == {"process_start": 10, "load_weights": 20, "compile": 15}
    assert seen.moved == at("02:00:30")


def test_a_phase_that_was_passed_over_has_no_time() -> None:
    assert told(BANNER, POOL, now=at("02:02:00")).spent == {"process_start": 70, "allocate_kv_cache": 50}


def test_without_a_compile_memory_is_profiled_after_the_weights() -> None:
    eager = head("02:00:01") + "Initializing a V1 LLM engine (v0.24.0) with config: model='m', enforce_eager=True"
    first = "INFO 11-21 02:00:01 llm_engine.py:249] Initializing an LLM engine (v0.6.4) with config: model='m'"
    assert told(BANNER, eager, LOADS, LOADED).phase == "profile_memory"
    assert told(BANNER, first, LOADS, LOADED).phase == "profile_memory"


def test_late_rank_counts_as_progress_but_does_not_move_the_phase_back() -> None:
    seen = told(BANNER, LOADS, LOADED, head("02:00:50") + "Starting to load model /models/x...")
    assert seen.phase == "compile"
    assert seen.moved == at("02:00:50")


def test_graphs_are_captured_after_kernels_were_warmed_up() -> None:
    kernels = bar(12, 120, "JIT kernel warmup (120 compile keys)")
    stamped = [f"2026-11-21T02:01:{second}Z {text}" for second, text in (("20", kernels), ("30", bar(1, 67)))]
    begun = [f"2026-11-21T{line.split()[4]}Z {line}" for line in (BANNER, LOADS, LOADED, PROFILED, POOL)]
    lines = [*begun, *stamped]
    assert told(*lines[:-1]).phase == "warm_up"
    seen = told(
        *lines,
        f"2026-11-21T02:01:40Z {head('02:01:40')}Graph capturing finished in 10 secs, took 0.5 GiB",
        now=at("02:01:45"),
    )
    assert seen.phase == "warm_up"
    assert (seen.spent["warm_up"], seen.spent["cuda_graph_capture"]) == (10 + 5, 10)


def test_the_profiling_of_graph_memory_is_no_capture() -> None:
    assert (
        told(BANNER, head("02:01:01") + "Profiling CUDA graph memory: FULL=35 (largest=256)").phase == "profile_memory"
    )


def test_a_bar_tells_how_far_its_phase_is() -> None:
    assert told(BANNER, "Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01]").ratio == 0.5
    assert told(BANNER, bar(27, 67)).ratio == pytest.approx(27 / 67)
    assert (
        told(BANNER, "Loading safetensors using Runai Model Streamer:  40%|████ | 1.2G/3.0G [00:01<00:01]").ratio == 0.4
    )


def test_a_new_phase_has_no_bar_yet() -> None:
    assert told(BANNER, "Loading pt checkpoint shards: 100% Completed | 4/4 [00:01<00:00]", LOADED).ratio is None


def test_a_bar_of_a_phase_that_is_past_does_not_count() -> None:
    assert told(BANNER, POOL, "Loading pt checkpoint shards:  50% Completed | 2/4 [00:01<00:00]").ratio is None


def hang(minutes: int) -> list[str]:
    """A capture that stands still, while tqdm redraws its bar and vLLM says every minute that a rank waits."""
    begun = [BANNER, LOADS, LOADED, PROFILED, POOL, bar(0, 67), bar(3, 67)]
    for minute in range(minutes):
        begun += [head(f"02:{minute + 5:02}:00") + WAITS, bar(3, 67), bar(2, 67)]
    return begun


def test_a_capture_that_hangs_does_not_move_whatever_is_repeated() -> None:
    seen = told(*hang(9), now=at("02:14:00"))
    assert (seen.phase, seen.moved, seen.ratio) == ("cuda_graph_capture", at("02:01:10"), pytest.approx(3 / 67))
    assert seen.events == {"shm_broadcast_wait": 9}
    assert told(*hang(9), head("02:14:10") + "x", bar(4, 67)).moved == at("02:14:10")


def test_warnings_and_other_lines_are_no_progress() -> None:
    assert told(BANNER, LOADS, head("02:05:00", "WARNING") + "Triton is not installed.").moved == at("02:00:10")
    assert told(BANNER, LOADS, head("02:05:00") + "Waiting for 1 local, 0 remote core engine proc(s)").moved == at(
        "02:00:10"
    )


def test_server_is_ready_from_its_ready_line_on() -> None:
    seen = told(
        BANNER, LOADS, head("02:02:00") + "Supported tasks: ['generate']", READY, head("02:09:00") + LOADS, SERVED
    )
    assert (seen.phase, seen.moved, seen.ratio) == ("ready", at("02:02:00"), None)
    assert seen.spent == {"process_start": 10, "load_weights": 110}


@pytest.mark.parametrize(
    "line",
    [
        "INFO:     Uvicorn running on http://0.0.0.0:8000 (Press CTRL+C to quit)",
        "(APIServer pid=1) INFO:     Application startup complete.",
        SERVED,
        "(APIServer pid=1) " + SERVED,
        "2026-11-21T02:03:00.000000000Z stdout F " + SERVED,
        "2026-11-21T02:03:00.000000000Z " + SERVED,
        head("02:03:00", process="APIServer", file="loggers.py") + "Engine 000: Avg prompt throughput: 1.0 tokens/s",
    ],
)
def test_a_server_that_serves_is_ready(line: str) -> None:
    assert told(BANNER, LOADS, line).phase == "ready"
    rotated = told(line)
    assert (rotated.phase, rotated.spent) == ("ready", {})
    assert rotated.moved is not None


def test_log_without_a_start_or_work_has_no_start_phase() -> None:
    seen = told(head("02:05:00", "WARNING") + "Triton is not installed.", "  warnings.warn(")
    assert (seen.phase, seen.spent, seen.moved) == (None, {}, None)


def test_log_that_begins_during_a_start_shows_the_remaining_phases() -> None:
    seen = told(POOL, bar(1, 4), now=at("02:02:10"))
    assert (seen.phase, seen.spent) == ("cuda_graph_capture", {"allocate_kv_cache": 0, "cuda_graph_capture": 60})


SHUTDOWN = head("02:10:00", process="APIServer", file="launcher.py") + "[shutdown] API server: shutdown triggered"


UVICORN_ENDS = ("INFO:     Shutting down", "INFO:     Finished server process [17]")


@pytest.mark.parametrize("lines", [(SHUTDOWN,), UVICORN_ENDS])
def test_a_server_that_is_shut_down_is_in_no_phase(lines: tuple[str, ...]) -> None:
    seen = told(BANNER, LOADS, READY, *lines, SERVED)
    assert (seen.phase, seen.spent) == ("", {"process_start": 10, "load_weights": 0})


@pytest.mark.parametrize("line", UVICORN_ENDS)
def test_one_line_of_the_web_server_alone_ends_no_server_at_work(line: str) -> None:
    assert (told(BANNER, READY, line).phase, told(BANNER, READY, line).events) == ("ready", {})
    assert told(BANNER, line).phase == ""


def test_engine_that_ends_after_sigterm_is_not_dead() -> None:
    dies = head("02:10:01", "ERROR", "APIServer", "async_llm.py") + "AsyncLLM output_handler failed."
    assert told(BANNER, READY, dies).events == {"engine_dead": 1}
    assert told(BANNER, READY, SHUTDOWN, dies).events == {"shut_down": 1}


ENGINE_STOPS = head("02:10:00") + "[shutdown] EngineCore: "
CUT = head("02:10:01", "ERROR", "APIServer", "serving.py") + "Error in completion stream generator."
REFUSED = 'INFO:     127.0.0.1:35926 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error'
NO_ENGINE = head("02:10:01", "INFO", "APIServer", "launcher.py") + "[shutdown] API server: engine client stopped"
LEFT = head("02:10:07", "INFO", "APIServer", "loggers.py") + (
    "Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 19.1 tokens/s, Running: {} reqs, "
    "Waiting: 0 reqs, GPU KV cache usage: 0.4%, Prefix cache hit rate: 0.0%"
)


@pytest.mark.parametrize(
    ("lines", "cut", "refused"),
    [
        ([SHUTDOWN, CUT, CUT, REFUSED], 2, 0),
        ([SHUTDOWN, REFUSED, REFUSED], 2, 0),
        ([SHUTDOWN, ENGINE_STOPS + "aborting in-flight requests count=7"], 7, None),
        ([SHUTDOWN, ENGINE_STOPS + "draining in-flight requests count=2 timeout=60s", CUT, REFUSED, REFUSED], 1, 2),
        ([SHUTDOWN, ENGINE_STOPS + "draining in-flight requests count=2 timeout=60s"], None, None),
        ([SHUTDOWN], None, None),
        ([SHUTDOWN, NO_ENGINE, LEFT.format(5), LEFT.format(5)], 5, 0),
        ([SHUTDOWN, REFUSED, NO_ENGINE, LEFT.format(5)], 1, 0),
        ([SHUTDOWN, ENGINE_STOPS + "aborting in-flight requests count=7", NO_ENGINE, LEFT.format(5)], 7, None),
        ([SHUTDOWN, LEFT.format(5), NO_ENGINE, LEFT.format(0)], None, None),
        ([CUT, REFUSED, SHUTDOWN], None, None),
        ([head("02:09:59", "ERROR") + "EngineCore encountered a fatal error.", SHUTDOWN, CUT, REFUSED], None, None),
    ],
    ids=[
        *("streams", "answers", "engine", "drain", "a drain that ends", "nothing in flight", "killed before it tells"),
        *("killed, and answered", "killed after it told", "killed after a drain", "before", "a crash"),
    ],
)
def test_requests_that_a_planned_shutdown_ends_are_counted(
    lines: list[str], cut: float | None, refused: float | None
) -> None:
    """A stream that fails before its first token logs its exception and an answer."""
    seen = told(BANNER, LOADS, READY, SERVED, *lines)
    numbers = [seen.one("diag_vllm_log_value", "requests_cut_at_shutdown", field) for field in ("requests", "refused")]
    assert numbers == [cut, refused]


def test_the_end_of_a_server_whose_engine_died_is_no_orderly_shutdown() -> None:
    dies = head("02:10:01", "ERROR", "APIServer", "async_llm.py") + "AsyncLLM output_handler failed."
    assert told(BANNER, READY, dies, "INFO:     Shutting down", SHUTDOWN).events == {"engine_dead": 1}
    again = told(BANNER, READY, dies, "INFO:     Shutting down", BANNER, READY, SHUTDOWN)
    assert again.events == {"engine_dead": 1, "shut_down": 1}


@pytest.mark.parametrize(
    "end", [head("02:10:01", "ERROR", "APIServer", "async_llm.py") + "AsyncLLM output_handler failed.", SHUTDOWN]
)
def test_end_in_a_log_without_its_beginning_is_that_of_a_serving_server(end: str) -> None:
    """A condition compares the time of the death with that of the last start: it was at work a moment before."""
    assert told(end).moved == at(end[end.index("02:1") :][:8]) - 1


COMPILED = (
    "(EngineCore pid=1) WARNING 11-21 02:10:00 [jit_monitor.py:1] Triton kernel JIT compilation during inference: k."
)
GRAPH = (
    "(EngineCore pid=1) INFO 11-21 02:10:00 [backends.py:1] [backbone] Compiling a graph for compile range (1, 8) takes"
)


@pytest.mark.parametrize("line", [COMPILED, GRAPH])
def test_a_compilation_counts_once_the_server_serves(line: str) -> None:
    assert told(BANNER, LOADS, READY, line).events == {"compiled_while_serving": 1}
    assert told(BANNER, LOADS, line, READY).events == {}
    assert told(BANNER, LOADS, READY, GRAPH.replace("backends", "a")).events == {}
    assert told(BANNER, LOADS, READY, SHUTDOWN, line).events == {"shut_down": 1}


@pytest.mark.parametrize(
    "again",
    [
        "(APIServer pid=1) INFO 11-21 02:20:00 [api_server.py:1] vLLM API server version 0.25.0",
        "(APIServer pid=1) INFO 11-21 02:20:00 [api_utils.py:347]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.25.0",
        "(APIServer pid=1) INFO 11-21 02:20:00 [api_utils.py:286] non-default args: {'max_num_seqs': 8}",
    ],
)
@pytest.mark.parametrize(
    "before", [(READY,), (READY, SHUTDOWN), (head("02:01:00", "ERROR") + "EngineCore failed to start.",), ()]
)
def test_a_new_banner_begins_a_new_start_and_events_stay(again: str, before: tuple[str, ...]) -> None:
    waits = head("02:00:20", file="shm_broadcast.py") + WAITS
    follows = head("02:20:02", process="APIServer", file="model.py") + "Using max model len 2048"
    seen = told(BANNER, LOADS, waits, *before, again, follows, now=at("02:20:05"))
    assert (seen.phase, seen.spent, seen.moved) == ("process_start", {"process_start": 5}, at("02:20:02"))
    assert seen.events["shm_broadcast_wait"] == 1
    assert seen.all("diag_vllm_log_value") == {"seconds": 60}


def test_a_banner_of_another_process_begins_a_new_start_before_any_phase() -> None:
    args = head("02:00:30", process="APIServer") + "non-default args: {'max_num_seqs': 8}"
    assert told(BANNER, args, now=at("02:00:31")).spent == {"process_start": 31}
    assert told(BANNER, args.replace("pid=1", "pid=2"), now=at("02:00:31")).spent == {"process_start": 1}


def test_the_same_banner_again_begins_a_new_start_before_any_phase() -> None:
    assert told(BANNER, BANNER.replace("02:00:00", "02:00:30"), now=at("02:00:31")).spent == {"process_start": 1}


def test_new_start_forgets_the_previous_configuration() -> None:
    args = head("02:00:00", process="APIServer") + "non-default args: {'max_num_seqs': 8, 'model': 'm'}"
    state = fed(BANNER, args, LOADS, BANNER.replace("0.24.0", "0.25.0"))
    assert (dict(state.config.numbers), state.config.version, state.config.model) == ({}, "0.25.0", "")


FAILS = [
    head("02:00:40", "ERROR") + "EngineCore failed to start.",
    head("02:00:40", "ERROR") + "WorkerProc failed to start.",
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.",
    "RuntimeError: Engine process failed to start. See stack trace for the root cause.",
    "ERROR:    Application startup failed. Exiting.",
]


@pytest.mark.parametrize("line", FAILS)
def test_a_start_that_failed_is_in_no_phase_and_takes_no_more_time(line: str) -> None:
    seen = told(BANNER, LOADS, LOADED, line, LOADS.replace("02:00:10", "02:00:50"), bar(1, 4))
    assert (seen.phase, seen.events) == ("", {"engine_start_failed": 1})
    assert sum(seen.spent.values()) <= 40
    failed = seen.all("diag_vllm_log_event_last_timestamp_seconds")["engine_start_failed"]
    assert seen.moved is not None
    assert seen.moved <= failed


@pytest.mark.parametrize(
    "line",
    [
        "api_server.py: error: unrecognized arguments: --foo",
        "vllm serve: error: argument --max-num-seqs: invalid int value: 'x'",
        "vllm: error: unrecognized arguments: --foo",
        "(APIServer pid=1) vllm serve: error: unrecognized arguments: --foo",
    ],
)
def test_a_wrong_command_line_is_a_start_that_failed(line: str) -> None:
    seen = told("usage: vllm serve [model_tag] [options]", line)
    assert (seen.phase, seen.events, seen.moved) == ("", {"engine_start_failed": 1}, NOW)


def uncaught(
    last: str, first: str = '  File "/usr/local/bin/vllm", line 8, in <module>', before: str = ""
) -> list[str]:
    lines = ["Traceback (most recent call last):", first, "    sys.exit(main())", "             ^^^^^^", last]
    return [before + each for each in lines]


VALIDATION = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"


@pytest.mark.parametrize("before", ["", "(APIServer pid=1) "])
@pytest.mark.parametrize(
    "first", ['  File "<frozen runpy>", line 198, in _run_module_as_main', '  File "/usr/bin/vllm", line 8']
)
def test_uncaught_exception_before_ready_is_a_failed_start(first: str, before: str) -> None:
    assert told(*uncaught(VALIDATION, first, before)).events == {"engine_start_failed": 1}
    assert told(BANNER, *uncaught(VALIDATION, first, before)).phase == ""
    assert told(BANNER, READY, *uncaught(VALIDATION, first, before)).events == {}


def test_caught_or_requested_exception_is_no_failure() -> None:
    assert told(BANNER, *uncaught(VALIDATION, '  File "/x/triton.py", line 3, in f')).phase == "process_start"
    assert told(BANNER, *uncaught("KeyboardInterrupt"), "ValueError: x").phase == "process_start"


def test_a_failure_that_a_traceback_ends_in_counts_once() -> None:
    assert told(BANNER, *uncaught(FAILS[2])).events == {"engine_start_failed": 1}
    assert told(BANNER, *uncaught(OOM)).events == {"engine_start_failed": 1, "cuda_out_of_memory": 1}


# -- events -----------------------------------------------------------------------------------------------------------


def test_every_event_is_there_from_the_start() -> None:
    assert told().events == {}


def test_an_event_is_counted_for_each_line_with_the_time_and_the_numbers_of_the_last() -> None:
    seen = told(
        BANNER,
        head("02:00:00", "ERROR") + OOM,
        head("02:00:01", "ERROR") + OOM.replace("2.00 GiB", "512.00 MiB"),
        "[rank1]: " + OOM,
    )
    assert seen.events == {"cuda_out_of_memory": 3}
    assert seen.all("diag_vllm_log_event_last_timestamp_seconds")["cuda_out_of_memory"] == at("02:00:01")
    assert seen.one("diag_vllm_log_value", "cuda_out_of_memory", "wanted_gibibytes") == 2


def test_the_numbers_of_eplb_add_up() -> None:
    step = "EPLB step: 1 for model m: avg_tokens={}, max_tokens={}, balancedness=0.5000, steps until the next: 2"
    lines = [
        head("02:10:00", process="Worker_DP0_EP0", file="eplb_state.py") + step.format(*n) for n in ((8.5, 17), (2, 4))
    ]
    seen = told(BANNER, READY, SERVED, *lines)
    totals = [seen.one("diag_vllm_log_value_total", "eplb_balance", name) for name in ("avg_tokens", "max_tokens")]
    assert totals == [10.5, 21]


def test_a_line_without_numbers_leaves_those_of_the_line_before() -> None:
    warm = (
        head("02:00:02", "ERROR")
        + "RuntimeError: CUDA out of memory occurred when warming up sampler with 8 dummy requests."
    )
    seen = told(BANNER, head("02:00:00", "ERROR") + OOM, warm)
    assert seen.events == {"cuda_out_of_memory": 2}
    assert seen.one("diag_vllm_log_value", "cuda_out_of_memory", "wanted_gibibytes") == 2


@pytest.mark.parametrize(
    "line",
    [
        head("02:00:00", process="APIServer")
        + f"Received request cmpl-1: prompt: '{OOM}', params: SamplingParams(n=1)",
        head("02:00:00", process="APIServer")
        + f"Received request cmpl-1: prompt: 'a\\nERROR 11-21 02:00:00 [a.py:1] {OOM}'",
        head("02:00:00", process="APIServer") + OOM,
        head("02:00:00") + OOM,
        head("02:00:00", "ERROR", "APIServer") + OOM,
        head("02:00:00", "ERROR", "ApiServer_3") + OOM,
        f'INFO:     127.0.0.1:1 - "GET /{OOM} HTTP/1.1" 404 Not Found',
        head("02:00:00") + f"Starting to load model /models/{OOM}...",
        head("02:00:00", process="APIServer") + f"non-default args: {{'model': '{OOM}'}}",
        f"    raise RuntimeError('{OOM}')",
    ],
)
def test_client_input_and_model_names_are_no_events(line: str) -> None:
    assert told(BANNER, READY, line).events == {}


def test_client_input_in_a_web_server_exception_is_no_event() -> None:
    failed = [
        "ERROR:    Exception in ASGI application",
        "Traceback (most recent call last):",
        '  File "a.py", line 1',
        "ValueError: x",
    ]
    sent = [OOM, "vllm.v1.engine.exceptions.EngineDeadError: x", "vllm serve: error: x"]
    seen = told(BANNER, READY, *failed, *sent)
    assert (seen.phase, seen.events) == ("ready", {})
    dies = [head("02:00:09", "ERROR") + text for text in ("EngineCore encountered a fatal error.", OOM)]
    died = {"engine_dead": 1, "cuda_out_of_memory": 1}
    begun = [BANNER, head("02:00:01") + "x", READY]
    assert told(*begun, *failed, head("02:00:08") + "x", *dies).events == died
    assert told(*begun, *failed, *dies).events == {}


def test_a_client_cannot_begin_a_start_or_end_one() -> None:
    for text in (
        "vLLM API server version 9",
        "Application startup complete.",
        "[shutdown] API server: shutdown triggered",
    ):
        line = head("02:30:00", "ERROR", "APIServer") + text
        assert told(BANNER, LOADS, line).phase == "load_weights"
        assert told(BANNER, LOADS, READY, line).phase == "ready"


# -- configuration ----------------------------------------------------------------------------------------------------


def test_only_the_outermost_settings_are_read() -> None:
    text = "non-default args: {'a': 1, 'draft': {'max_model_len': 5}, 'n': ['x', 'y'], 'd': Path('/p'), 'z': True}"
    found = parse_settings(text)
    assert (found["a"], found["n"], found["z"]) == ("1", "x", "True")
    assert "max_model_len" not in found
    assert parse_settings("config: model='a, b=3', c=X(d=4), e=0.5") == {"model": "a, b=3", "c": "X", "e": "0.5"}


@pytest.mark.parametrize(
    ("args", "model"),
    [
        ("{'model': '/models/x/llama'}", "llama"),
        ("{'model': '/models/x/llama', 'served_model_name': ['tiny', 'small']}", "tiny"),
        ("{'model': 'org/llama'}", "org/llama"),
        ("{'model': './llama/'}", "llama"),
        ("{'model': '~/llama'}", "llama"),
        ("{'model': 's3://bucket/llama'}", "llama"),
        ("{'model': 'C:\\\\\\\\models\\\\\\\\llama'}", "llama"),
        ("{'model': 'm', 'served_model_name': ['/models/x']}", "x"),
        ("{'model': 'm', 'served_model_name': ['hf_abcdefghijkl']}", "REDACTED"),
        ("{'max_num_seqs': 8}", ""),
    ],
)
def test_model_has_its_served_name_and_never_a_path(args: str, model: str) -> None:
    assert fed(head("02:00:00", process="APIServer") + f"non-default args: {args}").config.model == model


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("non-default args: {'max_num_seqs': 64, 'enforce_eager': True}", {"max_num_seqs": 64, "enforce_eager": 1}),
        ("non-default args: {'max_model_len': -1, 'watermark': 0.05}", {"watermark": 0.05}),
        ("args: Namespace(max_num_seqs=None, max_model_len=4096, port=80)", {"max_model_len": 4096}),
        ("Using max model len 2048", {"max_model_len": 2048}),
        ("Chunked prefill is enabled with max_num_batched_tokens=512.", {"max_num_batched_tokens": 512}),
        ("Overriding num_gpu_blocks=512 with num_gpu_blocks_override=2048", {"num_gpu_blocks_override": 2048}),
        ("# GPU blocks: 12122, # CPU blocks: 4096", {"num_gpu_blocks": 12122}),
        (
            "Initializing a V1 LLM engine (v0.8.5) with config: model='m', max_seq_len=1, chunked_prefill_enabled=True",
            {"max_model_len": 1, "enable_chunked_prefill": 1},
        ),
    ],
)
def test_settings_are_read_as_numbers(text: str, config: dict[str, float]) -> None:
    assert fed(head("02:00:00", process="APIServer") + text).config.numbers == config


SECRETS = (
    "non-default args: {'api_key': ['sk-hush-0'], 'model': '/home/hush-1/m', 'hf_token': 'hush-2', 'max_num_seqs': 3,"
    " 'chat_template': 'hush-3', 'ssl_keyfile': '/hush-4', 'port': 81234}"
)


def test_log_yields_only_known_numbers_version_model_name_and_an_error() -> None:
    error = head("02:01:00", "ERROR") + OOM + " api_key=hush-5 https://user:hush-6@host/ Bearer hush-hush-hush-7"
    state = fed(BANNER, head("02:00:00", process="APIServer") + SECRETS, error)
    everything = f"{state.samples(NOW)} {dict(state.config.numbers)} {state.config.version} {state.config.model}"
    assert "hush" not in everything
    assert "81234" not in everything
    assert (state.config.numbers, state.config.model) == ({"max_num_seqs": 3}, "m")


# -- real logs --------------------------------------------------------------------------------------------------------

LENGTH = "max_model_len_exceeds_kv_cache"
ON_A_GPU = ("gpu_compute_contended", "h100_healthy", "h100_kv_cascade", "h100_memory_held", "h100_queue")
ENDED = {
    "benign_preemptions": ("", {"shut_down": 1}),
    "compiling_while_serving": ("", {"shut_down": 1, "compiled_while_serving": 3}),
    "contention_bigbatch": ("", {"shut_down": 1}),
    "contention_cure_threshold": ("ready", {}),
    "contention_smallbatch": ("", {"shut_down": 1}),
    "cure_max_num_seqs_mean": ("ready", {}),
    "cure_max_num_seqs_p90": ("ready", {}),
    "cure_watermark": ("ready", {}),
    "elastic_scaling": ("ready", {"elastic_scaling_started": 1, "elastic_scaling_ended": 1}),
    "engine_dead": ("", {"engine_dead": 3}),
    "engine_dead_answers_fail": ("ready", {"engine_dead": 3}),
    "engine_dead_page_lives": ("ready", {"engine_dead": 3}),
    "engine_device_fault": ("", {"engine_dead": 4, "cuda_error": 1}),
    "engine_stalled": ("ready", {}),
    "experts_unbalanced": ("ready", {"eplb_balance": 34}),
    "fail_max_model_len": ("", {LENGTH: 2, "engine_start_failed": 2, "worker_died": 1}),
    **dict.fromkeys(ON_A_GPU, ("ready", {})),
    "healthy": ("", {"shut_down": 1}),
    "healthy_after_cascade": ("ready", {}),
    "idle": ("ready", {}),
    "kv_cascade": ("", {"shut_down": 1}),
    "kv_cascade_base": ("ready", {}),
    "kv_saturated_fit": ("ready", {}),
    "kv_undersized": ("ready", {}),
    "prefix_unique": ("ready", {}),
    "queue_saturation": ("ready", {}),
    "startup_crash_blocksize16": ("", {"engine_start_failed": 2, "worker_died": 1}),
    "startup_hang": ("", {"shut_down": 1}),
    "tp2_healthy_between": ("", {"shm_broadcast_wait": 1, "shut_down": 1}),
    "tp2_long_stall": ("", {"shm_broadcast_wait": 1, "shut_down": 1}),
}
"""Of vLLM 0.32, most on the CPU, and 0.26 on a GPU. Those in no phase failed, died or were shut down at their end."""


@pytest.mark.parametrize("name", ENDED)
def test_a_real_log_ends_in_its_phase_with_its_events(name: str) -> None:
    state, seen = replayed(RECORDINGS / name / "server.log")
    assert (seen.phase, seen.events) == ENDED[name]
    assert (state.config.version, state.config.model) == ("0.26.0" if name in ON_A_GPU else "0.32.0", "tiny")
    assert state.config.numbers["max_model_len"] in (2048, 4096, 8192, 16384, 131072)
    failed = "engine_start_failed" in seen.events
    assert ("warm_up" in seen.spent) is not failed


def test_server_metrics_override_its_log() -> None:
    state = ServerLog(UTC)
    state.feed(head("12:00:00") + "Initializing a V1 LLM engine (v0.8.5) with config: model='old', seed=0", NOW)
    assert (state.completes(ServerFacts()).version, state.completes(ServerFacts()).models) == (
        "0.8.5",
        ("old",),
    )
    told = state.completes(ServerFacts("0.32.0", ("new",)))
    assert (told.version, told.models) == ("0.32.0", ("new",))


def test_every_log_that_was_recorded_is_looked_at() -> None:
    assert {path.parent.name for path in RECORDINGS.glob("*/server.log")} == set(ENDED)


def test_a_real_healthy_start_passes_its_phases() -> None:
    _, seen = replayed(RECORDINGS / "healthy/server.log")
    assert seen.spent == {
        **{"process_start": 24, "load_weights": 2, "compile": 38},
        **{"profile_memory": 2, "allocate_kv_cache": 14, "warm_up": 2},
    }
    assert seen.moved == at("02:10:28")


def test_a_real_start_that_failed_for_its_context_length_gives_the_numbers() -> None:
    _, seen = replayed(RECORDINGS / "fail_max_model_len/server.log")
    assert seen.all("diag_vllm_log_value") == {
        **{"max_model_len": 131072, "needed_gibibytes": 2.0},
        **{"available_gibibytes": 1.0, "estimated_max_model_len": 65408, "exit_code": 0},
    }


def test_a_real_configuration_is_read() -> None:
    state, _ = replayed(RECORDINGS / "tp2_long_stall/server.log")
    assert state.config.numbers == {
        **{"max_model_len": 2048, "enforce_eager": 1, "tensor_parallel_size": 2, "block_size": 32},
        **{"num_gpu_blocks_override": 512, "max_num_seqs": 32, "max_num_batched_tokens": 4096},
        **{"pipeline_parallel_size": 1, "data_parallel_size": 1, "disable_custom_all_reduce": 1},
        **{"enable_prefix_caching": 1, "enable_chunked_prefill": 1},
        **{"kv_cache_size_tokens": 16384, "kv_cache_max_concurrency": 8},
    }


def test_a_log_of_the_first_engine_is_read() -> None:
    state, seen = replayed(LOGS / "v0_0.6.4.post1_tp2.log")
    assert (seen.phase, seen.events) == ("ready", {"custom_all_reduce_disabled": 1, "preemption_v0": 1})
    assert list(seen.spent) == [each for each in PHASES if each not in ("compile", "ready")]
    assert seen.spent["cuda_graph_capture"] == 17
    assert (state.config.version, state.config.model) == ("0.6.4.post1", "meta-llama/Llama-3.1-8B-Instruct")
    assert state.config.numbers["max_num_seqs"] == 256


def test_a_log_of_a_start_without_room_for_the_cache_is_read() -> None:
    state, seen = replayed(LOGS / "v1_0.8.5_no_kv_memory.log")
    assert (seen.phase, seen.events) == ("", {"no_kv_cache_memory": 2, "engine_start_failed": 2})
    assert seen.spent == {"process_start": 17, "load_weights": 5, "profile_memory": 5}
    assert (state.config.version, state.config.model) == ("0.8.5", "qwen")


def test_a_log_of_a_capture_that_hangs_is_read() -> None:
    state, seen = replayed(LOGS / "v1_0.11.0_tp2_capture_hang.log")
    assert (seen.phase, seen.events) == ("cuda_graph_capture", {"shm_broadcast_wait": 3})
    assert seen.moved == at("09:01:24", "11-20")
    assert seen.spent["cuda_graph_capture"] == 120
    assert state.config.numbers["tensor_parallel_size"] == 2
    assert state.config.numbers["max_model_len"] == 8192


def test_a_log_in_a_containers_format_is_read() -> None:
    state, seen = replayed(LOGS / "v1_0.32.0_gpu_oom_under_load.log")
    assert (seen.phase, seen.events) == ("", {"cuda_out_of_memory": 1, "engine_dead": 2})
    assert seen.one("diag_vllm_log_value", "cuda_out_of_memory", "free_gibibytes") == pytest.approx(120.88 / 1024)
    assert seen.spent["cuda_graph_capture"] == pytest.approx(15)
    assert seen.spent["warm_up"] == pytest.approx(10.9 + 5)
    assert state.config.model == "llama"


# -- bytes ------------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=6))
def test_bytes_give_the_same_lines_however_they_come(data: bytes, cuts: list[int]) -> None:
    lines = LineSplitter()
    edges = [0, *sorted(min(each, len(data)) for each in cuts), len(data)]
    found = [line for begin, end in pairwise(edges) for line in lines.split(data[begin:end])]
    whole = LineSplitter()
    assert [*found, *lines.take_rest()] == [*whole.split(data), *whole.take_rest()]


PIECES = st.sampled_from(
    [
        BANNER,
        LOADS,
        LOADED,
        POOL,
        READY,
        SERVED,
        SHUTDOWN,
        bar(1, 4),
        OOM,
        WAITS,
        *FAILS,
        *uncaught(VALIDATION),
        SECRETS,
        "\r",
        "\n",
        "\0",
        "\x1b[0m",
        "{",
        '{"log":"',
        '{"a":[',
        "2026-11-21T02:00:00Z stdout P ",
        head("02:00:00"),
        "é",
        "█",
        "INFO",
        ": ",
    ]
)


@given(st.lists(st.one_of(PIECES, st.text(max_size=20)), max_size=30), st.booleans())
def test_any_log_is_taken_and_gives_a_page(pieces: list[str], live: bool) -> None:
    state = ServerLog(UTC)
    for number, line in LineSplitter().split("".join(pieces).encode("utf-8", "surrogatepass") + b"\n"):
        state.feed(line, NOW, live, number)
    seen = Told(state)
    assert all(0 <= seconds < 10**9 for seconds in seen.spent.values())
    assert seen.ratio is None or 0 <= seen.ratio <= 1
    samples = [sample for sample in state.samples(NOW) if sample[0] != QUOTE]
    assert "hush" not in f"{samples} {dict(state.config.numbers)} {state.config.version} {state.config.model}"


def test_a_line_is_kept_up_to_its_limit() -> None:
    lines = LineSplitter()
    found = [line for _ in range(40) for line in lines.split(b"x" * 10**6)]
    assert found == []
    assert lines.split(b"y\nz\n") == [(1, "x" * MOST_LINE), (2, "z")]


def test_a_line_whose_beginning_was_skipped_is_left_out() -> None:
    lines = LineSplitter(number=0, inside=True)
    assert [*lines.split(b"half of"), *lines.split(b" a line\nwhole\n")] == [(0, "whole")]


# -- the file ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


class Looking(LogTail):
    """A tail that counts its looks at the file."""

    looks = 0

    def step(self) -> None:
        super().step()
        self.looks += 1

    def looks_again(self) -> None:
        """Wait for a whole look from now on."""
        before = self.looks
        eventually(lambda: self.looks >= before + 2)


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Looking]]:
    monkeypatch.setattr(following, "EVERY", 0.01)
    tails: list[Looking] = []
    others = {*threading.enumerate()}  # those of a test that ran before in this process

    def started(path: Path) -> Looking:
        tails.append(Looking(str(path), UTC))
        tails[-1].start()
        return tails[-1]

    yield started
    for each in tails:
        each.stop()
    assert not [each for each in {*threading.enumerate()} - others if each.name == "diag-log-tail"]


def eventually(holds: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def count(tail: LogTail, event: str = "no_kv_cache_memory") -> float:
    return Told(tail).events.get(event, 0) if tail.collect().samples else 0


FULL = "ValueError: No available memory for the cache blocks. Try increasing"


def write(path: Path, *lines: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


def test_existing_lines_are_read_first_and_then_new_ones(path: Path, follow: Callable[[Path], LogTail]) -> None:
    write(path, BANNER, FULL)
    tail = follow(path)
    eventually(lambda: count(tail) == 1)
    write(path, FULL)
    eventually(lambda: count(tail) == 2)
    assert tail.collect().problem == ""


def test_existing_lines_have_their_time_and_new_lines_the_current_time(
    path: Path, follow: Callable[[Path], LogTail]
) -> None:
    write(path, "2026-01-01T00:00:00Z x", FULL)
    tail = follow(path)
    eventually(lambda: count(tail) == 1)
    times = Told(tail).all("diag_vllm_log_event_last_timestamp_seconds")
    assert times["no_kv_cache_memory"] == datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    write(path, FULL)
    eventually(lambda: count(tail) == 2)
    times = Told(tail).all("diag_vllm_log_event_last_timestamp_seconds")
    assert times["no_kv_cache_memory"] == pytest.approx(time.time(), abs=60)


def test_old_log_has_the_year_of_its_file(path: Path) -> None:
    path.write_text("INFO 11-21 02:00:00 [a.py:1] x\n")
    written = datetime(2023, 12, 1, tzinfo=UTC).timestamp()
    os.utime(path, (written, written))
    tail = LogTail(str(path), UTC)
    tail.catch_up()
    assert last_line(tail.state) == datetime(2023, 11, 21, 2, tzinfo=UTC).timestamp()


def test_followed_log_is_left_alone_between_two_looks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "EVERY", 0.1)
    tail, begin = Looking(str(path), UTC), time.monotonic()
    tail.start()
    eventually(lambda: tail.looks >= 3)
    tail.stop()
    assert tail.looks <= (time.monotonic() - begin) / 0.1 + 1


def test_a_file_that_comes_later_is_read(path: Path, follow: Callable[[Path], LogTail]) -> None:
    tail = follow(path)
    eventually(lambda: tail.collect().problem)
    assert tail.collect().problem == f"the log {path} does not exist"
    assert Told(tail).events == {}
    write(path, "2026-01-01T00:00:00Z x", FULL)
    eventually(lambda: count(tail) == 1 and not tail.collect().problem)
    times = Told(tail).all("diag_vllm_log_event_last_timestamp_seconds")
    assert times["no_kv_cache_memory"] == pytest.approx(time.time(), abs=60)


def test_a_file_that_is_renamed_and_made_again_is_followed(path: Path, follow: Callable[[Path], LogTail]) -> None:
    write(path, FULL)
    tail = follow(path)
    eventually(lambda: count(tail) == 1)
    with path.open("a") as old:
        path.rename(path.with_suffix(".1"))
        old.write(FULL + "\n")
        old.flush()
        eventually(lambda: count(tail) == 2)
    write(path, FULL, FULL)
    eventually(lambda: count(tail) == 4 and not tail.collect().problem)


def test_a_file_that_is_copied_and_truncated_is_followed(path: Path, follow: Callable[[Path], Looking]) -> None:
    write(path, FULL, "x" * 1000)
    tail = follow(path)
    eventually(lambda: count(tail) == 1)
    os.truncate(path, 0)
    tail.looks_again()
    write(path, FULL)
    eventually(lambda: count(tail) == 2)


def test_a_file_that_was_truncated_under_its_writer_begins_with_a_hole(
    path: Path, follow: Callable[[Path], Looking]
) -> None:
    with path.open("w") as file:
        file.write(f"{FULL}\n" + "x" * 300_000 + "\n")
        file.flush()
        tail = follow(path)
        eventually(lambda: count(tail) == 1)
        os.truncate(path, 0)
        tail.looks_again()
        file.write(FULL + "\n")
        file.flush()
        eventually(lambda: count(tail) == 2)


def test_a_file_that_is_deleted_and_made_again_is_followed(path: Path, follow: Callable[[Path], LogTail]) -> None:
    write(path, FULL)
    tail = follow(path)
    eventually(lambda: count(tail) == 1)
    path.unlink()
    eventually(lambda: tail.collect().problem)
    write(path, FULL)
    eventually(lambda: count(tail) == 2 and not tail.collect().problem)


def test_a_link_that_is_moved_to_another_file_is_followed(path: Path, follow: Callable[[Path], LogTail]) -> None:
    write(path.with_name("0.log"), FULL)
    write(path.with_name("1.log"), FULL, FULL)
    path.symlink_to("0.log")
    tail = follow(path)
    eventually(lambda: count(tail) == 1)
    path.with_name("next").symlink_to("1.log")
    path.with_name("next").rename(path)
    eventually(lambda: count(tail) == 3)


def test_a_folder_is_a_problem_until_a_file_is_there(path: Path, follow: Callable[[Path], LogTail]) -> None:
    path.mkdir()
    tail = follow(path)
    eventually(lambda: tail.collect().problem)
    assert tail.collect().problem == f"the log {path} cannot be read: Is a directory"
    assert Told(tail).events == {}
    path.rmdir()
    write(path, FULL)
    eventually(lambda: count(tail) == 1 and not tail.collect().problem)


def test_unreadable_log_is_a_problem_until_it_becomes_readable(path: Path, follow: Callable[[Path], LogTail]) -> None:
    """For root, who may read everything, it is a link to itself."""
    is_root = os.geteuid() == 0
    if is_root:
        path.symlink_to(path)
    else:
        write(path, FULL)
        path.chmod(0)
    tail = follow(path)
    eventually(lambda: tail.collect().problem)
    assert "cannot be read: " in tail.collect().problem
    if is_root:
        path.unlink()
        write(path, FULL)
    else:
        path.chmod(0o600)
    eventually(lambda: count(tail) == 1 and not tail.collect().problem)


def test_a_bar_that_stands_still_at_its_first_drawing_is_seen(path: Path, follow: Callable[[Path], LogTail]) -> None:
    write(path, BANNER)
    tail = follow(path)
    with path.open("a") as file:
        file.write("\r" + bar(0, 67))
    eventually(lambda: tail.collect().samples and Told(tail).phase == "cuda_graph_capture")
    assert Told(tail).ratio == 0


def test_pages_are_served_while_a_long_log_is_read(path: Path, follow: Callable[[Path], LogTail]) -> None:
    path.write_text((LOADS + "\n") * 50_000)
    tail, served = follow(path), 0
    while not tail.collect().samples:
        served += 1
    assert served > 3  # a collection that waits for the whole log is the only one before its end
    assert Told(tail).phase == "load_weights"


def test_huge_log_is_read_at_both_ends(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(following, "FIRST", 2**16)
    monkeypatch.setattr(following, "LAST", 2**16)
    path.write_text(f"{BANNER}\n" + f"{FULL}\n" * 2**14 + READY + "\n")
    tail = LogTail(str(path), UTC)
    with caplog.at_level(logging.INFO, "diag.exporter"):
        tail.catch_up()
    assert (tail.state.config.version, Told(tail).phase) == ("0.24.0", "ready")
    assert count(tail) * (len(FULL) + 1) == pytest.approx(2**17, rel=0.1)
    assert "bytes have been skipped" in caplog.text
    assert tail.collect().problem == ""


def test_newest_lines_of_a_flood_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "BACKLOG", 2**16)
    monkeypatch.setattr(following, "AT_ONCE", 2**15)
    write(path, BANNER)
    tail = LogTail(str(path), UTC)
    tail.catch_up()
    write(path, *[FULL] * 2**14, READY)
    tail.catch_up()
    assert Told(tail).phase == "ready"
    assert 0 < count(tail) * len(FULL) <= 2**15


def test_half_a_line_that_is_left_of_what_was_skipped_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "BACKLOG", 2**16)
    monkeypatch.setattr(following, "AT_ONCE", 2**16)
    write(path, BANNER)
    tail = LogTail(str(path), UTC)
    tail.catch_up()
    kept = f"{FULL}\n" + "x" * (2**16 - len(FULL) - 2) + "\n"
    write(path, "y" * 2**16)
    with path.open("a") as file:
        file.write("a prompt: " + kept)
    tail.catch_up()
    assert count(tail) == 0


def test_garbage_and_a_line_without_end_are_taken_with_little_memory(path: Path) -> None:
    path.write_bytes(os.urandom(2**20) + b"x" * 2**25 + b"\n" + FULL.encode() + b"\xff\xfe\n")
    tail = LogTail(str(path), UTC)
    tail.catch_up()
    assert count(tail) == 1
    assert len(tail._splitter._rest) <= MOST_LINE


def test_catching_up_again_reads_only_what_came(path: Path) -> None:
    write(path, FULL)
    tail = LogTail(str(path), UTC)
    tail.catch_up()
    tail.catch_up()
    assert count(tail) == 1
    write(path, FULL)
    tail.catch_up()
    assert count(tail) == 2


def test_a_last_line_without_an_end_counts_when_catching_up(path: Path) -> None:
    path.write_text(FULL)
    tail = LogTail(str(path), UTC)
    tail.catch_up()
    assert count(tail) == 1


def test_times_that_are_ahead_of_the_clock_are_a_problem(path: Path) -> None:
    write(path, "x")
    tail = LogTail(str(path), UTC)
    tail.catch_up()
    write(path, f"{datetime.fromtimestamp(time.time() + 7200, UTC):%Y-%m-%dT%H:%M:%SZ} x")
    tail.catch_up()
    assert "--log-timezone" in tail.collect().problem
    write(path, f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} x")
    tail.catch_up()
    assert tail.collect().problem == ""


def test_standard_input_is_followed_to_its_end(
    follow: Callable[[Path], LogTail], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    before = os.dup(0)
    os.dup2(reading, 0)
    try:
        tail = follow(Path("-"))
        os.write(writing, f"{FULL}\n{BANNER}".encode())
        eventually(lambda: count(tail) == 1)
        os.close(writing)
        eventually(lambda: tail.collect().problem)
        assert tail.collect().problem == "standard input has ended: nothing more will come of the log"
        eventually(lambda: Told(tail).phase == "process_start")
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(reading)


def test_a_named_pipe_is_followed(path: Path, follow: Callable[[Path], LogTail]) -> None:
    os.mkfifo(path)
    tail = follow(path)
    with path.open("w") as file:
        file.write(FULL + "\n")
        file.flush()
        eventually(lambda: count(tail) == 1)
    with path.open("w") as file:
        file.write(FULL + "\n")
        file.flush()
        eventually(lambda: count(tail) == 2)
    assert tail.collect().problem == ""


def test_a_log_is_known_by_its_name_in_the_contract() -> None:
    assert LogTail("x").name == "log"


def test_death_of_the_input_thread_over_a_multimodal_item_is_an_event_of_the_engine() -> None:
    """An engine of vLLM 0.11 names itself before each line of a traceback; without that, a client may have sent it."""
    dies = (
        "Exception in thread Thread-4 (process_input_sockets):",
        "AssertionError: Expected a cached item for mm_hash='ad'",
    )
    serving = (
        head("11:00:00", process="APIServer", file="api_server.py") + "vLLM API server version 0.11.0",
        head("11:00:01") + "Initializing a V1 LLM engine (v0.11.0) with config: model='m'",
        "INFO:     Application startup complete.",
    )
    own, foreign = fed(*serving, *(f"(EngineCore pid=1) {line}" for line in dies)), fed(*serving, *dies)
    names = ("input_thread_died", "multimodal_cache_miss")
    assert [times(own, name) for name in names] == [1, 1]
    assert [times(foreign, name) for name in names] == [0, 0]


def times(state: ServerLog, event: str) -> float:
    found = {(name, labels): value for name, labels, value in state.samples(NOW)}
    return found["diag_vllm_log_events_total", (event,)]
