"""Readings of one NVIDIA GPU: families, NVML's fields and functions, their units, and how often each is read.

Numbers and units: nvml.h 13.5. A function of readings returns the same tuple for the same arguments, so that
`nvml.Device` plans it once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import permutations

from diag.core.metric_families import THROTTLE_REASONS, Sample
from diag.exporter.gpu import nvml
from diag.exporter.gpu.driver import GpuLost, ListedGpu
from diag.exporter.gpu.nvml import Device, Field, NvmlCall, NvmlReading
from diag.vllm import work

E3, E6, E9 = 1_000, 1_000_000, 1_000_000_000
THROTTLED = {  # counters in nanoseconds: field values, then the policy of nvmlDeviceGetViolationStatus
    "sw_power_cap": ((74,), (0,)),
    "sw_thermal": ((269, 75), (1,)),  # a driver without 269 and 270 counts both kinds of heat in 75: they go here
    "hw_thermal": ((270,), ()),
    "hw_power_brake": ((271,), ()),
    "sync_boost": ((76,), (2,)),
    "board_limit": ((77,), (3,)),
    "reliability": ((79,), (5,)),
}
NVLINK_ERRORS = {"crc_flit": 38, "crc_data": 45, "replay": 52, "recovery": 59, "ecc_data": 160}
"""Field values; each counts all links at once."""
NVLINK_ERRORS_PER_LINK = {
    "replay": 161,
    "recovery": 162,
    "crc": 163,
    "malformed_packet": 206,  # from here on Blackwell and later, which refuse the three above
    "buffer_overrun": 207,
    "receive": 208,
    "receive_remote": 209,
    "receive_general": 210,
    "link_integrity": 211,
    "transmit_discard": 212,
    "link_recovery_failed": 214,
    "link_recovery": 215,
}
PCIE_COUNTERS = {"tx": 0, "rx": 1}
"""nvmlPcieUtilCounter_t. The byte counters, field values 197 and 198, wrap at 2^32: on an H100 12 times a second."""
RATE = "diag_gpu_pcie_throughput_bytes_per_second"

NVLINK_BYTES = "diag_gpu_nvlink_bytes_total"
NVLINK_ERRORS_TOTAL = "diag_gpu_nvlink_errors_total"
TEMPERATURE = "diag_gpu_temperature_celsius"
MARGIN = "diag_gpu_temperature_margin_celsius"
THROTTLING = "diag_gpu_throttle_active"
ALL_LINKS = 0xFFFFFFFF
"""nvml.h: a link of UINT_MAX is the sum over all of them."""
MEMORY = ("nvmlDeviceGetMemoryInfo", (nvml.MEMORY_V2,))
CLOCKS = {"sm": 1, "memory": 2}
_EACH_TIME = (
    NvmlReading(
        TEMPERATURE,
        ("gpu",),
        (NvmlCall("nvmlDeviceGetTemperatureV", (0,)), NvmlCall("nvmlDeviceGetTemperature", (0,))),
    ),
    NvmlReading(TEMPERATURE, ("memory",), (Field(82),)),
    NvmlReading(MARGIN, (), (NvmlCall("nvmlDeviceGetMarginTemperature"),)),
    NvmlReading(
        THROTTLING,
        (),
        (NvmlCall("nvmlDeviceGetCurrentClocksEventReasons"), NvmlCall("nvmlDeviceGetCurrentClocksThrottleReasons")),
    ),
    *(
        NvmlReading(
            "diag_gpu_throttle_seconds_total",
            (reason,),
            (
                *(Field(field, per=E9) for field in fields),
                *(NvmlCall("nvmlDeviceGetViolationStatus", (policy,), "violationTime", per=E9) for policy in policies),
            ),
        )
        for reason, (fields, policies) in THROTTLED.items()
    ),
    *(
        NvmlReading("diag_gpu_clock_hertz", (name,), (NvmlCall("nvmlDeviceGetClockInfo", (clock,), times=E6),))
        for name, clock in CLOCKS.items()
    ),
    NvmlReading(  # the mean of a second where there is one, as nvmlDeviceGetPowerUsage gives it since Ampere
        "diag_gpu_power_watts",
        (),
        (Field(185, per=E3), NvmlCall("nvmlDeviceGetPowerUsage", per=E3), Field(186, per=E3)),
    ),
    NvmlReading(
        "diag_gpu_power_limit_watts", (), (Field(190, per=E3), NvmlCall("nvmlDeviceGetEnforcedPowerLimit", per=E3))
    ),
    NvmlReading(
        "diag_gpu_energy_joules_total", (), (Field(83, per=E3), NvmlCall("nvmlDeviceGetTotalEnergyConsumption", per=E3))
    ),
    NvmlReading("diag_gpu_utilization_ratio", (), (NvmlCall("nvmlDeviceGetUtilizationRates", (), "gpu", per=100),)),
    NvmlReading("diag_gpu_memory_busy_ratio", (), (NvmlCall("nvmlDeviceGetUtilizationRates", (), "memory", per=100),)),
    *(
        NvmlReading(f"diag_gpu_memory_{what}_bytes", (), (NvmlCall(*MEMORY, what), NvmlCall(MEMORY[0], (), what)))
        for what in ("total", "used", "free")
    ),
    NvmlReading("diag_gpu_memory_reserved_bytes", (), (NvmlCall(*MEMORY, "reserved"),)),
    NvmlReading("diag_gpu_pcie_link_generation", ("current",), (NvmlCall("nvmlDeviceGetCurrPcieLinkGeneration"),)),
    NvmlReading("diag_gpu_pcie_link_width", ("current",), (NvmlCall("nvmlDeviceGetCurrPcieLinkWidth"),)),
    NvmlReading("diag_gpu_pcie_replays_total", (), (Field(94), NvmlCall("nvmlDeviceGetPcieReplayCounter"))),
    NvmlReading(NVLINK_BYTES, ("tx",), (Field(138, ALL_LINKS, times=1024),)),
    NvmlReading(NVLINK_BYTES, ("rx",), (Field(139, ALL_LINKS, times=1024),)),
    *(NvmlReading(NVLINK_ERRORS_TOTAL, (kind,), (Field(field),)) for kind, field in NVLINK_ERRORS.items()),
    NvmlReading(
        "diag_gpu_ecc_errors_total", ("corrected",), (Field(3), NvmlCall("nvmlDeviceGetTotalEccErrors", (0, 0)))
    ),
    NvmlReading(
        "diag_gpu_ecc_errors_total", ("uncorrected",), (Field(4), NvmlCall("nvmlDeviceGetTotalEccErrors", (1, 0)))
    ),
    NvmlReading("diag_gpu_remapped_rows", ("corrected",), (Field(142), NvmlCall("nvmlDeviceGetRemappedRows", (), 0))),
    NvmlReading("diag_gpu_remapped_rows", ("uncorrected",), (Field(143), NvmlCall("nvmlDeviceGetRemappedRows", (), 1))),
    NvmlReading("diag_gpu_remap_pending", (), (Field(144), NvmlCall("nvmlDeviceGetRemappedRows", (), 2))),
    NvmlReading("diag_gpu_remap_failure", (), (Field(145), NvmlCall("nvmlDeviceGetRemappedRows", (), 3))),
)
_CONSTANT = (
    *(
        NvmlReading("diag_gpu_clock_max_hertz", (name,), (NvmlCall("nvmlDeviceGetMaxClockInfo", (clock,), times=E6),))
        for name, clock in CLOCKS.items()
    ),
    NvmlReading(
        "diag_gpu_power_limit_min_watts",
        (),
        (Field(187, per=E3), NvmlCall("nvmlDeviceGetPowerManagementLimitConstraints", (), 0, per=E3)),
    ),
    NvmlReading(
        "diag_gpu_power_limit_default_watts",
        (),
        (Field(189, per=E3), NvmlCall("nvmlDeviceGetPowerManagementDefaultLimit", per=E3)),
    ),
    NvmlReading("diag_gpu_persistence_mode", (), (NvmlCall("nvmlDeviceGetPersistenceMode"),)),
    NvmlReading("diag_gpu_pcie_link_generation", ("max",), (NvmlCall("nvmlDeviceGetMaxPcieLinkGeneration"),)),
    NvmlReading("diag_gpu_pcie_link_width", ("max",), (NvmlCall("nvmlDeviceGetMaxPcieLinkWidth"),)),
)


GpuLabels = tuple[str, str]
"""Index and UUID."""
MOST_KEPT = 1024
"""Tuples of readings that are kept, for each function: more than a host has GPUs."""


def _labelled(gpu: GpuLabels, readings: Iterable[NvmlReading]) -> tuple[NvmlReading, ...]:
    return tuple(reading._replace(labels=gpu + reading.labels) for reading in readings)


@lru_cache(MOST_KEPT)
def each_time(gpu: GpuLabels) -> tuple[NvmlReading, ...]:
    return _labelled(gpu, _EACH_TIME)


@lru_cache(MOST_KEPT)
def constant(gpu: GpuLabels) -> tuple[NvmlReading, ...]:
    return _labelled(gpu, _CONSTANT)


@lru_cache(MOST_KEPT)
def link_traffic(gpu: GpuLabels, links: int) -> tuple[NvmlReading, ...]:
    """Return the readings of each link's NVLink traffic, for a driver that does not add them up."""
    kinds = {"tx": (138, 202), "rx": (139, 204)}  # the second ones are there from the fifth generation on
    return tuple(
        NvmlReading(NVLINK_BYTES, (*gpu, way), (Field(kibibytes, link, times=1024), Field(count, link)), link)
        for way, (kibibytes, count) in kinds.items()
        for link in range(links)
    )


