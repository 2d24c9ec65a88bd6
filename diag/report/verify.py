"""`diag verify` in print: the comparison before and after a change, as plain text, Markdown and JSON.

The JSON has the schema "diag.verify/2" (diag.verify.schema.json).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from diag import __version__
from diag.core.formatting import escaped, listed, moment, number, quantity, threshold
from diag.diagnosis.diagnose import Diagnosis
from diag.report import coverage
from diag.report import sentences as words
from diag.report.json import observed
from diag.report.layout import labelled, paragraph, table
from diag.report.markdown import bullets, escape
from diag.report.markdown import table as markdown_table
from diag.verify.changes import CLEAR, GATEWAY_LIMIT, Bounds, UserMetric
from diag.verify.compare import IncidentOutcome, ServerComparison, Verification
from diag.verify.load import Load, mostly_idle

SCHEMA = "diag.verify/2"
MOST_TRADE_OFFS = 3
MOST_FLAGS = 8
Row = tuple[str, str, str]
"""A name, before -> after, and a remark."""


@dataclass(frozen=True)
class _Section:
    """A label with sentences, or with rows of a table."""

    label: str
    texts: Sequence[str] = ()
    rows: Sequence[Row] = ()


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


# -- the sections of a server, for every form -------------------------------------------------------------------------


def _sections(server: ServerComparison) -> Iterator[_Section]:
    first = server.first
    if first:
        yield _Section("verdict", [f"{first.verdict}: {first.because}"])
    others = [outcome for outcome in server.outcomes if outcome is not first]
    yield _Section(
        "also",
        [f"{o.before.incident.id} on {words.place(o.before.subject)}: {o.verdict}: {o.because}" for o in others],
    )
    changes = []
    for change in server.changes:
        if change.known:
            values = ("not set" if value is None else value or "set" for value in (change.before, change.after))
            changes.append(f"{change.name} {' -> '.join(values)}{' (derived by vLLM)' if change.derived else ''}")
    unchanged = "no difference is known: flags, launch command, version and GPUs look the same"
    yield _Section("changed", changes or [unchanged])
    if first:
        yield from _fix_sections(first, bool(changes))

    marks = {"worse": "WORSE", "better": "better", "same": "", "unknown": ""}
    measured = [metric for metric in server.user_metrics if metric.before or metric.after]
    yield _Section(
        "user-visible",
        rows=[(metric.name, _values(metric), "" if server.reasons else marks[metric.change]) for metric in measured],
    )
    yield _Section(
        "new incidents",
        [f"{_named(new)} on {words.place(new.subject)}: {new.incident.impact}" for new in server.new_incidents],
    )
    yield _load_section(server)
    if unknown := [change.name for change in server.changes if not change.known]:
        names = listed(unknown, most=MOST_FLAGS)
        yield _Section("unknown", [f"only one side publishes {names}: name its launch command with --launch"])
    yield _Section("note", server.notes)


def _fix_sections(outcome: IncidentOutcome, changed: bool) -> Iterator[_Section]:
    """Yield the known fixes that a change applies, and the signals that should change or changed clearly."""
    if changed:
        incident, fixes = outcome.before.incident.id, []
        for applied in outcome.applied_fixes:
            proposed = f"; proposed value: {applied.proposed}" if applied.proposed else ""
            fixes.append(f"{applied.name} fixes {incident}: {applied.fix.effect}{proposed}")
        yield _Section("known fix", fixes or [f"none: the change is no known fix of {incident}"])

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
    yield _Section("signals", rows=rows)


def _values(metric: UserMetric) -> str:
    return f"{_format_bounds(metric.before, metric.unit)} -> {_format_bounds(metric.after, metric.unit)}"


def _format_bounds(bounds: Bounds | None, unit: str) -> str:
    """Format a number; for a histogram the upper edge of its bucket, or "> " its last finite edge."""
    if bounds is None:
        return "-"
    if bounds.lower == bounds.upper:
        return quantity(bounds.upper, unit)
    return f"> {quantity(bounds.lower, unit)}" if math.isinf(bounds.upper) else f"<= {quantity(bounds.upper, unit)}"


def _load_section(server: ServerComparison) -> _Section:
    before, after = server.loads
    if not before.measured or not after.measured:
        return _Section("load", ["not measured on both sides"])
    pairs = (
        ("requests arriving / s", before.arrivals, after.arrivals),
        ("requests in flight (mean)", before.in_flight, after.in_flight),
        ("requests finished", before.finished, after.finished),
        ("prompt tokens / request (mean)", before.prompts.mean, after.prompts.mean),
        ("prompt tokens begun / s", before.prompts.per_second, after.prompts.per_second),
        ("output tokens / request (mean)", before.outputs.mean, after.outputs.mean),
    )
    rows = []
    for name, *values in pairs:
        old, new = ("-" if value is None else number(value) for value in values)
        rows.append((name, f"{old} -> {new}", ""))
    return _Section("load", rows=rows)


def _title(server: ServerComparison) -> str:
    return " -> ".join(dict.fromkeys((server.before, server.after)))


def _sources(verification: Verification) -> list[str]:
    sides = (("before", verification.before), ("after", verification.after))
    return [f"{when}: {coverage.source(report, moment)}" for when, report in sides]


# -- plain text and Markdown ------------------------------------------------------------------------------------------


def render(verification: Verification) -> str:
    """Render the comparison as plain text of at most 100 columns, one line break at its end."""
    lines = [line for head in headlines(verification) for line in paragraph(head)]
    for server in verification.servers:
        lines += ["", *paragraph(_title(server))]
        for section in _sections(server):
            rows = section.rows
            lines += table(rows, label=section.label) if rows else labelled(section.label, section.texts)
    return "\n".join([*lines, "", *labelled("compared", _sources(verification))]) + "\n"


def render_markdown(verification: Verification) -> str:
    """Render the comparison as GitHub-flavoured Markdown, one line break at its end."""
    parts = [f"**{escape(line)}**" for line in headlines(verification)]
    for server in verification.servers:
        parts += [f"## {escape(_title(server))}", *filter(None, map(_markdown_section, _sections(server)))]
    return "\n\n".join([*parts, _markdown_section(_Section("compared", _sources(verification)))]) + "\n"


def _markdown_section(section: _Section) -> str:
    if section.rows:
        return markdown_table((section.label, "before -> after", ""), [tuple(map(escape, row)) for row in section.rows])
    return bullets(section.label.capitalize(), section.texts)


# -- JSON -------------------------------------------------------------------------------------------------------------


def render_json(verification: Verification) -> str:
    return json.dumps(document(verification), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def document(verification: Verification) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "diag": __version__,
        "verdict": verification.verdict,
        "headlines": headlines(verification),
        "before": {**observed(verification.before), "verdict": verification.before.verdict},
        "after": {**observed(verification.after), "verdict": verification.after.verdict},
        "servers": [
            {
                "before": server.before,
                "after": server.after,
                "comparable": not server.reasons,
                "reasons": list(server.reasons),
                "load": dict(zip(("before", "after"), map(_load_document, server.loads), strict=True)),
                "changes": [asdict(change) for change in server.changes],
                "incidents": [_outcome_document(outcome) for outcome in server.outcomes],
                "new_incidents": [_incident_document(diagnosis) for diagnosis in server.new_incidents],
                "user_metrics": [
                    {
                        "name": metric.name,
                        "unit": metric.unit,
                        "before": _bounds_document(metric.before),
                        "after": _bounds_document(metric.after),
                        "change": metric.change,
                    }
                    for metric in server.user_metrics
                ],
                "notes": list(server.notes),
            }
            for server in verification.servers
        ],
        "unmatched": list(verification.unmatched),
    }


def _load_document(load: Load) -> dict[str, Any]:
    numbers = {name: getattr(load, name) for name in ("in_flight", "arrivals", "finished", "seconds", "idle")}
    lengths = {
        side: {name: getattr(tokens, name) for name in ("mean", "error", "longest", "per_second")}
        for side, tokens in (("prompts", load.prompts), ("outputs", load.outputs))
    }
    return {**numbers, **lengths}


def _incident_document(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "incident": diagnosis.incident.id,
        "severity": diagnosis.severity,
        "subject": dict(diagnosis.subject),
    }


def _outcome_document(outcome: IncidentOutcome) -> dict[str, Any]:
    return {
        **_incident_document(outcome.before),
        "primary": outcome.before.primary,
        "verdict": outcome.verdict,
        "because": outcome.because,
        "after": outcome.after.state if outcome.after else None,
        "signals": [
            {
                "signal": delta.condition.signal.name,
                "unit": delta.condition.signal.unit,
                "op": delta.condition.op,
                "threshold": delta.threshold,
                "before": delta.before,
                "after": delta.after,
                "met": delta.met,
            }
            for delta in outcome.signal_deltas
        ],
        "fixes": [
            {"name": applied.name, "effect": applied.fix.effect, "proposed": applied.proposed or None}
            for applied in outcome.applied_fixes
        ],
    }


def _bounds_document(bounds: Bounds | None) -> Mapping[str, Any] | None:
    if bounds is None:
        return None
    return {"from": bounds.lower, "to": None if math.isinf(bounds.upper) else bounds.upper}
