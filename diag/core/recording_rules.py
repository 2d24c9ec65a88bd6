"""A metric of ours that the metrics of another exporter have as well."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class RecordingRule(NamedTuple):
    """Our metric, its value in our unit by other metrics, the labels to add, and those of theirs to keep."""

    metric: str
    promql: str
    labels: Mapping[str, str] = MappingProxyType({})
    kept: tuple[str, ...] = ()
