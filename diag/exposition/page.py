"""Parsing of /metrics pages: fast, because the pages of one target share nearly all of their lines.

What stands before a value is parsed once for each distinct series; after that a line is one lookup and one `float`, and
of a page with the same series as the page before it only the lines that changed are read.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diag.core.formatting import printable
from diag.core.metric_prefix import named_as_ours
from diag.exposition.lines import CUT, LONGEST_LINE, MOST_LINES, NotMetrics, is_cut, refuse_other_formats, sample
from diag.promql import Labels

MOST_SERIES = 50_000
"""Of one target; vLLM has some 600."""
FaultKind = Literal["malformed", "duplicate", "timestamp", "truncated", "crowded", "renamed"]


Faults = dict[FaultKind, str]
"""What is wrong with a page that is still usable, each kind with its first example."""


class Layout(NamedTuple):
    """Which series a page has: numbers of `Parser.labels`; shared by the pages that have the same lines."""

    rows: NDArray[np.intp]
    models: tuple[str, ...]
    engines: int
    vllm: bool


class Page(NamedTuple):
    """One parsed page; `values` are those of `layout.rows`."""

    layout: Layout
    values: NDArray[np.float64]
    faults: Faults


class _Read(NamedTuple):
    """A page without faults: its lines, and where in `values` the value of each line is; -1 for a comment."""

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
        self._last: tuple[list[int], Layout] | None = None
        self._before: _Read | None = None

    def parse(self, page: bytes) -> Page:
        """Keep the valid lines and note the others; a page without a valid line is `NotMetrics`."""
        refuse_other_formats(page)
        page, prefix = named_as_ours(page)
        if page.count(b"\n") > MOST_LINES:
            raise NotMetrics(f"sent more than {MOST_LINES:,} lines")
        lines = page.split(b"\n")
        rest = lines.pop()
        rows, values, faults = self._changed(lines) or self._samples(lines)
        if not rows:
            raise NotMetrics(_why_nothing(page, faults))
        if is_cut(rest) or lines[-1] == CUT:
            faults["truncated"] = ""
        if prefix:
            faults["renamed"] = prefix
        rows, values = self._first_of_each(rows, values, faults)
        return Page(self._layout(rows), np.array(values, np.float64), faults)

    def _changed(self, lines: list[bytes]) -> tuple[list[int], list[float], Faults] | None:
        """By the lines that differ from those of the page before; None where it has other series."""
        before = self._before
        if before is None or len(before.lines) != len(lines):
            return None
        values = before.values.copy()
        for at in [at for at, (new, old) in enumerate(zip(lines, before.lines, strict=True)) if new != old]:
            head, _, text = lines[at].rpartition(b" ")
            place = before.places[at]
            if place < 0 or self._heads.get(head) != before.rows[place] or b"_" in text:
                return None
            try:
                values[place] = float(text)
            except ValueError:
                return None
        self._before = _Read(lines, before.places, before.rows, values)
        return before.rows, values, {}

    def _samples(self, lines: list[bytes]) -> tuple[list[int], list[float], Faults]:
        rows: list[int] = []
        values: list[float] = []
        faults: Faults = {}
        heads = self._heads
        places = [-1] * len(lines)
        for number, line in enumerate(lines, 1):
            if line.startswith(b"#"):
                continue
            head, _, text = line.rpartition(b" ")
            row = heads.get(head)
            try:
                if row is None or b"_" in text:  # Python reads 1_000 as a number, Prometheus does not
                    row, value = self._new_sample(line, faults)
                else:
                    value = float(text)
            except ValueError:
                if line.strip():
                    shown = printable(line.decode("utf-8", "replace"), 60)
                    faults.setdefault("malformed", f"line {number} is not a metric: {shown}")
                continue
            if row >= 0:
                places[number - 1] = len(rows)
                rows.append(row)
                values.append(value)
        whole = not faults and len(set(rows)) == len(rows)
        self._before = _Read(lines, places, rows, values) if whole else None
        return rows, values, faults

    def _new_sample(self, line: bytes, faults: Faults) -> tuple[int, float]:
        """The row (-1: one too many) and the value of a line that is not known yet; ValueError where it is none."""
        if len(line) > LONGEST_LINE:
            raise ValueError
        name, labels, text, timestamp, exemplar = sample(line)
        value = float(text)
        row = self._row({"__name__": name, **labels})
        if timestamp:
            faults.setdefault("timestamp", name)
        head, _, tail = line.rpartition(b" ")
        if row < 0:
            faults.setdefault("crowded", name)
        elif not timestamp and not exemplar and tail == text.encode() and len(self._heads) < 2 * MOST_SERIES:
            self._heads[head] = row
        return row, value

    def _row(self, labels: Labels) -> int:
        settled = _with_instance(labels, self.instance)
        key = frozenset(settled.items())
        if key not in self._rows:
            if len(self.labels) >= MOST_SERIES:
                return -1
            self._rows[key] = len(self.labels)
            self.labels.append(settled)
        return self._rows[key]

    def _first_of_each(self, rows: list[int], values: list[float], faults: Faults) -> tuple[list[int], list[float]]:
        """Drop repeated series as Prometheus does: the first stays."""
        if len(set(rows)) == len(rows):
            return rows, values
        first: dict[int, float] = {}
        for row, value in zip(rows, values, strict=True):
            if row in first:
                faults.setdefault("duplicate", self.labels[row]["__name__"])
            first.setdefault(row, value)
        return list(first), list(first.values())

    def _layout(self, rows: list[int]) -> Layout:
        if self._last is None or self._last[0] != rows:
            vllm = [self.labels[row] for row in rows if self.labels[row]["__name__"].startswith("vllm:")]
            models = sorted({labels["model_name"] for labels in vllm if "model_name" in labels})
            engines = len({labels["engine"] for labels in vllm if "engine" in labels})
            self._last = rows, Layout(np.array(rows, np.intp), tuple(models), engines, bool(vllm))
        return self._last[1]


def _why_nothing(page: bytes, faults: Faults) -> str:
    if not page.strip():
        return "answered an empty page"
    malformed = faults.get("malformed")
    return f"answered no metrics: {malformed}" if malformed else "answered a page without any metric"


def _with_instance(labels: Labels, instance: str) -> Labels:
    """The series as Prometheus would store it; an empty label is no label."""
    kept = {name: value for name, value in labels.items() if value}
    if "instance" in kept:
        exported = "exported_instance"
        while exported in kept:
            exported = f"exported_{exported}"
        kept[exported] = kept.pop("instance")
    return kept | {"instance": instance}
