"""A collector in a thread of its own, one collection at a time: one that hangs costs only its part of the page."""

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


class CollectorFailed(Exception):
    """A collection without a result; the message is a sentence that gives the reason.

    `answered` is True if the collector's source responded all the same.
    """

    def __init__(self, sentence: str, answered: bool = False) -> None:
        super().__init__(sentence)
        self.answered = answered


@dataclass(frozen=True)
class CollectionResult(Generic[T]):
    """Result of a collection: its value, or None and the problem; its duration; whether its source responded."""

    value: T | None
    problem: str
    seconds: float
    answered: bool


class Collection(Generic[T]):
    """A collection under way; scrapes that come meanwhile share it."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.future: Future[CollectionResult[T]] = Future()

    def result(self, seconds: float) -> CollectionResult[T]:
        """Wait until so many seconds after the start, so that a collection that hangs delays the first scrape only."""
        left = self.start + seconds - time.monotonic()
        try:
            return self.future.result(max(left, 0.0))
        except StillRunning:
            return CollectionResult(None, "takes longer than a scrape may", time.monotonic() - self.start, False)


class CollectorThread(Generic[T]):
    """Collects on request, in a thread that ends with this object or with the process, even if it hangs."""

    def __init__(self, name: str, collect: Callable[[], T]) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._wanted: SimpleQueue[Collection[T] | None] = SimpleQueue()
        self._latest: Collection[T] | None = None
        # the thread must not hold this object, or a watch that scrapes again and again would gather threads
        weakref.finalize(self, self._wanted.put, None)
        threading.Thread(target=_work, args=(name, collect, self._wanted), name=f"diag-{name}", daemon=True).start()

    def collect(self) -> Collection[T]:
        """Begin a collection, or join the one under way."""
        with self._lock:
            if self._latest is None or self._latest.future.done():
                self._latest = Collection()
                self._wanted.put(self._latest)
            return self._latest


def _work(name: str, collect: Callable[[], T], wanted: "SimpleQueue[Collection[T] | None]") -> None:
    while (collection := wanted.get()) is not None:
        value, problem, answered = None, "", True
        try:
            value = collect()
        except CollectorFailed as error:
            problem, answered = str(error), error.answered
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            log.debug("%s failed", name, exc_info=True)
        seconds = time.monotonic() - collection.start
        collection.future.set_result(CollectionResult(value, problem, seconds, answered))
