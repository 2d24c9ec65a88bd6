"""Follow the log file of a vLLM server, whatever becomes of the file, and collect samples from its lines.

Line length, memory and time are bounded. If the file exists already, its beginning and its end are read: the first
start with its configuration, and the latest lines. If a file grows faster than it can be read, its newest lines are
read. Standard input is always drained, because a full pipe would
stop the server that writes into it. A file that was truncated and has grown beyond its old length within half a second
cannot be distinguished from one that has only grown.
"""

import errno
import logging
import os
import select
import stat
import threading
import time
import weakref
from collections.abc import Callable
from datetime import tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from diag.core.errors import BadUsage
from diag.core.metric_families import Collected
from diag.log.corroboration import Measurement
from diag.log.parse_line import Line
from diag.log.server_log import ServerLog

log = logging.getLogger("diag.exporter")
log.addHandler(logging.NullHandler())  # the doctor has these messages in its report

STDIN = "-"
MOST_LINE = 64 * 2**10
"""Bytes kept of one line."""
CHUNK = 64 * 2**10
"""Bytes read at a time: a scrape waits for no more than one of them, a few milliseconds."""
FIRST, LAST = 8 * 2**20, 64 * 2**20
"""Bytes read of the beginning and of the end of a file that exists already."""
BACKLOG, AT_ONCE = 16 * 2**20, 512 * 2**10
"""Bytes that may be unread before all but the newest are skipped; and bytes read at one look, some 6,000 lines."""
EVERY = 0.5
"""Seconds between two looks."""
AHEAD = 120.0
"""Seconds by which a line may seem to be of the future; more is a wrong time zone."""


def parse_timezone(name: str) -> ZoneInfo | None:
    """Return the time zone of that name, for lines that state none; None, this host's own, for ""."""
    try:
        return ZoneInfo(name) if name else None
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise BadUsage(f"--log-timezone {name!r} is no time zone; try UTC or Europe/Berlin") from error


class LineSplitter:
    """Splits bytes into lines, and a progress bar into its redrawings; the result does not depend on the chunks.

    A text that does not begin a line, but stands behind a carriage return or behind a text that `take_rest` returned,
    begins with a carriage return. `number` is that of the first line, 0 if unknown; `inside` is true if its
    beginning was skipped.
    """

    def __init__(self, number: int = 1, inside: bool = False) -> None:
        self._rest = b""
        self._rest_was_taken = False
        self._number = number
        self._inside = inside

    def split(self, data: bytes) -> list[Line]:
        """Return the lines that end in the next bytes; NUL, which fills up a truncated file, is dropped."""
        parts: list[tuple[int, bytes]] = []
        for number, line in enumerate(data.replace(b"\0", b"").split(b"\n"), self._number):
            first, *others = line.split(b"\r")
            parts += [(number if self._number else 0, part) for part in (first, *(b"\r" + other for other in others))]

        if self._inside:  # drop the rest of a line whose beginning was skipped
            self._inside, parts[0] = len(parts) == 1, (parts[0][0], b"")
        if self._rest_was_taken and parts[0][1]:
            self._rest = b"\r"
        self._rest_was_taken = self._rest_was_taken and len(parts) == 1 and not parts[0][1]
        parts[0] = parts[0][0], self._rest + parts[0][1]
        self._number, rest = parts.pop()
        self._rest = rest[:MOST_LINE]
        return [Line(number, _decode(part)) for number, part in parts if part not in (b"", b"\r")]

    def take_rest(self) -> list[Line]:
        """Return the beginning of a line that has not ended: a bar that stands still never ends."""
        rest, self._rest = self._rest, b""
        self._rest_was_taken = self._rest_was_taken or bool(rest)
        return [Line(self._number, _decode(rest))] if rest not in (b"", b"\r") else []


def _decode(line: bytes) -> str:
    return line[:MOST_LINE].decode("utf-8", "replace")


