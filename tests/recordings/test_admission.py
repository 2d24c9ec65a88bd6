"""A scheduler that admits nobody is told from an engine that hangs, and advised without a restart."""

from collections.abc import Callable
from functools import reduce
from pathlib import Path

import pytest
from support import rewriting
from support.scenarios import found

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report
from diag.report.answer import choose_actions

GAUGE = 'vllm:num_requests_{}{{engine="0",model_name="tiny"'


STEPS = 'vllm:iteration_tokens_total_count{engine="0",model_name="tiny"}'


def still(
    folder: Path, *, running: int = 0, waiting: int = 0, deferred: int = 0, beside: str = "", steps: int = 1000
) -> Report:
    """An idle server's pages, on which nothing moves, with these requests in it, after so many steps."""
    return pages(folder, lambda _: beside, running=running, waiting=waiting, deferred=deferred, steps=steps)


def pages(
    folder: Path,
    beside: Callable[[float], str],
    *,
    running: int = 0,
    waiting: int = 0,
    deferred: int = 0,
    steps: int = 1000,
) -> Report:
    """Return the pages with the exporter's samples beside vLLM's page at each time."""

    def page(text: str) -> str:
        for name, value in {"running": running, "waiting": waiting}.items():
            text = rewriting.with_value(text, GAUGE.format(name), f"{value}.0")
        for reason, value in {"capacity": waiting - deferred, "deferred": deferred}.items():
            text = rewriting.with_value(text, GAUGE.format("waiting_by_reason") + f',reason="{reason}"', f"{value}.0")
        return rewriting.with_value(text, STEPS, f"{steps}.0")

    changed = rewriting.changed(rewriting.scrapes("idle"), page)
    scrapes = ((t, host, text + beside(t)) for t, host, text in changed)
    return doctor.run(ObserveOptions([str(rewriting.write(folder, scrapes))]))


def present(report: Report) -> set[str]:
    """The critical ones."""
    return {each.diagnosis.incident.id for each in report.present if each.diagnosis.severity == "critical"}


@pytest.mark.parametrize("waiting", [1, 5])
def test_requests_that_wait_while_none_runs_are_not_admitted(tmp_path: Path, waiting: int) -> None:
    report = still(tmp_path, waiting=waiting)
    assert present(report) == {"admission_deadlock"}
    assert [progress.state for progress in report.progress] == ["stalled"]


def test_running_requests_without_progress_are_a_stall(tmp_path: Path) -> None:
    assert present(still(tmp_path, running=2, waiting=3)) == {"engine_stalled"}


def test_stopped_engine_without_admissions_is_named_as_stopped(tmp_path: Path) -> None:
    halted = 'diag_vllm_process_state{pid="7",host="h",role="engine",rank="0",state="stopped"} 1\n'
    assert present(still(tmp_path, waiting=3, beside=f"{halted}diag_vllm_up 1\n")) == {"engine_stalled"}


def test_requests_that_are_all_deferred_wait_for_something_else(tmp_path: Path) -> None:
    assert "admission_deadlock" not in present(still(tmp_path, waiting=3, deferred=3))


def test_immediate_mitigation_is_no_restart(tmp_path: Path) -> None:
    proposals = found(still(tmp_path, waiting=3), "admission_deadlock").proposals
    now = [proposal for proposal in proposals if not proposal.fix.restart]
    assert "Drop the request" in now[0].text
    assert [proposal.text for proposal in proposals if "restart it" in proposal.text.lower()] == []


def test_a_cache_that_is_full_although_nothing_runs_is_freed_by_a_restart_alone(tmp_path: Path) -> None:
    held = rewriting.changed(
        rewriting.scrapes("idle"),
        lambda text: rewriting.with_value(
            rewriting.with_value(text, GAUGE.format("waiting"), "3.0"), "vllm:kv_cache_usage_perc{", "1.0"
        ),
    )
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path, held))]))
    stacks, first, *others = found(report, "admission_deadlock").proposals
    assert stacks.name == "diag doctor --stacks" and first.text.startswith("Restart the server now")
    assert not [each for each in others if "Drop the request" in each.text or each.fix.flag.startswith("--max-model")]


@pytest.mark.parametrize("full", [200, 300])
def test_a_leak_begins_with_the_full_cache_not_with_the_last_token(tmp_path: Path, full: int) -> None:
    """Two requests run until 300 s, with fewer and fewer blocks; then none does, and others wait."""
    scrapes = list(rewriting.scrapes("idle"))
    pages = []
    for at, host, text in scrapes:
        t = (at - scrapes[0][0]) * 10
        values = {
            GAUGE.format("running"): 2.0 * (t < 300),
            GAUGE.format("waiting"): 3.0 * (t >= min(full, 300)),
            "vllm:kv_cache_usage_perc{": 1.0 if t >= full else 0.8,
            "vllm:generation_tokens_total{": 5000 + 50 * min(t, 300),
        }
        changed = reduce(lambda page, pair: rewriting.with_value(page, pair[0], f"{pair[1]}"), values.items(), text)
        pages.append((scrapes[0][0] + t, host, changed))
    since = found(
        doctor.run(ObserveOptions([str(rewriting.write(tmp_path, pages))])), "admission_deadlock"
    ).diagnosis.since
    assert since is not None and abs(since - scrapes[0][0] - full) <= 30


