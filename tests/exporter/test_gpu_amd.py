"""AMD's GPUs by the real amdsmi over a scripted C library: units, what is not there, and GPUs that go away."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support import scripted_amdsmi
from support.collected_gpus import Shown, look
from support.scenarios import fixes, found, judge, present
from support.scripted_amdsmi import GFX, GIB, MI210, MI300X

from diag.core.metric_families import Sample
from diag.diagnosis.report import Report
from diag.exporter.gpu import amd
from diag.exporter.gpu.collector import GpuCollector, host_driver
from diag.exporter.process.server import Owner

Script = Callable[..., None]
METRICS = "amdsmi_get_gpu_metrics_info"
PROCESSES = "amdsmi_get_gpu_process_list"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """Writes what the GPUs say; the library is found as ROCm's is, by ROCM_PATH."""
    place = tmp_path / "script"
    monkeypatch.setenv("DIAG_AMDSMI_SCRIPT", str(place))
    scripted_amdsmi.package(scripted_amdsmi.build(tmp_path / "rocm"), monkeypatch)
    yield lambda *gpus, **library: scripted_amdsmi.write(place, gpus, **library)


def gpus(*select: str, owners: Mapping[int, Owner] | None = None, visible: str | None = None) -> GpuCollector:
    driver = amd.AmdDriver()
    return GpuCollector(select, lambda: owners or {}, lambda: visible, driver, pci=Path("no such folder"))


def process(pid: int, held: int) -> dict[str, Any]:
    return {"pid": pid, "name": "python3", "mem": held, "memory_usage": {"vram_mem": held}}


VALUES: dict[tuple[str, ...], float | None] = {
    ("up",): 1,
    ("temperature_celsius", "gpu"): None,  # an MI300X has no sensor at the edge
    ("temperature_celsius", "hotspot"): 71,
    ("temperature_celsius", "memory"): 60,
    ("temperature_margin_celsius",): 29,
    ("clock_hertz", "sm"): 1400e6,
    ("clock_hertz", "memory"): 1300e6,
    ("clock_max_hertz", "sm"): 2100e6,
    ("power_watts",): 742,
    ("power_limit_watts",): 750,
    ("power_limit_min_watts",): 0,
    ("power_limit_default_watts",): 750,
    ("energy_joules_total",): 15.5,
    ("utilization_ratio",): 0.97,
    ("memory_busy_ratio",): 0.41,
    ("memory_total_bytes",): 192 * GIB,
    ("memory_used_bytes",): 170 * GIB,
    ("memory_free_bytes",): 22 * GIB,
    ("memory_reserved_bytes",): None,
    ("pcie_link_width", "current"): 16,
    ("pcie_link_generation", "current"): 5,
    ("pcie_link_generation", "max"): 5,
    ("pcie_replays_total",): 3,
    ("pcie_bytes_total", "tx"): None,
    ("nvlink_bytes_total", "tx"): 7_000_000,
    ("nvlink_bytes_total", "rx"): 14_000_000,
    ("nvlink_active_links",): 7,
    ("ecc_errors_total", "corrected"): 2,
    ("ecc_errors_total", "uncorrected"): 0,
    ("ecc_errors_total", "deferred"): 1,
    ("retired_pages", "reserved"): 2,
    ("retired_pages", "pending"): 1,
    ("retired_pages", "unreservable"): 0,
    ("throttle_seconds_total", "hw_thermal"): 0,
    ("throttle_active", "sw_power_cap"): None,  # an MI300X counts instead
    ("flops_max", "bf16"): 1307.4e12,
}


def test_every_value_has_the_unit_of_its_name(script: Script) -> None:
    script(MI300X)
    shown = look(gpus())
    assert {key: shown.of(key[0], 0, *key[1:]) for key in VALUES} == VALUES


def test_gpu_info_has_the_product_properties(script: Script) -> None:
    script(MI300X, MI300X)
    infos = [key[1:] for key in look(gpus()).values if key[0] == "diag_gpu_info"]
    assert infos[1] == (
        "1",
        "1ff74a1-0000-1000-80d1-5a3d0f6c1e22",
        "AMD Instinct MI300X",
        "0000:05:00.0",
        "6.14.14",
        "",
    )


