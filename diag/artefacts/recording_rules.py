"""Recording rules beside those of incidents: metrics of Kubernetes and dcgm-exporter under our names, bands."""

from collections.abc import Sequence
from typing import Any

from diag.artefacts.names import GRAFANA_UNITS, claim
from diag.core.contract import Contract
from diag.core.incident import Incident, RecordingRule
from diag.core.metric_families import THROTTLE_REASONS
from diag.knowledge.containers import RECORDING_RULES, joined, label_list, of_pods, servers
from diag.knowledge.formulas import SLOW_INTERVAL, formula, rule_set
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
MEBI = 1024**2


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


# -- dcgm-exporter
#
# Fields and units: dcgm_fields.h of DCGM 4.6; which of them are scraped: default-counters.csv of dcgm-exporter 4.8.3.
# Its 4.9.0 (DCGM 4.7) gives the default fields new names, some of them in other units: the new one comes first below. A
# DCGM field with another meaning than our metric is left out: a missing sample is unknown, a wrong one misleads.


def device(*fields: str) -> str:
    """Return the first of these fields of a GPU that is scraped; a field may be scaled."""
    return " or ".join(f"DCGM_FI_DEV_{field}" for field in fields)


def nanoseconds(*fields: str) -> str:
    """Return these counters in seconds: NVML counts nanoseconds, whatever unit an older CSV has."""
    return device(*(f"{field} / 1e9" for field in fields))


TEMPERATURE = device("GPU_TEMP_CELSIUS", "GPU_TEMP")
ACTIVE = device("CLOCKS_EVENT_REASONS", "CLOCK_THROTTLE_REASONS")
XID = "DCGM_EXP_XID_ERRORS_TOTAL"
THROTTLE_SECONDS = {
    "sw_power_cap": nanoseconds("POWER_VIOLATION"),
    # the second one counts both kinds of heat: it stands in where DCGM cannot tell them apart
    "sw_thermal": nanoseconds("CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS", "THERMAL_VIOLATION"),
    "hw_thermal": nanoseconds("CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS"),
    "hw_power_brake": nanoseconds("CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS"),
    "sync_boost": nanoseconds("SYNC_BOOST_VIOLATION"),
    "board_limit": nanoseconds("BOARD_LIMIT_VIOLATION"),
    "reliability": nanoseconds("RELIABILITY_VIOLATION"),
}
NVLINK_ERRORS = {
    "crc_flit": device("NVLINK_CRC_FLIT_ERROR_TOTAL", "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"),
    "crc_data": device("NVLINK_CRC_DATA_ERROR_TOTAL", "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL"),
    "replay": device("NVLINK_REPLAY_ERROR_TOTAL", "NVLINK_REPLAY_ERROR_COUNT_TOTAL"),
    "recovery": device("NVLINK_RECOVERY_ERROR_TOTAL", "NVLINK_RECOVERY_ERROR_COUNT_TOTAL"),
    "ecc_data": device("NVLINK_ECC_ERROR_TOTAL", "NVLINK_ECC_DATA_ERROR_COUNT_TOTAL"),
}
TRAFFIC = {
    "diag_gpu_pcie_bytes_total": "DCGM_FI_PROF_PCIE_WAY_BYTES_TOTAL",
    "diag_gpu_pcie_throughput_bytes_per_second": "DCGM_FI_PROF_PCIE_WAY_BYTES",  # a rate, in spite of its name
    "diag_gpu_nvlink_bytes_total": device("NVLINK_WAY_BYTES_TOTAL", "NVLINK_COUNT_WAY_BYTES"),
}
TOTAL = device("FB_CAPACITY_BYTES", f"FB_TOTAL * {MEBI}")
PARTS = "DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE + DCGM_FI_DEV_FB_RESERVED"

