"""The vLLM servers of a namespace: found, scraped with the log and status of each container, and evidence about them.

The log of the previous run is read first: in a crash loop it has the cause. The kubelet stamps each line, so the time
zone of the container does not matter. The evidence is handed over in a bundle: launch, status and events without
secrets, and the logs. The API server holds all of it only for a while: events for an hour, the log of the previous run
until the next restart.
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
from diag.core.metric_prefix import OWN, named_as_ours
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
    facts,
    failed_probes,
    not_started,
    note,
    summary,
    without_secrets,
)
from diag.sources.live.scrape import ScrapePlan, scrape
from diag.sources.live.server import JoinedPages
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
MOST_PODS_KEPT, MOST_EVENTS = 16, 200
"""Pods whose evidence is read, at most, and the latest events of each."""
_MOST_NAME = 80
"""Characters of a file's name: a pod's name has up to 253, of which the end tells it apart."""


class ContainerLog:
    """A `ServerView` of what the API server knows about one server, and its only `Collector`: of log and status.

    Reads each line of the log once; `problem` is the reason if the log cannot be read.
    """

    name = "log"

    def __init__(
        self, api: Api, namespace: str, of: Candidate, status: ContainerStatus, clock: Callable[[], float] = time.time
    ) -> None:
        self.state = ServerLog(UTC)
        self.status = status
        self.problem = ""
        self._api, self._namespace, self._of, self._clock = api, namespace, of, clock
        self._looked_at = clock()
        self._last = _NO_LINE
        self._lock = threading.Lock()

    @property
    def collectors(self) -> Sequence[Collector]:
        """The collector of log and status."""
        return (self,)

    @property
    def has_server(self) -> bool:
        """Return True if the log has a line, or a run of the container has ended."""
        return self.state.latest is not None or self.status.last is not None

    @property
    def serves_nobody(self) -> bool:
        """Return False: the processes of a pod are not seen."""
        return False

    def start(self) -> None:
        """Do nothing: nothing is collected between two scrapes."""

    def begin(self) -> None:
        """Read the existing log: of the previous run, if there was one, then of this run."""
        self.scraped(Measurement(self._clock(), page=False, answers=False))  # what was logged before this run is past
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
            samples = self.state.samples(now) if self.state.latest is not None else []
            # the log covers the last two runs, the kubelet counts all of them: the larger number of crashes holds
            by_log = (value for name, _, value in samples if name == CRASHES)
            crashes = max([self.status.crashes_in_a_row(now), *by_log])
            others = [sample for sample in samples if sample[0] != CRASHES]
            return Collected([*others, (CRASHES, (), crashes), *self.status.samples()], self.problem)

    def scraped(self, measured: Measurement) -> None:
        """Take what a scrape has measured of the server: it decides which claims of the log are believed."""
        since = self.status.running_since
        by_kubelet = {"container status": since} if since else {}
        with self._lock:
            self.state.page(measured._replace(started={**measured.started, **by_kubelet}))

    def completed(self, facts: ServerFacts) -> ServerFacts:
        """Complete the facts that the server reports by its log and the command of its container."""
        return self.state.completes(facts)._replace(process=self._of.command)

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
class PodAddress(Address):
    """A pod's page behind the API server's proxy; `server` names it for the user: namespace/pod:port."""

    server: str = ""

    @property
    def shown(self) -> str:
        """The name for the user, safe to print and record."""
        return self.server


class FoundServer(NamedTuple):
    """One vLLM server: the address of its page, its container, the container's log, and its failed probes."""

    instance: str
    address: PodAddress
    container: PodContainer
    log: ContainerLog
    shown: str
    probes: tuple[str, ...]

    def notes(self) -> Iterator[str]:
        """Yield the notes about the container and its log so far."""
        yield from note(self.shown, self.log.status, self.probes)
        if self.log.problem:
            yield self.log.problem


