"""Spans in which nothing moves, or in which kernels are compiled, are told as such, and count for nothing else."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from support import rewriting
from support.rewriting import Scrape, scrapes, with_value, write
from support.sampling import sampled
from support.scenarios import Beside, config, gpu, health_check, log, present, text, workers

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report

SPINS = tuple(gpu(rank, utilization_ratio=0.99, power_watts=lambda t: 400 if t < 40 else 150) for rank in (0, 1))
"""Two ranks that busy-wait in a collective from 40 s on: at full utilisation they draw 21 % of the limit."""


def judge(folder: Path, seen: Sequence[Scrape], *beside: Beside) -> Report:
    start = seen[0][0]
    pages = ((at, who, page + (text(at - start, page, beside) if beside else "")) for at, who, page in seen)
    return doctor.run(ObserveOptions([str(write(folder / "recording", pages))]))


def frozen(name: str, after: float, seconds: int) -> list[Scrape]:
    """A recording whose page stays for so many seconds what it was after the first ones."""
    seen = list(scrapes(name))
    kept = [scrape for scrape in seen if scrape[0] - seen[0][0] <= after]
    last, who, page = kept[-1]
    return kept + [(last + step, who, page) for step in range(2, seconds + 1, 2)]


def seen_every(seconds: float, seen: Sequence[Scrape]) -> list[Scrape]:
    """Scrapes at this interval, the last one included."""
    backwards = [(-at, who, page) for at, who, page in reversed(seen)]
    return [(-at, who, page) for at, who, page in reversed(list(rewriting.thinned(backwards, seconds)))]


def state(report: Report) -> str:
    (progress,) = report.progress
    return progress.state


@sampled("every", [2, 5, 10, 15, 30, 32, 45], 3)
@pytest.mark.parametrize(("name", "after"), [("queue_saturation", 40), ("cure_max_num_seqs_mean", 60)])
def test_equal_pages_are_a_stall_at_every_cadence(tmp_path: Path, name: str, after: float, every: float) -> None:
    """At 32 s, three equal pages with requests in flight were "busy"."""
    report = judge(tmp_path, seen_every(every, frozen(name, after, 88)))
    assert state(report) == "stalled"
    assert "engine_stalled" in present(report)


@sampled("every", [5, 15, 32])
@pytest.mark.parametrize(
    ("name", "after", "clock"), [("queue_saturation", 2, ""), ("idle", 2, ""), ("idle", 2, "push")]
)
def test_a_page_that_is_the_same_each_time_is_a_copy(
    tmp_path: Path, name: str, after: float, clock: str, every: float
) -> None:
    """A cache, a file or a Pushgateway answers with it: it was a stall, or an idle server."""
    pushed = "push_time_seconds 1.7e9\n" if clock else ""
    copies = seen_every(every, [(at, who, page + pushed) for at, who, page in frozen(name, after, 180)])
    if clock:  # the Pushgateway's own process works
        copies = list(rewriting.answered(copies))
    report = doctor.run(ObserveOptions([str(write(tmp_path / "recording", copies, copied=True))]))
    assert (report.verdict, present(report)) == ("unknown", set())
    assert "same each time" in report.not_judged[0].why


@sampled("every", [2, 5, 15, 30, 32, 45], 3)
def test_scheduler_that_admits_nothing_is_no_stalled_engine_at_any_cadence(tmp_path: Path, every: float) -> None:
    report = judge(tmp_path, seen_every(every, frozen("admission_deadlock", 40, 88)))
    assert "engine_stalled" not in present(report)


def test_single_long_prefill_is_no_stall_for_two_minutes(tmp_path: Path) -> None:
    """A restart during one is worse than a late verdict."""
    seen = frozen("idle", 60, 88)
    begun = seen[-1][0] - 88
    one = [
        (at, who, with_value(page, "vllm:num_requests_running{", "1.0") if at > begun else page)
        for at, who, page in seen
    ]
    for every in (6, 15, 30, 32):
        report = judge(tmp_path / str(every), seen_every(every, one))
        assert (state(report), present(report)) == ("slow", set())


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ((gpu(utilization_ratio=0.99, power_watts=400),), "slow"),
        ((gpu(utilization_ratio=0.0, power_watts=110),), "idle"),
        ((gpu(utilization_ratio=0.0, power_watts=300),), "idle"),
        ((workers(1.0),), "slow"),
        ((workers(0.02),), "idle"),
        ((workers(1.0, 1.0),), "idle"),  # the workers of several ranks busy-wait for the engine
    ],
)
def test_one_long_step_from_idleness_is_not_idle(tmp_path: Path, beside: tuple[Beside, ...], expected: str) -> None:
    """Until a step of a minute ends, vLLM's page shows neither its request nor a token."""
    report = judge(tmp_path, frozen("idle", 60, 60), health_check, *beside)
    assert (state(report), report.verdict) == (expected, "healthy")


def test_standstill_is_no_idleness(tmp_path: Path) -> None:
    """A rank stopped while no request was running: the gauges show none from then on."""
    idle = judge(tmp_path / "idle", frozen("healthy_after_cascade", 60, 120), gpu(0, utilization_ratio=0.0))
    assert "engine_underfed" in {found.diagnosis.incident.id for found in idle.present}
    still = frozen("healthy_after_cascade", 60, 120)
    for number, beside in enumerate(((workers(1.0, 0.0), config(tensor_parallel_size=2)), (gpu(),))):
        report = judge(tmp_path / str(number), still, *beside)
        assert "engine_underfed" not in {found.diagnosis.incident.id for found in report.present}


def test_compilation_is_no_prefill(tmp_path: Path) -> None:
    seen = list(scrapes("contention_bigbatch"))
    start = log("ready", {}, start=seen[0][0])
    assert "prefill_decode_contention" in present(judge(tmp_path / "log", seen, start))
    compiles = log("ready", {}, start=seen[0][0], compiled_while_serving=-10)
    assert present(judge(tmp_path / "compiles", seen, compiles)) & {
        "prefill_decode_contention",
        "compiling_while_serving",
    } == {"compiling_while_serving"}


def test_stall_in_the_first_steps_is_told_at_once_if_gpus_busy_wait(tmp_path: Path) -> None:
    def first_steps(page: str) -> str:
        return with_value(page, "vllm:iteration_tokens_total_count{", "40.0")

    seen = [(at, who, first_steps(page)) for at, who, page in frozen("queue_saturation", 40, 36)]
    assert state(judge(tmp_path / "unknown", seen)) == "slow"
    computes = judge(tmp_path / "computes", seen, gpu(0), gpu(1))
    assert "engine_stalled" not in present(computes)
    report = judge(tmp_path / "spins", seen, *SPINS, config(tensor_parallel_size=2))
    assert state(report) == "stalled"
    assert present(report) & {"engine_stalled", "tp_communication_stall"}
