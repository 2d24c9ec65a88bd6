"""Incidents that only a server's host can show, each in its scenario, and none in what looks like it."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from support import rewriting, scenarios
from support.scenarios import config, fixes, found, gpu, judge, log, present, reading, said, workers

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.core.metric_families import Sample
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Report
from diag.report import terminal
from diag.report.answer import answers, choose_actions
from diag.report.coverage import defect_sentence, lacking, not_collected
from diag.report.sentences import time_format

FROZEN = "tp2_long_stall"
HEALTHY = "healthy"
CAPTURE = {"process_start": 20, "load_weights": 100, "compile": 50, "cuda_graph_capture": 400}


def judged_as(report: Report, incident: str) -> Diagnosis:
    """Return the state of an incident that has one subject."""
    (diagnosis,) = (each.diagnosis for each in report.findings if each.diagnosis.incident.id == incident)
    return diagnosis


# -- one GPU ----------------------------------------------------------------------------------------------------------


def test_a_busy_gpu_at_its_power_cap_is_healthy(tmp_path: Path) -> None:
    assert judge(tmp_path, HEALTHY, gpu()).verdict == "healthy"


def test_a_gpu_that_is_too_hot_is_named_with_a_power_limit_to_set(tmp_path: Path) -> None:
    hot = gpu(
        throttle_seconds_total__sw_thermal=lambda t: 0.4 * t, clock_hertz__sm=1800e6, temperature_margin_celsius=1
    )
    report = judge(tmp_path, HEALTHY, hot)
    assert present(report) == {"gpu_thermal_throttling"}
    assert fixes(report, "gpu_thermal_throttling")["nvidia-smi -i 0 -pl 380"] == 380
    assert report.verdict == "warning"


@pytest.mark.parametrize(("clock", "verdict"), [(1700e6, "warning"), (1600e6, "critical")])
def test_heat_that_costs_less_than_15_percent_of_the_clock_is_a_ticket(
    clock: float, verdict: str, tmp_path: Path
) -> None:
    hot = gpu(throttle_seconds_total__hw_thermal=lambda t: 0.9 * t, clock_hertz__sm=clock)
    assert judge(tmp_path, HEALTHY, hot).verdict == verdict


def test_the_limit_that_is_proposed_can_be_set(tmp_path: Path) -> None:
    hot = gpu(throttle_seconds_total__sw_thermal=lambda t: 0.4 * t, power_watts=150)
    assert "nvidia-smi -i 0 -pl 200" in fixes(judge(tmp_path, HEALTHY, hot), "gpu_thermal_throttling")


@pytest.mark.parametrize("limit", [100, 90])
def test_a_limit_that_is_set_already_or_lower_is_not_proposed(tmp_path: Path, limit: float) -> None:
    """The board allows no less than 100 W; once 90 W were set by other means."""
    hot = gpu(
        throttle_seconds_total__sw_thermal=lambda t: 0.4 * t,
        power_watts=62,
        power_limit_watts=limit,
        power_limit_min_watts=100,
    )
    assert fixes(judge(tmp_path, HEALTHY, hot), "gpu_thermal_throttling") == {}


def test_an_old_driver_without_counters_shows_heat_by_its_flags(tmp_path: Path) -> None:
    none = dict.fromkeys(("throttle_seconds_total__sw_thermal", "throttle_seconds_total__hw_thermal"))
    hot = gpu(**none, throttle_active__sw_thermal=lambda t: t % 10 < 4, throttle_active__hw_thermal=0)
    assert present(judge(tmp_path, HEALTHY, hot)) == {"gpu_thermal_throttling"}


def test_short_thermal_throttling_is_no_incident(tmp_path: Path) -> None:
    assert not present(judge(tmp_path, HEALTHY, gpu(throttle_seconds_total__sw_thermal=lambda t: 0.9 * (t > 20))))


def test_idle_clock_is_no_incident(tmp_path: Path) -> None:
    idle = gpu(utilization_ratio=0, clock_hertz__sm=300e6, throttle_active__gpu_idle=1)
    assert not present(judge(tmp_path, "idle", idle))


def test_power_brake_is_not_thermal_throttling(tmp_path: Path) -> None:
    braked = gpu(throttle_seconds_total__hw_power_brake=lambda t: 0.2 * t, throttle_active__hw_slowdown=1)
    assert present(judge(tmp_path, HEALTHY, braked)) == {"gpu_power_brake"}


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({"up": lambda t: t < 20}, "GPU lost"),
        ({"xid_errors_total__79": lambda t: float(t > 20)}, "Xid 79"),
        ({"ecc_errors_total__uncorrected": lambda t: float(t > 20)}, "uncorrectable memory error"),
        ({"remap_failure": lambda t: t > 20}, "row that could not be replaced"),
    ],
)
def test_gpu_fault_is_reported(tmp_path: Path, fault: dict[str, object], named: str) -> None:
    report = judge(tmp_path, HEALTHY, gpu(0), gpu(1, **fault))
    one = found(report, "gpu_fault").diagnosis
    assert (present(report), dict(one.subject)["gpu"], one.culprits) == ({"gpu_fault"}, "1", (named,))


def test_an_applications_own_xid_is_no_fault_of_the_gpu(tmp_path: Path) -> None:
    assert not present(judge(tmp_path, HEALTHY, gpu(xid_errors_total__31=lambda t: float(t > 20))))


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        ({"ecc_errors_total__uncorrected": None, "remap_failure": None}, "absent"),
        ({"xid_errors_total__79": None, "xid_errors_total__31": None}, "unknown"),
        ({"xid_errors_total__79": None, "up": lambda t: t < 20}, "present"),
        ({"up": None, "xid_errors_total__79": lambda t: float(t > 20)}, "present"),
    ],
    ids=["a board without ECC", "nobody counts Xids", "lost, and nobody counts Xids", "by dcgm-exporter"],
)
def test_uncounted_gpu_faults_are_unknown(tmp_path: Path, seen: dict[str, object], state: str) -> None:
    assert judged_as(judge(tmp_path, HEALTHY, gpu(**seen)), "gpu_fault").state == state


NO_ROOM = {"memory_free_bytes": 0.5 * scenarios.GIB}
TENANT = {**NO_ROOM, "process_memory_bytes:7,other,": 10 * scenarios.GIB}
"""Another process holds an eighth of a GPU, and nothing is left of it."""


def test_gpu_memory_of_other_processes_is_named_with_them(tmp_path: Path) -> None:
    shared = gpu(**TENANT)
    report = judge(tmp_path, HEALTHY, shared)
    assert present(report) == {"gpu_memory_contended"}
    assert found(report, "gpu_memory_contended").diagnosis.culprits == ("pid 7",)


@pytest.mark.parametrize(("free", "severity"), [(0.5, "warning"), (3, "info"), (9, "")])
def test_a_process_that_takes_most_of_what_was_left_is_an_info(tmp_path: Path, free: float, severity: str) -> None:
    """3 of 80 GiB are left: both go on, and neither has room for a peak."""
    report = on_a_gpu(tmp_path, "", gpu(**{**TENANT, "memory_free_bytes": free * scenarios.GIB}), share=0.8)
    told = [each.diagnosis for each in report.present if each.diagnosis.incident.id == "gpu_memory_contended"]
    assert [(each.severity, each.culprits) for each in told] == [(severity, ("pid 7",))] * bool(severity)


@pytest.mark.parametrize(
    ("harmless", "found"),
    [
        ({**NO_ROOM, "process_memory_bytes:7,other,": 0.5 * scenarios.GIB}, ("healthy", "absent")),
        ({**TENANT, "serving": 0}, ("healthy", "absent")),
        # memory of others is measured; what is not measured is whose it is, or whether this vLLM is on that GPU
        ({**NO_ROOM, "process_memory_bytes:7,unknown,": 10 * scenarios.GIB}, ("no_incident", "unknown")),
        ({**TENANT, "serving": None}, ("no_incident", "unknown")),
    ],
)
def test_an_agent_a_free_gpu_and_processes_of_unknown_owners_are_no_incident(
    tmp_path: Path, harmless: dict[str, object], found: tuple[str, str]
) -> None:
    report = judge(tmp_path, HEALTHY, gpu(**harmless))
    assert (report.verdict, judged_as(report, "gpu_memory_contended").state) == found


# -- ranks ------------------------------------------------------------------------------------------------------------

STALL = 15
"""Seconds after which the frozen recording generates nothing."""


def spins(at_work: float, spinning: float, limit: float | None) -> dict[str, object]:
    """A GPU that draws so many watts while tokens flow, and while it busy-waits."""
    power = {"power_watts": lambda t: at_work if t < STALL else spinning, "power_limit_watts": limit}
    return {"utilization_ratio": 0.96, **power}


SPINS = spins(60, 20, 70)
STANDS = {"utilization_ratio": 0, "power_watts": 15, "power_limit_watts": 70}
TWO = config(tensor_parallel_size=2)
STALLED = {"engine_stalled"}
"""What the frozen recording shows in any case."""


def test_a_rank_that_stands_still_is_named_by_its_process(tmp_path: Path) -> None:
    report = judge(tmp_path, FROZEN, TWO, workers(1.0, 0.0, stopped=[1]))
    assert present(report) == {"tp_communication_stall", *STALLED}
    assert found(report, "tp_communication_stall").diagnosis.culprits == ("rank 1",)
    assert found(report, "engine_stalled").diagnosis.explained_by == "tp_communication_stall"
    late = found(report, "contract_breached").diagnosis  # the first tokens after 74 s
    assert (late.explained_by, late.severity, late.ongoing) == ("tp_communication_stall", "info", False)
    assert late.since is not None and late.since - report.observed.start > 85


@pytest.mark.parametrize(("gap", "cause"), [(0, "tp_communication_stall"), (1800, None)])
def test_a_death_soon_after_a_stall_of_the_ranks_is_its_consequence(
    tmp_path: Path, gap: float, cause: str | None
) -> None:
    """The engine gives up waiting for the rank, and dies; a death half an hour after the stall is another one."""
    scrapes = list(rewriting.scrapes(FROZEN))
    start, host, _ = scrapes[0]
    beside = (TWO, workers(1.0, 0.0, stopped=[1]))
    pages = [(t, host, page + scenarios.text(t - start, page, beside)) for t, _, page in scrapes if t - start <= 70]
    pages += [(start + gap + t, host, "diag_vllm_up 0\n") for t in range(72, 170, 2)]
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path, pages))]))
    assert found(report, "engine_dead").diagnosis.explained_by == cause


def test_a_rank_that_stands_still_is_named_by_its_gpu(tmp_path: Path) -> None:
    report = judge(tmp_path, FROZEN, TWO, gpu(0, **SPINS), gpu(1, **STANDS))
    assert found(report, "tp_communication_stall").diagnosis.culprits == ("GPU 1 (rank 1)",)


@pytest.mark.parametrize(
    ("at_work", "spinning", "limit"),
    [(68, 36, 72), (60, 22, None), (450, 140, 700)],
    ids=["a small card at half of its limit", "a part without a limit", "a large card"],
)
def test_a_rank_spins_by_what_its_gpu_drew_while_tokens_flowed(
    tmp_path: Path, at_work: float, spinning: float, limit: float | None
) -> None:
    report = judge(tmp_path, FROZEN, TWO, gpu(0, **spins(at_work, spinning, limit)), gpu(1, **STANDS))
    assert found(report, "tp_communication_stall").diagnosis.culprits == ("GPU 1 (rank 1)",)


def waits(t: float) -> Iterable[Sample]:
    """The log of a server that waits for a rank, from a minute after the last token on."""
    start = next(iter(rewriting.scrapes(FROZEN)))[0]
    yield "diag_vllm_log_event_last_timestamp_seconds", ("shm_broadcast_wait",), start + 75 if t >= 75 else 0.0


def in_the_stall(folder: Path, since: float, *beside: scenarios.Beside) -> Report:
    """The frozen recording from so many seconds on, and before it goes on."""
    scrapes = list(rewriting.scrapes(FROZEN))
    start = scrapes[0][0]
    cut = [(t, host, page) for t, host, page in scrapes if since <= t - start < 85]
    told = [(t, host, page + scenarios.text(t - start, page, beside)) for t, host, page in cut]
    return doctor.run(ObserveOptions([str(rewriting.write(folder / "cut", told))]))


def test_ranks_at_usual_power_have_no_missing_peer(tmp_path: Path) -> None:
    computes = gpu(0, **spins(60, 58, 70)), gpu(1, **spins(60, 58, 70))
    assert present(judge(tmp_path, FROZEN, TWO, *computes, waits)) == STALLED


@pytest.mark.parametrize(
    "seen",
    [
        (workers(1.0),),
        (gpu(0, utilization_ratio=0.96, power_watts=None),),
        (gpu(0, utilization_ratio=0.96, power_watts=None), gpu(1, utilization_ratio=0.96, power_watts=None)),
        (gpu(0, utilization_ratio=None), gpu(1, utilization_ratio=None)),
    ],
    ids=["one worker of two", "one GPU of two", "GPUs without power", "GPUs without utilisation"],
)
def test_the_log_decides_where_not_every_rank_is_seen(tmp_path: Path, seen: tuple[scenarios.Beside, ...]) -> None:
    """A rank that nobody sees is not one that takes part."""
    assert "tp_communication_stall" in present(judge(tmp_path, FROZEN, TWO, *seen, waits))
    stall = judged_as(in_the_stall(tmp_path, 0, TWO, *seen), "tp_communication_stall")
    assert (stall.state, lacking(stall)) == ("unknown", ["ranks missing from a collective not measured"])


def test_small_gpu_without_power_reference_rules_nothing_out(tmp_path: Path) -> None:
    """The watch begins in the middle of the stall: half of its limit may be spinning or computing."""
    half = {"utilization_ratio": 0.96, "power_watts": 36, "power_limit_watts": 72}
    report = in_the_stall(tmp_path, 20, TWO, gpu(0, **half), gpu(1, **half))
    assert judged_as(report, "tp_communication_stall").state == "unknown"


def test_stall_with_all_ranks_busy_waiting_names_no_rank(tmp_path: Path) -> None:
    report = judge(tmp_path, FROZEN, TWO, gpu(0, **SPINS), gpu(1, **SPINS))
    assert found(report, "tp_communication_stall").diagnosis.culprits == ()


def test_a_stall_with_all_ranks_idle_is_not_called_communication(tmp_path: Path) -> None:
    report = judge(tmp_path, FROZEN, TWO, gpu(0, **STANDS), gpu(1, **STANDS), workers(0.0, 0.0))
    assert present(report) == STALLED


def test_a_compile_while_serving_is_not_called_communication(tmp_path: Path) -> None:
    assert present(judge(tmp_path, FROZEN, TWO, workers(1.0, 1.0))) == STALLED


def test_two_engines_are_not_ranks_of_one(tmp_path: Path) -> None:
    report = judge(tmp_path, FROZEN, config(tensor_parallel_size=1), gpu(0, **SPINS), gpu(1, **STANDS))
    assert present(report) == STALLED


def test_ranks_at_work_are_healthy_at_any_power(tmp_path: Path) -> None:
    assert judge(tmp_path, HEALTHY, TWO, gpu(0, **SPINS), gpu(1, **SPINS), workers(1.0, 1.0)).verdict == "healthy"


def test_a_stall_that_began_in_an_idle_moment_shows_by_its_ranks(tmp_path: Path) -> None:
    report = judge(tmp_path, "idle", TWO, workers(1.0, 0.0, stopped=[1]))
    assert present(report) == {"tp_communication_stall"}
    assert report.progress[0].state == "stalled"


def test_idle_ranks_are_no_stall(tmp_path: Path) -> None:
    report = judge(tmp_path, "idle", TWO, workers(0.0, 0.0), gpu(0, utilization_ratio=0), gpu(1, utilization_ratio=0))
    assert (report.verdict, report.progress[0].state) == ("healthy", "idle")


BOUND = "tp_interconnect_bound"
FULL = 24e9  # of 31.5 GB/s that 16 lanes of generation 4 carry


def test_ranks_that_fill_their_links_are_named(tmp_path: Path) -> None:
    links = [gpu(i, nvlink_active_links=None, pcie_bytes_total__rx=lambda t: FULL * t) for i in (0, 1)]
    report = judge(tmp_path, HEALTHY, TWO, *links)
    assert present(report) == {"tp_interconnect_bound"}
    texts = [each.text for each in found(report, "tp_interconnect_bound").proposals]
    assert not [text for text in texts if "PCIe link" in text or "NVLinks of" in text]


def test_link_that_lost_its_lanes_is_to_be_repaired(tmp_path: Path) -> None:
    """A card in a slot of 16 lanes runs with 4: the others wait for it, whatever their own links carry."""
    lost = gpu(1, pcie_link_width__current=4, pcie_bytes_total__rx=lambda t: 7.5e9 * t)
    report = judge(tmp_path, HEALTHY, TWO, gpu(0, pcie_bytes_total__rx=lambda t: 7.5e9 * t), lost)
    first = found(report, "tp_interconnect_bound")
    assert first.proposals[0].text.startswith("Repair the PCIe link")
    (lanes,) = (each for each in first.diagnosis.supports if each.condition.signal.name == "PCIe lanes lost")
    assert (lanes.value, lanes.culprits) == (0.75, ("GPU 1",))
    assert "PCIe link of GPU 1" in choose_actions(first, report).fix.text
    assert not [each for each in first.proposals if each.changes]


def test_link_at_a_low_generation_is_named(tmp_path: Path) -> None:
    low = gpu(1, pcie_link_generation__current=1, pcie_bytes_total__rx=lambda t: 3.4e9 * t)
    first = found(judge(tmp_path, HEALTHY, TWO, gpu(0, pcie_bytes_total__rx=lambda t: 3.4e9 * t), low), BOUND)
    assert first.proposals[0].text.startswith("Repair the PCIe link of GPU 1, which runs at a lower generation")
    (lost,) = (each for each in first.diagnosis.supports if each.condition.signal.name == "PCIe generations lost")
    assert (lost.value, lost.culprits) == (3, ("GPU 1 at generation 1",))


@pytest.mark.parametrize("nvlinks", [0, 12])
def test_gpu_whose_clock_is_far_below_that_of_its_peer_is_named(tmp_path: Path, nvlinks: int) -> None:
    links = {"nvlink_active_links": nvlinks}
    report = judge(tmp_path, HEALTHY, TWO, gpu(0, **links), gpu(1, **links, clock_hertz__sm=900e6))
    assert present(report) == {BOUND}
    (proposal,) = found(report, BOUND).proposals
    assert "-i 1 -q" in proposal.name and "nvidia-smi -i 1 -rgc" in proposal.text


def hangs(t: float) -> bool:
    return t % 10 < 4


@pytest.mark.parametrize(
    ("ranks", "first", "second"),
    [
        (2, {}, {"clock_hertz__sm": 1500e6}),
        (2, {"clock_hertz__sm": 900e6}, {"clock_hertz__sm": 900e6}),
        (2, {}, {"clock_hertz__sm": 900e6, "utilization_ratio": 0.2}),
        (
            2,
            {},
            {"clock_hertz__sm": lambda t: 300e6 if hangs(t) else 1980e6, "utilization_ratio": lambda t: not hangs(t)},
        ),
        (1, {}, {"clock_hertz__sm": 900e6}),
    ],
    ids=["a power limit", "all alike", "an idle GPU", "a rank that hung", "one rank"],
)
def test_clocks_that_hold_nobody_up_are_no_incident(
    tmp_path: Path, ranks: int, first: dict[str, object], second: dict[str, object]
) -> None:
    assert not present(judge(tmp_path, HEALTHY, config(tensor_parallel_size=ranks), gpu(0, **first), gpu(1, **second)))


def test_clocks_of_engines_with_another_load_differ(tmp_path: Path) -> None:
    """A data-parallel engine at its power limit loses a third of its clock; one with few requests loses none."""
    engines = [*rewriting.as_ranks(*[rewriting.scrapes(HEALTHY)] * 2)]
    slow = (TWO, gpu(0), gpu(1), gpu(2, clock_hertz__sm=900e6), gpu(3, clock_hertz__sm=900e6))
    pages = [(t, host, shown + scenarios.text(t - engines[0][0], shown, slow)) for t, host, shown in engines]
    assert BOUND not in present(doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages))])))


def test_heat_is_the_cause_of_ranks_that_wait_for_a_hot_gpu(tmp_path: Path) -> None:
    hot = gpu(1, clock_hertz__sm=900e6, throttle_seconds_total__hw_thermal=lambda t: 0.9 * t)
    report = judge(tmp_path, HEALTHY, TWO, gpu(0), hot)
    primary = {each.diagnosis.incident.id: each.diagnosis.primary for each in report.present}
    assert primary == {"gpu_thermal_throttling": True, BOUND: False}


@pytest.mark.parametrize(("needed", "bound"), [(0.45, True), (0.02, False)])
def test_links_that_are_full_while_the_ranks_wait_for_them_are_named(
    tmp_path: Path, needed: float, bound: bool
) -> None:
    """A Gen3 x8 link at 57 % of its rate on average: the ranks use it in a part of each step only."""
    link = 0.985e9 * 8
    slots = {"pcie_link_generation__current": 3, "pcie_link_width__current": 8, "pcie_link_width__max": 8}
    links = [gpu(i, **slots, pcie_bytes_total__rx=lambda t: 0.57 * link * t) for i in (0, 1)]
    tokens = [float(line.rpartition(" ")[2]) for line in _counted(HEALTHY)]
    per_token = needed * link / ((tokens[-1] - tokens[0]) / 60)
    reduces = [("diag_vllm_all_reduce_bytes_per_token", (), per_token)]
    assert ("tp_interconnect_bound" in present(judge(tmp_path, HEALTHY, TWO, *links, lambda _: reduces))) == bound


def _counted(recording: str) -> list[str]:
    """Lines of the tokens that were computed, at the first and the last scrape."""
    pages = [page for _, _, page in rewriting.scrapes(recording) if page]
    return [re.findall(r"^vllm:iteration_tokens_total_sum\{.*$", page, re.M)[0] for page in (pages[0], pages[-1])]


@pytest.mark.parametrize(
    ("ranks", "nvlinks", "rate"),
    [(2, 4, FULL), (2, 0, 5e9), (1, 0, FULL)],
    ids=["nvlink", "little traffic", "one rank"],
)
def test_links_below_their_bandwidth_are_no_incident(tmp_path: Path, ranks: int, nvlinks: int, rate: float) -> None:
    links = [gpu(i, nvlink_active_links=nvlinks, pcie_bytes_total__rx=lambda t: rate * t) for i in (0, 1)]
    assert not present(judge(tmp_path, HEALTHY, config(tensor_parallel_size=ranks), *links))


# -- start-up ---------------------------------------------------------------------------------------------------------


def test_graph_capture_without_progress_is_a_hang(tmp_path: Path) -> None:
    hang = log("cuda_graph_capture", CAPTURE, silent=390)
    report = judge(tmp_path, "", hang, TWO, workers(1.0, 1.0), gpu(0, **SPINS), gpu(1, **SPINS))
    assert present(report) == {"cuda_graph_capture_hang", "startup_slow"}
    assert found(report, "startup_slow").diagnosis.explained_by == "cuda_graph_capture_hang"
    assert "--disable-custom-all-reduce" in fixes(report, "cuda_graph_capture_hang")
    assert found(report, "cuda_graph_capture_hang").diagnosis.since == 1_700_000_000 - 390
    assert report.progress[0].state == "starting"


@pytest.mark.parametrize(("path", "is_proposed"), [("nvlink", False), ("pix", True)])
def test_the_path_between_two_gpus_tells_an_nvlink_that_nobody_counted(
    tmp_path: Path, path: str, is_proposed: bool
) -> None:
    hang = log("cuda_graph_capture", CAPTURE, silent=390)
    uncounted = (gpu(number, nvlink_active_links=None, **SPINS) for number in (0, 1))
    report = judge(
        tmp_path,
        "",
        hang,
        TWO,
        workers(1.0, 1.0),
        *uncounted,
        lambda _: [("diag_gpu_peer_info", ("0", "1", path), 1.0)],
    )
    assert ("--disable-custom-all-reduce" in fixes(report, "cuda_graph_capture_hang")) == is_proposed


def test_progressing_graph_capture_is_no_hang(tmp_path: Path) -> None:
    moving = log("cuda_graph_capture", {**CAPTURE, "cuda_graph_capture": 100}, silent=20)
    report = judge(tmp_path, "", moving, workers(1.0))
    assert (present(report), report.progress[0].state) == (set(), "starting")


def test_a_compile_that_takes_long_is_slow_and_no_hang(tmp_path: Path) -> None:
    report = judge(tmp_path, "", log("compile", {"load_weights": 100, "compile": 900}, silent=890), workers(1.0))
    assert present(report) == {"startup_slow"}


def test_graph_capture_of_ended_processes_is_no_hang(tmp_path: Path) -> None:
    def gone(_: float) -> Iterable[Sample]:
        yield "diag_vllm_processes", ("engine",), 0.0

    report = judge(tmp_path, "", log("cuda_graph_capture", CAPTURE, silent=390), gone)
    assert "cuda_graph_capture_hang" not in present(report)


def test_a_capture_whose_processes_were_never_seen_hangs(tmp_path: Path) -> None:
    """They run in another container: that none is visible does not mean that none runs."""
    assert "cuda_graph_capture_hang" in present(judge(tmp_path, "", log("cuda_graph_capture", CAPTURE, silent=390)))


def test_slow_start_gets_a_proposed_startup_probe_that_is_long_enough(tmp_path: Path) -> None:
    slow = log("load_weights", {"process_start": 20, "load_weights": 1220})
    report = judge(tmp_path, "", slow, workers(1.0))
    assert present(report) == {"startup_slow"}
    names = fixes(report, "startup_slow")
    assert names["startupProbe: {periodSeconds: 10, failureThreshold: 195}"] == 195
    assert names["VLLM_ENGINE_READY_TIMEOUT_S"] == 2598
    assert "load_weights 21.3 min" in found(report, "startup_slow").diagnosis.culprits


def test_a_startup_probe_covers_the_rest_of_the_weights_and_what_an_earlier_start_took(tmp_path: Path) -> None:
    """A quarter of the weights is loaded after 1,279 s: all of them take 5,116 s; an earlier start took 7,000 s."""

    def earlier(t: float) -> Iterable[Sample]:
        spent = 7000 if t < 5 else 20
        return log("load_weights", {"process_start": spent, "load_weights": 1220})(t)

    slow = log("load_weights", {"process_start": 20, "load_weights": 1220})
    for name, start, least, most in (("rest", slow, 770, 772), ("earlier", earlier, 1230, 1250)):
        report = judge(tmp_path / name, "", start, workers(1.0), reading(2e9))
        (probes,) = (value for text, value in fixes(report, "startup_slow").items() if text.startswith("startupProbe"))
        assert least <= probes <= most


@pytest.mark.parametrize(("rate", "slow"), [(60e6, True), (2e9, False)])
def test_weights_that_come_slowly_are_to_be_read_in_another_way(tmp_path: Path, rate: float, slow: bool) -> None:
    start = log("load_weights", {"process_start": 20, "load_weights": 1220})
    report = judge(tmp_path, "", start, workers(1.0), reading(rate))
    assert ("--safetensors-load-strategy" in fixes(report, "startup_slow")) == slow
    text = terminal.render(report)
    assert "time until the weights are loaded" in text
    assert "57.2 MiB" in text or not slow


def test_a_start_of_usual_length_is_healthy(tmp_path: Path) -> None:
    report = judge(tmp_path, "", log("load_weights", {"process_start": 20, "load_weights": 100}), workers(1.0))
    assert (report.verdict, report.progress[0].state, present(report)) == ("unknown", "starting", set())


def test_a_start_that_is_over_is_no_longer_slow(tmp_path: Path) -> None:
    assert not present(judge(tmp_path, HEALTHY, log("ready", {"load_weights": 5000, "compile": 3000})))


def test_a_start_that_failed_is_named_with_its_reason(tmp_path: Path) -> None:
    failed = log("load_weights", {"load_weights": 3}, silent=50, engine_start_failed=49)
    report = judge(tmp_path, "", failed)
    assert present(report) == {"startup_failed"}
    assert report.progress[0].state == "dead"


def test_a_start_after_one_that_failed_is_a_start(tmp_path: Path) -> None:
    again = log("load_weights", {"load_weights": 3}, silent=5, engine_start_failed=49)
    report = judge(tmp_path, "", again, workers(1.0))
    assert (present(report), report.progress[0].state) == (set(), "starting")


def test_memory_share_that_fits_is_computed_from_the_failed_start(tmp_path: Path) -> None:
    failed = log("profile_memory", {}, 50, engine_start_failed=49, free_memory_below_requested=50)
    numbers = said(
        "free_memory_below_requested",
        free_gibibytes=67.24,
        total_gibibytes=79.25,
        utilization=0.9,
        requested_gibibytes=71.33,
    )
    report = judge(tmp_path, "", failed, numbers, config(gpu_memory_utilization=0.9))
    assert present(report) == {"gpu_out_of_memory", "startup_failed"}
    assert fixes(report, "gpu_out_of_memory") == {"--gpu-memory-utilization": 0.84}
    assert found(report, "startup_failed").diagnosis.explained_by == "gpu_out_of_memory"


def test_context_length_that_fits_is_computed(tmp_path: Path) -> None:
    failed = log("allocate_kv_cache", {}, 50, engine_start_failed=49, max_model_len_exceeds_kv_cache=50)
    numbers = said(
        "max_model_len_exceeds_kv_cache", max_model_len=1_048_576, needed_gibibytes=24.0, available_gibibytes=9.97
    )
    assert fixes(judge(tmp_path, "", failed, numbers), "gpu_out_of_memory") == {"--max-model-len": 435_584}


def on_a_gpu(folder: Path, launch: str, *beside: scenarios.Beside, share: float = 0.92) -> Report:
    """A server whose KV pool has the size that is left; vLLM for CPUs orders it itself."""
    ordered, shares = re.compile(r'kv_cache_memory_bytes="[^"]*"'), re.compile(r'gpu_memory_utilization="[^"]*"')
    of_a_gpu = ((t, h, ordered.sub('kv_cache_memory_bytes="None"', page)) for t, h, page in rewriting.scrapes(HEALTHY))
    pages = [(t, h, shares.sub(f'gpu_memory_utilization="{share}"', page)) for t, h, page in of_a_gpu]
    told = [(t, host, page + scenarios.text(t - pages[0][0], page, beside)) for t, host, page in pages]
    return doctor.run(ObserveOptions([str(rewriting.write(folder / "recording", told))], launch=launch))


def ran_out(folder: Path, launch: str, *more: scenarios.Beside) -> Report:
    """A server on a GPU that an allocation has ended."""
    numbers = said("cuda_out_of_memory", wanted_gibibytes=0.1328, free_gibibytes=0.118, total_gibibytes=79.25)
    died = log("ready", {}, 50, start=scenarios_start(), cuda_out_of_memory=-20)
    return on_a_gpu(folder, launch, died, numbers, *more)


@pytest.mark.parametrize(("size", "lowered"), [("", True), ("--kv-cache-memory-bytes 8G", False)])
def test_gpu_share_is_lowered_only_if_it_has_an_effect(tmp_path: Path, size: str, lowered: bool) -> None:
    """A size of the KV pool is taken as it is, whatever the share and whoever else holds memory."""
    shared = gpu(**TENANT)
    report = on_a_gpu(tmp_path, f"vllm serve m --gpu-memory-utilization 0.9 {size}", shared)
    assert ("--gpu-memory-utilization" in fixes(report, "gpu_memory_contended")) is lowered


@pytest.mark.parametrize(("share", "state"), [(0.45, "absent"), (0.6, "present")])
def test_gpu_shared_by_design_is_no_incident(tmp_path: Path, share: float, state: str) -> None:
    """Two servers with shares that fit beside each other: the next start of each finds its memory free."""
    neighbour = gpu(**{"process_memory_bytes:7,other,": 36 * scenarios.GIB})
    report = on_a_gpu(tmp_path, "", neighbour, share=share)
    assert judged_as(report, "gpu_memory_contended").state == state


def test_fix_for_memory_exhausted_under_load_frees_the_requested_size(tmp_path: Path) -> None:
    report = ran_out(tmp_path, "", config(gpu_memory_utilization=0.98))
    assert present(report) == {"gpu_out_of_memory"}
    assert fixes(report, "gpu_out_of_memory")["--gpu-memory-utilization"] == 0.97


@pytest.mark.parametrize(("gibibytes", "leads"), [(8, True), (0.4, False)])
def test_memory_that_another_process_took_leads_when_the_engine_has_died_for_want_of_it(
    tmp_path: Path, gibibytes: float, leads: bool
) -> None:
    """The engine's death ends its use of the GPU, not what led to it; an agent of 400 MiB takes nothing."""
    alive, dead = gpu(**{"process_memory_bytes:7,other,": gibibytes * scenarios.GIB}), gpu(serving=0)
    held = [("diag_gpu_process_memory_bytes", ("0", "GPU-0", "7", "other", ""), gibibytes * scenarios.GIB)]
    report = ran_out(tmp_path, "", lambda t: alive(t) if t < 40 else [*dead(t), *held])
    ran = found(report, "gpu_out_of_memory")
    first = ran.proposals[0].fix
    assert ("other process" in first.change) is leads
    assert ("gpu_memory_contended" in {each.name for each in ran.diagnosis.refuted}) is not leads


