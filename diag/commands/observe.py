"""Observations of one recording, of live servers, or of the servers in a Prometheus, for the commands that judge them;
and the commands that only keep or print what was observed: `diag record`, `diag export` and `diag config`.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from diag.core.contract import Contract, apply_overrides, find, renamed_thresholds
from diag.core.errors import BadUsage, NoHostName, UnknownHost
from diag.core.files import exists
from diag.core.formatting import plural, printable
from diag.core.incident import Incident
from diag.core.metric_prefix import OWN
from diag.diagnosis.progress import judge, owed_and_still
from diag.diagnosis.proposals import Running
from diag.diagnosis.query_cache import QueryCache, TelemetrySource
from diag.diagnosis.report import Observed, build_report, not_measured, server
from diag.diagnosis.snapshot import Snapshot
from diag.knowledge.catalog import load
from diag.sources.observation import Observation, SampleSource
from diag.sources.prometheus.scope import Scope

if TYPE_CHECKING:
    from diag.http.vllm_server import VllmServer
    from diag.report.terminal import Tick
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
    """Options of the command line; times in seconds. Without a `timeout`, the source's own is used.

    `prometheus` is the URL of a Prometheus to query about the servers in `scope`, and `k8s` a namespace whose pods to
    scrape, instead of scraping `targets`.
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


def site(incident_folder: Path | None, contract_file: Path | None) -> tuple[Contract, tuple[Incident, ...]]:
    """Return the contract, and diag's incidents and the site's own with the site's thresholds."""
    contract, incidents = find(contract_file), load(incident_folder)
    for sentence in renamed_thresholds(incidents, contract):
        print(f"diag: {sentence}", file=sys.stderr)  # the report itself goes to standard output
    return contract, apply_overrides(incidents, contract)


def take_snapshot(options: ObserveOptions) -> Snapshot:
    """Diagnose one recording or live servers; keep the samples, so that signals can be compared later."""
    contract, incidents = site(options.incidents, options.contract)
    return judge_observation(observe(options, contract), contract, incidents)


