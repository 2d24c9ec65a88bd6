"""Texts of the view: the table of servers (its columns, order and filter), and the page of one server."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np

from diag.core.declarations import PACKAGE, read
from diag.core.formatting import clock, escaped, listed, plural, printable, quantity
from diag.core.subjects import UNKNOWN, instance_name, label_value
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Report, verdict_of
from diag.diagnosis.vitals import MEASURES, NOW
from diag.report import coverage
from diag.report import sentences as words
from diag.report.answer import BARS, VERDICTS, count_verdicts, verdicts
from diag.report.layout import columns, labelled, shortened, table
from diag.report.plain_text import full_report
from diag.top.frame import THROTTLED, Frame, ServerRow

GAP = 2
"""Columns between two cells."""
LEAST_NAME, MOST_NAME = 12, 40
NOTHING = "-"
STATES = ("dead", "stalled", "starting", "slow", "faulted", "asleep", "busy", "idle")
MINUTES, THOUSANDS = 600, 10_000
"""The least time in seconds that is shown in minutes, and the least number that is shown in thousands."""
HISTORY = 30
"""Bars in a line."""
MOST_PARTS = 64
"""The most GPUs, or processes, of one server that are listed."""


class ServerColumn(NamedTuple):
    """A column: its heading in two lines, what it shows (a measure or one of `CELLS`), its width and ranks."""

    title: str
    of: str
    width: int
    rank: int
    gpu_rank: int
    right: bool = True

    def cell(self, row: ServerRow) -> str:
        return CELLS[self.of](row, self.width) if self.of in CELLS else value(row, self.of)


class PartMeasure(NamedTuple):
    """A number of each GPU or process."""

    title: str
    unit: str
    promql: str


class Columns(NamedTuple):
    """The content of columns.toml."""

    servers: tuple[ServerColumn, ...]
    gpus: tuple[PartMeasure, ...]
    processes: tuple[PartMeasure, ...]


SHOWN = read(PACKAGE / "top" / "columns.toml", Columns)


def bars(values: Sequence[float | None], most: int) -> str:
    """Draw the last `most` values as bars from 0 to the greatest of them, a dot for a hole."""
    shown = values[-most:]
    top = max((value for value in shown if value is not None), default=0.0) or 1.0
    return "".join(
        "·" if value is None else BARS[min(int(max(value, 0.0) / top * len(BARS)), len(BARS) - 1)] for value in shown
    )


def value(row: ServerRow, key: str) -> str:
    """Format a number of a server in as few characters as possible: "85ms", "1.2s", "98%", "312W", "12k"."""
    known, unit = row.values.get(key), MEASURES[key].unit
    if known is None:
        return NOTHING
    if unit == "share":
        return f"{100 * known:.0f}%"
    if unit == "seconds" and known >= MINUTES:
        return f"{known / 60:.0f}min"
    if known >= THOUSANDS:
        return f"{known / 1000:.0f}k"
    return quantity(known, unit).replace(" ", "").replace(",", "")


def state(row: ServerRow) -> str:
    return min(row.state.split(", "), key=lambda one: STATES.index(one) if one in STATES else 0) or NOTHING


def since(row: ServerRow) -> str:
    if row.since is None:
        return ""
    return f"{'before ' if row.before else ''}{datetime.fromtimestamp(row.since, UTC):%H:%M:%S}"


def _first(names: Sequence[str], room: int) -> str:
    """Return the first of the names, and the number of further names."""
    more = f" +{len(names) - 1}" if names[1:] else ""
    return shortened(printable(names[0]), room - len(more)) + more if names else ""


CELLS: dict[str, Callable[[ServerRow, int], str]] = {
    "verdict": lambda row, _: row.verdict,
    "state": lambda row, _: state(row),
    "incident": lambda row, room: _first(row.incidents, room) or ("undecided" if row.verdict == "warning" else ""),
    "since": lambda row, _: since(row),
    "history": lambda row, room: bars(row.history.get("tokens", ()), room),
    "throttled": lambda row, room: _first(row.throttled, room),
}


class View(NamedTuple):
    """The choices of the user: the order (a name of `ORDERS`), the text to filter by, the columns of the GPUs first."""

    order: str = "worst first"
    text: str = ""
    gpus: bool = False


ORDERS: dict[str, Callable[[ServerRow], object]] = {
    "worst first": lambda row: (VERDICTS.index(row.verdict), row.since or 0.0),
    "name": lambda row: row.instance,
    "requests waiting": lambda row: -row.values.get("waiting", -1.0),
    "KV cache usage": lambda row: -row.values.get("kv", -1.0),
    "output tok/s": lambda row: -row.values.get("tokens", -1.0),
    "TTFT p95": lambda row: -row.values.get("ttft95", -1.0),
    "ITL p95": lambda row: -row.values.get("itl95", -1.0),
    "GPU temperature": lambda row: -row.values.get("temperature", -1.0),
}


def shown_rows(rows: Sequence[ServerRow], view: View) -> list[ServerRow]:
    """Return the rows that contain the text of the view, in its order, equal ones by name."""
    found = []
    for row in sorted(rows, key=lambda row: row.instance):
        searched = " ".join((row.instance, row.runs, row.verdict, row.state, *row.incidents, *row.throttled))
        if view.text.lower() in searched.lower():
            found.append(row)
    return sorted(found, key=ORDERS[view.order])  # type: ignore[arg-type]


def shown_columns(width: int, names: Sequence[str], view: View) -> tuple[int, list[ServerColumn]]:
    """Return the width of the names, and the columns that fit beside them, in their usual order."""
    least = min(max(map(len, names), default=LEAST_NAME), MOST_NAME)
    room = width - GAP - min(least, LEAST_NAME)
    chosen = []
    for column in sorted(SHOWN.servers, key=lambda column: column.gpu_rank if view.gpus else column.rank):
        if column.width + GAP > room:
            break
        room -= column.width + GAP
        chosen.append(column)
    return min(least, min(least, LEAST_NAME) + room), [column for column in SHOWN.servers if column in chosen]


def summary(frame: Frame, view: View, found: int, width: int) -> list[str]:
    """Return the three lines above the table: the worst verdict, its impact, the state of the view."""
    report = frame.report
    with columns(width):
        first = verdicts(report)[0]
    ill = next((finding.diagnosis.incident for finding in report.present if finding.diagnosis.primary), None)
    slow = (each for each in report.progress if each.state == "slow")
    reasons = [each.sentence for each in report.not_judged]
    reasons += [f"{words.place(each.subject)} is slow: {each.reason}" for each in slow][:1]
    meaning = f"{ill.title}: {ill.impact}." if ill else "; ".join((*reasons, words.found_nothing(report)))
    status = [
        f"NOT UPDATED: {frame.lost}" if frame.lost else "",
        count_verdicts([row.verdict for row in frame.rows]),
        clock(frame.at),
        f"{found} with '{printable(view.text, 20)}'" if view.text else "",
        f"order: {view.order}",
    ]
    below = [escaped(line) for line in (meaning, "  ".join(filter(None, status)))]
    return [first, *(line if len(line) <= width else f"{line[: width - 1]}…" for line in below)]


Part = tuple[str, ...]
"""The label values of a GPU or process."""


def page(frame: Frame, row: ServerRow, width: int) -> list[str]:
    """Return the lines of the page in `width` columns; it queries, so it does not run in the thread that draws."""
    queries = frame.queries
    with columns(width):
        lines = full_report(server_report(frame.report, row.instance))

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
            for gpu, cells in _parts(queries, row.instance, SHOWN.gpus, ("gpu",)).items()
        ]
        lines += _part_table("GPUs", ("", "", *(measure.title for measure in SHOWN.gpus), "throttled by"), gpus)

        processes = [
            (role, f"rank {rank}" if rank else "", f"pid {pid}", *cells)
            for (role, rank, pid), cells in _parts(
                queries, row.instance, SHOWN.processes, ("role", "rank", "pid")
            ).items()
        ]
        lines += _part_table("processes", ("", "", "", *(measure.title for measure in SHOWN.processes)), processes)
    return lines


def server_report(report: Report, instance: str) -> Report:
    """Return the part of a report that is about one server."""
    names = frozenset(report.servers)
    findings = tuple(found for found in report.findings if instance_name(found.diagnosis.subject) == instance)
    not_judged = tuple(each for each in report.not_judged if instance_name(each.subject) in ("", instance))
    servers = tuple(server for server in report.observed.servers if server.name == instance)
    notes = tuple(note for note in coverage.notes(report) if instance in note or not any(map(note.__contains__, names)))
    more = f" and {plural(len(names) - 1, 'more server')}" if len(names) > 1 else ""
    return report._replace(
        observed=report.observed._replace(target=instance + more, servers=servers, notes=notes, defects=()),
        findings=findings,
        not_judged=not_judged,
        health=report.health.of(instance),
        verdict=verdict_of(findings, not_judged, report.health.of(instance)),
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
    return words.grouped(((gpu,), text) for gpu, text in sorted(_series(queries, instance, promql, ("gpu", label))))


def _series(queries: QueryCache, instance: str, promql: str, by: tuple[str, ...]) -> dict[Part, float]:
    """Return the last value of each series of a server by the values of these labels."""
    found = {}
    for subject, values in queries.ask(promql, (), queries.holding(NOW), queries.source.instants[-1:]).items():
        if instance_name(subject) == instance and not np.isnan(values[-1]):
            found[tuple(printable(label_value(subject, name) or UNKNOWN) for name in by)] = float(values[-1])
    return found
