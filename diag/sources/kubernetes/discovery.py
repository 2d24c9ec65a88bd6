"""Which containers are vLLM servers, by what their pods say of them, and at which ports their pages may be.

vLLM's own images and commands are certain. KServe, production-stack, llm-d, LeaderWorkerSet and Ray are known by their
labels: a container of theirs, or any with a sign of vLLM, is one where a port of it has vLLM's metrics.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Pod = Mapping[str, Any]
DEFAULT_PORTS = (8000, 8080)
"""Of vLLM, and of KServe's runtimes and Ray's metrics."""
EXPORTER_PORT = 9400
MOST_PORTS = 6
"""Tried of one container."""
_SERVES = re.compile(r"\bvllm\s+serve\b|\bvllm\.entrypoints\b|api_server\.py\b|\bhuggingfaceserver\b")
_OTHER = re.compile(
    r"router|scheduler|gateway|proxy|routing|sidecar|operator|controller|exporter|bench|epp\b|webui|cache-server"
)
"""What the names of images beside vLLM have in them, by which they are told from its own."""
_WORKS = re.compile(r"\bbench|\bsleep\b|\bcurl\b|\bdownload\b")
"""What a container of vLLM's image does beside serving."""
_LABELS = re.compile(
    r"^(?:serving\.kserve\.io/inferenceservice|ray\.io/cluster|llm-d\.ai/.+|leaderworkerset\.sigs\.k8s\.io/name"
    r"|helm-release-name)="
    r"|^(?:app|app\.kubernetes\.io/(?:name|component|part-of)|component|environment)=.*(?:vllm|serving-engine)"
)
_PORT = re.compile(r"(?:^|\s)--port[= ](\d{1,5})(?=\s|$)")
_TLS = re.compile(r"(?:^|\s)--ssl-(?:keyfile|certfile)\b")
_EXPORTER = re.compile(r"\bdiag(?: exporter\b| ?$)")
_PAGES = ("metrics", "vllm", "http", "api", "serving", "user-port")
"""Names of ports, those first that are likelier to have the page."""
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


class Candidate(NamedTuple):
    """A container that is, or may be, a vLLM server: the ports to try in turn, and its command ("" if its image's)."""

    pod: str
    container: str
    ports: tuple[int, ...]
    scheme: str
    certain: bool
    command: str


def candidates(pod: Pod) -> Iterator[Candidate]:
    """The containers of a pod that may be vLLM servers; none of a rank whose group only its leader speaks for."""
    if _labels(pod).get("leaderworkerset.sigs.k8s.io/worker-index", "0") != "0":
        return
    exporter = any(map(_is_exporter, containers(pod)))
    for container in containers(pod):
        certain = is_vllm(container)
        if certain or (_may_be(pod, container) and not _OTHER.search(_image(container))):
            ports = _ports(pod, container)
            yield Candidate(
                pod=name(pod),
                container=str(container.get("name", "")),
                ports=((EXPORTER_PORT,) if exporter and certain else ()) + ports,
                scheme="https" if _TLS.search(_words(container)) else "http",
                certain=certain,
                command=command(container),
            )


def is_vllm(container: Mapping[str, Any]) -> bool:
    """Whether its command serves with vLLM, or its image is vLLM's and does nothing else."""
    words, image = _words(container), _image(container)
    if _is_exporter(container) or _OTHER.search(image):
        return False
    return bool(_SERVES.search(words)) or ("vllm" in image and not _WORKS.search(words))


def _is_exporter(container: Mapping[str, Any]) -> bool:
    """Whether it is diag's own exporter, which its image starts by default."""
    return bool(_EXPORTER.search(f"{_image(container)} {_words(container)}"))


def command(container: Mapping[str, Any]) -> str:
    """What starts vLLM there, as a shell would run it; "" where its image says that."""
    words = [str(word) for key in ("command", "args") for word in container.get(key) or []]
    if not container.get("command") and "vllm" in _image(container):
        words = ["vllm", *([] if words[:1] == ["serve"] else ["serve"]), *words]
    return shlex.join(words) if _SERVES.search(" ".join(words)) else ""


def _may_be(pod: Pod, container: Mapping[str, Any]) -> bool:
    labelled = any(_LABELS.match(f"{key}={value}") for key, value in _labels(pod).items())
    set_for_vllm = any(str(entry.get("name", "")).startswith("VLLM_") for entry in container.get("env") or [])
    return labelled or set_for_vllm or "vllm" in _image(container) or "vllm" in str(container.get("name", ""))


def _ports(pod: Pod, container: Mapping[str, Any]) -> tuple[int, ...]:
    """That of the command first, then those that the container declares and that are probed, then the usual ones."""
    said = [int(port) for port in _PORT.findall(_words(container))]
    declared = [port for port in container.get("ports") or [] if port.get("protocol", "TCP") == "TCP"]
    declared.sort(key=lambda port: _rank(str(port.get("name", ""))))
    probed = [part(part(container, probe), "httpGet").get("port") for probe in PROBES]
    annotated = str(part(part(pod, "metadata"), "annotations").get("prometheus.io/port", ""))
    found = [*said, *(int(port.get("containerPort", 0)) for port in declared)]
    found += [port for port in probed if isinstance(port, int)]
    found += [int(annotated)] if annotated.isascii() and annotated.isdecimal() else []
    return tuple(port for port in dict.fromkeys([*found, *DEFAULT_PORTS]) if 0 < port < 2**16)[:MOST_PORTS]


def _rank(port: str) -> int:
    return next((rank for rank, word in enumerate(_PAGES) if word in port), len(_PAGES))


def _words(container: Mapping[str, Any]) -> str:
    parts: Sequence[Any] = [*(container.get("command") or []), *(container.get("args") or [])]
    return " ".join(map(str, parts))


def _image(container: Mapping[str, Any]) -> str:
    """Repository of the image, without registry, tag and digest."""
    repository = str(container.get("image", "")).partition("@")[0]
    host, slash, path = repository.partition("/")
    path = path if slash and ("." in host or ":" in host or host == "localhost") else repository
    return path.partition(":")[0].lower()


def name(pod: Pod) -> str:
    """Its name."""
    return str(part(pod, "metadata").get("name", ""))


def part(node: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """What stands there, empty where nothing does."""
    found = node.get(key)
    return found if isinstance(found, dict) else {}


def containers(pod: Pod) -> Sequence[Mapping[str, Any]]:
    """Its containers as they should be."""
    return part(pod, "spec").get("containers") or ()


def _labels(pod: Pod) -> Mapping[str, str]:
    return part(part(pod, "metadata"), "labels")
