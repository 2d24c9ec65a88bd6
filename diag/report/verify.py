"""`diag verify` in print: the comparison before and after a change, as plain text, Markdown and JSON.

The JSON has the schema "diag.verify/2" (diag.verify.schema.json).
"""

import math
from collections.abc import Iterator, Sequence

from diag.core.formatting import escaped, listed, moment, number, quantity, threshold
from diag.diagnosis.diagnose import Diagnosis
from diag.report import coverage
from diag.report import sentences as words
from diag.report.documents import Document
from diag.report.layout import paragraph
from diag.report.markdown import drawn as drawn_in_markdown
from diag.report.markdown import escape
from diag.report.plain_text import drawn
from diag.report.spans import ReportPart
from diag.verify.changes import CLEAR, GATEWAY_LIMIT, UserMetric
from diag.verify.compare import IncidentOutcome, ServerComparison, Verification
from diag.verify.load import mostly_idle

MOST_TRADE_OFFS = 3
MOST_FLAGS = 8


# -- line 1 of each server --------------------------------------------------------------------------------------------


def headlines(verification: Verification) -> list[str]:
    """Return line 1 of each server: the verdict on its primary incident, and the trade-offs."""
    servers = [server for server in verification.servers if not server.is_bystander] or verification.servers
    unmatched = (f"NOT COMPARABLE {reason}" for reason in verification.unmatched)
    return [escaped(line) for line in (*map(_headline, servers), *unmatched)]


def _headline(server: ServerComparison) -> str:
    """Return the verdict with its trade-offs: metrics that got worse, limits at the gateway, new incidents."""
    first = server.first
    if first is None:
        new = ", ".join(map(_named, server.new_incidents))
        if server.unknown_before:
            reasons = "; ".join(server.unknown_before)
            return f"NOT COMPARABLE {server.before}: the state before the change is unknown: {reasons}"
        if server.verdict == "worse":
            return f"WORSE {server.before}: no incident before the change, {new} after it"
        if idle := mostly_idle("BEFORE", server.loads[0]):
            return f"NOT COMPARABLE {server.before}: {idle}"
        rest = f"; {new} now, at a different load or state" if new else ""
        return f"NOT COMPARABLE {server.before}: no incident before the change, so there is nothing to verify{rest}"

    what = f"{first.before.incident.id} on {words.place(first.before.subject)}"
    trade_offs = ""
    if first.verdict != "not comparable" and not server.reasons:
        worse = [f"{metric.name} {_values(metric)}" for metric in server.trade_offs][:MOST_TRADE_OFFS]
        limits = (change.after for change in server.changes if change.name == GATEWAY_LIMIT)
        outside = [f"requests beyond {limit} wait at the gateway" for limit in limits]
        trade_offs = "; ".join([*worse, *outside, *(f"new: {_named(new)}" for new in server.new_incidents)])
    if trade_offs and first.verdict == "fixed":
        return f"FIXED, WITH TRADE-OFFS {what}: {trade_offs}"
    because = first.because + (f"; trade-offs: {trade_offs}" if trade_offs else "")
    return f"{first.verdict.upper()} {what}: {because}"


def _named(diagnosis: Diagnosis) -> str:
    return f"{diagnosis.incident.id} ({diagnosis.severity})"


# -- the parts of a server, for every form ----------------------------------------------------------------------------


def _parts(server: ServerComparison) -> Iterator[ReportPart]:
    first = server.first
    if first:
        yield ReportPart("verdict", [f"{first.verdict}: {first.because}"])
    others = [outcome for outcome in server.outcomes if outcome is not first]
    yield ReportPart(
        "also",
        [
            f"{words.titled(o.before.incident)} on {words.place(o.before.subject)}: {o.verdict}: {o.because}"
            for o in others
        ],
    )
    changes = []
    for change in server.changes:
        if change.known:
            values = ("not set" if value is None else value or "set" for value in (change.before, change.after))
            changes.append(f"{change.name} {' -> '.join(values)}{' (derived by vLLM)' if change.derived else ''}")
    unchanged = "no difference is known: flags, launch command, version and GPUs look the same"
    yield ReportPart("changed", changes or [unchanged])
    if first:
        yield from _fix_parts(first, bool(changes))

    marks = {"worse": "WORSE", "better": "better", "same": "", "unknown": ""}
    measured = [metric for metric in server.user_metrics if metric.before or metric.after]
    yield _table(
        "user-visible",
        [(metric.name, _values(metric), "" if server.reasons else marks[metric.change]) for metric in measured],
    )
    yield ReportPart(
        "new incidents",
        [
            f"{new.severity}: {words.titled(new.incident)} on {words.place(new.subject)}: {new.incident.impact}"
            for new in server.new_incidents
        ],
    )
    before, after = server.loads
    if before.measured and after.measured:
        figures = (
            ("requests arriving / s", before.arrivals, after.arrivals),
            ("requests in flight (mean)", before.in_flight, after.in_flight),
            ("requests finished", before.finished, after.finished),
            ("prompt tokens / request (mean)", before.prompts.mean, after.prompts.mean),
            ("prompt tokens begun / s", before.prompts.per_second, after.prompts.per_second),
            ("output tokens / request (mean)", before.outputs.mean, after.outputs.mean),
        )
        shown_as = ((name, ["-" if value is None else number(value) for value in pair]) for name, *pair in figures)
        yield _table("load", [(name, " -> ".join(pair), "") for name, pair in shown_as])
    else:
        yield ReportPart("load", ["not measured on both sides"])
    if unknown := [change.name for change in server.changes if not change.known]:
        names = listed(unknown, most=MOST_FLAGS)
        yield ReportPart("unknown", [f"only one side publishes {names}: name its launch command with --launch"])
    yield ReportPart("note", server.notes)


