"""Episodes: what was short and has ended is a note, what goes on decides, and a restart does not erase a crash."""

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from support import healthy_loads, rewriting
from support.paths import RECORDINGS
from support.sampling import sampled
from support.scenarios import found, present

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.core.formatting import clock
from diag.diagnosis.report import Report
from diag.report import terminal
from diag.report.answer import answers as answers_of
from diag.report.answer import verdicts

BEGAN = 1_700_000_000.0


def server(
    folder: Path,
    seconds: int,
    every: float,
    waiting: Callable[[float], int] = lambda _: 0,
    down: tuple[tuple[float, float], ...] = (),
    beside: Callable[[float], str] = lambda _: "",
    running: Callable[[float], int] = lambda _: 8,
) -> Report:
    """Judge a server that generates tokens, with requests waiting and times in which it is down, each a restart."""

    def scrapes() -> Iterator[rewriting.Scrape]:
        t, start = 0.0, -7200.0
        while t <= seconds:
            over = [end for begin, end in down if end <= t]
            start = over[-1] - 10 if over else start
            is_down = any(begin <= t < end for begin, end in down)
            yield (
                BEGAN + t,
                "h:1",
                "" if is_down else page(t, t - start, BEGAN + start, waiting(t), running(t)) + beside(t),
            )
            t += every

    return doctor.run(ObserveOptions([str(rewriting.write(folder / f"{every}", scrapes()))]))


def page(t: float, age: float, start: float, waiting: int, running: int = 8) -> str:
    """Return a page of a server whose batch is full while requests wait."""
    labels = 'engine="0",model_name="m"'
    queued = age * 0.01 + 3 * waiting
    return "".join(
        f"{line}\n"
        for line in (
            f"process_start_time_seconds {start}",
            f"vllm:num_requests_running{{{labels}}} {64 if waiting else running}",
            f"vllm:num_requests_waiting{{{labels}}} {waiting}",
            f"vllm:kv_cache_usage_perc{{{labels}}} {0.2 + t % 7 / 100}",
            f"vllm:generation_tokens_total{{{labels}}} {int(age * 500)}",
            f"vllm:prompt_tokens_total{{{labels}}} {int(age * 900)}",
            f"vllm:num_preemptions_total{{{labels}}} 0",
            f'vllm:request_success_total{{{labels},finished_reason="stop"}} {int(age * 4)}',
            f'vllm:request_success_total{{{labels},finished_reason="error"}} 0',
            f"vllm:request_queue_time_seconds_sum{{{labels}}} {queued}",
            f"vllm:request_queue_time_seconds_count{{{labels}}} {int(age * 4)}",
            f"vllm:iteration_tokens_total_count{{{labels}}} {int(age * 40)}",
            f"vllm:time_to_first_token_seconds_count{{{labels}}} {int(age * 4)}",
            f"vllm:inter_token_latency_seconds_count{{{labels}}} {int(age * 496)}",
            f'vllm:time_to_first_token_seconds_bucket{{{labels},le="+Inf"}} {int(age * 4)}',
            f'vllm:inter_token_latency_seconds_bucket{{{labels},le="+Inf"}} {int(age * 496)}',
            f"vllm:e2e_request_latency_seconds_count{{{labels}}} {int(age * 4)}",
        )
    )


@sampled("every", [2, 5, 15, 30], 2)
def test_queue_that_is_gone_in_ten_seconds_is_no_warning(tmp_path: Path, every: float) -> None:
    report = server(tmp_path, 900, every, waiting=lambda t: 170 if 400 <= t < 410 else 0)
    assert (report.verdict, present(report)) == ("healthy", set())


@sampled("every", [5, 15])
def test_queue_that_has_begun_a_minute_ago_is_told_in_a_look_at_a_quarter_of_an_hour(
    tmp_path: Path, every: float
) -> None:
    """Over the five minutes of the alert, there is no queue yet."""
    report = server(tmp_path, 900, every, waiting=lambda t: 170 if t >= 820 else 0)
    assert "queue_saturation" in present(report)
    assert report.verdict in ("warning", "critical")
    assert abs((found(report, "queue_saturation").diagnosis.since or 0) - (BEGAN + 820)) <= every + 10


