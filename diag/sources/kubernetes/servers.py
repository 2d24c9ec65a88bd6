"""The vLLM servers of a namespace: finding them, scraping them, and each container's log and status as part of a page.

The log of the previous run is read first: in a crash loop it has the cause. The kubelet stamps each line, so the time
zone of the container does not matter.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

from diag.core.errors import Unreachable
from diag.core.formatting import listed, plural, printable
from diag.core.metric_families import Collected, Collector
from diag.core.metric_prefix import named_as_ours
from diag.exporter.vllm_page import is_ours
from diag.http.address import PAGE, Address, Credentials
from diag.http.client import run_in_thread
from diag.http.failure import Failure
from diag.http.vllm_server import ACCEPT, VllmServer
from diag.log.corroboration import Measurement
from diag.log.server_log import ServerLog
from diag.sources.kubernetes.cluster import MOST_PODS, Api, Place, cluster_of, namespaced
from diag.sources.kubernetes.pod_object import (
    LAST_MOMENT,
    Candidate,
    ContainerStatus,
    Pod,
    candidates,
    container_status,
    failed_probes,
    not_started,
    note,
)
from diag.sources.live.joined_pages import JoinedPages
from diag.sources.live.scrape import ScrapePlan, scrape
from diag.sources.observation import Observation, PodContainer
from diag.vllm.running_config import ServerFacts

FIRST_BYTES, LAST_LINES = 512 * 2**10, 5_000
"""Parts that are read of an existing log: its beginning, with the configuration, and its end."""
STATUS_EVERY = 5.0
"""Seconds between two requests for the pod's status."""
CRASHES = "diag_vllm_log_consecutive_crashes"
_NO_LINE = (0.0, "")
"""Before the first line: unix time, and the kubelet's own text of the time, which has nanoseconds."""
REFUSED = "connection refused"
MOST_SERVERS = 100
"""Servers that are watched at once: each scrape reads the page and the log of each one."""


