"""A Kubernetes node that Prometheus scrapes: vLLM servers in pods, cAdvisor in the kubelet, and kube-state-metrics.

The pages of the two exporters have the names, labels and time stamps of cAdvisor v0.52 and kube-state-metrics v2.17. A
pod is what happens in it, by the seconds since the scene began.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from support.bad_servers import Reply, Request
from support.paths import RECORDINGS
from support.timelines import TIMES, Key, Series, timeline

from diag.sources.recording.reader import Replay, read_pages

GIB = 2.0**30
NEVER = 1e9
LATER = 100
"""How many times as late tokens are on the page of a server whose tokens are late."""


@dataclass(frozen=True)
class Pod:
    """Memory in GiB, and by how much it grows each second; `throttled` of the periods of 100 ms."""

    name: str
    limit: float = 32.0
    used: float = 8.0
    growth: float = 0.0
    cached: float = 2.0
    cache_growth: float = 0.0
    throttled: float = 0.0
    tokens_late: bool = False
    dies: float = NEVER
    killed: bool = False
    killed_before: bool = False
    restarts_every: float = NEVER

    def at(self, seconds: float) -> Self:
        """Return the page at that time."""
        memory, cache = self.used + self.growth * seconds, self.cached + self.cache_growth * seconds
        return replace(self, used=memory, cached=cache, killed=self.killed and seconds >= self.dies)

    def restarts(self, seconds: float) -> int:
        return 3 * self.killed_before + int(max(0.0, seconds - self.dies) // self.restarts_every)


class Node:
    """Answers each scrape: /NAME of a pod, /cadvisor, /kube-state-metrics."""

    def __init__(self, pods: list[Pod]) -> None:
        self.begin = time.time()
        self._pods = {pod.name: pod for pod in pods}
        self.exporters = {"cadvisor": self._cadvisor, "kube-state-metrics": self._kube}
        (pages,) = read_pages(RECORDINGS / "healthy").scrapes.values()
        self._vllm = Replay(pages, self.begin, 1.0, True)

    def __call__(self, request: Request) -> Reply | None:
        now, name = time.time(), request.path.strip("/")
        if exporter := self.exporters.get(name):
            return Reply("\n".join([*exporter(now - self.begin), ""]).encode())
        page = self._vllm.at(now).page.decode()
        pod = self._pods[name]
        return None if now - self.begin >= pod.dies else Reply((late(page) if pod.tokens_late else page).encode())

    def _cadvisor(self, seconds: float) -> Iterator[str]:
        families = [dict(cadvisor(pod.at(seconds), seconds)) for pod in self._pods.values()]
        for name in families[0]:
            yield from head(name)
            for pod, values in zip(self._pods.values(), families, strict=True):
                of_pod = f'namespace="llm",pod="{pod.name}"'
                own = f'container="vllm",id="/kubepods/{pod.name}/vllm",image="docker.io/vllm/vllm-openai",name="0f"'
                yield f"{name}{{{own},{of_pod}}} {values[name]} {round((self.begin + seconds) * 1000)}"
                whole = f'container="",id="/kubepods/{pod.name}",image="",name=""'
                yield f"{name}{{{whole},{of_pod}}} {values[name] + 64 * GIB}"

    def _kube(self, seconds: float) -> Iterator[str]:
        for name in KUBE:
            yield from head(name)
            for pod in self._pods.values():
                yield from (
                    f"{name}{{{labels}}} {value}" for labels, value in kube(name, pod.at(seconds), self.begin, seconds)
                )


def head(name: str) -> Iterator[str]:
    yield f"# HELP {name} {name.replace('_', ' ')}."
    yield f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"


def cadvisor(pod: Pod, seconds: float) -> Iterator[tuple[str, float]]:
    """The values of a container; kube-prometheus-stack drops what else there is of them."""
    yield "container_cpu_cfs_periods_total", 1e6 + round(10 * seconds)
    yield "container_cpu_cfs_throttled_periods_total", 2e5 + round(10 * seconds * pod.throttled)
    yield "container_memory_cache", pod.cached * GIB + GIB
    yield "container_memory_rss", (pod.used - 0.25) * GIB
    yield "container_memory_total_active_file_bytes", pod.cached * GIB
    yield "container_memory_total_inactive_file_bytes", GIB
    yield "container_memory_usage_bytes", (pod.used + pod.cached + 1) * GIB
    yield "container_memory_working_set_bytes", (pod.used + pod.cached) * GIB


KUBE = (
    "kube_pod_container_info",
    "kube_pod_container_resource_limits",
    "kube_pod_container_state_started",
    "kube_pod_container_status_last_terminated_reason",
    "kube_pod_container_status_restarts_total",
    "kube_pod_container_status_terminated_reason",
)


def kube(name: str, pod: Pod, begin: float, seconds: float) -> Iterator[tuple[str, float]]:
    """The labels and values of its series of one metric."""
    own = f'namespace="llm",pod="{pod.name}",uid="uid-{pod.name}",container="vllm"'
    restarts = pod.restarts(seconds)
    if name.endswith("_info"):
        yield f'{own},image_spec="vllm",image="vllm",image_id="vllm@sha256:0f",container_id="containerd://0f"', 1
    elif name.endswith("_limits"):
        yield f'{own},node="node-1",resource="memory",unit="byte"', pod.limit * GIB
        yield f'{own},node="node-1",resource="nvidia_com_gpu",unit="integer"', 1
    elif name.endswith("_started"):
        ago = seconds if not restarts or pod.killed_before else (seconds - pod.dies) % pod.restarts_every
        yield own, int(begin + seconds - ago) - (0 if restarts else 3600)
    elif name.endswith("_restarts_total"):
        yield own, restarts
    elif name.endswith("_last_terminated_reason") and restarts:
        yield f'{own},reason="{"OOMKilled" if pod.killed_before else "Error"}"', 1
    elif name.endswith("_status_terminated_reason") and pod.killed:
        yield f'{own},reason="OOMKilled"', 1


def late(page: str) -> str:
    """The page with its inter-token latencies so many times as long."""
    edge = re.compile(r'^(vllm:inter_token_latency_seconds_bucket\{.*le=")([^"+]+)(".*)$', re.MULTILINE)
    return edge.sub(lambda found: f"{found[1]}{LATER * float(found[2])}{found[3]}", page)


JOB = """
  - job_name: {name}
    honor_labels: {honor}
    metrics_path: /{name}
    static_configs: [{{targets: ["{target}"], labels: {{{labels}}}}}]"""


def scrape_config(target: str, pods: list[Pod], honor: str = "true") -> str:
    """Return the Prometheus Operator's scrape configuration; kube-state-metrics has labels too, hence honor_labels."""
    own = "namespace: monitoring, pod: ksm-0, container: ksm"
    exporters = {"cadvisor": "instance: node-1", "kube-state-metrics": f"instance: 'ksm-0:8080', {own}"}
    jobs = [JOB.format(name=name, honor=honor, target=target, labels=labels) for name, labels in exporters.items()]
    for pod in pods:
        labels = f'instance: "{pod.name}:8000", namespace: llm, pod: {pod.name}, container: vllm'
        jobs.append(JOB.format(name=pod.name, honor="false", target=target, labels=labels))
    return f"global: {{scrape_interval: 1s, scrape_timeout: 1s}}\nscrape_configs:{''.join(jobs)}\n"