def test_time_throttled_is_the_share_of_the_firmwares_steps(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds of heat overlap: the longest one counts. Counters that fall (a reload of the driver) add nothing."""
    now = [100.0]
    monkeypatch.setattr("diag.exporter.gpu.collector.time.monotonic", lambda: now[0])
    script(MI300X)
    one = gpus()
    look(one)

    def later(steps: int, power: int, heat: int, prochot: int) -> Shown:
        now[0] += 10
        counters = {
            "accumulation_counter": steps,
            "ppt_residency_acc": power,
            "socket_thm_residency_acc": heat,
            "vr_thm_residency_acc": 0,
            "hbm_thm_residency_acc": heat - 5,
            "prochot_residency_acc": prochot,
        }
        script(MI300X | {METRICS: counters})
        return look(one)

    shown = later(2000, 1400, 210, 50)
    seconds = [shown.of("throttle_seconds_total", 0, reason) for reason in ("sw_power_cap", "hw_thermal", "sw_thermal")]
    assert seconds == pytest.approx([10, 2, 0.5])
    assert later(10, 5, 5, 0).of("throttle_seconds_total", 0, "hw_thermal") == pytest.approx(2)
    assert later(1010, 5, 505, 0).of("throttle_seconds_total", 0, "hw_thermal") == pytest.approx(7)


@pytest.mark.parametrize(
    ("bit", "reason"),
    [
        (0, "sw_power_cap"),
        (7, "sw_power_cap"),
        (16, "board_limit"),
        (32, "hw_thermal"),
        (36, "hw_thermal"),
        (44, "hw_thermal"),
        (47, "sw_thermal"),
        (57, "reliability"),
        (56, ""),
    ],
)
def test_a_bit_of_an_older_gpu_is_the_reason_of_its_name(script: Script, bit: int, reason: str) -> None:
    script(MI210 | {METRICS: {"indep_throttle_status": 1 << bit}})
    shown = look(gpus())
    active = {key[3] for key, value in shown.values.items() if key[0] == "diag_gpu_throttle_active" and value}
    assert active == ({reason} if reason else set())
    assert "throttle_seconds_total" not in shown.names()


def test_an_older_gpu_has_the_mean_power_and_the_edge_temperature(script: Script) -> None:
    script(MI210)
    shown = look(gpus())
    assert (shown.of("power_watts"), shown.of("temperature_celsius", 0, "gpu")) == (290, 55)


def test_an_error_count_without_error_correction_has_no_sample(script: Script) -> None:
    script(MI300X | {"amdsmi_get_gpu_ecc_enabled": 0})
    assert "ecc_errors_total" not in look(gpus()).names()


@pytest.mark.parametrize("answer", ["!2", "!7", "!14", "!30"])
@pytest.mark.parametrize(
    ("call", "lost"),
    [
        (f"amdsmi_get_clock_info {GFX}", {"clock_hertz", "clock_max_hertz"}),
        ("amdsmi_get_gpu_total_ecc_count", {"ecc_errors_total"}),
        (METRICS, {"throttle_seconds_total", "nvlink_bytes_total"}),
        (PROCESSES, set()),
    ],
)
def test_one_call_that_fails_costs_only_its_own_samples(script: Script, call: str, lost: set[str], answer: str) -> None:
    script(MI300X)
    whole = set(look(gpus()).values)
    script(MI300X | {call: answer})
    shown = look(gpus())
    assert {key[0].removeprefix("diag_gpu_") for key in whole - set(shown.values)} == lost
    assert (shown.of("up"), shown.problem) == (1, "")


def test_a_function_that_the_package_lacks_costs_only_its_own_sample(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(MI300X)
    monkeypatch.delattr("amdsmi.amdsmi_get_gpu_activity")
    names = look(gpus()).names()
    assert "utilization_ratio" not in names and "power_watts" in names


def test_memory_of_a_gpu_inside_a_processor_is_unknown(script: Script) -> None:
    script(MI300X | {"amdsmi_get_gpu_asic_info": {"market_name": "", "target_graphics_version": 0x1151}})
    assert not {name for name in look(gpus()).names() if name.startswith("memory_total")}


KERNEL = ("amdsmi_get_gpu_memory_total 0", "amdsmi_get_gpu_total_ecc_count", PROCESSES)
"""Calls that the kernel may answer by itself."""


@pytest.mark.parametrize(
    "lost", [{"*": "!14"}, {call: answer if call in KERNEL else "!14" for call, answer in MI300X.items()}]
)
def test_a_gpu_that_is_lost_keeps_its_info_and_the_others_go_on(script: Script, lost: dict[str, Any]) -> None:
    script(MI300X, MI300X)
    one = gpus()
    look(one)
    script(MI300X, lost)
    shown = look(one)
    assert (shown.of("up", 0), shown.of("up", 1)) == (1, 0)
    assert shown.names(1) == {"up", "info"}
    assert shown.problem == "GPU 1 does not answer"


def test_a_gpu_that_comes_back_is_found_again(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("diag.exporter.gpu.collector.time.monotonic", lambda: now[0])
    script(MI300X, MI300X)
    one = gpus()
    look(one)
    script(MI300X, {"*": "!14"})
    look(one)
    now[0] += 31
    shown = look(one)
    assert [key[1:] for key in shown.values if key[0] == "diag_gpu_up"][1:] == [
        ("1", "1ff74a1-0000-1000-80d1-5a3d0f6c1e22")
    ], "it is still listed, and does not tell who it is"
    script(MI300X)
    now[0] += 31
    look(one)
    assert look(one).of("up", 1) == 0
    script(MI300X, MI300X)
    now[0] += 31
    look(one)
    shown = look(one)
    assert (shown.of("up", 0), shown.of("up", 1), shown.problem) == (1, 1, "")


def test_resets_are_counted_from_zero(script: Script) -> None:
    script(MI300X, MI300X)
    one = gpus()
    assert "resets_total" not in look(one).names(), "nobody waited for them"
    one.start()
    one = gpus()
    one.start()
    try:
        assert look(one).of("resets_total", 1) == 0
        script(MI300X, MI300X, events="1:3 1:1 1:3")
        shown = look(one)
        assert (shown.of("resets_total", 0), shown.of("resets_total", 1)) == (0, 2)
        assert look(one).of("resets_total", 1) == 2
    finally:
        one.stop()


def test_xgmi_between_gpus_is_published_in_both_directions(script: Script) -> None:
    linked = [MI300X | {f"amdsmi_topo_get_link_type {peer}": (1, 2)} for peer in (1, 0)]
    script(*linked, MI300X | {"amdsmi_topo_get_link_type 0": (3, 1)})
    paths = {key[1:] for key in look(gpus()).values if key[0] == "diag_gpu_peer_info"}
    assert paths == {("0", "1", "xgmi"), ("1", "0", "xgmi")}


# -- what the doctor says of them -------------------------------------------------------------------------------------


def judged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, script: Script, gpu: Callable[[float], dict[str, Any]], **later: str
) -> Report:
    """Judge a healthy server on a GPU whose answers are a function of time; `later` are lines from 20 s on."""
    now = [0.0]
    monkeypatch.setattr("diag.exporter.gpu.collector.time.monotonic", lambda: now[0])
    one = gpus("0")
    one.start()

    def beside(t: float) -> Iterable[Sample]:
        now[0] = 100 + t
        script(MI300X | gpu(t), **(later if t > 20 else {}))
        return one.collect().samples

    try:
        return judge(folder / "judged", "healthy", beside)
    finally:
        one.stop()


def counted(**shares: float) -> Callable[[float], dict[str, Any]]:
    """Let the firmware count so many of its steps, one each millisecond."""
    counters = ("ppt", "socket_thm", "vr_thm", "hbm_thm", "prochot")

    def gpu(t: float) -> dict[str, Any]:
        steps = {f"{name}_residency_acc": 1_000_000 + 1000 * t * shares.get(name, 0.0) for name in counters}
        return {METRICS: {"accumulation_counter": 1_000_000 + 1000 * t, **steps}}

    return gpu


def test_a_busy_gpu_at_its_power_cap_is_healthy(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short peak of heat is normal, too; nothing about the GPU is unknown for want of NVIDIA's Xid errors."""
    report = judged(tmp_path, monkeypatch, script, counted(ppt=1.0, socket_thm=0.02, prochot=0.01))
    assert report.verdict == "healthy"
    assert {"gpu_fault", "gpu_thermal_throttling"} <= set(report.absent)


def test_an_older_gpu_at_its_power_cap_is_healthy(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capped = MI210 | {METRICS: {"indep_throttle_status": 0b1011 | 1 << 16}}
    assert not present(judged(tmp_path, monkeypatch, script, lambda _: capped))


@pytest.mark.parametrize(
    "hot",
    [
        counted(hbm_thm=0.4),
        counted(prochot=0.4),
        lambda t: MI210 | {METRICS: {"indep_throttle_status": (t % 10 < 4) << 36}},
    ],
    ids=["memory", "emergency", "older GPU"],
)
def test_a_gpu_that_is_too_hot_gets_a_power_limit_by_rocms_command(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hot: Callable[[float], dict[str, Any]]
) -> None:
    report = judged(tmp_path, monkeypatch, script, hot)
    assert present(report) == {"gpu_thermal_throttling"}
    commands = [name for name in fixes(report, "gpu_thermal_throttling") if "amd-smi" in name]
    assert len(commands) == 1 and commands[0].startswith("amd-smi set -g 0 --power-cap ")
    assert "nvidia" not in str(found(report, "gpu_thermal_throttling").diagnosis.incident.mitigate)


@pytest.mark.parametrize(
    ("fault", "later", "named"),
    [
        ({}, {"events": "0:3"}, "GPU reset"),
        ({"amdsmi_get_gpu_total_ecc_count": {"correctable_count": 9, "uncorrectable_count": 4}}, {}, "uncorrectable"),
        ({"*": "!14"}, {}, "GPU lost"),
    ],
)
def test_a_fault_of_the_gpu_is_named(
    script: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: dict[str, Any],
    later: dict[str, str],
    named: str,
) -> None:
    report = judged(tmp_path, monkeypatch, script, lambda t: fault if t > 20 else {}, **later)
    assert "gpu_fault" in present(report)
    assert named in str(found(report, "gpu_fault").diagnosis.symptoms)


# -- which GPUs -------------------------------------------------------------------------------------------------------


def test_a_gpu_that_the_runtime_only_opened_is_not_used(script: Script) -> None:
    """ROCm opens every GPU that it sees, and holds a few pages on each."""
    pid = os.getpid()
    script(MI300X | {PROCESSES: [process(pid, 4096)]}, MI300X | {PROCESSES: [process(pid, 170 * GIB)]})
    shown = look(gpus(owners={pid: Owner("worker", "0")}))
    assert (shown.of("serving", 0), shown.of("serving", 1)) == (None, 1)
    assert shown.of("process_memory_bytes", 1, str(pid), "worker", "0") == 170 * GIB


def test_serving_gpus_are_unknown_if_the_driver_lists_no_processes(script: Script) -> None:
    script(MI300X | {PROCESSES: "!2"})
    assert look(gpus(owners={os.getpid(): Owner("worker", "0")})).of("serving") is None


@pytest.mark.parametrize("visible", ["1", "GPU-50d15a3d0f6c1e21", "0,1"])
def test_gpus_are_chosen_by_number_or_by_the_uuid_of_rocr(script: Script, visible: str) -> None:
    script(MI300X, MI300X, MI300X)
    shown = look(gpus(visible=visible))
    assert shown.of("serving", 1) == 1 and not shown.names(2)


# -- libraries --------------------------------------------------------------------------------------------------------


def test_a_host_has_the_driver_of_its_gpus(tmp_path: Path) -> None:
    def host(*vendors: str) -> str:
        for at, vendor in enumerate(vendors):
            device = tmp_path / str(vendors) / str(at)
            device.mkdir(parents=True)
            (device / "vendor").write_text(vendor + "\n")
        return host_driver(tmp_path / str(vendors), tmp_path).name

    assert [host(), host("0x1002"), host("0x1002", "0x10de")] == ["amdsmi", "amdsmi", "nvml"]
    assert host_driver(tmp_path, tmp_path / "no ROCm").name == "nvml"


def test_a_library_that_is_not_there_is_one_sentence_and_nothing_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyError):
        scripted_amdsmi.package(tmp_path, monkeypatch)
    capsys.readouterr()
    shown = look(gpus())
    assert shown.problem.startswith("libamd_smi.so not found") and not shown.values
    assert capsys.readouterr() == ("", "")


def test_a_package_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "amdsmi", None)
    scripted_amdsmi.binding._package.cache_clear()
    assert "pip install 'diag[amd]'" in look(gpus()).problem