@pytest.mark.parametrize(("contexts", "is_proposed"), [(2, True), (40, False)])
def test_a_prompt_is_admitted_by_its_first_chunk_only_where_few_whole_ones_fit(
    tmp_path: Path, contexts: int, is_proposed: bool
) -> None:
    report = still(tmp_path, waiting=3, beside=f'diag_vllm_config{{flag="kv_cache_max_concurrency"}} {contexts}\n')
    finding = found(report, "admission_deadlock")
    assert any("--no-scheduler-reserve-full-isl" in each.text for each in finding.proposals) == is_proposed
    fix = choose_actions(finding, report).fix
    assert fix is not None and "reserve-full-isl" not in fix.text + fix.name


def asked(**calls: int) -> str:
    """How often these paths were called, as vLLM's HTTP server counts them."""
    line = 'http_requests_total{{handler="/{}",method="POST",status="2xx"}} {}\n'
    return "".join(line.format(path, number) for path, number in calls.items())


PAUSED = 'diag_vllm_log_event_last_timestamp_seconds{event="scheduler_paused"} 1100\n'
RESUMED = 'diag_vllm_log_event_last_timestamp_seconds{event="scheduler_resumed"} '
BY_LOG = f"{PAUSED}diag_vllm_startup_last_progress_timestamp_seconds 1000\ndiag_vllm_up 1\n"


@pytest.mark.parametrize("shown", [asked(pause=1), asked(pause=3, resume=2), f"{BY_LOG}{RESUMED}0\n"])
@pytest.mark.parametrize("requests", [{"running": 2}, {"waiting": 3}, {}])
def test_paused_scheduler_is_reported_as_paused(tmp_path: Path, shown: str, requests: dict[str, int]) -> None:
    report = still(tmp_path, beside=shown, **requests)
    assert present(report) == set()
    assert [progress.state for progress in report.progress] == ["asleep"]
    assert "POST /resume" in report.progress[0].reason


RESUMED_BY_LOG = f"{BY_LOG}{RESUMED}1200\n"


@pytest.mark.parametrize("shown", [asked(pause=2, resume=2), RESUMED_BY_LOG, RESUMED_BY_LOG + asked(pause=2, resume=1)])
def test_a_scheduler_that_was_resumed_is_not_paused(tmp_path: Path, shown: str) -> None:
    assert present(still(tmp_path, running=2, beside=shown)) == {"engine_stalled"}


COMPILED = 'diag_vllm_log_event_last_timestamp_seconds{{event="compiled_while_serving"}} {}\n'


@pytest.mark.parametrize("compiles", [True, False])
def test_a_step_that_may_compile_is_no_stall_yet(tmp_path: Path, compiles: bool) -> None:
    """One of an engine's first ones, or one of which the log says so."""
    *_, (now, _, _) = rewriting.scrapes("idle")
    shown = {"beside": COMPILED.format(now - 30)} if compiles else {"steps": 3}
    report = still(tmp_path, running=2, **shown)
    assert (report.verdict, present(report)) == ("unknown", set())
    assert "compiles kernels" in report.not_judged[0].sentence


BY_A_COMPILER, IN_ITS_MAIN_THREAD = "children_cpu_seconds_total", "page_faults_total"


def worked(family: str, rate: float, role: str = "worker") -> Callable[[float], str]:
    """Return the CPU counters of a process of this role, at that rate."""
    return lambda t: f'diag_vllm_process_{family}{{pid="9",role="{role}",rank="0"}} {rate * (t - 1.7e9)}\n'


def adapters(ran: str) -> Callable[[float], str]:
    """A server with LoRA, and the adapters that have run."""
    return lambda _: f'vllm:lora_requests_info{{max_lora="1",running_lora_adapters="{ran}"}} 1\n'


@pytest.mark.parametrize(
    "beside",
    [worked(BY_A_COMPILER, 0.5), worked(IN_ITS_MAIN_THREAD, 5000), adapters("")],
    ids=["compiler", "main_thread", "first_adapter"],
)
def test_a_step_that_compiles_without_a_line_in_the_log_is_no_stall_yet(
    tmp_path: Path, beside: Callable[[float], str]
) -> None:
    """The first request with an image or an adapter, to an engine that has served for long."""
    report = pages(tmp_path, beside, running=2)
    assert (report.verdict, present(report)) == ("unknown", set())
    assert "compiles kernels" in report.not_judged[0].sentence


@pytest.mark.parametrize(
    "beside",
    [worked(BY_A_COMPILER, 0.5, "api_server"), worked(BY_A_COMPILER, 0), worked(IN_ITS_MAIN_THREAD, 1), adapters("a")],
    ids=["api_server", "no_compiler", "hangs", "adapter_ran"],
)
def test_unrelated_compiler_does_not_excuse_a_stall(tmp_path: Path, beside: Callable[[float], str]) -> None:
    assert present(pages(tmp_path, beside, running=2)) == {"engine_stalled"}


def test_an_engine_that_compiled_long_ago_is_stalled(tmp_path: Path) -> None:
    (now, _, _), *_ = rewriting.scrapes("idle")
    assert present(still(tmp_path, running=2, beside=COMPILED.format(now - 300))) == {"engine_stalled"}
