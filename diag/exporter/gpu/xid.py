"""Xid errors, which NVML tells only to who waits for them: a thread that counts them."""

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from diag.core.metric_families import Sample
from diag.exporter.gpu import nvml

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