def test_replicas_are_proposed_for_what_arrives_not_for_the_backlog(tmp_path: Path) -> None:
    """Three requests arrive for two that are answered: the backlog of ten minutes is 170 times what a second brings."""
    report = server(tmp_path, 900, 15, waiting=lambda t: int(max(0.0, t - 300)) * 2)
    texts = [proposal.text for proposal in found(report, "queue_saturation").proposals]
    assert next(text for text in texts if "replicas" in text).startswith("Run 2 replicas")


@sampled("every", [5, 15, 30])
def test_a_cap_that_no_source_names_is_that_of_a_flat_line(tmp_path: Path, every: float) -> None:
    """Requests wait, the KV cache has room, and 64 run at every scrape."""
    report = server(tmp_path, 1200, every, waiting=lambda t: 170 if t >= 500 else 0)
    fix = next(each for each in found(report, "queue_saturation").proposals if each.name == "--max-num-seqs")
    assert (fix.before, fix.assumed, fix.needs) == (64.0, False, ())


@sampled("every", [5, 15])
def test_replicas_where_clients_give_up_are_those_of_what_arrives(tmp_path: Path, every: float) -> None:
    """Twelve requests a second arrive, of which four are answered: the backlog ends at the time-out of a gateway."""

    def given_up(t: float) -> str:
        answered = (7200 + t) * 4 + 8 * max(0.0, t - 500)
        lengths = f'{{engine="0",model_name="m"}} {(7200 + t) * 4 * 125:.0f}'
        return (
            f'http_requests_total{{{ROUTE},status="2xx"}} {answered:.0f}\n'
            f"vllm:request_generation_tokens_sum{lengths}\n"
            f'vllm:request_generation_tokens_count{{engine="0",model_name="m"}} {(7200 + t) * 4:.0f}\n'
        )

    report = server(tmp_path, 1200, every, waiting=lambda t: 400 if t >= 500 else 0, beside=given_up)
    texts = [proposal.text for proposal in found(report, "queue_saturation").proposals]
    assert next(text for text in texts if "replicas" in text).startswith("Run 3 replicas")


@sampled("every", [5, 15])
def test_engine_that_has_not_moved_for_forty_seconds_is_not_healthy(tmp_path: Path, every: float) -> None:
    def stopped() -> Iterator[rewriting.Scrape]:
        t = 0.0
        while t <= 900:
            seen = min(t, 860.0)
            yield BEGAN + t, "h:1", page(seen, seen + 7200, BEGAN - 7200, 0)
            t += every

    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "stopped", stopped()))]))
    assert report.verdict not in ("healthy", "unknown")


@sampled(("every", "back"), [(2, 602), (5, 602), (15, 602), (30, 602), (15, 540), (30, 550)], 3)
def test_restart_on_a_page_alone_is_a_note_and_no_proof_of_health(tmp_path: Path, every: float, back: float) -> None:
    """Eight requests were in flight before: whether they were answered, only the log tells."""
    report = server(tmp_path, 1200, every, down=((500, back),))
    assert (report.verdict, present(report)) == ("no_incident", set())
    ((name, lacks, at),) = report.health.missing
    assert (name, at) == ("requests before a restart", "h:1")
    assert (
        lacks == f"the log of the restart at {clock(BEGAN + back - 10)}, before which up to 8 requests were in flight"
    )
    (dead,) = (each.diagnosis for each in report.findings if each.diagnosis.incident.id == "engine_dead")
    assert (dead.state, len(dead.episodes), dead.ongoing) == ("absent", int(back > 600), False)


def test_restart_without_requests_is_healthy(tmp_path: Path) -> None:
    report = server(tmp_path, 1200, 15, down=((500, 602),), running=lambda t: 0 if 400 < t < 620 else 8)
    assert (report.verdict, present(report)) == ("healthy", set())


