"""The connections of the exporter's server: how many there may be, and how long a client may take."""

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

MOST = 64
"""Connections at a time, a thread for each. A Prometheus takes one."""
PATIENCE = 30.0
"""Seconds that a client has to send its next request, and then to take the response."""


@dataclass
class _Open:
    until: float
    is_asking: bool = True


class Connections:
    """What is open, by its socket. A connection is dropped by shutting its socket down, and its thread then ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[socket.socket, _Open] = {}

    def admit(self, connection: socket.socket) -> bool:
        """Count a new one; where there are too many, the one that has waited longest for a request goes, if any."""
        with self._lock:
            waiting = [old for old, state in self._open.items() if state.is_asking]
            if len(self._open) >= MOST and not waiting:
                return False
            if len(self._open) >= MOST:
                self._drop(min(waiting, key=lambda old: self._open[old].until))
            self._open[connection] = _Open(time.monotonic() + PATIENCE)
            return True

    def asks(self, connection: socket.socket) -> None:
        """A request is awaited from now on."""
        self._set(connection, PATIENCE, True)

    def is_answered(self, connection: socket.socket, seconds: float) -> None:
        """A request is there whole; its page takes so many seconds at most, and then its client may take its time."""
        self._set(connection, seconds + PATIENCE, False)

    def _set(self, connection: socket.socket, seconds: float, is_asking: bool) -> None:
        with self._lock:
            if connection in self._open:
                self._open[connection] = _Open(time.monotonic() + seconds, is_asking)

    def forget(self, connection: socket.socket) -> None:
        """It is closed."""
        with self._lock:
            self._open.pop(connection, None)

    def drop_late(self) -> None:
        """Drop those that took too long."""
        now = time.monotonic()
        with self._lock:
            for late in [connection for connection, state in self._open.items() if state.until < now]:
                self._drop(late)

    def _drop(self, connection: socket.socket) -> None:
        del self._open[connection]
        with suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # below TLS: another thread is using that
