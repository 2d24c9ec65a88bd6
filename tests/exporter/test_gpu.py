"""GPUs by the real nvidia-ml-py over a scripted C library: every unit, every fallback, and GPUs that go away."""

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pynvml
import pytest
from support import scripted_nvml
from support.collected_gpus import Shown, look
from support.scripted_nvml import GIB, H100, LOST, T4

from diag.core.metric_families import THROTTLE_REASONS
from diag.exporter.gpu import collector, nvml
from diag.exporter.gpu.collector import GpuCollector
from diag.exporter.process.server import Owner

Script = Callable[..., None]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """Writes what the GPUs say; the library is found as a driver's is, by its name."""
    yield from _loaded(tmp_path, monkeypatch)


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """Return the GPUs with a driver of 2020."""
    yield from _loaded(tmp_path, monkeypatch, "OLD_DRIVER")


@pytest.fixture(scope="module", autouse=True)
def _no_exporter_of_another_file() -> None:
    gc.collect()  # an exporter that another test left behind would start this library too, and be counted


def _loaded(folder: Path, monkeypatch: pytest.MonkeyPatch, *defines: str) -> Iterator[Script]:
    gc.collect(1)  # the exporters of this file; all that earlier files left in caches would take half a second a test
    for thread in threading.enumerate():
        if thread.name == "diag-xid":
            # only the thread itself still knows its event, and forgets it as it ends
            *_, stop = getattr(thread, "_args", None) or (threading.Event(),)
            stop.set()
            thread.join(5)
    place = folder / "script"
    monkeypatch.setenv("DIAG_NVML_SCRIPT", str(place))
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(scripted_nvml.build(folder, *defines))))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    yield lambda *gpus, **driver: scripted_nvml.write(place, gpus, **driver)


def gpus(*select: str, owners: Mapping[int, Owner] | None = None, visible: str | None = None) -> GpuCollector:
    return GpuCollector(select, lambda: owners or {}, lambda: visible, pci=Path("no such folder"))


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("up", (), 1),
        ("temperature_celsius", ("gpu",), 55),
        ("temperature_celsius", ("memory",), 60),
        ("temperature_margin_celsius", (), 32),
        ("clock_hertz", ("sm",), 1980e6),
        ("clock_hertz", ("memory",), 2619e6),
        ("clock_max_hertz", ("sm",), 1980e6),
        ("power_watts", (), 400),
        ("power_limit_watts", (), 700),
        ("power_limit_min_watts", (), 200),
        ("power_limit_default_watts", (), 700),
        ("energy_joules_total", (), 123_456),
        ("utilization_ratio", (), 0.9),
        ("memory_busy_ratio", (), 0.6),
        ("memory_total_bytes", (), 80 * GIB),
        ("memory_reserved_bytes", (), GIB),
        ("memory_free_bytes", (), 9 * GIB),
        ("memory_used_bytes", (), 70 * GIB),
        ("throttle_seconds_total", ("sw_power_cap",), 5),
        ("pcie_throughput_bytes_per_second", ("tx",), 1_000_000),
        ("pcie_throughput_bytes_per_second", ("rx",), 2_000_000),
        ("pcie_link_generation", ("current",), 5),
        ("pcie_link_width", ("max",), 16),
        ("pcie_replays_total", (), 0),
        ("nvlink_bytes_total", ("tx",), 18 * 1000 * 1024),
        ("nvlink_bytes_total", ("rx",), 18 * 2000 * 1024),
        ("nvlink_active_links", (), 18),
        ("ecc_errors_total", ("corrected",), 1),
        ("ecc_errors_total", ("uncorrected",), 0),
        ("remapped_rows", ("corrected",), 3),
        ("remapped_rows", ("uncorrected",), 2),
        ("remap_failure", (), 1),
    ],
)
def test_every_value_has_the_unit_of_its_name(script: Script, name: str, labels: tuple[str, ...], value: float) -> None:
    script(H100 | {"remapped": "3 2 0 1"})
    assert look(gpus()).of(name, 0, *labels) == value


NVML_NAMES = {
    "gpu_idle": "GpuIdle",
    "applications_clocks": "ApplicationsClocksSetting",
    "sw_power_cap": "SwPowerCap",
    "hw_slowdown": "HwSlowdown",
    "sync_boost": "SyncBoost",
    "sw_thermal": "SwThermalSlowdown",
    "hw_thermal": "HwThermalSlowdown",
    "hw_power_brake": "HwPowerBrakeSlowdown",
    "display_clocks": "DisplayClockSetting",
}
"""Board limit and reliability are newer than pynvml."""


