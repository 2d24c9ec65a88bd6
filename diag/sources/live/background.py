"""A watch in a thread of its own: while it scrapes, something else makes load or draws."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from diag.core.errors import Unreachable
from diag.core.formatting import clock
from diag.sources.live.scrape import Watch
from diag.sources.observation import Observation

UNTIL_STOPPED = 10 * 365 * 86_400.0
"""Seconds of a watch that ends when its block does."""
GONE = 3
"""Scrapes in a row that fail before a server that answered counts as gone."""


@dataclass
class BackgroundWatch:
    """A watch that runs until the block ends; `failed` is what ended it before that."""

    watch: Watch
    failed: list[BaseException] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator["BackgroundWatch"]:
        """Watch while the block runs."""
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.watch.stop()
            thread.join(10)

    def _run(self) -> None:
        try:
            self.watch.run()
        except BaseException as error:  # noqa: BLE001  a thread has nobody else to tell
            self.failed.append(error)

    def seen(self) -> Observation | None:
        """What was seen so far; None before the first scrape. Unreachable where the server never answered."""
        if self.failed and isinstance(self.failed[0], Unreachable):
            raise self.failed[0]
        return self.watch.observation() if self.watch.scrapes else None

    def gone(self) -> str:
        """Why the server counts as gone, "" while it answers."""
        last = self.watch.last_failures(GONE)
        return f"the server stopped answering at {clock(time.time())}: {last}" if last else ""
