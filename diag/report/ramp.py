"""`diag ramp` in print: the ceiling, what binds, what to change and the steps; as plain text, HTML page and JSON.

The JSON has the schema "diag.ramp/1" (diag.ramp.schema.json). The page needs no network and no script.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime

from markupsafe import Markup

from diag.core.formatting import number, plural, quantity
from diag.ramp.analysis import Ramp
from diag.ramp.plan import holds, why_unusable
from diag.ramp.step import Step
from diag.report import svg
from diag.report.documents import Document
from diag.report.html import page
from diag.report.layout import paragraph, table
from diag.report.markdown import drawn as drawn_in_markdown
from diag.report.markdown import escape
from diag.report.markdown import table as markdown_table
from diag.report.plain_text import drawn
from diag.report.spans import ReportPart, label
from diag.report.templates import pixels, shape
from diag.report.tree import proposal_part

LABEL = 13
HEAD = ["load", "requests/s", "output/s", "TTFT p50", "p99", "ITL p50", "p99", "in flight", "waiting", ""]
MOST_CHANGES = 3


# -- plain text --------------------------------------------------------------------------------------------------------


def render(ramp: Ramp) -> str:
    """Render one screen of at most 100 columns: ceiling, binding resource, changes, next candidate; the steps below."""
    lines = [*paragraph(_headline(ramp)), "", *drawn(_summary(ramp), LABEL)]
    if ramp.steps:
        lines += ["", *table([HEAD, *(_step_row(ramp, step) for step in ramp.steps)], right=range(1, 9))]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _headline(ramp: Ramp) -> str:
    named = [text for text in (ramp.model, f"vLLM {ramp.version}" if ramp.version else "") if text]
    served = f" ({', '.join(named)})" if named else ""
    lengths = f": {ramp.lengths.shown}" if ramp.lengths else ""
    return f"Ramp of {ramp.target}{served}{lengths}"


def _summary(ramp: Ramp) -> Iterator[ReportPart]:
    ceiling = "not known: no step was long enough, with enough requests, inside the SLO"
    if ramp.ceiling:
        step, knee = ramp.ceiling.step, ramp.ceiling.knee
        closed = "closed loop" if step.offer.concurrency else "as seen"
        kind = "Poisson arrivals" if step.offer.rate is not None else closed
        flight = f" with {number(step.in_flight)} in flight" if step.in_flight is not None else ""
        at = f"; the knee is at {knee.offer.concurrency} requests at a time" if knee else ""
        output = f"{number(step.output_tokens_per_second)} output tokens/s"
        ceiling = f"{number(step.requests_per_second)} requests/s, {output}{flight} ({kind}){at}"
    open_end = ramp.binds is None and not ramp.unusable and ramp.saturated is not None
    if open_end:
        least = "at least " if ramp.ceiling else ""
        ceiling = f"{least}{ceiling}: no limit was reached, and more load may be served"
    yield ReportPart("Reached" if open_end else "Ceiling", [ceiling])

    if ramp.binds:
        yield ReportPart(
            "Bound by", [f"{ramp.binds.name}: {ramp.binds.cause}" if ramp.binds.cause else ramp.binds.name]
        )
        yield ReportPart(label("evidence"), list(ramp.binds.evidence))
        changes = map(proposal_part, ramp.binds.proposals[:MOST_CHANGES])
        yield ReportPart("Change", [part._replace(parts=part.of("restart")).whole for part in changes])
    elif ramp.unusable:
        yield ReportPart("Bound by", [f"cannot tell: {ramp.unusable}"])
    elif ramp.saturated is None:
        yield ReportPart("Bound by", ["cannot tell: the server's metrics do not show a step"])
    if ramp.next and ramp.binds:
        pressure = quantity(ramp.next.pressure or 0.0, "share")
        yield ReportPart("Next", [f"{ramp.next.name}, at {pressure} of its limit: {ramp.next.evidence[0]}"])

    if ramp.traffic and ramp.headroom is None:
        yield ReportPart("Headroom", ["the server had no traffic before the ramp"])
    elif ramp.traffic and ramp.headroom:
        share, rate = quantity(1 / ramp.headroom, "share"), number(ramp.traffic.requests_per_second)
        yield ReportPart("Headroom", [f"its own {rate} requests/s are {share} of the ceiling"])

    yield ReportPart(label("ruled_out"), [f"{candidate.name}: {candidate.evidence[0]}" for candidate in ramp.ruled_out])
    unclear = [candidate for candidate in ramp.candidates if candidate.state == "cannot tell"]
    yield ReportPart("Cannot tell", [f"{candidate.name}: {'; '.join(candidate.evidence)}" for candidate in unclear])
    yield ReportPart("Ended", [text for text in (ramp.stopped, ramp.ended) if text])

    notes, seconds = list(ramp.notes), ramp.limits.seconds
    worthless = [step for step in ramp.steps if not step.is_usable]
    reason = why_unusable(worthless[-1], ramp.limits) if worthless else ""
    if worthless and reason != ramp.stopped and (ramp.binds or reason != ramp.unusable):
        of = f"{len(worthless)} of {plural(len(ramp.steps), 'step')}"
        notes.append(f"nothing was concluded from {of}: {reason}")
    if short := sum(step.is_usable and not step.counts(seconds) for step in ramp.steps):
        verb = "does" if short == 1 else "do"
        of = f"{short} of {plural(len(ramp.steps), 'step')} {verb} not count"
        notes.append(f"{of}: shorter than {number(0.6 * seconds)} s or fewer than 10 requests")
    yield ReportPart(label("note"), notes)


def _step_row(ramp: Ramp, step: Step) -> list[str]:
    """Format a step as a row of the table; its last cell marks the ceiling, or has the reason why it does not count."""
    cells = [step.offer.shown, number(step.requests_per_second), number(step.output_tokens_per_second)]
    for seconds in (step.ttft.p50, step.ttft.p99, step.itl.p50, step.itl.p99):
        cells.append("" if seconds is None else quantity(seconds, "seconds"))
    cells += ["" if value is None else number(value) for value in (step.in_flight, step.waiting)]

    remark = ""
    if ramp.ceiling and step is ramp.ceiling.step:
        remark = "ceiling"
    elif step.crowded:
        remark = "crowded host"
    elif not step.counts(ramp.limits.seconds):
        remark = "too short"
    elif step.breaches(ramp.limits.contract):
        remark = "SLO"
    elif not holds(step, ramp.limits):
        remark = "queue grows"
    elif step.by == "client" and ramp.saturated:
        remark = "by the client"
    elif ramp.ceiling and step is ramp.ceiling.knee:
        remark = "knee"
    return [*cells, remark]


def render_markdown(ramp: Ramp) -> str:
    """Render the report as GitHub-flavoured Markdown."""
    parts = [f"**{escape(_headline(ramp))}**", *drawn_in_markdown(_summary(ramp))]
    rows = [[escape(cell) for cell in _step_row(ramp, step)] for step in ramp.steps]
    return "\n\n".join([*parts, *([markdown_table(HEAD, rows)] if rows else [])]) + "\n"


# -- HTML --------------------------------------------------------------------------------------------------------------


def render_html(ramp: Ramp, more: Iterable[ReportPart] = ()) -> str:
    """Render the page, which is XML as well: the plain text, with more parts, and the curves."""
    slo = ramp.limits.contract
    curves = (
        ("requests per second", "1/s", lambda step: step.requests_per_second, None),
        ("output tokens per second", "1/s", lambda step: step.output_tokens_per_second, None),
        ("TTFT (p50)", "seconds", lambda step: step.ttft.p50, slo.ttft_seconds),
        ("TTFT (p99)", "seconds", lambda step: step.ttft.p99, slo.ttft_seconds),
        ("inter-token latency (p50)", "seconds", lambda step: step.itl.p50, slo.itl_seconds),
        ("inter-token latency (p99)", "seconds", lambda step: step.itl.p99, slo.itl_seconds),
    )
    return page(
        "ramp.xhtml.j2",
        title=_headline(ramp),
        summary=[part for part in (*_summary(ramp), *more) if part.texts or part.rows],
        curves=[(curve[0], _plot(ramp, *curve)) for curve in curves],
        head=HEAD,
        rows=[_step_row(ramp, step) for step in ramp.steps],
    )


def _plot(ramp: Ramp, name: str, unit: str, value: Callable[[Step], float | None], limit: float | None) -> Markup:
    """Plot values against requests in flight: closed-loop steps as a line, open-loop ones as dots, the limit dashed."""
    points = sorted(
        (step.in_flight, found, step.offer.rate is None)
        for step in ramp.steps
        if step.in_flight is not None and (found := value(step)) is not None
    )
    if not points:
        return Markup()
    top = max(found for _, found, _ in points)
    limit = limit if limit is not None and limit <= 4 * top else None
    most_load, most = max(load for load, _, _ in points) * 1.05, max(top, limit or 0.0) * 1.15
    scale = svg.Scale(svg.PLOT, 0.0, most_load or 1.0, 0.0, most or 1.0)
    left, base = scale.box.left - 6, scale.box.height - 8
    parts = [
        shape("horizontal", scale.bottom, scale, "axis"),
        shape("text", quantity(top, unit), left, scale.y(top) + 4, "end"),
        shape("text", "0", left, scale.bottom + 4, "end"),
    ]
    power = 10.0 ** math.floor(math.log10(scale.end / 4))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= scale.end / 4)
    for mark in range(int(scale.end / step) + 1):
        parts.append(shape("text", number(mark * step), scale.x(mark * step), base, "middle"))

    if limit is not None:
        parts.append(shape("horizontal", scale.y(limit), scale, "limit"))
        parts.append(shape("text", f"SLO {quantity(limit, unit)}", scale.right + 6, scale.y(limit) + 4, "limit"))
    knee = ramp.ceiling.knee.in_flight if ramp.ceiling and ramp.ceiling.knee else None
    if knee is not None:
        parts.append(shape("vertical", scale.x(knee), scale, "onset"))
        parts.append(shape("text", "knee", scale.x(knee), scale.box.top - 8, "onset middle"))

    line, dots = (
        [(scale.x(load), scale.y(found)) for load, found, closed in points if closed is kind] for kind in (True, False)
    )
    if len(line) == 2:
        parts.append(shape("text", "two steps: the line between them was not measured", scale.right, 14, "end"))
    if len(line) > 1:
        parts.append(shape("path", "line", "M" + " ".join(f"{pixels(x)} {pixels(y)}" for x, y in line)))
    for class_, centres in (("reported", line), ("opened", dots)):
        parts += [shape("circle", class_, x, y, 3.5) for x, y in centres]
    return shape("whole", svg.PLOT, "plot", parts, f"{name} against requests in flight")


# -- JSON --------------------------------------------------------------------------------------------------------------


def _judged(ramp: Ramp, step: Step) -> tuple[object, ...]:
    """Return a step with what its ramp says of it: whether it counts, is within the SLO and holds, or is unusable."""
    is_within = not step.breaches(ramp.limits.contract)
    counts, unusable = step.counts(ramp.limits.seconds), why_unusable(step, ramp.limits)
    return step, counts, is_within, holds(step, ramp.limits), unusable


def _measured_at(ramp: Ramp) -> str | None:
    at = ramp.measured_on.at
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds") if at else None


DOCUMENT = Document(
    "ramp",
    {
        "Ramp": {
            "measured_at": _measured_at,
            "ceiling_step": lambda ramp: ramp.ceiling and _judged(ramp, ramp.ceiling.step),
            "judged_steps": lambda ramp: [_judged(ramp, step) for step in ramp.steps],
            "against": lambda _: None,  # of two ramps
        }
    },
)
