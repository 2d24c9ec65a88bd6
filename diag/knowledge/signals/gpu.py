"""Signals of GPUs and of the network between them: throttling, faults, memory; NVLink, InfiniBand, NCCL's ranks.

docs/metrics.md describes the metrics.
"""

from diag.core.incident import GROUP
from diag.knowledge.signals.expressions import ANY_MEMBER, SLOWEST_MEMBER, cache_config_has, parts, signal

THERMAL = 'reason=~"sw_thermal|hw_thermal"'
BRAKE = 'reason="hw_power_brake"'
XIDS = 'xid!~"13|31|43|45"'
"""Xid 13, 31, 43 and 45 are caused by the application; all others by the hardware or the driver."""
UNCORRECTED = 'diag_gpu_ecc_errors_total{kind="uncorrected"}'
MUCH_MEMORY, NO_MEMORY_LEFT = 0.05, 0.02
"""Shares of a GPU's memory: more than a desktop or an agent holds; too little for the next allocation."""
SERVER = f"{', '.join(GROUP)}, leader"
"""The labels of a server that spans nodes (--nnodes)."""


def average(metric: str, matchers: str = "") -> str:
    """Return the mean of a gauge in the window, per subject, with at least three samples."""
    at = f"{metric}{{{matchers}}}[$window]"
    return f"max by ($by) (avg_over_time({at}) and count_over_time({at}) >= 3)"


def as_of_first_node(series: str, kept: str, more: str = "leader") -> str:
    """Return series of every node of a server as series of its first node; none for a server of one node.

    Each node has an exporter of its own, and the page of the first one has the metrics of the server. `more` are labels
    that the series get from `diag_vllm_node_info`, `kept` those that tell the series of a server apart: two exporters
    of one host, one of which has just been replaced, have the same ones.
    """
    return (
        f"max by ({SERVER}, instance, {kept})"
        f" (max by ({SERVER}, {kept}) ({series} * on (instance) group_left ({more}) $nodes)"
        f" * on ({SERVER}) group_left (instance) $first_nodes)"
    )


def _named(series: str, **texts: str) -> str:
    """Return series with a text for each of these labels that is there, in a label in_NAME; $$1 is its value."""
    for label, text in texts.items():
        series = f'label_replace({series}, "in_{label}", "{text}", "{label}", "(.+)")'
    return series


FAULTS = {
    "GPU lost": "$gpu_lost",
    "Xid": "$xid_errors",
    "reset": "$gpu_resets",
    "uncorrectable memory error": "$uncorrectable_memory_errors",
    "row that could not be replaced": "$rows_not_replaced",
}
_MISSING = "diag_nccl_missing_rank_operations"
LINK_ERRORS = "link_downed|link_error_recovery|local_link_integrity_errors|local_ack_timeout_err"
"""Counters that stand still on a sound link at work; single symbol errors are corrected and harmless."""
PORT = f"{', '.join(GROUP)}, instance, host, port"
LATELY = "10m"
"""A stall begins with the error and is seen a minute or more later, when nothing is counted any more."""
RETRAINED = "recovery|link_recovery|link_recovery_failed"
"""Counters of NVLinks that were trained again; a sound link replays a packet now and then."""


PARTS = parts(
    vars(),
    f"""
    # The rank comes last: where a line is short, its middle is left out.
    named_nccl_operation = {_named(f"last_over_time({_MISSING}[$window])", collective="$$1 ", operation="$$1 of ")}
    named_nccl_communicator =
        {_named("$named_nccl_operation", communicator="communicator $$1 lacks ", rank="rank $$1", host=" on $$1")}
    """,
    *(
        f"""
    # from NVML's counters, otherwise from the samples that show a reason active
    {name}_counted_share: share = max by ($by) (rate(diag_gpu_throttle_seconds_total{{{reasons}}}[$window]))
    {name}_counted_seconds: seconds = max by ($by) (increase(diag_gpu_throttle_seconds_total{{{reasons}}}[$window]))
    {name}_sampled_share: share = {average("diag_gpu_throttle_active", reasons)}
    """
        for name, reasons in (("thermal_slowdown", THERMAL), ("power_brake", BRAKE))
    ),
)

