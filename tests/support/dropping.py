"""A recording without some of its telemetry, in memory: one family, one label or one source is taken away."""

import re
from collections.abc import Callable
from dataclasses import replace

from diag.promql import Block, Labels, Samples
from diag.sources.observation import Observation

_PARTS = re.compile(r"_(bucket|sum|count|created)$")
UP = ("up", "diag_vllm_up")
"""Series about the scrapes themselves, which a source of telemetry cannot lack."""


def family(series: Labels) -> str:
    """Return the family of a series: the parts of a histogram are one family."""
    return _PARTS.sub("", series["__name__"])


def families(observation: Observation) -> list[str]:
    """Return the sorted families of a recording, without the series about the scrapes."""
    found = {family(series) for block in observation.samples.select([]) for series in block.labels}
    return sorted(found.difference(UP))


def without(observation: Observation, is_dropped: Callable[[Labels], bool]) -> Observation:
    """Return the recording without the series that are dropped; its scrapes stay as they are."""
    blocks = []
    for block in observation.samples.select([]):
        kept = [row for row, series in enumerate(block.labels) if series["__name__"] in UP or not is_dropped(series)]
        if kept:
            blocks.append(Block(tuple(block.labels[row] for row in kept), block.times, block.values[kept]))
    return replace(observation, samples=Samples(blocks))


def without_family(observation: Observation, name: str) -> Observation:
    """Return the recording without one family."""
    return without(observation, lambda series: family(series) == name)
