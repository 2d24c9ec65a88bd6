"""Fixes, look-alikes and conditions that several incidents share."""

from diag.core.incident import Effect, Fix, LookAlike, documented, judged, measured
from diag.core.metric_prefix import metric
from diag.knowledge import signals

QUANTIZED_KV = "https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache.html"
CONSERVING_MEMORY = "https://docs.vllm.ai/en/latest/configuration/conserving_memory.html"
SIGNAL_7 = "https://man7.org/linux/man-pages/man7/signal.7.html"
PROC_STATE = "https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html"
FLIGHT = "https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html"

IS_STOPPED = signals.processes_stopped.at_least(1, documented("SIGCONT makes a stopped process go on", SIGNAL_7))
LET_GO_ON = (
    Fix.without_restart(
        command="kill -CONT {pid}   # on {host}",
        change="Let the stopped process go on.",
        effect="tokens are generated again, and requests in flight that have not timed out are answered",
        only_if=(IS_STOPPED,),
        while_it_lasts=True,
        why=measured("42 s after SIGSTOP, SIGCONT: every request in flight was answered", "engine_stalled"),
    ),
    Fix.without_restart(
        change="Find out who or what sent SIGSTOP: the kernel never does so by itself. It may be a job scheduler, a "
        "checkpoint or a debugging tool, a shell (Ctrl-Z), a person.",
        effect="it does not happen again",
        only_if=(IS_STOPPED,),
        why=documented("SIGSTOP and SIGTSTP stop a process", SIGNAL_7),
    ),
    Fix.without_restart(
        command="grep TracerPid /proc/{pid}/status   # on {host}",
        change="End the debugger that holds the process, by the PID that this prints.",
        effect="the process continues where it was stopped",
        only_if=(signals.processes_traced.at_least(1, documented("t: stopped by a tracer", PROC_STATE)),),
        while_it_lasts=True,
        why=documented("a traced process continues when its tracer detaches or ends", PROC_STATE),
    ),
    Fix.without_restart(
        command="cat /proc/{pid}/wchan; sudo cat /proc/{pid}/stack   # on {host}",
        change="Find out what the process waits for in the kernel, storage or a driver. No signal reaches it, not even "
        "SIGKILL, and no setting of the server changes what it waits for. Look at dmesg, at the mount that holds the "
        "model, and at the GPU. If it does not return, only a reboot of the host ends it.",
        effect="the names of kernel functions tell storage (nfs, io_schedule) from a driver (nvidia)",
        only_if=(signals.processes_uninterruptible.at_least(1, documented("D: uninterruptible sleep", PROC_STATE)),),
        while_it_lasts=True,
        why=documented("signals are delivered when the sleep ends", PROC_STATE),
    ),
)
"""Fixes for processes that the kernel has halted; they come before those for a process that hangs while it runs."""
NOT_HALTED = tuple(
    signal.below(1, judged("a process that is halted in the kernel has no stack worth a look"))
    for signal in (signals.processes_stopped, signals.processes_traced, signals.processes_uninterruptible)
)
NOT_ASLEEP = LookAlike(
    "a sleeping engine",
    distinguish="/metrics shows the sleep state, and POST /wake_up ends it.",
    requires=signals.asleep.at_most(
        0,
        documented("a sleeping engine schedules nothing", "https://docs.vllm.ai/en/latest/features/sleep_mode.html"),
    ),
)
NOT_PAUSED = LookAlike(
    "a paused scheduler",
    distinguish="The log, the page (a counted POST /pause) or GET /is_paused shows the pause; POST /resume ends it.",
    requires=signals.scheduler_paused.at_most(
        0, documented("a paused scheduler schedules nothing", "https://docs.vllm.ai/en/stable/training/async_rl/")
    ),
)
NOT_CHANGING = LookAlike(
    "a weight update or an elastic scaling",
    distinguish=f"{metric('rl_weight_update_operations_in_flight')} and {metric('sleep_mode_operations_in_flight')} "
    "(vLLM 0.32) show the calls that are not answered yet, `[Elastic EP]` in the log the scaling; nothing is scheduled "
    "meanwhile.",
    requires=signals.changes_under_way.at_most(
        0,
        documented(
            "the engine runs such a call between two steps", "https://docs.vllm.ai/en/stable/training/async_rl/"
        ),
    ),
)
NO_LONG_PREFILL = signals.standstill_was_prefill.below(
    1, judged("if earlier steps were that long, a standstill counts after two minutes")
)
TROUBLESHOOTING = "https://docs.vllm.ai/en/latest/usage/troubleshooting.html"
SAVE_STACKS = Fix.without_restart(
    change="Before any restart, save on the server's host where each process stands (pip install 'diag[stacks]').",
    command="diag doctor --stacks",
    effect="it names the process that the others wait for, and the call that does not return",
    only_if=NOT_HALTED,
    why=documented("collect stack traces of the hanging processes first", TROUBLESHOOTING),
)
READ_DUMPS = Fix.without_restart(
    change="Compare the last collectives of all ranks: copy the dumps of all nodes into one folder (the launch names "
    "theirs by TORCH_FR_DUMP_TEMP_FILE). The command unpickles them: use it on dumps of your own server only.",
    command="torchfrtrace --prefix comm_lib_trace_rank_ ~/.cache/torch",
    effect="it names the first collective that some ranks have not entered, and these ranks",
    only_if=(
        signals.flight_recorder_dumps.at_least(1, documented("a watchdog writes them when one times out", FLIGHT)),
    ),
    why=documented("torchfrtrace compares the dumps of all ranks", FLIGHT),
)
STACK_TRACES = Fix(
    change="Start it with --watchdog-config from then on (vLLM 0.33 or later): a process that makes no progress then "
    "writes the stack traces of its threads to a file, before the server is restarted.",
    effect="the next stall leaves the call that does not return in a file",
    versions=("0.33.0", ""),
    why=documented("it watches EngineCore and the workers", "https://github.com/vllm-project/vllm/issues/56816"),
)
"""A stalled server is restarted in haste: the evidence must be recorded without a person."""

