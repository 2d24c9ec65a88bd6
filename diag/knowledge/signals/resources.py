"""Signals of the host's memory and CPU time, as a server's processes and its cgroup have them."""

from diag.core.incident import Signal
from diag.core.log_events import CUDA_ERROR, ENGINE_START_FAILED, NCCL_TIMEOUT
from diag.knowledge.signals.expressions import RUNNING, edge, itl
from diag.knowledge.signals.forward_progress import (
    COMPILED,
    ENDED,
    ENGINE_PROCESSES,
    OOM_KILL,
    SILENT_PAGE,
    SOON,
    any_of,
    engine_death_logged,
)
from diag.knowledge.signals.host import EVENT_TIME, LAST_PROGRESS_OF_INSTANCE, SERVES, last, since_start
from diag.knowledge.signals.prefill import MEDIAN_ITL

# -- memory -----------------------------------------------------------------------------------------------------------

MEMORY = "diag_host_memory_used_bytes"
RESIDENT = "diag_vllm_process_resident_memory_bytes"
USED, LIMIT = last(MEMORY), last("diag_host_memory_limit_bytes")
GROWTH = f"max by ($by) (deriv({MEMORY}[5m]) and count_over_time({MEMORY}[5m]) >= 5)"
host_memory_share = Signal(
    "host memory used",
    f"{USED} / ({LIMIT} > 0)",
    "{value} of the memory that the server may use is in use, page cache not counted",
    "share",
)
host_memory_time_left = Signal(
    "time until host memory is used up",
    f"({LIMIT} - {USED}) / ({GROWTH} > 0)",
    "at its present growth the rest of the memory lasts for {value}",
    "seconds",
)
# Use that goes up and down is no growth, whatever the slope of a line through it, and neither is one large allocation.
# The limit is the same throughout: another one would look like growth. (VictoriaMetrics counts the first sample as a
# change, so changes() cannot say that there was none.)
STEADILY = (
    f"(max by ($by) (resets({MEMORY}[5m])) <= bool 0.25 * max by ($by) (changes({MEMORY}[5m])))"
    f" * (max by ($by) (changes({MEMORY}[5m])) >= bool 4)"
    f" * ({USED} - min by ($by) (min_over_time({MEMORY}[5m])) > bool 0.05 * ({LIMIT} - {USED}))"
    " * (max by ($by) (max_over_time(diag_host_memory_limit_bytes[5m]))"
    " == bool min by ($by) (min_over_time(diag_host_memory_limit_bytes[5m])))"
)
FILLS = (
    f"((({USED} / ({LIMIT} > 0)) > bool 0.9) * (({LIMIT} - {USED}) / clamp_min({GROWTH}, 1) < bool 900)"
    f" * {STEADILY} * ({SERVES} or {last('up')}))"
)
GROUP_KILLS = 'max by ($by) (increase(diag_host_memory_events_total{event="oom_kill"}[5m]))'
KILLED = f"((abs({OOM_KILL} - {ENDED}) < bool {SOON}) * (1 - {SERVES}))"
ENDS = any_of(fills=FILLS, group=f"({GROUP_KILLS} > bool 0)", host=KILLED)
host_memory_ends = Signal(
    "host memory running out",
    # nearly full, and too few samples to say whether it grows: nobody knows
    f"({ENDS} > 0) or ({ENDS} unless ((({USED} / ({LIMIT} > 0)) > 0.9) unless {GROWTH}))",
    "memory is used up within a quarter of an hour at its present growth, or the kernel has killed for lack of it:"
    " {value}",
    "bool",
    culprit_promql=f"deriv({RESIDENT}[5m]) > on (instance) group_left ()"
    f" (0.3 * max by (instance) (deriv({MEMORY}[5m])))",
    culprit_label="{role} {rank} PID {pid} grows by {value}/s",
    culprit_unit="bytes",
)
share_of_growth = Signal(
    "vLLM's share of the growth of host memory",
    f"sum by ($by) (deriv({RESIDENT}[5m])) / ({GROWTH} > 0)",
    "vLLM's own processes are {value} of the growth of host memory",
    "share",
)
memory_killed = Signal(
    "killed for lack of host memory",
    any_of(group=f"({GROUP_KILLS} > bool 0)", host=KILLED),
    "the kernel has killed a process for lack of memory: {value}",
    "bool",
)

# -- CPU time ---------------------------------------------------------------------------------------------------------

