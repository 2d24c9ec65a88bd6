"""A /metrics page in the text format 0.0.4: its lines read, and the exporter's samples written; `scrapes` parses pages.

The lines are read without numpy, which the exporter does not load. This is the only importer of prometheus_client,
which takes a while to load: only where a page is written for others.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from diag.core.metric_families import Sample, families

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

MOST_BYTES, MOST_LINES, LONGEST_LINE = 16 * 2**20, 200_000, 64 * 2**10
"""Limits of one decoded page: vLLM's has some 50 kB and 700 lines; any page within the limits is read in 2 s."""
CUT = b"# the page was cut off here"
"""The line that replaces an incomplete last line in a recording."""

_SAMPLE = re.compile(
    r"([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*"
    r'(?:\{((?:[^"}]|"(?:\\.|[^"\\])*+")*+)\}[ \t]*|[ \t])'
    r"([-+]?[0-9a-zA-Z.][-+0-9a-zA-Z.]*)"
    r"([ \t]+-?[0-9][0-9.eE+]*)?([ \t]+#.*)?\s*"
)
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:\\.|[^"\\])*+)"[ \t]*(?:,[ \t]*|$)')
_ESCAPE = re.compile(r'\\([\\"n])')
_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})
MOST_HEADS = 20_000
"""Texts before a value that are kept: processes come and go, and every PID is a series of its own."""
_HEADS: dict[tuple[str, tuple[str, ...]], tuple[str, str]] = {}


class NotMetrics(Exception):
    """A page that counts as a failed scrape; the message is the reason."""


def sample(line: bytes) -> tuple[str, dict[str, str], str, str, str]:
    """Return name, labels, value, timestamp and exemplar of a line; ValueError if it is no sample.

    Timestamp and exemplar may be "".
    """
    match = _SAMPLE.fullmatch(line.decode("utf-8", "replace"))
    if match is None:
        raise ValueError
    name, inside, value, timestamp, exemplar = match.groups(default="")
    labels: dict[str, str] = {}
    at = 0
    while at < len(inside.rstrip(" \t")):
        label = _LABEL.match(inside, at)
        if label is None or label[1] in labels or label[1] == "__name__":
            raise ValueError
        labels[label[1]] = _ESCAPE.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], label[2])
        at = label.end()
    return name, labels, value, timestamp, exemplar


def lines_from(page: bytes, beginning: bytes) -> bytes:
    """Return the lines of a page that begin with a text; they are adjacent."""
    first = page.find(b"\n" + beginning) + 1
    if not first:
        return b""
    last = page.rfind(b"\n" + beginning) + 1
    return page[first : page.index(b"\n", last)]


def is_cut(rest: bytes) -> bool:
    """Return True if the rest after the last newline is part of a line."""
    return rest.strip() not in (b"", b"# EOF")


def refuse_other_formats(page: bytes) -> None:
    """Raise NotMetrics if a page starts as HTML or JSON does."""
    start = page[:1024].lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"<"):
        raise NotMetrics("answered an HTML page, not metrics")
    if start.startswith((b"{", b"[")):
        raise NotMetrics("answered JSON, not metrics")


def render(samples: Iterable[Sample]) -> bytes:
    """Write samples in the text format 0.0.4, families in the order of the contract.

    prometheus_client writes the text before a value once for each series: it does not change from scrape to scrape.
    """
    from prometheus_client import generate_latest  # noqa: PLC0415

    by_family: dict[str, list[Sample]] = {}
    for sample in samples:
        by_family.setdefault(sample[0], []).append(sample)
    lines: list[str] = []
    for name in filter(by_family.__contains__, families()):
        for at, (_, labels, value) in enumerate(by_family[name]):
            head = _HEADS.get((name, labels))
            if head is None:
                if len(_HEADS) >= MOST_HEADS:
                    _HEADS.clear()
                registry = cast("CollectorRegistry", _Registry((name, labels, 0.0)))
                comments, _, line = generate_latest(registry).decode().rstrip("\n").rpartition("\n")
                head = _HEADS[name, labels] = f"{comments}\n", line.rpartition(" ")[0]
            lines.append(f"{'' if at else head[0]}{head[1]} {_number(value)}\n")
    return "".join(lines).encode()


@lru_cache(maxsize=4096)
def _number(value: float) -> str:
    """Write a number as prometheus_client does; most numbers are those of the last scrape."""
    from prometheus_client.utils import floatToGoString  # noqa: PLC0415

    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def labelled(samples: Iterable[Sample]) -> "Iterator[tuple[dict[str, str], float]]":
    """Yield the labels, with `__name__`, and the value of each sample."""
    for name, labels, value in samples:
        yield {"__name__": name, **dict(zip(families()[name].labels, labels, strict=True))}, float(value)


def plain(samples: Iterable[Sample]) -> bytes:
    """Write samples as bare lines, for a page that only diag reads; prometheus_client takes a while to load."""
    lines = []
    for name, labels, value in samples:
        pairs = zip(families()[name].labels, labels, strict=True)
        text = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in pairs)
        lines.append(f"{name}{f'{{{text}}}' if text else ''} {value!r}\n")
    return "".join(lines).encode()


class _Registry:
    """A registry of one sample, for `generate_latest`."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

        name, labels, value = self._sample
        family = families()[name]
        kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
        metric = kind(name, family.help, labels=family.labels)
        metric.add_metric(labels, value)
        yield metric