@pytest.mark.parametrize(
    ("before", "after", "leads"),
    [(5, 5, False), (8, 0, False), (8, 1, False), (2, 9, True), (0, 9, True), (9, 9, True)],
)
def test_memory_that_a_neighbour_held_by_design_or_gave_back_leads_no_out_of_memory(
    tmp_path: Path, before: float, after: float, leads: bool
) -> None:
    """VLLM plans with 90 % of 80 GiB: beside 9 GiB it would not have started, so that those came later."""
    alive = [gpu(**{"process_memory_bytes:7,other,": held * scenarios.GIB or None}) for held in (before, after)]
    gone = {"process_memory_bytes:100,worker,0": None, "process_memory_bytes:7,other,": after * scenarios.GIB or None}
    quiet, died = log("ready", {}, 0, start=1_795_000_000), log("ready", {}, start=1_795_000_600, cuda_out_of_memory=0)

    def beside(t: float) -> Iterable[Sample]:
        yield from (gpu(serving=0, **gone) if t >= 600 else alive[t >= 400])(t)
        yield from (died if t >= 600 else quiet)(t)
        yield from config(gpu_memory_utilization=0.9)(t)

    *_, (_, _, page) = rewriting.scrapes(HEALTHY)
    pages = (
        (1_795_000_000 + t, "h:1", (page if t < 600 else "") + scenarios.text(t, page if t < 600 else "", (beside,)))
        for t in range(0, 700, 15)
    )
    ran = found(doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages))])), "gpu_out_of_memory")
    assert any("other process" in each.text for each in ran.proposals[:1]) is leads
    assert ("gpu_memory_contended" in {each.name for each in ran.diagnosis.refuted}) is not leads


