"""The servers of a fleet that are worth a look: ill, or impossible to judge, by the conditions as filters.

Rules record the signal of every condition, so that a filter over thousands of servers is cheap and returns only a few.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

from diag.core.errors import NotAnswered
from diag.core.incident import OPPOSITE, Incident
from diag.diagnosis.query_cache import QueryCache
from diag.knowledge.formulas import comparison, conjunction, formula
from diag.knowledge.rule_set import SUBJECTS, generation_series
from diag.promql import Formula
from diag.sources.prometheus.servers import PrometheusSource

REPRESENTATIVES = 2
"""Servers of those on which an incident cannot be judged, and of those on which it is absent, that stand for them."""


class Suspects(NamedTuple):
    """The servers to judge, and by incident all servers on which it is not absent: present or unknown."""

    servers: frozenset[str]
    not_absent: Mapping[str, frozenset[str]]


def suspects(remote: PrometheusSource, incidents: Sequence[Incident], queries: QueryCache, pool: Executor) -> Suspects:
    """Return every server with an incident, and for each incident a few on which it is unknown or absent."""
    asked = [(incident.id, *part) for incident in incidents for part in _filters(incident, queries)]
    answers = list(pool.map(partial(_matching, remote), [(promql, clears) for _, promql, clears in asked]))
    names = frozenset(remote.members)
    found: set[str] = set()
    not_absent: dict[str, frozenset[str]] = {}
    for (incident_id, _, clears), matching in zip(asked, answers, strict=True):
        if not clears:
            found |= matching
            continue
        not_absent[incident_id] = matching
        for some in (matching - found, names - matching):
            found.update(sorted(some)[:REPRESENTATIVES])
    return Suspects(frozenset(found), not_absent)


def _filters(incident: Incident, queries: QueryCache) -> Iterator[tuple[Formula, bool]]:
    """Yield the conjunctions that find an incident, and the filter that drops the subjects on which it is absent."""
    window = queries.window(incident).text
    yield conjunction(incident, window, queries.contract), False
    for burn in incident.burns:
        burning = incident.over(burn)
        long, short = (conjunction(burning, span, queries.contract) for span in (burn.long, burn.short))
        yield Formula("", f"{long.text} and {short.text}", {**long.parts, **short.parts}), False
    yield _not_absent(incident, window, queries), True


def _not_absent(incident: Incident, window: str, queries: QueryCache) -> Formula:
    """Return a formula over all subjects without those for which a condition is false."""
    parts: dict[str, Formula] = {}
    text = _subjects(incident.per)
    for condition in incident.conditions:
        part = formula(condition.signal, incident.per, window, queries.contract)
        parts[part.name] = part
        false = comparison(part.name, condition._replace(op=OPPOSITE[condition.op]), queries.contract)
        text = f"{text} unless {false}"
    return Formula("", text, parts)


def _subjects(per: tuple[str, ...]) -> str:
    """Return the recorded subjects of a kind, and every server that has none of them."""
    servers, own = (generation_series(labels, ("instance",)) for labels in (("instance",), per))
    return f"({own} or ({servers} unless on (instance) {own}))" if per in SUBJECTS and own != servers else servers


def _matching(remote: PrometheusSource, asked: tuple[Formula, bool]) -> frozenset[str]:
    """Return the servers that a filter keeps; all of them where the query is refused."""
    promql, clears = asked
    instants = remote.instants[-1:] if clears else remote.instants
    try:
        return remote.matching(promql, instants)
    except NotAnswered:
        return frozenset(remote.members)
