"""Signals of a server's log and its processes, and of its GPUs as the ranks of one engine.

The metrics are described in docs/metrics.md. Where a whole family is missing, its signals are missing too.
"""

from diag.core.incident import Condition, Signal, judged
from diag.core.log_events import (
    CUDA_OUT_OF_MEMORY,
    ENGINE_START_FAILED,
    FREE_MEMORY_BELOW_REQUESTED,
    MAX_MODEL_LEN_EXCEEDS_KV_CACHE,
    NO_START_FAILURE,
    OUT_OF_MEMORY,
    SHM_BROADCAST_WAIT,
)
from diag.core.startup_phases import CUDA_GRAPH_CAPTURE, STARTING, STARTUP_PHASES
from diag.knowledge.signals.expressions import RUNNING, configured

EVENT_TIME = "diag_vllm_log_event_last_timestamp_seconds"
HEARSAY_TIME = "diag_vllm_log_hearsay_timestamp_seconds"
PHASE = "diag_vllm_startup_phase"
SPENT = "diag_vllm_startup_phase_seconds"
IS_STARTING = f'phase=~"{"|".join(STARTING)}"'


def last(metric: str, matchers: str = "", join: str = "max", by: str = "$by") -> str:
    """The last sample of a gauge in the window, per subject."""
    return f"{join} by ({by}) (last_over_time({metric}{{{matchers}}}[$window]))"


# -- start-up ---------------------------------------------------------------------------------------------------------

LAST_PROGRESS = last("diag_vllm_startup_last_progress_timestamp_seconds")
LAST_PROGRESS_OF_INSTANCE = last("diag_vllm_startup_last_progress_timestamp_seconds", by="instance")
SERVES = last("diag_vllm_up")
LAST_SERVED = "max by (instance) (last_over_time(diag_vllm_up[$window]))"
IN_PHASE = last(PHASE, IS_STARTING)


def event_time(events: str) -> str:
    """The time of the last such log line; 0 if there was none."""
    return last(EVENT_TIME, f'event=~"{events}"')


def since_start(events: str) -> str:
    """1 where such a line was logged, and nothing has started since; else 0."""
    return f"({event_time(events)} > bool 0) * ({event_time(events)} >= bool {LAST_PROGRESS})"


FAILED_SINCE = f"({event_time(ENGINE_START_FAILED)} - ({LAST_PROGRESS}))"
startup_failed = Signal(
    "engine start failed",
    # no new start has been seen since that log line, and /metrics does not answer
    f"({event_time(ENGINE_START_FAILED)} > bool 0) * ({FAILED_SINCE} >= bool 0) * (1 - {SERVES})",
    "the log reports a failed engine start, and nothing has started since: {value}",
    "bool",
    culprit_promql=f'(last_over_time({EVENT_TIME}{{event!~"{"|".join(NO_START_FAILURE)}"}}[$window]) > 0)'
    f" >= on (instance) group_left () ({LAST_PROGRESS_OF_INSTANCE})",
    culprit_label="{event}",
)
LOG_ERROR = "diag_vllm_log_error_timestamp_seconds"
quoted_error = Signal(
    "error quoted from the log",
    f"count by ($by) (last_over_time({LOG_ERROR}[$window]))",
    "lines of the log that say why the server failed: {value}",
    "lines",
    culprit_promql=f"last_over_time({LOG_ERROR}[$window])",
    culprit_label="{text}",
)
not_quoted = Signal(
    "no error quoted from the log",
    f"1 - clamp_max(count by ($by) (last_over_time({LOG_ERROR}[$window])), 1)"
    f" or 0 * max by ($by) (last_over_time({EVENT_TIME}[$window])) + 1",
    "no line of the log says why the server failed: {value}",
    "bool",
)
starting = Signal(
    "engine starting",
    f"({IN_PHASE}) * (1 - {SERVES}) * (1 - ({startup_failed.promql}))",
    "the log shows a start in progress and /metrics does not answer yet: {value}",
    "bool",
    culprit_promql=f"last_over_time({SPENT}[$window]) and on (instance, phase)"
    f" (last_over_time({PHASE}{{{IS_STARTING}}}[$window]) == 1)",
    culprit_label="{phase} for {value}",
    culprit_unit="seconds",
)
# a zombie has ended: it keeps its CPU time until its parent asks for it
RUNNING_PROCESSES = (
    "count by ($by) (last_over_time(diag_vllm_process_cpu_seconds_total[$window]) unless on (instance, pid)"
    ' (last_over_time(diag_vllm_process_state{state="zombie"}[$window]) == 1))'
)
processes = Signal(
    "vLLM processes",
    RUNNING_PROCESSES,
    "running processes of this vLLM: {value}",
    "processes",
)


