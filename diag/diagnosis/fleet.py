"""Judge the servers that a Prometheus scrapes, one or thousands, at present or in the past.

In a large fleet only the suspects are read in full: the conditions, as filters, find the servers that have an incident
or cannot be judged. Rules record the signal of every condition, so that a filter over thousands of servers is cheap and
returns only a few.
"""

import gc
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import NamedTuple

from diag.core.errors import NotAnswered, Unreachable
from diag.core.formatting import quantity
from diag.core.incident import OPPOSITE, Incident
from diag.core.subjects import instance_name, label_value
from diag.diagnosis import telemetry_checks as telemetry
from diag.diagnosis.build_report import build_report
from diag.diagnosis.progress import NotJudged
from diag.diagnosis.proposals import Running
from diag.diagnosis.query_cache import VERSIONS, QueryCache
from diag.diagnosis.report import Observed, ObservedServer, Report
from diag.diagnosis.shared_labels import SharedLabel, holders, ill_groups, shared_labels
from diag.knowledge.formulas import SUBJECTS, comparison, conjunction, formula, generation_series
from diag.promql import Formula
from diag.sources.prometheus.properties import VERSION, properties
from diag.sources.prometheus.servers import PrometheusSource
from diag.vllm.command.shown import shown

AT_ONCE = 4
"""Queries at a time; a Prometheus runs at most twenty."""
FEW = 20
"""Servers up to which all evidence is read of each."""
MOST_SUBJECTS, MOST_PARTS = 5_000, 256
"""Servers, engines or GPUs that are judged, and of one server: each with every incident takes 27 ms and 0.4 MiB."""
REPRESENTATIVES = 2
"""Servers on which an incident cannot be judged that are read in full, and as many on which it is absent."""


def judge(
    remote: PrometheusSource,
    incidents: Sequence[Incident],
    queries: QueryCache,
    launch: str = "",
    *,
    only_suspects: bool = False,
) -> Report:
    """Judge all servers of the Prometheus; `launch` is the command of the server if there is only one.

    `queries` is a cache that can be queried further afterwards. With `only_suspects`, if rules record the signals of a
    large fleet, the evidence is read only of those servers that the recorded conditions do not clear: the report then
    lists no absent incident of a cleared server. The report of a large fleet has no ceilings either. If the last scrape
    was long ago, no server is healthy.
    """
    launch = shown(launch)
    with ExitStack() as stack:
        gc.disable()  # with the objects of a thousand servers, collecting takes half as long as judging them
        stack.callback(gc.enable)
        pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
        context = pool.submit(_context, remote, incidents, queries)
        judged, suspicious = queries, None
        is_large = only_suspects and len(remote.members) > FEW
        if is_large and remote.recorded:
            suspicious = suspects(remote, incidents, queries, pool)
            judged = QueryCache(remote.narrowed(suspicious.servers), queries.contract)
        wanted = dict.fromkeys(  # the Prometheus evaluates some queries while the results of others are read
            (condition.signal, incident.per, judged.window(incident))
            for incident in incidents
            for condition in incident.every_condition
        )
        for _ in pool.map(lambda query: judged.ask(*query), wanted):
            pass
        for per in {incident.per for incident in incidents}:  # whoever answers may invent any number
            parts = Counter(map(instance_name, judged.subjects(per)))
            if parts.total() > MOST_SUBJECTS or max(parts.values(), default=0) > MOST_PARTS:
                most = f"at most {MOST_SUBJECTS:,}, {MOST_PARTS} of one server, are judged: select fewer servers"
                what = f"{parts.total():,} servers, engines or GPUs; {most}, or have Prometheus load the rules of diag"
                raise Unreachable(f"{remote.shown} has {what}, which clear most of them")
        observed, queries.gone = context.result()
        judged.gone = queries.gone
        alone = launch if len(remote.members) == 1 else ""
        running = {server.name: Running(server.version, alone) for server in observed.servers}
        report = build_report(observed, incidents, queries, running, judged, with_ceilings=not is_large)
        report = report._replace(shared=_shared(report, remote, queries, suspicious))
    report = report._replace(observed=report.observed._replace(notes=remote.notes))
    if late := telemetry.late(remote):
        why = f"{remote.shown}: nothing was scraped in the last {quantity(late, 'seconds')} of the requested time"
        verdict = "unknown" if report.verdict in ("healthy", "no_incident") else report.verdict
        return report._replace(not_judged=(NotJudged(why), *report.not_judged), verdict=verdict)
    return report


