"""Xid errors, which NVML tells only to who waits for them: a thread that counts them."""

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from diag.core.metric_families import Collected, Sample
from diag.exporter.gpu import nvml
from diag.exporter.gpu.nvml import NvmlUnavailable
from diag.exporter.gpu.readings import Gpu, identified, is_named, peers

if TYPE_CHECKING:
    from diag.exporter.process.server import Owner

PAUSE = 30.0
"""Seconds after which a driver that does not answer is asked again."""
COUNTED = (13, 31, 43, 45, 48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143)
"""Shown from the start, at 0: a counter that is born at 1 never increases."""


@dataclass(frozen=True)
class _Counting:
    """What the thread and its watch share; the thread must not hold the watch, or it would never end with it."""

    counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    watched: set[str] = field(default_factory=set)
    stop: threading.Event = field(default_factory=threading.Event)


class XidWatch:
    """Uses NVML on its own account; it may be started again after it was stopped, and counts on."""

    def __init__(self) -> None:
        self._counting = _Counting()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to count, until it is stopped or nobody holds it any more."""
        self._counting = replace(self._counting, stop=threading.Event())
        weakref.finalize(self, self._counting.stop.set)
        self._thread = threading.Thread(target=_go_on, args=(self._counting,), name="diag-xid", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave NVML alone; takes as long as one wait, and is not held up by a driver that hangs."""
        self._counting.stop.set()
        if self._thread:
            self._thread.join(4 * nvml.WAIT / 1000)
            self._thread = None

    def samples(self, gpu: str, uuid: str) -> Iterator[Sample]:
        """The counts of one GPU, for a lost one too: its last Xid is the most telling."""
        if uuid in self._counting.watched:
            found = list(self._counting.counts.items())
            counts = dict.fromkeys(COUNTED, 0) | {xid: n for (of, xid), n in found if of == uuid}
            for xid, count in counts.items():
                yield "diag_gpu_xid_errors_total", (gpu, uuid, str(xid)), float(count)


def _go_on(counting: _Counting) -> None:
    while not counting.stop.is_set():
        with suppress(nvml.NvmlUnavailable):
            _watch(counting)
        counting.stop.wait(PAUSE)


def _watch(counting: _Counting) -> None:
    nvml.start()
    try:
        events = nvml.Events(device for device in nvml.devices() if device)
        try:
            counting.watched.update(events.watched)
            while events.watched and not counting.stop.is_set():
                _count(events, counting)
        finally:
            events.close()
    finally:
        nvml.stop()


def _count(events: nvml.Events, counting: _Counting) -> None:
    try:
        found = events.wait()
    except nvml.GpuLost:  # said at once, again and again; the others may still have something to tell
        counting.stop.wait(1)
        return
    if found:
        counting.counts[found] += 1


NVIDIA = "0x10de"
"""The vendor of a PCI device; containers see those of their host."""
RETRY = 30.0
"""Seconds between two starts of NVML, while there is no driver or a GPU is lost."""


class GpuCollector:
    """All GPUs of this server.

    Those named with `--gpus`; else those that a process of the server is on or that its CUDA_VISIBLE_DEVICES names;
    else all. A GPU that was shown once stays, or a crash would take its series away. A missing driver is a problem only
    where there is something to drive.
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
            by_gpu = [(gpu, gpu.read(now)) for gpu in self._gpus]
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
        self._started, self._why = False, why if self._expects_gpus() else ""
        for gpu in self._gpus:
            gpu.is_up = False

    def _expects_gpus(self) -> bool:
        """Whether some were named or seen, or this host has an NVIDIA device; yes where that cannot be told."""
        vendors = list(self._pci.glob("*/vendor"))
        found = any(vendor.read_text(encoding="ascii").strip() == NVIDIA for vendor in vendors)
        return bool(self._select or self._gpus) or found or not vendors

    def _enumerate(self) -> None:
        known = {gpu.index: gpu for gpu in self._gpus}
        version = nvml.driver_version()
        found = {i: identified(i, device, version, known.get(i)) for i, device in enumerate(nvml.devices())}
        gone = {i: identified(i, None, version, gpu) for i, gpu in known.items() if i not in found}
        self._gpus = [gpu for _, gpu in sorted((found | gone).items())]
        self._peers = list(peers([gpu for gpu in self._gpus if gpu.device]))

    def _problem(self, now: float) -> str:
        lost = [str(gpu.index) for gpu in self._gpus if not gpu.is_up]
        if lost and now >= self._anew_at:  # a GPU that was reset is found by a new start only
            self._anew_at = now + RETRY
            nvml.stop()
            self._started = False
        if self._select and not any(is_named(gpu, self._select) for gpu in self._gpus):
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
            return is_named(gpu, self._select)
        if not gpu.processes.keys().isdisjoint(owners):
            return True
        visible = self._visible()
        if visible is not None:
            return is_named(gpu, tuple(visible.split(",")))
        seen = owners and all((self._proc / str(pid)).exists() for other in self._gpus for pid in other.processes)
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
