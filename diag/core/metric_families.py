"""The metrics that the exporter serves (metric_families.toml).

A collector yields `Sample`s; a value that it cannot know has no sample, never 0, -1 or NaN.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, Protocol

from diag.core.declarations import PACKAGE, Mistake, did_you_mean, read

Sample = tuple[str, tuple[str, ...], float]
"""A family's name, the values of its labels in the family's order, and the value."""


@dataclass(frozen=True)
class MetricFamily:
    """One metric: `help` names the unit, `labels` are in the order in which a sample gives their values.

    unread: the purpose of a metric that no incident and no dashboard of diag reads.
    """

    help: str
    kind: Literal["gauge", "counter"] = "gauge"
    labels: tuple[str, ...] = ()
    unread: str = ""


class MetricTable(NamedTuple):
    """The file: `labels` have their meanings."""

    labels: Mapping[str, str]
    family: Mapping[str, MetricFamily]

    def mistakes(self) -> tuple[()]:
        for name, family in self.family.items():
            for label in set(family.labels).difference(self.labels):
                near = did_you_mean(label, self.labels)
                raise Mistake(f"has the label '{label}', which [labels] lacks{near}", ("family", name, "labels"))
        return ()


@cache
def _table() -> MetricTable:
    return read(PACKAGE / "core" / "metric_families.toml", MetricTable)


def families() -> Mapping[str, MetricFamily]:
    """Return the metrics by name, in the order of the page."""
    return _table().family


def label_meanings() -> Mapping[str, str]:
    return _table().labels


@dataclass(frozen=True)
class Collected:
    """The samples of a collector at one scrape; a `problem` sets diag_scrape_success to 0, samples are still served."""

    samples: Sequence[Sample]
    problem: str = ""


class Collector(Protocol):
    """One part of the page; `name` is its label in diag_scrape_success."""

    name: str

    def collect(self) -> Collected:
        """Collect samples now; an exception costs only this part of the page."""


THROTTLE_REASONS = {
    "gpu_idle": 0x1,
    "applications_clocks": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
    "display_clocks": 0x100,
    "board_limit": 0x200,
    "reliability": 0x400,
}
"""Reasons why a GPU lowers its clocks, each with its bit in nvmlClocksEventReasons (nvml.h 13.5) and in DCGM."""
