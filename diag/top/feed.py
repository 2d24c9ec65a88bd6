"""Where the frames come from: a thread that scrapes or queries, and judges; the view only looks at the last frame."""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from diag.core.errors import BadUsage, Unreachable
from diag.core.formatting import plural
from diag.diagnosis.decision_table import LOOK
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Report
from diag.sources.live.scrape import BackgroundScraper, Scraper
from diag.sources.observation import Observation
from diag.top.columns import throttle_reasons
from diag.top.frame import POINTS, Frame, Histories, Onsets, rows, too_early
from diag.top.memory import PageMemory

KEPT = 300.0
"""Seconds of pages in memory, to be recorded."""
JUDGED, FEWEST_JUDGED = 60.0, 12
"""Seconds that are judged, up to now (`diag doctor --watch` takes 30), and scrapes where these are rarer."""
SHARE, LONGEST_PAUSE = 0.02, 30.0
"""Of a core, for judging: where it takes more, fewer scrapes are judged. And the most seconds until the next one."""
SETTLES = 0.5
"""Seconds in which the servers that are scraped at the same time answer."""
QUERY_EVERY = 15.0
"""Seconds between two looks at a Prometheus, which has nothing new before its next scrape."""
Judged = tuple[Report, QueryCache]


class Feed:
    """A thread that makes frames until it is stopped; `failed` is why there will be none."""

    def __init__(self) -> None:
        self.latest: Frame | None = None
        self.failed: BaseException | None = None
        self._stopped = threading.Event()
        self._histories, self._onsets = Histories(), Onsets()

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name="diag-top", daemon=True).start()

    def stop(self) -> None:
        """End soon; nobody waits for a server that does not answer."""
        self._stopped.set()

    def record(self) -> str:
        """Write the last minutes as a recording; returns the sentence that says where."""
        raise BadUsage("what a Prometheus knows is not recorded: it is there to be diagnosed later, with --at")

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:  # noqa: BLE001  a thread has nobody else to tell
            self.failed = error

    def _watch(self) -> None:
        raise NotImplementedError

    def _show(self, judged: Judged) -> None:
        """A new frame of what was judged, with the numbers of the instants since the last one."""
        report, queries = judged
        seen, instants = queries.span + queries.source.interval, queries.source.instants[-POINTS:]
        report = self._onsets.carried(report) if seen >= LOOK else too_early(report, seen)
        new = instants[instants > self.latest.at * 1000 + 1] if self.latest else instants
        if len(new):
            self._histories.add(queries, new)
        found = rows(report, self._histories, throttle_reasons(queries, instants))
        self.latest = Frame(float(instants[-1]) / 1000, report, queries, found)


class ScrapeFeed(Feed):
    """Servers that are scraped, judged with every scrape or as often as that takes little of a core."""

    def __init__(
        self, scraper: Scraper, memory: PageMemory, every: float, judge: Callable[[Observation], Judged]
    ) -> None:
        super().__init__()
        self._watched, self._memory, self._every, self._judge = scraper, memory, every, judge

    def record(self) -> str:
        """Write the last minutes as a recording; returns the sentence that says where."""
        folder = Path(f"diag-top-{datetime.fromtimestamp(time.time(), UTC):%Y%m%dT%H%M%SZ}")
        count = self._memory.write(folder, self._watched.facts, self._watched.remarks, self._every)
        return f"{plural(count, 'scrape')} recorded; diagnose them with: diag doctor {folder}"

    def _watch(self) -> None:
        shown, last = 0, 0.0  # the first judgement makes much that the others find made
        with BackgroundScraper(self._watched).running() as watched:
            while not self._stopped.wait(SETTLES):
                if watched.failed:
                    raise watched.failed[0]
                if self._watched.scrapes == shown:
                    continue
                self._stopped.wait(SETTLES)
                shown, spent = self._watched.scrapes, self._frame()
                self._stopped.wait(min(last / SHARE, spent / SHARE, LONGEST_PAUSE))
                last = spent

    def _frame(self) -> float:
        """Make a frame; returns the seconds of a core that it took."""
        begun = time.thread_time()
        seen = self._watched.observation()
        self._watched.forget(int(seen.instants[-1] - 1000 * max(JUDGED, FEWEST_JUDGED * self._every)))
        self._show(self._judge(seen))
        return time.thread_time() - begun


class QueryFeed(Feed):
    """Servers that a Prometheus knows; `look` queries it and judges."""

    def __init__(self, look: Callable[[], Judged]) -> None:
        super().__init__()
        self._look = look

    def _watch(self) -> None:
        while not self._stopped.is_set():
            try:
                self._show(self._look())
            except Unreachable as error:
                if self.latest is None:
                    raise
                self.latest = self.latest._replace(lost=str(error))
            self._stopped.wait(QUERY_EVERY)
