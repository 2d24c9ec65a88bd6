"""NVIDIA's GPUs by NVML, and a thread that counts their Xid errors."""

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

from diag.core.metric_families import Sample
from diag.exporter.gpu import nvml
from diag.exporter.gpu.driver import AnyGpu, DriverUnavailable, GpuLost
from diag.exporter.gpu.readings import NvidiaGpu, identify_gpu, peers

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
        with suppress(DriverUnavailable):
            nvml.start()
            try:
                events = nvml.Events(device for device in nvml.devices() if device)
                try:
                    watched.update(events.watched)
                    while events.watched and not stop.is_set():
                        try:
                            if found := events.wait():
                                counts[found] += 1
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
        known = {gpu.index: gpu for gpu in self._gpus}
        version = nvml.driver_version()
        found = {i: identify_gpu(i, device, version, known.get(i)) for i, device in enumerate(nvml.devices())}
        gone = {i: identify_gpu(i, None, version, gpu) for i, gpu in known.items() if i not in found}
        self._gpus = [gpu for _, gpu in sorted((found | gone).items())]
        return self._gpus

    def peers(self) -> Iterator[Sample]:
        return peers([gpu for gpu in self._gpus if gpu.device])

    def watch(self) -> None:
        self._xids = XidWatch()
        self._xids.start()

    def unwatch(self) -> None:
        if self._xids:
            self._xids.stop()

    def faults(self, gpu: AnyGpu) -> Iterator[Sample]:
        yield from self._xids.samples(*gpu.labels) if self._xids else ()
