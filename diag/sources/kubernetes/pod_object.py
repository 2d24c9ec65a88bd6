"""A pod as the API server describes it: which containers may be vLLM servers, at which ports, and in what state.

vLLM's own images and commands are certain. KServe, production-stack, llm-d, LeaderWorkerSet and Ray are recognised by
their labels: a container of theirs, or any with a sign of vLLM, is a server if one of its ports has vLLM's metrics.
"""

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from diag.core.formatting import listed, moment, plural, printable, resource_quantity
from diag.core.metric_families import Sample
from diag.log.trackers import STEADY_SECONDS
from diag.vllm.command import redaction
from diag.vllm.command.free_text import hidden
from diag.vllm.command.shell import HIDDEN
from diag.vllm.command.shown import shown

Pod = Mapping[str, Any]
DEFAULT_PORTS = (8000, 8080)
"""vLLM's port, and that of KServe's runtimes and Ray's metrics."""
EXPORTER_PORT = 9400
MOST_PORTS = 6
"""Ports to try for one container."""
_SERVES = re.compile(r"\bvllm\s+serve\b|\bvllm\.entrypoints\b|api_server\.py\b|\bhuggingfaceserver\b")
_OTHER = re.compile(
    r"router|scheduler|gateway|proxy|routing|sidecar|operator|controller|exporter|bench|epp\b|webui|cache-server"
)
"""Words in the names of images that work beside vLLM, such as its router."""
_WORKS = re.compile(r"\bbench|\bsleep\b|\bcurl\b|\bdownload\b")
"""Commands of a container that uses vLLM's image but does not serve."""
_LABELS = re.compile(
    r"^(?:serving\.kserve\.io/inferenceservice|ray\.io/cluster|llm-d\.ai/.+|leaderworkerset\.sigs\.k8s\.io/name"
    r"|helm-release-name)="
    r"|^(?:app|app\.kubernetes\.io/(?:name|component|part-of)|component|environment)=.*(?:vllm|serving-engine)"
)
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
"""A name that Kubernetes gives a pod."""
_PORT = re.compile(r"(?:^|\s)--port[= ](\d{1,5})(?=\s|$)")
_TLS = re.compile(r"(?:^|\s)--ssl-(?:keyfile|certfile)\b")
_EXPORTER = re.compile(r"\bdiag(?: exporter\b| ?$)")
_PAGES = ("metrics", "vllm", "http", "api", "serving", "user-port")
"""Names of ports, the likeliest to have the page first."""
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
OOM_KILLED = "OOMKilled"
FIRST_BACK_OFF, LONGEST_BACK_OFF = 10.0, 300.0
"""Seconds that the kubelet waits before the second restart in a row; each further one doubles it, up to the longest."""
_TERMINATED = 143
"""Exit status of a process that was asked to stop (SIGTERM)."""
_SIGNALLED = 128
_BACK_OFF = re.compile(r"back-off (?:(\d{1,4})m)?(\d{1,6})s restarting", re.ASCII)
_LARGEST = 2**31
MOST_ODD = 8
"""Odd fields that are named."""
LAST_MOMENT = 2e11
"""Unix seconds from which on no moment can be written."""
_SECONDS = ("initialDelaySeconds", "periodSeconds", "timeoutSeconds")
_PROBE = {
    "httpGet": {"path": str, "port": (int, str)},
    **dict.fromkeys((*_SECONDS, "failureThreshold", "successThreshold"), int),
}
_CONTAINER = {
    **{"name": str, "image": str, "command": [str], "args": [str], "env": [{"name": str, "value": str}]},
    "ports": [{"name": str, "containerPort": int, "protocol": str}],
    "resources": {"limits": {str: str}, "requests": {str: str}},
    **dict.fromkeys(PROBES, _PROBE),
}
_STATE = {
    "terminated": {"startedAt": str, "finishedAt": str, "exitCode": int, "reason": str, "message": str},
    "waiting": {"reason": str, "message": str},
    "running": {"startedAt": str},
}
_STATUS = {
    **{"name": str, "image": str, "imageID": str, "state": _STATE, "lastState": _STATE},
    **{"restartCount": int, "ready": bool},
}
_CONDITION = {"type": str, "status": str, "reason": str, "message": str, "lastTransitionTime": str}
POD = {
    "metadata": {"name": str, "labels": {str: str}, "annotations": {str: str}, "deletionTimestamp": str},
    "spec": {"nodeName": str, "shareProcessNamespace": bool, "containers": [_CONTAINER]},
    "status": {
        **{"phase": str, "reason": str, "message": str, "conditions": [_CONDITION]},
        **{"containerStatuses": [_STATUS], "initContainerStatuses": [_STATUS]},
    },
}
"""The fields of a pod that are read, and their types; a mapping with the key `str` takes any names."""
EVENT = {
    **{"type": str, "reason": str, "message": str, "count": int, "involvedObject": {"fieldPath": str}},
    **{"firstTimestamp": str, "lastTimestamp": str, "eventTime": str},
}
_UNREADABLE = ("args", "command", "env")
"""Fields of a container that are replaced: only harmless words and values are shown."""


