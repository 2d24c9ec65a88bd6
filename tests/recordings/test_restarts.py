"""A server that is being started is not dead, however long it takes; one that crashes again and again is in a loop."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from support import rewriting, scenarios
from support.paths import RECORDINGS
from support.scenarios import Beside, crashed, found, judge, log, present, workers

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.core.metric_families import Sample

DIED = next(iter(rewriting.scrapes("engine_dead")))[0]
"""The first scrape; its server was killed 24 s later."""
LOADS = log("load_weights", {"load_weights": 3}, start=DIED + 40)
READY = log("ready", {}, silent=3600, start=DIED)
FAILED = log("load_weights", {}, silent=5, start=DIED + 40, engine_start_failed=1)


def started(ago: float, seen: float = 40.0) -> Beside:
    """A server process that was started so long before the last scrape, seen from then on."""
    return lambda t: [("diag_vllm_process_start_time_seconds", (), DIED + 60 - ago)] if t > seen else []


def ended(beside: Beside) -> Beside:
    """Return the pages until the server died."""
    return lambda t: beside(t) if t < 24 else []


DEAD: dict[str, tuple[Beside, ...]] = {
    "its page alone": (),
    "a log that ends": (READY,),
    "a process that has served before": (workers(1.0), started(ago=7200)),
    "a start whose processes have ended": (LOADS, ended(workers(1.0)), ended(started(ago=90, seen=0))),
    "a start without a line for hours": (log("load_weights", {}, silent=4000, start=DIED),),
}
STARTS: dict[str, tuple[Beside, ...]] = {
    "by its log": (LOADS,),
    "by its log and its processes": (LOADS, workers(1.0), started(ago=30)),
    "by its process, before the log has a line of it": (READY, workers(1.0), started(ago=15)),
    "by its process alone": (workers(1.0), started(ago=15)),
}


@pytest.mark.parametrize("name", DEAD)
def test_a_server_that_nothing_starts_is_dead(tmp_path: Path, name: str) -> None:
    assert "engine_dead" in present(judge(tmp_path, "engine_dead", *DEAD[name]))


@pytest.mark.parametrize("name", STARTS)
def test_a_server_that_is_being_started_is_not_dead(tmp_path: Path, name: str) -> None:
    report = judge(tmp_path, "engine_dead", *STARTS[name])
    assert not [
        each for each in report.present if each.diagnosis.incident.id == "engine_dead" and each.diagnosis.ongoing
    ]


@pytest.mark.parametrize("state", [LOADS, FAILED], ids=["starting", "failed"])
def test_a_server_that_crashed_three_times_is_in_a_loop(tmp_path: Path, state: Beside) -> None:
    report = judge(tmp_path, "engine_dead", state, crashed(3))
    assert found(report, "crash_loop").diagnosis.primary
    assert all(each.diagnosis.explained_by for each in report.present if not each.diagnosis.primary)


def test_a_server_that_crashed_twice_is_in_no_loop(tmp_path: Path) -> None:
    report = judge(tmp_path, "engine_dead", FAILED, crashed(2))
    assert present(report) == {"startup_failed", "engine_dead"}
    assert found(report, "engine_dead").diagnosis.explained_by == "startup_failed"


def test_a_server_without_a_log_is_in_a_loop_when_its_process_was_replaced_three_times(tmp_path: Path) -> None:
    def replaced(times: int) -> Beside:
        return lambda t: [("diag_vllm_process_start_time_seconds", (), DIED - 10 + min(t // 10, times))]

    assert "crash_loop" in present(judge(tmp_path, "engine_dead", replaced(3)))
    assert "crash_loop" not in present(judge(tmp_path, "engine_dead", replaced(2)))


@pytest.mark.parametrize("begun", [lambda at: at // 10, lambda at: at // 10 % 2])
def test_two_servers_that_answer_at_one_address_in_turn_are_in_no_loop(
    tmp_path: Path, begun: Callable[[float], float]
) -> None:
    pages = [*rewriting.scrapes("healthy")]
    first = pages[0][0]
    turns = [
        (time, host, rewriting.with_value(page, "process_start_time_seconds", f"{first - 900 + begun(time - first)}"))
        for time, host, page in pages
    ]
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", turns))]))
    assert ("crash_loop" in present(report), report.verdict) == (
        (True, "critical") if begun(40) > 1 else (False, "unknown")
    )
    assert ["two servers answer" in each.why for each in report.not_judged] == [True] * (begun(40) <= 1)


FAILED_START = "usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --max-num-sequences\n"


def test_a_loop_of_failed_starts_began_with_the_first_that_failed(tmp_path: Path) -> None:
    """A server that does not answer while it starts has not crashed."""

    def failures(t: float) -> Iterable[Sample]:
        yield "diag_vllm_log_consecutive_crashes", (), float(sum(t >= at for at in (20, 35, 50)))

    loop = found(judge(tmp_path, "", log("load_weights", {"load_weights": 3}), failures), "crash_loop").diagnosis
    assert loop.since == pytest.approx(loop.instants[-1] - 40, abs=5)


def kept(folder: Path, recording: str, until: str, then: str) -> Path:
    """The log of a recording up to a line, and what came after it."""
    log = (RECORDINGS / recording / "server.log").read_text(encoding="utf-8").partition(until)[0]
    (folder / "recording").mkdir()
    (folder / "recording" / "server.log").write_text(log.rpartition("\n")[0] + "\n" + then)
    return folder


@pytest.mark.parametrize(("starts", "expected"), [(0, "engine_dead"), (1, "startup_failed"), (2, "crash_loop")])
def test_starts_that_fail_without_a_head_are_seen_behind_a_server_that_died(
    tmp_path: Path, starts: int, expected: str
) -> None:
    folder = kept(tmp_path, "engine_dead", "Parent process exited", FAILED_START * starts)
    report = judge(folder, "engine_dead")
    assert found(report, expected).diagnosis.primary
    assert [quote.text[:20] for quote in found(report, expected).quotes] == ["api_server.py: error"] * bool(starts)


def test_failed_starts_in_client_input_make_no_incident(tmp_path: Path) -> None:
    assert not present(judge(kept(tmp_path, "healthy", "Shutting down", FAILED_START * 9), "healthy"))


@pytest.mark.parametrize("event", ["cuda_error", "cuda_out_of_memory", "assertion"])
def test_a_fault_that_ends_a_server_again_and_again_leads_the_loop(tmp_path: Path, event: str) -> None:
    """Between two crashes the server answers, and the fault itself is over; the loop that it causes goes on."""
    begun = next(rewriting.scrapes("healthy"))[0]
    scrapes = [(begun + 4 * (at - begun), host, text) for at, host, text in rewriting.scrapes("healthy")]
    fault = {} if event == "assertion" else {event: -80.0}
    before, down, after = (
        log("ready", {}, silent, begun, **ends)
        for silent, ends in ((600, {}), (600, {"engine_dead": -80, **fault}), (-160, {"engine_dead": -80, **fault}))
    )

    def page(t: float, text: str) -> str:
        shown = "" if 80 <= t < 160 else rewriting.with_value(text, "process_start_time_seconds", f"{begun + (t > 80)}")
        return shown + scenarios.text(t, shown, ((after if t >= 160 else down), crashed(3)) if t > 80 else (before,))

    pages = ((at, host, page(at - begun, text)) for at, host, text in scrapes)
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages))]))
    (lead,) = (each.diagnosis for each in report.present if each.diagnosis.primary)
    leads = {"cuda_error": "engine_device_fault", "cuda_out_of_memory": "gpu_out_of_memory"}
    assert (lead.incident.id, lead.severity, lead.ongoing) == (leads.get(event, "crash_loop"), "critical", True)
    assert found(report, "crash_loop").diagnosis.ongoing
