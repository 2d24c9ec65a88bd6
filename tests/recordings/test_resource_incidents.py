"""Memory and CPU of the host, faults of a device, compilation: named by what shows each, and by nothing like it."""

import random
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from support import rewriting
from support.scenarios import GIB, Beside, cpu, found, gpu, judge, log, memory, present, started, text, workers
from support.simulated_vllm import Engine, Limits, Request, page

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.core.metric_families import Sample
from diag.diagnosis.report import Report

HEALTHY = next(iter(rewriting.scrapes("healthy")))[0]
DEAD = next(iter(rewriting.scrapes("engine_dead")))[0]


STARVED = "host_cpu_starved"


def primary(report: Report) -> set[str]:
    """The incidents that nothing else explains, without the infos."""
    return {name for name in present(report) if found(report, name).diagnosis.explained_by is None}


# -- host memory ------------------------------------------------------------------------------------------------------


def leak(t: float) -> float:
    return 0.93 + 0.0005 * t


def test_memory_exhaustion_names_the_growing_process(tmp_path: Path) -> None:
    report = judge(tmp_path, "healthy", memory(leak, engine=lambda t: 8 * GIB + 0.0005 * t * 64 * GIB))
    one = found(report, "host_memory_exhausted").diagnosis
    assert present(report) == {"host_memory_exhausted"}
    assert [each.partition(" grows")[0] for each in one.culprits] == ["engine 0 PID 91"]
    changes = [each.fix.change for each in found(report, "host_memory_exhausted").proposals]
    assert any(change.startswith("Drain this server") for change in changes)
    assert not any(change.startswith("Find the process of this host") for change in changes)


def test_memory_that_another_program_takes_is_not_blamed_on_vllm(tmp_path: Path) -> None:
    report = judge(tmp_path, "healthy", memory(leak))
    assert found(report, "host_memory_exhausted").diagnosis.culprits == ()
    changes = [each.fix.change for each in found(report, "host_memory_exhausted").proposals]
    assert any(change.startswith("Find the process of this host") for change in changes)


ROOM: dict[str, Beside] = {
    "much in use, and no more": memory(lambda _: 0.97),
    "much in use, up and down": memory(lambda t: 0.96 + 0.01 * (int(t / 4) % 2)),
    "fast growth with much room": memory(lambda t: 0.3 + 0.003 * t),
    "slow growth": memory(lambda t: 0.91 + 0.000001 * t),
    "growth that ended": memory(lambda t: min(0.90 + 0.001 * t, 0.905)),
    "one large allocation": memory(lambda t: 0.92 if t < 20 else 0.95),
    "page cache that meets the limit": memory(lambda _: 0.7, hits=lambda t: 50 * t),
    "page cache that meets the limit, and use that grows slowly": memory(lambda t: 0.7 + 0.0002 * t, hits=lambda t: t),
}


@pytest.mark.parametrize("name", ROOM)
def test_memory_that_does_not_run_out_is_no_incident(tmp_path: Path, name: str) -> None:
    assert judge(tmp_path, "healthy", ROOM[name]).verdict == "healthy"


def test_a_group_that_grows_into_its_limit_is_told_before_the_kill(tmp_path: Path) -> None:
    """It took a third of its limit within a minute, and is not nearly full yet."""
    report = judge(tmp_path, "healthy", memory(lambda t: 0.5 + 0.005 * t, hits=lambda t: max(t - 20, 0)))
    assert primary(report) == {"host_memory_exhausted"}


def test_nearly_full_memory_with_few_samples_is_unknown(tmp_path: Path) -> None:
    scrapes = list(rewriting.scrapes("healthy"))[::15]
    pages = ((t, host, page + text(t - HEALTHY, page, [memory(leak)])) for t, host, page in scrapes)
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "rare", pages))]))
    (one,) = (each.diagnosis for each in report.findings if each.diagnosis.incident.id == "host_memory_exhausted")
    assert one.state == "unknown"


def test_memory_growth_during_a_start_is_no_incident(tmp_path: Path) -> None:
    loading = log("load_weights", {"process_start": 20, "load_weights": 100})
    assert not present(judge(tmp_path, "", loading, workers(1.0), memory(leak)))


