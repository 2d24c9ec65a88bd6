"""AMD's GPUs by AMD SMI: families, the library's functions, their units, and how often each is read.

Units: amdsmi.h of ROCm 7.0. A value whose meaning differs from NVIDIA's has a family of its own or none: AMD SMI has no
PCIe byte counter by direction, and reading its XGMI error status clears it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path

from diag.core.metric_families import Sample
from diag.exporter.gpu import amdsmi
from diag.exporter.gpu.amdsmi import AmdDevice, Metrics, number
from diag.exporter.gpu.driver import AnyGpu, GpuLost, ListedGpu
from diag.vllm import work

KFD = Path("/sys/class/kfd")
"""The kernel's part of ROCm; containers see that of their host."""
E3, E6 = 1_000, 1_000_000
MIB = 1024**2
THROTTLED = {
    "sw_power_cap": range(8),
    "board_limit": range(16, 24),
    "hw_thermal": range(32, 46),
    "sw_thermal": range(46, 48),
    "reliability": range(57, 58),
}
"""Bits of indep_throttle_status (amdgpu_smu.h: power, current, temperature, PROCHOT, FIT) by NVML's word for them.

The words follow AMD's own table, "NVML API compatibility" in the documentation of AMD SMI's violations.
"""
RESIDENCY = {
    "sw_power_cap": ("ppt_residency_acc",),
    "hw_thermal": ("socket_thm_residency_acc", "vr_thm_residency_acc", "hbm_thm_residency_acc"),
    "sw_thermal": ("prochot_residency_acc",),
}
"""Counters of MI300 and later, in the steps of accumulation_counter. Kinds of heat overlap: the longest one counts."""
GENERATIONS = {2500: 1, 5000: 2, 8000: 3, 16000: 4, 32000: 5, 64000: 6}
"""PCIe's generation by its megatransfers per second."""
SENSORS = {"gpu": "EDGE", "hotspot": "HOTSPOT", "memory": "VRAM"}
PAGE_STATES = {0: "reserved", 1: "pending", 2: "unreservable"}
_XGMI = 2
SHARE_THE_HOST_MEMORY = frozenset(
    {"gfx902", "gfx90c", "gfx1033", "gfx1035", "gfx1036", "gfx1103"} | {"gfx1150", "gfx1151", "gfx1152"}
)
"""Architectures of GPUs inside a processor: what AMD SMI calls their memory is the part that the firmware reserves, and
a server allocates from the rest of the host's memory too."""
LEAST_HELD = 64 * MIB
"""Bytes below which a process does not use a GPU: ROCm's runtime opens every GPU that it sees, also those of others."""
_VRAM = ("AmdSmiMemoryType", "VRAM")
_CLOCK = "amdsmi_get_clock_info"
_CLOCKS = {"sm": ("AmdSmiClkType", "GFX"), "memory": ("AmdSmiClkType", "MEM")}
_CAP = "amdsmi_get_power_cap_info"
_ACTIVITY = "amdsmi_get_gpu_activity"
_LINK = ("amdsmi_get_pcie_info",)
_ERRORS = {"corrected": "correctable_count", "uncorrected": "uncorrectable_count", "deferred": "deferred_count"}
Values = dict[tuple[str, tuple[str, ...]], float | None]
"""By family and labels after the GPU's, None where there is no value."""


