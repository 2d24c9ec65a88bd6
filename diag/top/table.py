"""The table of servers: its columns and cells, the columns that fit into a window, the order and the filter."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from diag.core.formatting import clock, escaped, printable, quantity
from diag.diagnosis.vitals import MEASURES
from diag.report import sentences as words
from diag.report.layout import columns, shortened
from diag.report.summary import BARS, VERDICTS, count_verdicts, verdicts
from diag.top.frame import Frame, ServerRow

GAP = 2
"""Columns between two cells."""
LEAST_NAME, MOST_NAME = 12, 40
SPARK = 12
"""Bars in a cell."""
NOTHING = "-"
STATES = ("dead", "stalled", "starting", "slow", "asleep", "busy", "idle")
MINUTES, THOUSANDS = 600, 10_000
"""The least time in seconds that is shown in minutes, and the least number that is shown in thousands."""


class ServerColumn(NamedTuple):
    """A column: its heading in two lines, its cell and width; if room is short, the lowest ranks are shown.

    `gpu_rank` is the rank in the view of the GPUs.
    """

    title: str
    cell: Callable[[ServerRow], str]
    width: int
    rank: int
    gpu_rank: int
    right: bool = True


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
    return f"{'before ' if row.before else ''}{clock(row.since).removesuffix(' UTC')}"


def _first(names: Sequence[str], room: int) -> str:
    """Return the first of the names, and the number of further names."""
    more = f" +{len(names) - 1}" if names[1:] else ""
    return shortened(printable(names[0]), room - len(more)) + more if names else ""


def _measure(title: str, key: str, width: int, rank: int, gpu_rank: int) -> ServerColumn:
    return ServerColumn(title, lambda row: value(row, key), width, rank, gpu_rank)


COLUMNS = (
    ServerColumn("verdict", lambda row: row.verdict, 8, 0, 0, right=False),
    ServerColumn("state", state, 8, 2, 1, right=False),
    ServerColumn("incident", lambda row: _first(row.incidents, 22), 22, 1, 9, right=False),
    ServerColumn("since\nUTC", since, 15, 10, 10, right=False),
    _measure("run", "running", 4, 3, 11),
    _measure("wait", "waiting", 4, 4, 12),
    _measure("KV", "kv", 4, 5, 13),
    _measure("output\ntok/s", "tokens", 6, 9, 2),
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
    for column in sorted(COLUMNS, key=lambda column: column.gpu_rank if view.gpus else column.rank):
        if column.width + GAP > room:
            break
        room -= column.width + GAP
        chosen.append(column)
    return min(least, min(least, LEAST_NAME) + room), [column for column in COLUMNS if column in chosen]


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
        f"order: {view.order}",
        f"{found} with '{printable(view.text, 20)}'" if view.text else "",
    ]
    lines = [escaped(line) for line in (first, meaning, "  ".join(filter(None, status)))]
    return [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]
