"""Planned operations: shutdowns that drop requests, wake-ups without weights, elastic scaling, and what resembles them.

The expert balance of a MoE model and the engine that lags in a standstill are here too: all of them are read off the
log, or off counters that vLLM's page has only while it is run this way.
"""

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import rewriting, thinning
from support.paths import RECORDINGS
from support.rewriting import Scrape
from support.sampling import some
from support.scenarios import Beside, eplb, found, judge, log

from diag.commands import doctor
from diag.commands.observe import ObserveOptions, judge_observation, site
from diag.diagnosis.report import Report
from diag.exposition import render
from diag.sources.recording.reader import read

DROPPED, WEIGHTS, SCALING, EXPERTS = (
    "shutdown_drops_requests",
    "weights_not_reloaded",
    "elastic_scaling",
    "experts_unbalanced",
)
CADENCES = (2.0, 5.0, 15.0, 30.0)


def seen(report: Report) -> set[str]:
    """Return the incidents that hold, or held, with the infos."""
    return {each.diagnosis.incident.id for each in report.present}


def thinned(folder: Path, name: str, every: float) -> Report:
    """Return the report on a recording and its log, scraped so often."""
    files = rewriting.write(folder, rewriting.thinned(rewriting.scrapes(name), every))
    log = RECORDINGS / name / "server.log"
    if log.exists():
        (files / "server.log").write_bytes(log.read_bytes())
    (files / "recording.toml").write_bytes((RECORDINGS / name / "recording.toml").read_bytes())
    return doctor.run(ObserveOptions([str(files)]))


@pytest.mark.parametrize("every", some(CADENCES, 2))
@pytest.mark.parametrize(
    ("recording", "incident"),
    [(DROPPED, DROPPED), (WEIGHTS, WEIGHTS), (EXPERTS, EXPERTS), (SCALING, SCALING)],
)
def test_a_planned_operation_is_recognised_at_each_cadence(
    tmp_path: Path, recording: str, incident: str, every: float
) -> None:
    assert incident in seen(thinned(tmp_path, recording, every))


# -- sleep and weights ------------------------------------------------------------------------------------------------


def called(route: str) -> Callable[[str], str]:
    """Return a change of a page that counts one successful call of a route."""
    return lambda page: page + f'http_requests_total{{handler="{route}",method="POST",status="2xx"}} 1.0\n'


def at_level_1(page: str) -> str:
    return (
        page.replace('sleep_state="weights_offloaded"', 'sleep_state="swap"')
        .replace('sleep_state="discard_all"', 'sleep_state="weights_offloaded"')
        .replace('sleep_state="swap"', 'sleep_state="discard_all"')
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (called("/v1/chat/completions"), True),
        (called("/is_sleeping"), True),
        (called("/collective_rpc"), False),
        (called("/update_weights"), False),
        (called("/finish_weight_update"), False),
        (called("/my_plugin/load"), False),
        (at_level_1, False),
    ],
    ids=["a request", "a question", "reload_weights", "a trainer", "the end of an update", "a plugin", "level 1"],
)
def test_any_call_that_may_load_weights_counts_as_a_reload(
    tmp_path: Path, change: Callable[[str], str], expected: bool
) -> None:
    pages = rewriting.changed(rewriting.thinned(rewriting.scrapes(WEIGHTS), 2), change)
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path, pages))]))
    assert (WEIGHTS in seen(report)) is expected


def in_flight(page: str) -> str:
    return page + 'vllm:rl_weight_update_operations_in_flight{operation="update"} 1.0\n'


def test_an_engine_that_waits_for_a_weight_update_is_not_stalled(tmp_path: Path) -> None:
    """The engine runs the update between two steps: five requests run, and nothing moves."""
    pages = list(rewriting.scrapes("engine_stalled"))
    stretch = [scrape for scrape in pages if 24 <= scrape[0] - pages[0][0] <= 60]
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path, rewriting.changed(stretch, in_flight)))]))
    assert [progress.state for progress in report.progress] == ["asleep"]
    assert "weight update" in report.progress[0].reason
    assert "engine_stalled" not in seen(report)


# -- shutdowns --------------------------------------------------------------------------------------------------------


def fixes_of(report: Report, incident: str) -> str:
    return " ".join(each.text for each in found(report, incident).proposals)


def test_a_shutdown_that_drops_requests_proposes_a_drain_and_names_their_number(tmp_path: Path) -> None:
    report = thinned(tmp_path, DROPPED, 2)
    dropped = found(report, DROPPED)
    assert [each.after for each in dropped.proposals if each.name == "--shutdown-timeout"] == [30]
    assert "server_crashed" not in seen(report)