LONGEST_SILENCE = 3600
"""Seconds without a line after which nothing starts any more; kernels were compiled for 2,219 s (vllm#34399)."""
NO_LINE_YET = 600
"""Seconds for which a server process that has shown nothing yet is starting: VLLM_ENGINE_READY_TIMEOUT_S."""
SCRAPED = "0 * max by ($by) (last_over_time(up[$window]))"
PROCESS_START = last("diag_vllm_process_start_time_seconds")
# No process is left only where the collector has seen some: it goes on counting the roles that it saw, and may never
# see the processes of another container.
NO_PROCESS = "(sum by ($by) (last_over_time(diag_vllm_processes[$window])) <= 0)"
SEEN_TODAY = "count by ($by) (count_over_time(diag_vllm_process_start_time_seconds[1d]))"
ALIVE = f"(({processes.promql} > bool 0) or {NO_PROCESS} or 0 * {SEEN_TODAY} or {SCRAPED} + 1)"
STARTS_BY_LOG = f"({starting.promql}) * {ALIVE} * (time() - ({LAST_PROGRESS}) < bool {LONGEST_SILENCE})"
# neither the log nor the page has shown this process yet
STARTS_BY_PROCESS = (
    f"(time() - ({PROCESS_START}) < bool {NO_LINE_YET})"
    f" * (({PROCESS_START} > bool {LAST_PROGRESS}) or {SCRAPED} + 1)"
    f" * (({PROCESS_START} - 1 > bool max by ($by) (last_over_time(process_start_time_seconds[1d]))) or {SCRAPED} + 1)"
)
start_under_way = Signal(
    "start under way",
    f"clamp_max(({STARTS_BY_LOG} or {SCRAPED}) + ({STARTS_BY_PROCESS} or {SCRAPED}), 1)",
    "the log or the process table shows a start under way: {value}",
    "bool",
)
CHANGES = "max by ($by) (changes({}[15m]))"
crashes_in_a_row = Signal(
    "crashes in a row",
    f"({last('diag_vllm_log_consecutive_crashes')}"
    f" or {CHANGES.format('diag_vllm_process_start_time_seconds')} or {CHANGES.format('process_start_time_seconds')})"
    " and on (instance) (count by (instance) (count_over_time(diag_vllm_up[1d]))"
    f" or count by (instance) (count_over_time({RUNNING}[1d])))",
    "crashes in a row: {value}",
    "crashes",
)


