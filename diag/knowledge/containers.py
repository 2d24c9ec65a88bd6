"""What cAdvisor and kube-state-metrics measure of a server's container, under the names and units of `diag exporter`.

cAdvisor is part of each kubelet; its metrics and those of kube-state-metrics have a container's namespace, pod and name
as labels, as have a server's series where Prometheus has found it through Kubernetes. What means something else than
ours is left out: a missing sample is unknown, a wrong one misleads.
"""

from collections.abc import Iterable

from diag.core.incident import RecordingRule

POD = ("cluster", "namespace", "pod")
"""Without a label `cluster` on either side there is one cluster; with it on one side nothing is joined."""
KEY = (*POD, "container")
ASIDE = "exported_"
"""Before a label of kube-state-metrics that its target has too, unless the scrape job sets honor_labels."""
BESIDE = "POD|diag|istio-proxy|linkerd-proxy|queue-proxy"
SERVERS_OWN = f'container!~"|{BESIDE}"'
"""No series of a whole pod, of the container that holds its network, of an exporter or a proxy beside the server."""
OF_INFO = f'{SERVERS_OWN},{ASIDE}container!~"{BESIDE}"'
OF_CADVISOR, OF_KUBE = "$cadvisor ", "$kube "
"""Stand at the beginning of each exporter's matchers, for those of some pods."""


def cadvisor(metric: str) -> str:
    """A metric of cAdvisor, of containers alone."""
    return f"container_{metric}{{{OF_CADVISOR}{SERVERS_OWN}}}"


def kube(metric: str, matchers: str = "") -> str:
    """A metric of kube-state-metrics."""
    return f"kube_pod_container_{metric}{{{OF_KUBE}{matchers}}}"


def killed_by(state: str) -> str:
    """1 for each start of the container so far, 1 more once it runs again, where it ended for lack of memory."""
    oom = 'reason="OOMKilled"'
    return f"({RESTARTS} + 1) * ignoring (reason) ({kube(f'status_{state}', oom)} == 1)"


RESTARTS = kube("status_restarts_total")
WORKING_SET = cadvisor("memory_working_set_bytes")
ACTIVE_FILE = cadvisor("memory_total_active_file_bytes")
RECORDING_RULES = (
    # The working set has page cache that was read twice, which is given up before anything is killed. An older cAdvisor
    # does not tell how much that is; nor does one that is scraped in part.
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


def servers(found: str, labels: Iterable[str], all_named: bool = False) -> str:
    """The containers of vLLM servers, by their own labels and KEY.

    `found` is a selector of servers with `$named` for further matchers. A server whose series do not name its container
    is in the only one of its pod, proxies not counted; `all_named` says that there is none.
    """
    whole = _list(labels, KEY)
    named, unnamed = (
        f"group by ({whole}) ({found.replace('$named', matchers)})"
        for matchers in (f'namespace!="",pod!="",{SERVERS_OWN}', 'namespace!="",pod!="",container=""')
    )
    if all_named:
        return f"({named})"
    containers = f"group by ({_list(KEY)}) ({WORKING_SET} or {_workload(kube('info', OF_INFO))})"
    alone = f"({containers} and on ({_list(POD)}) count by ({_list(POD)}) ({containers}) == 1)"
    return f"({named} or {unnamed} * on ({_list(POD)}) group_left (container) {alone})"


def joined(rule: RecordingRule, labels: Iterable[str], of_servers: str) -> str:
    """The metric of each of these servers (see `servers`), with the labels that tell them apart."""
    return (
        f"max by ({_list(labels)}) ({of_servers} * on ({_list(KEY)}) group_left ()"
        f" max by ({_list(KEY)}) ({_workload(rule.promql)}))"
    )


def of_pods(promql: str, cadvisor: str = "", kube: str = "") -> str:
    """An expression with these matchers for the metrics of each exporter; without, it is about all pods."""
    ready = ((OF_CADVISOR, cadvisor), (OF_KUBE, kube))
    for stands, matchers in ready:
        promql = promql.replace(stands, f"{matchers}," if matchers else "")
    return promql


def _workload(promql: str) -> str:
    """With the container's labels in place of those of the exporter, where a scrape has set them aside."""
    for label in KEY[1:]:
        promql = f'label_replace({promql}, "{label}", "$1", "{ASIDE}{label}", "(.+)")'
    return promql


def _list(*groups: Iterable[str]) -> str:
    """Each label once."""
    return ", ".join(dict.fromkeys(label for labels in groups for label in labels))
