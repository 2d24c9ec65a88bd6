"""The page of one server as plain text: the doctor's full report, the last minutes, the GPUs and processes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from diag.core.formatting import listed, plural, printable, quantity
from diag.core.subjects import UNKNOWN, instance_name, label_value
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Report, verdict_of
from diag.diagnosis.vitals import MEASURES, NOW
from diag.report import sentences as words
from diag.report.layout import columns, labelled, table
from diag.report.plain_text import full_report
from diag.top.frame import THROTTLED, Frame, ServerRow
from diag.top.table import NOTHING, bars

HISTORY = 30
"""Bars in a line."""
MOST_PARTS = 64
"""The most GPUs, or processes, of one server that are listed."""


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
"""The label values of a GPU or process."""


def render(frame: Frame, row: ServerRow, width: int) -> str:
    """Render the page in `width` columns; it queries, so it does not run in the thread that draws."""
    queries = frame.queries
    with columns(width):
        lines = full_report(server_report(frame.report, row.instance)).rstrip().splitlines()

        minutes = [
            (measure.title, quantity(row.values[key], measure.unit), bars(row.history.get(key, ()), HISTORY))
            for key, measure in MEASURES.items()
            if key in row.values
        ]
        lines += ["", *table(minutes, label="last minutes", right=(1,))] if minutes else []

        ranks = _labels_by_gpu(queries, row.instance, "$rank_of_gpu", "rank")
        reasons = _labels_by_gpu(queries, row.instance, THROTTLED, "reason")
        gpus = [
            (
                f"GPU {gpu[0]}",
                listed([f"rank {rank}" for rank in ranks.get(gpu, [])]),
                *cells,
                listed(reasons.get(gpu, [])),
            )
            for gpu, cells in _parts(queries, row.instance, OF_GPUS, ("gpu",)).items()
        ]
        lines += _part_table("GPUs", ("", "", *(measure.title for measure in OF_GPUS), "throttled by"), gpus)

        processes = [
            (role, f"rank {rank}" if rank else "", f"pid {pid}", *cells)
            for (role, rank, pid), cells in _parts(queries, row.instance, OF_PROCESSES, ("role", "rank", "pid")).items()
        ]
        lines += _part_table("processes", ("", "", "", *(measure.title for measure in OF_PROCESSES)), processes)
    return "\n".join(lines) + "\n"


def server_report(report: Report, instance: str) -> Report:
    """Return the part of a report that is about one server."""
    names = frozenset(report.servers)
    findings = tuple(found for found in report.findings if instance_name(found.diagnosis.subject) == instance)
    not_judged = tuple(each for each in report.not_judged if instance_name(each.subject) in ("", instance))
    servers = tuple(server for server in report.observed.servers if server.name == instance)
    notes = tuple(note for note in words.notes(report) if instance in note or not any(map(note.__contains__, names)))
    more = f" and {plural(len(names) - 1, 'more server')}" if len(names) > 1 else ""
    return report._replace(
        observed=report.observed._replace(target=instance + more, servers=servers, notes=notes, defects=()),
        findings=findings,
        not_judged=not_judged,
        verdict=verdict_of(findings, not_judged),
        progress=tuple(progress for progress in report.progress if instance_name(progress.subject) == instance),
        gone=tuple(name for name in report.gone if name == instance),
        ceilings=tuple(shares for shares in report.ceilings if instance_name(shares.subject) == instance),
    )


def _part_table(label: str, titles: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Lay out the first `MOST_PARTS` lines below a blank line and the titles, without the empty columns."""
    if not lines:
        return []
    kept = [at for at in range(len(titles)) if any(line[at] not in ("", NOTHING) for line in lines)]
    rows = [[line[at] for at in kept] for line in (titles, *lines[:MOST_PARTS])]
    rest = len(lines) - MOST_PARTS
    return ["", *table(rows, label=label), *(labelled("", [f"and {rest:,} more"]) if rest > 0 else [])]


def _parts(
    queries: QueryCache, instance: str, measures: Sequence[PartMeasure], by: tuple[str, ...]
) -> dict[Part, list[str]]:
    """Return the values of each part, formatted, in the order of the measures."""
    found = [_series(queries, instance, measure.promql, by) for measure in measures]
    parts = {part for values in found for part in values}
    by_number = sorted(parts, key=lambda part: [(len(text) if text.isdecimal() else 0, text) for text in part])
    return {
        part: [
            quantity(values[part], measure.unit) if part in values else NOTHING
            for measure, values in zip(measures, found, strict=True)
        ]
        for part in by_number
    }


def _labels_by_gpu(queries: QueryCache, instance: str, promql: str, label: str) -> dict[Part, list[str]]:
    """Return the values that a label has in the series of each GPU."""
    found: dict[Part, list[str]] = {}
    for gpu, text in sorted(_series(queries, instance, promql, ("gpu", label))):
        found.setdefault((gpu,), []).append(text)
    return found


def _series(queries: QueryCache, instance: str, promql: str, by: tuple[str, ...]) -> dict[Part, float]:
    """Return the last value of each series of a server by the values of these labels."""
    found = {}
    for subject, values in queries.ask(promql, (), queries.holding(NOW), queries.source.instants[-1:]).items():
        if instance_name(subject) == instance and not np.isnan(values[-1]):
            found[tuple(printable(label_value(subject, name) or UNKNOWN) for name in by)] = float(values[-1])
    return found
