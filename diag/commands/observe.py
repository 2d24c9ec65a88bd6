"""What a command observes: one recording, live servers, or the servers in a Prometheus."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from diag.commands.site import site
from diag.core.contract import Contract
from diag.core.errors import BadUsage, NoHostName, UnknownHost
from diag.core.files import exists
from diag.core.formatting import printable
from diag.core.incident import Incident
from diag.core.metric_prefix import OWN
from diag.diagnosis.progress import judge, owed_and_still
from diag.diagnosis.proposals import Running
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Observed, build_report, not_measured, server
from diag.sources.observation import Observation, SampleSource
from diag.sources.prometheus.scope import Scope
from diag.verify.snapshot import Snapshot

if TYPE_CHECKING:
    from diag.http.vllm_server import VllmServer
    from diag.report.terminal import Tick
    from diag.sources.kubernetes.servers import ServersOfNamespace
    from diag.sources.live.joined_pages import JoinedPages
    from diag.sources.live.scrape import ScrapePlan
    from diag.sources.prometheus.servers import PrometheusSource

LONGEST_SCRAPING = 125.0
"""Seconds to scrape for at most while requests are in flight and nothing moves: a huge prefill may take two minutes."""
PROBE_TIMEOUT = 30.0
"""Seconds that a request for one token may take."""
SCRAPE_TIMEOUT, QUERY_TIMEOUT = 5.0, 30.0
"""Seconds that a scrape, and a query of a Prometheus, may take unless --timeout says otherwise."""


@dataclass(frozen=True)
class ObserveOptions:
    """What the command line asked for; times in seconds. Without a `timeout`, the source's own is used.

    `prometheus` is the URL of a Prometheus to ask about the servers in `scope` instead of asking `targets`; `k8s` names
    the namespace whose pods to ask instead.
    """

    targets: Sequence[str]
    every: float = 2.0
    watch: float = 30.0
    timeout: float | None = None
    launch: str = ""
    incidents: Path | None = None
    contract: Path | None = None
    probe: bool = False
    log: str = ""
    log_timezone: str = ""
    prometheus: str = ""
    scope: Scope = field(default_factory=Scope)
    k8s: str = ""


def take_snapshot(options: ObserveOptions) -> Snapshot:
    """Diagnose one recording or live servers; keeps what can still be queried, to compare with."""
    contract, incidents = site(options.incidents, options.contract)
    return judge_observation(observe(options, contract), contract, incidents)


def judge_observation(observation: Observation, contract: Contract, incidents: Sequence[Incident]) -> Snapshot:
    """Diagnose what was observed already."""
    cache = _query_cache(observation, contract)
    if contract.site.prefix != OWN:  # of a page it is not known what Prometheus makes of it
        incidents = tuple(incident for incident in incidents if incident.id != "scrape_renames_metrics")
    running = {instance: running_of(observation, instance) for instance in observation.instances}
    return Snapshot(build_report(_observed(observation, cache), incidents, cache, running), cache, running)


def observe(options: ObserveOptions, contract: Contract) -> Observation:
    """The samples of one recording, or of live servers that are scraped for it."""
    if options.k8s:
        return _scrape(options, contract)
    paths = [Path(target) for target in options.targets if is_path(target)]
    if not paths:
        with _nor_a_path(options.targets):
            return _scrape(options, contract)
    if len(options.targets) > 1:
        raise BadUsage("a recording is diagnosed alone: name one recording, or only URLs")
    if not exists(paths[0]):
        raise BadUsage(f"{printable(options.targets[0])} does not exist: name the folder of a recording, or a URL")
    from diag.sources.recording.reader import read

    return read(paths[0], launch=options.launch)


def is_path(target: str) -> bool:
    """Whether a target is a path: one that exists, whose folder exists, or that cannot be a URL."""
    folder, slash, _ = target.rpartition("/")
    return (
        exists(target) or target.startswith((".", "/", "~")) or bool(slash and "://" not in target and exists(folder))
    )


@contextmanager
def _nor_a_path(targets: Sequence[str]) -> Iterator[None]:
    """Where no such host is known, a target that looks like a path may be a recording whose name was mistyped."""
    try:
        yield
    except (NoHostName, UnknownHost) as error:
        meant = next((target for target in targets if target and "://" not in target), "")
        if not meant:
            raise
        from diag.http.address import without_user

        raise type(error)(f"there is no file or recording {without_user(meant)}; {error}") from error


def observe_once(options: ObserveOptions) -> Observation:
    """A recording as a whole, or live servers at one moment."""
    if any(map(is_path, options.targets)):
        return observe(options, Contract())
    from diag.sources.live.scrape import watch

    with _nor_a_path(options.targets):
        return watch(options.targets, scrape_plan(replace(options, watch=0.0), lambda share: None))


def prometheus_source(
    options: ObserveOptions, contract: Contract, incidents: Sequence[Incident] = ()
) -> "PrometheusSource":
    """Return the servers in scope as a Prometheus knows them, by what rules for `incidents` record there."""
    from diag.http.address import parse
    from diag.http.credentials import from_environment
    from diag.sources.prometheus.client import Prometheus
    from diag.sources.prometheus.servers import PrometheusSource

    address = parse(options.prometheus)
    if address.query:
        raise BadUsage(f"{address.shown}?...: leave out the question mark and what follows from a Prometheus URL")
    prometheus = Prometheus(address, from_environment(os.environ), options.timeout or QUERY_TIMEOUT)
    return PrometheusSource(prometheus, options.scope, contract, incidents)


def _scrape(options: ObserveOptions, contract: Contract) -> Observation:
    """Scrape live servers, and go on while requests are in flight, nothing moves and it may be one huge prefill."""
    from diag.report.terminal import bar
    from diag.sources.live.scrape import watch

    def may_be_stuck(observation: Observation) -> bool:
        cache = _query_cache(observation, contract)
        return cache.span < LONGEST_SCRAPING and owed_and_still(judge(cache)[0])

    pods = _pods(options)
    with bar(f"watching {pods.shown if pods else without_credentials(options.targets)}") as tick:
        plan = scrape_plan(options, tick, may_be_stuck)
        return pods.watch(plan) if pods else watch(options.targets, plan)


def _pods(options: ObserveOptions) -> "ServersOfNamespace | None":
    """The servers of a namespace, where one is meant."""
    if not options.k8s:
        return None
    from diag.sources.kubernetes.servers import find

    return find(options.k8s, options.timeout or SCRAPE_TIMEOUT)


def scrape_plan(
    options: ObserveOptions, tick: "Tick", should_go_on: Callable[[Observation], bool] = lambda _: False
) -> "ScrapePlan":
    """How live servers are scraped, as these options say."""
    from diag.sources.live.scrape import ScrapePlan

    return ScrapePlan(
        every=options.every,
        duration=options.watch,
        timeout=options.timeout or SCRAPE_TIMEOUT,
        launch=options.launch,
        probe=PROBE_TIMEOUT if options.probe else None,
        beside=partial(_local_pages, options),
        on_progress=lambda at: tick(at.seconds / max(at.of_seconds, at.seconds, options.every)),
        should_go_on=should_go_on,
    )


def _local_pages(options: ObserveOptions, server: "VllmServer") -> "JoinedPages | None":
    """GPUs, processes and log of a server on this host, or of the one whose log was named."""
    from diag.exporter.log.tail import parse_timezone
    from diag.exporter.page import host_collectors
    from diag.http.address import is_here
    from diag.sources.live.joined_pages import JoinedPages

    if not options.log and not is_here(server.address):
        return None
    return JoinedPages(server, host_collectors(server.address, options.log, parse_timezone(options.log_timezone)))


def _query_cache(observation: Observation, contract: Contract) -> QueryCache:
    return QueryCache(SampleSource(observation.samples, observation.instants, observation.interval), contract)


def running_of(observation: Observation, instance: str) -> Running:
    """What is known of one of the servers beside its samples."""
    config = observation.settled.get(instance)
    is_complete = config is not None and not config.incomplete
    return Running(observation.versions.get(instance, ""), observation.launch.get(instance, ""), is_complete)


def _observed(observation: Observation, cache: QueryCache) -> Observed:
    versions, models = observation.versions, observation.models
    return Observed(
        source=observation.source,
        target=observation.target,
        start=float(observation.instants[0]) / 1000,
        end=float(observation.instants[-1]) / 1000,
        scrapes=observation.scrapes,
        failed_scrapes=observation.failed_scrapes,
        servers=tuple(server(name, versions.get(name), models.get(name)) for name in observation.instances),
        notes=observation.notes,
        not_measured=not_measured(cache),
    )


def without_credentials(targets: Sequence[str]) -> str:
    """The targets as they may be printed."""
    from diag.http.address import parse

    return ", ".join(parse(target).shown for target in targets)
