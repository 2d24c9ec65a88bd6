"""Kept ramps in print: two of them compared, or the trend of many; as plain text, Markdown and JSON.

The JSON has the schema "diag.ramps/1" (diag.ramps.schema.json).
"""

from collections.abc import Iterator, Mapping

from diag.core.formatting import escaped, listed, number, plural, quantity
from diag.ramp.comparison import MEASURES, NOTABLE, ComparedFigure, RampComparison, Trend, TrendLine
from diag.report.documents import Document
from diag.report.layout import aligned, paragraph, shortened
from diag.report.markdown import drawn as drawn_in_markdown
from diag.report.markdown import escape
from diag.report.markdown import table as markdown_table
from diag.report.plain_text import drawn
from diag.report.spans import ReportPart
from diag.sources.kept_ramp import RampResult

LABEL = 11
NOT_KNOWN = "not known"
REASONS: Mapping[str, str] = {
    "no change": f"differences are below {quantity(NOTABLE, 'share')}, or as two runs of one server differ",
    "not comparable": "no limit was reached, and no rate was measured in both",
}
TREND_HEAD = ("when", "vLLM", "GPU", "model", "req/s", "ITL p99", "bound by", "changed")
MOST_MODEL, MOST_GPU = 16, 14
"""Columns of a model and a GPU in a line of the trend."""


# -- two ramps, for every form -----------------------------------------------------------------------------------------


def headline(ramps: RampComparison) -> str:
    """Return the verdict with the figures that decide it: "WORSE: ceiling 18.5 -> 11.6 requests/s (-37 %)"."""
    if ramps.lost_ceiling:
        return "WORSE: no load is served inside the SLO any more"
    moved: dict[str, list[str]] = {"worse": [], "better": []}
    for figure in ramps.rates:
        if figure.verdict in moved:
            moved[figure.verdict].append(f"{figure.name} {_values(figure)} ({_change(figure)})")
    for measure in MEASURES:
        for verdict, texts in moved.items():
            figures = [f for f in ramps.latencies if f.name == measure and f.verdict == verdict]
            if figures:
                at = f" at {number(figures[-1].rate or 0.0)} requests/s"
                texts.append(f"p99 {measure} {_values(figures[-1])} ({_change(figures[-1])}){at}")
    parts = [(verdict, "; ".join(texts)) for verdict, texts in moved.items() if texts]
    if ramps.verdict in REASONS:  # one latency of many may differ by chance
        parts.insert(0, (ramps.verdict, REASONS[ramps.verdict]))
    elif ramps.verdict == "better":
        parts.reverse()
    (verdict, decisive), *rest = parts
    return "; ".join([f"{verdict.upper()}: {decisive}", *(f"{name}: {reasons}" for name, reasons in rest)])


def sections(ramps: RampComparison) -> Iterator[ReportPart]:
    """Return the parts of a comparison in their order."""
    rows = []
    for figure in ramps.rates:
        remark: str = figure.verdict
        if figure.why or figure.before is None:
            remark = figure.why or "no load was inside the SLO before"
        elif figure.verdict == "not comparable":
            remark = "not comparable: no limit was reached, or only that of the client"
        elif figure.verdict == "no change" and figure.scatter is not None:
            remark = f"no change: two runs may differ by {quantity(max(figure.scatter, 0.0), 'share')}"
        rows.append([figure.name, _values(figure), _change(figure), remark])
    yield ReportPart("Rates", head=("", "before -> after", "", ""), rows=rows)
    by_rate: dict[float, dict[str, str]] = {}
    remarks = {"worse": "WORSE", "better": "better", "not comparable": "(cannot tell)"}
    for figure in ramps.latencies:
        remark = f"({figure.why})" if figure.why else remarks.get(figure.verdict, "")
        cell = f"{_values(figure)} {_change(figure)} {remark}"
        by_rate.setdefault(figure.rate or 0.0, {})[figure.name] = " ".join(cell.split())
    head = ("at requests/s", *(f"{measure} p99" for measure in MEASURES))
    rows = [[number(rate), *(cells.get(each, "") for each in MEASURES)] for rate, cells in by_rate.items()]
    yield ReportPart("Latency", head=head, rows=rows)
    then, now = (ramp.bound_by or "no limit found" for ramp in (ramps.before, ramps.after))
    next_ = f"; next: {ramps.after.next}" if ramps.after.next else ""
    yield ReportPart("Bound by", [f"{now}{', as before' if now == then else f' (before: {then})'}{next_}"])
    yield ReportPart("Changed", [difference.sentence for difference in ramps.differences] or ["nothing that is known"])
    yield ReportPart("Cause", [cause_sentence(ramps)] if ramps.verdict == "worse" else [])
    yield ReportPart("Not known", [f"for both ramps: {', '.join(ramps.unknown)}"] if ramps.unknown else [])
    yield ReportPart("Compared", [f"{_when(ramp)}  {ramp.file}" for ramp in (ramps.before, ramps.after)])


def summary(found: RampComparison) -> list[ReportPart]:
    """Return the parts of a comparison below its verdict, for a page."""
    return [ReportPart("Against", [headline(found)]), *sections(found)]