SHARE, SIZE = {"--gpu-memory-utilization": 0.91}, {"--max-cudagraph-capture-size": 256}


@pytest.mark.parametrize(
    ("launch", "proposed"),
    [
        ("", {**SHARE, **SIZE}),
        ("--max-cudagraph-capture-size 64", SHARE),
        ("--cudagraph-capture-sizes 1 512", SHARE),
        ("""-cc '{"cudagraph_capture_sizes": [1]}'""", SHARE),
        ("--enforce-eager", SHARE),
        ("--kv-cache-memory-bytes 8G", SIZE),
    ],
)
def test_ineffective_fix_for_missing_memory_is_not_proposed(
    tmp_path: Path, launch: str, proposed: dict[str, object]
) -> None:
    assert fixes(ran_out(tmp_path, f"vllm serve m --max-num-seqs 512 {launch}"), "gpu_out_of_memory") == proposed


def test_old_out_of_memory_is_no_incident(tmp_path: Path) -> None:
    past = log("ready", {}, 90_000, start=scenarios_start(), cuda_out_of_memory=90_000)
    assert not present(judge(tmp_path, HEALTHY, past))


def scenarios_start() -> float:
    """Return the start of the healthy recording."""
    return next(iter(scenarios.rewriting.scrapes(HEALTHY)))[0]


