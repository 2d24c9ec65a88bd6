"""Signals of the host: memory, CPU time and halts of a server's processes and its cgroup, and faults of its devices.

A process is halted if it is stopped, held by a debugger or in uninterruptible sleep in the last sample and in nine of
ten samples in the window: reading a file puts a process into uninterruptible sleep for a moment, and a debugger that
takes a stack trace stops it for a moment.
"""

from diag.core import log_events as events
from diag.core.formatting import GIB
from diag.core.incident import Signal
from diag.knowledge.signals.expressions import any_of, parts, signal
from diag.knowledge.signals.forward_progress import OOM_KILL_SECONDS
from diag.knowledge.signals.log import EVENT_TIME, event_time, lately, since_start

DEVICE_FAULTS = (events.CUDA_ERROR, events.NCCL_TIMEOUT, events.ALL_TO_ALL_TIMEOUT)
LATE = 0.25
"""Seconds between two tokens: slower than reading speed."""
SLOWER = 3
"""Multiple of a server's own fast tokens that load alone seldom causes while its engine waits for a CPU (judged)."""
NEARLY_FULL = 0.9
"""Share of its memory from which on a host may run out of it."""
OVERSIZE = 1.92
"""Multiple of --kv-offloading-size that vLLM 0.26 was seen to take of a hybrid model (vllm#53042, open)."""
ROOM = 0.8
"""Share of the host's memory that a smaller buffer aims at: below NEARLY_FULL, with room for bursts."""
FAST_TOKENS = "histogram_quantile(0.25, sum by ($by, le) (last_over_time({}_bucket[$window])))"
SECONDS_TO_DRAIN = 900
"""Seconds in which a server drains and another one starts; the sentence of `host_memory_ends` writes them in words."""

OF_ANY = 'diag_vllm_process_stopped{pid=~"[0-9]+"}'
"""Processes halted in any state, from an exporter that has no diag_vllm_process_state yet."""
WHICH = "{state} {role} {rank} PID {pid} on {host}"
ENGINES = {"worker/[0-9]*": "0", "worker/([0-9]+)[.].*": "$$1", "engine/([0-9]+)": "$$1", ".*/.*": ""}
"""The engine of a process by its role and rank; without an engine in the rank there is only one."""


def in_state(state: str, role: str = ".+") -> str:
    """Return the selector of the processes in this role: 1 in this state, 0 otherwise."""
    return f'diag_vllm_process_state{{pid=~"[0-9]+",role=~"{role}",state=~"{state}"}}'


def halted(selector: str) -> str:
    """Return 1 for each selected process that is halted throughout the window, else 0."""
    samples = "on (instance) group_left () (0.9 * $vllm_up_sampled)"
    return f"(sum_over_time({selector}[$window]) > bool {samples}) * last_over_time({selector}[$window])"


def halted_by_engine(selector: str) -> str:
    """Return `halted`, each process labelled with its engine."""
    labelled = f'label_join({halted(selector)}, "engine", "/", "role", "rank")'
    for pattern, engine in ENGINES.items():
        labelled = f'label_replace({labelled}, "engine", "{engine}", "engine", "{pattern}")'
    return labelled


def culprits(processes: str) -> str:
    """Return the halted processes, with a host and a state for those without such labels."""
    named = f'label_replace({processes} == 1, "host", "its host", "host", "")'
    return f'label_replace({named}, "state", "stopped", "state", "")'


PARTS = parts(
    vars(),
    f"""
    host_memory_meets_its_limit: bool =
        ($limit_hits > bool 0) * $host_memory_limit_is_constant * ($vllm_up or $up_last)
        * (($host_memory_limit - $host_memory) / clamp_min($host_memory_growth_last_minute, 1)
          < bool {SECONDS_TO_DRAIN / 3:g})
    # -- faults of a device
    time_of_device_fault: unix time = {event_time(*DEVICE_FAULTS)}
    halted_processes: bool = {halted_by_engine(in_state(".+"))}
    stopped_processes: bool = {halted_by_engine(in_state("stopped"))}
    traced_processes: bool = {halted_by_engine(in_state("traced"))}
    uninterruptible_processes: bool = {halted_by_engine(in_state("uninterruptible"))}
    stopped_or_traced_processes: bool = {halted_by_engine(in_state("stopped|traced", "engine|worker"))}
    """,
    GIB=GIB,
    OOM_KILL_SECONDS=OOM_KILL_SECONDS,
    since_start=since_start,
)