class ContainerLog:
    """A `Collector` of one container's log, which reads each line once, and of its status.

    `problem` is the reason if the log cannot be read.
    """

    name = "log"

    def __init__(
        self,
        api: Api,
        namespace: str,
        of: Candidate,
        status: ContainerStatus,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.state = ServerLog(UTC)
        self.status = status
        self.problem = ""
        self._api, self._namespace, self._of, self._clock = api, namespace, of, clock
        self._looked_at = clock()
        self._last = _NO_LINE
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Read the existing log: of the previous run, if there was one, then of this run."""
        self.page(Measurement(self._clock(), page=False, answers=False))  # what was logged before this run is past
        if self.status.restarts:
            self._read(previous="true", tailLines=str(LAST_LINES))
        if self.status.running_since:
            self._note_end()
        if self._read(limitBytes=str(FIRST_BYTES)) >= FIRST_BYTES:
            self._read(tailLines=str(LAST_LINES))
        if not self.status.running_since:
            self._note_end()

    def collect(self) -> Collected:
        """Read new lines and, from time to time, the status; return the samples."""
        if self._clock() - self._looked_at >= STATUS_EVERY:
            self._looked_at, before = self._clock(), self.status
            with suppress(Failure):  # a pod that cannot be read keeps its status
                self.status = container_status(self._api.pod(self._namespace, self._of.pod), self._of.container)
            if self.status.last != before.last:  # if it runs again, the ended run's log is the previous one
                self._read(**self._since_last_line(), previous="true" if self.status.running_since else "")
                self._note_end()
        self._read(**self._since_last_line())
        with self._lock:
            now = self._clock()
            known = self.state.samples(now) if self.state.latest is not None else []
            # the log covers the last two runs, the kubelet counts all of them: the larger number of crashes holds
            crashes = max([self.status.crashes_in_a_row(now), *(value for name, _, value in known if name == CRASHES)])
            others = [sample for sample in known if sample[0] != CRASHES]
            return Collected([*others, (CRASHES, (), crashes), *self.status.samples()], self.problem)

    def page(self, seen: Measurement) -> None:
        """Take what a scrape has measured of the server: it decides which claims of the log are believed."""
        since = self.status.running_since
        by_kubelet = {"container status": since} if since else {}
        with self._lock:
            self.state.page(seen._replace(started={**seen.started, **by_kubelet}))

    def _note_end(self) -> None:
        last = self.status.last
        if last and last.at:
            with self._lock:
                self.state.process_ended(last.at, last.by_signal)

    def _since_last_line(self) -> Mapping[str, str]:
        """Return the query for new lines; sinceTime has a resolution of one second."""
        since = datetime.fromtimestamp(int(self._last[0]), UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if self._last[0] else ""
        return {"sinceTime": since, "tailLines": str(LAST_LINES)}

    def _read(self, **query: str) -> int:
        """Read a part of the log and feed its new lines; return its size in bytes."""
        pod, container = self._of.pod, self._of.container
        try:
            text = self._api.log(self._namespace, pod, {"container": container, **query})
        except Failure as error:
            is_gone = bool(query.get("previous"))  # the kubelet keeps no log of the previous run, or there was none
            self.problem = self.problem if is_gone else f"the log of pod {printable(pod)} cannot be read: {error}"
            return 0
        self.problem = ""
        with self._lock:
            for line in text.decode("utf-8", "replace").split("\n"):
                stamp = line.partition(" ")[0]
                try:
                    at = (datetime.fromisoformat(stamp).timestamp(), stamp)
                except (ValueError, OverflowError):
                    continue
                if self._last < at < (LAST_MOMENT, ""):
                    self._last = at
                    self.state.feed(line, at[0], live=False)
        return len(text)


@dataclass(frozen=True)
class PodView:
    """A `ServerView` of what the API server knows about one server: log, status and command of its container."""

    log: ContainerLog
    command: str

    @property
    def collectors(self) -> Sequence[Collector]:
        """The collector of log and status."""
        return (self.log,)

    @property
    def has_server(self) -> bool:
        """Return True if the log has a line, or a run of the container has ended."""
        return self.log.state.latest is not None or self.log.status.last is not None

    def start(self) -> None:
        """Do nothing: nothing is collected between two scrapes."""

    def scraped(self, seen: Measurement) -> None:
        """Take what the server's page has just measured."""
        self.log.page(seen)

    def completed(self, facts: ServerFacts) -> ServerFacts:
        """Complete the facts that the server reports by its log and the command of its container."""
        return self.log.state.completes(facts)._replace(process=self.command)


@dataclass(frozen=True)
class PodAddress(Address):
    """A pod's page behind the API server's proxy; `server` names it for the user: namespace/pod:port."""

    server: str = ""

    @property
    def shown(self) -> str:
        """The name for the user, safe to print and record."""
        return self.server


class FoundServer(NamedTuple):
    """One vLLM server: the address of its page, its container, the view of its pod, and its failed probes."""

    instance: str
    address: PodAddress
    container: PodContainer
    view: PodView
    shown: str
    probes: tuple[str, ...]

    def notes(self) -> Iterator[str]:
        """Yield the notes about the container and its log so far."""
        yield from note(self.shown, self.view.log.status, self.probes)
        if self.view.log.problem:
            yield self.view.log.problem


class ServersOfNamespace(NamedTuple):
    """The servers by instance (pod:port), the API server that reaches them, and notes for the user."""

    api: Api
    servers: Mapping[str, FoundServer]
    notes: tuple[str, ...]

    @property
    def addresses(self) -> Mapping[str, Address]:
        """The addresses of their pages, by instance."""
        return {instance: found.address for instance, found in self.servers.items()}

    @property
    def shown(self) -> str:
        """The names of the servers, safe to print."""
        return ", ".join(found.address.shown for found in self.servers.values())

    def plan(self, plan: ScrapePlan) -> ScrapePlan:
        """Return the plan with each server joined with its container's log and status, and with the notes on both."""

        def beside(server: VllmServer) -> JoinedPages:
            found = next(found for found in self.servers.values() if found.address == server.address)
            return JoinedPages(server, found.view)

        def all_notes() -> Sequence[str]:
            return [*(note for found in self.servers.values() for note in found.notes()), *self.notes]

        client = self.api.client
        return replace(plan, credentials=Credentials(), client=lambda *_: client, beside=beside, notes=all_notes)

    def scrape(self, plan: ScrapePlan) -> Observation:
        """Scrape the servers by a plan."""
        seen = scrape(self.addresses, self.plan(plan))
        runs = ((name, found) for name, found in self.servers.items() if found.view.log.status.running_since)
        return replace(seen, containers={instance: found.container for instance, found in runs})


def find(text: str, timeout: float) -> ServersOfNamespace:
    """Find the servers in [CONTEXT/]NAMESPACE[/SELECTOR]; Unreachable if none can be judged."""
    place, cluster = cluster_of(text)
    return find_with(Api(cluster, timeout), place)


def find_with(api: Api, place: Place) -> ServersOfNamespace:
    """Find the servers in a place of an API server; Unreachable if none can be judged."""
    pods = api.pods(place.namespace, place.selector)
    possible = [(pod, candidate) for pod in pods for candidate in candidates(pod)]
    idle = [why for pod, candidate in possible if candidate.certain and (why := not_started(pod))]
    alive = [(pod, candidate) for pod, candidate in possible if not not_started(pod)]
    inspections = [run_in_thread(partial(_inspect, api, place, *pair)) for pair in alive[:MOST_SERVERS]]
    found = [inspection.result() for inspection in inspections]
    servers = {server.instance: server for server in found if isinstance(server, FoundServer)}
    reasons = list(dict.fromkeys([*idle, *(reason for reason in found if isinstance(reason, str) and reason)]))
    if api.odd:
        fields = listed(list(map(printable, sorted(api.odd))))
        reasons.append(f"these fields of pods have other types than in Kubernetes, and count as missing: {fields}")
    if not servers:
        where = f"namespace {place.namespace}" + (f" with {printable(place.selector, 80)}" if place.selector else "")
        if reasons:
            raise Unreachable(f"no vLLM server in {where} can be judged: {listed(reasons, separator='; ')}")
        seen = f"none of {plural(len(pods), 'pod')} is a vLLM server" if pods else "there is no pod"
        raise Unreachable(f"{seen} in {where}")
    if len(pods) >= MOST_PODS:
        reasons.append(f"only the first {len(pods):,} pods were looked at: name a selector")
    if len(alive) > MOST_SERVERS:
        reasons.append(f"only the first {MOST_SERVERS} of {len(alive)} containers were looked at: name a selector")
    return ServersOfNamespace(api, servers, tuple(reasons))


def _inspect(api: Api, place: Place, pod: Pod, candidate: Candidate) -> FoundServer | str:
    """Return the server, or why it cannot be judged; "" if the container is no server."""
    namespace = place.namespace
    shown, status = f"pod {printable(candidate.pod)}", container_status(pod, candidate.container)
    try:
        port = _metrics_port(api, namespace, candidate)
    except Failure as error:
        if not candidate.certain:
            return f"{shown}: {error}; {error.hint}" if error.reached else ""
        port = candidate.ports[0]
        if status.ready and (status.probed or str(error) != REFUSED):
            return (
                f"{shown} is ready, but cannot be asked through the API server's proxy ({error}); {error.hint}; or run:"
                f" kubectl port-forward -n {namespace} {shown.replace(' ', '/')} {port}"
            )
    log = ContainerLog(api, namespace, candidate, status)
    log.begin()
    events: list[Mapping[str, Any]] = []
    if not status.ready or status.restarts:
        with suppress(Failure):  # the account may not read them
            events = api.events(namespace, candidate.pod)
    return FoundServer(
        f"{candidate.pod}:{port}",
        _address(api, namespace, candidate, port),
        PodContainer(place.context, namespace, candidate.pod, candidate.container),
        PodView(log, candidate.command),
        f"container {printable(candidate.container)} of {shown}",
        tuple(failed_probes(pod, candidate.container, events)),
    )


def _metrics_port(api: Api, namespace: str, candidate: Candidate) -> int:
    """Return the first port with vLLM's metrics; Failure if there is none, or one does not respond."""
    refused: Failure | None = None
    for port in candidate.ports:
        address = _address(api, namespace, candidate, port)
        try:
            response = api.client.get(address.path, ACCEPT)
        except Failure as error:
            if error.reached:
                raise
            refused = error
            continue
        if response.status == 200 and (is_ours(response.body) or b"\nvllm:" in named_as_ours(response.body)[0]):
            return port
        if response.status in (401, 403):
            raise api.client.refusal(response.status)
    raise refused or Failure("has no port with vLLM's metrics", reached=False)


def _address(api: Api, namespace: str, candidate: Candidate, port: int) -> PodAddress:
    base = api.cluster.address
    scheme = "https:" if candidate.scheme == "https" else ""
    proxy = f"{base.path.rstrip('/')}{namespaced(namespace)}/pods/{scheme}{candidate.pod}:{port}/proxy"
    return PodAddress(base.scheme, base.host, base.port, proxy + PAGE, server=f"{namespace}/{candidate.pod}:{port}")
