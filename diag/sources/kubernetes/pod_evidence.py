"""Evidence about the pod of a server, to be handed over: launch, status and events without secrets, and the logs.

The API server holds all of it only for a while: events for an hour, the log of the previous run until the next restart.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from diag.core.formatting import listed, printable
from diag.http.failure import Failure
from diag.sources.kubernetes.cluster import Api
from diag.sources.kubernetes.pod_object import Pod, command, container_status, containers, named, part
from diag.sources.kubernetes.servers import LAST_LINES, FoundServer, ServersOfNamespace
from diag.vllm.command import redaction
from diag.vllm.command.free_text import hidden
from diag.vllm.command.shell import HIDDEN
from diag.vllm.command.shown import shown

MOST_PODS_KEPT, MOST_EVENTS = 16, 200
"""Pods whose evidence is read, at most, and the latest events of each."""
_MOST_NAME = 80
"""Characters of a file's name: a pod's name has up to 253, of which the end tells it apart."""
_UNREADABLE = ("args", "command", "env")
"""Fields of a container that are replaced: only harmless words and values are shown."""


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
    for found in list(servers.servers.values())[:MOST_PODS_KEPT]:
        yield _gather(servers.api, found, first_bytes)


def _gather(api: Api, found: FoundServer, first_bytes: int) -> PodEvidence:
    _, namespace, name, container = found.container
    pod: Pod = {}
    events: list[Mapping[str, Any]] = []
    logs: dict[str, LogEnds] = {}
    missing = []
    try:
        pod = api.pod(namespace, name)
    except Failure as error:
        missing.append(f"status of {found.shown}: {error}")
    try:
        events = sorted(api.events(namespace, name), key=_last_seen)[-MOST_EVENTS:]
    except Failure as error:
        missing.append(f"events of {found.shown}: {error}")
    runs = {"log": {}, **({"previous.log": {"previous": "true"}} if container_status(pod, container).restarts else {})}
    for run, query in runs.items():
        try:
            logs[run] = _ends(api, namespace, name, {"container": container, **query}, first_bytes)
        except Failure as error:
            missing.append(f"{run.replace('.', ' ')} of {found.shown}: {error}")
    facts = _without_secrets({"namespace": namespace, "container": container, **_facts(pod), "events": events})
    file_name = found.instance.replace(":", "_")[-_MOST_NAME:]
    return PodEvidence(file_name, found.shown, facts, hidden(_summary(pod, container)), logs, tuple(missing))


def _last_seen(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def _ends(api: Api, namespace: str, pod: str, query: Mapping[str, str], first_bytes: int) -> LogEnds:
    """Read both ends of a log; lines that the end repeats are left out."""
    first = api.log(namespace, pod, {**query, "limitBytes": str(first_bytes)})
    if len(first) < first_bytes:
        return LogEnds(first)
    first = first[: first.rfind(b"\n") + 1]  # the limit cuts a line
    seen = first.rstrip(b"\n").rpartition(b"\n")[2].partition(b" ")[0]
    last = api.log(namespace, pod, {**query, "tailLines": str(LAST_LINES)}).splitlines(keepends=True)
    new = b"".join(line for line in last if line.partition(b" ")[0] > seen)
    return LogEnds(first, new) if len(new) == sum(map(len, last)) else LogEnds(first + new)


def _facts(pod: Pod) -> dict[str, Any]:
    """Return what a pod runs and its status; of its words and values only the harmless ones."""
    metadata, spec = part(pod, "metadata"), part(pod, "spec")
    return {
        "pod": metadata.get("name", ""),
        "deleted_at": metadata.get("deletionTimestamp"),
        "node": spec.get("nodeName", ""),
        "share_process_namespace": spec.get("shareProcessNamespace", False),
        "containers": [
            {
                **{field: value for field, value in each.items() if field not in _UNREADABLE},
                "launch": shown(command(each)),
                "env": {entry["name"]: _harmless(entry) for entry in each.get("env") or () if "name" in entry},
            }
            for each in containers(pod)
        ],
        "status": part(pod, "status"),
    }


def _harmless(entry: Mapping[str, str]) -> str:
    return redaction.variable(entry["name"], entry.get("value", "")) or HIDDEN


def _without_secrets(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {hidden(name): _without_secrets(value) for name, value in tree.items()}
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return [_without_secrets(each) for each in tree]
    return hidden(tree) if isinstance(tree, str) else tree


def _summary(pod: Pod, container: str) -> str:
    """Return image, node and limits of a container in one line."""
    spec = next(iter(named(containers(pod), container)), {})
    status = next(iter(named(part(pod, "status").get("containerStatuses"), container)), {})
    digest = str(status.get("imageID", "")).rpartition("@")[2]
    limits = part(part(spec, "resources"), "limits")
    parts = [
        str(spec.get("image", "")) + (f" ({digest})" if digest else ""),
        f"node {part(pod, 'spec')['nodeName']}" if part(pod, "spec").get("nodeName") else "",
        f"limits {listed([f'{name} {amount}' for name, amount in limits.items()], most=8)}" if limits else "",
    ]
    return printable(", ".join(filter(None, parts)), 400)