def test_the_answers_of_a_server_that_scales_explain_its_silence_without_a_log(tmp_path: Path) -> None:
    """The first 90 s, at the end of which it has not answered for 30 s."""
    pages = list(rewriting.scrapes(SCALING))
    told = "# scrape-failed {} {} HTTP 503\ndiag_vllm_elastic_scaling 1\ndiag_vllm_up 0\n"
    text = "".join(
        f"# scrape {at} {host}\n{page}" if page else told.format(at, host)
        for at, host, page in pages
        if at - pages[0][0] <= 90
    )
    (tmp_path / "metrics.prom.gz").write_bytes(gzip.compress(text.encode()))
    report = doctor.run(ObserveOptions([str(tmp_path)]))
    assert (seen(report), {progress.state for progress in report.progress}) == ({SCALING}, {"starting"})


# -- expert and data parallelism --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        (eplb(20_000, 50_000), "present"),
        (eplb(20_000, 23_000), "absent"),
        (eplb(500, 1_500), "absent"),
        (eplb(20_000, 50_000, lines=0.0), "absent"),
        (eplb(20_000, 50_000, "0.31.0"), "unknown"),
        (eplb(20_000, 50_000, "0.9.2"), "unknown"),
        (eplb(20_000, 50_000, "1.0.0"), "present"),
    ],
    ids=["unbalanced", "balanced", "small batches", "no line", "balance of layers", "an old release", "a later one"],
)
def test_expert_balance_is_judged_by_the_tokens_of_the_ranks(tmp_path: Path, beside: Beside, expected: str) -> None:
    report = judge(tmp_path, "healthy", beside)
    (state,) = (each.diagnosis.state for each in report.findings if each.diagnosis.incident.id == EXPERTS)
    assert state == expected


def lagging(page: str, engine: int) -> Iterator[Scrape]:
    """Yield pages of three data-parallel engines that stand still; one uses no CPU while the others busy-wait."""
    page = rewriting.with_value(page, "vllm:num_requests_running{", "3.0")
    every = page + "".join(rewriting.as_engine(page, other) for other in (1, 2))
    for at in range(31):
        cpu = [
            (
                "diag_vllm_process_cpu_seconds_total",
                (str(90 + rank), "engine", str(rank)),
                30.0 + at * 2 * (rank != engine),
            )
            for rank in range(3)
        ]
        yield 1_700_000_000.0 + 2 * at, "h:8000", every + render([*cpu, ("diag_vllm_up", (), 1.0)]).decode()


@pytest.mark.parametrize("engine", [0, 2])
def test_the_engine_that_lags_behind_its_peers_is_named(tmp_path: Path, engine: int) -> None:
    *_, (_, _, page) = rewriting.scrapes("healthy")
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path, lagging(page, engine)))]))
    lockstep = found(report, "data_parallel_lockstep").diagnosis
    named = {name for reading in lockstep.supports if reading.holds for name in reading.culprits}
    assert named == {f"engine {engine} lags (PID {90 + engine})"}


def test_a_time_out_of_the_all_to_all_is_a_fault_of_the_device_with_fixes_of_its_own(tmp_path: Path) -> None:
    start = next(rewriting.scrapes("engine_dead"))[0]
    spoke = log("ready", {}, 600, start, all_to_all_timeout=-1, engine_dead=-2)
    report = judge(tmp_path, "engine_dead", spoke)
    assert "Mask: [...]" in fixes_of(report, "engine_device_fault")


def test_a_fault_of_the_device_for_which_an_engine_waits_is_explained_by_that(tmp_path: Path) -> None:
    start = next(rewriting.scrapes("engine_stalled"))[0]
    spoke = log("ready", {}, 600, start, engine_fault_held=-30, engine_fault_over=start, cuda_error=-30)
    report = judge(tmp_path, "engine_stalled", spoke)
    explained = {each.diagnosis.incident.id: each.diagnosis.explained_by for each in report.present}
    assert explained["engine_device_fault"] == "engine_awaits_recovery"


def test_an_incident_of_which_nothing_was_seen_before_its_look_keeps_its_onset() -> None:
    """Scraped every 15 s, the scrapes before the first one that shows it show nothing of the server."""
    looked_at = thinning.thinned(read(RECORDINGS / "elastic_scaling"), 15, 10.0)
    report = judge_observation(looked_at, *site(None, None)).report
    assert [found.diagnosis.incident.id for found in report.present] == ["elastic_scaling"]
