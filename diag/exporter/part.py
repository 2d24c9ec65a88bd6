"""One part of the page: looked at in its own thread, one look at a time, so that one that hangs costs only itself."""

import logging
import threading
import time
import weakref
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
class LookOutcome(Generic[T]):
    """What a look gave: its result, or None and the problem; seconds that it took."""

    result: T | None
    problem: str
    seconds: float


class Look(Generic[T]):
    """A look under way; scrapes that come meanwhile share it."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.future: Future[LookOutcome[T]] = Future()

    def outcome(self, seconds: float) -> LookOutcome[T]:
        """Wait until so many seconds after its start: a look that hangs holds up the first scrape only."""
        left = self.start + seconds - time.monotonic()
        try:
            return self.future.result(max(left, 0.0))
        except StillRunning:
            return LookOutcome(None, "takes longer than a scrape may", time.monotonic() - self.start)


class PagePart(Generic[T]):
    """Looks when asked, in a thread of its own that ends with the part or the process, whatever hangs in it."""

    def __init__(self, name: str, look: Callable[[], T]) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._wanted: SimpleQueue[Look[T] | None] = SimpleQueue()
        self._latest: Look[T] | None = None
        # the thread must not hold the part, or a watch that looks again and again would gather threads
        weakref.finalize(self, self._wanted.put, None)
        threading.Thread(target=_work, args=(name, look, self._wanted), name=f"diag-{name}", daemon=True).start()

    def look(self) -> Look[T]:
        """Begin a look, or join the one under way."""
        with self._lock:
            if self._latest is None or self._latest.future.done():
                self._latest = Look()
                self._wanted.put(self._latest)
            return self._latest


def _work(name: str, look: Callable[[], T], wanted: "SimpleQueue[Look[T] | None]") -> None:
    while (each := wanted.get()) is not None:
        each.future.set_result(_outcome(name, look, each.start))


def _outcome(name: str, look: Callable[[], T], start: float) -> LookOutcome[T]:
    result, problem = None, ""
    try:
        result = look()
    except Unusable as error:
        problem = str(error)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        log.debug("%s failed", name, exc_info=True)
    return LookOutcome(result, problem, time.monotonic() - start)