@sampled("every", [5, 15])
@pytest.mark.parametrize(
    ("pages", "drained", "failing", "end", "verdict"),
    [
        (999, True, 0, 1000, "healthy"),
        (999, True, 0, 800, "healthy"),
        (17, True, 0, 700, "healthy"),
        (999, True, 0, 640, "unknown"),
        (3, True, 0, 1000, "unknown"),
        (999, False, 0, 1000, "unknown"),
        (999, True, 20, 1000, "unknown"),
        (999, True, 400, 1000, "critical"),
    ],
    ids=[
        *("drained", "for three minutes", "it came and went", "for half a minute", "few pages"),
        *("with requests in flight", "after failed scrapes", "it fails to the end"),
    ],
)
def test_only_a_replica_that_left_in_order_leaves_the_verdict_to_the_others(
    tmp_path: Path, every: float, pages: int, drained: bool, failing: float, end: float, verdict: str
) -> None:
    def replicas() -> Iterator[rewriting.Scrape]:
        for t in np.arange(0.0, end, every).tolist():
            yield BEGAN + t, "h:1", page(t, t + 7200, BEGAN - 7200, 0)
            if 600 - pages * every <= t < 600 + failing:
                answered = page(t, t + 7200, BEGAN - 7200, 0, 0 if drained and t > 560 else 8)
                yield BEGAN + t, "h:2", answered if t < 600 else ""

    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", replicas()))]))
    assert report.verdict == verdict
    assert report.gone == (("h:2",) if verdict == "healthy" else ())
    assert ("gone" in {defect.kind for defect in report.observed.defects}) == (end >= 700 and verdict != "critical")
    assert end == 640 or all("no longer scraped" in unknown.why for unknown in report.not_judged)


NO_DEATH = 'diag_vllm_log_event_last_timestamp_seconds{event="engine_dead"} 0\n'


@pytest.mark.parametrize(
    ("end", "log", "verdict"),
    [(1300, "", "no_incident"), (1200, "", "healthy"), (1300, NO_DEATH, "healthy")],
    ids=["lately", "over 15 minutes ago", "a log shows what happened in it"],
)
def test_a_gap_of_one_replica_in_which_its_process_ended_is_no_health(
    tmp_path: Path, end: float, log: str, verdict: str
) -> None:
    """The pages of its neighbour go on."""

    def replicas() -> Iterator[rewriting.Scrape]:
        for t in np.arange(0.0, 2190, 10).tolist():
            yield BEGAN + t, "h:1", page(t, t + 7200, BEGAN - 7200, 0) + log
            if t < 600 or t >= end:
                begun = BEGAN - 7200 if t < 600 else BEGAN + end - 60
                yield BEGAN + t, "h:2", page(t, BEGAN + t - begun, begun, 0) + log

    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", replicas()))]))
    assert report.verdict == verdict


@pytest.mark.parametrize(
    ("every", "kept", "verdict"),
    [(10, 150, "no_incident"), (5, 60, "no_incident"), (10, 20, "healthy"), (1, 10, "healthy")],
)
def test_pages_of_a_cache_that_keeps_them_for_minutes_prove_no_health(
    tmp_path: Path, every: float, kept: float, verdict: str
) -> None:
    def copies() -> Iterator[rewriting.Scrape]:
        for t in np.arange(0.0, 700 // kept * kept + kept + every, every).tolist():
            old = t - t % kept
            cpu = f"process_cpu_seconds_total {700 + old / 10}\n"
            yield BEGAN + t, "h:1", page(old, old + 7200, BEGAN - 7200, 0) + cpu

    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "copies", copies(), copied=True))]))
    assert (report.verdict, present(report)) == (verdict, set())


@sampled("every", [2, 5])
def test_two_outages_within_four_minutes_are_told(tmp_path: Path, every: float) -> None:
    report = server(tmp_path, 360, every, down=((60, 100), (200, 240)))
    dead = found(report, "engine_dead").diagnosis
    assert (report.verdict, dead.severity, len(dead.episodes), dead.ongoing) == ("warning", "warning", 2, False)


