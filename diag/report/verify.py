"""The report on a change for a person: at a terminal, at most 100 columns, or in a ticket."""

import math
import textwrap
from collections.abc import Iterator, Sequence

from diag.core.formatting import listed, moment, number
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Report
from diag.report import sentences as words
from diag.verify.changes import SettingChange, Tried
from diag.verify.compare import IncidentOutcome, ServerComparison, Verification
from diag.verify.signal_deltas import CLEAR, SignalDelta
from diag.verify.user_metrics import Bounds, UserMetric

WIDTH, LABEL, NAME = 100, 14, 32
PRICES = 3
SPECIAL = str.maketrans({each: f"\\{each}" for each in "\\`*_[]<>|#"})
Row = tuple[str, str, str]
"""A name, before -> after, and what that means."""


# -- what is said, whatever the form ----------------------------------------------------------------------------------


def headlines(found: Verification) -> list[str]:
    """Line 1 of each server: the verdict on its primary incident, and the price."""
    told = [each for each in found.servers if not each.is_bystander] or found.servers
    heads = [_headline(each) for each in told]
    return [*heads, *(f"NOT COMPARABLE {words.printable(each)}" for each in found.alone)]


def _headline(server: ServerComparison) -> str:
    first = server.first
    if first is None:
        return _nothing(server)
    what = f"{first.before.incident.id} on {words.place(first.before.subject)}"
    price = "; ".join(_price(server)) if first.verdict != "not comparable" else ""
    if price and first.verdict == "cured":
        return f"CURED, AT A PRICE {what}: {price}"
    because = words.printable(first.because) + (f"; at a price: {price}" if price else "")
    return f"{first.verdict.upper()} {what}: {because}"


def _nothing(server: ServerComparison) -> str:
    """Where nothing was found before."""
    name, came = words.printable(server.before), ", ".join(map(_named, server.came))
    if server.blind:
        return (
            f"NOT COMPARABLE {name}: what was wrong before cannot be told: {words.printable('; '.join(server.blind))}"
        )
    if server.verdict == "worse":
        return f"WORSE {name}: nothing was wrong before, and now there is {came}"
    rest = f"; now there is {came}, at another load or state" if came else ""
    return f"NOT COMPARABLE {name}: nothing was wrong before, so there was nothing to cure{rest}"


def _price(server: ServerComparison) -> list[str]:
    """What got worse, the most telling first, and what came."""
    felt = [f"{each.name} {_both(each)}" for each in server.price][:PRICES]
    return [*felt, *(f"{_named(each)} came" for each in server.came)] if not server.reasons else []


def _named(one: Diagnosis) -> str:
    return f"{one.incident.id} ({one.severity})"


def _both(felt: UserMetric) -> str:
    return f"{_span(felt.before)} -> {_span(felt.after)}{' s' if felt.unit == 'seconds' else ''}"


def _span(span: Bounds | None) -> str:
    """A number; of a histogram the upper edge of its bucket, or the last edge that it is beyond."""
    if span is None:
        return "-"
    if span.least == span.most:
        return number(span.most)
    return f"> {number(span.least)}" if math.isinf(span.most) else f"<= {number(span.most)}"


def _felt(server: ServerComparison) -> list[Row]:
    marks = {"worse": "WORSE", "better": "better", "same": "", "unknown": ""}
    rows = [each for each in server.user_metrics if each.before or each.after]
    return [(each.name, _both(each), "" if server.reasons else marks[each.change]) for each in rows]


def _signals(server: ServerComparison) -> list[Row]:
    return _moved(server.first) if server.first else []


def _moved(outcome: IncidentOutcome) -> list[Row]:
    """What was promised, and which signals of the incident moved; the first of them where none did."""
    promised = {each for one in outcome.tried for each in one.fix.expects}
    rows = [each for each in outcome.signal_deltas if each.condition in promised or each.met or abs(each.way) >= CLEAR]
    return [_condition(each) for each in rows or outcome.signal_deltas[:1]]


def _condition(each: SignalDelta) -> Row:
    values = " -> ".join("-" if value is None else number(value) for value in (each.before, each.after))
    held = {True: "as it should be", False: "not yet", None: "not measured after"}[each.met]
    return each.condition.signal.name, values, f"{each.condition.op} {number(each.limit)}: {held}"


def _changed(server: ServerComparison) -> list[str]:
    known = [_change(each) for each in server.changes if each.known]
    return known or ["nothing that diag can see: flags, launch command, version and GPUs are the same as far as known"]


def _change(each: SettingChange) -> str:
    sides = (words.printable("not set" if value is None else value or "set") for value in (each.before, each.after))
    return f"{words.printable(each.name)} {' -> '.join(sides)}{' (follows)' if each.follows else ''}"


def _unknown(server: ServerComparison) -> list[str]:
    names = [words.printable(each.name) for each in server.changes if not each.known]
    told = f"whether these changed, which one side does not publish: {listed(names, 8)}"
    return [f"{told}; --launch names the command"] if names else []