def conforming(value: Any, shape: Any, odd: set[str], place: str = "") -> Any:
    """Return the fields of an object that have the types of its shape, or None; `odd` gets the places of the others."""
    if isinstance(shape, dict) and isinstance(value, dict):
        fields = ((key, part, shape.get(key, shape.get(str))) for key, part in value.items())
        parts = {key: conforming(part, kind, odd, f"{place}.{key}") for key, part, kind in fields if kind}
        return {key: part for key, part in parts.items() if part is not None}
    if isinstance(shape, list) and isinstance(value, list):
        return [part for item in value if (part := conforming(item, shape[0], odd, place)) is not None]
    kinds = shape if isinstance(shape, tuple) else (shape,)
    if type(value) in kinds and not (type(value) is int and abs(value) >= _LARGEST):
        return value
    if value is not None and len(odd) < MOST_ODD:
        odd.add(place.lstrip("."))
    return None


class Candidate(NamedTuple):
    """A container that is or may be a vLLM server: the ports to try in order; `command` is "" for its image's own."""

    pod: str
    container: str
    ports: tuple[int, ...]
    scheme: str
    certain: bool
    command: str


def candidates(pod: Pod) -> Iterator[Candidate]:
    """Yield the containers of a pod that may be vLLM servers; in a LeaderWorkerSet only the leader has the API."""
    labels = part(part(pod, "metadata"), "labels")
    is_named = _NAME.fullmatch(name(pod))  # any other name would be another path at the API server
    if not is_named or labels.get("leaderworkerset.sigs.k8s.io/worker-index", "0") != "0":
        return
    exporter = any(map(_is_exporter, containers(pod)))
    labelled = any(_LABELS.match(f"{key}={value}") for key, value in labels.items())
    for container in containers(pod):
        certain, image = is_vllm(container), _image(container)
        set_for_vllm = any(str(entry.get("name", "")).startswith("VLLM_") for entry in container.get("env") or [])
        possible = labelled or set_for_vllm or "vllm" in image or "vllm" in str(container.get("name", ""))
        if certain or (possible and not _OTHER.search(image)):
            # the ports of the command, then declared, probed and annotated ones, then the defaults
            declared = [port for port in container.get("ports") or [] if port.get("protocol", "TCP") == "TCP"]
            names = [str(port.get("name", "")) for port in declared]
            ranks = [next((at for at, word in enumerate(_PAGES) if word in text), len(_PAGES)) for text in names]
            in_order = [declared[place] for place in sorted(range(len(declared)), key=ranks.__getitem__)]
            probed = [part(part(container, probe), "httpGet").get("port") for probe in PROBES]
            annotated = str(part(part(pod, "metadata"), "annotations").get("prometheus.io/port", ""))
            ports = [int(port) for port in _PORT.findall(_words(container))]
            ports += [int(port.get("containerPort", 0)) for port in in_order]
            ports += [port for port in probed if isinstance(port, int)]
            ports += [int(annotated)] if re.fullmatch(r"[0-9]{1,5}", annotated) else []
            valid = [port for port in dict.fromkeys([*ports, *DEFAULT_PORTS]) if 0 < port < 2**16]
            yield Candidate(
                pod=name(pod),
                container=str(container.get("name", "")),
                ports=(*([EXPORTER_PORT] if exporter and certain else []), *valid[:MOST_PORTS]),
                scheme="https" if _TLS.search(_words(container)) else "http",
                certain=certain,
                command=command(container),
            )


def is_vllm(container: Mapping[str, Any]) -> bool:
    """Return True if the command serves with vLLM, or the image is vLLM's and the command does nothing else."""
    words, image = _words(container), _image(container)
    if _is_exporter(container) or _OTHER.search(image):
        return False
    return bool(_SERVES.search(words)) or ("vllm" in image and not _WORKS.search(words))


def _is_exporter(container: Mapping[str, Any]) -> bool:
    """Return True for diag's own exporter, which is also the default command of its image."""
    return bool(_EXPORTER.search(f"{_image(container)} {_words(container)}"))