def _table(label: str, rows: Sequence[tuple[str, str, str]]) -> ReportPart:
    """Return rows of a name, before -> after, and a remark."""
    return ReportPart(label, rows=rows, head=(label, "before -> after", ""))


def _fix_parts(outcome: IncidentOutcome, changed: bool) -> Iterator[ReportPart]:
    """Yield the known fixes that a change applies, and the signals that should change or changed clearly."""
    if changed:
        incident, fixes = words.titled(outcome.before.incident), []
        for applied in outcome.applied_fixes:
            proposed = f"; proposed value: {applied.proposed}" if applied.proposed else ""
            fixes.append(f"{applied.name} fixes {incident}: {applied.fix.effect}{proposed}")
        yield ReportPart("known fix", fixes or [f"none: the change is no known fix of {incident}"])

    promised = {condition for applied in outcome.applied_fixes for condition in applied.fix.expects}
    telling = [
        delta
        for delta in outcome.signal_deltas
        if delta.condition in promised or delta.met or abs(delta.improvement) >= CLEAR
    ]
    rows = []
    for delta in telling or outcome.signal_deltas[:1]:
        signal, op = delta.condition.signal, delta.condition.op
        values = ("-" if value is None else quantity(value, signal.unit) for value in (delta.before, delta.after))
        met = {True: "met", False: "not met", None: "not measured after the change"}[delta.met]
        expected = f"expected {threshold(op, delta.threshold, signal.unit)}: {met}"
        rows.append((signal.name, " -> ".join(values), expected))
    yield _table("signals", rows)


def _values(metric: UserMetric) -> str:
    """Return before -> after; for a histogram the upper edges of the buckets, or "> " the last finite edge."""
    texts = []
    for bounds in (metric.before, metric.after):
        if bounds is None:
            texts.append("-")
        elif math.isinf(bounds.upper) and bounds.lower != bounds.upper:
            texts.append(f"> {quantity(bounds.lower, metric.unit)}")
        else:
            texts.append(f"{'' if bounds.lower == bounds.upper else '<= '}{quantity(bounds.upper, metric.unit)}")
    return " -> ".join(texts)


def _title(server: ServerComparison) -> str:
    return " -> ".join(dict.fromkeys((server.before, server.after)))


def _sources(verification: Verification) -> ReportPart:
    sides = (("before", verification.before), ("after", verification.after))
    return ReportPart("compared", [f"{when}: {coverage.source(report, moment)}" for when, report in sides])


# -- plain text and Markdown ------------------------------------------------------------------------------------------


def render(verification: Verification) -> str:
    """Render the comparison as plain text of at most 100 columns, one line break at its end."""
    lines = [line for head in headlines(verification) for line in paragraph(head)]
    for server in verification.servers:
        lines += ["", *paragraph(_title(server)), *drawn(_parts(server))]
    return "\n".join([*lines, "", *drawn([_sources(verification)])]) + "\n"


def render_markdown(verification: Verification) -> str:
    """Render the comparison as GitHub-flavoured Markdown, one line break at its end."""
    blocks = [f"**{escape(line)}**" for line in headlines(verification)]
    for server in verification.servers:
        blocks += [f"## {escape(_title(server))}", *drawn_in_markdown(_parts(server))]
    return "\n\n".join([*blocks, *drawn_in_markdown([_sources(verification)])]) + "\n"


# -- JSON -------------------------------------------------------------------------------------------------------------


DOCUMENT = Document(
    "verify",
    {
        "Verification": {"headlines": headlines},
        "Report": {"server_lines": coverage.servers},
        "ServerComparison": {"comparable": lambda server: not server.reasons},
    },
)
