"""The comparison before and after a change, for a person: at a terminal, or in a ticket."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from diag.core.formatting import escaped, listed, moment, number, quantity, threshold
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Report
from diag.report import sentences as words
from diag.report.layout import labelled, paragraph, table
from diag.report.markdown import escape
from diag.report.markdown import table as markdown_table
from diag.verify.changes import GATEWAY_LIMIT, AppliedFix, SettingChange
from diag.verify.compare import IncidentOutcome, ServerComparison, Verification
from diag.verify.deltas import CLEAR, Bounds, SignalDelta, UserMetric
from diag.verify.load import mostly_idle

MOST_TRADE_OFFS = 3
MOST_FLAGS = 8
Row = tuple[str, str, str]
"""A name, before -> after, and what that means."""


@dataclass(frozen=True)
class _Section:
    """A label with sentences, or with rows of a table."""

    label: str
    texts: Sequence[str] = ()
    rows: Sequence[Row] = ()


# -- line 1 of each server --------------------------------------------------------------------------------------------


def headlines(verification: Verification) -> list[str]:
    """Line 1 of each server: the verdict on its primary incident, and the trade-offs."""
    servers = [server for server in verification.servers if not server.is_bystander] or verification.servers
    unmatched = (f"NOT COMPARABLE {reason}" for reason in verification.unmatched)
    return [escaped(line) for line in (*map(_headline, servers), *unmatched)]


def _headline(server: ServerComparison) -> str:
    first = server.first
    if first is None:
        return _without_incident(server)
    what = f"{first.before.incident.id} on {words.place(first.before.subject)}"
    trade_offs = "; ".join(_trade_offs(server)) if first.verdict != "not comparable" else ""
    if trade_offs and first.verdict == "fixed":
        return f"FIXED, WITH TRADE-OFFS {what}: {trade_offs}"
    because = first.because + (f"; trade-offs: {trade_offs}" if trade_offs else "")
    return f"{first.verdict.upper()} {what}: {because}"


def _without_incident(server: ServerComparison) -> str:
    """Where no incident was found before the change."""
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


def _trade_offs(server: ServerComparison) -> list[str]:
    """What got worse, the most important first, what is not seen of it, and the new incidents."""
    worse = [f"{metric.name} {_values(metric)}" for metric in server.trade_offs][:MOST_TRADE_OFFS]
    limits = (change.after for change in server.changes if change.name == GATEWAY_LIMIT)
    outside = [f"requests beyond {limit} wait at the gateway" for limit in limits]
    new = [f"new: {_named(incident)}" for incident in server.new_incidents]
    return [] if server.reasons else [*worse, *outside, *new]


def _named(diagnosis: Diagnosis) -> str:
    return f"{diagnosis.incident.id} ({diagnosis.severity})"


# -- the sections of a server, for every form -------------------------------------------------------------------------


def _sections(server: ServerComparison) -> Iterator[_Section]:
    first = server.first
    if first:
        yield _Section("verdict", [f"{first.verdict}: {first.because}"])
    yield _Section("also", _other_outcomes(server))
    yield _Section("changed", _changed(server))
    if first and any(change.known for change in server.changes):
        yield _Section("known fix", _fixes(first))
    yield _Section("signals", rows=_signals(first) if first else [])
    yield _Section("user-visible", rows=_user_metrics(server))
    yield _Section("new incidents", _new_incidents(server))
    yield _load(server)
    yield _Section("unknown", _unknown_changes(server))
    yield _Section("note", server.notes)


def _other_outcomes(server: ServerComparison) -> list[str]:
    """The verdicts beyond that of line 1."""
    return [
        f"{outcome.before.incident.id} on {words.place(outcome.before.subject)}: {outcome.verdict}: {outcome.because}"
        for outcome in server.outcomes
        if outcome is not server.first
    ]


def _changed(server: ServerComparison) -> list[str]:
    known = [_change(change) for change in server.changes if change.known]
    return known or ["no difference is known: flags, launch command, version and GPUs look the same"]


def _change(change: SettingChange) -> str:
    values = ("not set" if value is None else value or "set" for value in (change.before, change.after))
    return f"{change.name} {' -> '.join(values)}{' (derived by vLLM)' if change.derived else ''}"


def _fixes(outcome: IncidentOutcome) -> list[str]:
    """Which of the incident's known fixes the change is."""
    fixes = [_fix(applied, outcome) for applied in outcome.applied_fixes]
    return fixes or [f"none: the change is no known fix of {outcome.before.incident.id}"]


