"""Follows the log of a vLLM server, whatever becomes of the file, and gives what it tells.

Bounded in all directions: a line by its length, memory by one chunk, time by what is skipped. Of a file that is there
already the beginning and the end are read: the first start with its configuration, and what happened lately. Where a
file grows faster than it is read, its newest lines are. Standard input is never left standing, for that would stop the
server that writes into it. A file that was truncated and has grown beyond its old length within half a second
cannot be told from one that has only grown.
"""

import errno
import logging
import os
import select
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import tzinfo
from pathlib import Path
from typing import NamedTuple

from diag.core.metric_families import Collected
from diag.exporter.log.state import ServerLog

log = logging.getLogger("diag.exporter")

STDIN = "-"
MOST_LINE = 64 * 2**10
"""Bytes kept of one line."""
CHUNK = 64 * 2**10
"""Bytes taken in at a time: a scrape waits for no more than one of them, a few milliseconds."""
FIRST, LAST = 8 * 2**20, 64 * 2**20
"""Bytes read of the beginning and of the end of a file that is there already."""
BACKLOG, AT_ONCE = 16 * 2**20, 512 * 2**10
"""Bytes that may be unread before all but the newest are skipped; and bytes read at one look, some 6,000 lines."""
EVERY = 0.5
"""Seconds between two looks."""
AHEAD = 120.0
"""Seconds by which a line may seem to be of the future; more is a wrong time zone."""


class Numbered(NamedTuple):
    """A line, and its number in the file, 0 where that is not known."""

    number: int
    text: str