WAITED = "rate(diag_vllm_process_cpu_wait_seconds_total[$window])"
PRESSURE = 'max by ($by) (avg_over_time(diag_host_pressure_ratio{resource="cpu"}[$window]))'
THROTTLED = "max by ($by) (rate(diag_host_cpu_throttled_seconds_total[$window]))"
# how much of a period is lost nobody counts: where the seconds are known, they say more
THROTTLED_PERIODS = (
    "clamp_max(max by ($by) (rate(diag_host_cpu_throttled_periods_total[$window]))"
    " / (max by ($by) (rate(diag_host_cpu_periods_total[$window])) > 0), 1)"
)
cpu_wait_share = Signal(
    "time that a process of vLLM waits for a CPU",
    f"max by ($by) ({WAITED})",
    "the process that waits most is ready to run and has no CPU for {value} of the time",
    "share",
)
cpu_pressure = Signal(
    "CPU pressure",
    PRESSURE,
    "for {value} of the time something in the server's cgroup waits for a CPU",
    "share",
)
cpu_throttled = Signal(
    "CPU throttling",
    # the kernel adds up what each CPU of the group has lost
    f"clamp_max({THROTTLED}, 1) or {THROTTLED_PERIODS}",
    "the CPU quota stops the server's cgroup for {value} of the time, or of the periods",
    "share",
)
# What waits need not miss anything: two ranks that spin on two cores waited for 84 % of the time and served well, and
# pressure of 95 % was measured on a host whose server had all that it needed. So it counts where tokens are late as
# well, or where a quota stops the server for most of the time.
LATE = 0.25
"""Seconds between two tokens: slower than people read."""
STEPS = "sum by ($by) (rate(vllm:iteration_tokens_total_count[$window]))"
TOKENS_LATE = any_of(
    tokens=f"({MEDIAN_ITL} > bool {LATE})",
    steps=f"(({STEPS} < bool 1) * (sum by ($by) (min_over_time({RUNNING}[$window])) >= bool 1))",
)
HURTS = any_of(late=TOKENS_LATE, quota=f"({THROTTLED} > bool 0.5)")
cpu_starvation = Signal(
    "time without a CPU",
    f"max by ($by) ({WAITED}) * {HURTS}"
    f" or clamp_max(({THROTTLED} > {PRESSURE}) or {PRESSURE} or {THROTTLED} or {THROTTLED_PERIODS}, 1) * {TOKENS_LATE}",
    "the server is ready to run and has no CPU for {value} of the time, or of the periods of its CPU quota",
    "share",
    culprit_promql=f"{WAITED} > 0.3",
    culprit_label="{role} {rank} PID {pid}",
)

# -- compilation ------------------------------------------------------------------------------------------------------

compiled_recently = Signal(
    "compilation while serving",
    f"({COMPILED} > bool 0) * (time() - {COMPILED} < bool 300)",
    "kernels or graphs were compiled while requests were served: {value}",
    "bool",
)
stream_pauses = Signal(
    "stream pauses",
    f"{itl('count')} - {itl('bucket', edge('$freeze_seconds'))}",
    "inter-token latencies above freeze_seconds: {value}",
    "pauses",
    window_scaling="peak",
)

# -- faults of a device -----------------------------------------------------------------------------------------------

FAULTS = f"{CUDA_ERROR}|{NCCL_TIMEOUT}"
FAULT_LOGGED = f"(({since_start(FAULTS)}) * (1 - ({since_start(ENGINE_START_FAILED)})))"
# errors of the program that the driver reports; another program on the GPU may have caused one where this server lives
XID_AND_DEATH = (
    'max by (instance) (increase(diag_gpu_xid_errors_total{xid=~"13|31|43|45"}[5m]) > bool 0)'
    " * on (instance) "
    + any_of(
        page=SILENT_PAGE,
        log=f"({engine_death_logged.promql})",
        process=f"(({ENGINE_PROCESSES}) == bool 0)",
    )
)
device_fault = Signal(
    "fault of a device",
    any_of(log=FAULT_LOGGED, xid=f"({XID_AND_DEATH})"),
    "the log reports a CUDA error or a collective that timed out, or the driver an error of the dead engine's program:"
    " {value}",
    "bool",
    culprit_promql=f'(last_over_time({EVENT_TIME}{{event=~"{FAULTS}"}}[$window]) > 0)'
    f" >= on (instance) group_left () ({LAST_PROGRESS_OF_INSTANCE})",
    culprit_label="{event}",
)