@dataclass
class AmdGpu(ListedGpu[AmdDevice]):
    """One GPU of AMD."""

    has_memory: bool = True
    """False if it has no memory of its own."""
    names: frozenset[str] = frozenset()
    """The numbers and UUIDs that HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES may name it by."""
    _limits: Mapping[str, float] = field(default_factory=dict)
    _has_ecc: bool = True
    _steps: Mapping[str, int] = field(default_factory=dict)
    _stepped_at: float = 0.0
    _throttled: dict[str, float] = field(default_factory=lambda: dict.fromkeys(RESIDENCY, 0.0))

    def _read_each_time(self, device: AmdDevice, now: float) -> list[Sample]:
        metrics = device.metrics()
        values = self._now(device, metrics)
        # what holds the clocks down: the bits of older GPUs, the time of MI300 and later
        bits = metrics["indep_throttle_status"]
        if bits is not None:
            for reason, places in THROTTLED.items():
                values["diag_gpu_throttle_active", (reason,)] = float(any(bits >> place & 1 for place in places))
        names = ("accumulation_counter", *(name for counters in RESIDENCY.values() for name in counters))
        steps = {name: value for name in names if (value := metrics[name]) is not None}
        passed = steps.get("accumulation_counter", 0) - self._steps.get("accumulation_counter", 0)
        for reason, counters in RESIDENCY.items():
            grown = [steps[name] - self._steps[name] for name in counters if name in steps and name in self._steps]
            if grown and passed > 0 and min(grown) >= 0:  # the counters begin anew with the driver
                self._throttled[reason] += min(max(grown) / passed, 1.0) * (now - self._stepped_at)
            if passed and any(name in steps for name in counters):
                values["diag_gpu_throttle_seconds_total", (reason,)] = self._throttled[reason]
        if "accumulation_counter" in steps:
            self._steps, self._stepped_at = steps, now
        if device.fell_silent():
            raise GpuLost
        if self.has_memory:  # from here on, the kernel answers for a GPU that is gone, too
            total, used = (device.number(f"amdsmi_get_gpu_memory_{kind}", args=[_VRAM]) for kind in ("total", "usage"))
            values["diag_gpu_memory_total_bytes", ()] = total
            values["diag_gpu_memory_used_bytes", ()] = used
            free = None if total is None or used is None else max(total - used, 0.0)
            values["diag_gpu_memory_free_bytes", ()] = free
        listed = device.ask("amdsmi_get_gpu_process_list")
        memory: dict[int, int | None] = {}
        for process in listed or ():
            held = number(process.get("memory_usage", {}).get("vram_mem"))
            if process.get("pid") and (held is None or held >= LEAST_HELD):
                memory[int(process["pid"])] = None if held is None else int(held)
        self.processes = None if listed is None else memory
        return self._samples(values)

    def is_named(self, names: Sequence[str]) -> bool:
        """Return True if `names` has its index or its UUID, as HIP and ROCr write them."""
        return not self.names.isdisjoint(name.strip().lower() for name in names)

    def _samples(self, values: Values) -> list[Sample]:
        return [(name, (*self.labels, *labels), value) for (name, labels), value in values.items() if value is not None]

    def _now(self, device: AmdDevice, metrics: Metrics) -> Values:
        temperatures = {sensor: _temperature(device, kind, "CURRENT") for sensor, kind in SENSORS.items()}
        margins = [
            self._limits[at] - heat for at, heat in temperatures.items() if heat is not None and at in self._limits
        ]
        powers = [
            device.number("amdsmi_get_power_info", key) for key in ("current_socket_power", "average_socket_power")
        ]
        ticks = device.ask("amdsmi_get_energy_count") or {}
        energy, tick = number(ticks.get("energy_accumulator")), number(ticks.get("counter_resolution"))
        values: Values = {("diag_gpu_temperature_celsius", (sensor,)): heat for sensor, heat in temperatures.items()}
        values["diag_gpu_temperature_margin_celsius", ()] = min(margins, default=None)
        for name, clock in _CLOCKS.items():
            values["diag_gpu_clock_hertz", (name,)] = _scaled(device.number(_CLOCK, "clk", args=[clock]), E6)
        values |= {
            ("diag_gpu_power_watts", ()): next((power for power in powers if power is not None), None),
            ("diag_gpu_power_limit_watts", ()): _scaled(device.number(_CAP, "power_cap"), per=E6),
            ("diag_gpu_energy_joules_total", ()): _scaled(energy, tick, per=E6) if tick else None,
            ("diag_gpu_utilization_ratio", ()): _scaled(device.number(_ACTIVITY, "gfx_activity"), per=100),
            ("diag_gpu_memory_busy_ratio", ()): _scaled(device.number(_ACTIVITY, "umc_activity"), per=100),
            ("diag_gpu_pcie_link_width", ("current",)): device.number(*_LINK, "pcie_metric", "pcie_width"),
            ("diag_gpu_pcie_link_generation", ("current",)): _generation(device, "pcie_metric", "pcie_speed"),
            ("diag_gpu_pcie_replays_total", ()): device.number(*_LINK, "pcie_metric", "pcie_replay_count"),
        }
        for way, counter in (("tx", "xgmi_write_data_acc"), ("rx", "xgmi_read_data_acc")):
            kilobytes = metrics.all(counter)
            values["diag_gpu_nvlink_bytes_total", (way,)] = float(sum(kilobytes) * E3) if kilobytes else None
        return values

    def _read_seldom(self, device: AmdDevice) -> list[Sample]:
        values: Values = {}
        if self._has_ecc:
            for kind, key in _ERRORS.items():
                values["diag_gpu_ecc_errors_total", (kind,)] = device.number("amdsmi_get_gpu_total_ecc_count", key)
        pages = device.ask("amdsmi_get_gpu_bad_page_info")
        if pages is not None:
            states = Counter(page.get("status") for page in pages)
            for code, state in PAGE_STATES.items():
                values["diag_gpu_retired_pages", (state,)] = float(states[code])
        states_of_links = (device.ask("amdsmi_get_gpu_xgmi_link_status") or {}).get("status")
        if states_of_links is not None:
            values["diag_gpu_nvlink_active_links", ()] = float(states_of_links.count("U"))
        return self._samples(values)

    def _read_constant(self, device: AmdDevice) -> list[Sample]:
        limits = {sensor: _temperature(device, kind, "CRITICAL") for sensor, kind in SENSORS.items()}
        self._limits = {sensor: limit for sensor, limit in limits.items() if limit}
        self._has_ecc = device.number("amdsmi_get_gpu_ecc_enabled") != 0  # without ECC the counters are 0, not missing
        constant: Values = {
            **{
                ("diag_gpu_clock_max_hertz", (name,)): _scaled(device.number(_CLOCK, "max_clk", args=[kind]), E6)
                for name, kind in _CLOCKS.items()
            },
            ("diag_gpu_power_limit_min_watts", ()): _scaled(device.number(_CAP, "min_power_cap"), per=E6),
            ("diag_gpu_power_limit_default_watts", ()): _scaled(device.number(_CAP, "default_power_cap"), per=E6),
            ("diag_gpu_pcie_link_width", ("max",)): device.number(*_LINK, "pcie_static", "max_pcie_width"),
            ("diag_gpu_pcie_link_generation", ("max",)): _generation(device, "pcie_static", "max_pcie_speed"),
        }
        return [*self._samples(constant), *work.gpu_samples(self.about[0], self.labels)]


