"""Signals of a server's workers and GPUs as the ranks of one engine: which one its peers wait for."""

from diag.core.incident import Signal
from diag.core.log_events import SHM_BROADCAST_WAIT
from diag.knowledge.signals.expressions import RUNNING, configured
from diag.knowledge.signals.host import event_time

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
RANKS_OUT_OF_STEP = f"(({STILL_WORKERS} > 0) or {SPINNING_GPUS} or {STILL_WORKERS})"
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
