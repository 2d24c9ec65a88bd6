"""The facts of a Kubernetes pod that a launch depends on: probes, shared memory, GPUs, memory and its autoscaler."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_SHM = "/dev/shm"
_GPUS = ("nvidia.com/gpu", "amd.com/gpu")
_GRACE_SECONDS = 30.0
"""The default of Kubernetes for terminationGracePeriodSeconds."""
_PERIOD, _FAILURES = 10.0, 3.0
"""The defaults of Kubernetes for a probe's periodSeconds and failureThreshold."""
_URL = re.compile(r"https?://[^\s/\"']{1,200}(/\w{1,40})")
_QUANTITY = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([kKMGTP]i?|)")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


class PodProbe(NamedTuple):
    """A probe of a container: the HTTP path that it or its command reads, "" for none, and how long it may fail."""

    path: str
    delay: float
    period: float
    failures: float

    @property
    def seconds(self) -> float:
        """Seconds from the start of the container until the kubelet kills a server that does not answer."""
        return self.delay + self.period * self.failures


class Pod(NamedTuple):
    """A pod that serves: None for what the manifest does not show. `grace` is terminationGracePeriodSeconds.

    `pre_stop` is the sleep of the container's preStop hook; `shared_memory` is True for a volume at /dev/shm that is
    larger than the default, or the host's IPC; `gpus` and `memory` (bytes) are the container's limits. `is_whole` is
    False if a chart or an operator adds to what the manifest shows. `metrics` are the names that an autoscaler of
    the same text reads.
    """

    startup: PodProbe | None = None
    liveness: PodProbe | None = None
    grace: float | None = _GRACE_SECONDS
    pre_stop: float = 0
    shared_memory: bool = False
    gpus: int | None = None
    memory: float | None = None
    is_whole: bool = True
    metrics: tuple[str, ...] = ()


def read_pod(spec: Mapping[str, Any], container: Mapping[str, Any], metrics: Sequence[str], is_whole: bool) -> Pod:
    """Read a pod's spec and one of its containers."""
    limits = inner(container, "resources", "limits")
    requests = inner(container, "resources", "requests")
    gpus = next((count for name in _GPUS if (count := _number(limits.get(name, requests.get(name)))) is not None), None)
    grace = _number(spec.get("terminationGracePeriodSeconds"))
    return Pod(
        startup=_probe(container.get("startupProbe")),
        liveness=_probe(container.get("livenessProbe")),
        grace=grace if grace is not None else (_GRACE_SECONDS if is_whole else None),
        pre_stop=_pre_stop(inner(container, "lifecycle", "preStop")),
        shared_memory=_has_shared_memory(spec, container),
        gpus=int(gpus) if gpus is not None else None,
        memory=quantity(limits.get("memory")),
        is_whole=is_whole,
        metrics=tuple(metrics),
    )


def inner(node: Any, *keys: str) -> Mapping[str, Any]:
    """Return the mapping under nested keys; {} if there is none."""
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def items(node: Any, key: str) -> list[Mapping[str, Any]]:
    """Return the mappings in the list under a key."""
    found = node.get(key) if isinstance(node, dict) else None
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def quantity(value: Any) -> float | None:
    """Read a quantity of Kubernetes, such as 64Gi, in bytes."""
    found = _QUANTITY.fullmatch(str(value).strip()) if isinstance(value, str | int | float) else None
    if not found:
        return None
    number, unit = found.groups()
    return float(number) * (1024.0 if unit.endswith("i") else 1000.0) ** _POWERS[unit[:1].lower()]


def _number(value: Any) -> float | None:
    found = _QUANTITY.fullmatch(str(value).strip()) if value is not None and not isinstance(value, bool) else None
    return float(found[1]) if found and not found[2] else None


def _probe(probe: Any) -> PodProbe | None:
    if not isinstance(probe, dict):
        return None
    command = inner(probe, "exec").get("command")
    url = _URL.search(" ".join(map(str, command))) if isinstance(command, list) else None  # sh -c 'curl http://...'
    path = url[1] if url else inner(probe, "httpGet").get("path")
    delay, period, failures = map(_number, map(probe.get, ("initialDelaySeconds", "periodSeconds", "failureThreshold")))
    return PodProbe(str(path or ""), delay or 0, period or _PERIOD, failures or _FAILURES)


def _pre_stop(hook: Mapping[str, Any]) -> float:
    """Return the seconds that a preStop hook sleeps; 0 if it does something else."""
    seconds = _number(inner(hook, "sleep").get("seconds"))
    command = inner(hook, "exec").get("command")
    words = " ".join(map(str, command)) if isinstance(command, list) else ""
    found = re.search(r"\bsleep (\d{1,6})\b", words)
    return seconds or (float(found[1]) if found else 0)


def _has_shared_memory(spec: Mapping[str, Any], container: Mapping[str, Any]) -> bool:
    """Return True if a volume is mounted at /dev/shm; its name may be a template's, its size anything."""
    mounts = [mount.get("mountPath") for mount in items(container, "volumeMounts")]
    return bool(spec.get("hostIPC")) or any(str(path).rstrip("/") == _SHM for path in mounts)


def scaled_on(documents: Sequence[Any]) -> list[str]:
    """Return the metrics and queries that the autoscalers in these documents read."""
    found: list[str] = []
    for document in documents:
        kind = document.get("kind") if isinstance(document, dict) else None
        if kind == "HorizontalPodAutoscaler":
            for metric in items(inner(document, "spec"), "metrics"):
                names = [inner(metric, type_, "metric").get("name") for type_ in ("pods", "object", "external")]
                found += [name for name in names if isinstance(name, str)]
        elif kind == "ScaledObject":
            for trigger in items(inner(document, "spec"), "triggers"):
                if trigger.get("type") == "prometheus":
                    query = inner(trigger, "metadata").get("query")
                    found += [query] if isinstance(query, str) else []
    return found