startup_overdue = Signal(
    "start-up phase / its usual duration",
    "max by ($by) ("
    + " or ".join(
        f'last_over_time({SPENT}{{phase="{phase.name}"}}[$window]) / {phase.usual_seconds}'
        for phase in STARTUP_PHASES
        if phase.usual_seconds
    )
    + ")",
    "the slowest start-up phase has taken {value} times its usual duration",
    "ratio",
    culprit_promql=f"last_over_time({SPENT}[$window]) > 1",
    culprit_label="{phase} {value}",
    culprit_unit="seconds",
)
time_without_startup_progress = Signal(
    "time without start-up progress",
    f"(time() - ({LAST_PROGRESS})) * ({IN_PHASE})",
    "the start has made no progress for {value}",
    "seconds",
)
in_graph_capture = Signal(
    "in CUDA-graph capture",
    last(PHASE, f'phase="{CUDA_GRAPH_CAPTURE}"'),
    "the start is in CUDA-graph capture: {value}",
    "bool",
)
processes_still_running = Signal(
    "vLLM processes still running",
    f"{RUNNING_PROCESSES} or {NO_PROCESS} or 0 * {SEEN_TODAY} or 0 * {LAST_PROGRESS} + 1",
    "running processes of this vLLM (1 where none has been seen yet): {value}",
    "processes",
)
startup_seconds = Signal(
    "start-up time so far",
    f"sum by ($by) (last_over_time({SPENT}[$window]))",
    "the start has taken {value} so far",
    "seconds",
)
twice_the_startup = Signal(
    "twice the start-up time so far",
    f"2 * sum by ($by) (last_over_time({SPENT}[$window]))",
    "twice the start-up time so far is {value}",
    "seconds",
)
LOADING = 'phase="load_weights"'
LOADS = last(PHASE, LOADING)
weights_read_rate = Signal(
    "weights read from storage / s",
    f"sum by ($by) (rate(diag_vllm_process_read_bytes_total[$window])) * ({LOADS} == 1)",
    "vLLM reads its weights at {value} per second",
    "bytes",
)
weights_time_left = Signal(
    "time until the weights are loaded",
    f"(1 / ({last('diag_vllm_startup_progress_ratio')} > 0) - 1) * ({last(SPENT, LOADING)}) * ({LOADS} == 1)",
    "at this rate the rest of the weights takes {value}",
    "seconds",
)
probe_failures_allowed = Signal(
    "startupProbe failureThreshold (10 s period)",
    f"ceil(1.5 * sum by ($by) (last_over_time({SPENT}[$window])) / 10)",
    "{value} probes, 10 s apart, cover 1.5 times the start-up time so far",
    "probes",
)


def not_set(flag: str) -> Condition:
    """The switch is off or the setting is not given; where no source knows, the default (off) is assumed."""
    off = f"(1 - ({configured(flag)})) or 0 * {LAST_SERVED} + 1"
    name = f"--{flag.replace('_', '-')} not set"
    return Signal(name, off, "the flag is not set: {value}", "bool").at_least(
        1, judged("a flag that is set already is not proposed")
    )


def given(flag: str) -> Condition:
    """The setting is given; where no source knows, the default (not given) is assumed."""
    on = f"({configured(flag)} > bool 0) or 0 * {LAST_SERVED}"
    name = f"--{flag.replace('_', '-')} set"
    return Signal(name, on, "the flag is set: {value}", "bool").at_least(1, judged("what is not set cannot be removed"))


# -- out of memory ----------------------------------------------------------------------------------------------------

OOM = "|".join(OUT_OF_MEMORY)
RECENT = "5m"


def event_recently(events: str) -> str:
    """1 where such a line was logged recently, or ended a start after which no other began; else 0."""
    at = event_time(events)
    return (
        f"({at} > bool 0) * clamp_max((time() - {at} < bool 300) + ({at} >= bool {LAST_PROGRESS}) * (1 - {SERVES}), 1)"
    )


def log_value(event: str, field: str) -> str:
    """A number from the last such log line, per instance."""
    return last("diag_vllm_log_value", f'event="{event}",field="{field}"')


out_of_memory = Signal(
    "out-of-memory error in the log",
    event_recently(OOM),
    "the log reports an out-of-memory error: {value}",
    "bool",
    culprit_promql=f'last_over_time({EVENT_TIME}{{event=~"{OOM}"}}[$window]) > 0',
    culprit_label="{event}",
)


def logged(event: str) -> Signal:
    """Whether this event was logged, for a fix that depends on it."""
    return Signal(f"{event} in the log", event_recently(event), f"the log reports {event}: {{value}}", "bool")