@lru_cache(MOST_KEPT)
def slow(gpu: GpuLabels, links: int, without: frozenset[str]) -> tuple[NvmlReading, ...]:
    """Return the slow readings: PCIe rates, 21 ms each, and NVLink errors of each link, except kinds `without`."""
    errors = {kind: field for kind, field in NVLINK_ERRORS_PER_LINK.items() if kind not in without}
    return (
        *(
            NvmlReading(NVLINK_ERRORS_TOTAL, (*gpu, kind), (Field(field, link),), link)
            for kind, field in errors.items()
            for link in range(links)
        ),
        *(
            NvmlReading(RATE, (*gpu, way), (NvmlCall("nvmlDeviceGetPcieThroughput", (counter,), times=E3),))
            for way, counter in PCIE_COUNTERS.items()
        ),
    )


# -- one GPU -----------------------------------------------------------------------------------------------------------

PATHS = {0: "pix", 10: "pix", 20: "pxb", 30: "phb", 40: "node", 50: "sys"}
"""nvmlGpuTopologyLevel_t; 0 is two GPUs on one board."""
LINKS = (NvmlReading("links", (), (Field(91),)),)
Found = dict[tuple[str, tuple[str, ...]], float]
"""By family and labels."""
_SLOWDOWN = 1
_P2P_NVLINK = 2


