"""Recording rules beside those of incidents: metrics of Kubernetes and dcgm-exporter under our names, bands."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from diag.artefacts.names import GRAFANA_UNITS, claim
from diag.core.contract import Contract
from diag.core.declarations import PACKAGE, read
from diag.core.incident import Incident, RecordingRule
from diag.core.metric_families import THROTTLE_REASONS
from diag.core.metric_prefix import GENERATED, RUNNING, in_any_release
from diag.knowledge.containers import RECORDING_RULES, joined, label_list, of_pods, servers
from diag.knowledge.formulas import formula, rule_set
from diag.knowledge.signals import ITL, TTFT
from diag.promql import pretty

INTERVAL = "1m"
"""cAdvisor reads counters every 10 - 30 s: over less than a few minutes they increase in steps."""


class Declared(NamedTuple):
    """The rules about dcgm-exporter's metrics, and the heads of the generated files."""

    rules: tuple[RecordingRule, ...]
    serving: RecordingRule
    csv: str
    dcgm_header: str
    kubernetes_header: str


@cache
def declared() -> Declared:
    """Return the content of recording_rules.toml, beside this file."""
    table = read(PACKAGE / "artefacts" / "recording_rules.toml", Declared)
    return table._replace(dcgm_header=table.dcgm_header.replace("{csv}", table.csv))


def dcgm_rules() -> list[RecordingRule]:
    """Return the rules of all metrics; the one about throttling once for each reason."""
    rules = []
    for rule in declared().rules:
        of_bits = [
            RecordingRule(rule.metric, rule.promql.replace("{bit}", str(bit)), {"reason": reason})
            for reason, bit in THROTTLE_REASONS.items()
        ]
        rules += of_bits if "{bit}" in rule.promql else [rule]
    return rules


# -- cAdvisor and kube-state-metrics

SERVERS = "namespace_pod_container:vllm_servers:group"


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


def _rate(name: str) -> str:
    return in_any_release(f"sum {BY} (rate({name}[5m]))")


def _mean(histogram: str) -> str:
    return f"{_rate(f'{histogram}_sum')} / ({_rate(f'{histogram}_count')} > 0)"


REQUESTS = in_any_release(f"sum {BY} (avg_over_time({RUNNING}[5m]))")
MEASURES = {
    "itl_seconds": _mean(ITL),
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


# -- dcgm-exporter

WHOLE = ("GPU_I_ID", "vgpu")
"""Labels of a MIG slice and of a shared GPU. A server has neither, so it joins only whole GPUs."""


def dcgm_group(labels: tuple[str, ...], key: tuple[str, ...]) -> dict[str, Any]:
    """Return the rule group as Prometheus reads it.

    `labels` distinguish the vLLM servers of this site; `key` are the labels that DCGM's series share with the server's.
    Only a server that no other shares its key with is joined; an empty label in the key would match every series.
    """
    rules = [*dcgm_rules(), *([declared().serving] if "pod" in key else [])]
    servers_alone = f"{'_'.join(key)}:vllm_servers:alone"
    named = ",".join(f'{label}!=""' for label in key)
    servers = f"group by ({label_list(key, labels)}) ({RUNNING}{{{named}}})"
    alone = f"({servers} and on ({label_list(key)}) count by ({label_list(key)}) ({servers}) == 1)"
    copied = [label for label in labels if label not in key]  # Prometheus refuses a label that is also in `on`
    # Prometheus keeps the exporter's own `pod` and calls the workload's `exported_pod`, unless honor_labels is set
    renamed = {"uuid": "UUID", **{label: f"exported_{label}" for label in key}}
    found: list[dict[str, Any]] = [{"record": servers_alone, "expr": alone}]
    for rule in rules:
        promql = rule.promql
        for ours, theirs in renamed.items():
            promql = f'label_replace({promql}, "{ours}", "$1", "{theirs}", "(.+)")'
        expr = (
            f"max by ({label_list(labels, ('gpu', 'uuid'), rule.kept)}) (\n"
            f"  {promql}\n"
            f"  * on ({label_list(key, WHOLE)}) group_left ({label_list(copied)})\n"
            f"  {servers_alone}\n"
            ")"
        )
        found.append({"record": rule.metric, "expr": expr, **({"labels": dict(rule.labels)} if rule.labels else {})})
    return {"name": "diag-dcgm", "rules": found}


THRESHOLD = "incident:diag_condition:threshold"
"""The series of the thresholds; its labels name the incident, the condition in words, its series and its unit."""
THRESHOLDS_EVERY = "2m"
"""A constant is recorded often enough that a query still finds it, 5 min later, if an evaluation is missed."""


def threshold_group(incidents: Sequence[Incident], contract: Contract) -> dict[str, Any]:
    """Return the group that records the threshold of each recorded condition: the dashboard Server draws them."""
    recorded = rule_set(incidents, contract).series
    rules: dict[tuple[str, str], dict[str, Any]] = {}
    for incident in incidents:
        for condition in (*incident.alerting, *filter(None, (incident.escalates,))):
            name = formula(condition.signal, incident.per, incident.windows[0], contract).name
            if name not in recorded:
                continue
            labels = {"incident": incident.id, "condition": claim(condition, contract), "series": recorded[name]}
            labels["unit"] = condition.signal.unit if condition.signal.unit in GRAFANA_UNITS else "number"
            rule = {"record": THRESHOLD, "expr": f"vector({contract.limit(condition.limit):g})", "labels": labels}
            rules.setdefault((incident.id, recorded[name]), rule)
    return {"name": "diag-thresholds", "interval": THRESHOLDS_EVERY, "rules": [*rules.values()]}