# -- memory -----------------------------------------------------------------------------------------------------------

host_memory_share = signal(
    "host memory used: share = $host_memory_fill",
    "{value} of the memory that the server may use is in use, page cache not counted",
    context=True,
)
host_memory_time_left = signal(
    "time until host memory is used up: seconds = ($host_memory_limit - $host_memory) / ($host_memory_growth > 0)",
    "at its present growth the rest of the memory lasts for {value}",
)
host_memory_ends = signal(
    # nearly full, with too few samples to judge the growth: unknown
    "host memory running out: bool = ($host_memory_ends > 0)"
    f" or ($host_memory_ends unless (($host_memory_fill > {NEARLY_FULL}) unless $host_memory_growth))",
    "memory is used up within a quarter of an hour at its present growth, or the kernel has killed for lack of it:"
    " {value}",
    culprit_promql="deriv(diag_vllm_process_resident_memory_bytes[5m]) > on (instance) group_left ()"
    " (0.3 * clamp_min(max by (instance) (deriv(diag_host_memory_used_bytes[5m])), 0))",
    culprit_label="{role} {rank} PID {pid} grows by {value}/s",
    culprit_unit="bytes",
)
share_of_growth = signal(
    "vLLM's share of the growth of host memory: share ="
    " sum by ($by) (deriv(diag_vllm_process_resident_memory_bytes[5m])) / ($host_memory_growth > 0)",
    "vLLM's own processes are {value} of the growth of host memory",
)
memory_killed = signal(
    "killed for lack of host memory: bool = "
    + any_of(group="($oom_kills_in_the_cgroup > bool 0)", host="$killed_by_the_kernel"),
    "the kernel has killed a process for lack of memory: {value}",
)

kv_offload_share = signal(
    # nothing is offloaded unless a setting says so; releases before 0.11.1 cannot
    "KV offloading buffer / host memory: share = $kv_offload_share or (0 * ($host_memory_limit"
    ' or max by (instance) (last_over_time(vllm:cache_config_info{kv_offloading_size=~"None|"}[$window])))'
    " unless on (instance) $kv_offload_buffer)",
    "the buffer for offloaded KV blocks is {value} of the memory that the server may use",
)
kv_offload_that_fits = signal(
    "KV offloading size that fits host memory: GiB ="
    f" {ROOM / OVERSIZE:.3f} * $host_memory_limit / {GIB} / $engines_worth_of_ranks",
    f"a --kv-offloading-size of {{value}} GiB takes at most {100 * ROOM:g} % of the memory that the server may use,"
    f" also where vLLM takes {OVERSIZE:g} times the size",
)
kv_offload_with_room = signal(
    "KV offloading size that leaves room: GiB ="
    f" $config_kv_offloading_size - ($host_memory - {ROOM} * $host_memory_limit) / {GIB} / $engines_worth_of_ranks",
    f"with a --kv-offloading-size of {{value}} GiB, at most {100 * ROOM:g} % of the memory is in use",
)

# -- CPU time ---------------------------------------------------------------------------------------------------------

cpu_wait_share = signal(
    "time that a process of vLLM waits for a CPU: share = $longest_cpu_wait",
    "the process that waits most is ready to run and has no CPU for {value} of the time",
)
cpu_pressure = signal(
    "CPU pressure: share = $cpu_pressure_mean",
    "for {value} of the time something in the server's cgroup waits for a CPU",
    context=True,
)
cpu_throttled = signal(
    # the kernel sums the throttled time of all CPUs of the cgroup
    "CPU throttling: share = clamp_max($cpu_throttled_share, 1) or $cpu_throttled_periods",
    "the CPU quota stops the server's cgroup for {value} of the time, or of the periods",
)
cpu_starvation = signal(
    "time without a CPU: share = ($longest_cpu_wait * $cpu_wait_hurts > 0) or $engine_cpu_wait * $tokens_slower"
    " or $longest_cpu_wait * $cpu_wait_hurts or ($cpu_short * $tokens_late > 0)"
    # without the time that each process waits, a scarce CPU is no harm if tokens come as fast as ever; if they are
    # slower, or their usual speed is unknown, nothing decides
    " or 0 * ($cpu_short <= 0.5) or 0 * ($cpu_short and $tokens_slower == 0 unless $cpu_throttled_share > 0.5)",
    "the server is ready to run and has no CPU for {value} of the time, or of the periods of its CPU quota",
    culprit_promql="$cpu_wait > 0.3",
    culprit_label="{role} {rank} PID {pid}",
)