def cause(found: RampComparison) -> str:
    """Return the category of the only difference, "several", or "none known"."""
    if not found.differences:
        return "none known"
    return found.differences[0].category if len(found.differences) == 1 else "several"


def cause_sentence(ramps: RampComparison) -> str:
    """Return what may explain a worse ramp."""
    missing = f"; not known for both: {', '.join(ramps.unknown)}" if ramps.unknown else ""
    names = listed([difference.sentence for difference in ramps.differences], "; ", most=4)
    if cause(ramps) == "none known":
        return f"release, flags, traffic and hardware are as before, as far as they are known{missing}"
    if cause(ramps) == "several":
        return f"changed together, cannot tell which: {names}{missing}"
    return f"{ramps.differences[0].category}: {names}, the only known difference{missing}"


def _values(figure: ComparedFigure) -> str:
    unit = "" if figure.rate is None else "seconds"
    then, now = (
        "-" if each is None else quantity(each.value, unit) if unit else number(each.value)
        for each in (figure.before, figure.after)
    )
    return f"{then} -> {'~' if figure.is_interpolated else ''}{now}{'' if unit else ' requests/s'}"


def _change(figure: ComparedFigure) -> str:
    return "" if figure.change is None else f"{'+' if figure.change >= 0 else ''}{100 * figure.change:.0f} %"


def _when(ramp: RampResult) -> str:
    return ramp.measured.strftime("%Y-%m-%d") if ramp.is_dated else NOT_KNOWN


# -- the trend ---------------------------------------------------------------------------------------------------------


def _trend_row(line: TrendLine) -> list[str]:
    ramp, against = line.ramp, line.against
    gpus = list(dict.fromkeys(name.removeprefix("NVIDIA ") for name in ramp.gpus))
    count = f"{len(ramp.gpus)}x" if len(ramp.gpus) > 1 else ""
    changed = ""
    if against:
        names = ", ".join(dict.fromkeys(difference.category for difference in against.differences)) or "-"
        verdict = against.verdict if against.verdict in ("worse", "better") else ""
        changed = f"{verdict}: {names}" if verdict else names
    return [
        _when(ramp),
        shortened(ramp.version or NOT_KNOWN, 10),
        shortened(count + ", ".join(gpus) if gpus else NOT_KNOWN, MOST_GPU),
        shortened(ramp.model.rpartition("/")[2] or NOT_KNOWN, MOST_MODEL),
        number(ramp.ceiling.served) if ramp.ceiling else "-",
        quantity(line.itl.value, "seconds") if line.itl else "-",
        shortened(ramp.binds or "-", 12),
        changed,
    ]


def _trend_title(found: Trend) -> str:
    at = f"p99 ITL at {number(found.rate)} requests/s" if found.rate is not None else "no common rate for the p99 ITL"
    return (
        f"{plural(len(found.lines), 'ramp')} by time: ceiling in requests/s, {at}, and what changed to the line before"
    )


# -- plain text and Markdown ------------------------------------------------------------------------------------------


def render(found: RampComparison) -> str:
    """Render a comparison as plain text of at most 100 columns."""
    lines = [*paragraph(headline(found)), "", *drawn(sections(found), LABEL)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def render_markdown(found: RampComparison) -> str:
    """Render a comparison as GitHub-flavoured Markdown."""
    return "\n\n".join([f"**{escape(headline(found))}**", *drawn_in_markdown(sections(found))]) + "\n"


def render_trend(found: Trend) -> str:
    """Render one line of at most 100 columns for each ramp."""
    rows = [TREND_HEAD, *map(_trend_row, found.lines)]
    changed = len(TREND_HEAD) - 1
    return "\n".join([*paragraph(_trend_title(found)), "", *aligned(rows, changed, right=(4, 5))]) + "\n"


def render_trend_markdown(found: Trend) -> str:
    """Render the trend as a table, with every change in words."""
    rows = []
    for line in found.lines:
        differences = line.against.differences if line.against else ()
        words = [difference.sentence for difference in differences] or _trend_row(line)[-1:]
        verdict = f"{line.against.verdict}: " if line.against else ""
        rows.append([*map(escape, _trend_row(line)[:-1]), escape(verdict + "; ".join(words))])
    return f"{escape(_trend_title(found))}\n\n{markdown_table(TREND_HEAD, rows)}\n"


# -- JSON --------------------------------------------------------------------------------------------------------------


DOCUMENT = Document(
    "ramps",
    {
        "TrendLine": {
            "measured_at": lambda line: (
                line.ramp.measured.isoformat(timespec="seconds") if line.ramp.is_dated else None
            ),
            "differences": lambda line: line.against.differences if line.against else (),
        },
        "RampComparison": {
            "headline": lambda found: escaped(headline(found)),
            "cause": lambda found: cause(found) if found.verdict == "worse" else None,
        },
        "ComparedFigure": {"unit": lambda figure: "requests/s" if figure.rate is None else "seconds"},
    },
)
"""The document of a comparison, None without one, and a trend."""
