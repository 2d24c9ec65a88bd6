"""A process that the kernel has halted is named, with what lets it go on; a stall that is over is told as one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import rewriting

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Finding, Report
from diag.report import terminal

STATES = ("stopped", "traced", "uninterruptible", "zombie")
STOP, CONT = 20, 62
"""Seconds of the recording at which EngineCore got SIGSTOP and SIGCONT."""


def host(role: str, rank: str, state: str, host: str, *, halted: bool, pid: str) -> str:
    """Return an exporter's samples of one process; without a host, only that the process is halted."""
    process = f'pid="{pid}",role="{role}",rank="{rank}"'
    lines = [
        f"diag_vllm_process_stopped{{{process}}} {halted:d}",
        f"diag_vllm_process_cpu_seconds_total{{{process}}} 9",
    ]
    states = [(name, int(halted and name == state)) for name in STATES] if host else []
    return "\n".join(
        [*lines, *(f'diag_vllm_process_state{{{process},host="{host}",state="{name}"}} {v}' for name, v in states), ""]
    )


def look(
    folder: Path, begin: float, end: float, *, role: str = "engine", rank: str = "0", state: str = "stopped",
    on: str = "gpu-7", recording: str = "engine_stalled", pids: tuple[str, ...] = ("4711",),
) -> Report:  # fmt: skip
    """So many seconds of the recording with its process table."""

    def scrapes() -> Iterator[rewriting.Scrape]:
        pages = list(rewriting.scrapes(recording))
        for time, instance, page in pages:
            at = time - pages[0][0]
            if begin <= at <= end:
                halted = STOP <= at < CONT
                yield (
                    time,
                    instance,
                    page + "".join(host(role, rank, state, on, halted=halted, pid=pid) for pid in pids),
                )

    return doctor.run(ObserveOptions([str(rewriting.write(folder, scrapes()))]))


def stall(report: Report) -> Finding:
    return next(each for each in report.present if each.diagnosis.incident.id == "engine_stalled")


def commands(finding: Finding) -> list[str]:
    return [proposal.name for proposal in finding.proposals]


@pytest.mark.parametrize(
    ("state", "on", "command"),
    [
        ("stopped", "gpu-7", "kill -CONT 4711   # on gpu-7"),
        ("stopped", "", "kill -CONT 4711   # on its host"),
        ("traced", "gpu-7", "grep TracerPid /proc/4711/status   # on gpu-7"),
        ("uninterruptible", "gpu-7", "cat /proc/4711/wchan; sudo cat /proc/4711/stack   # on gpu-7"),
    ],
)
def test_stopped_engine_is_named_with_the_command_that_resumes_it(
    tmp_path: Path, state: str, on: str, command: str
) -> None:
    report = look(tmp_path, 25, 55, state=state, on=on)
    assert stall(report).diagnosis.culprits == (f"{state} engine 0 PID 4711 on {on or 'its host'}",)
    assert commands(stall(report))[0] == command
    assert "py-spy" not in terminal.render(report, verbose=True)
    assert command in terminal.render(report)


def test_two_stopped_processes_are_two_arguments_and_two_paths(tmp_path: Path) -> None:
    stopped = stall(look(tmp_path / "s", 25, 55, role="worker", pids=("4711", "12")))
    assert commands(stopped)[0] == "kill -CONT 4711 12   # on gpu-7"
    traced = stall(look(tmp_path / "t", 25, 55, role="worker", state="traced", pids=("4711", "12")))
    assert commands(traced)[0] == "grep TracerPid /proc/4711/status /proc/12/status   # on gpu-7"


def test_a_stopped_worker_is_one_of_its_engine(tmp_path: Path) -> None:
    finding = stall(look(tmp_path, 25, 55, role="worker", rank="1"))
    assert finding.diagnosis.culprits == ("stopped worker 1 PID 4711 on gpu-7",)
    assert commands(finding)[0].startswith("kill -CONT 4711")


def test_a_process_of_another_engine_is_not_named(tmp_path: Path) -> None:
    finding = stall(look(tmp_path, 25, 55, rank="1"))
    assert finding.diagnosis.culprits == ()
    assert "diag doctor --stacks" in commands(finding)


def test_an_engine_that_is_stopped_while_idle_is_stalled(tmp_path: Path) -> None:
    report = look(tmp_path, 0, 59, recording="idle")
    assert (report.verdict, [each.state for each in report.progress]) == ("critical", ["stalled"])


def test_single_scrape_in_uninterruptible_sleep_or_under_a_debugger_is_no_stall(tmp_path: Path) -> None:
    for state in ("uninterruptible", "traced"):
        assert look(tmp_path / state, 0, STOP + 4, state=state, recording="healthy").verdict == "healthy"


def times(diagnosis: Diagnosis, first: float) -> tuple[float | None, float | None, bool]:
    since, until = diagnosis.since, diagnosis.until
    return since and round(since - first), until and round(until - first), diagnosis.ongoing


@pytest.mark.parametrize("on", ["gpu-7", ""])
def test_past_stall_has_its_start_and_end(tmp_path: Path, on: str) -> None:
    """The stall is dated by process states, and by the counters alone; one scrape early or late."""
    report = look(tmp_path, 0, 100, on=on)
    since, until, ongoing = times(stall(report).diagnosis, report.observed.start)
    assert since is not None and abs(since - STOP) <= 2
    assert until is not None and abs(until - CONT) <= 2
    assert (ongoing, report.verdict) == (False, "warning")
    assert not any("CONT" in name for name in commands(stall(report)))


def test_observation_that_begins_in_a_stall_reports_its_end(tmp_path: Path) -> None:
    report = look(tmp_path, 48, 78)
    since, until, ongoing = times(stall(report).diagnosis, report.observed.start - 48)
    assert (since, ongoing, report.verdict) == (None, False, "warning")
    assert until is not None and abs(until - CONT) <= 2
    assert "   ended " in terminal.render(report).splitlines()[0]


def test_a_stopped_api_server_is_no_dead_one_to_restart(tmp_path: Path) -> None:
    """Its page stays away; the process table shows why."""

    def scrapes() -> Iterator[rewriting.Scrape]:
        for time, instance, page in rewriting.scrapes("engine_dead"):
            table = host("api_server", "0", "stopped", "gpu-7", halted=not page, pid="4711")
            roles = "".join(f'diag_vllm_processes{{role="{role}"}} 1\n' for role in ("api_server", "engine"))
            yield time, instance, f"{page}{table}{roles}diag_vllm_up {int(bool(page))}\n"

    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path, scrapes()))]))
    primary = report.present[0]
    assert (primary.diagnosis.incident.id, commands(primary)[0]) == ("engine_dead", "kill -CONT 4711   # on gpu-7")