class LogFile:
    """Reads a file that may be renamed, truncated, removed and made again; or a pipe; or standard input."""

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
        return self._status is not None and stat.S_ISREG(self._status.st_mode)

    def written(self) -> float:
        """Return the unix time at which the file had last been written to when it was opened."""
        return self._status.st_mtime if self._status is not None else 0.0

    def read(self) -> bytes:
        """Return the next bytes, b"" if there are none at present; OSError if the file cannot be read."""
        if self._fd < 0:
            self._fd = 0 if self.path == STDIN else os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self._status, self.at = os.fstat(self._fd), 0
            if self._fd and (stat.S_ISCHR(self._status.st_mode) or stat.S_ISBLK(self._status.st_mode)):
                raise OSError(errno.EINVAL, "it is a device")
        if not self.is_file and not select.select([self._fd], [], [], 0)[0]:
            return b""
        data = os.read(self._fd, CHUNK)
        self.at += len(data)
        self.ended = self.path == STDIN and not data
        return data

    def renewed(self) -> bool:
        """Return True if another file has this name now, or this one was truncated; call it when all is read.

        FileNotFoundError while no file has this name; bytes still written to the old one are read all the same.
        """
        if self.path == STDIN:
            return False
        now = self._path.stat()
        if self._status is None or not os.path.samestat(now, self._status):
            self.close()
            return True
        if self.is_file and now.st_size < self.at:
            self.at = os.lseek(self._fd, 0, os.SEEK_SET)
            return True
        return False

    def skip(self, most: int, keep: int) -> bool:
        """Go to the last `keep` bytes if more than `most` are unread."""
        unread = os.fstat(self._fd).st_size - self.at if self._fd >= 0 and self.is_file else 0
        if unread <= most:
            return False
        self.skipped += unread - keep
        self.at = os.lseek(self._fd, self.at + unread - keep, os.SEEK_SET)
        return True

    def wait(self, stopped: threading.Event) -> None:
        if self.path == STDIN and self._fd == 0:
            select.select([self._fd], [], [], EVERY)
        else:
            stopped.wait(EVERY)

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        if self._fd > 0:
            os.close(self._fd)
        self._fd = -1


class LogTail:
    """Follows the file of that path, "-" for standard input, once it is started; implements `Collector`.

    `zone` is that of the log's times, None for this host's.
    """

    name = "log"

    def __init__(self, path: str, zone: tzinfo | None = None, clock: Callable[[], float] = time.time) -> None:
        self.state = ServerLog(zone, "" if path == STDIN else path)
        self._source = LogFile(path)
        self._splitter = LineSplitter()
        self._clock = clock
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._quiet = False
        self._live = path == STDIN
        self._broken = ""

    @property
    def is_file(self) -> bool:
        """False for standard input."""
        return self._source.path != STDIN

    def start(self) -> None:
        """Follow the log in a thread, which ends on `stop` or when nothing refers to this object any more."""
        if self._thread is not None:
            return
        tail_ref, stopped, source = weakref.ref(self), self._stopped, self._source

        def follow() -> None:  # must not hold this object
            while not stopped.is_set() and not source.ended and (tail := tail_ref()):
                tail.step()
                del tail
                source.wait(stopped)
            if last := tail_ref():
                last.finish()
            source.close()

        self._thread = threading.Thread(target=follow, name="diag-log-tail", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread:
            self._thread.join(5)

    def catch_up(self) -> None:
        """Read everything that is there, now, without a thread; an unfinished last line counts as a line."""
        while self._read_new():
            pass
        self.finish()

    def page(self, seen: Measurement) -> None:
        """Take what a scrape has measured of the server: it decides which claims of the log are believed."""
        with self._lock:
            self.state.page(seen)

    def collect(self) -> Collected:
        """Return samples and problem; no samples while an old log is still read, for its states are long past."""
        with self._lock:
            samples = self.state.samples(self._clock()) if self._live or self._broken else []
        if self._source.ended:
            problem = "standard input has ended: nothing more will come of the log"
        elif self._thread and not self._thread.is_alive() and not self._stopped.is_set():
            problem = "the thread that reads the log has ended"
        elif self.state.current.clock.ahead > AHEAD:
            problem = "the times in the log are ahead of this host's clock: name their zone with --log-timezone"
        else:
            problem = self._broken
        return Collected(samples, problem)

    def step(self) -> None:
        """Read new bytes; a text without an end of line counts as a line if two looks find nothing new."""
        came = self._read_new()
        if self._quiet and not came:
            self.finish()
        self._quiet = not came

    def finish(self) -> None:
        """Count an unfinished last line as a line."""
        self._feed(self._splitter.take_rest())

    def _read_new(self) -> int:
        """Read all of a log that was there before, then a little at each look; return the number of bytes."""
        came = 0
        try:
            while (came < AT_ONCE or not self._live or not self._source.is_file) and not self._stopped.is_set():
                if self._live:
                    skipped = self._source.skip(BACKLOG, AT_ONCE)
                else:
                    skipped = self._source.at >= FIRST and self._source.skip(LAST, LAST)
                if skipped:
                    self._splitter = LineSplitter(number=0, inside=True)
                    log.info("log: %d bytes have been skipped so far", self._source.skipped)

                data = self._source.read()
                came += len(data)
                if data:
                    self._feed(self._splitter.split(data))
                elif self._source.renewed():
                    self.finish()
                    self._splitter = LineSplitter()
                else:
                    self._live = True
                    break
            self._broken = ""
        except FileNotFoundError:
            self._broken = f"the log {self._source.path} does not exist"
            self._live = True
        except OSError as error:
            self._broken = f"the log {self._source.path} cannot be read: {error.strerror or error}"
            self._source.close()
        return came

    def _feed(self, lines: list[Line]) -> None:
        now = self._clock()
        read_at = now if self._live else min(now, self._source.written())
        with self._lock:
            for line in lines:
                self.state.feed(line.text, read_at, self._live, line.number)
