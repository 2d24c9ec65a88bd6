"""Recording rules that give the metrics of cAdvisor and kube-state-metrics the names and units of `diag exporter`."""

from typing import Any

from diag.core.incident import RecordingRule
from diag.knowledge.containers import RECORDING_RULES, joined, of_pods, servers
from diag.knowledge.signals.expressions import RUNNING

SERVERS = "namespace_pod_container:vllm_servers:group"
INTERVAL = "1m"
"""cAdvisor looks every 10 - 30 s: over less than a few minutes its counters go in jumps."""
HEADER = """\
The metrics of containers (cAdvisor, in each kubelet) and of Kubernetes (kube-state-metrics) under the names of `diag
exporter`, for servers that Prometheus scrapes without one: their alerts then see a CPU limit that stops the server,
memory that nears its limit, a container that was killed for lack of it (OOMKilled), and restarts.

A container belongs to the vLLM server whose series have its namespace and pod, and its name where they have one."""


def group(labels: tuple[str, ...]) -> dict[str, Any]:
    """The rule group, as Prometheus reads it; `labels` tell one vLLM server from another at this site."""
    # a server that was killed is a server still, and one with an exporter of ours needs no other
    found = f"last_over_time({RUNNING}{{$named}}[1h]) unless on (instance) diag_build_info"
    of_servers = {"record": SERVERS, "expr": of_pods(servers(found, labels))}
    metrics = [_rule(rule, labels) for rule in RECORDING_RULES]
    return {"name": "diag-kubernetes", "interval": INTERVAL, "rules": [of_servers, *metrics]}


def _rule(rule: RecordingRule, labels: tuple[str, ...]) -> dict[str, Any]:
    constant = {"labels": dict(rule.labels)} if rule.labels else {}
    return {"record": rule.metric, "expr": of_pods(joined(rule, labels, SERVERS)), **constant}
