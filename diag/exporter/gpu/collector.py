"""All GPUs of one vLLM server: which they are, the samples of each, and a thread that counts their Xid errors."""

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from diag.core.metric_families import Collected, Sample
from diag.exporter.gpu import nvml
from diag.exporter.gpu.nvml import NvmlUnavailable
from diag.exporter.gpu.readings import Gpu, identify_gpu, is_named, peers

if TYPE_CHECKING:
    from diag.exporter.process.server import Owner

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
            found = list(self._counts.items())
            counts = dict.fromkeys(COUNTED, 0) | {xid: n for (of, xid), n in found if of == uuid}
            for xid, count in counts.items():
                yield "diag_gpu_xid_errors_total", (gpu, uuid, str(xid)), float(count)


def _count_xids(counts: Counter[tuple[str, int]], watched: set[str], stop: threading.Event) -> None:
    while not stop.is_set():
        with suppress(nvml.NvmlUnavailable):
            nvml.start()
            try:
                events = nvml.Events(device for device in nvml.devices() if device)
                try:
                    watched.update(events.watched)
                    while events.watched and not stop.is_set():
                        try:
                            if found := events.wait():
                                counts[found] += 1
                        except nvml.GpuLost:  # raised at once, again and again; other GPUs may still report errors
                            stop.wait(1)
                finally:
                    events.close()
            finally:
                nvml.stop()
        stop.wait(PAUSE)


NVIDIA = "0x10de"
"""The vendor of a PCI device; containers see those of their host."""
RETRY = 30.0
"""Seconds between two starts of NVML, while there is no driver or a GPU is lost."""


class GpuCollector:
    """Collects the GPUs of this server.

    They are the GPUs named with `--gpus`; else those that a process of the server uses or its CUDA_VISIBLE_DEVICES
    names; else all. A GPU that was shown once stays, or a crash would remove its series. A missing driver is a problem
    only if the host has a GPU.
    """

    name = "nvml"

    def __init__(
        self,
        select: tuple[str, ...],
        owners: Callable[[], "Mapping[int, Owner]"],
        visible: Callable[[], str | None],
        proc: Path = Path("/proc"),
        pci: Path = Path("/sys/bus/pci/devices"),
    ) -> None:
        self._select = select
        self._owners = owners
        self._visible = visible
        self._proc = proc
        self._pci = pci
        self._gpus: list[Gpu] = []
        self._shown: set[str] = set()
        self._peers: list[Sample] = []
        self._started = False
        self._start_at = self._anew_at = 0.0
        self._why = ""
        self._xids: XidWatch | None = None

    def start(self) -> None:
        self._xids = XidWatch()
        self._xids.start()

    def stop(self) -> None:
        if self._xids:
            self._xids.stop()

    def collect(self) -> Collected:
        now = time.monotonic()
        try:
            if not self._started:
                if now < self._start_at:
                    raise NvmlUnavailable(self._why)
                nvml.start()
                self._started = True
                self._enumerate()
            elif nvml.count() != len(self._gpus):
                self._enumerate()
            by_gpu = [(gpu, gpu.read(now)) for gpu in self._gpus]
        except NvmlUnavailable as error:
            if self._started:
                nvml.stop()
            if self._started or now >= self._start_at:
                self._start_at = now + RETRY
            vendors = list(self._pci.glob("*/vendor"))
            has_gpu = any(vendor.read_text(encoding="ascii").strip() == NVIDIA for vendor in vendors)
            is_problem = self._select or self._gpus or has_gpu or not vendors  # without any vendor, it is unknown
            self._started, self._why = False, str(error) if is_problem else ""
            for gpu in self._gpus:
                gpu.is_up = False
            return Collected([sample for gpu in self._gpus for sample in gpu.info()], self._why)

        samples = list(self._samples(by_gpu))
        lost = [str(gpu.index) for gpu in self._gpus if not gpu.is_up]
        if lost and now >= self._anew_at:  # only a restart of NVML finds a GPU that was reset
            self._anew_at = now + RETRY
            nvml.stop()
            self._started = False
        problem = f"GPU {', '.join(lost)} does not answer" if lost else ""
        if self._select and not any(is_named(gpu, self._select) for gpu in self._gpus):
            problem = f"--gpus {','.join(self._select)} names no GPU of this host"
        return Collected(samples, problem)

    def _enumerate(self) -> None:
        known = {gpu.index: gpu for gpu in self._gpus}
        version = nvml.driver_version()
        found = {i: identify_gpu(i, device, version, known.get(i)) for i, device in enumerate(nvml.devices())}
        gone = {i: identify_gpu(i, None, version, gpu) for i, gpu in known.items() if i not in found}
        self._gpus = [gpu for _, gpu in sorted((found | gone).items())]
        self._peers = list(peers([gpu for gpu in self._gpus if gpu.device]))

    def _samples(self, by_gpu: Sequence[tuple[Gpu, list[Sample]]]) -> Iterator[Sample]:
        owners = self._owners()
        serving = {gpu.uuid: self._serves(gpu, owners) for gpu, _ in by_gpu}
        self._shown |= {uuid for uuid, is_serving in serving.items() if is_serving}
        for gpu, samples in by_gpu:
            if (self._shown or self._select) and gpu.uuid not in self._shown:
                continue
            yield from gpu.info()
            yield from samples
            yield from self._xids.samples(*gpu.labels) if self._xids else ()
            for pid, used in gpu.processes.items():
                owner = owners.get(pid)
                role = owner.role if owner else "other" if (self._proc / str(pid)).exists() else "unknown"
                if used is not None and gpu.is_up:
                    labels = (*gpu.labels, str(pid), role, owner.rank if owner else "")
                    yield "diag_gpu_process_memory_bytes", labels, float(used)
            if serving[gpu.uuid] is not None:
                yield "diag_gpu_serving", gpu.labels, float(bool(serving[gpu.uuid]))
        yield from self._peers

    def _serves(self, gpu: Gpu, owners: "Mapping[int, Owner]") -> bool | None:
        """Return True if this vLLM uses the GPU, None if that is unknown."""
        if self._select:
            return is_named(gpu, self._select)
        if not gpu.processes.keys().isdisjoint(owners):
            return True
        visible = self._visible()
        if visible is not None:
            return is_named(gpu, tuple(visible.split(",")))
        seen = owners and all((self._proc / str(pid)).exists() for other in self._gpus for pid in other.processes)
        return False if seen else None