@pytest.mark.parametrize(("reason", "name"), NVML_NAMES.items())
def test_a_throttle_reason_has_the_bit_of_nvml(reason: str, name: str) -> None:
    assert THROTTLE_REASONS[reason] == getattr(pynvml, f"nvmlClocksEventReason{name}")


@pytest.mark.parametrize(("reason", "bit"), THROTTLE_REASONS.items())
def test_every_bit_is_the_reason_of_its_name(script: Script, bit: int, reason: str) -> None:
    script(H100 | {"reasons": bit})
    shown = look(gpus())
    active = [name for name in THROTTLE_REASONS if shown.of("throttle_active", 0, name)]
    assert active == [reason]


@pytest.mark.parametrize("reason", ["sw_thermal", "hw_thermal", "hw_power_brake", "sw_power_cap"])
def test_time_throttled_is_in_seconds_by_reason(script: Script, reason: str) -> None:
    script(H100 | {f"throttled_{reason}": 2_500_000_000})
    assert look(gpus()).of("throttle_seconds_total", 0, reason) == 2.5


def test_gpu_info_has_the_product_properties(script: Script) -> None:
    script(H100)
    info = next(key for key in look(gpus()).values if key[0] == "diag_gpu_info")
    assert info[3:] == ("NVIDIA H100 80GB HBM3", "00000000:00:00.0", "580.95.05", "9.0")


# -- what is not there ------------------------------------------------------------------------------------------------


def test_unsupported_metric_has_no_sample(script: Script) -> None:
    script({"uuid": "GPU-1", "name": "Nothing"})
    assert look(gpus()).names() == {"up", "info"}


@pytest.mark.parametrize("code", ["!3", "!4", "!13", "!999"])
def test_one_call_that_fails_costs_only_its_own_sample(script: Script, code: str) -> None:
    script(H100 | {"temperature": code})
    shown = look(gpus())
    assert shown.of("temperature_celsius", 0, "gpu") is None
    assert (shown.of("up"), shown.of("power_watts"), shown.problem) == (1, 400, "")


def test_old_driver_is_called_by_its_own_function_names(old: Script) -> None:
    old(H100 | {"margin": None, "slowdown": 90, "also": {"nvmlDeviceGetViolationStatus 1": 7_000_000_000}})
    shown = look(gpus())
    assert shown.of("temperature_celsius", 0, "gpu") == 55
    assert shown.of("temperature_margin_celsius") == 35
    assert shown.of("throttle_active", 0, "sw_power_cap") == 1
    assert shown.of("throttle_seconds_total", 0, "sw_thermal") == 7
    assert shown.of("memory_used_bytes") == 70 * GIB
    assert shown.of("memory_reserved_bytes") is None


def test_pcie_traffic_is_the_sampled_rate_because_the_byte_counters_of_the_driver_wrap(script: Script) -> None:
    script(H100 | {"also": {"field 197 0": 2**32 - 1, "field 198 0": 12}})
    shown = look(gpus())
    assert shown.of("pcie_throughput_bytes_per_second", 0, "rx") == 2_000_000
    assert shown.of("pcie_bytes_total", 0, "rx") is None


def test_unsupported_call_is_not_repeated_at_each_scrape(script: Script) -> None:
    script(H100 | {"temperature": None})
    one = gpus()
    for _ in range(10):
        look(one)
    assert pynvml.nvmlLib.diag_calls(b"nvmlDeviceGetTemperatureV") == 1


def test_constant_properties_are_read_once(script: Script) -> None:
    script(H100)
    one = gpus()
    look(one)
    before = pynvml.nvmlLib.diag_calls(b"nvmlDeviceGetMaxClockInfo")
    for _ in range(10):
        look(one)
    assert pynvml.nvmlLib.diag_calls(b"nvmlDeviceGetMaxClockInfo") == before


def test_missing_nvml_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(ctypes, "CDLL", _no_library)
    monkeypatch.setattr(pynvml, "CDLL", _no_library, raising=False)
    shown = look(gpus())
    assert (shown.values, shown.problem) == ({}, "libnvidia-ml.so.1 not found: no NVIDIA driver here")


