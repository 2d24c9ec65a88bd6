"""A dead server is named from any single thing that shows it, and by nothing that only looks like it."""

from pathlib import Path

import pytest
from support import rewriting
from support.scenarios import Beside, found, judge, log, present, said, started

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report

IDLE = next(iter(rewriting.scrapes("idle")))[0]
HEALTHY = next(iter(rewriting.scrapes("healthy")))[0]
KILLED = next(iter(rewriting.scrapes("engine_dead")))[0]
NEVER = 1_700_000_000.0
"""The first scrape of a vLLM that never answers."""


def run(**roles: int) -> Beside:
    """So many processes run in each role; a role that is not named was never seen."""
    return lambda _: [("diag_vllm_processes", (role,), number) for role, number in roles.items()]


def ends(after: float) -> Beside:
    """The engine's process is gone so many seconds after the first scrape."""
    return lambda t: run(api_server=1, engine=int(t < after))(t)


def answered(ago: float) -> Beside:
    """The exporter has seen vLLM's page, last so long before the first scrape."""
    return lambda _: [("diag_vllm_last_up_timestamp_seconds", (), NEVER - ago)]


def dead(report: Report) -> set[str]:
    """The incidents, where the state of all engines is dead; otherwise the states."""
    states = {progress.state for progress in report.progress}
    return present(report) if states == {"dead"} else states


SHOWS: dict[str, tuple[str, tuple[Beside, ...]]] = {
    "the log, behind a page that answers": ("idle", (log("ready", {}, 600, IDLE, engine_dead=60),)),
    "the log alone": ("", (log("", {}, 600, engine_dead=60),)),
    "a log that only ends": ("", (log("ready", {}, 600),)),
    "no engine process behind a page that answers": ("idle", (run(api_server=1, engine=0),)),
    "no process at all": ("", (run(api_server=0, engine=0),)),
    "an exporter that has seen its page": ("", (answered(ago=120),)),
    "a worker that died": ("", (log("", {}, 600, worker_died=60),)),
}


@pytest.mark.parametrize("name", SHOWS)
def test_single_source_is_enough_to_report_a_dead_engine(tmp_path: Path, name: str) -> None:
    page, beside = SHOWS[name]
    report = judge(tmp_path, page, *beside)
    assert dead(report) == {"engine_dead"}
    assert (report.verdict, found(report, "engine_dead").diagnosis.ongoing) == ("critical", True)


@pytest.mark.parametrize(("answers", "verdict"), [("1", "critical"), ("111111110", "critical"), ("1000", "unknown")])
def test_a_row_of_failed_scrapes_is_chance_where_most_of_them_fail(tmp_path: Path, answers: str, verdict: str) -> None:
    """The last 30 s of a busy server, after a minute in which its pages come, or come now and then."""
    pages = list(rewriting.scrapes("contention_smallbatch"))
    last = pages[-1][0] - 30
    kept = (
        (at, who, page if answers[k % len(answers)] == "1" and at < last else "")
        for k, (at, who, page) in enumerate(pages)
    )
    assert doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", kept))])).verdict == verdict


@pytest.mark.parametrize(("answers", "verdict"), [("1110", "healthy"), ("10000", "no_incident")])
def test_a_page_that_mostly_does_not_come_shows_no_health(tmp_path: Path, answers: str, verdict: str) -> None:
    pages = rewriting.scrapes("healthy")
    kept = [(at, who, page if answers[k % len(answers)] == "1" else "") for k, (at, who, page) in enumerate(pages)]
    last = max(k for k, (_, _, page) in enumerate(kept) if page)
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", kept[: last + 1]))]))
    assert report.verdict == verdict
    assert ["most pages" in item.lacks for item in report.health.missing] == [True] * (verdict != "healthy")


