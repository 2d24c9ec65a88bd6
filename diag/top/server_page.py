"""The page of one server: the doctor's whole report of it, its last minutes, its GPUs and processes; as plain text."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from diag.core.formatting import listed, plural, printable, quantity
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Report, verdict_of
from diag.report import sentences as words
from diag.report.layout import columns, labelled, table
from diag.report.plain_text import full_report
from diag.top.columns import MEASURES, NOW, THROTTLED
from diag.top.frame import Frame, ServerRow, about
from diag.top.table import NOTHING, bars

HISTORY = 30
"""Bars in a line."""
MOST_PARTS = 64
"""GPUs, or processes, of one server."""


class PartMeasure(NamedTuple):
    """A number of each GPU or process; `unit` as signals have them."""

    title: str
    unit: str
    promql: str


def _last(metric: str) -> str:
    return f"last_over_time({metric}[$window])"


OF_GPUS = (
    PartMeasure("utilisation", "share", _last("diag_gpu_utilization_ratio")),
    PartMeasure("power", "watts", _last("diag_gpu_power_watts")),
    PartMeasure("SM MHz", "", _last('diag_gpu_clock_hertz{clock="sm"}') + " / 1e6"),
    PartMeasure("temperature", "celsius", _last("diag_gpu_temperature_celsius")),
    PartMeasure("memory used", "bytes", _last("diag_gpu_memory_used_bytes")),
)
OF_PROCESSES = (
    PartMeasure("CPU cores", "", "rate(diag_vllm_process_cpu_seconds_total[$window])"),
    PartMeasure("memory", "bytes", _last("diag_vllm_process_resident_memory_bytes")),
    PartMeasure("stopped", "bool", _last("diag_vllm_process_stopped")),
)
Part = tuple[str, ...]


def render(frame: Frame, row: ServerRow, width: int) -> str:
    """The page in so many columns. It queries: what draws must not wait for it."""
    with columns(width):
        report = full_report(of_server(frame.report, row.instance)).rstrip().splitlines()
        sections = (_minutes(row), _gpus(frame.queries, row.instance), _processes(frame.queries, row.instance))
        return "\n".join([*report, *(line for lines in sections if lines for line in ("", *lines))]) + "\n"


def of_server(report: Report, instance: str) -> Report:
    """The part of a report that is about one server."""
    names = frozenset(words.instances(report))
    findings = tuple(found for found in report.findings if words.instance(found.diagnosis.subject) == instance)
    not_judged = tuple(each for each in report.not_judged if words.instance(each.subject) in ("", instance))
    lines = tuple(line for line in report.observed.servers if about(line, names) == instance)
    notes = tuple(note for note in report.observed.notes if instance in note or not any(map(note.__contains__, names)))
    more = f" and {plural(len(names) - 1, 'more server')}" if len(names) > 1 else ""
    return report._replace(
        observed=report.observed._replace(target=instance + more, servers=lines, notes=notes),
        findings=findings,
        not_judged=not_judged,
        verdict=verdict_of(findings, not_judged),
        progress=tuple(progress for progress in report.progress if words.instance(progress.subject) == instance),
        gone=tuple(name for name in report.gone if name == instance),
        ceilings=tuple(shares for shares in report.ceilings if words.instance(shares.subject) == instance),
    )


def _minutes(row: ServerRow) -> list[str]:
    """What the table shows of it, with the last minutes of each."""
    lines = [
        (measure.title, quantity(row.values[key], measure.unit), bars(row.history.get(key, ()), HISTORY))
        for key, measure in MEASURES.items()
        if key in row.values
    ]
    return table(lines, label="last minutes", right=(1,)) if lines else []


def _gpus(queries: QueryCache, instance: str) -> list[str]:
    """A line for each GPU, with its rank and why its clocks are held down."""
    gpus = _parts(queries, instance, OF_GPUS, ("gpu",))
    ranks = _labels(queries, instance, "$rank_of_gpu", "rank")
    reasons = _labels(queries, instance, THROTTLED, "reason")
    lines = [
        (f"GPU {gpu[0]}", listed([f"rank {rank}" for rank in ranks.get(gpu, [])]), *cells, listed(reasons.get(gpu, [])))
        for gpu, cells in gpus.items()
    ]
    return _headed("GPUs", ("", "", *(measure.title for measure in OF_GPUS), "throttled by"), lines)


def _processes(queries: QueryCache, instance: str) -> list[str]:
    """A line for each process, with its rank."""
    found = _parts(queries, instance, OF_PROCESSES, ("role", "rank", "pid"))
    lines = [(role, f"rank {rank}" if rank else "", f"pid {pid}", *cells) for (role, rank, pid), cells in found.items()]
    return _headed("processes", ("", "", "", *(measure.title for measure in OF_PROCESSES)), lines)


def _headed(label: str, titles: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A table under its headings, without columns that are empty; of many lines the first ones."""
    if not lines:
        return []
    kept = [at for at in range(len(titles)) if any(line[at] not in ("", NOTHING) for line in lines)]
    rows = [[line[at] for at in kept] for line in (titles, *lines[:MOST_PARTS])]
    rest = len(lines) - MOST_PARTS
    return [*table(rows, label=label), *(labelled("", [f"and {rest:,} more"]) if rest > 0 else [])]


def _parts(
    queries: QueryCache, instance: str, measures: Sequence[PartMeasure], by: tuple[str, ...]
) -> dict[Part, list[str]]:
    """By the labels of each part, in their order: its numbers in words."""
    found = [_series(queries, instance, measure.promql, by) for measure in measures]
    return {
        part: [
            quantity(values[part], measure.unit) if part in values else NOTHING
            for measure, values in zip(measures, found, strict=True)
        ]
        for part in sorted({part for values in found for part in values}, key=_natural)
    }


def _natural(part: Part) -> tuple[tuple[int, str], ...]:
    return tuple((len(text) if text.isdecimal() else 0, text) for text in part)


def _labels(queries: QueryCache, instance: str, promql: str, label: str) -> Mapping[Part, list[str]]:
    """By GPU: what this label is in the series that it has."""
    found: dict[Part, list[str]] = {}
    for gpu, text in sorted(_series(queries, instance, promql, ("gpu", label))):
        found.setdefault((gpu,), []).append(printable(text))
    return found


def _series(queries: QueryCache, instance: str, promql: str, by: tuple[str, ...]) -> Mapping[Part, float]:
    """The last value of each series of this server, by its labels."""
    return dict(_of(queries, instance, promql, by))


def _of(queries: QueryCache, instance: str, promql: str, by: tuple[str, ...]) -> Iterator[tuple[Part, float]]:
    for subject, row in queries.ask(promql, (), queries.holding(NOW), queries.source.instants[-1:]).items():
        labels = dict(subject)
        if labels.get("instance") == instance and not np.isnan(row[-1]):
            yield tuple(printable(labels.get(name, "")) for name in by), float(row[-1])
