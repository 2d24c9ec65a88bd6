"""One GPU as NVML shows it: its identity, all that can be read of it, and its paths to the others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from diag.core.metric_families import Sample
from diag.core.throttle_reasons import THROTTLE_REASONS
from diag.exporter.gpu import nvml
from diag.exporter.gpu.nvml import Device, Field, GpuLost, NvmlReading
from diag.exporter.gpu.readings import NVLINK_BYTES, READINGS, UNCHANGING, of_links, seldom
from diag.vllm.capacity import series

ANEW = 300.0
"""Seconds after which what does not change, and what a GPU refused, is read again."""
SELDOM = 10.0
"""Seconds between two readings of what is slow."""
PATHS = {0: "pix", 10: "pix", 20: "pxb", 30: "phb", 40: "node", 50: "sys"}
"""nvmlGpuTopologyLevel_t; 0 is two GPUs on one board."""
LINKS = (NvmlReading("links", (), (Field(91),)),)
_SLOWDOWN = 1
_P2P_NVLINK = 2


@dataclass
class Gpu:
    """One GPU, with what of it is kept between two scrapes; without a device it is lost."""

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

    def read(self, now: float) -> list[Sample]:
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
        sheet = series.of_gpu(self.about[0], self.labels) if self.about and not self.instances else ()
        self._constant = [*self._read(device, UNCHANGING), *self._active_links(device), *sheet]
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


def identified(index: int, device: Device | None, version: str, known: Gpu | None) -> Gpu:
    """The GPU at that index: the `known` one where it still is that, else a new one."""
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


def is_named(gpu: Gpu, names: Sequence[str]) -> bool:
    """By index or by the beginning of its UUID, as CUDA takes it; a MIG instance counts for its GPU."""
    for name in filter(None, map(str.strip, names)):
        uuid = nvml.uuid_of_instance(name) if name.startswith("MIG-") else name
        if name == str(gpu.index) or (uuid.startswith("GPU-") and gpu.uuid.startswith(uuid)):
            return True
    return False


def peers(gpus: Sequence[Gpu]) -> Iterator[Sample]:
    """The path between each pair of them."""
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
