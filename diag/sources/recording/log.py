"""The server.log of a recording: what it showed up to each scrape, as an exporter would have put it on the page."""

from collections import deque
from datetime import tzinfo
from pathlib import Path

from diag.core.metric_families import plain
from diag.exporter.log.parse_line import read_timed_lines, skipped_note
from diag.exporter.log.server_log import ServerLog


class RecordedLog:
    """Replays a log beside the scrapes of its server; times are unix seconds."""

    def __init__(self, file: Path, zone: tzinfo, first: float) -> None:
        """`first` is the time of some scrape: the lines say no year."""
        self.state = ServerLog(zone, str(file))
        self._rest = deque(read_timed_lines(file, zone, first))
        self.skipped = skipped_note(file)

    def until(self, at: float, answers: bool) -> bytes:
        """Its families as they were at a scrape that the server answered or not; scrapes come in their order."""
        while self._rest and self._rest[0].at <= at:
            entry = self._rest.popleft()
            self.state.feed(entry.text, entry.at, live=False, number=entry.number)
        self.state.page(at, answers, live=False)
        return plain(self.state.samples(at)) if self.state.latest is not None else b""