LIVES: dict[str, tuple[str, tuple[Beside, ...]]] = {
    "a death before the last start": ("idle", (log("ready", {}, 60, IDLE, engine_dead=600),)),
    "a death in the log of another server": ("healthy", (log("ready", {}, 600, HEALTHY, engine_dead=60),)),
    "an engine that is somewhere else": ("healthy", (run(api_server=1, engine=0),)),
    "an engine that was never seen": ("idle", (run(api_server=1),)),
    "a page that is not found of an engine that is there": ("", (log("ready", {}, 600), run(api_server=1, engine=1))),
    "an answer two days ago": ("", (answered(ago=2 * 86_400),)),
    "an engine that ended as it was told, before its page": (
        "idle",
        (ends(40), log("ready", {}, 600, IDLE, shut_down=-38)),
    ),
    "an orderly shutdown": ("engine_dead", (log("", {}, 600, KILLED, shut_down=-24),)),
}


@pytest.mark.parametrize("name", LIVES)
def test_signs_of_life_exclude_engine_dead(tmp_path: Path, name: str) -> None:
    page, beside = LIVES[name]
    assert "engine_dead" not in present(judge(tmp_path, page, *beside))


@pytest.mark.parametrize(
    ("state", "expected", "verdict"),
    [("zombie", set(), "unknown"), ("stopped", {"dead"}, "critical"), ("uninterruptible", {"starting"}, "unknown")],
)
def test_zombie_or_stopped_process_is_not_a_starting_process(
    tmp_path: Path, state: str, expected: set[str], verdict: str
) -> None:
    server = ("7", "api_server", "0")
    left = [
        ("diag_vllm_process_cpu_seconds_total", server, 19.0),
        ("diag_vllm_process_state", (*server, "h", state), 1),
    ]
    report = judge(tmp_path, "", lambda _: left)
    assert {progress.state for progress in report.progress} == expected
    assert report.verdict == verdict


def test_orderly_shutdown_is_reported(tmp_path: Path) -> None:
    report = judge(tmp_path, "", log("", {}, 600, shut_down=60))
    assert report.verdict == "unknown"
    assert "shut down in order" in report.not_judged[0].sentence


def test_server_that_ignores_sigterm_is_reported(tmp_path: Path) -> None:
    left = [("diag_vllm_process_cpu_seconds_total", ("7", "api_server", "0"), 19.0)]
    told = log("", {}, 600, shut_down=60)
    report = judge(tmp_path / "a", "", told, lambda _: left, started(NEVER - 700))
    assert (report.verdict, present(report)) == ("unknown", set())
    assert "told to stop" in report.not_judged[0].sentence
    again = judge(tmp_path / "b", "", told, lambda _: left, started(NEVER - 1))
    assert [progress.state for progress in again.progress] == ["starting"]


def oom_kill(ago: float) -> Beside:
    """The kernel has killed something for lack of memory so long before the first scrape."""
    return lambda _: [("diag_host_last_oom_kill_timestamp_seconds", (), NEVER - ago)]


CAUSES: dict[str, tuple[Beside, ...]] = {
    "cuda_error": (log("", {}, 600, engine_dead=60, cuda_error=61),),
    "nccl_timeout": (log("", {}, 600, engine_dead=60, nccl_timeout=61),),
    "kernel_oom_kill": (answered(ago=60), oom_kill(ago=50)),
    "killed_by_signal": (log("", {}, 600, engine_dead=60, worker_died=61), said("worker_died", exit_code=-9)),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_cause_of_death_is_named_from_the_log(tmp_path: Path, cause: str) -> None:
    assert cause in found(judge(tmp_path, "", *CAUSES[cause]), "engine_dead").diagnosis.culprits


def test_earlier_out_of_memory_is_not_the_cause_of_death(tmp_path: Path) -> None:
    report = judge(tmp_path, "", answered(ago=3600), oom_kill(ago=60))
    assert found(report, "engine_dead").diagnosis.culprits == ()


def test_error_before_the_last_start_is_not_the_cause_of_death(tmp_path: Path) -> None:
    report = judge(tmp_path, "", log("", {}, 600, engine_dead=60, cuda_error=700))
    assert found(report, "engine_dead").diagnosis.culprits == ()