# -- an episode begins at the first scrape that shows it ---------------------------------------------------------------

ROUTE = 'handler="/v1/completions",method="POST"'


def answers(status: str, share: float, since: float, age: float = 7200) -> Callable[[float], str]:
    """Return the counters of four answers a second, of which a share has this status from a time on.

    `age`: seconds for which the server has answered before the first scrape.
    """

    def beside(t: float) -> str:
        others = share * 4 * max(0.0, t - since)
        lines = [f'http_requests_total{{{ROUTE},status="2xx"}} {(age + t) * 4 - others:.0f}']
        lines += [f'http_requests_total{{{ROUTE},status="{status}"}} {others:.0f}'] if others else []
        return "\n".join(lines) + "\n"

    return beside


SIGNS: dict[str, tuple[float, dict[str, object]]] = {
    "queue_saturation": (502, {"waiting": lambda t: int(max(0.0, t - 490) * 0.8)}),
    "requests_failing": (240, {"beside": answers("5xx", 0.5, 240)}),
    "crash_loop": (301, {"down": ((301, 381), (520, 600), (760, 840), (1000, 1080))}),
    "engine_dead": (1101, {"down": ((1101, 2000),)}),
}


@pytest.mark.parametrize("incident", SIGNS)
@sampled("every", [5, 15, 30])
def test_an_episode_is_dated_by_the_first_scrape_that_shows_it(tmp_path: Path, incident: str, every: float) -> None:
    """The windows that prove an incident, and the third crash of a loop, show it much later."""
    truth, how = SIGNS[incident]
    since = found(server(tmp_path, 1200, every, **how), incident).diagnosis.since  # type: ignore[arg-type]
    assert since is not None
    assert abs(since - (BEGAN + truth)) <= every + 5


def test_a_loop_of_crashes_began_with_the_first_one_and_not_with_a_restart_before(tmp_path: Path) -> None:
    """The server is restarted at +30 s; its log counts the crashes, and line 1 is no younger than the loop."""
    down = ((30, 65), (103, 160), (221, 280), (339, 400), (457, 600))
    report = server(
        tmp_path,
        480,
        5,
        down=down,
        beside=lambda t: f"diag_vllm_log_consecutive_crashes {sum(begin <= t for begin, _ in down[1:])}\n",
    )
    (answer,) = answers_of(report, clock)
    assert (answer.incident, answer.since) == ("crash_loop", found(report, "crash_loop").diagnosis.since)
    assert answer.since == BEGAN + 105


@sampled("every", [5, 15])
def test_requests_that_wait_by_habit_do_not_date_a_queue(tmp_path: Path, every: float) -> None:
    """A few of 64 requests wait at every scrape of a busy server, long before its queue begins."""
    report = server(tmp_path, 1200, every, waiting=lambda t: 3 if t < 800 else 170)
    since = found(report, "queue_saturation").diagnosis.since
    assert since is not None
    assert abs(since - (BEGAN + 800)) <= 15


@sampled(("every", "age"), [(5, 7200), (15, 7200), (30, 7200), (15, 0)], 2)
def test_a_wave_of_refused_requests_goes_on_beyond_its_window(tmp_path: Path, every: float, age: float) -> None:
    """A baseline that holds the wave itself would end it after eight minutes."""
    report = server(tmp_path, 2400, every, beside=answers("4xx", 0.5, 420, age))
    wave = found(report, "client_errors_surge").diagnosis
    assert (report.verdict, wave.severity, wave.ongoing) == ("warning", "warning", True)
    assert wave.end == wave.instants[-1]  # JSON has it as `until`, also where the baseline leaves the end unknown
    assert abs((wave.since or 0) - (BEGAN + 420)) <= every + 5


def test_a_steady_share_of_refused_requests_is_no_wave(tmp_path: Path) -> None:
    report = server(tmp_path, 1500, 15, beside=answers("4xx", 0.3, -7200))
    assert "client_errors_surge" not in {each.diagnosis.incident.id for each in report.present}


