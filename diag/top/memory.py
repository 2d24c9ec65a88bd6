"""The pages of the last minutes, kept in memory, and written as a recording when somebody asks for one."""

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from diag.core.errors import BadUsage
from diag.sources.recording.writer import Recorder, fit
from diag.vllm.running_config import ServerFacts

MOST_BYTES = 24 * 2**20
"""Of all pages, compressed: five minutes of some fifty servers."""
FAST = 1


class KeptScrape(NamedTuple):
    """One scrape at unix milliseconds; `page` is compressed, `reason` is "" where the scrape did not fail."""

    at: int
    instance: str
    page: bytes
    reason: str


class PageMemory:
    """Keeps the protocol `Sink`; forgets what is older than so many seconds, and the oldest of what is too large."""

    def __init__(self, seconds: float, most_bytes: int = MOST_BYTES) -> None:
        self._milliseconds, self._most = seconds * 1000, most_bytes
        self._kept: deque[KeptScrape] = deque()
        self._size = 0
        self._lock = Lock()

    def page(self, at: int, instance: str, page: bytes) -> bytes:
        """Keep a page; it is judged as it would be recorded."""
        kept = fit(page)
        self._keep(KeptScrape(at, instance, zlib.compress(kept, FAST), ""))
        return kept

    def failed(self, at: int, instance: str, reason: str, beside: bytes) -> bytes:
        """Keep a failed scrape with what stands beside the server."""
        kept = fit(beside)
        self._keep(KeptScrape(at, instance, zlib.compress(kept, FAST), reason))
        return kept

    def _keep(self, scrape: KeptScrape) -> None:
        with self._lock:
            self._kept.append(scrape)
            self._size += len(scrape.page)
            while self._kept and (self._kept[0].at < scrape.at - self._milliseconds or self._size > self._most):
                self._size -= len(self._kept.popleft().page)

    def write(self, folder: Path, facts: Mapping[str, ServerFacts], remarks: Sequence[str], every: float) -> int:
        """Write all that is kept as `diag record` would have; returns the number of scrapes.

        BadUsage for a folder that is not empty and where nothing is kept, BadRecording where it cannot be written.
        """
        with self._lock:
            kept = tuple(self._kept)
        if not kept:
            raise BadUsage("nothing was scraped yet: record again in some seconds")
        with Recorder(folder) as recorder:
            for scrape in kept:
                page = zlib.decompress(scrape.page)
                if scrape.reason:
                    recorder.failed(scrape.at, scrape.instance, scrape.reason, page)
                else:
                    recorder.page(scrape.at, scrape.instance, page)
            recorder.about(facts, remarks, every)
        return len(kept)