@dataclass
class NvidiaGpu(ListedGpu[Device]):
    """One GPU of NVIDIA; `instances` are its MIG instances."""

    processes: Mapping[int, int | None] | None = field(default_factory=dict)
    instances: Sequence[Device] = ()
    _links: int = 0
    _slowdown: float | None = None
    _by_link: dict[tuple[str, tuple[str, ...]], dict[int, float]] = field(default_factory=dict)
    _found: Found = field(default_factory=dict)

    def _read_each_time(self, device: Device, now: float) -> list[Sample]:
        processes: dict[int, int | None] = {}
        for part in (device, *self.instances):
            processes |= part.processes()
        self.processes = processes
        self.utilization = None if self.instances else device.utilization()
        found = self._found = self._read(device, each_time(self.labels))
        if self._links and (NVLINK_BYTES, (*self.labels, "tx")) not in found:
            found |= self._read(device, link_traffic(self.labels, self._links))
        heat = found.get((TEMPERATURE, (*self.labels, "gpu")))
        if (MARGIN, self.labels) not in found and heat is not None and self._slowdown is not None:
            found[MARGIN, self.labels] = self._slowdown - heat  # an older driver does not report it
        if device.fell_silent():
            raise GpuLost
        return _as_samples(found)

    def _read_seldom(self, device: Device) -> list[Sample]:
        """Read what the readings of every scrape have not found: they are faster."""
        kinds = frozenset(labels[2] for family, labels in self._found if family == NVLINK_ERRORS_TOTAL)
        return _as_samples(self._read(device, slow(self.labels, self._links, kinds)))

    def _read_constant(self, device: Device) -> list[Sample]:
        self.instances = device.instances()
        self._slowdown = device.ask("nvmlDeviceGetTemperatureThreshold", _SLOWDOWN)
        self._links = int(next((value for _, value in device.read(LINKS)), 0))
        samples = _as_samples(self._read(device, constant(self.labels)))
        states = [device.ask("nvmlDeviceGetNvLinkState", link) for link in range(self._links)]
        if self._links or device.ask("nvmlDeviceGetNvLinkState", 0) is not None:
            samples.append(("diag_gpu_nvlink_active_links", self.labels, float(states.count(1))))
        if self.about and not self.instances:
            samples += work.gpu_samples(self.about[0], self.labels)
        return samples

    def _read(self, device: Device, wanted: Sequence[NvmlReading]) -> Found:
        found: Found = {}
        for (family, labels, _, link), value in device.read(wanted):
            if family == THROTTLING:
                mask = int(value)
                for name, bit in THROTTLE_REASONS.items():
                    found[family, (*labels, name)] = float(bool(mask & bit))
            elif link is None:
                found[family, labels] = value
            else:  # a link that does not answer for once keeps its last value, or the counter would fall
                links = self._by_link.setdefault((family, labels), {})
                links[link] = value
                found[family, labels] = sum(links.values())
        return found

    def is_named(self, names: Sequence[str]) -> bool:
        """Return True if `names` has its index or, as in CUDA, the beginning of its UUID; a MIG UUID names its GPU."""
        for name in filter(None, map(str.strip, names)):
            uuid = nvml.uuid_of_instance(name) if name.startswith("MIG-") else name
            if name == str(self.index) or (uuid.startswith("GPU-") and self.uuid.startswith(uuid)):
                return True
        return False