# -- compilation ------------------------------------------------------------------------------------------------------

compiled_recently = signal(
    "compilation while serving: bool = " + lately(f"time_of_{events.COMPILED_WHILE_SERVING}", 300),
    "kernels or graphs were compiled while requests were served: {value}",
)
compiled = signal(
    "compilation, by log or processes: bool ="
    " $engine_seen + on (instance) group_left () $compiled_within_five_minutes by (instance) or $engine_seen",
    "kernels or graphs were compiled in the last five minutes: {value}",
)
stream_pauses = signal(
    "stream pauses: pauses = $itl_count - $itl_within_freeze_seconds",
    "inter-token latencies above the stream pause threshold: {value}",
    window_scaling="peak",
)

# -- faults of a device -----------------------------------------------------------------------------------------------

device_fault = signal(
    "fault of a device: bool = " + any_of(log="$device_fault_logged", xid="$xid_of_the_dead_engine"),
    "the log reports a CUDA error or a collective that timed out, or the driver an error of the dead engine's program:"
    " {value}",
    culprit_promql=f'(last_over_time({EVENT_TIME}{{event=~"{"|".join(DEVICE_FAULTS)}"}}[$window]) > 0)'
    " >= on (instance) group_left () ($last_startup_progress by (instance))",
    culprit_label="{event}",
)


def _halted_in(state: str, sentence: str, processes: str) -> Signal:
    """Return the number of halted processes of an engine or a server; 0 if the process table is not observed."""
    return Signal(
        f"processes {state}",
        f"sum by ($by) ({processes}) or 0 * max by ($by) (count_over_time(up[$window]))",
        sentence,
        "processes",
        culprit_promql=culprits(processes),
        culprit_label=WHICH,
    )


# a live look at a server whose page has never answered is told so by the kernel alone
api_server_stopped = signal(
    "API server stopped: bool ="
    f" (sum by ($by) ({halted(in_state('stopped|traced', 'api_server'))}) > bool 0) * $does_not_answer",
    "the kernel has halted the API server, and /metrics does not answer: {value}",
)
processes_stopped = _halted_in(
    "stopped", "vLLM processes that are stopped: {value}", "$stopped_processes_of_any_exporter"
)
processes_traced = _halted_in(
    "held by a debugger", "vLLM processes that a debugger holds: {value}", "$traced_processes"
)
processes_uninterruptible = _halted_in(
    "in uninterruptible sleep", "vLLM processes in uninterruptible sleep: {value}", "$uninterruptible_processes"
)
requests_stuck_or_stopped = signal(
    "requests stuck, or stopped processes: requests = "
    + any_of(stuck="$requests_in_flight_without_progress", stopped="($stopped_processes_of_the_engine > 0)"),
    "requests in flight without any progress, or stopped processes of the engine: {value}",
    throughout=True,
    culprit_promql=culprits("$halted_by_any_exporter"),
    culprit_label=WHICH,
)
requests_not_admitted = signal(
    "requests that are not admitted: requests = 0 * ($stopped_processes_of_the_engine > 0) or $requests_not_admitted",
    "requests that wait while none runs and nothing moves: {value}",
    throughout=True,
)
stalled = signal(
    "requests without progress, or stopped processes: requests ="
    " ($pauses_of_a_standstill > 0) or $requests_stuck_or_stopped_processes",
    "requests in flight without any progress (or with a pause of over 40 s), or stopped processes: {value}",
    throughout=True,
    culprit_promql=culprits("$halted_by_any_exporter"),
    culprit_label=WHICH,
    formerly=("requests in flight without progress",),
)