DCGM_RULES = (
    RecordingRule("diag_gpu_temperature_celsius", TEMPERATURE, {"sensor": "gpu"}),
    RecordingRule("diag_gpu_temperature_celsius", device("MEMORY_TEMP_CELSIUS", "MEMORY_TEMP"), {"sensor": "memory"}),
    RecordingRule(
        "diag_gpu_temperature_margin_celsius",
        device("GPU_TEMP_MARGIN_CELSIUS", "GPU_TEMP_LIMIT", f"SLOWDOWN_TEMP - ({TEMPERATURE})"),
    ),
    RecordingRule("diag_gpu_clock_hertz", device("SM_CLOCK_HERTZ", "SM_CLOCK * 1e6"), {"clock": "sm"}),
    RecordingRule("diag_gpu_clock_hertz", device("MEMORY_CLOCK_HERTZ", "MEM_CLOCK * 1e6"), {"clock": "memory"}),
    RecordingRule("diag_gpu_clock_max_hertz", device("SM_MAX_CLOCK_HERTZ", "MAX_SM_CLOCK * 1e6"), {"clock": "sm"}),
    RecordingRule(
        "diag_gpu_clock_max_hertz", device("MEMORY_MAX_CLOCK_HERTZ", "MAX_MEM_CLOCK * 1e6"), {"clock": "memory"}
    ),
    RecordingRule("diag_gpu_power_watts", device("BOARD_POWER_WATTS", "POWER_USAGE")),
    RecordingRule("diag_gpu_power_limit_watts", device("BOARD_POWER_LIMIT_ENFORCED_WATTS", "ENFORCED_POWER_LIMIT")),
    RecordingRule("diag_gpu_power_limit_min_watts", device("BOARD_POWER_LIMIT_MIN_WATTS", "POWER_MGMT_LIMIT_MIN")),
    RecordingRule(
        "diag_gpu_power_limit_default_watts", device("BOARD_POWER_LIMIT_DEFAULT_WATTS", "POWER_MGMT_LIMIT_DEF")
    ),
    RecordingRule("diag_gpu_energy_joules_total", device("GPU_ENERGY_JOULES_TOTAL", "TOTAL_ENERGY_CONSUMPTION / 1e3")),
    # DCGM 4.6 has GPU_UTIL_RATIO as another name of the percentage; no default counters of that time use it
    RecordingRule("diag_gpu_utilization_ratio", device("GPU_UTIL_RATIO", "GPU_UTIL / 100")),
    RecordingRule("diag_gpu_memory_busy_ratio", device("MEMORY_UTIL_RATIO", "MEM_COPY_UTIL / 100")),
    # every part is whole MiB, rounded down: the sum may lack 3 of them
    RecordingRule("diag_gpu_memory_total_bytes", f"{TOTAL} or ({PARTS}) * {MEBI}"),
    RecordingRule("diag_gpu_memory_used_bytes", device("FB_USED_BYTES", f"FB_USED * {MEBI}")),
    RecordingRule("diag_gpu_memory_free_bytes", device("FB_FREE_BYTES", f"FB_FREE * {MEBI}")),
    RecordingRule("diag_gpu_memory_reserved_bytes", device("FB_RESERVED_BYTES", f"FB_RESERVED * {MEBI}")),
    *(
        RecordingRule("diag_gpu_throttle_active", f"floor(({ACTIVE}) / {bit}) % 2", {"reason": reason})
        for reason, bit in THROTTLE_REASONS.items()
    ),
    *(
        RecordingRule("diag_gpu_throttle_seconds_total", time, {"reason": reason})
        for reason, time in THROTTLE_SECONDS.items()
    ),
    *(
        RecordingRule(metric, promql.replace("WAY", way.upper()), {"direction": way})
        for metric, promql in TRAFFIC.items()
        for way in ("tx", "rx")
    ),
    RecordingRule("diag_gpu_pcie_link_generation", device("PCIE_LINK_GEN"), {"which": "current"}),
    RecordingRule("diag_gpu_pcie_link_generation", device("PCIE_MAX_LINK_GEN"), {"which": "max"}),
    RecordingRule("diag_gpu_pcie_link_width", device("PCIE_LINK_WIDTH"), {"which": "current"}),
    RecordingRule("diag_gpu_pcie_link_width", device("PCIE_MAX_LINK_WIDTH"), {"which": "max"}),
    RecordingRule("diag_gpu_pcie_replays_total", device("PCIE_REPLAY_TOTAL", "PCIE_REPLAY_COUNTER")),
    *(RecordingRule("diag_gpu_nvlink_errors_total", count, {"kind": kind}) for kind, count in NVLINK_ERRORS.items()),
    RecordingRule("diag_gpu_ecc_errors_total", device("ECC_SBE_VOL_TOTAL"), {"kind": "corrected"}),
    RecordingRule("diag_gpu_ecc_errors_total", device("ECC_DBE_VOL_TOTAL"), {"kind": "uncorrected"}),
    RecordingRule(
        "diag_gpu_remapped_rows",
        device("ROW_REMAP_CORRECTABLE_TOTAL", "CORRECTABLE_REMAPPED_ROWS"),
        {"kind": "corrected"},
    ),
    RecordingRule(
        "diag_gpu_remapped_rows",
        device("ROW_REMAP_UNCORRECTABLE_TOTAL", "UNCORRECTABLE_REMAPPED_ROWS"),
        {"kind": "uncorrected"},
    ),
    RecordingRule("diag_gpu_remap_failure", device("ROW_REMAP_FAILED", "ROW_REMAP_FAILURE")),
    # An Xid's series starts at 1, and increase() does not see a start at 1: so the rule records 0 for its first minute.
    # The day's look back ignores the pod: a series that returns after a failed scrape is not a new error.
    RecordingRule(
        "diag_gpu_xid_errors_total",
        f"0 * ({XID} unless on (UUID, xid) last_over_time({XID}[1d] offset 1m)) or {XID}",
        kept=("xid",),
    ),
)
SERVING = RecordingRule("diag_gpu_serving", f"0 * ({TEMPERATURE}) + 1")
"""A rule for GPUs that are joined by pod: on a shared host the server that uses a GPU is unknown."""