def _context(
    remote: PrometheusSource, incidents: Sequence[Incident], queries: QueryCache
) -> tuple[Observed, frozenset[str]]:
    """Return the servers and their scrapes, and the servers that are gone."""
    scraped = telemetry.scrapes(queries)
    running = queries.ask(VERSIONS, ("instance",), queries.whole)
    versions = {instance_name(subject): label_value(subject, "version") for subject in running}
    observed = Observed(
        source="prometheus",
        target=remote.shown,
        start=remote.first / 1000,
        end=float(remote.instants[-1]) / 1000,
        scrapes=sum(scrapes.count for scrapes in scraped.values()),
        failed_scrapes=sum(scrapes.failed for scrapes in scraped.values()),
        servers=tuple(
            ObservedServer(name, versions.get(name, ""), ", ".join(sorted(member.models)))
            for name, member in remote.members.items()
        ),
        defects=telemetry.defects(remote, scraped, incidents, queries),
        not_measured=telemetry.not_measured(queries),
    )
    return observed, telemetry.vanished(scraped)


# -- the servers that are worth a look --------------------------------------------------------------------------------


class Suspects(NamedTuple):
    """The servers to judge, and by incident all servers on which it is not absent: present or unknown."""

    servers: frozenset[str]
    not_absent: Mapping[str, frozenset[str]]


def suspects(remote: PrometheusSource, incidents: Sequence[Incident], queries: QueryCache, pool: Executor) -> Suspects:
    """Return every server with an incident, and for each incident a few on which it is unknown or absent.

    The servers on which an incident is unknown are listed only if the incident is present on other servers, or unknown
    on some but not all.
    """
    names = frozenset(remote.members)

    def matching(query: Formula) -> frozenset[str]:
        """Return the servers for which a formula has a sample; all of them if the query is refused."""
        with suppress(NotAnswered):
            return remote.matching(query)
        return names

    def count(query: Formula) -> int:
        """Return how many subjects have a sample at the last instant; 1 if the query is refused."""
        with suppress(NotAnswered):
            return remote.count(query)
        return 1

    finding: list[tuple[str, Formula]] = []  # incidents are found by their own conditions or at a burn rate
    for incident in incidents:
        for one in (incident, *incident.rising):
            finding.append((incident.id, conjunction(one, queries.window(incident).text, queries.contract)))
        for burn in incident.burns:
            burning = incident.over(burn)
            long, short = (conjunction(burning, span, queries.contract) for span in (burn.long, burn.short))
            both = Formula("", f"{long.text} and {short.text}", {**long.parts, **short.parts})
            finding.append((incident.id, both))
    present: dict[str, frozenset[str]] = defaultdict(frozenset)
    for (name, _), servers in zip(finding, pool.map(matching, (query for _, query in finding)), strict=True):
        present[name] |= servers
    clearing = []  # all recorded subjects, or servers, but those with a condition that is false at the last instant
    for incident in incidents:
        parts: dict[str, Formula] = {}
        text = generation_series(incident.per if incident.per in SUBJECTS else ("instance",), ("instance",))
        for condition in incident.conditions:
            part = formula(condition.signal, incident.per, queries.window(incident).text, queries.contract)
            parts[part.name] = part
            false = comparison(part.name, condition._replace(op=OPPOSITE[condition.op]), queries.contract)
            text = f"{text} unless on ({', '.join(incident.per)}) {false}"
        clearing.append(Formula("", text, parts))
    counts = dict(zip(present, pool.map(count, clearing), strict=True))
    doubtful = {
        incident.id: query
        for incident, query in zip(incidents, clearing, strict=True)
        if present[incident.id] or 0 < counts[incident.id] < len(queries.subjects(incident.per))
    }
    listed = dict(zip(doubtful, pool.map(matching, doubtful.values()), strict=True))
    not_absent = {name: listed.get(name, names if counts[name] else frozenset()) for name in present}
    worth: set[str] = set().union(*present.values())
    for servers in not_absent.values():
        for some in (servers - worth, names - servers):
            worth.update(sorted(some)[:REPRESENTATIVES])
    return Suspects(frozenset(worth), not_absent)


# -- the labels that ill servers share --------------------------------------------------------------------------------


def _shared(
    report: Report, remote: PrometheusSource, queries: QueryCache, suspicious: Suspects | None
) -> tuple[SharedLabel, ...]:
    """Return the labels that ill servers share; Prometheus is asked for them only if several servers are ill."""

    def cleared(incident: str) -> frozenset[str]:
        """Return the servers that were not judged one by one, because the incident is absent on them."""
        if suspicious is None:
            return frozenset()
        return frozenset(remote.members) - suspicious.servers - suspicious.not_absent[incident]

    groups = ill_groups([finding.diagnosis for finding in report.findings], queries.gone, cleared)
    if not groups:
        return ()
    versions: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for subject in queries.ask(VERSIONS, ("instance",), queries.whole):  # in the cache
        versions[instance_name(subject)] += (label_value(subject, "version"),)
    return shared_labels(groups, {**properties(remote, *holders(groups)), VERSION: versions})
