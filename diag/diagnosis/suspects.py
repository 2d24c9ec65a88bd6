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
    """Return every server with an incident, and for each incident a few on which it is unknown or absent.

    The servers on which an incident is unknown are asked for only where they are neither none nor all, or where the
    incident is present on others.
    """
    names = frozenset(remote.members)
    finding = [(incident, part) for incident in incidents for part in _finding(incident, queries)]
    present: dict[str, frozenset[str]] = {}
    for (incident, _), found in zip(finding, pool.map(partial(_matching, remote), finding), strict=True):
        present[incident.id] = present.get(incident.id, frozenset()) | found
    clearing = [(incident, _not_absent(incident, queries)) for incident in incidents]
    counts = dict(zip(present, pool.map(partial(_count, remote), clearing), strict=True))
    asked = [part for part in clearing if present[part[0].id] or 0 < counts[part[0].id] < _every(part[0], queries)]
    listed = dict(zip((part[0].id for part in asked), pool.map(partial(_matching, remote), asked), strict=True))
    not_absent = {name: listed.get(name, names if counts[name] else frozenset()) for name in present}
    worth: set[str] = set().union(*present.values())
    for matching in not_absent.values():
        for some in (matching - worth, names - matching):
            worth.update(sorted(some)[:REPRESENTATIVES])
    return Suspects(frozenset(worth), not_absent)


def _every(incident: Incident, queries: QueryCache) -> int:
    """Return how many subjects the incident is judged for."""
    return len(queries.subjects(incident.per))


def _finding(incident: Incident, queries: QueryCache) -> Iterator[Formula]:
    """Yield the conjunctions that find an incident: its own, and those of its burn rates."""
    yield conjunction(incident, queries.window(incident).text, queries.contract)
    for burn in incident.burns:
        burning = incident.over(burn)
        long, short = (conjunction(burning, span, queries.contract) for span in (burn.long, burn.short))
        yield Formula("", f"{long.text} and {short.text}", {**long.parts, **short.parts})


def _not_absent(incident: Incident, queries: QueryCache) -> Formula:
    """Return a formula over all subjects without those for which a condition is false at the last instant."""
    parts: dict[str, Formula] = {}
    window = queries.window(incident).text
    text = _subjects(incident.per)
    for condition in incident.conditions:
        part = formula(condition.signal, incident.per, window, queries.contract)
        parts[part.name] = part
        false = comparison(part.name, condition._replace(op=OPPOSITE[condition.op]), queries.contract)
        text = f"{text} unless on ({', '.join(incident.per)}) {false}"
    return Formula("", text, parts)


def _subjects(per: tuple[str, ...]) -> str:
    """Return the recorded subjects of a kind; of a kind that is not recorded, the servers."""
    return generation_series(per if per in SUBJECTS else ("instance",), ("instance",))


def _matching(remote: PrometheusSource, asked: tuple[Incident, Formula]) -> frozenset[str]:
    """Return the servers for which a formula has a sample; all of them where the query is refused."""
    try:
        return remote.matching(asked[1])
    except NotAnswered:
        return frozenset(remote.members)


def _count(remote: PrometheusSource, asked: tuple[Incident, Formula]) -> int:
    """Return how many subjects of the servers have a sample at the last instant; 1 where the query is refused."""
    try:
        return remote.count(asked[1])
    except NotAnswered:
        return 1