@pytest.mark.parametrize(
    ("vendors", "select", "expected"),
    [(["0x8086"], (), False), (["0x8086", "0x10de"], (), True), (["0x8086"], ("0",), True)],
    ids=["no NVIDIA device", "an NVIDIA device", "a GPU that was named"],
)
def test_a_missing_driver_is_a_problem_where_there_is_something_to_drive(
    script: Script, tmp_path: Path, vendors: list[str], select: tuple[str, ...], expected: bool
) -> None:
    script(H100, nvmlInit="!9")
    for number, vendor in enumerate(vendors):
        (tmp_path / "pci" / str(number)).mkdir(parents=True)
        (tmp_path / "pci" / str(number) / "vendor").write_text(f"{vendor}\n")
    one = GpuCollector(select, dict, lambda: None, pci=tmp_path / "pci")
    assert [bool(look(one).problem) for _ in range(2)] == [expected, expected]


def _no_library(*_: object) -> None:
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


@pytest.mark.parametrize(
    ("code", "sentence"), [("!18", "differ in version"), ("!9", "not loaded"), ("!4", "permission")]
)
def test_failing_driver_is_one_sentence(script: Script, code: str, sentence: str) -> None:
    script(H100, nvmlInit=code)
    shown = look(gpus())
    assert sentence in shown.problem
    assert shown.values == {}


# -- what changes -----------------------------------------------------------------------------------------------------


def test_a_t4_throttles_at_83_and_returns_at_78(script: Script) -> None:
    one = gpus()
    seen = []
    states = [(82, 1590, 0x4, 0), (83, 900, 0x20, 1), (80, 900, 0x20, 4), (78, 1590, 0x4, 4)]
    for heat, clock, reasons, seconds in states:
        script(
            T4 | {"temperature": heat, "clock_sm": clock, "reasons": reasons, "throttled_sw_thermal": seconds * 10**9}
        )
        shown = look(one)
        seen.append(
            (
                shown.of("temperature_celsius", 0, "gpu"),
                shown.of("clock_hertz", 0, "sm"),
                shown.of("throttle_active", 0, "sw_thermal"),
                shown.of("throttle_seconds_total", 0, "sw_thermal"),
            )
        )
    assert seen == [(82, 1590e6, 0, 0), (83, 900e6, 1, 1), (80, 900e6, 1, 4), (78, 1590e6, 0, 4)]


def test_a_rank_that_spins_beside_one_that_stands_still(script: Script) -> None:
    script(H100 | {"utilization": 96, "power": 20_000}, H100 | {"utilization": 0})
    shown = look(gpus())
    assert (shown.of("utilization_ratio"), shown.of("power_watts")) == (0.96, 20)
    assert shown.of("utilization_ratio", 1) == 0


def test_a_gpu_that_is_lost_keeps_its_info_and_the_others_go_on(script: Script) -> None:
    script(H100, H100)
    one = gpus()
    look(one)
    script(H100, LOST)
    shown = look(one)
    assert (shown.of("up", 1), shown.names(1), shown.problem) == (0, {"up", "info"}, "GPU 1 does not answer")
    assert (shown.of("up", 0), shown.of("power_watts", 0)) == (1, 400)


def test_single_lost_error_marks_the_gpu_as_lost(script: Script) -> None:
    """The driver may still answer calls from its cache."""
    script(H100 | {"also": {"nvmlDeviceGetUtilizationRates": "!15"}})
    shown = look(gpus())
    assert (shown.of("up"), shown.names(0)) == (0, {"up", "info"})


def test_a_gpu_that_comes_back_is_found_again(script: Script) -> None:
    script(H100, H100)
    one = gpus()
    look(one)
    script(H100, LOST)
    look(one)
    script(H100, H100)
    look(one)
    shown = look(one)
    assert (shown.of("up", 1), shown.of("power_watts", 1), shown.problem) == (1, 400, "")