utilization_that_fits = Signal(
    "GPU memory free at start",
    f"{log_value(FREE_MEMORY_BELOW_REQUESTED, 'free_gibibytes')}"
    f" / ({log_value(FREE_MEMORY_BELOW_REQUESTED, 'total_gibibytes')} > 0)",
    "{value} of the GPU's memory was free at start",
    "share",
)
context_that_fits = Signal(
    "longest context that fits the KV cache",
    f"{log_value(MAX_MODEL_LEN_EXCEEDS_KV_CACHE, 'estimated_max_model_len')}"
    f" or floor({log_value(MAX_MODEL_LEN_EXCEEDS_KV_CACHE, 'max_model_len')}"
    f" * {log_value(MAX_MODEL_LEN_EXCEEDS_KV_CACHE, 'available_gibibytes')}"
    f" / ({log_value(MAX_MODEL_LEN_EXCEEDS_KV_CACHE, 'needed_gibibytes')} > 0) / 16) * 16",
    "a context of {value} tokens fits the KV cache",
    "tokens",
)
utilization_with_room = Signal(
    "GPU memory share with room for the failed allocation",
    f"({configured('gpu_memory_utilization')}) - clamp_min({log_value(CUDA_OUT_OF_MEMORY, 'wanted_gibibytes')}"
    f" - {log_value(CUDA_OUT_OF_MEMORY, 'free_gibibytes')}, 0)"
    f" / ({log_value(CUDA_OUT_OF_MEMORY, 'total_gibibytes')} > 0) - 0.005",
    "a --gpu-memory-utilization of {value} leaves room for the failed allocation",
    "share",
)

half_of_default_capture_size = Signal(
    "half of the largest CUDA graph captured by default",
    # vLLM captures up to the smaller of 2 x --max-num-seqs and 512
    f"clamp_max({configured('max_num_seqs')}, 256)",
    "half of the largest CUDA graph captured by default is {value} tokens",
    "tokens",
)

# -- ranks ------------------------------------------------------------------------------------------------------------

