"""NVIDIA's GPUs by NVML: their readings (nvidia.toml), how often each is read, and a thread that counts Xid errors.

A function of readings returns the same tuple for the same arguments, so that `nvml.Device` plans it once.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import permutations
from typing import NamedTuple

from diag.core.declarations import PACKAGE, read
from diag.core.metric_families import THROTTLE_REASONS, Sample
from diag.exporter.gpu import nvml
from diag.exporter.gpu.driver import AnyGpu, DriverUnavailable, GpuLost, ListedGpu
from diag.exporter.gpu.nvml import Device, Field, NvmlCall, NvmlReading
from diag.vllm import work

RATE = "diag_gpu_pcie_throughput_bytes_per_second"
NVLINK_BYTES = "diag_gpu_nvlink_bytes_total"
NVLINK_ERRORS_TOTAL = "diag_gpu_nvlink_errors_total"
TEMPERATURE = "diag_gpu_temperature_celsius"
MARGIN = "diag_gpu_temperature_margin_celsius"
THROTTLING = "diag_gpu_throttle_active"
PCIE_COUNTERS = {"tx": 0, "rx": 1}
"""nvmlPcieUtilCounter_t. The byte counters, field values 197 and 198, wrap at 2^32: on an H100 12 times a second."""
GpuLabels = tuple[str, str]
"""Index and UUID."""
MOST_KEPT = 1024
"""Tuples of readings that are kept, for each function: more than a host has GPUs."""


class NvmlTable(NamedTuple):
    """The file of readings."""

    each_time: tuple[NvmlReading, ...]
    constant: tuple[NvmlReading, ...]
    errors_per_link: Mapping[str, int]


@cache
def _table() -> NvmlTable:
    return read(PACKAGE / "exporter" / "gpu" / "nvidia.toml", NvmlTable)


def _labelled(gpu: GpuLabels, readings: Iterable[NvmlReading]) -> tuple[NvmlReading, ...]:
    return tuple(reading._replace(labels=gpu + reading.labels) for reading in readings)


@lru_cache(MOST_KEPT)
def each_time(gpu: GpuLabels) -> tuple[NvmlReading, ...]:
    return _labelled(gpu, _table().each_time)


@lru_cache(MOST_KEPT)
def constant(gpu: GpuLabels) -> tuple[NvmlReading, ...]:
    return _labelled(gpu, _table().constant)


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
    errors = {kind: field for kind, field in _table().errors_per_link.items() if kind not in without}
    return (
        *(
            NvmlReading(NVLINK_ERRORS_TOTAL, (*gpu, kind), (Field(field, link),), link)
            for kind, field in errors.items()
            for link in range(links)
        ),
        *(
            NvmlReading(RATE, (*gpu, way), (NvmlCall("nvmlDeviceGetPcieThroughput", (counter,), times=1_000),))
            for way, counter in PCIE_COUNTERS.items()
        ),
    )


# -- one GPU -----------------------------------------------------------------------------------------------------------

PATHS = {0: "pix", 10: "pix", 20: "pxb", 30: "phb", 40: "node", 50: "sys"}
"""nvmlGpuTopologyLevel_t; 0 is two GPUs on one board."""
LINKS = (NvmlReading("links", (), (Field(91),)),)
Values = dict[tuple[str, tuple[str, ...]], float]
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
    _latest: Values = field(default_factory=dict)

    def _read_each_time(self, device: Device, now: float) -> list[Sample]:
        processes: dict[int, int | None] = {}
        for part in (device, *self.instances):
            processes |= part.processes()
        self.processes = processes
        self.utilization = None if self.instances else device.utilization()
        values = self._latest = self._read(device, each_time(self.labels))
        if self._links and (NVLINK_BYTES, (*self.labels, "tx")) not in values:
            values |= self._read(device, link_traffic(self.labels, self._links))
        heat = values.get((TEMPERATURE, (*self.labels, "gpu")))
        if (MARGIN, self.labels) not in values and heat is not None and self._slowdown is not None:
            values[MARGIN, self.labels] = self._slowdown - heat  # an older driver does not report it
        if device.fell_silent():
            raise GpuLost
        return _as_samples(values)

    def _read_seldom(self, device: Device) -> list[Sample]:
        """Read what the readings of every scrape have not found: they are faster."""
        kinds = frozenset(labels[2] for family, labels in self._latest if family == NVLINK_ERRORS_TOTAL)
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

    def _read(self, device: Device, wanted: Sequence[NvmlReading]) -> Values:
        values: Values = {}
        for (family, labels, _, link), value in device.read(wanted):
            if family == THROTTLING:
                for name, bit in THROTTLE_REASONS.items():
                    values[family, (*labels, name)] = float(bool(int(value) & bit))
            elif link is None:
                values[family, labels] = value
            else:  # a link that does not answer for once keeps its last value, or the counter would fall
                links = self._by_link.setdefault((family, labels), {})
                links[link] = value
                values[family, labels] = sum(links.values())
        return values

    def is_named(self, names: Sequence[str]) -> bool:
        """Return True if `names` has its index or, as in CUDA, the beginning of its UUID; a MIG UUID names its GPU."""
        for name in filter(None, map(str.strip, names)):
            uuid = nvml.uuid_of_instance(name) if name.startswith("MIG-") else name
            if name == str(self.index) or (uuid.startswith("GPU-") and self.uuid.startswith(uuid)):
                return True
        return False


def _as_samples(values: Values) -> list[Sample]:
    return [(family, labels, value) for (family, labels), value in values.items()]


def identify_gpu(index: int, device: Device | None, version: str, before: NvidiaGpu | None) -> NvidiaGpu:
    """Return the GPU at an index: the `before` one if it is still there, else a new one."""
    try:
        uuid = device.ask("nvmlDeviceGetUUID") if device else None
        if device is None or uuid is None:
            raise GpuLost
        if before and before.device and before.uuid == uuid:
            before.device = device
            return before
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
        return NvidiaGpu(index, None, before.uuid if before else "", before.about if before else ())


# -- Xid errors, and the driver -------------------------------------------------------------------------------------

PAUSE = 30.0
"""Seconds between two attempts to wait for Xid errors, if the driver does not answer."""
COUNTED = (13, 31, 43, 45, 48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143)
"""Xids that have a series from the start, at 0: a counter that begins at 1 never increases."""


class XidWatch:
    """Counts Xid errors, which NVML reports only while a thread waits for them.

    It starts and stops NVML by itself. Started again after a stop, it counts on.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()
        self._watched: set[str] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to count, until `stop` or until this object is collected."""
        self._stop = threading.Event()
        weakref.finalize(self, self._stop.set)
        shared = self._counts, self._watched, self._stop  # the thread must not hold this object, or neither would end
        self._thread = threading.Thread(target=_count_xids, args=shared, name="diag-xid", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop using NVML; takes as long as one wait, and does not wait for a driver that hangs."""
        self._stop.set()
        if self._thread:
            self._thread.join(4 * nvml.WAIT / 1000)
            self._thread = None

    def samples(self, gpu: str, uuid: str) -> Iterator[Sample]:
        """Yield the counts of one GPU; also of a lost one, whose last Xid shows why."""
        if uuid in self._watched:
            counts = dict.fromkeys(COUNTED, 0) | {xid: n for (of, xid), n in list(self._counts.items()) if of == uuid}
            for xid, count in counts.items():
                yield "diag_gpu_xid_errors_total", (gpu, uuid, str(xid)), float(count)


