"""The GPUs of one vLLM server as NVML shows them: which they are, and all that can be read of each."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from diag.core.metric_families import Collected, Sample
from diag.core.throttle_reasons import THROTTLE_REASONS
from diag.exporter.gpu import nvml
from diag.exporter.gpu.nvml import Device, Field, GpuLost, NvmlReading, NvmlUnavailable
from diag.exporter.gpu.readings import NVLINK_BYTES, READINGS, UNCHANGING, of_links, seldom
from diag.exporter.gpu.xid import XidWatch

if TYPE_CHECKING:
    from diag.exporter.process.ownership import Owner

RETRY = 30.0
"""Seconds between two starts of NVML, while there is no driver or a GPU is lost."""
ANEW = 300.0
"""Seconds after which what does not change, and what a GPU refused, is asked again."""
SELDOM = 10.0
"""Seconds between two looks at what is slow."""
PATHS = {0: "pix", 10: "pix", 20: "pxb", 30: "phb", 40: "node", 50: "sys"}
"""nvmlGpuTopologyLevel_t; 0 is two GPUs on one board."""
LINKS = (NvmlReading("links", (), (Field(91),)),)
_SLOWDOWN = 1
_P2P_NVLINK = 2


@dataclass
class Gpu:
    """One GPU, with what of it outlives a look; without a device it is lost."""

    index: int
    device: Device | None
    uuid: str
    about: tuple[str, ...]
    is_up: bool = False
    processes: Mapping[int, int | None] = field(default_factory=dict)
    instances: Sequence[Device] = ()
    _links: int = 0
    _each_link: Sequence[NvmlReading] = ()
    _slowdown: float | None = None
    _constant: Sequence[Sample] = ()
    _rare: Sequence[Sample] = ()
    _by_link: dict[tuple[str, tuple[str, ...]], dict[int | None, float]] = field(default_factory=dict)
    _anew_at: float = 0.0
    _seldom_at: float = 0.0

    @property
    def labels(self) -> tuple[str, str]:
        """Of every sample."""
        return str(self.index), self.uuid

    def look(self, now: float) -> list[Sample]:
        """All of it, nothing when it is lost. Raises NvmlUnavailable."""
        samples: list[Sample] = []
        self.is_up = self.device is not None
        try:
            if self.device:
                samples = self._samples(self.device, now)
                self.is_up = not self.device.fell_silent()
        except GpuLost:
            self.is_up = False
        return samples if self.is_up else []

    def _samples(self, device: Device, now: float) -> list[Sample]:
        if now >= self._anew_at:
            self._renew(device, now)
        self.processes = _processes((device, *self.instances))
        found = self._read(device, READINGS)
        if self._links and not any(family == NVLINK_BYTES for family, _, _ in found):
            found += self._read(device, self._each_link)
        if now >= self._seldom_at:
            self._rare = self._slow(device, found)
            self._seldom_at = now + SELDOM
        return [*found, *self._rare, *self._constant, *self._margin(found)]

    def _renew(self, device: Device, now: float) -> None:
        device.forget()
        self.instances = device.instances()
        self._slowdown = device.ask("nvmlDeviceGetTemperatureThreshold", _SLOWDOWN)
        self._links = int(next((value for _, value in device.read(LINKS)), 0))
        self._each_link = of_links(self._links)
        self._constant = [*self._read(device, UNCHANGING), *self._active_links(device)]
        self._anew_at = now + ANEW

    def _active_links(self, device: Device) -> Iterator[Sample]:
        states = [device.ask("nvmlDeviceGetNvLinkState", link) for link in range(self._links)]
        if self._links or device.ask("nvmlDeviceGetNvLinkState", 0) is not None:
            yield "diag_gpu_nvlink_active_links", self.labels, float(states.count(1))

    def _read(self, device: Device, readings: Sequence[NvmlReading]) -> list[Sample]:
        found: dict[tuple[str, tuple[str, ...]], float] = {}
        gpu = self.labels
        for reading, value in device.read(readings):
            labels = gpu + reading.labels
            if reading.family == "diag_gpu_throttle_active":
                mask = int(value)
                active = {name: float(bool(mask & bit)) for name, bit in THROTTLE_REASONS.items()}
                found |= {(reading.family, (*labels, name)): state for name, state in active.items()}
            else:
                found[reading.family, labels] = value if reading.part is None else self._sum(reading, value)
        return [(family, labels, value) for (family, labels), value in found.items()]

    def _sum(self, reading: NvmlReading, value: float) -> float:
        """Over all links; one that does not answer for once keeps its last value, or the counter would fall."""
        links = self._by_link.setdefault((reading.family, reading.labels), {})
        links[reading.part] = value
        return sum(links.values())

    def _slow(self, device: Device, found: Sequence[Sample]) -> list[Sample]:
        kinds = frozenset(labels[2] for family, labels, _ in found if family == "diag_gpu_nvlink_errors_total")
        counted = any(family == "diag_gpu_pcie_bytes_total" for family, _, _ in found)
        return self._read(device, seldom(self._links, kinds, not counted))

    def _margin(self, found: Sequence[Sample]) -> Iterator[Sample]:
        """Where the driver does not tell it: what is left to the slowdown threshold."""
        known = any(family == "diag_gpu_temperature_margin_celsius" for family, _, _ in found)
        heat = next(
            (v for family, labels, v in found if family.endswith("temperature_celsius") and labels[2] == "gpu"), None
        )
        if not known and heat is not None and self._slowdown is not None:
            yield "diag_gpu_temperature_margin_celsius", self.labels, self._slowdown - heat

    def info(self) -> Iterator[Sample]:
        """What is said of a lost one, too."""
        yield "diag_gpu_up", self.labels, float(self.is_up)
        if self.about:
            yield "diag_gpu_info", (*self.labels, *self.about), 1.0


def _processes(devices: Sequence[Device]) -> Mapping[int, int | None]:
    found: dict[int, int | None] = {}
    for device in devices:
        found |= device.processes()
    return found


class GpuCollector:
    """All GPUs of this server.

    Those named with `--gpus`; else those that a process of the server is on or that its CUDA_VISIBLE_DEVICES names;
    else all. A GPU that was shown once stays, or a crash would take its series away.
    """

    name = "nvml"

    def __init__(
        self,
        select: tuple[str, ...],
        owners: Callable[[], "Mapping[int, Owner]"],
        visible: Callable[[], str | None],
        proc: Path = Path("/proc"),
    ) -> None:
        self._select = select
        self._owners = owners
        self._visible = visible
        self._proc = proc
        self._gpus: list[Gpu] = []
        self._shown: set[str] = set()
        self._peers: list[Sample] = []
        self._started = False
        self._start_at = self._anew_at = 0.0
        self._why = ""
        self._xids: XidWatch | None = None

    def start(self) -> None:
        """Count Xid errors from now on."""
        self._xids = XidWatch()
        self._xids.start()

    def stop(self) -> None:
        """Count no more."""
        if self._xids:
            self._xids.stop()

    def collect(self) -> Collected:
        """Every GPU of the server as it is now."""
        now = time.monotonic()
        try:
            self._begin(now)
            by_gpu = [(gpu, gpu.look(now)) for gpu in self._gpus]
        except NvmlUnavailable as error:
            self._end(str(error), now)
            return Collected([sample for gpu in self._gpus for sample in gpu.info()], self._why)
        return Collected(list(self._of(by_gpu)), self._problem(now))

    def _begin(self, now: float) -> None:
        if not self._started:
            if now < self._start_at:
                raise NvmlUnavailable(self._why)
            nvml.start()
            self._started = True
            self._enumerate()
        elif nvml.count() != len(self._gpus):
            self._enumerate()

    def _end(self, why: str, now: float) -> None:
        if self._started:
            nvml.stop()
        if self._started or now >= self._start_at:
            self._start_at = now + RETRY
        self._started, self._why = False, why
        for gpu in self._gpus:
            gpu.is_up = False

    def _enumerate(self) -> None:
        known = {gpu.index: gpu for gpu in self._gpus}
        version = nvml.driver_version()
        found = {i: _gpu(i, device, version, known.get(i)) for i, device in enumerate(nvml.devices())}
        gone = {i: _gpu(i, None, version, gpu) for i, gpu in known.items() if i not in found}
        self._gpus = [each for _, each in sorted((found | gone).items())]
        self._peers = list(_peers([each for each in self._gpus if each.device]))

    def _problem(self, now: float) -> str:
        lost = [str(gpu.index) for gpu in self._gpus if not gpu.is_up]
        if lost and now >= self._anew_at:  # a GPU that was reset is found by a new start only
            self._anew_at = now + RETRY
            nvml.stop()
            self._started = False
        if self._select and not any(_is_named(gpu, self._select) for gpu in self._gpus):
            return f"--gpus {','.join(self._select)} names no GPU of this host"
        return f"GPU {', '.join(lost)} does not answer" if lost else ""

    def _of(self, by_gpu: Sequence[tuple[Gpu, list[Sample]]]) -> Iterator[Sample]:
        owners = self._owners()
        serving = {gpu.uuid: self._serves(gpu, owners) for gpu, _ in by_gpu}
        self._shown |= {uuid for uuid, is_serving in serving.items() if is_serving}
        for gpu, samples in by_gpu:
            if (self._shown or self._select) and gpu.uuid not in self._shown:
                continue
            yield from gpu.info()
            yield from samples
            yield from self._xids.samples(*gpu.labels) if self._xids else ()
            yield from self._users(gpu, owners)
            if serving[gpu.uuid] is not None:
                yield "diag_gpu_serving", gpu.labels, float(bool(serving[gpu.uuid]))
        yield from self._peers

    def _serves(self, gpu: Gpu, owners: "Mapping[int, Owner]") -> bool | None:
        """Whether this vLLM is on it; None where that cannot be told."""
        if self._select:
            return _is_named(gpu, self._select)
        if not gpu.processes.keys().isdisjoint(owners):
            return True
        visible = self._visible()
        if visible is not None:
            return _is_named(gpu, tuple(visible.split(",")))
        seen = owners and all((self._proc / str(pid)).exists() for each in self._gpus for pid in each.processes)
        return False if seen else None

    def _users(self, gpu: Gpu, owners: "Mapping[int, Owner]") -> Iterator[Sample]:
        for pid, used in gpu.processes.items():
            owner = owners.get(pid)
            role = owner.role if owner else "other" if (self._proc / str(pid)).exists() else "unknown"
            if used is not None and gpu.is_up:
                yield (
                    "diag_gpu_process_memory_bytes",
                    (*gpu.labels, str(pid), role, owner.rank if owner else ""),
                    float(used),
                )


def _gpu(index: int, device: Device | None, version: str, known: Gpu | None) -> Gpu:
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
        return Gpu(index, device, uuid, about)
    except GpuLost:
        return Gpu(index, None, known.uuid if known else "", known.about if known else ())


def _is_named(gpu: Gpu, names: Sequence[str]) -> bool:
    """By index or by the beginning of its UUID, as CUDA takes it; a MIG instance counts for its GPU."""
    for name in (each.strip() for each in names if each.strip()):
        uuid = nvml.uuid_of_instance(name) if name.startswith("MIG-") else name
        if name == str(gpu.index) or (uuid.startswith("GPU-") and gpu.uuid.startswith(uuid)):
            return True
    return False


def _peers(gpus: Sequence[Gpu]) -> Iterator[Sample]:
    for gpu in gpus:
        for peer in gpus:
            path = _path(gpu, peer) if gpu is not peer else None
            if path:
                yield "diag_gpu_peer_info", (str(gpu.index), str(peer.index), path), 1.0


def _path(gpu: Gpu, peer: Gpu) -> str | None:
    if gpu.device is None or peer.device is None:
        return None
    if nvml.between("nvmlDeviceGetP2PStatus", gpu.device, peer.device, _P2P_NVLINK) == 0:
        return "nvlink"
    return PATHS.get(nvml.between("nvmlDeviceGetTopologyCommonAncestor", gpu.device, peer.device))