def test_a_kill_in_the_servers_cgroup_is_the_cause_of_its_death(tmp_path: Path) -> None:
    report = judge(tmp_path, "engine_dead", memory(lambda t: 0.5 if t > 24 else 0.99, kills=lambda t: float(t > 24)))
    assert found(report, "engine_dead").diagnosis.explained_by == "host_memory_exhausted"
    assert primary(report) == {"host_memory_exhausted"}


def test_a_kill_on_the_host_when_the_server_ended_is_the_cause_of_its_death(tmp_path: Path) -> None:
    def killed(_: float) -> Iterable[Sample]:
        yield "diag_host_last_oom_kill_timestamp_seconds", (), DEAD + 25
        yield "diag_vllm_last_up_timestamp_seconds", (), DEAD + 24

    report = judge(tmp_path, "engine_dead", killed)
    assert found(report, "engine_dead").diagnosis.explained_by == "host_memory_exhausted"


def test_kill_before_the_first_scrape_is_dated_by_the_log(tmp_path: Path) -> None:
    """The kernel's log says when; the server had ended before it was first looked at."""

    def killed(_: float) -> Iterable[Sample]:
        yield "diag_host_last_oom_kill_timestamp_seconds", (), 1_700_000_000.0 - 30

    gone = log("ready", {}, 600, engine_dead=29, worker_died=30)
    report = judge(tmp_path, "", gone, killed)
    assert primary(report) == {"host_memory_exhausted"}
    assert "kernel_oom_kill" in found(report, "engine_dead").diagnosis.culprits


def test_a_kill_elsewhere_on_the_host_is_no_incident_of_a_server_that_serves(tmp_path: Path) -> None:
    def killed(t: float) -> Iterable[Sample]:
        yield "diag_host_last_oom_kill_timestamp_seconds", (), HEALTHY + 20
        yield "diag_vllm_last_up_timestamp_seconds", (), HEALTHY + t

    assert judge(tmp_path, "healthy", killed, memory(lambda _: 0.5)).verdict == "healthy"


# -- CPU --------------------------------------------------------------------------------------------------------------

BUSY: dict[str, Beside] = {
    "pressure": cpu(pressure=0.95),
    "pressure, and processes that get their share": cpu(0.2, pressure=0.95),
    "a quota that is met now and then": cpu(0.1, pressure=0.3, throttled=0.1),
}


@pytest.mark.parametrize("name", BUSY)
def test_busy_host_without_late_tokens_is_no_cpu_starvation(tmp_path: Path, name: str) -> None:
    assert judge(tmp_path, "healthy", BUSY[name]).verdict == "healthy"


def test_an_engine_that_waits_for_a_cpu_is_starved_by_what_its_own_fast_tokens_took(tmp_path: Path) -> None:
    """A real server with a CPU quota, of which nothing but the wait of its processes is seen: 9 ms a token, now 47."""
    hidden = re.compile(r"^diag_host_.*\n", re.MULTILINE)
    pages = [(t, host, hidden.sub("", page)) for t, host, page in rewriting.scrapes("host_cpu_starved")]
    assert present(doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "hidden", pages))]))) >= {STARVED}


@pytest.mark.parametrize(
    ("times", "waited", "throttled", "starved"),
    [
        (2, 0.6, 0, True),
        (1, 0.6, 0, False),
        (2, 0.1, 0, False),
        (2, 0.45, 0.8, True),
        (1, 0.45, 0.8, False),
        (2, 0.3, 0.2, False),
        (2, None, 0.8, True),
        (1, None, 0.8, False),
    ],
)
def test_tokens_that_take_twice_as_long_as_usual_are_starved_of_a_cpu_that_is_waited_for_or_withheld_by_a_quota(
    tmp_path: Path, times: float, waited: float | None, throttled: float, starved: bool
) -> None:
    """All tokens come faster than anybody reads, 28 ms at first; from the 400th second on the CPU is missing."""
    draw, begun = random.Random(4), 1_795_000_000.0
    beside = (cpu(waited and 0.01), cpu(waited, pressure=0.5, throttled=throttled), workers(0.9))
    engine = Engine(Limits(step=0.027), begun - 3600)
    engine.now = at = begun
    while (at := at + draw.expovariate(1.0)) < begun + 800:
        engine.send(Request(at, 500, draw.randint(100, 300)))
    pages = []
    for time in range(15, 800, 15):
        engine.run(begun + time)
        if time == 405:
            engine.limits = replace(engine.limits, step=0.027 * times, each=engine.limits.each * times)
        shown = page([engine])
        late = max(time - 405, 0)
        pages.append((begun + time, "h:1", shown + text(late, shown, [beside[time >= 405], beside[2]])))
    assert (STARVED in present(doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "r", pages))])))) == starved


