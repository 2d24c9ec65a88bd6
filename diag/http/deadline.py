"""Time limits of a request: a deadline for the response as a whole, and threads that neither Ctrl-C nor exit waits for.

http.client bounds each wait for bytes, but not their sum, and not a header that arrives in drips.
"""

import io
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from http.client import HTTPResponse
from threading import Thread
from types import SimpleNamespace
from typing import Any, TypeVar

from diag.http import failure
from diag.http.failure import Failure, Hints

T = TypeVar("T")


def run_in_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread; the future holds its result or exception."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from here on it cannot be cancelled; its result may be left unread

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again where the result is read
            future.set_exception(error)

    Thread(target=run, name="diag-http", daemon=True).start()
    return future


class Deadline:
    """The time limits of one request: `wait` seconds for every next byte, `seconds` for the whole response."""

    def __init__(self, wait: float, seconds: float, hints: Hints) -> None:
        self.wait, self.hints, self.seconds = wait, hints, seconds
        self.begin = time.monotonic()

    def left(self) -> float:
        """Seconds until the deadline; Failure if it has passed."""
        left = self.begin + self.seconds - time.monotonic()
        if left <= 0:
            raise self.late
        return left

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.begin >= self.seconds

    def next(self) -> float:
        return min(self.wait, self.left())

    @property
    def late(self) -> Failure:
        """The failure to raise once the deadline has passed."""
        return failure.too_long(self.seconds, self.hints)


class TimedReads(io.RawIOBase):
    """A socket's bytes for one response; each wait and their sum are bounded."""

    def __init__(self, connected: socket.socket, deadline: Deadline) -> None:
        self._socket, self._deadline, self._begun = connected, deadline, False
        self._raw = connected.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read the bytes that are available; Failure if none arrives in time."""
        seconds, wait = self._deadline.next(), self._deadline.wait
        self._socket.settimeout(seconds)
        try:
            count = self._raw.readinto(buffer)
        except TimeoutError as error:
            if seconds < wait:
                raise self._deadline.late from error
            raise (failure.stopped if self._begun else failure.silent)(wait) from error
        self._begun = True
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def timed_response(deadline: Deadline, connected: socket.socket, *args: Any, **options: Any) -> HTTPResponse:
    """Return an HTTPResponse that is read within the deadline, for `HTTPConnection.response_class`."""
    timed = SimpleNamespace(makefile=lambda mode: io.BufferedReader(TimedReads(connected, deadline)))
    return HTTPResponse(timed, *args, **options)  # type: ignore[arg-type]  # only makefile of a socket is used
