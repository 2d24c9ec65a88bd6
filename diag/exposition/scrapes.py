"""The scrapes of one target, gathered page by page and laid out in columns."""

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diag.exposition.lines import NotMetrics
from diag.exposition.page import Page, Parser
from diag.promql import STALE, Labels, distinct

FEW_SERIES = 5_000
"""Of scrapes that were forgotten, so many series may be left behind."""
Floats = NDArray[np.float64]
Millis = NDArray[np.int64]


class Scrape(NamedTuple):
    """One scrape at unix milliseconds; a failed one has a reason, and a page only of what stands beside the server."""

    at: int
    page: Page | None
    reason: str = ""


class Target:
    """Gathers the scrapes of one target."""

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.scrapes: list[Scrape] = []
        self._parser = Parser(instance)
        self._lock = Lock()

    def add(self, at: int, page: bytes) -> str:
        """Add a scrape that was answered; the reason where it returned no metrics page, else ""."""
        with self._lock:
            try:
                scrape = Scrape(at, self._parser.parse(page))
            except NotMetrics as error:
                scrape = Scrape(at, None, str(error))
            self.scrapes.append(scrape)
        return scrape.reason

    def fail(self, at: int, reason: str, beside: bytes = b"") -> None:
        """Add a failed scrape, with what stands beside the server (for example its log) where that can be read."""
        page = None
        with self._lock:
            with suppress(NotMetrics):
                page = self._parser.parse(beside) if beside else None
            self.scrapes.append(Scrape(at, page, reason))

    def forget(self, before: int) -> None:
        """Drop the scrapes before a time, unix milliseconds; and once most series are of those, what they were."""
        with self._lock:
            del self.scrapes[: bisect_left(self.scrapes, before, key=lambda scrape: scrape.at)]
            pages = [scrape.page for scrape in self.scrapes if scrape.page]
            if len(self._parser.labels) > FEW_SERIES + 2 * max((len(page.values) for page in pages), default=0):
                self._start_again(pages)

    def _start_again(self, pages: Sequence[Page]) -> None:
        """With the series of these pages alone: every engine that restarts, every adapter leaves some behind."""
        used = sorted({row for page in pages for row in page.layout.rows.tolist()})
        places = {row: place for place, row in enumerate(used)}
        layouts = {id(page.layout): page.layout for page in pages}
        moved = {
            key: layout._replace(rows=np.array([places[row] for row in layout.rows.tolist()], np.intp))
            for key, layout in layouts.items()
        }
        self._parser = Parser(self.instance, [self._parser.labels[row] for row in used])
        self.scrapes = [
            scrape._replace(page=scrape.page._replace(layout=moved[id(scrape.page.layout)])) if scrape.page else scrape
            for scrape in self.scrapes
        ]

    @property
    def size(self) -> int:
        """The number of values that its table has."""
        return len(self.scrapes) * len(self._parser.labels)

    def table(self) -> "ScrapeTable":
        """Lay out what was gathered; a scrape that is not newer than another of this target sorts by its time."""
        with self._lock:
            scrapes, labels = list(self.scrapes), tuple(self._parser.labels)
        ordered = sorted(scrapes, key=lambda scrape: scrape.at)
        kept = [scrape for i, scrape in enumerate(ordered) if i == 0 or scrape.at > ordered[i - 1].at]
        return ScrapeTable(
            self.instance,
            labels,
            tuple(kept),
            out_of_order=sum(b.at < a.at for a, b in pairwise(scrapes)),
            dropped=len(ordered) - len(kept),
        )


@dataclass(frozen=True, eq=False, repr=False)
class ScrapeTable:
    """The scrapes of one target in the order of their times, which are distinct; `labels` are all of its series."""

    instance: str
    labels: tuple[Labels, ...]
    scrapes: tuple[Scrape, ...]
    out_of_order: int = 0
    dropped: int = 0

    @cached_property
    def times(self) -> Millis:
        """Every scrape, failed ones included; shape (N,)."""
        return np.array([scrape.at for scrape in self.scrapes], np.int64)

    @cached_property
    def values(self) -> Floats:
        """Shape (S, N); the stale marker where a series was absent or the scrape failed."""
        values = np.full((len(self.scrapes), len(self.labels)), STALE)
        for row, scrape in zip(values, self.scrapes, strict=True):
            if scrape.page is not None:
                row[scrape.page.layout.rows] = scrape.page.values
        return values.T

    @cached_property
    def pages(self) -> tuple[Page, ...]:
        """The pages of the scrapes that did not fail."""
        return tuple(scrape.page for scrape in self.scrapes if scrape.page is not None and not scrape.reason)

    @property
    def failed(self) -> tuple[Scrape, ...]:
        """The scrapes that failed."""
        return tuple(scrape for scrape in self.scrapes if scrape.reason)

    def rows(self, *names: str) -> list[int]:
        """The series of these metrics, on whichever page."""
        return [row for row, labels in enumerate(self.labels) if labels["__name__"] in names]

    def last(self, name: str) -> list[Labels]:
        """The series of a metric on the last page that has it."""
        rows = set(self.rows(name))
        pages = (scrape.page for scrape in reversed(self.scrapes) if scrape.page is not None)
        there = next((found for page in pages if (found := rows & set(page.layout.rows.tolist()))), set())
        return [self.labels[row] for row in sorted(there)]


def median_interval(tables: Sequence[ScrapeTable], otherwise: float) -> float:
    """The usual seconds between two scrapes of one target."""
    steps = [np.diff(table.times) for table in tables if len(table.times) > 1]
    return float(np.median(np.concatenate(steps))) / 1000 if steps else otherwise


def rounds(tables: Sequence[ScrapeTable], interval: float) -> Millis:
    """One instant for each round over all targets: back from the last scrape, in steps of at least 3/4 interval."""
    times = distinct(np.concatenate([table.times for table in tables]))
    apart = max(1, round(750 * interval))
    chosen = [int(times[-1])]
    while (before := int(np.searchsorted(times, chosen[-1] - apart, side="right"))) > 0:
        chosen.append(int(times[before - 1]))
    return np.array(chosen[::-1], np.int64)
