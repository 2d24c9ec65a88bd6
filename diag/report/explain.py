"""`diag explain` and `diag incidents`: what a declaration says, for a reader."""

import textwrap
from collections.abc import Iterable, Sequence

from diag.contract import Contract
from diag.diagnose import show
from diag.incident import Condition, Fix, Incident, LooksLike, Signal
from diag.report.words import why

WIDTH = 100


def explain(incident: Incident, contract: Contract) -> str:
    """One incident as a page: meaning, evidence, look-alikes, fixes, what not to do, the query."""
    parts = [
        f"{incident.id}: {incident.title}",
        f"{incident.severity}, judged for each {' and '.join(incident.per)}, over {incident.live_window} of a watch or "
        f"{incident.window} of Prometheus data",
        *_section("What happens", [" ".join(incident.cause.split())]),
        *_section("What users notice", [incident.harm]),
        *_section("It is this when all of these hold", _conditions(incident.conditions, contract)),
        *_section("These support it", _conditions(incident.supports, contract)),
        *_section("What looks like it", [_look(each) for each in incident.looks_like]),
        *_section("It explains", list(incident.explains)),
        *_section("What to do, in this order", [_fix(each) for each in incident.fixes]),
        *_section("What not to do", list(incident.do_not)),
        "",
        "The whole of it as PromQL",
        f"  {fill_query(incident, contract)}",
    ]
    return "\n".join(parts) + "\n"


def fill_query(incident: Incident, contract: Contract) -> str:
    """The incident's conjunction as an alert would ask it."""
    return incident.query(incident.window, contract.values())


def catalogue(incidents: Sequence[Incident]) -> str:
    """One line per incident."""
    width = max(len(each.id) for each in incidents)
    return "".join(f"{each.id:<{width}}  {each.severity:<8}  {each.title}\n" for each in incidents)


def _section(title: str, texts: Sequence[str]) -> list[str]:
    return ["", title, *(line for text in texts for line in _item(text))] if texts else []


def _item(text: str) -> Iterable[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)


def _conditions(conditions: Sequence[Condition], contract: Contract) -> list[str]:
    return [f"{each.signal.name} {each.op} {show(contract.limit(each.limit))}: {why(each.why)}" for each in conditions]


def _look(look: LooksLike) -> str:
    return f"{look.name}: {look.tell}"


def _fix(fix: Fix) -> str:
    value = fix.value.name if isinstance(fix.value, Signal) else "(remove it)" if fix.value is None else str(fix.value)
    head = f"{fix.name} {value}: " if fix.flag else f"{fix.name}: " if fix.name else ""
    risk = f" Price: {fix.risk}." if fix.risk else ""
    rollback = f" Rollback: {fix.rollback}." if fix.rollback else ""
    return f"{head}{fix.change} Effect: {fix.effect}.{risk}{rollback} Why: {why(fix.why)}."