class AmdDriver:
    """AMD SMI as a `GpuDriver`."""

    name = "amdsmi"
    pci_vendor = "0x1002"

    def __init__(self) -> None:
        self._gpus: dict[str, AmdGpu] = {}
        self._resets: amdsmi.Resets | None = None
        self._counted: Counter[str] = Counter()
        self._watched: set[str] = set()
        self._watching = False

    def start(self) -> None:
        amdsmi.start()

    def stop(self) -> None:
        self._close()
        amdsmi.stop()

    def count(self) -> int:
        return max(len(amdsmi.devices()), len(self._gpus))

    def gpus(self) -> Sequence[AmdGpu]:
        gpus = list[AmdGpu]()
        for index, device in enumerate(amdsmi.devices()):
            bdf = str(device.ask("amdsmi_get_gpu_device_bdf") or "")
            here = next((gpu.uuid for gpu in self._gpus.values() if gpu.index == index), "")
            uuid = str(device.ask("amdsmi_get_gpu_device_uuid") or bdf or here)
            if uuid in self._gpus:
                self._gpus[uuid].device, self._gpus[uuid].index = device, index
                gpus.append(self._gpus[uuid])
                continue
            asic = device.ask("amdsmi_get_gpu_asic_info") or {}
            board = device.ask("amdsmi_get_gpu_board_info") or {}
            driver = device.ask("amdsmi_get_gpu_driver_info") or {}
            runtime = device.ask("amdsmi_get_gpu_enumeration_info") or {}
            number_of_hip = number(runtime.get("hip_id"))
            serial = str(asic.get("asic_serial", "")).lower().removeprefix("0x")
            hip = index if number_of_hip is None else int(number_of_hip)
            names: Iterable[object] = (hip, uuid, runtime.get("hip_uuid"), f"GPU-{serial}" if serial else "")
            # both may be "N/A", or a number in hexadecimal where the driver does not know the product
            products = (asic.get("market_name"), board.get("product_name"))
            product = next((name for name in products if name and not name.startswith(("N/A", "0x"))), "")
            version = str(driver.get("driver_version", "")).replace("N/A", "")
            about = (str(product), bdf, version, "")
            has_memory = asic.get("target_graphics_version") not in SHARE_THE_HOST_MEMORY
            known_as = frozenset(str(name).lower() for name in names if name not in ("", None))
            gpus.append(AmdGpu(index, device, uuid, about, has_memory=has_memory, names=known_as))
        present = {gpu.uuid for gpu in gpus}
        for gpu in self._gpus.values():
            if gpu.uuid not in present:
                gpu.device = None
                gpus.append(gpu)
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._close()
        return gpus

    def peers(self) -> Iterator[Sample]:
        for gpu, peer in permutations(self._gpus.values(), 2):
            if gpu.device and peer.device and amdsmi.link_type(gpu.device, peer.device) == _XGMI:
                yield "diag_gpu_peer_info", (str(gpu.index), str(peer.index), "xgmi"), 1.0

    def watch(self) -> None:
        self._watching = True

    def unwatch(self) -> None:
        self._watching = False
        self._close()

    def faults(self, gpu: AnyGpu) -> Iterator[Sample]:
        if self._watching:
            if self._resets is None:
                here = [one for one in self._gpus.values() if one.device]
                self._resets = amdsmi.Resets([one.device for one in here if one.device])
                self._watched |= {one.uuid for one in here if one.device and self._resets.watches(one.device)}
            for address in self._resets.new():
                reset = (one for one in self._gpus.values() if one.device and self._resets.is_of(address, one.device))
                self._counted.update(one.uuid for one in reset)
        if gpu.uuid in self._watched:
            yield "diag_gpu_resets_total", gpu.labels, float(self._counted[gpu.uuid])

    def _close(self) -> None:
        if self._resets:
            self._resets.close()
            self._resets = None


def _scaled(value: float | None, times: float = 1, per: float = 1) -> float | None:
    return None if value is None else value * times / per


def _generation(device: AmdDevice, *keys: str) -> float | None:
    megatransfers = device.number(*_LINK, *keys)
    generation = GENERATIONS.get(round(megatransfers)) if megatransfers is not None else None
    return None if generation is None else float(generation)


def _temperature(device: AmdDevice, sensor: str, metric: str) -> float | None:
    args = [("AmdSmiTemperatureType", sensor), ("AmdSmiTemperatureMetric", metric)]
    return device.number("amdsmi_get_temp_metric", args=args)
