"""One GPU as NVML shows it: its identity, all that can be read of it, and its paths to the others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from diag.core.metric_families import THROTTLE_REASONS, Sample
from diag.exporter.gpu import nvml, readings
from diag.exporter.gpu.nvml import Device, Field, GpuLost, NvmlReading
from diag.vllm.capacity import series

ANEW = 300.0
"""Seconds after which what does not change, and what a GPU refused, is read again."""
SELDOM = 10.0
"""Seconds between two readings of what is slow."""
PATHS = {0: "pix", 10: "pix", 20: "pxb", 30: "phb", 40: "node", 50: "sys"}
"""nvmlGpuTopologyLevel_t; 0 is two GPUs on one board."""
LINKS = (NvmlReading("links", (), (Field(91),)),)
Found = dict[tuple[str, tuple[str, ...]], float]
"""By family and labels."""
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
    _slowdown: float | None = None
    _constant: Sequence[Sample] = ()
    _rare: Sequence[Sample] = ()
    _by_link: dict[tuple[str, tuple[str, ...]], dict[int, float]] = field(default_factory=dict)
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
        found = self._read(device, readings.each_time(self.labels))
        if self._links and (readings.NVLINK_BYTES, (*self.labels, "tx")) not in found:
            found |= self._read(device, readings.of_links(self.labels, self._links))
        if now >= self._seldom_at:
            self._rare = _as_samples(self._slow(device, found))
            self._seldom_at = now + SELDOM
        return [*_as_samples(found), *self._rare, *self._constant, *self._margin(found)]

    def _renew(self, device: Device, now: float) -> None:
        device.forget()
        self.instances = device.instances()
        self._slowdown = device.ask("nvmlDeviceGetTemperatureThreshold", _SLOWDOWN)
        self._links = int(next((value for _, value in device.read(LINKS)), 0))
        sheet = series.of_gpu(self.about[0], self.labels) if self.about and not self.instances else ()
        unchanging = self._read(device, readings.unchanging(self.labels))
        self._constant = [*_as_samples(unchanging), *self._active_links(device), *sheet]
        self._anew_at = now + ANEW

    def _active_links(self, device: Device) -> Iterator[Sample]:
        states = [device.ask("nvmlDeviceGetNvLinkState", link) for link in range(self._links)]
        if self._links or device.ask("nvmlDeviceGetNvLinkState", 0) is not None:
            yield "diag_gpu_nvlink_active_links", self.labels, float(states.count(1))

    def _read(self, device: Device, wanted: Sequence[NvmlReading]) -> Found:
        found: Found = {}
        for (family, labels, _, link), value in device.read(wanted):
            if family == readings.THROTTLING:
                mask = int(value)
                for name, bit in THROTTLE_REASONS.items():
                    found[family, (*labels, name)] = float(bool(mask & bit))
            else:
                found[family, labels] = value if link is None else self._sum(family, labels, link, value)
        return found

    def _sum(self, family: str, labels: tuple[str, ...], link: int, value: float) -> float:
        """Over all links; one that does not answer for once keeps its last value, or the counter would fall."""
        links = self._by_link.setdefault((family, labels), {})
        links[link] = value
        return sum(links.values())

    def _slow(self, device: Device, found: Found) -> Found:
        kinds = frozenset(labels[2] for family, labels in found if family == readings.NVLINK_ERRORS_TOTAL)
        counted = any(family == readings.PCIE_BYTES_TOTAL for family, _ in found)
        return self._read(device, readings.seldom(self.labels, self._links, kinds, not counted))

    def _margin(self, found: Found) -> Iterator[Sample]:
        """Where the driver does not tell it: what is left to the slowdown threshold."""
        heat = found.get((readings.TEMPERATURE, (*self.labels, "gpu")))
        if (readings.MARGIN, self.labels) not in found and heat is not None and self._slowdown is not None:
            yield readings.MARGIN, self.labels, self._slowdown - heat

    def info(self) -> Iterator[Sample]:
        """What is said of a lost one, too."""
        yield "diag_gpu_up", self.labels, float(self.is_up)
        if self.about:
            yield "diag_gpu_info", (*self.labels, *self.about), 1.0


def _as_samples(found: Found) -> list[Sample]:
    return [(family, labels, value) for (family, labels), value in found.items()]


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
