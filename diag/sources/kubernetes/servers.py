"""The vLLM servers of a namespace, ready to be watched."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from diag.core.errors import Unreachable
from diag.core.formatting import listed, plural, printable
from diag.core.metric_prefix import named_as_ours
from diag.exporter.vllm_page import is_ours
from diag.http.address import PAGE, Address
from diag.http.client import Client
from diag.http.credentials import Credentials
from diag.http.deadline import run_in_thread
from diag.http.failure import Failure
from diag.http.vllm_server import ACCEPT, VllmServer
from diag.sources.kubernetes.api import MOST_PODS, Api, namespaced
from diag.sources.kubernetes.cluster import Place, cluster_of
from diag.sources.kubernetes.discovery import Candidate, Pod, candidates
from diag.sources.kubernetes.pod import ContainerLog, PodView
from diag.sources.kubernetes.status import container_status, failed_probes, not_started, note
from diag.sources.live.joined_pages import JoinedPages
from diag.sources.live.scrape import ScrapePlan, watch
from diag.sources.observation import Observation

REFUSED = "connection refused"
MOST_SERVERS = 100
"""Watched at once: each is asked for its page and its log at every scrape."""


@dataclass(frozen=True)
class PodAddress(Address):
    """The page of a pod behind the API server's proxy; `server` is what a reader knows it by: namespace/pod:port."""

    server: str = ""

    @property
    def shown(self) -> str:
        """What may be printed and recorded."""
        return self.server


class FoundServer(NamedTuple):
    """One vLLM server: where its page is, what its pod tells, and which probes have failed."""

    instance: str
    address: PodAddress
    view: PodView
    shown: str
    probes: tuple[str, ...]

    def notes(self) -> Iterator[str]:
        """What a reader should know of it by now."""
        yield from note(self.shown, self.view.log.status, self.probes)
        if self.view.log.problem:
            yield self.view.log.problem


class ServersOfNamespace(NamedTuple):
    """The servers by instance (pod:port), the client that reaches them, and what else is to be said."""

    client: Client
    servers: Mapping[str, FoundServer]
    notes: tuple[str, ...]

    @property
    def addresses(self) -> Mapping[str, Address]:
        """Where their pages are, by instance."""
        return {instance: found.address for instance, found in self.servers.items()}

    @property
    def shown(self) -> str:
        """What may be printed."""
        return ", ".join(found.address.shown for found in self.servers.values())

    def watch(self, plan: ScrapePlan) -> Observation:
        """Scrape them as planned, each with its container's log and status."""
        plan = replace(plan, credentials=Credentials(), client=lambda *_: self.client, beside=self._beside)
        seen = watch(self.addresses, plan)
        told = [said for found in self.servers.values() for said in found.notes()]
        return seen._replace(notes=(*told, *self.notes, *seen.notes))

    def _beside(self, server: VllmServer) -> JoinedPages:
        found = next(found for found in self.servers.values() if found.address == server.address)
        return JoinedPages(server, found.view)


def find(text: str, timeout: float) -> ServersOfNamespace:
    """The servers in [CONTEXT/]NAMESPACE[/SELECTOR]; Unreachable where there is none that could be judged."""
    place, cluster = cluster_of(text)
    api = Api(cluster, timeout)
    pods = api.pods(place.namespace, place.selector)
    possible = [(pod, candidate) for pod in pods for candidate in candidates(pod)]
    idle = [why for pod, candidate in possible if candidate.certain and (why := not_started(pod))]
    alive = [(pod, candidate) for pod, candidate in possible if not not_started(pod)]
    looks = [run_in_thread(partial(_look, api, place.namespace, *each)) for each in alive[:MOST_SERVERS]]
    found = [look.result() for look in looks]
    servers = {each.instance: each for each in found if isinstance(each, FoundServer)}
    reasons = list(dict.fromkeys([*idle, *(each for each in found if isinstance(each, str) and each)]))
    if not servers:
        raise Unreachable(_none(place, pods, reasons))
    if len(pods) >= MOST_PODS:
        reasons.append(f"only the first {len(pods):,} pods were looked at: name a selector")
    if len(alive) > MOST_SERVERS:
        reasons.append(f"only the first {MOST_SERVERS} of {len(alive)} containers were looked at: name a selector")
    return ServersOfNamespace(api.client, servers, tuple(reasons))


def _none(place: Place, pods: Sequence[Pod], reasons: Sequence[str]) -> str:
    where = f"namespace {place.namespace}" + (f" with {printable(place.selector, 80)}" if place.selector else "")
    if reasons:
        return f"no vLLM server in {where} can be judged: {listed(list(reasons), separator='; ')}"
    seen = f"none of {plural(len(pods), 'pod')} is a vLLM server" if pods else "there is no pod"
    return f"{seen} in {where}"


def _look(api: Api, namespace: str, pod: Pod, candidate: Candidate) -> FoundServer | str:
    """The server; or why it cannot be judged, "" for what is none."""
    shown, status = f"pod {printable(candidate.pod)}", container_status(pod, candidate.container)
    try:
        port = _port(api, namespace, candidate)
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
    events = [] if status.ready and not status.restarts else api.events(namespace, candidate.pod)
    return FoundServer(
        f"{candidate.pod}:{port}",
        _address(api, namespace, candidate, port),
        PodView(log, candidate.command),
        f"container {printable(candidate.container)} of {shown}",
        tuple(failed_probes(pod, candidate.container, events)),
    )


def _port(api: Api, namespace: str, candidate: Candidate) -> int:
    """The first port with vLLM's metrics; Failure where none has, or the answer of one does not come."""
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
