"""Metrics of a server's container from cAdvisor and kube-state-metrics, under the names and units of `diag exporter`.

cAdvisor is part of each kubelet; its metrics and those of kube-state-metrics have a container's namespace, pod and name
as labels, and so have a server's series if Prometheus found it through Kubernetes. A metric with another meaning than
ours is left out: a missing sample is unknown, a wrong one misleads.
"""

from collections.abc import Iterable

from diag.core.incident import RecordingRule

POD = ("cluster", "namespace", "pod")
"""Labels of a pod; without `cluster` on both sides there is one cluster, with it on one side nothing is joined."""
KEY = (*POD, "container")
ASIDE = "exported_"
"""The prefix of a label of kube-state-metrics that its target has too, unless the scrape job sets honor_labels."""
BESIDE = "POD|diag|istio-proxy|linkerd-proxy|queue-proxy"
SERVERS_OWN = f'container!~"|{BESIDE}"'
"""Matchers that exclude series of a whole pod, of its network container, of exporters and proxies beside the server."""
OF_INFO = f'{SERVERS_OWN},{ASIDE}container!~"{BESIDE}"'
OF_CADVISOR, OF_KUBE = "$cadvisor ", "$kube "
"""Placeholders at the beginning of each exporter's matchers, for further ones (see `of_pods`)."""


def cadvisor(metric: str) -> str:
    """Return a metric of cAdvisor, of containers alone."""
    return f"container_{metric}{{{OF_CADVISOR}{SERVERS_OWN}}}"


def kube(metric: str, matchers: str = "") -> str:
    """Return a metric of kube-state-metrics."""
    return f"kube_pod_container_{metric}{{{OF_KUBE}{matchers}}}"


def killed_by(state: str) -> str:
    """Return the starts of a container that ended for lack of memory, 1 more once it runs again."""
    oom = 'reason="OOMKilled"'
    return f"({RESTARTS} + 1) * ignoring (reason) ({kube(f'status_{state}', oom)} == 1)"


RESTARTS = kube("status_restarts_total")
WORKING_SET = cadvisor("memory_working_set_bytes")
ACTIVE_FILE = cadvisor("memory_total_active_file_bytes")
RECORDING_RULES = (
    # The working set includes page cache that was read twice, which the kernel drops before it kills. An old or
    # partly scraped cAdvisor does not export the size of that cache.
    RecordingRule(
        "diag_host_memory_used_bytes", f"{WORKING_SET} - {ACTIVE_FILE} or {cadvisor('memory_rss')} or {WORKING_SET}"
    ),
    RecordingRule(
        "diag_host_memory_limit_bytes",
        f"{cadvisor('spec_memory_limit_bytes')} > 0 or " + kube("resource_limits", 'resource="memory"'),
    ),
    RecordingRule(
        "diag_host_memory_events_total",
        f"{killed_by('last_terminated_reason')} or {killed_by('terminated_reason')} or 0 * {RESTARTS}",
        {"event": "oom_kill"},
    ),
    RecordingRule("diag_host_cpu_throttled_seconds_total", cadvisor("cpu_cfs_throttled_seconds_total")),
    RecordingRule("diag_host_cpu_periods_total", cadvisor("cpu_cfs_periods_total")),
    RecordingRule("diag_host_cpu_throttled_periods_total", cadvisor("cpu_cfs_throttled_periods_total")),
    RecordingRule("diag_vllm_process_start_time_seconds", kube("state_started")),
)


def servers(selector: str, labels: Iterable[str], all_named: bool = False) -> str:
    """Return the containers of vLLM servers, by the labels of a server and KEY.

    `selector` selects servers, with `$named` for further matchers. A server whose series do not name its container
    is in the only one of its pod, proxies not counted; `all_named` is True if there is no such server.
    """
    whole = label_list(labels, KEY)
    named, unnamed = (
        f"group by ({whole}) ({selector.replace('$named', matchers)})"
        for matchers in (f'namespace!="",pod!="",{SERVERS_OWN}', 'namespace!="",pod!="",container=""')
    )
    if all_named:
        return f"({named})"
    containers = f"group by ({label_list(KEY)}) ({WORKING_SET} or {_workload(kube('info', OF_INFO))})"
    alone = f"({containers} and on ({label_list(POD)}) count by ({label_list(POD)}) ({containers}) == 1)"
    return f"({named} or {unnamed} * on ({label_list(POD)}) group_left (container) {alone})"


def joined(rule: RecordingRule, labels: Iterable[str], of_servers: str) -> str:
    """Return the metric of each of the servers (see `servers`), with the labels that distinguish them."""
    return (
        f"max by ({label_list(labels)}) ({of_servers} * on ({label_list(KEY)}) group_left ()"
        f" max by ({label_list(KEY)}) ({_workload(rule.promql)}))"
    )


def of_pods(promql: str, cadvisor: str = "", kube: str = "") -> str:
    """Restrict an expression by further matchers for the metrics of each exporter; without them it is of all pods."""
    for placeholder, matchers in ((OF_CADVISOR, cadvisor), (OF_KUBE, kube)):
        promql = promql.replace(placeholder, f"{matchers}," if matchers else "")
    return promql


def _workload(promql: str) -> str:
    """Give the series the container's own labels if the scrape has renamed them."""
    for label in KEY[1:]:
        promql = f'label_replace({promql}, "{label}", "$1", "{ASIDE}{label}", "(.+)")'
    return promql


def label_list(*groups: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(label for labels in groups for label in labels))