# -- a cause goes on while what it broke is not mended -----------------------------------------------------------------


@sampled("every", [5, 15, 30])
def test_a_kill_for_memory_goes_on_while_the_server_is_down(tmp_path: Path, every: float) -> None:
    """The count of kills leaves its window after five minutes; nothing has started the server again."""

    def scrapes() -> Iterator[rewriting.Scrape]:
        t = 0.0
        while t <= 1500:
            kills = f'diag_host_memory_events_total{{event="oom_kill"}} {int(t >= 600)}\n'
            shown = page(t, t + 7200, BEGAN - 7200, 0) + "diag_vllm_up 1\n" if t < 600 else "diag_vllm_up 0\n"
            yield BEGAN + t, "h:1", shown + kills
            t += every

    killed = found(
        doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "killed", scrapes()))])), "host_memory_exhausted"
    )
    assert (killed.diagnosis.primary, killed.diagnosis.ongoing, killed.diagnosis.severity) == (True, True, "critical")


@pytest.mark.parametrize(("since", "fault"), [(500, True), (-1, False)])
@sampled("every", [5, 15, 30])
def test_a_kind_of_xid_that_appears_is_an_error_of_a_gpu_that_was_read_before(
    tmp_path: Path, every: float, since: float, fault: bool
) -> None:
    def errors(t: float) -> str:
        xid = 'diag_gpu_xid_errors_total{gpu="0",uuid="G",xid="119"} 1\n'
        return 'diag_gpu_up{gpu="0",uuid="G"} 1\n' + xid * (t >= since)

    report = server(tmp_path, 900, every, beside=errors)
    assert ("gpu_fault" in {each.diagnosis.incident.id for each in report.present}) == fault
    if fault:
        diagnosis = found(report, "gpu_fault").diagnosis
        assert "Xid 119" in diagnosis.culprits
        assert abs((diagnosis.since or 0) - BEGAN - since) <= every


def told_to_stop(folder: Path, every: float, running: int, drains: bool) -> Report:
    """The report on a release before 0.28, which logs that it was told to stop, and nothing of those in flight."""
    event = "diag_vllm_log_event_last_timestamp_seconds"

    def scrapes() -> Iterator[rewriting.Scrape]:
        for t in np.arange(0, 900, every).tolist():
            told = {"shut_down": t >= 601, "drain_started": t >= 600 and drains}
            log = "".join(f'{event}{{event="{name}"}} {(BEGAN + 601) * shown}\n' for name, shown in told.items())
            log += f"diag_vllm_startup_last_progress_timestamp_seconds {BEGAN - 7100}\n"
            up = page(t, t + 7200, BEGAN - 7200, 0, running) + "diag_vllm_up 1\n" if t < 601 else "diag_vllm_up 0\n"
            yield BEGAN + t, "h:1", up + log

    return doctor.run(ObserveOptions([str(rewriting.write(folder, scrapes()))]))


@pytest.mark.parametrize(("running", "drains", "cut"), [(37, False, True), (37, True, False), (0, False, False)])
@sampled("every", [5, 15, 30])
def test_requests_on_the_last_page_before_a_shutdown_without_a_drain_are_cut_off(
    tmp_path: Path, every: float, running: int, drains: bool, cut: bool
) -> None:
    report = told_to_stop(tmp_path / f"{every}", every, running, drains)
    assert ("shutdown_drops_requests" in {each.diagnosis.incident.id for each in report.present}) == cut
    if cut:
        shutdown = found(report, "shutdown_drops_requests").diagnosis
        assert (shutdown.primary, shutdown.since, shutdown.severity) == (True, BEGAN + 601, "warning")
        assert any(reading.value == running and reading.holds for reading in shutdown.supports)


def test_between_slow_scrapes_a_load_balancer_may_have_drained_a_server(tmp_path: Path) -> None:
    report = told_to_stop(tmp_path, 60, 37, drains=False)
    states = {each.diagnosis.incident.id: each.diagnosis.state for each in report.findings}
    assert states["shutdown_drops_requests"] == "unknown"