def test_waiting_that_no_stream_feels_is_no_cpu_starvation(tmp_path: Path) -> None:
    assert STARVED not in present(judge(tmp_path, "healthy", cpu(0.84, pressure=0.95)))


@pytest.mark.parametrize(("pressure", "starved"), [(0.9, True), (0.1, False)])
def test_cpu_pressure_with_long_steps_counts_without_process_wait_times(
    tmp_path: Path, pressure: float, starved: bool
) -> None:
    """A real server whose clock is set to run 120 times as fast: its steps take two seconds each."""
    scrapes = list(rewriting.scrapes("queue_saturation"))
    pages = ((120 * (t - scrapes[0][0]), host, page) for t, host, page in scrapes)
    slow = ((1.7e9 + t, host, page + text(t, page, [cpu(pressure=pressure)])) for t, host, page in pages)
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "slow", slow))]))
    assert ("host_cpu_starved" in present(report)) == starved


# -- a fault of the device --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", ["cuda_error", "nccl_timeout"])
def test_a_fault_of_the_device_is_the_cause_of_the_death(tmp_path: Path, event: str) -> None:
    report = judge(tmp_path, "engine_dead", log("ready", {}, 600, DEAD, engine_dead=-25, **{event: -24}))
    assert primary(report) == {"engine_device_fault"}
    assert found(report, "engine_device_fault").diagnosis.culprits == (event,)
    assert found(report, "engine_dead").diagnosis.explained_by == "engine_device_fault"
    variables = {"cuda_error": "CUDA_LAUNCH_BLOCKING", "nccl_timeout": "NCCL_DEBUG"}
    changes = "\n".join(each.fix.change for each in found(report, "engine_device_fault").proposals)
    assert {name for name in variables.values() if name in changes} == {variables[event]}


def test_an_error_of_the_program_that_the_driver_reports_is_the_cause_of_the_death(tmp_path: Path) -> None:
    report = judge(tmp_path, "engine_dead", gpu(xid_errors_total__31=lambda t: float(t > 22)))
    assert found(report, "engine_dead").diagnosis.explained_by == "engine_device_fault"


def test_lost_gpu_is_the_cause_of_engine_death_and_device_fault(tmp_path: Path) -> None:
    lost = gpu(up=lambda t: float(t < 22), xid_errors_total__79=lambda t: float(t > 22))
    report = judge(tmp_path, "engine_dead", lost, log("ready", {}, 600, DEAD, engine_dead=-25, cuda_error=-24))
    assert primary(report) == {"gpu_fault"}


NO_FAULT: dict[str, tuple[str, tuple[Beside, ...]]] = {
    "before the last start": ("healthy", (log("ready", {}, 60, HEALTHY, cuda_error=600),)),
    "in the log of a server that serves": ("healthy", (log("ready", {}, 600, HEALTHY, cuda_error=60),)),
    "of another program on its GPU": ("idle", (gpu(xid_errors_total__31=lambda t: float(t > 20)), started(1.0))),
    "of a start": ("", (log("load_weights", {}, 50, engine_start_failed=49, cuda_error=49),)),
}


@pytest.mark.parametrize("name", NO_FAULT)
def test_error_without_an_engine_death_is_no_device_fault(tmp_path: Path, name: str) -> None:
    page, beside = NO_FAULT[name]
    assert "engine_device_fault" not in present(judge(tmp_path, page, *beside))


# -- compilation ------------------------------------------------------------------------------------------------------


def test_a_compilation_that_no_stream_feels_is_no_incident(tmp_path: Path) -> None:
    compiled = log("ready", {}, 600, HEALTHY, compiled_while_serving=-10)
    assert judge(tmp_path, "healthy", compiled).verdict == "healthy"
