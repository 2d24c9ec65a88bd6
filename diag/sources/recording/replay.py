"""A recording as a server that runs now: its pages at their pace, with their times and counters carried on.

What a page says of a moment becomes that moment of the replay, or its restarts would seem to lie far back. At the end
the recording begins again; its counters go on from where they were, as those of a server in the same state do.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property

from diag.sources.recording.reader import RecordedScrape

_TYPE = re.compile(rb"# TYPE (\S+) (counter|histogram|summary)$")
_SAMPLE = re.compile(rb"(([^#{ ][^{ ]*)(?:\{.*\})?) (\S+)")
_COUNTS = (b"", b"_total", b"_bucket", b"_count", b"_sum")
"""What the series of a family end in that only grow."""
_MOMENT = re.compile(rb"(_created|_timestamp_seconds|_start_time_seconds)\b")
_STAMP = re.compile(r"\d\d-\d\d \d\d:\d\d:\d\d")
_LEAST_UNIX = 1e9
"""Seconds; what is less is no moment of a server's life."""


class Replay:
    """The scrapes of one server, from unix time `begin` on, `speed` times as fast as they were recorded.

    `first` is the unix time of the first scrape; `again` says that the recording begins again at its end.
    """

    def __init__(self, scrapes: Sequence[RecordedScrape], begin: float, speed: float, again: bool) -> None:
        self._scrapes = sorted(scrapes)
        self._begin = begin
        self._speed = speed
        self._again = again
        self.first = self._scrapes[0].at

    @property
    def length(self) -> float:
        """Seconds of the recording, the usual time after its last scrape included."""
        span = self._scrapes[-1].at - self.first
        return span + span / max(1, len(self._scrapes) - 1) or 1.0

    @property
    def end(self) -> float:
        """The unix time at which it is over for the first time."""
        return self._begin + self.length / self._speed

    def at(self, now: float) -> RecordedScrape:
        """What the server answers at a unix time; a page that has one is of that time."""
        turn, elapsed = divmod((now - self._begin) * self._speed, self.length)
        if turn and not self._again:
            turn, elapsed = 0.0, self.length
        place = bisect_right(self._scrapes, self.first + elapsed, key=lambda scrape: scrape.at)
        scrape = self._scrapes[max(0, place - 1)]
        return scrape._replace(page=b"\n".join(self._carried_on(scrape.page, int(turn))))

    def moment(self, recorded: float, turn: int = 0) -> float:
        """When that happens in the replay which was recorded at a unix time."""
        return self._begin + (recorded - self.first + turn * self.length) / self._speed

    def _carried_on(self, page: bytes, turn: int) -> Iterator[bytes]:
        growing: set[bytes] = set()
        for line in page.split(b"\n"):
            if family := _TYPE.match(line):
                growing = {family[1] + ending for ending in _COUNTS}
            sample = _sample(line)
            value = sample and self._carried(*sample, turn, sample[0] in growing)
            yield line if sample is None or value is None else b"%s %.17g" % (sample[1], value)

    def _carried(self, name: bytes, series: bytes, value: float, turn: int, grows: bool) -> float | None:
        """The value in the replay; None where it is the recorded one.

        A moment that was the same all along, a start for one, does not come again.
        """
        growth = self._growth.get(series, 0.0)
        if _MOMENT.search(name) and value >= _LEAST_UNIX:
            return self.moment(value, turn if growth else 0)
        return value + turn * growth if turn and grows else None

    @cached_property
    def _growth(self) -> Mapping[bytes, float]:
        """By how much each series grew from the first page to the last one; 0 where the server was started again."""
        pages = [scrape.page for scrape in self._scrapes if not scrape.failed]
        first, last = (_values(page) for page in (pages[0], pages[-1])) if pages else ({}, {})
        return {series: max(0.0, value - first.get(series, value)) for series, value in last.items()}


def _values(page: bytes) -> dict[bytes, float]:
    return {found[1]: found[2] for line in page.split(b"\n") if (found := _sample(line))}


def _sample(line: bytes) -> tuple[bytes, bytes, float] | None:
    """Name, name with labels, and value; None for a comment, and for what no server of metrics writes by itself."""
    found = _SAMPLE.fullmatch(line)
    try:
        return (found[2], found[1], float(found[3])) if found else None
    except ValueError:
        return None


def restamped(line: str, at: float) -> str:
    """A line of vLLM's log as it is written at that unix time, in the time of this host."""
    return _STAMP.sub(datetime.fromtimestamp(at).astimezone().strftime("%m-%d %H:%M:%S"), line, count=1)