class Lines:
    """Cuts bytes into lines, and a progress bar into its redrawings; the same ones however the bytes come.

    What does not begin a line, but stands behind a carriage return or behind what `rest` gave, begins with a carriage
    return. `number` is that of the first line, 0 where it is not known; `inside` says that its beginning was skipped.
    """

    def __init__(self, number: int = 1, inside: bool = False) -> None:
        self._rest = b""
        self._given = False
        self._number = number
        self._inside = inside

    def cut(self, data: bytes) -> list[Numbered]:
        """The lines that end in the next bytes; NUL is what a truncated file is filled up with."""
        parts = list(self._parts(data.replace(b"\0", b"")))
        if self._inside:  # of a line whose beginning was skipped
            self._inside, parts[0] = len(parts) == 1, (parts[0][0], b"")
        if self._given and parts[0][1]:
            self._rest = b"\r"
        self._given = self._given and len(parts) == 1 and not parts[0][1]
        parts[0] = parts[0][0], self._rest + parts[0][1]
        self._number, rest = parts.pop()
        self._rest = rest[:MOST_LINE]
        return [Numbered(number, _text(part)) for number, part in parts if part not in (b"", b"\r")]

    def _parts(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        for number, line in enumerate(data.split(b"\n"), self._number):
            first, *others = line.split(b"\r")
            yield number if self._number else 0, first
            for part in others:
                yield number if self._number else 0, b"\r" + part

    def rest(self) -> list[Numbered]:
        """What has come of a line that has not ended: a bar that stands still never does."""
        rest, self._rest = self._rest, b""
        self._given = self._given or bool(rest)
        return [Numbered(self._number, _text(rest))] if rest not in (b"", b"\r") else []


def _text(line: bytes) -> str:
    return line[:MOST_LINE].decode("utf-8", "replace")


class LogFile:
    """The bytes of a file that may be renamed, truncated, removed and made again; of a pipe; of standard input."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.at = 0
        self._path = Path(path)
        self.ended = False
        self.skipped = 0
        self._fd = -1
        self._status: os.stat_result | None = None

    @property
    def is_file(self) -> bool:
        """Whether it has a length."""
        return self._status is not None and stat.S_ISREG(self._status.st_mode)

    def written(self) -> float:
        """Unix time at which it was last written to when it was opened."""
        return self._status.st_mtime if self._status is not None else 0.0

    def read(self) -> bytes:
        """The next bytes, none where there are none at present; OSError where it cannot be read."""
        if self._fd < 0:
            self._open()
        if not self.is_file and not select.select([self._fd], [], [], 0)[0]:
            return b""
        data = os.read(self._fd, CHUNK)
        self.at += len(data)
        self.ended = self.path == STDIN and not data
        return data

    def _open(self) -> None:
        self._fd = 0 if self.path == STDIN else os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._status, self.at = os.fstat(self._fd), 0
        if self._fd and (stat.S_ISCHR(self._status.st_mode) or stat.S_ISBLK(self._status.st_mode)):
            raise OSError(errno.EINVAL, "it is a device")

    def renewed(self) -> bool:
        """Whether, all having been read, there is another file of that name now, or this one begins anew.

        FileNotFoundError while there is none of that name; what is still written to the old one is read all the same.
        """
        if self.path == STDIN:
            return False
        now = self._path.stat()
        if self._status is None or not os.path.samestat(now, self._status):
            self.close()
            return True
        if self.is_file and now.st_size < self.at:
            self._go(0)
            return True
        return False

    def skip(self, most: int, keep: int) -> bool:
        """Go to the last `keep` bytes where more than `most` are unread."""
        unread = os.fstat(self._fd).st_size - self.at if self._fd >= 0 and self.is_file else 0
        if unread <= most:
            return False
        self.skipped += unread - keep
        self._go(self.at + unread - keep)
        return True

    def _go(self, to: int) -> None:
        self.at = os.lseek(self._fd, to, os.SEEK_SET)

    def wait(self, stopped: threading.Event) -> None:
        """Until the next look."""
        if self.path == STDIN and self._fd == 0:
            select.select([self._fd], [], [], EVERY)
        else:
            stopped.wait(EVERY)

    def close(self) -> None:
        """Let go of the file; the next read opens it again."""
        if self._fd > 0:
            os.close(self._fd)
        self._fd = -1


class LogTail:
    """Keeps the protocol `Collector`; follows the file of that path, "-" for standard input, once it is started.

    `zone` is that of the log's times, None for this host's.
    """

    name = "log"

    def __init__(self, path: str, zone: tzinfo | None = None, clock: Callable[[], float] = time.time) -> None:
        self.state = ServerLog(zone, "" if path == STDIN else path)
        self._source = LogFile(path)
        self._lines = Lines()
        self._clock = clock
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._quiet = False
        self._live = path == STDIN
        self._broken = ""

    def start(self) -> None:
        """Follow it from now on, in a thread that ends when it is stopped or nobody holds this any more."""
        of = (weakref.ref(self), self._stopped, self._source)
        self._thread = threading.Thread(target=_follow, args=of, name="diag-log-tail", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Follow it no longer."""
        self._stopped.set()
        if self._thread:
            self._thread.join(5)

    def catch_up(self) -> None:
        """Read all that is there, now, without a thread; what has no end of line yet counts as a line."""
        while self._look():
            pass
        self._feed(self._lines.rest())

    def page(self, answers: bool) -> None:
        """Whether the server's /metrics page has just answered: what its log may mean depends on it."""
        with self._lock:
            self.state.page(self._clock(), answers)

    def collect(self) -> Collected:
        """What is known; no samples while a log that was there before is still read, for its states are long past."""
        with self._lock:
            samples = self.state.samples(self._clock()) if self._live or self._broken else []
        return Collected(samples, self._problem())

    def _problem(self) -> str:
        if self._source.ended:
            return "standard input has ended: nothing more will come of the log"
        if self._thread and not self._thread.is_alive() and not self._stopped.is_set():
            return "the thread that reads the log has ended"
        if self.state.ahead > AHEAD:
            return "the times in the log are ahead of this host's clock: name their zone with --log-timezone"
        return self._broken

    def step(self) -> None:
        """Read what has come; what stood there without an end of line at two looks counts as a line."""
        came = self._look()
        if self._quiet and not came:
            self._feed(self._lines.rest())
        self._quiet = not came

    def finish(self) -> None:
        """Take what is left for a line."""
        self._feed(self._lines.rest())

    def _look(self) -> int:
        """Read what has come; the number of bytes."""
        came = 0
        try:
            for data in self._chunks():
                came += len(data)
                self._feed(self._lines.cut(data))
            self._broken = ""
        except FileNotFoundError:
            self._broken = f"the log {self._source.path} does not exist"
            self._live = True
        except OSError as error:
            self._broken = f"the log {self._source.path} cannot be read: {error.strerror or error}"
            self._source.close()
        return came

    def _chunks(self) -> Iterator[bytes]:
        """Up to where there is no more for now: all of a log that was there before, then a little at each look."""
        came = 0
        while (came < AT_ONCE or not self._live or not self._source.is_file) and not self._stopped.is_set():
            self._skip()
            data = self._source.read()
            came += len(data)
            if data:
                yield data
            elif self._source.renewed():
                self._feed(self._lines.rest())
                self._lines = Lines()
            else:
                self._live = True
                return

    def _skip(self) -> None:
        if self._live:
            skipped = self._source.skip(BACKLOG, AT_ONCE)
        else:
            skipped = self._source.at >= FIRST and self._source.skip(LAST, LAST)
        if skipped:
            self._lines = Lines(number=0, inside=True)
            log.info("log: %d bytes have been skipped so far", self._source.skipped)

    def _feed(self, lines: list[Numbered]) -> None:
        now = self._clock()
        read_at = now if self._live else min(now, self._source.written())
        with self._lock:
            for line in lines:
                self.state.feed(line.text, read_at, self._live, line.number)


def _follow(held: "weakref.ref[LogTail]", stopped: threading.Event, source: LogFile) -> None:
    while not stopped.is_set() and not source.ended and (tail := held()):
        tail.step()
        del tail
        source.wait(stopped)
    if last := held():
        last.finish()
    source.close()
