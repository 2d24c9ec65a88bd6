"""A recording as a server that runs now: its pace, its times, its counters over the end, and what it answers."""

import re
from datetime import datetime

import pytest
from support.paths import RECORDINGS

from diag.sources.recording.reader import RecordedScrape, Replay, read_pages, restamped

PAGE = """\
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0"}} {tokens}
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf"}} {tokens}
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} {tokens}
process_start_time_seconds 1700000000
diag_vllm_log_event_timestamp_seconds{{event="engine_dead"}} {event}
odd line
"""
START, BEGIN = 1_700_000_100.0, 1_900_000_000.0


def recorded(seconds: int) -> RecordedScrape:
    page = PAGE.format(tokens=100 + 10 * seconds, event=START if seconds else 0)
    return RecordedScrape(START + seconds, page.encode())


def replayed(speed: float = 1.0, again: bool = True) -> Replay:
    return Replay([recorded(seconds) for seconds in (0, 2, 4, 6)], BEGIN, speed, again)


def value(replay: Replay, series: str, after: float) -> float:
    found = re.search(rf"^{series}\S* (\S+)$", replay.at(BEGIN + after).page.decode(), re.M)
    return float(found[1])


@pytest.mark.parametrize(("speed", "after"), [(1.0, 4.5), (10.0, 0.45)])
def test_replayed_page_appears_at_its_recorded_time(speed: float, after: float) -> None:
    assert value(replayed(speed), "vllm:num_requests_running", after) == 140


def test_timestamps_are_shifted_to_the_replay() -> None:
    assert value(replayed(), "process_start_time_seconds", 0) == BEGIN - 100
    assert value(replayed(10.0), "process_start_time_seconds", 0) == BEGIN - 10
    assert value(replayed(), "diag_vllm_log_event_timestamp_seconds", 2) == BEGIN
    assert value(replayed(), "diag_vllm_log_event_timestamp_seconds", 0) == 0


def test_counters_continue_and_gauges_restart_at_the_end_of_a_replay() -> None:
    counters = ("vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_bucket")
    for after, count, gauge in ((6, 160, 160), (8, 160, 100), (10, 180, 120), (16, 220, 100)):
        assert [value(replayed(), name, after) for name in counters] == [count, count]
        assert value(replayed(), "vllm:num_requests_running", after) == gauge


def test_repeated_recording_keeps_the_start_time_of_the_server() -> None:
    assert value(replayed(), "process_start_time_seconds", 50) == BEGIN - 100


def test_replay_can_hold_the_last_page() -> None:
    assert value(replayed(again=False), "vllm:num_requests_running", 5000) == 160


def test_replayed_lines_without_samples_are_unchanged() -> None:
    assert replayed().at(BEGIN + 9).page.endswith(b"\nodd line\n")


def test_a_server_that_was_started_again_starts_again_at_every_turn() -> None:
    scrapes = [recorded(5), recorded(0)._replace(at=START + 7)]
    assert value(Replay(scrapes, BEGIN, 1.0, again=True), "vllm:generation_tokens_total", 5) == 150


def test_replayed_log_line_has_the_current_time() -> None:
    line = "(EngineCore pid=7) INFO 11-22 17:50:43 [core.py:133] Initializing at 01-01 00:00:00"
    at = datetime(2026, 3, 4, 5, 6, 7).astimezone().timestamp()
    assert restamped(line, at) == line.replace("11-22 17:50:43", "03-04 05:06:07")
    assert restamped("Traceback", at) == "Traceback"


def test_every_page_of_a_recording_is_kept() -> None:
    (scrapes,) = read_pages(RECORDINGS / "engine_dead").scrapes.values()
    assert sum(bool(scrape.failed) for scrape in scrapes) == 20
    assert all(b"vllm:" in scrape.page for scrape in scrapes if not scrape.failed)