@pytest.mark.parametrize(("reset", "ongoing"), [(None, True), (900, False)])
@sampled("every", [5, 15, 30])
def test_a_memory_error_goes_on_until_the_gpu_is_reset(
    tmp_path: Path, every: float, reset: float | None, ongoing: bool
) -> None:
    def errors(t: float) -> str:
        gone = reset is not None and t >= reset
        return (
            'diag_gpu_up{gpu="0",uuid="G"} 1\n'
            f'diag_gpu_xid_errors_total{{gpu="0",uuid="G",xid="94"}} {int(t >= 500)}\n'
            f'diag_gpu_ecc_errors_total{{gpu="0",uuid="G",kind="uncorrected"}} {2 * (t >= 500 and not gone)}\n'
        )

    fault = found(server(tmp_path, 1200, every, beside=errors), "gpu_fault").diagnosis
    assert (fault.ongoing, fault.severity) == (ongoing, "critical" if ongoing else "warning")
    assert "Xid 94" in fault.culprits


@pytest.mark.parametrize(("pressure", "ongoing"), [(0.4, True), (0.0, False)])
def test_a_full_cgroup_that_stalls_for_memory_is_about_to_be_killed(
    tmp_path: Path, pressure: float, ongoing: bool
) -> None:
    def memory(t: float) -> str:
        return (
            f"diag_host_memory_limit_bytes 1e11\ndiag_host_memory_used_bytes {min(5e10 + 2.5e8 * t, 9.9e10)}\n"
            f'diag_host_memory_events_total{{event="max"}} {10 * max(t - 200, 0)}\n'
            f'diag_host_pressure_ratio{{resource="memory"}} {pressure * (t > 200)}\n'
        )

    assert found(server(tmp_path, 1000, 5, beside=memory), "host_memory_exhausted").diagnosis.ongoing is ongoing


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
    assert (report.verdict, crashed.diagnosis.primary, crashed.diagnosis.ongoing) == ("warning", True, False)
    assert crashed.diagnosis.since == BEGAN + 60 and abs((crashed.diagnosis.end or 0) - BEGAN - 100) <= 4
    assert "cuda_error" in crashed.diagnosis.culprits
    assert [quote.text for quote in crashed.quotes] == ["illegal memory access"]
    later = server(tmp_path / "later", 1200, 15, down=((60, 100),), beside=crash_log(60))
    assert "server_crashed" not in {each.diagnosis.incident.id for each in later.present if each.diagnosis.ongoing}
    assert (later.verdict, "Next time" in terminal.render(later)) == ("healthy", True)


@pytest.mark.parametrize("killed", [True, False], ids=["by the kernel", "by itself"])
def test_a_crash_for_lack_of_memory_is_told_with_more_of_it(tmp_path: Path, killed: bool) -> None:
    def beside(t: float) -> str:
        kill = f"diag_host_last_oom_kill_timestamp_seconds {BEGAN + 60}\n" if t >= 60 else ""
        return (f"diag_vllm_up 1\n{kill}") if killed else crash_log(60)(t)

    proposals = found(server(tmp_path, 200, 2, down=((60, 100),), beside=beside), "server_crashed").proposals
    assert any(each.text.startswith("Give the server more host memory") for each in proposals) == killed


@pytest.mark.parametrize(("kills", "cause"), [(1, "host_memory_exhausted"), (0, None)])
def test_the_kill_for_memory_leads_a_crash_that_is_over(tmp_path: Path, kills: int, cause: str | None) -> None:
    def beside(t: float) -> str:
        kill = f"diag_host_last_oom_kill_timestamp_seconds {BEGAN + 60}\n" if t >= 60 else ""
        return f'diag_vllm_up 1\n{kill}diag_host_memory_events_total{{event="oom_kill"}} {kills * (t >= 60)}\n'

    report = server(tmp_path, 700, 5, down=((60, 180),), beside=beside)
    crashed = found(report, "server_crashed").diagnosis
    assert (report.verdict, crashed.ongoing, crashed.explained_by) == ("warning", False, cause)