def command(container: Mapping[str, Any]) -> str:
    """Return the command that starts vLLM, quoted for a shell; "" if the image defines it."""
    words = [str(word) for key in ("command", "args") for word in container.get(key) or []]
    if not container.get("command") and "vllm" in _image(container):
        words = ["vllm", *([] if words[:1] == ["serve"] else ["serve"]), *words]
    return shlex.join(words) if _SERVES.search(" ".join(words)) else ""


def _words(container: Mapping[str, Any]) -> str:
    parts: Sequence[Any] = [*(container.get("command") or []), *(container.get("args") or [])]
    return " ".join(map(str, parts))


def _image(container: Mapping[str, Any]) -> str:
    """Return the image's repository, without registry, tag and digest."""
    repository = str(container.get("image", "")).partition("@")[0]
    host, slash, path = repository.partition("/")
    path = path if slash and ("." in host or ":" in host or host == "localhost") else repository
    return path.partition(":")[0].lower()


def name(pod: Pod) -> str:
    return str(part(pod, "metadata").get("name", ""))


def part(node: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping under a key; empty if there is none."""
    inside = node.get(key)
    return inside if isinstance(inside, dict) else {}


def containers(pod: Pod) -> Sequence[Mapping[str, Any]]:
    """Return the containers in the spec of a pod."""
    return part(pod, "spec").get("containers") or ()


class Ended(NamedTuple):
    """The end of a container's run; `at` is in unix seconds, 0 if the kubelet does not report it."""

    at: float
    status: int
    reason: str

    @property
    def by_signal(self) -> bool:
        """Return True if a signal other than SIGTERM ended the run."""
        return self.reason == OOM_KILLED or (self.status > _SIGNALLED and self.status != _TERMINATED)


class ContainerStatus(NamedTuple):
    """The state of a container; `last` is the latest run that has ended, None during the first one.

    ready: as the kubelet reports it, which is meaningful only if a readiness probe exists (`probed`).
    """

    restarts: int = 0
    waits: str = ""
    message: str = ""
    running_since: float = 0.0
    ready: bool = False
    probed: bool = False
    last: Ended | None = None
    memory_limit: float | None = None
    cpu_limit: float | None = None

    def crashes_in_a_row(self, now: float) -> int:
        """Return a lower bound for the crashes since the container last ran for ten minutes.

        The kubelet counts all restarts, but its back-off shows how many came in a row: 10 s before the second one.
        """
        ended = self.last
        if ended is None or (self.running_since and now - self.running_since >= STEADY_SECONDS):
            return 0
        pause = _BACK_OFF.search(self.message)
        wait = int(pause[1] or 0) * 60.0 + int(pause[2]) if pause else 0.0
        if not wait and self.running_since and ended.at:
            wait = self.running_since - ended.at
        if wait < FIRST_BACK_OFF:
            return int(ended.status not in (0, _TERMINATED))
        in_a_row = 2 + math.floor(math.log2(min(wait, LONGEST_BACK_OFF) / FIRST_BACK_OFF) + 0.1)
        return min(in_a_row, self.restarts + (not self.running_since))

    def samples(self) -> Iterator[Sample]:
        """Yield the samples that an exporter on the container's host would publish."""
        killed = self.last.at if self.last and self.last.reason == OOM_KILLED else 0.0
        yield "diag_host_last_oom_kill_timestamp_seconds", (), killed
        if self.memory_limit:
            yield "diag_host_memory_limit_bytes", (), self.memory_limit
        if self.cpu_limit:
            yield "diag_host_cpu_limit_cores", (), self.cpu_limit


def container_status(pod: Pod, container: str) -> ContainerStatus:
    """Read the state of a container from its pod."""
    status = named(part(pod, "status").get("containerStatuses"), container)
    state = part(status, "state")
    ended = part(state, "terminated") or part(part(status, "lastState"), "terminated")
    run = Ended(_time(ended.get("finishedAt")), int(ended.get("exitCode") or 0), str(ended.get("reason", "")))
    spec = named(containers(pod), container)
    limits = part(part(spec, "resources"), "limits")
    waiting = part(state, "waiting")
    return ContainerStatus(
        restarts=int(status.get("restartCount") or 0),
        waits=str(waiting.get("reason", "")),
        message=str(waiting.get("message", "")),
        running_since=_time(part(state, "running").get("startedAt")),
        ready=status.get("ready") is True,
        probed="readinessProbe" in spec,
        last=run if ended else None,
        memory_limit=resource_quantity(str(limits.get("memory"))),
        cpu_limit=resource_quantity(str(limits.get("cpu"))),
    )


def not_started(pod: Pod) -> str:
    """Return why no container of a pod has run yet or will run again, as a sentence; "" otherwise."""
    status, of_pod = part(pod, "status"), f"pod {printable(name(pod))}"
    if part(pod, "metadata").get("deletionTimestamp"):
        return f"{of_pod} is being deleted"
    if status.get("phase") in ("Succeeded", "Failed"):
        why = ": ".join(filter(None, (status.get("reason"), status.get("message"))))
        return f"{of_pod} has ended ({printable(hidden(why or status['phase']), 200)})"
    if status.get("phase") != "Pending":
        return ""
    states = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    reasons = [part(part(state, "state"), "waiting") for state in states]
    reasons += [condition for condition in status.get("conditions") or [] if condition.get("status") == "False"]
    complete = (f"{why['reason']}, {why['message']}" for why in reasons if why.get("reason") and why.get("message"))
    why = next(complete, "its containers are being created")
    return f"{of_pod} is pending: {printable(hidden(why), 200)}"


def note(who: str, status: ContainerStatus, probes: Sequence[str] = ()) -> Iterator[str]:
    """Yield at most one sentence about a container that was restarted, is waiting or failed probes."""
    parts = []
    if status.restarts and status.last:
        at = f"the last at {moment(status.last.at)}, " if status.last.at else ""
        how = f"{at}{status.last.reason or 'Error'}, exit status {status.last.status}"
        parts.append(f"{plural(status.restarts, 'restart')} ({printable(how)})")
    if status.waits:
        why = hidden(status.message.partition(" restarting failed")[0])
        parts.append(printable(status.waits) + (f" ({printable(why, 200)})" if why else ""))
    if parts or probes:
        yield f"{who}: {', '.join([*parts, *probes])}"


def failed_probes(pod: Pod, container: str, events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the failures of the probes after which the kubelet restarts a container, counted from its events."""
    spec, field = named(containers(pod), container), f"spec.containers{{{container}}}"
    own_events = [event for event in events if part(event, "involvedObject").get("fieldPath") == field]
    for probe in ("startupProbe", "livenessProbe"):
        kind = probe.removesuffix("Probe")
        start = f"{kind} probe failed"
        failed = [event for event in own_events if str(event.get("message", "")).lower().startswith(start)]
        if failed:
            times, settings = sum(int(event.get("count") or 1) for event in failed), part(spec, probe)
            allowed = int(settings.get("periodSeconds", 10)) * int(settings.get("failureThreshold", 3))
            yield f"its {probe} failed {plural(times, 'time')}: the kubelet restarts it after {allowed} s of that"


def _time(text: object) -> float:
    try:
        at = datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError):
        return 0.0
    return at if 0 < at < LAST_MOMENT else 0.0


def named(items: Sequence[Mapping[str, Any]] | None, name: str) -> Mapping[str, Any]:
    """Return the first item with a name; empty if there is none."""
    return next((item for item in items or () if item.get("name") == name), {})


def facts(pod: Pod) -> dict[str, Any]:
    """Return what a pod runs and its status; of its words and values only the harmless ones."""
    metadata, spec = part(pod, "metadata"), part(pod, "spec")
    return {
        "pod": metadata.get("name", ""),
        "deleted_at": metadata.get("deletionTimestamp"),
        "node": spec.get("nodeName", ""),
        "share_process_namespace": spec.get("shareProcessNamespace", False),
        "containers": [
            {
                **{field: value for field, value in container.items() if field not in _UNREADABLE},
                "launch": shown(command(container)),
                "env": {
                    entry["name"]: redaction.variable(entry["name"], entry.get("value", "")) or HIDDEN
                    for entry in container.get("env") or ()
                    if "name" in entry
                },
            }
            for container in containers(pod)
        ],
        "status": part(pod, "status"),
    }


def summary(pod: Pod, container: str) -> str:
    """Return image, node and limits of a container in one line."""
    spec = named(containers(pod), container)
    status = named(part(pod, "status").get("containerStatuses"), container)
    digest = str(status.get("imageID", "")).rpartition("@")[2]
    limits = part(part(spec, "resources"), "limits")
    parts = [
        str(spec.get("image", "")) + (f" ({digest})" if digest else ""),
        f"node {part(pod, 'spec')['nodeName']}" if part(pod, "spec").get("nodeName") else "",
        f"limits {listed([f'{name} {amount}' for name, amount in limits.items()], most=8)}" if limits else "",
    ]
    return hidden(printable(", ".join(filter(None, parts)), 400))


def without_secrets(tree: Any) -> Any:
    """Return an object of the API server whose texts hold no secrets."""
    if isinstance(tree, Mapping):
        return {hidden(name): without_secrets(value) for name, value in tree.items()}
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return [without_secrets(item) for item in tree]
    return hidden(tree) if isinstance(tree, str) else tree