WHOLE = ("GPU_I_ID", "vgpu")
"""Labels of a MIG slice and of a shared GPU. A server has neither, so it joins only whole GPUs."""

CSV_LINES = """\
DCGM_FI_DEV_CLOCKS_EVENT_REASONS, gauge, Clock throttle reasons (bit mask).
DCGM_FI_DEV_POWER_VIOLATION, counter, Time throttled by the power limit (in ns).
DCGM_FI_DEV_THERMAL_VIOLATION, counter, Time throttled for thermal reasons (in ns).
DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS, counter, Time in software thermal slowdown (in ns).
DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS, counter, Time in hardware thermal slowdown (in ns).
DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS, counter, Time in hardware power brake (in ns).
DCGM_FI_DEV_SYNC_BOOST_VIOLATION, counter, Time throttled by sync boost (in ns).
DCGM_FI_DEV_BOARD_LIMIT_VIOLATION, counter, Time throttled by a board limit (in ns).
DCGM_FI_DEV_RELIABILITY_VIOLATION, counter, Time throttled by the reliability limit (in ns).
DCGM_EXP_XID_ERRORS_TOTAL, counter, Xid errors since the exporter started.
DCGM_FI_DEV_ECC_SBE_VOL_TOTAL, counter, Corrected ECC errors.
DCGM_FI_DEV_ECC_DBE_VOL_TOTAL, counter, Uncorrected ECC errors.
DCGM_FI_DEV_GPU_TEMP_LIMIT, gauge, Margin to the slowdown temperature (in C).
DCGM_FI_DEV_MAX_SM_CLOCK, gauge, Maximum SM clock (in MHz).
DCGM_FI_DEV_MAX_MEM_CLOCK, gauge, Maximum memory clock (in MHz).
DCGM_FI_DEV_ENFORCED_POWER_LIMIT, gauge, Enforced power limit (in W).
DCGM_FI_DEV_POWER_MGMT_LIMIT_MIN, gauge, Lowest power limit that can be set (in W).
DCGM_FI_DEV_POWER_MGMT_LIMIT_DEF, gauge, Default power limit (in W).
DCGM_FI_DEV_PCIE_LINK_GEN, gauge, PCIe generation.
DCGM_FI_DEV_PCIE_MAX_LINK_GEN, gauge, Maximum PCIe generation.
DCGM_FI_DEV_PCIE_LINK_WIDTH, gauge, PCIe lanes.
DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH, gauge, Maximum PCIe lanes.
DCGM_FI_PROF_PCIE_TX_BYTES_TOTAL, counter, Bytes sent over PCIe.
DCGM_FI_PROF_PCIE_RX_BYTES_TOTAL, counter, Bytes received over PCIe.
DCGM_FI_DEV_NVLINK_COUNT_TX_BYTES, counter, Bytes sent over NVLink 5 and later.
DCGM_FI_DEV_NVLINK_COUNT_RX_BYTES, counter, Bytes received over NVLink 5 and later.
DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, counter, NVLink flow-control CRC errors.
DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL, counter, NVLink data CRC errors.
DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, counter, NVLink replays.
DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, counter, NVLink recoveries.
DCGM_FI_DEV_NVLINK_ECC_DATA_ERROR_COUNT_TOTAL, counter, NVLink ECC errors."""
"""Lines that the CSV of dcgm-exporter needs beside its defaults."""
DCGM_HEADER = f"""\
Load this file only where no `diag exporter` reads the GPUs: both record the same names.

A GPU belongs to the one vLLM server with the same values of the labels in diag.toml, [site] gpu_join. Nothing is
recorded where two servers have the same values, where the server does not answer, for a MIG slice, or for a GPU that
several pods share.

dcgm-exporter's default counters have no throttle reasons, Xid errors, ECC errors, limits or links. Add the lines below
to its CSV, or the rules that need them record nothing. A CSV of your own replaces the default one: start from a copy.
The lines are for 4.8.3 and later; an older exporter may refuse to start on a field that it does not know
(DCGM_EXP_XID_ERRORS_TOTAL and DCGM_FI_PROF_PCIE_*_TOTAL before 4.8.3, ..._ECC_DATA_... before 4.8.0, ..._SLOWDOWN_NS
before 4.4.0; before 4.0.0 DCGM_FI_DEV_CLOCKS_EVENT_REASONS was called DCGM_FI_DEV_CLOCK_THROTTLE_REASONS).

{CSV_LINES}

No rule records these metrics, because no DCGM field has their meaning:
diag_gpu_up: a lost GPU has no series, and a missing series does not prove a lost GPU.
diag_gpu_info: DCGM packs the compute capability into one number, which a rule cannot turn into "9.0".
diag_gpu_process_memory_bytes, diag_gpu_process_utilization_ratio: DCGM does not tell vLLM's processes from others.
diag_gpu_memory_bandwidth_max_bytes_per_second, diag_gpu_flops_max, diag_gpu_nvlink_max_bytes_per_second: they are of
data sheets, which diag exporter has.
diag_gpu_nvlink_active_links, diag_gpu_peer_info: the state of links and their topology are not fields of a GPU.
diag_gpu_retired_pages, diag_gpu_resets_total: they are of AMD's driver.
diag_gpu_persistence_mode, diag_gpu_remap_pending: diag preflight reads them, from the page of diag exporter only.
DCGM_FI_DEV_XID_ERRORS is not a counter: it holds the last Xid and never returns to 0.
DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL is not a counter of bytes: it is a rate of both directions together."""


