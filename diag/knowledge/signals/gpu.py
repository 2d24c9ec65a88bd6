"""Signals of one GPU: throttling, faults, memory, links. The metrics are described in docs/metrics.md."""

from diag.core.incident import Signal
from diag.knowledge.signals.expressions import cache_config_has, counted


def average(metric: str, matchers: str = "") -> str:
    """The mean of a gauge in the window, per subject, with at least three samples."""
    at = f"{metric}{{{matchers}}}[$window]"
    return f"(max by ($by) (avg_over_time({at}) and count_over_time({at}) >= 3))"


THERMAL = 'reason=~"sw_thermal|hw_thermal"'
BRAKE = 'reason="hw_power_brake"'


def throttled_share(reasons: str) -> str:
    """The share of the window spent throttled: by NVML's counters, else by the samples that show it active."""
    counters = f"max by ($by) (rate(diag_gpu_throttle_seconds_total{{{reasons}}}[$window]))"
    return f"({counters} or {average('diag_gpu_throttle_active', reasons)})"


def throttled_seconds(reasons: str) -> str:
    """Seconds spent throttled; without counters, the minimum that the samples prove for any window of 30 s."""
    counters = f"max by ($by) (increase(diag_gpu_throttle_seconds_total{{{reasons}}}[$window]))"
    return f"({counters} or 30 * {average('diag_gpu_throttle_active', reasons)})"


thermal_share = Signal(
    "thermal slowdown (share of time)",
    throttled_share(THERMAL),
    "the GPU spent {value} of the time in thermal slowdown",
    "share",
)
thermal_seconds = Signal(
    "thermal slowdown (time)",
    throttled_seconds(THERMAL),
    "the GPU was in thermal slowdown for {value}",
    "seconds",
    window_scaling="peak",
)
brake_seconds = Signal(
    "hardware power brake (time)",
    throttled_seconds(BRAKE),
    "the hardware power brake was asserted for {value}",
    "seconds",
    window_scaling="peak",
)
UTILIZATION = average("diag_gpu_utilization_ratio")
utilization = Signal("GPU utilisation", UTILIZATION, "GPU utilisation is {value}", "share")
SM = 'clock="sm"'
clock_loss = Signal(
    "SM clock below its maximum",
    # an idle GPU lowers its clock by itself: only a busy GPU loses performance
    f"(1 - {average('diag_gpu_clock_hertz', SM)} / ({average('diag_gpu_clock_max_hertz', SM)} > 0))"
    f" * ({UTILIZATION} > bool 0.5)",
    "the SM clock is {value} below its maximum while the GPU is busy",
    "share",
)
margin = Signal(
    "margin to thermal slowdown",
    "min by ($by) (min_over_time(diag_gpu_temperature_margin_celsius[$window]))",
    "the GPU is {value} below its slowdown temperature",
    "celsius",
)
DRAWN = f"0.95 * {average('diag_gpu_power_watts')}"
LOWEST = average("diag_gpu_power_limit_min_watts")
sustained_power = Signal(
    "95 % of the power drawn",
    f"({DRAWN} >= {LOWEST}) or ({LOWEST} and {DRAWN}) or {DRAWN}",
    "the cooling sustains {value}",
    "watts",
)

XIDS = 'xid!~"13|31|43|45"'
"""Xid 13, 31, 43 and 45 are caused by the application; all others by the hardware or the driver."""
SERIOUS = {
    "GPU lost": "1 - min by ($by) (last_over_time(diag_gpu_up[$window]))",
    "Xid": counted("diag_gpu_xid_errors_total", XIDS),
    "uncorrectable memory error": counted("diag_gpu_ecc_errors_total", 'kind="uncorrected"'),
    "row that could not be replaced": "max by ($by) (last_over_time(diag_gpu_remap_failure[$window]))",
}
SIGNS = " or ".join(f'label_replace({promql}, "sign", "{name}", "", "")' for name, promql in SERIOUS.items())
FAULTS = f"sum by ($by) ({SIGNS})"
gpu_faults = Signal(
    "GPU faults",
    # what a board does not count it cannot show; but without a count of Xid errors most faults pass unseen
    f"({FAULTS} > 0) or ({FAULTS} and {SERIOUS['Xid']})",
    "GPU faults (GPU lost, Xid errors, uncorrectable memory errors, failed row remaps): {value}",
    "faults",
    needs="a count of Xid errors",
    window_scaling="peak",
    culprit_promql=f"label_replace(increase(diag_gpu_xid_errors_total{{{XIDS}}}[$window]) > 0,"
    ' "named", "Xid $$1", "xid", "(.*)")'
    + "".join(
        f' or label_replace(({promql}) > 0, "named", "{name}", "", "")'
        for name, promql in SERIOUS.items()
        if name != "Xid"
    ),
    culprit_label="{named}",
)

SERVING = "unless on (instance, gpu) (last_over_time(diag_gpu_serving[$window]) == 0)"
TOTAL = "max by ($by) (last_over_time(diag_gpu_memory_total_bytes[$window]))"
MUCH_MEMORY = 0.05
"""The share of a GPU's memory that no desktop and no monitoring agent holds."""


