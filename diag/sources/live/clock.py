"""The time of day that a watch stamps its scrapes with."""

import time
from collections.abc import Callable

from diag.core.formatting import clock

_JUMP = 500.0
"""Milliseconds; a clock that is slewed moves less between two scrapes."""


def steady() -> float:
    """Seconds that no setting of the clock moves and that go on while the machine sleeps, where the system has that."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class WatchClock:
    """Takes the time of day once and counts on from there: a clock that is set meanwhile must not tear the samples."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = steady) -> None:
        self._wall = wall
        self._steady = steady
        self._offset = wall() - steady()
        self._apart = 0.0
        self.jumps: list[str] = []

    def now(self) -> int:
        """Unix milliseconds, never going back."""
        millis = (self._steady() + self._offset) * 1000
        apart = self._wall() * 1000 - millis
        if abs(apart - self._apart) > _JUMP:
            self._note(apart - self._apart, millis)
            self._apart = apart
        return round(millis)

    def _note(self, jump: float, millis: float) -> None:
        way = "back" if jump < 0 else "forward"
        seconds = f"{abs(jump) / 1000:.1f} s"
        self.jumps.append(
            f"the clock jumped {way} by {seconds} at {clock(millis / 1000)}; the times of the scrapes continue as if it"
            " had not"
        )