thermal_share = signal(
    "thermal slowdown (share of time): share = $thermal_slowdown_counted_share or $thermal_slowdown_sampled_share",
    "the GPU spent {value} of the time in thermal slowdown",
)
thermal_seconds = signal(
    "thermal slowdown (time): seconds = $thermal_slowdown_counted_seconds or 30 * $thermal_slowdown_sampled_share",
    "the GPU was in thermal slowdown for {value}",
    window_scaling="peak",
)
brake_seconds = signal(
    "hardware power brake (time): seconds = $power_brake_counted_seconds or 30 * $power_brake_sampled_share",
    "the hardware power brake was asserted for {value}",
    window_scaling="peak",
)
utilization = signal(
    "GPU utilisation: share = " + average("diag_gpu_utilization_ratio"),
    "GPU utilisation is {value}",
    group=ANY_MEMBER,
)
clock_loss = signal(
    # an idle GPU lowers its clock by itself: only a busy GPU loses performance
    "SM clock below its maximum: share = (1 - $sm_clock / ($highest_sm_clock > 0)) * ($gpu_utilisation > bool 0.5)",
    "the SM clock is {value} below its maximum while the GPU is busy",
    context=True,  # at the power limit it is normal: an H100 computes at 1,365 of 1,980 MHz
)
margin = signal(
    "margin to thermal slowdown: celsius = min by ($by) (min_over_time(diag_gpu_temperature_margin_celsius[$window]))",
    "the GPU is {value} below its slowdown temperature",
)
power_limit = signal(
    "power limit: watts = " + average("diag_gpu_power_limit_watts"),
    "the power limit is {value}",
    group=ANY_MEMBER,
)
sustained_power = signal(
    "95 % of the power drawn: watts ="
    " (0.95 * $power_drawn >= $lowest_power_limit) or ($lowest_power_limit and 0.95 * $power_drawn)"
    " or 0.95 * $power_drawn",
    "the cooling sustains {value}",
)

gpu_faults = signal(
    # a board does not count every kind of fault; but without Xid errors (NVIDIA) or resets (AMD) most stay unseen
    "GPU faults: faults = ($faults_of_all_kinds > 0) or ($faults_of_all_kinds and ($xid_errors or $gpu_resets))",
    "GPU faults (GPU lost, Xid errors, resets, uncorrectable memory errors, failed row remaps): {value}",
    needs="a count of Xid errors, on AMD of resets",
    window_scaling="peak",
    culprit_promql=f"label_replace(increase(diag_gpu_xid_errors_total{{{XIDS}}}[1d]) > 0,"
    ' "named", "Xid $$1", "xid", "(.+)")'
    ' or label_replace(($gpu_lost) > 0, "named", "GPU lost", "", "")'
    ' or label_replace(($gpu_resets) > 0, "named", "GPU reset", "", "")'
    ' or label_replace(($uncorrectable_memory_errors) > 0, "named", "uncorrectable memory error", "", "")'
    ' or label_replace(($rows_not_replaced) > 0, "named", "row that could not be replaced", "", "")',
    culprit_label="{named}",
)

memory_of_other_processes = signal(
    # a process in another container may belong to this vLLM or not: its owner cannot be seen
    f"GPU memory held by other processes: share = ($others_share_of_gpu_memory >= {MUCH_MEMORY})"
    " or (($others_share_of_gpu_memory or 0 * $gpu_memory_of_processes)"
    f" unless $unknown_share_of_gpu_memory >= {MUCH_MEMORY})",
    "other processes hold {value} of the GPU's memory",
    culprit_promql='last_over_time(diag_gpu_process_memory_bytes{role="other"}[$window])'
    " unless on (instance, gpu, pid) $gpu_memory_of_own_processes",
    culprit_label="pid {pid}",
)
gpu_memory_overbooked = signal(
    # a share that others leave is no answer as long as the GPU may be full
    "GPU memory booked more than once: bool ="
    f" ($least_free_gpu_memory / ($gpu_memory_total > 0) < {NO_MEMORY_LEFT}) * 0 + 1"
    " or $gpu_memory_booked_twice == 1 or ($gpu_memory_booked_twice and $least_free_gpu_memory)",
    "the GPU is full, or its other processes leave less than this vLLM's share of it: {value}",
)
gpu_time_of_other_processes = signal(
    # a GPU that this vLLM does not use cannot affect it
    "GPU time used by other processes: share ="
    " (sum by ($by) ($gpu_time_of_each_other_process) or 0 * sum by ($by) ($gpu_time_of_own_processes))"
    " unless on (instance, gpu) $gpus_not_serving",
    "other processes use {value} of the GPU's time",
    needs="a driver that tells the utilisation of each process",
    culprit_promql="$gpu_time_of_each_other_process > 0",
    culprit_label="pid {pid}",
)
share_left_by_others = signal(
    "GPU memory left by other processes: share ="
    ' 1 - sum by ($by) (max_over_time(diag_gpu_process_memory_bytes{role="other"}[$window])'
    " unless on (instance, gpu, pid) $gpu_memory_of_own_processes) / ($gpu_memory_total > 0) - 0.03",
    "other processes leave {value} of the GPU's memory, after a 3 % reserve for their growth",
)
host_memory_of_others = signal(
    "memory of all GPUs held by other processes: share ="
    " $gpu_memory_of_others / sum by ($by) (last_over_time(diag_gpu_memory_total_bytes[$window]))",
    "other processes hold {value} of the memory of this host's GPUs",
)
serving_gpu_memory_of_others = signal(
    # an unknown process may belong to any program
    "memory of the serving GPUs held by other processes: share ="
    ' (sum by ($by) (last_over_time(diag_gpu_process_memory_bytes{role=~"other|unknown"}[$window])'
    " unless on (instance, gpu, pid) $gpu_memory_of_own_processes unless on (instance, gpu) $gpus_not_serving)"
    " or 0 * $gpu_memory_of_processes)"
    " / (sum by ($by) (last_over_time(diag_gpu_memory_total_bytes[$window])) > 0)",
    "processes that do not belong to this vLLM hold {value} of the memory of its GPUs",
)
settings_that_pin_kv_cache = signal(
    "settings that pin the KV cache size: settings ="
    f" {cache_config_has('num_gpu_blocks_override', '[0-9]+')} + {cache_config_has('kv_cache_memory_bytes', '[0-9]+')}",
    "settings that pin the KV cache size: {value}",
)
serving = signal(
    "GPU used by this vLLM: bool = max by ($by) (last_over_time(diag_gpu_serving[$window]))",
    "this vLLM runs on the GPU: {value}",
    context=True,
)