# -- the log of a server that was started again ----------------------------------------------------------------------

LOG = (RECORDINGS / "engine_device_fault" / "server.log").read_text(encoding="utf-8").splitlines(keepends=True)
SERVED = next(at for at, line in enumerate(LOG) if "Application startup complete" in line) + 1
FAULT = next(at for at, line in enumerate(LOG) if "illegal memory access" in line)
START, CRASH = LOG[:SERVED], LOG[FAULT:]
DIED = datetime(2026, 11, 21, 3, 16, 41, tzinfo=UTC).timestamp()


def shifted(lines: list[str], seconds: float) -> list[str]:
    """Return the lines of a log with later times."""

    def later(found: re.Match[str]) -> str:
        at = datetime.strptime(f"2026-{found[0]}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
        return (at + timedelta(seconds=seconds)).strftime("%m-%d %H:%M:%S")

    return [re.sub(r"\b11-21 \d\d:\d\d:\d\d", later, line) for line in lines]


def first_time(lines: list[str]) -> float:
    """Return the unix time of the first line that has one."""
    text = next(found[0] for line in lines if (found := re.search(r"11-21 \d\d:\d\d:\d\d", line)))
    return datetime.strptime(f"2026-{text}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()


def started_at(at: float, *, serves: bool) -> list[str]:
    """Return the log of a start at a unix time."""
    return shifted(START if serves else START[: SERVED * 2 // 3], at - first_time(START))


def restarted(folder: Path, began: float, start: float, log: list[str], *, answers: bool) -> Report:
    """Judge a minute of pages from `began` on, of the process that was started at `start`, with this log."""
    healthy = list(rewriting.scrapes("healthy"))
    pages = (
        (
            began + time - healthy[0][0],
            host,
            rewriting.with_value(page, "process_start_time_seconds", f"{start}") if answers else "",
        )
        for time, host, page in healthy
        if time - healthy[0][0] <= 60
    )
    rewriting.write(folder / "recording", pages)
    (folder / "recording" / "server.log").write_text("".join(log), encoding="utf-8")
    return doctor.run(ObserveOptions([str(folder / "recording")]))


def test_start_under_way_twenty_seconds_after_a_crash_does_not_erase_it(tmp_path: Path) -> None:
    log = [*LOG, *started_at(DIED + 20, serves=False)]
    report = restarted(tmp_path, DIED + 25, DIED + 20, log, answers=False)
    crashed = found(report, "server_crashed").diagnosis
    assert (report.verdict, crashed.severity, crashed.ongoing, crashed.since) == ("critical", "critical", True, DIED)
    assert "cuda_error" in crashed.culprits
    assert any(name.startswith("restarting since 03:1") for name in crashed.culprits)
    assert "illegal memory access" in found(report, "server_crashed").quotes[0].text


def test_start_under_way_is_dated_by_the_new_process(tmp_path: Path) -> None:
    """The page before the crash has the start of the old process, and the new one has no page yet."""
    healthy = [each for each in rewriting.scrapes("healthy") if each[0] - next(rewriting.scrapes("healthy"))[0] < 90]
    old = f"{DIED - 7200}"
    pages = [
        (at, host, rewriting.with_value(page, "process_start_time_seconds", old) if at < DIED else "")
        for at, (_, host, page) in zip(np.arange(DIED - 45, DIED + 45, 2), healthy, strict=False)
    ]
    rewriting.write(tmp_path / "recording", pages)
    log = "".join([*LOG, *started_at(DIED + 20, serves=False)])
    (tmp_path / "recording" / "server.log").write_text(log, encoding="utf-8")
    crashed = found(doctor.run(ObserveOptions([str(tmp_path / "recording")])), "server_crashed").diagnosis
    (since,) = (name for name in crashed.culprits if name.startswith("restarting since"))
    at = datetime.strptime(f"2026-11-21 {since.split()[2]}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
    assert abs(at - (DIED + 20)) <= 5, since


def test_crash_before_the_recording_is_told_of_a_server_that_recovered(tmp_path: Path) -> None:
    log = [*LOG, *started_at(DIED + 20, serves=True)]
    report = restarted(tmp_path, DIED + 120, DIED + 15, log, answers=True)
    crashed = found(report, "server_crashed").diagnosis
    assert (report.verdict, crashed.primary, crashed.since) == ("warning", True, DIED)
    assert any(name.startswith("recovered at 03:17:") for name in crashed.culprits)
    assert verdicts(report)[0].startswith("WARNING  server_crashed   ")
    assert "cuda error, recovered at 03:17:" in verdicts(report)[0]
    assert " 2026-11-21 03:16:41 - 03:1" in terminal.render(report)
    assert "Next time" in terminal.render(report)


def test_second_illegal_memory_access_within_four_minutes_is_critical(tmp_path: Path) -> None:
    again = [*started_at(DIED + 20, serves=True), *shifted(CRASH, 120), *started_at(DIED + 140, serves=True)]
    report = restarted(tmp_path, DIED + 200, DIED + 135, [*LOG, *again], answers=True)
    crashed = found(report, "server_crashed").diagnosis
    assert (report.verdict, crashed.severity, crashed.since) == ("critical", "critical", DIED + 120)


def test_crash_in_the_log_that_the_start_time_refutes_is_a_claim(tmp_path: Path) -> None:
    log = [*LOG, *started_at(DIED + 20, serves=True)]
    report = restarted(tmp_path, DIED + 120, first_time(START) - 5, log, answers=True)
    assert not present(report)


def test_a_look_of_half_a_minute_is_dated_and_drawn_by_its_scrapes(tmp_path: Path) -> None:
    report = server(tmp_path, 30, 2.0, waiting=lambda t: int(max(0, 10 * (t - 10))))
    queue = found(report, "queue_saturation").diagnosis
    assert queue.since is not None
    assert BEGAN + 12 <= queue.since <= BEGAN + 20
    waiting = next(
        reading for reading in queue.symptoms if reading.condition.signal.name.startswith("requests waiting")
    )
    assert (waiting.history[0], len(waiting.history) > 8, waiting.history[-1]) == (0, True, 180)


def test_bursts_that_drain_within_seconds_are_no_queue(tmp_path: Path) -> None:
    """Over five minutes, the means of a burst look like a queue; most of the time nobody waits."""
    scrapes = healthy_loads.scraped("bursts that drain", 1, [10.0 * at for at in range(360)], BEGAN)
    recording = rewriting.write(tmp_path / "bursts", ((each.at, each.instance, each.page) for each in scrapes))
    report = doctor.run(ObserveOptions([str(recording)]))
    assert "queue_saturation" not in {finding.diagnosis.incident.id for finding in report.present}


@sampled("every", [5, 15, 60])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_gap_in_the_scrapes_of_one_process_is_an_outage_only_if_its_tokens_stood_still(
    tmp_path: Path, every: float, goes_on: bool
) -> None:
    def scrapes() -> Iterator[rewriting.Scrape]:
        for t in np.arange(0, 1500, every):
            age = 7200 + t - (0 if goes_on else min(max(t - 500, 0), 300))
            yield BEGAN + t, "h:1", "" if 500 <= t < 800 else page(t, age, BEGAN - 7200, 0)

    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "gap", scrapes()))]))
    assert (report.verdict, present(report)) == (("no_incident", set()) if goes_on else ("warning", {"engine_dead"}))
    gaps = [item.lacks.partition(" of ")[0] for item in report.health.missing]
    assert gaps == ["pages"] * goes_on


def test_a_minute_without_an_answer_of_a_process_that_goes_on_is_no_gap_in_health(tmp_path: Path) -> None:
    pages = (
        (BEGAN + t, "h:1", "" if 500 <= t < 545 else page(t, 7200 + t, BEGAN - 7200, 0)) for t in range(0, 1500, 15)
    )
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "short", pages))]))
    assert (report.verdict, report.health.missing) == ("healthy", ())
