"""Responses read within a deadline: http.client bounds each wait, but neither all of them nor a header in drips."""

import io
import socket
import time
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any

from diag.http import failure
from diag.http.failure import Failure, Hints


class Deadline:
    """The time of one request: `wait` seconds for every next byte, `seconds` for all of them."""

    def __init__(self, wait: float, seconds: float, hints: Hints) -> None:
        self.wait, self.hints, self.seconds = wait, hints, seconds
        self.begin = time.monotonic()

    def left(self) -> float:
        """Seconds until the deadline; Failure where it has passed."""
        left = self.begin + self.seconds - time.monotonic()
        if left <= 0:
            raise self.late
        return left

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() - self.begin >= self.seconds

    def next(self) -> float:
        """Seconds for the next byte."""
        return min(self.wait, self.left())

    @property
    def late(self) -> Failure:
        """What the user reads when the deadline has passed."""
        return failure.too_long(self.seconds, self.hints)


class TimedReads(io.RawIOBase):
    """The bytes of one response as a socket gives them, each wait bounded and all of them together."""

    def __init__(self, connected: socket.socket, deadline: Deadline) -> None:
        self._socket, self._deadline, self._begun = connected, deadline, False
        self._raw = connected.makefile("rb", buffering=0)

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read what there is; Failure where nothing comes in time."""
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
        """Let go of the socket."""
        self._raw.close()
        super().close()


@dataclass(frozen=True)
class TimedSocket:
    """What HTTPResponse looks at of a socket."""

    connected: socket.socket
    deadline: Deadline

    def makefile(self, mode: str) -> io.BufferedReader:
        """The response's bytes."""
        return io.BufferedReader(TimedReads(self.connected, self.deadline))


def timed_response(deadline: Deadline, connected: socket.socket, *args: Any, **options: Any) -> HTTPResponse:
    """A response whose bytes keep to the deadline, for `HTTPConnection.response_class`."""
    return HTTPResponse(TimedSocket(connected, deadline), *args, **options)  # type: ignore[arg-type]
