"""How many times in a row a server crashed, by what its log tells of its starts and ends. Pure: no clock."""

STEADY_SECONDS = 600.0
"""Kubernetes counts the restarts of a container anew once it has run for ten minutes."""


class CrashStreak:
    """Ends of the server that nobody asked for: a failed start, a dead engine, a start without a shutdown before it.

    The count begins anew where the server has served for `STEADY_SECONDS`, was told to stop, or is ready after a start
    that had failed.
    """

    def __init__(self) -> None:
        self._count = 0
        self._runs = False
        self._ready_at: float | None = None
        self._failed_to_start = False

    def began(self, at: float) -> None:
        """A start; whatever ran before has ended without a word."""
        self.crashed(at)
        self._runs, self._ready_at = True, None

    def ready(self, at: float) -> None:
        """The server answers; said again and again while it does."""
        if self._ready_at is None:
            self._count = 0 if self._failed_to_start else self._count
            self._runs, self._ready_at = True, at

    def crashed(self, at: float) -> None:
        """The server ended by itself, which several lines may say."""
        if self._runs:
            self._count, self._failed_to_start = self.count(at) + 1, self._ready_at is None
            self._runs = False

    def stopped(self) -> None:
        """The server was told to stop; where it had crashed before, that is only the end of it."""
        if self._runs:
            self._count, self._runs = 0, False

    def count(self, now: float) -> int:
        """The crashes in a row by then."""
        is_steady = self._runs and self._ready_at is not None and now - self._ready_at >= STEADY_SECONDS
        return 0 if is_steady else self._count