def judge_observation(observation: Observation, contract: Contract, incidents: Sequence[Incident]) -> Snapshot:
    """Diagnose an observation."""
    cache = _query_cache(observation, contract)
    if contract.site.prefix != OWN:  # a page does not show how Prometheus renames its metrics
        incidents = tuple(incident for incident in incidents if incident.id != "scrape_renames_metrics")
    running = {instance: running_of(observation, instance) for instance in observation.instances}
    versions, models = observation.versions, observation.models
    observed = Observed(
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
    return Snapshot(build_report(observed, incidents, cache, running), cache, running)


def observe(options: ObserveOptions, contract: Contract) -> Observation:
    """Read the samples of one recording, or scrape live servers."""
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


def refuse_the_past(options: ObserveOptions, what: str) -> None:
    """Raise BadUsage for a recording and for a time in the past; `what` is the command that diagnoses the present."""
    if not options.prometheus and any(map(exists, options.targets)):
        raise BadUsage(f"{what} needs live servers or a Prometheus: a recording does not change")
    if options.scope.span.at or options.scope.span.until:
        raise BadUsage(f"{what} diagnoses the present: leave out --at and --to")


def is_path(target: str) -> bool:
    """Return True for a path: one that exists, whose folder exists, or that cannot be a URL."""
    folder, slash, _ = target.rpartition("/")
    return (
        exists(target) or target.startswith((".", "/", "~")) or bool(slash and "://" not in target and exists(folder))
    )


@contextmanager
def _nor_a_path(targets: Sequence[str]) -> Iterator[None]:
    """Add a hint to an unknown host: a target that looks like a path may be the mistyped name of a recording."""
    try:
        yield
    except (NoHostName, UnknownHost) as error:
        meant = next((target for target in targets if target and "://" not in target), "")
        if not meant:
            raise
        from diag.http.address import without_user

        raise type(error)(f"there is no file or recording {without_user(meant)}; {error}") from error


def observe_once(options: ObserveOptions) -> Observation:
    """Read a whole recording, or scrape live servers once."""
    if any(map(is_path, options.targets)):
        return observe(options, Contract())
    from diag.sources.live.scrape import watch

    with _nor_a_path(options.targets):
        return watch(options.targets, scrape_plan(replace(options, watch=0.0), lambda share: None))


def prometheus_source(
    options: ObserveOptions, contract: Contract, incidents: Sequence[Incident] = ()
) -> "PrometheusSource":
    """Return the servers in scope of a Prometheus, with the series that rules for `incidents` record there."""
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
    """Scrape live servers; go on while requests are in flight and nothing moves, for it may be one huge prefill."""
    from diag.report.terminal import bar
    from diag.sources.live.scrape import watch

    def may_be_stuck(observation: Observation) -> bool:
        cache = _query_cache(observation, contract)
        return cache.span < LONGEST_SCRAPING and owed_and_still(judge(cache)[0])

    pods = None
    if options.k8s:
        from diag.sources.kubernetes.servers import find as find_pods

        pods = find_pods(options.k8s, options.timeout or SCRAPE_TIMEOUT)
    with bar(f"watching {pods.shown if pods else without_credentials(options.targets)}") as tick:
        plan = scrape_plan(options, tick, may_be_stuck)
        return pods.watch(plan) if pods else watch(options.targets, plan)


def scrape_plan(
    options: ObserveOptions, tick: "Tick", should_go_on: Callable[[Observation], bool] = lambda _: False
) -> "ScrapePlan":
    """Return the plan of how live servers are scraped."""
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
    """Return the pages of GPUs, processes and log of a server on this host, or of a server whose log was named."""
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
    """Return version and launch command of a server, and whether they are all of its configuration."""
    config = observation.settled.get(instance)
    is_complete = config is not None and not config.incomplete
    return Running(observation.versions.get(instance, ""), observation.launch.get(instance, ""), is_complete)


def without_credentials(targets: Sequence[str]) -> str:
    """Return the targets as text to print."""
    from diag.http.address import parse

    return ", ".join(parse(target).shown for target in targets)


# -- commands that only keep or print what was observed ----------------------------------------------------------------


def record_servers(options: ObserveOptions, folder: Path) -> str:
    """Record live servers into a folder; return a sentence about what it holds."""
    from diag.report.terminal import bar
    from diag.sources.recording.writer import record

    with bar(f"recording {without_credentials(options.targets)}") as tick:
        recorded = record(options.targets, folder, scrape_plan(options, tick))
    silent = f", {recorded.silent_scrapes} without vLLM's metrics" if recorded.silent_scrapes else ""
    return (
        f"{folder}: {plural(recorded.scrapes, 'scrape')}, {recorded.failed_scrapes} failed{silent};"
        f" diagnose it with: diag doctor {folder}"
    )


def export_signals(options: ObserveOptions, file: Path | None) -> str:
    """Write the signals of a time range as CSV, by default to standard output; return a sentence about the file."""
    from diag.core.files import refused_in_words, written_whole
    from diag.report import dataframe

    contract, incidents = site(options.incidents, options.contract)
    source: TelemetrySource
    if options.prometheus:
        source = prometheus_source(options, contract)
    else:
        observation = observe(options, contract)
        source = SampleSource(observation.samples, observation.instants, observation.interval)
    with (
        refused_in_words(file or Path("standard output")),
        written_whole(file, newline="") if file else nullcontext(sys.stdout) as out,
    ):
        values = dataframe.write(incidents, QueryCache(source, contract), out)
    return f"{file}: {values:,} values at {len(source.instants):,} instants"


def show_configuration(options: ObserveOptions, as_json: bool) -> str:
    """Return the configuration of each server and the source of each value, after one scrape."""
    from diag.diagnosis import configuration
    from diag.report.settings import render_config, render_config_json

    observation = observe_once(options)
    servers, notes = configuration.configurations(observation), configuration.notes(observation)
    return (render_config_json if as_json else render_config)(servers, notes)
