"""Replaying a recording as a server that runs now: its pages at their pace, with current times and growing counters.

Times on a page are moved to the time of the replay; otherwise restarts would lie in the past. After its end the
recording begins again; its counters continue from their last value, like those of a server in the same state.
"""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property

from diag.sources.recording.reader import RecordedScrape

_TYPE = re.compile(rb"# TYPE (\S+) (counter|histogram|summary)$")
_SAMPLE = re.compile(rb"(([^#{ ][^{ ]*)(?:\{.*\})?) (\S+)")
_COUNTS = (b"", b"_total", b"_bucket", b"_count", b"_sum")
"""Suffixes of series that only grow."""
_MOMENT = re.compile(rb"(_created|_timestamp_seconds|_start_time_seconds)\b")
_STAMP = re.compile(r"\d\d-\d\d \d\d:\d\d:\d\d")
_LEAST_UNIX = 1e9
"""Seconds; a smaller value is not a time in a server's life."""


class Replay:
    """The scrapes of one server from unix time `begin` on, `speed` times as fast as they were recorded.

    `first` is the unix time of the first recorded scrape; `again` repeats the recording after its end.
    """

    def __init__(self, scrapes: Sequence[RecordedScrape], begin: float, speed: float, again: bool) -> None:
        self._scrapes = sorted(scrapes)
        self._begin = begin
        self._speed = speed
        self._again = again
        self.first = self._scrapes[0].at

    @property
    def length(self) -> float:
        """Seconds of the recording, including one scrape interval after the last scrape."""
        span = self._scrapes[-1].at - self.first
        return span + span / max(1, len(self._scrapes) - 1) or 1.0

    @property
    def end(self) -> float:
        """The unix time of the replay's first end."""
        return self._begin + self.length / self._speed

    def at(self, now: float) -> RecordedScrape:
        """Return the scrape to serve at a unix time, with times of the replay, and counters grown by the earlier turns.

        A time that is constant in the recording, such as the server's start, is not moved by later turns.
        """
        turn, elapsed = divmod((now - self._begin) * self._speed, self.length)
        if turn and not self._again:
            turn, elapsed = 0.0, self.length
        place = bisect_right(self._scrapes, self.first + elapsed, key=lambda scrape: scrape.at)
        scrape = self._scrapes[max(0, place - 1)]

        lines, growing = [], set[bytes]()
        for line in scrape.page.split(b"\n"):
            if family := _TYPE.match(line):
                growing = {family[1] + ending for ending in _COUNTS}
            name, series, value = _sample(line) or (b"", b"", 0.0)
            growth = self._growth.get(series, 0.0)
            if value >= _LEAST_UNIX and _MOMENT.search(name):
                lines.append(b"%s %.17g" % (series, self.moment(value, int(turn) if growth else 0)))
            elif turn and name in growing:
                lines.append(b"%s %.17g" % (series, value + int(turn) * growth))
            else:
                lines.append(line)
        return scrape._replace(page=b"\n".join(lines))

    def moment(self, recorded: float, turn: int = 0) -> float:
        """Convert a recorded unix time into the time of the replay's given turn."""
        return self._begin + (recorded - self.first + turn * self.length) / self._speed

    @cached_property
    def _growth(self) -> Mapping[bytes, float]:
        """Growth of each series from the first page to the last one; 0 if the server was restarted."""

        def values(page: bytes) -> dict[bytes, float]:
            return {found[1]: found[2] for line in page.split(b"\n") if (found := _sample(line))}

        pages = [scrape.page for scrape in self._scrapes if not scrape.failed]
        first, last = (values(pages[0]), values(pages[-1])) if pages else ({}, {})
        return {series: max(0.0, value - first.get(series, value)) for series, value in last.items()}


def _sample(line: bytes) -> tuple[bytes, bytes, float] | None:
    """Return name, name with labels, and value; None for a comment or a line in another format."""
    found = _SAMPLE.fullmatch(line)
    try:
        return (found[2], found[1], float(found[3])) if found else None
    except ValueError:
        return None


def restamped(line: str, at: float) -> str:
    """Replace the time stamp of a line of vLLM's log by a unix time, in the time zone of this host."""
    return _STAMP.sub(datetime.fromtimestamp(at).astimezone().strftime("%m-%d %H:%M:%S"), line, count=1)