@pytest.mark.parametrize("code", ["!1", "!9"])
def test_a_driver_that_is_unloaded_meanwhile_comes_back(
    script: Script, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr(collector, "RETRY", 0.05)
    script(H100)
    one = gpus()
    look(one)
    script(H100, **{"*": code})
    shown = look(one)
    assert (shown.of("up"), shown.names()) == (0, {"up", "info"})
    script(H100)
    time.sleep(0.1)
    assert look(one).of("power_watts") == 400


def test_a_gpu_that_is_gone_from_the_list_is_not_up_and_a_new_one_is_shown(script: Script) -> None:
    script(H100, H100)
    one = gpus()
    look(one)
    script(H100)
    assert look(one).of("up", 1) == 0
    script(H100, H100, H100)
    assert [look(one).of("up", i) for i in range(3)] == [1, 1, 1]


def test_a_gpu_has_the_peaks_of_its_data_sheet_where_there_is_one(script: Script) -> None:
    script(H100, H100 | {"name": "NVIDIA Unheard 9000"})
    shown = look(gpus())
    assert shown.of("memory_bandwidth_max_bytes_per_second") == 3352e9
    assert shown.of("flops_max", 0, "fp8") == 1979e12
    assert shown.of("nvlink_max_bytes_per_second") == 450e9
    assert not {name for name in shown.names(1) if "max_bytes" in name or "flops" in name}


def test_a_multi_instance_gpu_has_no_utilisation_and_counts_the_processes_of_its_instances(script: Script) -> None:
    mig = {
        "also": {
            "nvmlDeviceGetMigMode": "1 1",
            "nvmlDeviceGetMaxMigDeviceCount": "7",
            "0.1 x": "",
        }
    }
    script(H100 | {"utilization": None, "memory_busy": None} | mig)
    instance = "0.1 nvmlDeviceGetUUID = MIG-1\n0.1 processes = 1\n0.1 process 0 = 77 1000\n"
    place = Path(os.environ["DIAG_NVML_SCRIPT"])
    place.write_text(place.read_text() + instance)
    shown = look(gpus(owners={77: Owner("worker", "0")}))
    assert shown.of("utilization_ratio") is None
    assert shown.of("process_memory_bytes", 0, "77", "worker", "0") == 1000
    assert shown.of("memory_bandwidth_max_bytes_per_second") is None  # an instance has a part of it
    assert look(gpus(visible="MIG-1")).of("serving") == 1


def test_a_sum_over_links_does_not_fall_when_one_of_them_does_not_answer(script: Script) -> None:
    two = H100 | {"links": 2}
    each = {f"field {field} {2**32 - 1}": "!2" for field in (138, 139)}
    script(two | {"also": each})
    one = gpus()
    before = look(one).of("nvlink_bytes_total", 0, "tx")
    script(two | {"also": each | {"field 138 1": "!999"}})
    assert look(one).of("nvlink_bytes_total", 0, "tx") == before == 2 * 1000 * 1024


def test_errors_of_all_links_are_added_by_kind(script: Script) -> None:
    errors = {"field 161 0": 1, "field 161 1": 2, "field 162 0": 5}
    script(H100 | {"links": 2, "also": errors})
    shown = look(gpus())
    assert shown.of("nvlink_errors_total", 0, "replay") == 3
    assert shown.of("nvlink_errors_total", 0, "recovery") == 5


def test_paths_between_gpus_are_published_in_both_directions(script: Script) -> None:
    pix, linked = {"nvmlDeviceGetTopologyCommonAncestor 1": 10}, {"nvmlDeviceGetP2PStatus 2 2": 0}
    back = {"nvmlDeviceGetTopologyCommonAncestor 0": 10, "nvmlDeviceGetTopologyCommonAncestor 2": 50}
    script(H100 | {"also": {**pix, **linked}}, H100 | {"also": back}, H100)
    paths = {key[1:] for key in look(gpus()).values if key[0] == "diag_gpu_peer_info"}
    assert paths == {("0", "1", "pix"), ("1", "0", "pix"), ("0", "2", "nvlink"), ("1", "2", "sys")}


# -- whose they are ---------------------------------------------------------------------------------------------------

WORKER = {os.getpid(): Owner("worker", "1")}


def shown_gpus(one: GpuCollector) -> set[str]:
    return {key[1] for key in look(one).values if key[0] == "diag_gpu_up"}


def test_the_gpus_of_the_servers_processes_are_shown(script: Script) -> None:
    script(H100, H100 | {"processes": {os.getpid(): 5 * GIB}}, H100)
    one = gpus(owners=WORKER)
    assert shown_gpus(one) == {"1"}
    shown = look(one)
    assert shown.of("serving", 1) == 1
    assert shown.of("process_memory_bytes", 1, str(os.getpid()), "worker", "1") == 5 * GIB


def test_a_gpu_stays_when_its_process_has_ended(script: Script) -> None:
    script(H100, H100 | {"processes": {os.getpid(): GIB}})
    one = gpus(owners=WORKER)
    shown_gpus(one)
    script(H100, H100)
    assert shown_gpus(one) == {"1"}
    assert look(one).of("serving", 1) == 0


def test_processes_of_others_and_invisible_processes_are_distinguished(script: Script) -> None:
    script(H100 | {"processes": {os.getppid(): GIB, 4_000_000: 2 * GIB}})
    shown = look(gpus())
    assert shown.of("process_memory_bytes", 0, str(os.getppid()), "other", "") == GIB
    assert shown.of("process_memory_bytes", 0, "4000000", "unknown", "") == 2 * GIB


def test_memory_that_is_not_known_has_no_sample(script: Script) -> None:
    script(H100 | {"processes": {os.getpid(): 2**64 - 1}})
    shown = look(gpus(owners=WORKER))
    assert "process_memory_bytes" not in shown.names()
    assert shown.of("serving") == 1


def test_the_time_of_each_process_is_told_apart_from_a_driver_that_does_not_tell(script: Script) -> None:
    own, other = os.getpid(), os.getppid()
    processes = {"processes": {own: GIB, other: GIB}}
    script(H100 | processes | {"process_utilization": {other: 66}}, H100 | processes)
    shown = look(gpus(owners={own: Owner("engine", "0")}))
    of = {
        key[3]: value for key, value in shown.values.items() if key[:2] == ("diag_gpu_process_utilization_ratio", "0")
    }
    assert of == {str(own): 0, str(other): 0.66}
    assert "process_utilization_ratio" not in shown.names(1)
    script(H100 | processes | {"process_utilization": {}})
    idle = look(gpus(owners={own: Owner("engine", "0")}))
    assert idle.of("process_utilization_ratio", 0, str(other), "other", "") == 0


def test_serving_gpus_are_unknown_without_visible_processes(script: Script) -> None:
    script(H100 | {"processes": {4_000_000: GIB}}, H100)
    shown = look(gpus(owners=WORKER))
    assert (shown.of("serving", 0), shown.of("serving", 1)) == (None, None)
    assert shown_gpus(gpus(owners=WORKER)) == {"0", "1"}


@pytest.mark.parametrize(
    ("select", "visible", "wanted"),
    [
        (("1",), None, {"1"}),
        (("0", "2"), None, {"0", "2"}),
        (("GPU-20aaaa",), None, {"2"}),
        (("1",), "0", {"1"}),
        ((), "0,2", {"0", "2"}),
        ((), " 1", {"1"}),
        ((), "GPU-10aaaa-bbbb-cccc-dddd-eeeeeeeeeeee", {"1"}),
        ((), None, {"0", "1", "2"}),
    ],
)
def test_gpus_are_chosen_by_name_or_by_the_servers_environment(
    script: Script, select: tuple[str, ...], visible: str | None, wanted: set[str]
) -> None:
    script(*[H100] * 3)
    assert shown_gpus(gpus(*select, visible=visible)) == wanted


def test_nonexistent_gpu_is_reported(script: Script) -> None:
    script(H100)
    shown = look(gpus("7"))
    assert (shown.problem, shown.names()) == ("--gpus 7 names no GPU of this host", set())


# -- Xid --------------------------------------------------------------------------------------------------------------


def until(one: GpuCollector, true: Callable[[Shown], bool]) -> Shown:
    end = time.monotonic() + 60
    while not true(shown := look(one)) and time.monotonic() < end:
        time.sleep(0.05)
    return shown


def test_an_xid_is_counted_from_zero(script: Script) -> None:
    script(H100, H100)
    one, before = gpus(), set(threading.enumerate())
    one.start()
    try:
        born = until(one, lambda shown: shown.of("xid_errors_total", 1, "79") is not None)
        assert (born.of("xid_errors_total", 0, "79"), born.of("xid_errors_total", 1, "79")) == (0, 0)
        script(H100, H100, events="1:79 1:31")
        shown = until(one, lambda shown: shown.of("xid_errors_total", 1, "31") == 1)
        assert (shown.of("xid_errors_total", 1, "79"), shown.of("xid_errors_total", 0, "79")) == (1, 0)
    finally:
        one.stop()
    assert set(threading.enumerate()) <= before


def test_xids_are_unknown_without_a_watch(script: Script) -> None:
    script(H100)
    assert "xid_errors_total" not in look(gpus()).names()


def test_nvml_handles_are_closed(script: Script) -> None:
    """Every start of NVML but ours is followed by its shutdown."""
    script(H100)
    one = gpus()
    one.start()
    until(one, lambda shown: "xid_errors_total" in shown.names())
    one.stop()
    calls = pynvml.nvmlLib.diag_calls
    assert calls(b"nvmlInitWithFlags") - calls(b"nvmlShutdown") == 1
    assert calls(b"nvmlEventSetFree") == 1
    assert nvml.WAIT <= 1000
