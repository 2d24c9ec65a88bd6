"""Servers as a Prometheus knows them, judged like those that are looked at directly: one or thousands, now or then."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from diag.core.contract import Contract
from diag.core.incident import Incident
from diag.diagnosis import telemetry_checks as telemetry
from diag.diagnosis.proposals import Running
from diag.diagnosis.query_cache import QueryCache, Window
from diag.diagnosis.report import Observed, Report, build_report, not_measured, server
from diag.sources.prometheus.servers import PrometheusSource

AT_ONCE = 4
"""Queries at a time; a Prometheus allows itself twenty."""
VERSIONS = "count by (instance, version) (last_over_time(diag_vllm_info[$window]))"


def judge(remote: PrometheusSource, incidents: Sequence[Incident], contract: Contract, launch: str = "") -> Report:
    """Judge all of the remote's servers; `launch` is the command of the one, where there is one."""
    queries = QueryCache(remote, contract)
    with _no_collection(), ThreadPoolExecutor(AT_ONCE) as pool:
        beside = pool.submit(_beside, remote, incidents, queries)
        for _ in pool.map(lambda each: queries.ask(*each), _questions(incidents, queries)):
            pass
        observed, versions, queries.gone = beside.result()
        alone = launch if len(remote.members) == 1 else ""
        running = {name: Running(versions.get(name, ""), alone) for name in remote.members}
        report = build_report(observed, incidents, queries, running)
    notes = (*report.observed.notes, *remote.notes)
    return _told_as_of_then(remote, replace(report, observed=replace(report.observed, notes=notes)))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Of a thousand servers there are so many objects that to look for garbage takes half as long as to judge them."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _questions(incidents: Sequence[Incident], queries: QueryCache) -> dict[tuple[str, tuple[str, ...], Window], None]:
    """What the incidents are made of; asked a few at a time, for the server works while answers are read."""
    return dict.fromkeys(
        (each.signal.promql, incident.per, queries.window(incident))
        for incident in incidents
        for each in incident.every_condition
    )


def _told_as_of_then(remote: PrometheusSource, report: Report) -> Report:
    """The report, which says nothing good of now where the last scrape was long ago."""
    late = telemetry.late(remote)
    if not late:
        return report
    why = f"{remote.shown}: nothing was scraped in the last {late:.0f} s of what was asked for"
    verdict = "unknown" if report.verdict == "healthy" else report.verdict
    return replace(report, blind=(why, *report.blind), verdict=verdict)


def _beside(
    remote: PrometheusSource, incidents: Sequence[Incident], queries: QueryCache
) -> tuple[Observed, dict[str, str], frozenset[str]]:
    """What is known of the servers and of how they were scraped, vLLM's versions, and who is gone."""
    scraped = telemetry.scrapes(queries)
    gone = frozenset(name for name, each in scraped.items() if each.last is not None)
    versions = _versions(queries)
    observed = _observed(remote, scraped, versions, queries)
    notes = telemetry.remarks(remote, scraped, incidents, queries)
    # where all are gone, that is what has to be said
    return replace(observed, notes=notes), versions, gone if gone < scraped.keys() else frozenset()


def _versions(queries: QueryCache) -> dict[str, str]:
    found = (dict(subject) for subject in queries.ask(VERSIONS, ("instance",), queries.whole))
    return {each["instance"]: each.get("version", "") for each in found}


def _observed(
    remote: PrometheusSource, scraped: Mapping[str, telemetry.Scrapes], versions: Mapping[str, str], queries: QueryCache
) -> Observed:
    models = {name: ", ".join(sorted(member.models)) for name, member in remote.members.items()}
    return Observed(
        source="prometheus",
        target=remote.shown,
        start=float(remote.instants[0]) / 1000,
        end=float(remote.instants[-1]) / 1000,
        scrapes=sum(each.count for each in scraped.values()),
        failed_scrapes=sum(each.failed for each in scraped.values()),
        servers=tuple(server(name, versions.get(name), models[name]) for name in remote.members),
        not_measured=not_measured(queries),
    )