def _fix(applied: AppliedFix, outcome: IncidentOutcome) -> str:
    proposed = f"; proposed value: {applied.proposed}" if applied.proposed else ""
    return f"{applied.name} fixes {outcome.before.incident.id}: {applied.fix.effect}{proposed}"


def _signals(outcome: IncidentOutcome) -> list[Row]:
    """What the fix should bring about, and which signals of the incident moved; the first of them where none did."""
    promised = {condition for applied in outcome.applied_fixes for condition in applied.fix.expects}
    telling = [
        delta
        for delta in outcome.signal_deltas
        if delta.condition in promised or delta.met or abs(delta.improvement) >= CLEAR
    ]
    return [_signal(delta) for delta in telling or outcome.signal_deltas[:1]]


def _signal(delta: SignalDelta) -> Row:
    signal, op = delta.condition.signal, delta.condition.op
    values = ("-" if value is None else quantity(value, signal.unit) for value in (delta.before, delta.after))
    met = {True: "met", False: "not met", None: "not measured after the change"}[delta.met]
    return signal.name, " -> ".join(values), f"expected {threshold(op, delta.threshold, signal.unit)}: {met}"


def _user_metrics(server: ServerComparison) -> list[Row]:
    marks = {"worse": "WORSE", "better": "better", "same": "", "unknown": ""}
    measured = [metric for metric in server.user_metrics if metric.before or metric.after]
    return [(metric.name, _values(metric), "" if server.reasons else marks[metric.change]) for metric in measured]


def _values(metric: UserMetric) -> str:
    return f"{_value(metric.before, metric.unit)} -> {_value(metric.after, metric.unit)}"


def _value(bounds: Bounds | None, unit: str) -> str:
    """A number; of a histogram the upper edge of its bucket, or the last edge that it is beyond."""
    if bounds is None:
        return "-"
    if bounds.lower == bounds.upper:
        return quantity(bounds.upper, unit)
    return f"> {quantity(bounds.lower, unit)}" if math.isinf(bounds.upper) else f"<= {quantity(bounds.upper, unit)}"


def _new_incidents(server: ServerComparison) -> list[str]:
    return [
        f"{_named(diagnosis)} on {words.place(diagnosis.subject)}: {diagnosis.incident.impact}"
        for diagnosis in server.new_incidents
    ]


def _load(server: ServerComparison) -> _Section:
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
    return _Section("load", rows=[(name, f"{_number(old)} -> {_number(new)}", "") for name, old, new in pairs])


def _number(value: float | None) -> str:
    return "-" if value is None else number(value)


def _unknown_changes(server: ServerComparison) -> list[str]:
    names = [change.name for change in server.changes if not change.known]
    if not names:
        return []
    return [f"only one side publishes {listed(names, most=MOST_FLAGS)}: name its launch command with --launch"]


def _title(server: ServerComparison) -> str:
    return " -> ".join(dict.fromkeys((server.before, server.after)))


def _sources(verification: Verification) -> list[str]:
    sides: tuple[tuple[str, Report], ...] = (("before", verification.before), ("after", verification.after))
    return [f"{when}: {words.source(report, moment)}" for when, report in sides]


# -- for a terminal, and for a ticket ---------------------------------------------------------------------------------


def terminal(verification: Verification) -> str:
    """Plain text of at most 100 columns, one line break at its end."""
    lines = [line for head in headlines(verification) for line in paragraph(head)]
    for server in verification.servers:
        lines += ["", *paragraph(_title(server))]
        for section in _sections(server):
            rows = section.rows
            lines += table(rows, label=section.label) if rows else labelled(section.label, section.texts)
    return "\n".join([*lines, "", *labelled("compared", _sources(verification))]) + "\n"


def markdown(verification: Verification) -> str:
    """GitHub-flavoured Markdown, one line break at its end."""
    parts = [f"**{escape(line)}**" for line in headlines(verification)]
    for server in verification.servers:
        parts += [f"## {escape(_title(server))}", *filter(None, map(_markdown_section, _sections(server)))]
    return "\n\n".join([*parts, _markdown_section(_Section("compared", _sources(verification)))]) + "\n"


def _markdown_section(section: _Section) -> str:
    if section.rows:
        return markdown_table((section.label, "before -> after", ""), [tuple(map(escape, row)) for row in section.rows])
    items = (f"- {escape(text)}" for text in section.texts)
    return "\n".join([f"{section.label.capitalize()}:", "", *items]) if section.texts else ""
