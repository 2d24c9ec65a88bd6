"""Recording rules beside those of incidents: metrics of Kubernetes under our names, and what is normal at this hour."""

from typing import Any

from diag.knowledge.containers import RECORDING_RULES, joined, of_pods, servers
from diag.knowledge.signals import ITL
from diag.knowledge.signals.expressions import RUNNING
from diag.promql import pretty

INTERVAL = "1m"
"""cAdvisor reads counters every 10 - 30 s: over less than a few minutes they increase in steps."""


# -- cAdvisor and kube-state-metrics

SERVERS = "namespace_pod_container:vllm_servers:group"
KUBERNETES_HEADER = """\
The metrics of containers (cAdvisor, in each kubelet) and of Kubernetes (kube-state-metrics) under the names of `diag
exporter`, for servers that Prometheus scrapes without one: their alerts then see a CPU limit that stops the server,
memory that nears its limit, a container that was killed for lack of it (OOMKilled), and restarts.

A container belongs to the vLLM server whose series have its namespace and pod, and its name where they have one."""


def kubernetes_group(labels: tuple[str, ...]) -> dict[str, Any]:
    """Return the rule group that gives container metrics the names and units of `diag exporter`.

    `labels` distinguish the vLLM servers of this site.
    """
    # a server that was killed still counts, and one with diag exporter needs no other source
    found = f"last_over_time({RUNNING}{{$named}}[1h]) unless on (instance) diag_build_info"
    rules: list[dict[str, Any]] = [{"record": SERVERS, "expr": of_pods(servers(found, labels))}]
    for rule in RECORDING_RULES:
        constant = {"labels": dict(rule.labels)} if rule.labels else {}
        rules.append({"record": rule.metric, "expr": of_pods(joined(rule, labels, SERVERS)), **constant})
    return {"name": "diag-kubernetes", "interval": INTERVAL, "rules": rules}


# -- robust bands of latency and load, a few series for each job and model
#
# A band is the median of the same hour on the last seven days, and the median absolute deviation (MAD) from it: one bad
# day moves neither. `mad_over_time` is missing in Prometheus 2 and experimental in Prometheus 3, so the deviation is
# taken by `quantile` over the days. No alert reads a band: it is meant to be drawn beside the measured value.

BY = "by (job, model_name)"
DAYS = 7
FEWEST_DAYS = 3
"""Days with a value, below which there is no band."""
TTFT, GENERATED = "vllm:time_to_first_token_seconds", "vllm:generation_tokens_total"


def _rate(metric: str) -> str:
    return f"sum {BY} (rate({metric}[5m]))"


def _mean(*histograms: str) -> str:
    """Return the mean of a histogram, under the first of these names that exists."""
    return " or ".join(f"{_rate(f'{name}_sum')} / ({_rate(f'{name}_count')} > 0)" for name in histograms)


REQUESTS = f"sum {BY} (avg_over_time({RUNNING}[5m]))"
MEASURES = {
    "itl_seconds": _mean(*ITL),
    "ttft_seconds": _mean(TTFT),
    "output_tokens_per_running_request": f"{_rate(GENERATED)} / ({REQUESTS} > 0)",
    "requests_running": REQUESTS,
}
"""The measures with a band; the last one is the load, for comparison."""


def normal_group() -> dict[str, Any]:
    """Return all bands as one rule group, whose rules are evaluated in their order.

    Each measure has four rules: its mean, the median of the last hour, and the median and the MAD of that hour on the
    last days.
    """
    rules = []
    for name, promql in MEASURES.items():
        now, hour, median, mad = (
            f"job_model_name:{name}:{what}" for what in ("mean5m", "median1h", "median7d", "mad7d")
        )
        days = " or ".join(
            f'label_replace(last_over_time({hour}[10m] offset {24 * day - 1}h30m), "day", "{day}", "", "")'
            for day in range(1, DAYS + 1)
        )
        enough = f"count {BY} ({days}) >= {FEWEST_DAYS}"
        expressions = {
            now: promql,
            hour: f"quantile_over_time(0.5, {now}[1h])",
            median: f"quantile {BY} (0.5, {days}) and {enough}",
            mad: f"quantile {BY} (0.5, abs(({days}) - on (job, model_name) group_left () {median}))",
        }
        rules += [{"record": record, "expr": pretty(expression)} for record, expression in expressions.items()]
    return {"name": "diag-normal", "interval": INTERVAL, "rules": rules}
