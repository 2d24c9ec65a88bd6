"""One part of the page: looked at in its own thread, one look at a time, so that one that hangs costs only itself."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillRunning
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
log = logging.getLogger("diag.exporter")


class Unusable(Exception):
    """A part that has nothing to say, and why, in one sentence."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What a look gave: its result, or None and the problem; seconds that it took."""

    result: T | None
    problem: str
    seconds: float


class Look(Generic[T]):
    """A look under way; scrapes that come meanwhile share it."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.future: Future[Outcome[T]] = Future()

    def outcome(self, seconds: float) -> Outcome[T]:
        """Wait until so many seconds after its start: a look that hangs holds up the first scrape only."""
        left = self.start + seconds - time.monotonic()
        try:
            return self.future.result(max(left, 0.0))
        except StillRunning:
            return Outcome(None, "takes longer than a scrape may", time.monotonic() - self.start)


class Part(Generic[T]):
    """Looks when asked, in a thread that ends with the process, whatever hangs in it."""

    def __init__(self, name: str, look: Callable[[], T]) -> None:
        self.name = name
        self._look = look
        self._lock = threading.Lock()
        self._wanted: SimpleQueue[Look[T]] = SimpleQueue()
        self._latest: Look[T] | None = None
        threading.Thread(target=self._work, name=f"diag-{name}", daemon=True).start()

    def look(self) -> Look[T]:
        """Begin a look, or join the one under way."""
        with self._lock:
            if self._latest is None or self._latest.future.done():
                self._latest = Look()
                self._wanted.put(self._latest)
            return self._latest

    def _work(self) -> None:
        while True:
            look = self._wanted.get()
            look.future.set_result(self._outcome(look.start))

    def _outcome(self, start: float) -> Outcome[T]:
        result, problem = None, ""
        try:
            result = self._look()
        except Unusable as error:
            problem = str(error)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            log.debug("%s failed", self.name, exc_info=True)
        return Outcome(result, problem, time.monotonic() - start)