def _count_xids(counts: Counter[tuple[str, int]], watched: set[str], stop: threading.Event) -> None:
    while not stop.is_set():
        with suppress(DriverUnavailable):
            nvml.start()
            try:
                events = nvml.Events(device for device in nvml.devices() if device)
                try:
                    watched.update(events.watched)
                    while events.watched and not stop.is_set():
                        try:
                            if xid := events.wait():
                                counts[xid] += 1
                        except GpuLost:  # raised at once, again and again; other GPUs may still report errors
                            stop.wait(1)
                finally:
                    events.close()
            finally:
                nvml.stop()
        stop.wait(PAUSE)


class NvidiaDriver:
    """NVML as a `GpuDriver`."""

    name = "nvml"
    pci_vendor = "0x10de"

    def __init__(self) -> None:
        self._gpus: list[NvidiaGpu] = []
        self._xids: XidWatch | None = None

    def start(self) -> None:
        nvml.start()

    def stop(self) -> None:
        nvml.stop()

    def count(self) -> int:
        return nvml.count()

    def gpus(self) -> Sequence[NvidiaGpu]:
        before = {gpu.index: gpu for gpu in self._gpus}
        version = nvml.driver_version()
        present = {i: identify_gpu(i, device, version, before.get(i)) for i, device in enumerate(nvml.devices())}
        gone = {i: identify_gpu(i, None, version, gpu) for i, gpu in before.items() if i not in present}
        self._gpus = [gpu for _, gpu in sorted((present | gone).items())]
        return self._gpus

    def peers(self) -> Iterator[Sample]:
        for gpu, peer in permutations(self._gpus, 2):
            if gpu.device is None or peer.device is None:
                continue
            if nvml.between("nvmlDeviceGetP2PStatus", gpu.device, peer.device, _P2P_NVLINK) == 0:
                path: str | None = "nvlink"
            else:
                path = PATHS.get(nvml.between("nvmlDeviceGetTopologyCommonAncestor", gpu.device, peer.device))
            if path:
                yield "diag_gpu_peer_info", (str(gpu.index), str(peer.index), path), 1.0

    def watch(self) -> None:
        self._xids = XidWatch()
        self._xids.start()

    def unwatch(self) -> None:
        if self._xids:
            self._xids.stop()

    def faults(self, gpu: AnyGpu) -> Iterator[Sample]:
        yield from self._xids.samples(*gpu.labels) if self._xids else ()