class ServersOfNamespace(NamedTuple):
    """The servers by instance (pod:port), the API server that reaches them, and notes for the user."""

    api: Api
    servers: Mapping[str, FoundServer]
    notes: tuple[str, ...]

    @property
    def addresses(self) -> Mapping[str, Address]:
        """The addresses of their pages, by instance."""
        return {instance: server.address for instance, server in self.servers.items()}

    @property
    def shown(self) -> str:
        """The names of the servers, safe to print."""
        return ", ".join(server.address.shown for server in self.servers.values())

    def plan(self, plan: ScrapePlan) -> ScrapePlan:
        """Return the plan with each server joined with its container's log and status, and with the notes on both."""

        def beside(asked: VllmServer) -> JoinedPages:
            return JoinedPages(asked, next(server.log for server in servers if server.address == asked.address))

        def all_notes() -> Sequence[str]:
            return [*(note for server in servers for note in server.notes()), *self.notes]

        servers, client = self.servers.values(), self.api.client
        return replace(plan, credentials=Credentials(), client=lambda *_: client, beside=beside, notes=all_notes)

    def scrape(self, plan: ScrapePlan) -> Observation:
        """Scrape the servers by a plan."""
        observation = scrape(self.addresses, self.plan(plan))
        running = ((name, server) for name, server in self.servers.items() if server.log.status.running_since)
        return replace(observation, containers={name: server.container for name, server in running})


def find(text: str, timeout: float) -> ServersOfNamespace:
    """Find the servers in [CONTEXT/]NAMESPACE[/SELECTOR]; Unreachable if none can be judged."""
    place, address, credentials = cluster_of(text)
    return find_with(Api(address, credentials, timeout), place)


def find_with(api: Api, place: Place) -> ServersOfNamespace:
    """Find the servers in a place of an API server; Unreachable if none can be judged."""
    pods = api.pods(place.namespace, place.selector)
    possible = [(pod, candidate) for pod in pods for candidate in candidates(pod)]
    idle = [why for pod, candidate in possible if candidate.certain and (why := not_started(pod))]
    alive = [(pod, candidate) for pod, candidate in possible if not not_started(pod)]
    inspections = [run_in_thread(partial(_inspect, api, place, *pair)) for pair in alive[:MOST_SERVERS]]
    results = [inspection.result() for inspection in inspections]
    servers = {server.instance: server for server in results if isinstance(server, FoundServer)}
    reasons = list(dict.fromkeys([*idle, *(reason for reason in results if isinstance(reason, str) and reason)]))
    if api.odd:
        fields = listed(list(map(printable, sorted(api.odd))))
        reasons.append(f"these fields of pods have other types than in Kubernetes, and count as missing: {fields}")
    if not servers:
        where = f"namespace {place.namespace}" + (f" with {printable(place.selector, 80)}" if place.selector else "")
        if reasons:
            raise Unreachable(f"no vLLM server in {where} can be judged: {listed(reasons, separator='; ')}")
        nothing = f"none of {plural(len(pods), 'pod')} is a vLLM server" if pods else "there is no pod"
        raise Unreachable(f"{nothing} in {where}")
    if len(pods) >= MOST_PODS:
        reasons.append(f"only the first {len(pods):,} pods were looked at: name a selector")
    if len(alive) > MOST_SERVERS:
        reasons.append(f"only the first {MOST_SERVERS} of {len(alive)} containers were looked at: name a selector")
    return ServersOfNamespace(api, servers, tuple(reasons))


