"""What a command looks at: one recording, live servers, or the servers that a Prometheus knows."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from diag.core.contract import Contract
from diag.core.contract_file import find
from diag.core.errors import BadUsage
from diag.core.incident import Incident
from diag.core.site_overrides import apply_overrides
from diag.diagnosis.progress import judge, owed_and_still
from diag.diagnosis.proposals import Running
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Observed, build_report, not_measured, server
from diag.knowledge.catalog import load
from diag.sources.observation import Observation
from diag.sources.prometheus.scope import Scope
from diag.sources.samples import SampleSource
from diag.verify.snapshot import Snapshot

if TYPE_CHECKING:
    from diag.http.vllm_server import VllmServer
    from diag.report.terminal import Tick
    from diag.sources.live.local import LocalPages
    from diag.sources.live.scrape import ScrapePlan
    from diag.sources.prometheus.servers import PrometheusSource

PATIENCE = 125.0
"""Seconds to watch for at most while work is owed and nothing moves: one huge prefill may take two minutes."""
PROBE_SECONDS = 30.0
"""What a request of one token may take."""
SCRAPE_SECONDS, ANSWER_SECONDS = 5.0, 30.0
"""What a page, and a Prometheus' answer to one query, may take unless the command line says otherwise."""


@dataclass(frozen=True)
class ObserveOptions:
    """What the command line asked for; times in seconds. Without a `timeout`, the source's own is used.

    `prometheus` is the URL of a Prometheus to ask about the servers in `scope` instead of asking `targets`.
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


def take_snapshot(settings: ObserveOptions) -> Snapshot:
    """Judge one recording or live servers, and keep what they can still be asked."""
    contract, incidents = declared(settings)
    seen = observe(settings, contract)
    asked = QueryCache(SampleSource(seen.samples, seen.instants, seen.interval), contract)
    running = {name: _running(seen, name) for name in seen.instances}
    return Snapshot(build_report(_observed(seen, asked), incidents, asked, running), asked, running)


def declared(settings: ObserveOptions) -> tuple[Contract, tuple[Incident, ...]]:
    """The site's contract, and the incidents under its limits."""
    contract = find(settings.contract)
    return contract, apply_overrides(load(settings.incidents), contract)


def observe(settings: ObserveOptions, contract: Contract) -> Observation:
    """The samples of one recording, or of live servers that are scraped for it."""
    paths = [Path(each) for each in settings.targets if Path(each).exists()]
    if not paths:
        return _watch(settings, contract)
    if len(settings.targets) > 1:
        raise BadUsage("a recording is judged alone: name one recording, or URLs only")
    from diag.sources.recording.reader import read

    return read(paths[0], launch=settings.launch)


def observe_once(settings: ObserveOptions) -> Observation:
    """A recording as a whole, or live servers at one moment."""
    if any(Path(each).exists() for each in settings.targets):
        return observe(settings, Contract())
    from diag.sources.live.scrape import watch

    return watch(settings.targets, plan(replace(settings, watch=0.0), lambda share: None))


def prometheus_source(settings: ObserveOptions, contract: Contract) -> "PrometheusSource":
    """The servers in scope as a Prometheus knows them."""
    from diag.http.address import parse
    from diag.http.credentials import from_environment
    from diag.sources.prometheus.client import Prometheus
    from diag.sources.prometheus.servers import PrometheusSource

    seconds = settings.timeout or ANSWER_SECONDS
    address = parse(settings.prometheus)
    if address.query:
        raise BadUsage(f"{address.shown}?...: a Prometheus is asked by its address alone, without a question mark")
    prometheus = Prometheus(address, from_environment(os.environ), seconds)
    return PrometheusSource(prometheus, settings.scope, contract.site.labels)


def _watch(settings: ObserveOptions, contract: Contract) -> Observation:
    """Scrape live servers; watch on while work is owed, nothing moves, and it may still be one huge prefill."""
    from diag.report.terminal import bar
    from diag.sources.live.scrape import watch

    def stuck(seen: Observation) -> bool:
        asked = QueryCache(SampleSource(seen.samples, seen.instants, seen.interval), contract)
        return asked.span < PATIENCE and owed_and_still(judge(asked)[0])

    with bar(f"watching {shown(settings.targets)}") as tick:
        return watch(settings.targets, plan(settings, tick, stuck))


def plan(
    settings: ObserveOptions, tick: "Tick", should_go_on: Callable[[Observation], bool] = lambda _: False
) -> "ScrapePlan":
    """How live servers are scraped, as these options say."""
    from diag.sources.live.scrape import ScrapePlan

    return ScrapePlan(
        every=settings.every,
        duration=settings.watch,
        timeout=settings.timeout or SCRAPE_SECONDS,
        launch=settings.launch,
        probe=PROBE_SECONDS if settings.probe else None,
        beside=partial(_beside, settings),
        on_progress=lambda at: tick(at.seconds / max(at.of_seconds, at.seconds, settings.every)),
        should_go_on=should_go_on,
    )


def _beside(settings: ObserveOptions, server: "VllmServer") -> "LocalPages | None":
    """GPUs, processes and log of a server on this host, or of the one whose log was named."""
    from diag.exporter.log.timezone import zone
    from diag.http.locality import is_here
    from diag.sources.live.local import LocalPages

    if not settings.log and not is_here(server.address):
        return None
    return LocalPages(server, settings.log, zone(settings.log_timezone))


def _running(seen: Observation, name: str) -> Running:
    whole = name in seen.settled and not seen.settled[name].unread
    return Running(seen.versions.get(name, ""), seen.launch.get(name, ""), whole)


def _observed(seen: Observation, asked: QueryCache) -> Observed:
    return Observed(
        source=seen.source,
        target=seen.target,
        start=float(seen.instants[0]) / 1000,
        end=float(seen.instants[-1]) / 1000,
        scrapes=seen.scrapes,
        failed_scrapes=seen.failed_scrapes,
        servers=tuple(server(name, seen.versions.get(name), seen.models.get(name)) for name in seen.instances),
        notes=seen.notes,
        not_measured=not_measured(asked),
    )


def shown(targets: Sequence[str]) -> str:
    """The targets as they may be printed: without credentials."""
    from diag.http.address import parse

    return ", ".join(parse(each).shown for each in targets)