WORKERS = 'diag_vllm_process_cpu_seconds_total{role="worker"}'
WORKER_CPU = f"rate({WORKERS}[$window])"
STILL, SPINS = 0.05, 0.8
"""CPU cores: a worker below the first stands still, a worker above the second busy-waits or computes."""
SPIN_OF_WORK, SPIN_OF_LIMIT = 0.6, 0.4
"""Shares of power below which a busy GPU busy-waits."""
TP, PP = configured("tensor_parallel_size"), configured("pipeline_parallel_size")
ENGINES = f"count by ($by) (count by ($by, engine) (last_over_time({RUNNING}[$window])))"
WORLD = f"(({TP}) * (({PP}) or 1 + 0 * ({TP})) * ({ENGINES} or 1 + 0 * ({TP})))"
"""The ranks of all engines of a server. None is missing only where as many of them are seen."""
SERVING = "unless on (instance, gpu) (last_over_time(diag_gpu_serving[$window]) == 0)"
BUSY = f"(max by (instance, gpu) (avg_over_time(diag_gpu_utilization_ratio[$window])) {SERVING})"
POWER = "max by (instance, gpu) (avg_over_time(diag_gpu_power_watts[$window]))"
AT_WORK = (
    "(max by (instance, gpu) (max_over_time(diag_gpu_power_watts[1h])) > 0 and on (instance)"
    " sum by (instance) (increase(vllm:generation_tokens_total[1h])) > 0)"
)
OF_WORK = f"({POWER} / on (instance, gpu) {AT_WORK})"
OF_LIMIT = (
    f"({POWER} / on (instance, gpu) (max by (instance, gpu) (avg_over_time(diag_gpu_power_limit_watts[$window])) > 0))"
)
"""Power as a share of the most that this GPU drew within an hour in which tokens were generated, and of its limit.

A small card draws half of its limit while it spins, and some parts (GB10, Jetson) have none: the limit decides nothing
where it is known what the card draws at work, and proves no more than that a rank spins where it is not.
"""
LITTLE_POWER = f"({OF_WORK} < {SPIN_OF_WORK} or on (instance, gpu) (({OF_LIMIT} < {SPIN_OF_LIMIT}) unless {OF_WORK}))"
SPINNING = f"(({BUSY} > 0.9) and on (instance, gpu) {LITTLE_POWER})"
KNOWN_GPUS = f"(({BUSY} <= 0.9) or ({BUSY} and on (instance, gpu) {OF_WORK}))"
"""The GPUs of which it is known whether they spin."""
RANK_OF_GPU = (
    "max by (instance, gpu, rank) (last_over_time("
    'diag_gpu_process_memory_bytes{role="worker",rank!=""}[$window]) * 0 + 1)'
)
STILL_GPUS = f"(({BUSY} and on (instance) {SPINNING}) unless on (instance, gpu) {SPINNING})"
"""The GPUs that do not busy-wait while another one does."""
STILL_WORKERS = (
    f"((count by ($by) ({WORKER_CPU} < {STILL}) and max by ($by) ({WORKER_CPU}) > {SPINS})"
    f" or 0 * (count by ($by) ({WORKER_CPU}) >= {WORLD}))"
)
SPINNING_GPUS = f"(count by ($by) ({SPINNING}) or 0 * (count by ($by) ({KNOWN_GPUS}) >= {WORLD}))"
WAITED = event_time(SHM_BROADCAST_WAIT)
LOG_WAITS = f"({WAITED} > bool 0) * (time() - {WAITED} < bool 120)"
"""vLLM repeats the line every 60 s."""
WHICH_RANK = (
    f"label_replace(({WORKER_CPU} < {STILL}) and on (instance) (max by (instance) ({WORKER_CPU}) > {SPINS}),"
    ' "named", "rank $$1", "rank", "(.*)")'
    " or label_join(label_replace(label_replace("
    f"{STILL_GPUS} * on (instance, gpu) group_left (rank) {RANK_OF_GPU} or on (instance, gpu) {STILL_GPUS}"
    ', "one", "GPU $$1", "gpu", "(.*)"), "two", " (rank $$1)", "rank", "(.+)"), "named", "", "one", "two")'
)
RANKS_OUT_OF_STEP = f"(({STILL_WORKERS} > 0) or ({SPINNING_GPUS} > 0) or {STILL_WORKERS} or {SPINNING_GPUS})"
ranks_out_of_step = Signal(
    "ranks out of step",
    RANKS_OUT_OF_STEP,
    "ranks that stand still while a peer busy-waits, or that busy-wait at low power: {value}",
    "ranks",
    culprit_promql=WHICH_RANK,
    culprit_label="{named}",
)
ranks_missing_from_collective = Signal(
    "ranks missing from a collective",
    # the log decides where neither processes nor GPUs are observed
    f"{RANKS_OUT_OF_STEP} or {LOG_WAITS}",
    "ranks missing from a collective (by processes, GPUs or the log): {value}",
    "ranks",
    culprit_promql=WHICH_RANK,
    culprit_label="{named}",
)
ranks = Signal(
    "tensor-parallel ranks",
    f"({configured('tensor_parallel_size')}) or count by ($by) (last_over_time({WORKERS}[$window]))"
    # an engine without workers computes by itself
    ' or 0 * count by ($by) (last_over_time(diag_vllm_process_cpu_seconds_total{role="engine"}[$window])) + 1',
    "tensor-parallel ranks: {value}",
    "ranks",
)
half_of_the_ranks = Signal(
    "half of the tensor-parallel ranks", f"{TP} / 2", "half of the tensor-parallel ranks: {value}", "ranks"
)
odd_ranks = Signal(
    "tensor-parallel ranks left over by halving",
    f"{TP} % 2",
    "tensor-parallel ranks left over by halving: {value}",
    "ranks",
)
twice_the_stages = Signal(
    "twice the pipeline-parallel stages",
    f"2 * ({PP} or 1 + 0 * {TP})",
    "twice the pipeline-parallel stages: {value}",
    "stages",
)
log_waits = Signal(
    "shm_broadcast_wait in the log",
    LOG_WAITS,
    "the log reports a rank waiting for another one: {value}",
    "bool",
)