def test_a_library_of_another_release_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError):
        scripted_amdsmi.package(scripted_amdsmi.build(tmp_path, "amdsmi_get_gpu_activity"), monkeypatch)
    assert look(gpus()).problem.startswith("amdsmi and libamd_smi.so are of different releases")


@pytest.mark.parametrize(
    ("library", "sentence"),
    [
        ({"amdsmi_init": "!34"}, "the AMD driver (amdgpu) is not loaded"),
        ({"amdsmi_get_lib_version": "1.2"}, "does not fit libamd_smi.so 1.2"),
        ({"amdsmi_get_processor_handles": "!16"}, "AMD SMI lists no GPUs"),
    ],
)
def test_failing_library_is_one_sentence(script: Script, library: dict[str, str], sentence: str) -> None:
    script(MI300X, **library)
    assert sentence in look(gpus()).problem


def test_a_library_that_is_shut_down_meanwhile_comes_back(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("diag.exporter.gpu.collector.time.monotonic", lambda: now[0])
    script(MI300X)
    one = gpus()
    look(one)
    script(MI300X | {"*": "!32"})
    assert (look(one).of("up"), look(one).problem) == (0, "AMD SMI was shut down")
    script(MI300X)
    now[0] += 31
    assert look(one).of("up") == 1


def test_a_scrape_asks_each_function_once(script: Script) -> None:
    """A server has eight GPUs, and each call reads files of the driver."""
    script(MI300X)
    one = gpus()
    look(one)
    library = __import__("amdsmi").amdsmi_wrapper._libraries["libamd_smi.so"]
    names = (b"amdsmi_get_pcie_info", b"amdsmi_get_gpu_activity", b"amdsmi_get_power_info", METRICS.encode())
    before = [library.diag_calls(name) for name in names]
    started = time.process_time()
    look(one)
    assert [library.diag_calls(name) for name in names] == [count + 1 for count in before]
    assert time.process_time() - started < 1
