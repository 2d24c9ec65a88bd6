"""Episodes: what was short and has ended is a note, what goes on decides, and a restart does not erase a crash."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import rewriting
from support.scenarios import found, present

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report

BEGAN = 1_700_000_000.0


def server(
    folder: Path,
    seconds: int,
    every: float,
    waiting: Callable[[float], int] = lambda _: 0,
    down: tuple[tuple[float, float], ...] = (),
    beside: Callable[[float], str] = lambda _: "",
) -> Report:
    """Judge a server that generates tokens, with requests waiting and times in which it is down, each a restart."""

    def scrapes() -> Iterator[rewriting.Scrape]:
        t, start = 0.0, -7200.0
        while t <= seconds:
            over = [end for begin, end in down if end <= t]
            start = over[-1] - 10 if over else start
            is_down = any(begin <= t < end for begin, end in down)
            yield BEGAN + t, "h:1", "" if is_down else page(t, t - start, BEGAN + start, waiting(t)) + beside(t)
            t += every

    return doctor.run(ObserveOptions([str(rewriting.write(folder / f"{every}", scrapes()))]))


def page(t: float, age: float, start: float, waiting: int) -> str:
    """Return a page of a server whose batch is full while requests wait."""
    labels = 'engine="0",model_name="m"'
    queued = age * 0.01 + 3 * waiting
    return "".join(
        f"{line}\n"
        for line in (
            f"process_start_time_seconds {start}",
            f"vllm:num_requests_running{{{labels}}} {64 if waiting else 8}",
            f"vllm:num_requests_waiting{{{labels}}} {waiting}",
            f"vllm:kv_cache_usage_perc{{{labels}}} {0.2 + t % 7 / 100}",
            f"vllm:generation_tokens_total{{{labels}}} {int(age * 500)}",
            f"vllm:prompt_tokens_total{{{labels}}} {int(age * 900)}",
            f'vllm:request_success_total{{{labels},finished_reason="stop"}} {int(age * 4)}',
            f"vllm:request_queue_time_seconds_sum{{{labels}}} {queued}",
            f"vllm:request_queue_time_seconds_count{{{labels}}} {int(age * 4)}",
            f"vllm:iteration_tokens_total_count{{{labels}}} {int(age * 40)}",
        )
    )


@pytest.mark.parametrize("every", [2, 5, 15, 30])
def test_queue_that_is_gone_in_ten_seconds_is_no_warning(tmp_path: Path, every: float) -> None:
    report = server(tmp_path, 900, every, waiting=lambda t: 170 if 400 <= t < 410 else 0)
    assert (report.verdict, present(report)) == ("healthy", set())


@pytest.mark.parametrize("every", [2, 5, 15, 30])
def test_planned_restart_on_a_page_alone_is_a_note(tmp_path: Path, every: float) -> None:
    report = server(tmp_path, 1200, every, down=((500, 602),))
    assert (report.verdict, present(report)) == ("healthy", set())
    (dead,) = (each.diagnosis for each in report.findings if each.diagnosis.incident.id == "engine_dead")
    assert (dead.state, len(dead.episodes), dead.ongoing) == ("absent", 1, False)


@pytest.mark.parametrize("every", [2, 5])
def test_two_outages_within_four_minutes_are_told(tmp_path: Path, every: float) -> None:
    report = server(tmp_path, 360, every, down=((60, 100), (200, 240)))
    dead = found(report, "engine_dead").diagnosis
    assert (report.verdict, dead.severity, len(dead.episodes), dead.ongoing) == ("warning", "warning", 2, False)


def crash_log(at: float) -> Callable[[float], str]:
    """Return the samples of a log that shows a crash at that second, once it has happened."""

    def beside(t: float) -> str:
        text = (
            'event="cuda_error",process="EngineCore",file="server.log",line="7",text="illegal memory access",cause=""'
        )
        event = "diag_vllm_log_event_last_timestamp_seconds"
        lines = [f'{event}{{event="engine_dead"}} {BEGAN + at if t >= at else 0}']
        lines += [f"diag_vllm_log_crash_timestamp_seconds{{{text}}} {BEGAN + at}"] if t >= at else []
        return "\n".join(["diag_vllm_up 1", *lines]) + "\n"

    return beside


def test_crash_stays_told_after_the_restart_for_a_quarter_of_an_hour(tmp_path: Path) -> None:
    report = server(tmp_path, 200, 2, down=((60, 100),), beside=crash_log(60))
    crashed = found(report, "server_crashed")
    assert (report.verdict, crashed.diagnosis.primary, crashed.diagnosis.ongoing) == ("warning", True, True)
    assert crashed.diagnosis.since == BEGAN + 60
    assert "cuda_error" in crashed.diagnosis.culprits
    assert [quote.text for quote in crashed.quotes] == ["illegal memory access"]
    later = server(tmp_path / "later", 1200, 15, down=((60, 100),), beside=crash_log(60))
    assert "server_crashed" not in {each.diagnosis.incident.id for each in later.present if each.diagnosis.ongoing}
    assert later.verdict == "healthy"
