"""The table of servers: which columns a window has room for, what stands in each cell, the order and the filter."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from diag.core.formatting import clock, escaped, printable, quantity
from diag.report import sentences as words
from diag.report.layout import columns, shortened
from diag.report.summary import BARS, VERDICTS, count_verdicts, verdicts
from diag.top.columns import MEASURES
from diag.top.frame import Frame, ServerRow

GAP = 2
"""Columns between two cells."""
LEAST_NAME, MOST_NAME = 12, 40
SPARK = 12
"""Bars in a cell."""
NOTHING = "-"
STATES = ("dead", "stalled", "starting", "slow", "asleep", "busy", "idle")
MINUTES, THOUSANDS = 600, 10_000
"""From so many seconds on a time is in minutes, from so much on a number in thousands."""


class ServerColumn(NamedTuple):
    """A column: its heading in two lines, its cell and width; those of the lowest rank are shown where room is short.

    `gpu_rank` is the rank where the GPUs matter most.
    """

    title: str
    cell: Callable[[ServerRow], str]
    width: int
    rank: int
    gpu_rank: int
    right: bool = True


def bars(values: Sequence[float | None], most: int) -> str:
    """The last values as bars from 0 to the most of them, a dot where there is none."""
    shown = values[-most:]
    top = max((value for value in shown if value is not None), default=0.0) or 1.0
    return "".join(
        "·" if value is None else BARS[min(int(max(value, 0.0) / top * len(BARS)), len(BARS) - 1)] for value in shown
    )


def value(row: ServerRow, key: str) -> str:
    """A number of a server in as few characters as possible: "85ms", "1.2s", "98%", "312W", "12k"."""
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
    """The worst state of its engines."""
    return min(row.state.split(", "), key=lambda one: STATES.index(one) if one in STATES else 0) or NOTHING


def since(row: ServerRow) -> str:
    """When the worst that holds on a server began."""
    if row.since is None:
        return ""
    return f"{'before ' if row.before else ''}{clock(row.since).removesuffix(' UTC')}"


def _first(names: Sequence[str], room: int) -> str:
    """The first of some names, and how many more there are."""
    more = f" +{len(names) - 1}" if names[1:] else ""
    return shortened(printable(names[0]), room - len(more)) + more if names else ""


def _measure(title: str, key: str, width: int, rank: int, gpu_rank: int) -> ServerColumn:
    return ServerColumn(title, lambda row: value(row, key), width, rank, gpu_rank)


COLUMNS = (
    ServerColumn("verdict", lambda row: row.verdict, 8, 0, 0, right=False),
    ServerColumn("state", state, 8, 1, 1, right=False),
    ServerColumn("incident", lambda row: _first(row.incidents, 25), 25, 9, 9, right=False),
    ServerColumn("since\nUTC", since, 15, 10, 10, right=False),
    _measure("run", "running", 4, 2, 11),
    _measure("wait", "waiting", 4, 3, 12),
    _measure("KV", "kv", 4, 4, 13),
    _measure("output\ntok/s", "tokens", 6, 5, 2),
    ServerColumn("last\nminutes", lambda row: bars(row.history.get("tokens", ()), SPARK), SPARK, 8, 8, right=False),
    _measure("TTFT\np50", "ttft50", 6, 11, 14),
    _measure("TTFT\np95", "ttft95", 6, 6, 15),
    _measure("ITL\np50", "itl50", 6, 12, 16),
    _measure("ITL\np95", "itl95", 6, 7, 17),
    _measure("pre-\nempt/min", "preemptions", 8, 13, 18),
    _measure("GPU\npower", "power", 6, 16, 4),
    _measure("SM\nMHz", "clock", 5, 17, 5),
    _measure("GPU\ntemp", "temperature", 5, 15, 3),
    ServerColumn("throttled\nby", lambda row: _first(row.throttled, 17), 17, 14, 6, right=False),
)


class View(NamedTuple):
    """How the rows are shown: the order (a name of `ORDERS`), the text that they must have, GPUs first or not."""

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


def next_order(order: str) -> str:
    """The order that follows."""
    names = list(ORDERS)
    return names[(names.index(order) + 1) % len(names)]


def shown_rows(rows: Sequence[ServerRow], view: View) -> list[ServerRow]:
    """The rows that have the text, in the order; equals stay by name."""
    wanted = view.text.lower()
    found = [row for row in rows if wanted in _searched(row)]
    return sorted(sorted(found, key=lambda row: row.instance), key=ORDERS[view.order])  # type: ignore[arg-type]


def _searched(row: ServerRow) -> str:
    return " ".join((row.instance, row.runs, row.verdict, row.state, *row.incidents, *row.throttled)).lower()


def shown_columns(width: int, names: Sequence[str], view: View) -> tuple[int, list[ServerColumn]]:
    """The width of the names, and the columns that there is room for beside them, in their usual order."""
    least = min(max(map(len, names), default=LEAST_NAME), MOST_NAME)
    room = width - GAP - min(least, LEAST_NAME)
    chosen = []
    for column in sorted(COLUMNS, key=lambda column: column.gpu_rank if view.gpus else column.rank):
        if column.width + GAP > room:
            break
        room -= column.width + GAP
        chosen.append(column)
    return min(least, min(least, LEAST_NAME) + room), [column for column in COLUMNS if column in chosen]


def name_cell(row: ServerRow, width: int) -> str:
    """The name of a server, shortened in its middle."""
    return shortened(printable(row.instance), width)


def summary(frame: Frame, view: View, found: int, width: int) -> list[str]:
    """The lines above the table: the worst verdict, what it means, what is shown; each in one line of the window."""
    report = frame.report
    with columns(width):
        first = verdicts(report)[0]
    ill = next((finding.diagnosis.incident for finding in report.present if finding.diagnosis.primary), None)
    unknown = [each.sentence for each in report.not_judged]
    meaning = f"{ill.title}: {ill.impact}." if ill else "; ".join((*unknown, words.found_nothing(report)))
    status = [
        f"NOT UPDATED: {frame.lost}" if frame.lost else "",
        count_verdicts([row.verdict for row in frame.rows]),
        clock(frame.at),
        f"order: {view.order}",
        f"{found} with '{printable(view.text, 20)}'" if view.text else "",
    ]
    lines = (first, meaning, "  ".join(filter(None, status)))
    return [_clipped(escaped(line), width) for line in lines]


def _clipped(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"