FP8_HARDWARE = signals.gpu_compute_capability_has_fp8.at_least(
    1, documented("FP8 needs hardware support and an attention backend that reads it", QUANTIZED_KV)
)
READ_LOG = (
    Fix.without_restart(
        change="Read the last lines of the server log before it is rotated: look for the first error, a CUDA error, an "
        "out-of-memory error, or a signal.",
        command="journalctl -u vllm -n 200   # or: kubectl logs --previous <pod>",
        effect="the log names what ended the server",
        only_if=(signals.not_quoted.at_least(1, judged("a line that is quoted need not be looked for")),),
        why=documented("the root cause is logged above EngineDeadError", TROUBLESHOOTING),
    ),
)
"""`diag` quotes the line if it has it; the log shows the lines before it."""
MEMORY_FREE = (
    signals.gpu_memory_free_share.above(0.06, judged("CUDA graphs, NCCL and fragmentation need a reserve")),
    signals.host_memory_of_others.at_most(
        0.02, judged("memory that another process has freed will be allocated again")
    ),
)
SLOW_SERVER = (
    *(
        Effect(name, began_first=True)
        for name in ("kv_eviction_cascade", "kv_pool_saturated", "queue_saturation", "prefill_decode_contention")
    ),
    Effect("replicas_unbalanced", where=(signals.slower_than_peers,)),
)
"""Incidents that a slow server may cause at an unchanged load: requests stay longer, and more of them are in flight. A
server that was crowded before it became slow was too small anyway."""
POOLS_BY_LENGTH = Fix.without_restart(
    change="Route short and long prompts to two pools of servers. `diag doctor` names the split point and the sizes if "
    "its model of this server's lengths reproduces the present TTFT and both pools keep a margin.",
    effect="short prompts no longer queue behind long prefills",
    risk="a pool of one server has no spare; where the mix of lengths shifts, one pool is idle and the other one full",
    rollback="route all prompts to all servers",
    pools=True,
    why=judged("at most half the TTFT p90 of short prompts that the same servers have without pools"),
)
USE_FREE_MEMORY = Fix(
    flag="--gpu-memory-utilization",
    value=signals.utilization_that_uses_free_memory,
    rounding="hundredth_below",
    least=0.05,
    most=0.95,
    direction="raise",
    change=f"Give vLLM the free memory of the GPU, except for a reserve of {100 * signals.RESERVE:g} %.",
    effect="the KV cache grows by the memory gained",
    only_if=(
        *MEMORY_FREE,
        signals.unless_unset("kv_cache_memory_bytes").at_most(
            0, documented("it overrides --gpu-memory-utilization", CONSERVING_MEMORY)
        ),
    ),
    risk="out of memory at start-up or under load if another process uses the GPU",
    rollback="set the old value again",
    why=documented("it is the fraction of GPU memory for the model executor", CONSERVING_MEMORY),
)
MORE_REPLICAS = Fix.without_restart(
    change="Run {value} replicas, so that fewer requests share each KV cache.",
    value=signals.replicas_that_hold_all,
    rounding="up",
    least=2,
    direction="raise",
    current=signals.servers,
    only_if=(signals.balanced,),
    effect="queue time and KV cache usage fall on every replica",
    why=measured("more capacity is what ends the preemptions", "kv_cascade_base"),
)
MORE_KV_CAPACITY = (
    Fix(
        flag="--num-gpu-blocks-override",
        change="Let vLLM size the KV cache from free memory: its size is pinned by --num-gpu-blocks-override.",
        effect="the KV cache grows to what --gpu-memory-utilization allows; queue time and preemptions fall",
        only_if=(
            signals.unless_unset("num_gpu_blocks_override").at_least(
                1, documented("unset by default", CONSERVING_MEMORY)
            ),
        ),
        risk="none known: vLLM profiles the memory at start-up and refuses to start with what does not fit",
        rollback="set the override again",
        why=measured(
            "a KV cache 4 times as large: 0 preemptions, TTFT 4.5 s -> 25 ms, 1.5 to 2.3 times the throughput",
            "kv_cascade_base",
        ),
    ),
    USE_FREE_MEMORY,
    Fix(
        flag="--kv-cache-memory-bytes",
        value=signals.kv_bytes_with_free_memory,
        direction="raise",
        change=f"Give the KV cache the free memory of the GPU, except for a reserve of {100 * signals.RESERVE:g} %: "
        "its size is pinned by this flag.",
        effect="the KV cache grows by the memory gained",
        only_if=(
            signals.unless_unset("kv_cache_memory_bytes").at_least(
                1, documented("unset by default", CONSERVING_MEMORY)
            ),
            *MEMORY_FREE,
        ),
        risk="out of memory at start-up or under load if another process uses the GPU",
        rollback="set the old size again",
        why=documented("it is the KV cache size per GPU, in bytes", CONSERVING_MEMORY),
    ),
    Fix(
        flag="--kv-cache-dtype",
        value="fp8",
        change="Store the KV cache in FP8: the same memory holds about twice as many tokens.",
        effect="twice as many requests fit the KV cache; queue time and preemptions fall",
        only_if=(
            FP8_HARDWARE,
            signals.kv_cache_is_fp8.at_most(
                0, documented("a cache that is quantized already gains nothing", QUANTIZED_KV)
            ),
        ),
        risk="a small loss of accuracy (evaluate your model); the attention backend must support FP8",
        rollback="--kv-cache-dtype auto",
        why=documented("it takes half the bytes per token of a 16-bit cache", QUANTIZED_KV),
    ),
    MORE_REPLICAS,
)
