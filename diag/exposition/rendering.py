"""Samples of the exporter as a /metrics page: the text format 0.0.4 (the only importer of prometheus_client)."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from diag.core.metric_families import Sample, families

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric


def render(samples: Iterable[Sample]) -> bytes:
    """Write samples in the text format 0.0.4, families in the order of the contract.

    prometheus_client writes the text before a value once for each series: it does not change from scrape to scrape.
    """
    from prometheus_client import generate_latest

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
    from prometheus_client.utils import floatToGoString

    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


_HEADS: dict[tuple[str, tuple[str, ...]], tuple[str, str]] = {}
MOST_HEADS = 20_000
"""Processes come and go, and every PID is a series of its own."""


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


_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})


class _Registry:
    """A registry of one sample, for `generate_latest`."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        name, labels, value = self._sample
        family = families()[name]
        kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
        metric = kind(name, family.help, labels=family.labels)
        metric.add_metric(labels, value)
        yield metric