def _inspect(api: Api, place: Place, pod: Pod, candidate: Candidate) -> FoundServer | str:
    """Return the server, or why it cannot be judged; "" if the container is no server."""
    namespace = place.namespace
    pod_name, status = f"pod {printable(candidate.pod)}", container_status(pod, candidate.container)
    try:
        port = _metrics_port(api, namespace, candidate)
    except Failure as error:
        if not candidate.certain:
            return f"{pod_name}: {error}; {error.hint}" if error.reached else ""
        port = candidate.ports[0]
        if status.ready and (status.probed or str(error) != REFUSED):
            return (
                f"{pod_name} is ready, but cannot be asked through the API server's proxy ({error}); {error.hint}; or"
                f" run: kubectl port-forward -n {namespace} {pod_name.replace(' ', '/')} {port}"
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
        log,
        f"container {printable(candidate.container)} of {pod_name}",
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
        renamed = f"\n{OWN}".encode() in named_as_ours(response.body)[0]
        if response.status == 200 and (is_ours(response.body) or renamed):
            return port
        if response.status in (401, 403):
            raise api.client.refusal(response.status)
    raise refused or Failure("has no port with vLLM's metrics", reached=False)


def _address(api: Api, namespace: str, candidate: Candidate, port: int) -> PodAddress:
    base = api.address
    scheme = "https:" if candidate.scheme == "https" else ""
    proxy = f"{base.path.rstrip('/')}{namespaced(namespace)}/pods/{scheme}{candidate.pod}:{port}/proxy"
    return PodAddress(base.scheme, base.host, base.port, proxy + PAGE, server=f"{namespace}/{candidate.pod}:{port}")


# -- evidence to hand over


class LogEnds(NamedTuple):
    """The beginning of a log and, if it goes on after a gap, its end; each line begins with the kubelet's time."""

    first: bytes
    last: bytes = b""


class PodEvidence(NamedTuple):
    """Facts about one pod, a summary of them in one line, the logs by run, and sentences about what cannot be read.

    `name` is part of a file's name, `shown` the name for the user.
    """

    name: str
    shown: str
    facts: Mapping[str, Any]
    summary: str
    logs: Mapping[str, LogEnds]
    missing: tuple[str, ...]


def gather(servers: ServersOfNamespace, first_bytes: int) -> Iterator[PodEvidence]:
    """Read the evidence about the first pods, and at most `first_bytes` of the beginning of each log."""
    for server in list(servers.servers.values())[:MOST_PODS_KEPT]:
        _, namespace, name, container = server.container
        pod: Pod = {}
        events: list[Mapping[str, Any]] = []
        logs: dict[str, LogEnds] = {}
        missing = []
        try:
            pod = servers.api.pod(namespace, name)
        except Failure as error:
            missing.append(f"status of {server.shown}: {error}")
        try:
            events = servers.api.events(namespace, name)
            events.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
        except Failure as error:
            missing.append(f"events of {server.shown}: {error}")
        has_previous = container_status(pod, container).restarts
        for run, query in {"log": {}, **({"previous.log": {"previous": "true"}} if has_previous else {})}.items():
            try:
                logs[run] = _ends(servers.api, namespace, name, {"container": container, **query}, first_bytes)
            except Failure as error:
                missing.append(f"{run.replace('.', ' ')} of {server.shown}: {error}")
        of_pod = {"namespace": namespace, "container": container, **facts(pod), "events": events[-MOST_EVENTS:]}
        yield PodEvidence(
            name=server.instance.replace(":", "_")[-_MOST_NAME:],
            shown=server.shown,
            facts=without_secrets(of_pod),
            summary=summary(pod, container),
            logs=logs,
            missing=tuple(missing),
        )


def _ends(api: Api, namespace: str, pod: str, query: Mapping[str, str], first_bytes: int) -> LogEnds:
    """Read both ends of a log; lines that the end repeats are left out."""
    first = api.log(namespace, pod, {**query, "limitBytes": str(first_bytes)})
    if len(first) < first_bytes:
        return LogEnds(first)
    first = first[: first.rfind(b"\n") + 1]  # the limit cuts a line
    latest = first.rstrip(b"\n").rpartition(b"\n")[2].partition(b" ")[0]
    last = api.log(namespace, pod, {**query, "tailLines": str(LAST_LINES)}).splitlines(keepends=True)
    new = b"".join(line for line in last if line.partition(b" ")[0] > latest)
    return LogEnds(first, new) if len(new) == sum(map(len, last)) else LogEnds(first + new)