# -- an engine without its API server ---------------------------------------------------------------------------------


def orphan(_: float) -> Iterable[Sample]:
    """Return an engine process that is left on the host, and no API server beside it."""
    yield "diag_vllm_process_orphaned", ("91", "engine", "0", "gpu-7"), 1.0
    yield "diag_vllm_processes", ("api_server",), 0.0
    yield "diag_vllm_processes", ("engine",), 0.0


@pytest.mark.parametrize(("recording", "severity"), [("engine_dead", "critical"), (HEALTHY, "warning")])
def test_an_orphan_is_critical_unless_the_server_of_the_page_answers(
    tmp_path: Path, recording: str, severity: str
) -> None:
    """An exporter beside the orphan of another server may read the page of a server on another host."""
    report = judge(tmp_path, recording, orphan)
    diagnosis = found(report, "engine_orphaned").diagnosis
    assert (diagnosis.severity, diagnosis.culprits) == (severity, ("PID 91 on gpu-7",))
    assert {each.state for each in report.progress} == ({"dead"} if severity == "critical" else {"busy"})


def test_an_orphan_that_shows_after_the_death_of_its_server_did_not_begin_later(tmp_path: Path) -> None:
    report = judge(tmp_path, "engine_dead", lambda t: orphan(t) if t > 40 else ())
    since = {each.diagnosis.incident.id: each.diagnosis.since for each in report.present}
    assert since["engine_orphaned"] == since["engine_dead"] == answers(report, time_format(report))[0].since