def _as_samples(found: Found) -> list[Sample]:
    return [(family, labels, value) for (family, labels), value in found.items()]


def identify_gpu(index: int, device: Device | None, version: str, known: NvidiaGpu | None) -> NvidiaGpu:
    """Return the GPU at an index: the `known` one if it is still there, else a new one."""
    try:
        uuid = device.ask("nvmlDeviceGetUUID") if device else None
        if device is None or uuid is None:
            raise GpuLost
        if known and known.device and known.uuid == uuid:
            known.device = device
            return known
        pci = device.ask("nvmlDeviceGetPciInfo")
        capability = device.ask("nvmlDeviceGetCudaComputeCapability") or ()
        about = (
            device.ask("nvmlDeviceGetName") or "",
            pci.busId if pci else "",
            version,
            ".".join(map(str, capability)),
        )
        return NvidiaGpu(index, device, uuid, about)
    except GpuLost:
        return NvidiaGpu(index, None, known.uuid if known else "", known.about if known else ())


def peers(gpus: Sequence[NvidiaGpu]) -> Iterator[Sample]:
    for gpu, peer in permutations(gpus, 2):
        if gpu.device is None or peer.device is None:
            continue
        if nvml.between("nvmlDeviceGetP2PStatus", gpu.device, peer.device, _P2P_NVLINK) == 0:
            path: str | None = "nvlink"
        else:
            path = PATHS.get(nvml.between("nvmlDeviceGetTopologyCommonAncestor", gpu.device, peer.device))
        if path:
            yield "diag_gpu_peer_info", (str(gpu.index), str(peer.index), path), 1.0