def memory_of(role: str) -> str:
    """The share of a GPU's memory that the processes in this role hold."""
    return f'(sum by ($by) (last_over_time(diag_gpu_process_memory_bytes{{role="{role}"}}[$window])) / ({TOTAL} > 0))'


memory_of_other_processes = Signal(
    "GPU memory held by other processes",
    # one whose owner cannot be seen from here, in another container, may be another one or this vLLM's own
    f"({memory_of('other')} >= {MUCH_MEMORY}) or (({memory_of('other')}"
    " or 0 * sum by ($by) (last_over_time(diag_gpu_process_memory_bytes[$window])))"
    f" unless {memory_of('unknown')} >= {MUCH_MEMORY})",
    "other processes hold {value} of the GPU's memory",
    "share",
    culprit_promql='last_over_time(diag_gpu_process_memory_bytes{role="other"}[$window])',
    culprit_label="pid {pid}",
)
share_left_by_others = Signal(
    "GPU memory left by other processes",
    f'1 - sum by ($by) (max_over_time(diag_gpu_process_memory_bytes{{role="other"}}[$window])) / ({TOTAL} > 0) - 0.03',
    "other processes leave {value} of the GPU's memory, after a 3 % reserve for their growth",
    "share",
)
host_memory_of_others = Signal(
    "memory of all GPUs held by other processes",
    'sum by ($by) (last_over_time(diag_gpu_process_memory_bytes{role="other"}[$window]))'
    " / sum by ($by) (last_over_time(diag_gpu_memory_total_bytes[$window]))",
    "other processes hold {value} of the memory of this host's GPUs",
    "share",
)
serving_gpu_memory_of_others = Signal(
    "memory of the serving GPUs held by other processes",
    # an unknown process may belong to anybody
    '(sum by ($by) (last_over_time(diag_gpu_process_memory_bytes{role=~"other|unknown"}[$window]) '
    f"{SERVING}) or 0 * sum by ($by) (last_over_time(diag_gpu_process_memory_bytes[$window])))"
    " / (sum by ($by) (last_over_time(diag_gpu_memory_total_bytes[$window])) > 0)",
    "processes that do not belong to this vLLM hold {value} of the memory of its GPUs",
    "share",
)
settings_that_pin_kv_cache = Signal(
    "settings that pin the KV cache size",
    f"{cache_config_has('num_gpu_blocks_override', '[0-9]+')} + {cache_config_has('kv_cache_memory_bytes', '[0-9]+')}",
    "settings that pin the KV cache size: {value}",
    "settings",
)
serving = Signal(
    "GPU used by this vLLM",
    "max by ($by) (last_over_time(diag_gpu_serving[$window]))",
    "this vLLM runs on the GPU: {value}",
    "bool",
)

# -- links, per host --------------------------------------------------------------------------------------------------

LINK = (
    # bytes per second in one direction: 0.985 GB/s per lane in generation 3, doubling with every later generation
    '(0.985e9 * 2 ^ (max by (instance, gpu) (max_over_time(diag_gpu_pcie_link_generation{which="current"}[$window]))'
    ' - 3) * max by (instance, gpu) (max_over_time(diag_gpu_pcie_link_width{which="current"}[$window])))'
)
PCIE = (
    "(max by (instance, gpu) (rate(diag_gpu_pcie_bytes_total[$window]))"
    " or max by (instance, gpu) (avg_over_time(diag_gpu_pcie_throughput_bytes_per_second[$window])))"
)
pcie_share = Signal(
    "PCIe traffic / link capacity",
    f"max by ($by) (({PCIE} / {LINK}) {SERVING})",
    "the busiest PCIe link runs at {value} of its capacity",
    "share",
    culprit_promql=f"({PCIE} / {LINK}) {SERVING}",
    culprit_label="GPU {gpu}",
)
nvlinks = Signal(
    "active NVLinks (fewest on a GPU)",
    "min by ($by) (last_over_time(diag_gpu_nvlink_active_links[$window]))"
    " or 0 * max by ($by) (last_over_time(diag_gpu_up[$window]))",
    "active NVLinks on the GPU with the fewest: {value}",
    "links",
)
pcie_lanes_lost = Signal(
    "PCIe lanes lost",
    'max by ($by) ((1 - max by (instance, gpu) (max_over_time(diag_gpu_pcie_link_width{which="current"}[$window]))'
    ' / on (instance, gpu) max by (instance, gpu) (max_over_time(diag_gpu_pcie_link_width{which="max"}[$window])))'
    f" {SERVING})",
    "a PCIe link runs with {value} of its lanes missing",
    "share",
)
slowest_clock = Signal(
    "slowest SM clock / fastest",
    'min by ($by) (avg_over_time(diag_gpu_clock_hertz{clock="sm"}[$window]) ' + SERVING + ")"
    ' / (max by ($by) (avg_over_time(diag_gpu_clock_hertz{clock="sm"}[$window]) ' + SERVING + ") > 0)",
    "the slowest GPU's SM clock is {value} of the fastest GPU's",
    "share",
)