def test_an_engine_of_an_unknown_server_is_a_note_beside_a_dead_server(tmp_path: Path) -> None:
    """Its owner is not known: no command ends it."""
    report = judge(tmp_path, "engine_dead", lambda _: [("diag_vllm_stray_engine", ("91", "gpu-7"), 1.0)])
    (primary,) = (each for each in report.present if each.diagnosis.primary)
    assert primary.diagnosis.incident.id == "engine_dead"
    assert not any("kill" in fix.text for each in report.present for fix in each.proposals)
    (note,) = (defect_sentence(each) for each in report.observed.defects if each.kind == "stray")
    assert "PID 91 on gpu-7" in note


def test_an_earlier_servers_orphan_does_not_lead_before_the_death_of_the_server(tmp_path: Path) -> None:
    def beside(_: float) -> Iterable[Sample]:
        yield "diag_vllm_process_orphaned", ("91", "engine", "0", "gpu-7"), 1.0
        yield "diag_vllm_processes", ("api_server",), 1.0
        yield "diag_vllm_processes", ("engine",), 0.0

    report = judge(tmp_path, "engine_dead", beside)
    assert [(each.diagnosis.incident.id, each.diagnosis.severity) for each in report.present[:2]] == [
        ("engine_dead", "critical"),
        ("engine_orphaned", "warning"),
    ]
    assert report.present[0].proposals[0].name.startswith("kill 91   # on gpu-7")


def test_a_dead_server_that_leaves_nothing_behind_has_nothing_to_kill(tmp_path: Path) -> None:
    proposals = found(judge(tmp_path, "engine_dead"), "engine_dead").proposals
    assert proposals and not [each for each in proposals if "kill" in each.name]


# -- devices whose telemetry nothing reads ----------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "named"), [("xpu", "XPUs, TPUs"), ("tpu", "XPUs, TPUs"), ("cuda", "GPUs")])
def test_devices_that_are_not_read_are_named(tmp_path: Path, device: str, named: str) -> None:
    def info(_: float) -> Iterable[Sample]:
        yield "diag_vllm_info", ("0.32.0", "tiny", device), 1.0

    assert not_collected(judge(tmp_path, HEALTHY, info))[0].startswith(f"{named}: throttling")