def _fixes(outcome: IncidentOutcome) -> list[str]:
    """Which of the incident's fixes it was."""
    told = [_fix(each, outcome) for each in outcome.tried]
    return told or [f"none of the fixes that diag knows for {outcome.before.incident.id}"]


def _fix(each: Tried, outcome: IncidentOutcome) -> str:
    proposed = f"; {each.proposed} was proposed" if each.proposed else ""
    return f"{each.fix.name}, a fix of {outcome.before.incident.id}: {each.fix.effect}{proposed}"


def _loads(server: ServerComparison) -> str:
    one, two = server.load
    if not one.served or not two.served:
        return "not measured on both sides"
    told = (
        ("requests in flight", one.in_flight, two.in_flight),
        ("arrivals / s", one.arrivals, two.arrivals),
        ("finished", one.finished, two.finished),
        ("tokens / prompt", one.prompts.mean, two.prompts.mean),
        ("prompt tokens / s", one.prompts.a_second, two.prompts.a_second),
        ("tokens / answer", one.answers.mean, two.answers.mean),
    )
    return "; ".join(f"{name} {_number(before)} -> {_number(after)}" for name, before, after in told)


def _number(value: float | None) -> str:
    return "-" if value is None else number(value)


def _others(server: ServerComparison) -> list[str]:
    """The verdicts beyond that of line 1."""
    rest = (
        f"{each.before.incident.id} on {words.place(each.before.subject)}: {each.verdict}: {each.because}"
        for each in server.outcomes
        if each is not server.first
    )
    return [words.printable(each) for each in rest]


def _came(server: ServerComparison) -> list[str]:
    return [f"{_named(each)} on {words.place(each.subject)}: {each.incident.impact}" for each in server.came]


def _title(server: ServerComparison) -> str:
    names = dict.fromkeys(words.printable(each) for each in (server.before, server.after))
    return " -> ".join(names)


def _facts(server: ServerComparison) -> Iterator[tuple[str, list[str]]]:
    """Label and lines, for every form that a person reads."""
    first = server.first
    if first:
        yield "verdict", [f"{first.verdict}: {words.printable(first.because)}"]
    yield "also", _others(server)
    yield "changed", _changed(server)
    yield "that is", _fixes(first) if first and any(each.known for each in server.changes) else []
    yield "came", _came(server)
    yield "load", [_loads(server)]
    yield "cannot tell", _unknown(server)
    yield "note", [words.printable(each) for each in server.notes]


# -- for a terminal ---------------------------------------------------------------------------------------------------


def terminal(found: Verification) -> str:
    """Plain text, one line break at its end."""
    lines = [line for head in headlines(found) for line in _wrapped(head, "", "  ")]
    for server in found.servers:
        lines += ["", *_wrapped(_title(server), "", "  ")]
        for label, texts in _facts(server):
            lines += _labelled(label, texts)
            if label == "that is":
                lines += _table("signals", _signals(server))
                lines += _table("users feel", _felt(server))
    looks = [f"{when} {words.looked_at(each, moment)}" for when, each in _sides(found)]
    return "\n".join([*lines, "", *_labelled("looked at", looks)]) + "\n"


def _sides(found: Verification) -> tuple[tuple[str, Report], tuple[str, Report]]:
    return ("before:", found.before), ("after:", found.after)


def _labelled(label: str, texts: Sequence[str]) -> list[str]:
    begins = [f"  {label if at == 0 else '':<{LABEL}}" for at in range(len(texts))]
    return [line for text, first in zip(texts, begins, strict=True) for line in _wrapped(text, first, " " * len(first))]


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def _table(label: str, rows: Sequence[Row]) -> list[str]:
    return [
        f"  {label if at == 0 else '':<{LABEL}}{words.printable(name):<{NAME}} {values:<24} {rest}".rstrip()
        for at, (name, values, rest) in enumerate(rows)
    ]


# -- for a ticket -----------------------------------------------------------------------------------------------------


def markdown(found: Verification) -> str:
    """GitHub-flavoured Markdown, one line break at its end."""
    parts = [f"**{_escape(each)}**" for each in headlines(found)]
    for server in found.servers:
        parts += [f"## {_escape(_title(server))}"]
        parts += [_listed(label, texts) for label, texts in _facts(server) if texts]
        parts += [_rows("signal", rows)] if (rows := _signals(server)) else []
        parts += [_rows("users feel", _felt(server))]
    looks = [f"{when} {words.looked_at(each, moment)}" for when, each in _sides(found)]
    return "\n\n".join([*parts, _listed("looked at", looks)]) + "\n"


def _escape(text: str) -> str:
    return words.printable(text).translate(SPECIAL)


def _listed(label: str, texts: Sequence[str]) -> str:
    return "\n".join([f"{label.capitalize()}:", "", *(f"- {_escape(each)}" for each in texts)])


def _rows(title: str, rows: Sequence[Row]) -> str:
    lines = (f"| {' | '.join(map(_escape, row))} |" for row in rows)
    return "\n".join([f"| {title} | before -> after | |", "|---|---|---|", *lines])
