"""A recording without some of its telemetry, in memory: a family, a label or a source is taken away; and what then
remains of the incidents that the whole recording shows."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from diag.core.incident import RANK
from diag.core.subjects import Subject
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Report
from diag.promql import Block, Labels, Samples
from diag.sources.observation import Observation

_PARTS = re.compile(r"_(bucket|sum|count|created)$")
UP = ("up", "diag_vllm_up")
"""Series about the scrapes themselves, which a source of telemetry cannot lack."""
SOURCES = {
    "vLLM's page": r"(vllm:|http_|process_)",
    "vLLM's HTTP server": r"http_",
    "GPUs": r"diag_gpu_",
    "log": r"diag_vllm_(log|startup)_",
    "processes": r"diag_vllm_process",
    "host": r"diag_host_",
    "configuration": r"diag_vllm_config$|vllm:cache_config_info$",
}
"""Patterns of the names of the series of each source."""
KEPT_LABELS = ("__name__", "instance", "le", "engine", "gpu", "pid", "quantile", "running_lora_adapters")
"""Labels without which the series of a page would not be the same measurements; an empty list of adapters is a missing
label."""


def family(series: Labels) -> str:
    """Return the family of a series: the parts of a histogram are one family."""
    return _PARTS.sub("", series["__name__"])


def families(observation: Observation) -> list[str]:
    """Return the sorted families of a recording, without the series about the scrapes."""
    return sorted({family(series) for series in _series(observation)}.difference(UP))


def labels(observation: Observation) -> list[str]:
    """Return the sorted names of the labels that a recording may lose."""
    return sorted({name for series in _series(observation) for name in series}.difference(KEPT_LABELS))


def _series(observation: Observation) -> Iterator[Labels]:
    return (series for block in observation.samples.select([]) for series in block.labels)


def without(observation: Observation, is_dropped: Callable[[Labels], bool]) -> Observation:
    """Return the recording without the series that are dropped; its scrapes stay as they are."""
    blocks = []
    for block in observation.samples.select([]):
        kept = [row for row, series in enumerate(block.labels) if series["__name__"] in UP or not is_dropped(series)]
        if kept:
            blocks.append(Block(tuple(block.labels[row] for row in kept), block.times, block.values[kept]))
    return replace(observation, samples=Samples(blocks))


def without_family(observation: Observation, name: str) -> Observation:
    return without(observation, lambda series: family(series) == name)


def without_source(observation: Observation, name: str) -> Observation:
    return without(observation, lambda series: re.match(SOURCES[name], series["__name__"]) is not None)


def without_label(observation: Observation, name: str) -> Observation:
    """Return the recording without the label; series that it told apart are ambiguous and are dropped, as on a page."""

    def stripped(series: Labels) -> frozenset[tuple[str, str]]:
        return frozenset((label, text) for label, text in series.items() if label != name)

    alike = Counter(map(stripped, _series(observation)))
    kept = without(observation, lambda series: alike[stripped(series)] > 1)
    blocks = (
        Block(tuple(dict(stripped(series)) for series in block.labels), block.times, block.values)
        for block in kept.samples.select([])
    )
    return replace(observation, samples=Samples(blocks))


class Change(NamedTuple):
    """The verdict of what is left, the incidents that are new, and the signs of the old ones that still hold."""

    verdict: str
    new: tuple[str, ...]
    signs_left: tuple[str, ...]

    @property
    def is_wrong(self) -> bool:
        """True if another incident is claimed, or health although a sign of the incident was measured."""
        return bool(self.new) or (self.verdict == "healthy" and bool(self.signs_left))


def change(full: Report, without_it: Report) -> Change:
    """Compare the report of a recording with the one of the recording that lacks something."""
    present = {each.incident.id for each in _alarming(full)}
    own = {(each.incident.id, each.subject) for each in _alarming(full)}
    before = {key: _signs(each) for each in _alarming(full) if (key := _key(each)) in own}
    signs = [
        name
        for finding in without_it.findings
        if (key := _key(finding.diagnosis)) in own
        for name in sorted(_signs(finding.diagnosis) & before[key])
    ]
    new = sorted({each.incident.id for each in _alarming(without_it)} - present)
    return Change(without_it.verdict, tuple(new), tuple(dict.fromkeys(signs)))


def _key(diagnosis: Diagnosis) -> tuple[str, Subject]:
    return diagnosis.incident.id, diagnosis.subject


def _alarming(report: Report) -> list[Diagnosis]:
    return [each.diagnosis for each in report.present if RANK[each.diagnosis.severity]]


def _signs(diagnosis: Diagnosis) -> set[str]:
    """Return the symptoms that hold, and do not hold on a healthy server at work as well."""
    own = diagnosis.incident.symptoms
    return {
        condition.signal.name
        for condition, reading in zip(own, diagnosis.symptoms[: len(own)], strict=True)
        if condition.op.startswith(">") and not condition.signal.context and reading.holds
    }