# -- links, per host --------------------------------------------------------------------------------------------------

pcie_share = signal(
    "PCIe traffic / link capacity: share = max by ($by) ($pcie_share_of_each_gpu)",
    "the busiest PCIe link runs at {value} of its capacity",
    culprit_promql="$pcie_share_of_each_gpu",
    culprit_label="GPU {gpu}",
    group=SLOWEST_MEMBER,
)
nvlinks = signal(
    "active NVLinks (fewest on a GPU): links = min by ($by) (last_over_time(diag_gpu_nvlink_active_links[$window]))"
    " or 0 * max by ($by) (last_over_time(diag_gpu_up[$window]))",
    "active NVLinks on the GPU with the fewest: {value}",
    group=SLOWEST_MEMBER,
)
pcie_lanes_lost = signal(
    "PCIe lanes lost: share = max by ($by) ($pcie_lanes_lost_by_gpu)",
    "a PCIe link runs with {value} of its lanes missing",
    culprit_promql="$pcie_lanes_lost_by_gpu > 0",
    culprit_label="GPU {gpu}",
    group=SLOWEST_MEMBER,
)
slowest_clock = signal(
    "slowest SM clock / fastest: share = min by ($by) ($serving_sm_clock) / (max by ($by) ($serving_sm_clock) > 0)",
    "the slowest GPU's SM clock is {value} of the fastest GPU's",
    group=SLOWEST_MEMBER,
)

nccl_ranks_missing = signal(
    "ranks missing from NCCL: processes = $nccl_processes_missing",
    "processes of the NCCL job that are behind their peers or do not answer: {value}",
    culprit_promql="$named_nccl_rank",
    culprit_label="{named}",
)
infiniband_link_errors = signal(
    "InfiniBand and RoCE link errors: errors = sum by ($by) ($infiniband_errors)",
    "errors that InfiniBand or RoCE ports of the server's hosts have counted: {value}",
    culprit_promql="$infiniband_errors > 0",
    culprit_label="{kind} on {port} of {host}",
)
infiniband_ports_down = signal(
    "InfiniBand ports gone down: ports = sum by ($by) ($infiniband_ports_lost)",
    "InfiniBand or RoCE ports that were active within an hour and are not now: {value}",
    culprit_promql="$infiniband_ports_lost > 0",
    culprit_label="{port} of {host}",
)
nvlinks_trained_again = signal(
    "NVLinks trained again: errors = sum by ($by) ($nvlink_recoveries)",
    "recoveries of NVLinks: {value}",
    culprit_promql="$nvlink_recoveries > 0",
    culprit_label="GPU {gpu}",
)
flight_recorder_dumps = signal(
    # without an exporter beside the server no dump is seen, and none is worth a search
    "flight recorder dumps: bool ="
    " (max by ($by) (last_over_time(diag_nccl_dump_timestamp_seconds[$window])) > bool 0) or $scraped",
    "PyTorch's flight recorder has written dumps: {value}",
)