SAMPLE = re.compile(r"([a-z_]+)\{(.*)\} (\S+)(?: \d+)?")


def timeline_of(pod: Pod) -> Series:
    """A healthy server in this pod, and what the exporters tell of it, for the rules: see timelines.py."""
    server = {"namespace": "llm", "pod": pod.name, "container": "vllm"}
    alive = pod.dies > TIMES
    series: Series = {}
    for key, values in timeline("healthy").items():
        labels = {**dict(key), **server}
        if pod.tokens_late and "inter_token_latency" in labels["__name__"] and "le" in labels:
            labels["le"] = f"{LATER * float(labels['le'])}" if labels["le"] != "+Inf" else "+Inf"
        gone = 0.0 if labels["__name__"] == "up" else np.nan
        series[frozenset(labels.items())] = np.where(alive, values, gone)
    return {**series, **_exporters(pod)}


def _exporters(pod: Pod) -> Series:
    node = Node([pod])
    node.begin = 0.0
    series: dict[Key, dict[int, float]] = {}
    for place, seconds in enumerate(TIMES):
        lines = [line for exporter in node.exporters.values() for line in exporter(float(seconds))]
        for name, labels, value in (found.groups() for found in map(SAMPLE.fullmatch, lines) if found):
            key = frozenset({"__name__": name, **dict(re.findall(r'(\w+)="([^"]*)"', labels))}.items())
            series.setdefault(key, {})[place] = float(value)
    return {key: np.array([values.get(place, np.nan) for place in range(TIMES.size)]) for key, values in series.items()}
