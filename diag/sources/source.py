"""The seam between telemetry and diagnosis: what a source offers, and the one place that chooses a source.

diag/sources/README.md walks through adding a source.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from diag.core.contract import Contract
from diag.core.debug_log import timed
from diag.core.errors import BadUsage, NoHostName, UnknownHost
from diag.core.files import exists
from diag.core.formatting import printable
from diag.core.incident import Incident
from diag.core.subjects import Floats, Instants, Subject
from diag.log.files import is_log
from diag.promql import Formula
from diag.sources.prometheus.scope import Scope

if TYPE_CHECKING:
    from diag.http.vllm_server import VllmServer
    from diag.sources.live.scrape import ScrapePlan
    from diag.sources.observation import Observation
    from diag.sources.prometheus.servers import PrometheusSource

PROBE_TIMEOUT = 30.0
"""Seconds that a request for one token may take."""
SCRAPE_TIMEOUT, QUERY_TIMEOUT = 5.0, 30.0
"""Seconds that a scrape, and a query of a Prometheus, may take unless --timeout says otherwise."""
Tick = Callable[[float], None]
"""Receives the finished share of the scraping, 0 to 1."""


class TelemetrySource(Protocol):
    """A source of telemetry that evaluates PromQL. `instants` are unix milliseconds, `interval` is in seconds."""

    @property
    def instants(self) -> Instants:
        """The instants to judge, ascending."""

    @property
    def first(self) -> int:
        """The time of the first sample in unix milliseconds; the first instant to judge may be later."""

    @property
    def interval(self) -> float:
        """The usual time between two samples of one target."""

    def ask(self, promql: Formula, instants: Instants) -> Mapping[Subject, Floats]:
        """Return one row per subject, NaN for no (finite) sample; raise NotAnswered if the query is refused."""


@dataclass(frozen=True)
class SourceOptions:
    """The choice of a source, by the options of the command line; times in seconds.

    `prometheus` is the URL of a Prometheus to query about the servers in `scope`, and `k8s` a namespace whose pods to
    scrape, instead of `targets`: one recording, or URLs. Live servers are scraped for `duration`. Without a `timeout`,
    the source's own is used.
    """

    targets: Sequence[str]
    every: float = 2.0
    duration: float = 30.0
    timeout: float | None = None
    launch: str = ""
    version: str = ""
    probe: bool = False
    log: str = ""
    log_timezone: str = ""
    nccl_ras: str = ""
    prometheus: str = ""
    scope: Scope = field(default_factory=Scope)
    k8s: str = ""

    @property
    def kind(self) -> Literal["prometheus", "pods", "log", "recording", "servers"]:
        """The kind of source that the options choose."""
        if self.prometheus:
            return "prometheus"
        if self.k8s:
            return "pods"
        if any(map(is_log, self.targets)):
            return "log"
        return "recording" if any(map(is_path, self.targets)) else "servers"


@dataclass(frozen=True)
class Scraping:
    """The caller's part in scraping live servers; by default none.

    `progress` opens a progress bar with a label; `is_decided` is called while no server is well: their log or
    /health may show a death; `should_go_on` is called when the duration is over: a huge prefill may
    still be under way.
    """

    progress: Callable[[str], AbstractContextManager[Tick]] = lambda _: nullcontext(lambda share: None)
    should_go_on: Callable[["Observation"], bool] = lambda _: False
    is_decided: Callable[["Observation"], bool] = lambda _: False


def open_source(
    options: SourceOptions, scraping: Scraping, contract: Contract, incidents: Sequence[Incident] = ()
) -> "Observation | PrometheusSource":
    """Return the servers in a Prometheus, with the series that rules for `incidents` record there, or an observation.

    Raises BadUsage for targets that do not fit together, Unreachable if no server responds.
    """
    with timed("source", options.kind):
        if options.kind == "prometheus":
            return open_prometheus(options, contract, incidents)
        return observe(options, scraping)


def observe(options: SourceOptions, scraping: Scraping) -> "Observation":
    """Read the samples of one recording, or scrape live servers; BadUsage for a Prometheus, which has no pages."""
    if options.kind == "prometheus":
        raise BadUsage("a Prometheus has no pages to read: name a recording, or URLs of servers")
    if options.kind == "pods":
        from diag.sources.kubernetes.servers import find

        pods = find(options.k8s, options.timeout or SCRAPE_TIMEOUT)
        with scraping.progress(f"watching {pods.shown}") as tick:
            return pods.scrape(scrape_plan(options, tick, scraping))
    if options.kind == "log":
        raise BadUsage(
            f"{printable(options.targets[0])} is no recording: it was not written by `diag record`; only diag doctor"
            " reads logs alone"
        )
    if options.kind == "recording":
        if len(options.targets) > 1:
            raise BadUsage("a recording is diagnosed alone: name one recording, or only URLs")
        path = options.targets[0]
        if not exists(path):
            raise BadUsage(f"{printable(path)} does not exist: name the folder of a recording, or a URL")
        from diag.sources.recording.reader import read

        if Path(path).is_dir():
            return read(Path(path), launch=options.launch)
        from diag.sources.recording.bundle import unpacked

        with unpacked(Path(path)) as recording:
            return read(recording, launch=options.launch, shown="" if recording == Path(path) else path)

    from diag.sources.live.scrape import scrape

    try:
        with scraping.progress(f"watching {shown_targets(options.targets)}") as tick:
            return scrape(options.targets, scrape_plan(options, tick, scraping))
    except (NoHostName, UnknownHost) as error:
        # a target that looks like a path may be the mistyped name of a recording
        meant = next((target for target in options.targets if target and "://" not in target), "")
        if not meant:
            raise
        from diag.http.address import without_user

        raise type(error)(f"there is no file or recording {without_user(meant)}; {error}") from error


def read_logs(options: SourceOptions) -> "list[Observation]":
    """Read logs without a server, each as an observation of its own; BadUsage if a target is none."""
    from diag.log.tail import parse_timezone
    from diag.sources.logs import read

    if others := [target for target in options.targets if not is_log(target)]:
        raise BadUsage(f"{printable(others[0])} is no log: logs are diagnosed alone, or beside one URL with --log")
    return read(options.targets, parse_timezone(options.log_timezone), options.launch, options.version)


def open_prometheus(
    options: SourceOptions, contract: Contract, incidents: Sequence[Incident] = ()
) -> "PrometheusSource":
    """Return the servers in scope of a Prometheus."""
    from diag.http.address import from_environment, parse
    from diag.sources.prometheus.client import Prometheus
    from diag.sources.prometheus.servers import PrometheusSource

    address = parse(options.prometheus)
    if address.query:
        raise BadUsage(
            f"{address.shown} has a query: leave out the question mark and what follows from a Prometheus URL"
        )
    prometheus = Prometheus(address, from_environment(os.environ), options.timeout or QUERY_TIMEOUT)
    return PrometheusSource(prometheus, options.scope, contract, incidents)


def scrape_plan(options: SourceOptions, tick: Tick, scraping: Scraping | None = None) -> "ScrapePlan":
    """Return the plan of how live servers are scraped."""
    from diag.exporter.nccl import parse_address
    from diag.exporter.page import host_collectors
    from diag.http.address import is_here
    from diag.log.tail import parse_timezone
    from diag.sources.live.scrape import ScrapePlan
    from diag.sources.live.server import JoinedPages

    def beside(server: "VllmServer") -> JoinedPages | None:
        """Return the pages of GPUs, processes and log of a server on this host, or of a server whose log was named."""
        if not options.log and not is_here(server.address):
            return None
        zone, nccl = parse_timezone(options.log_timezone), parse_address(options.nccl_ras)
        return JoinedPages(server, host_collectors(server.address, options.log, zone, nccl=nccl))

    return ScrapePlan(
        every=options.every,
        duration=options.duration,
        timeout=options.timeout or SCRAPE_TIMEOUT,
        launch=options.launch,
        probe=PROBE_TIMEOUT if options.probe else None,
        beside=beside,
        on_progress=lambda at: tick(at.seconds / max(at.of_seconds, at.seconds, options.every)),
        should_go_on=(scraping or Scraping()).should_go_on,
        is_decided=(scraping or Scraping()).is_decided,
    )


# -- targets -----------------------------------------------------------------------------------------------------------


def refuse_the_past(options: SourceOptions, what: str) -> None:
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


def shown_targets(targets: Sequence[str]) -> str:
    """Return the targets as text to print, without credentials."""
    from diag.http.address import parse

    return ", ".join(parse(target).shown for target in targets)
