"""The /metrics pages of one target: parsed one by one, and laid out in columns.

The pages of one target share nearly all of their lines. The text before a value is parsed once for each distinct
series; after that a line is one lookup and one `float`, and if a page has the series of the page before it, only the
lines that changed are read.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diag.core.formatting import printable
from diag.core.metric_prefix import OWN, named_as_ours
from diag.core.subjects import median
from diag.exposition import CUT, LONGEST_LINE, MOST_LINES, NotMetrics, is_cut, refuse_other_formats, sample
from diag.promql import STALE, Labels, distinct
from diag.promql.data import Floats, Millis

MOST_SERIES = 50_000
"""Series that are read of one target; vLLM has some 600."""
FEW_SERIES = 5_000
"""Series of forgotten scrapes that a parser may still hold."""
Reading = tuple[Labels, float]
"""Labels, with `__name__`, and value of a sample that is on no page."""
FaultKind = Literal["malformed", "duplicate", "timestamp", "truncated", "crowded", "renamed"]
Faults = dict[FaultKind, str]
"""The faults of a page that is still usable, each kind with its first example."""


class Layout(NamedTuple):
    """The series of a page, as numbers of `Parser.labels`; shared by pages that have the same series."""

    rows: NDArray[np.intp]
    models: tuple[str, ...]
    engines: int
    vllm: bool


class Page(NamedTuple):
    """One parsed page; `values` are in the order of `layout.rows`.

    `repeated` are the rows of series that are on the page more than once; `layout` lacks them if their values differ.
    """

    layout: Layout
    values: Floats
    faults: Faults
    repeated: frozenset[int] = frozenset()


class _Read(NamedTuple):
    """A page without faults: its lines, and the index in `values` of the value of each line; -1 for a comment."""

    lines: list[bytes]
    places: list[int]
    rows: list[int]
    values: list[float]


class Parser:
    """Parses the pages of one target; `labels` are its series in the order in which they were first seen.

    As in Prometheus, every series gets the label `instance`; the page's own becomes `exported_instance`.
    """

    def __init__(self, instance: str, known: Iterable[Labels] = ()) -> None:
        self.instance = instance
        self.labels: list[Labels] = list(known)
        self._rows = {frozenset(labels.items()): row for row, labels in enumerate(self.labels)}
        self._heads: dict[bytes, int] = {}
        self._crowded = set[bytes]()  # heads of the last page that were too many: read once, not at each scrape
        self._last: tuple[list[int], Layout] | None = None
        self._before: _Read | None = None

    def parse(self, page: bytes, beside: Iterable[Reading] = ()) -> Page:
        """Keep the valid lines and note the others, then add what was read beside the page.

        Raises NotMetrics if there is no valid line and nothing beside the page.
        """
        refuse_other_formats(page)
        page, prefix = named_as_ours(page)
        if page.count(b"\n") > MOST_LINES:
            raise NotMetrics(f"sent more than {MOST_LINES:,} lines")
        lines = page.split(b"\n")
        rest = lines.pop()
        rows, values, faults = self._parse_changed(lines) or self._parse_all(lines)
        on_page = set(rows) if beside else ()  # an exporter has put its log there, maybe that of an older release
        for labels, value in beside:
            row = self._row({label: text for label, text in labels.items() if text})
            if row >= 0 and row not in on_page:
                rows, values = [*rows, row], [*values, value]
        if not rows:
            if not page.strip():
                raise NotMetrics("answered an empty page")
            malformed = faults.get("malformed")
            raise NotMetrics(f"answered no metrics: {malformed}" if malformed else "answered a page without any metric")

        if is_cut(rest) or lines[-1:] == [CUT]:
            faults["truncated"] = ""
        if prefix:
            faults["renamed"] = prefix
        repeated: set[int] = set()
        if len(set(rows)) < len(rows):
            first: dict[int, float] = {}
            ambiguous: set[int] = set()  # of several parts, and no label says which
            for row, value in zip(rows, values, strict=True):
                if row in first:
                    repeated.add(row)
                    faults.setdefault("duplicate", self.labels[row]["__name__"])
                if first.setdefault(row, value) != value:
                    ambiguous.add(row)
            rows = [row for row in first if row not in ambiguous]
            values = [first[row] for row in rows]

        if self._last is None or self._last[0] != rows:
            vllm = [self.labels[row] for row in rows if self.labels[row]["__name__"].startswith(OWN)]
            models = sorted({labels["model_name"] for labels in vllm if "model_name" in labels})
            engines = len({labels["engine"] for labels in vllm if "engine" in labels})
            self._last = rows, Layout(np.array(rows, np.intp), tuple(models), engines, bool(vllm))
        return Page(self._last[1], np.array(values, np.float64), faults, frozenset(repeated))

    def _parse_changed(self, lines: list[bytes]) -> tuple[list[int], list[float], Faults] | None:
        """Read the lines that differ from the page before; None if the page has other series."""
        before = self._before
        if before is None or len(before.lines) != len(lines):
            return None
        values = before.values.copy()
        for at in [at for at, (new, old) in enumerate(zip(lines, before.lines, strict=True)) if new != old]:
            head, _, text = lines[at].rpartition(b" ")
            place = before.places[at]
            is_same = head in self._crowded if place < 0 else self._heads.get(head) == before.rows[place]
            if not is_same or b"_" in text:
                return None
            try:
                value = float(text)
            except ValueError:
                return None
            if place >= 0:
                values[place] = value
        self._before = _Read(lines, before.places, before.rows, values)
        return before.rows, values, {"crowded": ""} if self._crowded else {}

    def _parse_all(self, lines: list[bytes]) -> tuple[list[int], list[float], Faults]:
        rows: list[int] = []
        values: list[float] = []
        faults: Faults = {}
        heads = self._heads
        places, crowded = [-1] * len(lines), set[bytes]()
        for number, line in enumerate(lines, 1):
            if line.startswith(b"#"):
                continue
            head, _, text = line.rpartition(b" ")
            row = heads.get(head, -1 if head in self._crowded else None)
            try:
                if row is None or b"_" in text:  # Python reads 1_000 as a number, Prometheus does not
                    if len(line) > LONGEST_LINE:
                        raise ValueError
                    name, labels, number_text, timestamp, exemplar = sample(line)
                    value = float(number_text)
                    named = {"__name__": name} | labels
                    row = self._row({label: content for label, content in named.items() if content})  # "" is no label
                    if timestamp:
                        faults.setdefault("timestamp", name)
                    is_plain = not timestamp and not exemplar and text == number_text.encode()
                    if row >= 0 and is_plain and len(heads) < 2 * MOST_SERIES:
                        heads[head] = row
                else:
                    value = float(text)
            except ValueError:
                if line.strip():
                    text_of_line = printable(line.decode("utf-8", "replace"), 60)
                    faults.setdefault("malformed", f"line {number} is not a metric: {text_of_line}")
                continue
            if row >= 0:
                places[number - 1] = len(rows)
                rows.append(row)
                values.append(value)
            else:
                faults.setdefault("crowded", "")
                crowded.add(head)
        self._crowded = crowded
        whole = not faults.keys() - {"crowded"} and len(set(rows)) == len(rows)
        self._before = _Read(lines, places, rows, values) if whole else None
        return rows, values, faults

    def _row(self, series: dict[str, str]) -> int:
        """Return the row of a series, -1 for one too many."""
        if "instance" in series:
            exported = "exported_instance"
            while exported in series:
                exported = f"exported_{exported}"
            series[exported] = series.pop("instance")
        series["instance"] = self.instance
        key = frozenset(series.items())
        row = self._rows.get(key, -1)
        if row < 0 and len(self.labels) < MOST_SERIES:
            row = self._rows[key] = len(self.labels)
            self.labels.append(series)
        return row


class Scrape(NamedTuple):
    """One scrape at unix milliseconds; a failed one has a reason, and a page only of what is read beside the server."""

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

    def add(self, at: int, page: bytes, beside: Iterable[Reading] = ()) -> str:
        """Add an answered scrape; return the reason if the answer is no metrics page, else "".

        `beside` is read beside the page: GPUs, processes and log of the server's host.
        """
        with self._lock:
            try:
                scrape = Scrape(at, self._parser.parse(page, beside))
            except NotMetrics as error:
                scrape = Scrape(at, None, str(error))
            self.scrapes.append(scrape)
        return scrape.reason

    def fail(self, at: int, reason: str, recorded: bytes = b"", beside: Iterable[Reading] = ()) -> None:
        """Add a failed scrape, with the metrics that are read beside the server, also as a recorded page."""
        page, readings = None, list(beside)
        with self._lock:
            with suppress(NotMetrics):
                page = self._parser.parse(recorded, readings) if recorded or readings else None
            self.scrapes.append(Scrape(at, page, reason))

    def note(self, at: int, readings: Iterable[Reading]) -> None:
        """Add what was known at a moment at which nothing was scraped."""
        with self._lock:
            self.scrapes.append(Scrape(at, self._parser.parse(b"", list(readings))))

    def forget(self, before: int) -> None:
        """Drop the scrapes before a time, unix milliseconds, and once most series have no scrape left, these series."""
        with self._lock:
            del self.scrapes[: bisect_left(self.scrapes, before, key=lambda scrape: scrape.at)]
            pages = [scrape.page for scrape in self.scrapes if scrape.page]
            if len(self._parser.labels) <= FEW_SERIES + 2 * max((len(page.values) for page in pages), default=0):
                return
            # every restarted engine and unloaded adapter leaves series that are on no page any more
            used = sorted({row for page in pages for row in (*page.layout.rows.tolist(), *page.repeated)})
            places = {row: place for place, row in enumerate(used)}
            moved = {
                key: layout._replace(rows=np.array([places[row] for row in layout.rows.tolist()], np.intp))
                for key, layout in {id(page.layout): page.layout for page in pages}.items()
            }

            def renumbered(page: Page) -> Page:
                repeated = frozenset(places[row] for row in page.repeated)
                return page._replace(layout=moved[id(page.layout)], repeated=repeated)

            self._parser = Parser(self.instance, [self._parser.labels[row] for row in used])
            self.scrapes = [
                scrape._replace(page=renumbered(scrape.page)) if scrape.page else scrape for scrape in self.scrapes
            ]

    @property
    def size(self) -> int:
        return len(self.scrapes) * len(self._parser.labels)

    def table(self) -> "ScrapeTable":
        """Lay out the scrapes in the order of their times; of several at one time the first is kept."""
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
    """The scrapes of one target in the order of their times, which are distinct; `labels` are all of its series.

    out_of_order: scrapes that were added after a later one. dropped: scrapes at the time of another one.
    """

    instance: str
    labels: tuple[Labels, ...]
    scrapes: tuple[Scrape, ...]
    out_of_order: int = 0
    dropped: int = 0

    @cached_property
    def times(self) -> Millis:
        """The times of all scrapes, failed ones included, unix milliseconds; shape (N,)."""
        return np.array([scrape.at for scrape in self.scrapes], np.int64)

    @cached_property
    def values(self) -> Floats:
        """Values of shape (S, N), with the stale marker for absent series and failed scrapes.

        An ambiguous series is absent from every page that repeats it: on some the values are equal by chance.
        """
        values = np.full((len(self.scrapes), len(self.labels)), STALE)
        for row, scrape in zip(values, self.scrapes, strict=True):
            if scrape.page is not None:
                row[scrape.page.layout.rows] = scrape.page.values
                row[sorted(scrape.page.repeated & self.ambiguous)] = STALE
        return values.T

    @cached_property
    def ambiguous(self) -> frozenset[int]:
        """The repeated series of each metric of which a page repeats one with different values.

        They are several parts that no label tells apart, also those with equal values: of an idle engine, for example.
        """
        pages = [scrape.page for scrape in self.scrapes if scrape.page is not None and scrape.page.repeated]
        differ = {row for page in pages for row in page.repeated.difference(page.layout.rows.tolist())}
        metrics = {self.labels[row]["__name__"] for row in differ}
        return frozenset(row for page in pages for row in page.repeated if self.labels[row]["__name__"] in metrics)

    @property
    def mixed(self) -> str:
        """The first metric of vLLM or its exporter whose series are ambiguous, "" for none."""
        names = (self.labels[row]["__name__"] for row in sorted(self.ambiguous))
        return next((name for name in names if name.startswith((OWN, "diag_"))), "")

    @cached_property
    def pages(self) -> tuple[Page, ...]:
        return tuple(scrape.page for scrape in self.scrapes if scrape.page is not None and not scrape.reason)

    @property
    def failed(self) -> tuple[Scrape, ...]:
        return tuple(scrape for scrape in self.scrapes if scrape.reason)

    def rows(self, *names: str) -> list[int]:
        return [row for row, labels in enumerate(self.labels) if labels["__name__"] in names]

    def last(self, name: str) -> list[Labels]:
        """Return the series of a metric on the last page that has it."""
        rows = set(self.rows(name))
        pages = (scrape.page for scrape in reversed(self.scrapes) if scrape.page is not None)
        on_page = (rows.intersection(page.layout.rows.tolist()) for page in pages)
        return [self.labels[row] for row in sorted(next(filter(None, on_page), ()))]


def median_interval(tables: Sequence[ScrapeTable], otherwise: float) -> float:
    """Return the median seconds between two scrapes of one target, or `otherwise` if there are no two."""
    steps = [np.diff(table.times) for table in tables if len(table.times) > 1]
    return median(np.concatenate(steps)) / 1000 if steps else otherwise


def rounds(tables: Sequence[ScrapeTable], interval: float) -> Millis:
    """Return one instant per round over all targets: back from the last scrape, in steps of at least 3/4 interval."""
    times = distinct(np.concatenate([table.times for table in tables]))
    apart = max(1, round(750 * interval))
    chosen = [int(times[-1])]
    while (before := int(np.searchsorted(times, chosen[-1] - apart, side="right"))) > 0:
        chosen.append(int(times[before - 1]))
    return np.array(chosen[::-1], np.int64)
