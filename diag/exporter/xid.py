"""Xid errors, which NVML tells only to who waits for them: a thread that counts them."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

from diag.exporter import nvml
from diag.exporter.families import Sample

PAUSE = 30.0
"""Seconds after which a driver that does not answer is asked again."""
COUNTED = (13, 31, 43, 45, 48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143)
"""Shown from the start, at 0: a counter that is born at 1 never increases."""


class XidWatch:
    """Uses NVML on its own account; it may be started again after it was stopped, and counts on."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()
        self._watched: set[str] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to count."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go_on, args=(self._stop,), name="diag-xid", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave NVML alone; takes as long as one wait, and is not held up by a driver that hangs."""
        self._stop.set()
        if self._thread:
            self._thread.join(4 * nvml.WAIT / 1000)
            self._thread = None

    def samples(self, gpu: str, uuid: str) -> Iterator[Sample]:
        """The counts of one GPU, for a lost one too: its last Xid is the most telling."""
        if uuid in self._watched:
            counts = dict.fromkeys(COUNTED, 0) | {xid: n for (of, xid), n in list(self._counts.items()) if of == uuid}
            for xid, count in counts.items():
                yield "diag_gpu_xid_errors_total", (gpu, uuid, str(xid)), float(count)

    def _go_on(self, stop: threading.Event) -> None:
        while not stop.is_set():
            with suppress(nvml.Away):
                self._watch(stop)
            stop.wait(PAUSE)

    def _watch(self, stop: threading.Event) -> None:
        nvml.start()
        try:
            events = nvml.Events(device for device in nvml.devices() if device)
            try:
                self._watched |= set(events.watched)
                while events.watched and not stop.is_set():
                    self._count(events, stop)
            finally:
                events.close()
        finally:
            nvml.stop()

    def _count(self, events: nvml.Events, stop: threading.Event) -> None:
        try:
            found = events.wait()
        except nvml.Lost:  # said at once, again and again; the others may still have something to tell
            stop.wait(1)
            return
        if found:
            self._counts[found] += 1