def dcgm_group(labels: tuple[str, ...], key: tuple[str, ...]) -> dict[str, Any]:
    """Return the rule group as Prometheus reads it.

    `labels` distinguish the vLLM servers of this site; `key` are the labels that DCGM's series share with the server's.
    Only a server that no other shares its key with is joined; an empty label in the key would match every series.
    """
    rules = (*DCGM_RULES, SERVING) if "pod" in key else DCGM_RULES
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


def threshold_group(incidents: Sequence[Incident], contract: Contract) -> dict[str, Any]:
    """Return the group that records the threshold of each recorded condition: the dashboard Server draws them."""
    recorded = rule_set(incidents, contract).series
    rules: dict[tuple[str, str], dict[str, Any]] = {}
    for incident in incidents:
        for condition in (*incident.conditions, *filter(None, (incident.escalates,))):
            name = formula(condition.signal, incident.per, incident.windows[0], contract).name
            if name not in recorded:
                continue
            labels = {"incident": incident.id, "condition": claim(condition, contract), "series": recorded[name]}
            labels["unit"] = condition.signal.unit if condition.signal.unit in GRAFANA_UNITS else "number"
            rule = {"record": THRESHOLD, "expr": f"vector({contract.limit(condition.limit):g})", "labels": labels}
            rules.setdefault((incident.id, recorded[name]), rule)
    return {"name": "diag-thresholds", "interval": SLOW_INTERVAL, "rules": [*rules.values()]}
