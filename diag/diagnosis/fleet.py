"""Servers as a Prometheus knows them, judged like those that are scraped directly: one or thousands, now or then."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from diag.core.contract import Contract
from diag.core.formatting import quantity
from diag.core.incident import Incident, Signal
from diag.diagnosis import telemetry_checks as telemetry
from diag.diagnosis.progress import NotJudged
from diag.diagnosis.proposals import Running
from diag.diagnosis.query_cache import QueryCache, Window
from diag.diagnosis.report import Observed, Report, build_report, not_measured, server
from diag.diagnosis.shared_labels import SharedLabel, holders, ill_groups, shared_labels
from diag.diagnosis.suspects import Suspects, suspects
from diag.sources.prometheus.properties import VERSION, properties
from diag.sources.prometheus.servers import PrometheusSource
from diag.vllm.command.shown import shown

AT_ONCE = 4
"""Queries at a time; a Prometheus allows itself twenty."""
FEW = 20
"""Servers up to which all evidence is read of each."""
VERSIONS = "count by (instance, version) (last_over_time(diag_vllm_info[$window]))"


def judge(remote: PrometheusSource, incidents: Sequence[Incident], contract: Contract, launch: str = "") -> Report:
    """Judge all of the remote's servers; `launch` is the command of the one, where there is one."""
    return judge_queries(remote, incidents, QueryCache(remote, contract), launch)


def judge_queries(
    remote: PrometheusSource,
    incidents: Sequence[Incident],
    queries: QueryCache,
    launch: str = "",
    *,
    only_suspects: bool = False,
) -> Report:
    """Judge by a cache that can be asked for more afterwards.

    With `only_suspects`, and where rules record the signals of a large fleet, the evidence is read of those servers
    alone that the recorded conditions do not clear: the report then lists no absent incident of a cleared server. Of a
    large fleet it has no ceilings either.
    """
    launch = shown(launch)
    with _no_collection(), ThreadPoolExecutor(AT_ONCE) as pool:
        context = pool.submit(_context, remote, incidents, queries)
        judged, suspicious = queries, None
        is_large = only_suspects and len(remote.members) > FEW
        if is_large and remote.recorded:
            suspicious = suspects(remote, incidents, queries, pool)
            judged = QueryCache(remote.narrowed(suspicious.servers), queries.contract)
        for _ in pool.map(lambda query: judged.ask(*query), _queries(incidents, judged)):
            pass
        observed, versions, queries.gone = context.result()
        judged.gone = queries.gone
        alone = launch if len(remote.members) == 1 else ""
        running = {name: Running(versions.get(name, ""), alone) for name in remote.members}
        report = build_report(observed, incidents, queries, running, judged, with_ceilings=not is_large)
        report = report._replace(shared=_shared(report, remote, queries, suspicious))
    notes = (*report.observed.notes, *remote.notes)
    return _as_of_last_scrape(remote, report._replace(observed=report.observed._replace(notes=notes)))


@contextmanager
def _no_collection() -> Iterator[None]:
    """A thousand servers make so many objects that collecting garbage would take half as long as judging them."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _queries(incidents: Sequence[Incident], queries: QueryCache) -> dict[tuple[Signal, tuple[str, ...], Window], None]:
    """The queries of the incidents, run a few at a time: the Prometheus evaluates some while others are read."""
    return dict.fromkeys(
        (condition.signal, incident.per, queries.window(incident))
        for incident in incidents
        for condition in incident.every_condition
    )


def _as_of_last_scrape(remote: PrometheusSource, report: Report) -> Report:
    """The report, whose verdict is not healthy where the last scrape was long ago."""
    late = telemetry.late(remote)
    if not late:
        return report
    why = f"{remote.shown}: nothing was scraped in the last {quantity(late, 'seconds')} of the requested time"
    verdict = "unknown" if report.verdict == "healthy" else report.verdict
    return report._replace(not_judged=(NotJudged(why), *report.not_judged), verdict=verdict)


def _context(
    remote: PrometheusSource, incidents: Sequence[Incident], queries: QueryCache
) -> tuple[Observed, dict[str, str], frozenset[str]]:
    """What is known of the servers and their scrapes, their vLLM versions, and those that are gone."""
    scraped = telemetry.scrapes(queries)
    gone = frozenset(name for name, scrapes in scraped.items() if scrapes.last is not None)
    versions = _versions(queries)
    observed = _observed(remote, scraped, versions, queries)
    notes = telemetry.remarks(remote, scraped, incidents, queries)
    # where all are gone, they are judged as they were last
    return observed._replace(notes=notes), versions, gone if gone < scraped.keys() else frozenset()


def _shared(
    report: Report, remote: PrometheusSource, queries: QueryCache, suspicious: Suspects | None
) -> tuple[SharedLabel, ...]:
    """The labels that ill servers share; Prometheus is asked for them only where several servers are ill."""

    def cleared(incident: str) -> frozenset[str]:
        """The servers that were not judged one by one, since the incident is absent on them."""
        if suspicious is None:
            return frozenset()
        return frozenset(remote.members) - suspicious.servers - suspicious.not_absent[incident]

    groups = ill_groups([finding.diagnosis for finding in report.findings], queries.gone, cleared)
    if not groups:
        return ()
    versions: dict[str, tuple[str, ...]] = {}
    for subject in queries.ask(VERSIONS, ("instance",), queries.whole):  # known already
        labels = dict(subject)
        versions[labels["instance"]] = (*versions.get(labels["instance"], ()), labels.get("version", ""))
    return shared_labels(groups, {**properties(remote, *holders(groups)), VERSION: versions})


def _versions(queries: QueryCache) -> dict[str, str]:
    labels = (dict(subject) for subject in queries.ask(VERSIONS, ("instance",), queries.whole))
    return {server["instance"]: server.get("version", "") for server in labels}


def _observed(
    remote: PrometheusSource, scraped: Mapping[str, telemetry.Scrapes], versions: Mapping[str, str], queries: QueryCache
) -> Observed:
    models = {name: ", ".join(sorted(member.models)) for name, member in remote.members.items()}
    return Observed(
        source="prometheus",
        target=remote.shown,
        start=remote.first / 1000,
        end=float(remote.instants[-1]) / 1000,
        scrapes=sum(scrapes.count for scrapes in scraped.values()),
        failed_scrapes=sum(scrapes.failed for scrapes in scraped.values()),
        servers=tuple(server(name, versions.get(name), models[name]) for name in remote.members),
        not_measured=not_measured(queries),
    )
