"""Signals that compare with peers: an engine with the others of its model, a rank with the others of its engine.

The peers of an engine are all engines, itself included, that serve the same model name in the same job, namespace and
part of the site (such as its cluster): replicas, or the data-parallel ranks of one replica. Staging is no peer of
production. A peer counts if it has three samples in the window. With three or more engines the median shows
what is usual; with two, the other engine does.
"""

from diag.core.incident import GROUP, judged
from diag.core.log_events import EXPERT_BALANCE, SHM_BROADCAST_WAIT
from diag.knowledge.signals.expressions import ANY_MEMBER, USUAL_MEMBER, any_of, parts, signal
from diag.knowledge.signals.gpu import as_of_first_node
from diag.knowledge.signals.log import lately, since_start

MODEL = f"{', '.join(GROUP)}, model_name"
PEERS = f"by ({MODEL})"
"""The grouping in every expression over peers."""
AT_WORK = 0.25
"""Share of its power limit above which a GPU at full utilisation computes."""
STILL, SPINS = 0.05, 0.8
"""CPU cores: a worker below the first stands still, a worker above the second busy-waits or computes."""
BY_RANK = "0[.]3[2-9].*|0[.][4-9][0-9].*|[1-9][0-9]*[.].*"
"""Releases of vLLM that log the balance of ranks; before, EPLB compared the layers of each rank (vllm#51784)."""
FEWEST_BALANCES = 3
SPIN_OF_WORK, SPIN_OF_LIMIT = 0.6, 0.4
"""Shares of power below which a busy GPU busy-waits."""


def _beside_peers(own: str, operator: str, other: str, of_all: str) -> str:
    """Return an engine's own value, an operator, and the value of the other of two engines, or the aggregate of all.

    `own`, `other` and `of_all` keep the label of the model until they are joined.
    """
    return f"max by ($by) ({own} {operator} {other} or {own} {operator} on ({MODEL}) group_left () {of_all})"


def _tokens_of_ranks(field: str) -> str:
    """Return the sum of a number of tokens in EPLB's lines; each line adds up the MoE layers of one step."""
    return f'sum by ($by) (increase(diag_vllm_log_value_total{{event="{EXPERT_BALANCE}",field="{field}"}}[$window]))'


def _of_the_other(part: str) -> str:
    """Return the part PART_of_the_other, the value of the other engine if there are two."""
    both = f"(sum {PEERS} (${part}) and count {PEERS} (${part}) == 2)"
    return f"{part}_of_the_other = -1 * (${part} - on ({MODEL}) group_left () {both})"


PARTS = parts(
    f"""
    # -- engines
    load_of_model = $requests_running_mean by ($by, {MODEL}) + $requests_waiting_mean by ($by, {MODEL})
    waiting_of_model: requests = $requests_waiting_median by ($by, {MODEL})
    output_tokens_of_model: tokens = $output_tokens by ($by, {MODEL})
    token_counts_of_model: changes = sum by ($by, {MODEL}) (changes(vllm:generation_tokens_total[$window]))
    median_load_of_peers: requests ({USUAL_MEMBER}) = quantile {PEERS} (0.5, $load_of_model)
    # -- workers and GPUs as the ranks of one engine
    worker_cores: cores = rate(diag_vllm_process_cpu_seconds_total{{role="worker"}}[$window])
    # the ranks of all engines of a server: a rank is missing if fewer are seen
    world_size: ranks =
        $config_tensor_parallel_size * ($config_pipeline_parallel_size or 1 + 0 * $config_tensor_parallel_size)
        * ($engines_running or 1 + 0 * $config_tensor_parallel_size)
    serving_gpu_utilisation: share =
        max by (instance, gpu) (avg_over_time(diag_gpu_utilization_ratio[$window]))
        unless on (instance, gpu) $gpus_not_serving
    gpu_power_mean: watts = max by (instance, gpu) (avg_over_time(diag_gpu_power_watts[$window]))
    generated_within_an_hour: tokens = sum by (instance) (increase(vllm:generation_tokens_total[1h]))
    highest_power_within_an_hour: watts = max by (instance, gpu) (max_over_time(diag_gpu_power_watts[1h]))
    # Power as a share of the highest that this GPU drew within an hour with tokens, and of its limit. A small card
    # draws half of its limit while it busy-waits, and some parts (GB10, Jetson) have no limit: the limit counts only if
    # the power at work is unknown, and then it can prove only that a rank busy-waits, not that it does not.
    power_share_of_work: share =
        $gpu_power_mean
        / on (instance, gpu) ($highest_power_within_an_hour > 0 and on (instance) $generated_within_an_hour > 0)
    power_share_of_limit: share =
        $gpu_power_mean
        / on (instance, gpu) (max by (instance, gpu) (avg_over_time(diag_gpu_power_limit_watts[$window])) > 0)
    gpus_busy_waiting: share =
        $serving_gpu_utilisation > 0.9
        and on (instance, gpu) ($power_share_of_work < {SPIN_OF_WORK}
          or on (instance, gpu) (($power_share_of_limit < {SPIN_OF_LIMIT}) unless $power_share_of_work))
    # During one long step, vLLM's page shows neither its requests nor its tokens. An engine without work waits without
    # using a CPU; the workers of several ranks busy-wait for it.
    gpus_computing: share =
        $serving_gpu_utilisation > 0.9
        and on (instance, gpu) ($power_share_of_limit > {AT_WORK}
          or on (instance, gpu) $power_share_of_work > {SPIN_OF_WORK})
    only_worker_cores: cores (the only member) =
        max by (instance) ($worker_cores) and count by (instance) ($worker_cores) == 1
    works_or_hangs_unseen: bool =
        $nothing_moves[1m]
        * on (instance) group_left () ($nothing_moves[1m] by (instance)
          * (($ranks_out_of_step[1m] by (instance) > bool 0) or $gpu_or_engine_at_work[1m] by (instance)))
    # GPUs with enough telemetry to decide if they busy-wait
    gpus_known_to_wait_or_not: share =
        $serving_gpu_utilisation <= 0.9 or ($serving_gpu_utilisation and on (instance, gpu) $power_share_of_work)
    rank_of_gpu =
        max by (instance, gpu, rank) (last_over_time(diag_gpu_process_memory_bytes{{role="worker",rank!=""}}[$window])
          * 0 + 1)
    # GPUs that do not busy-wait while another one does
    still_gpus: share =
        ($serving_gpu_utilisation and on (instance) $gpus_busy_waiting) unless on (instance, gpu) $gpus_busy_waiting
    worker_cores_of_nodes: cores = {as_of_first_node("$worker_cores", "host, pid, rank", "leader, host")}
    worker_cores_of_server = $worker_cores_of_nodes or $worker_cores unless on (instance) $worker_cores_of_nodes
    still_workers: ranks ({ANY_MEMBER}) =
        (count by ($by) ($worker_cores_of_server < {STILL}) and max by ($by) ($worker_cores_of_server) > {SPINS})
        or 0 * (count by ($by) ($worker_cores_of_server) >= $world_size)
    ranks_busy_waiting: ranks =
        count by ($by) ($gpus_busy_waiting) or 0 * (count by ($by) ($gpus_known_to_wait_or_not) >= $world_size)
    # vLLM repeats the line every 60 s; at a start it tells of ranks that compile
    log_waits_for_a_rank: bool = {lately(f"time_of_{SHM_BROADCAST_WAIT}", 120)} * {since_start(SHM_BROADCAST_WAIT)}
    named_still_worker =
        label_join(label_replace(label_replace(($worker_cores_of_server < {STILL})
              and on (instance) (max by (instance) ($worker_cores_of_server) > {SPINS}), "one", "rank $$1", "rank",
              "(.+)"), "place", " on $$1", "host", "(.+)"), "named", "", "one", "place")
    named_still_gpu =
        label_join(label_replace(label_replace($still_gpus * on (instance, gpu) group_left (rank) $rank_of_gpu
              or on (instance, gpu) $still_gpus, "one", "GPU $$1", "gpu", "(.+)"), "two", " (rank $$1)", "rank",
            "(.+)"), "named", "", "one", "two")
    # -- expert-parallel ranks, whose tokens EPLB logs with log_balancedness
    balance_lines = sum by ($by) (increase(diag_vllm_log_events_total{{event="{EXPERT_BALANCE}"}}[$window]))
    tokens_of_mean_rank: tokens = {_tokens_of_ranks("avg_tokens")}
    tokens_of_busiest_rank: tokens = {_tokens_of_ranks("max_tokens")}
    balance_is_by_rank: series = count by (instance) (last_over_time(diag_vllm_info{{version=~"{BY_RANK}"}}[$window]))
    # An engine without workers computes in its own process. Where engines share experts, all of them take part in each
    # pass: one that uses no CPU is missing from a pass in which the others busy-wait.
    engine_process_cores: cores = rate(diag_vllm_process_cpu_seconds_total{{role="engine"}}[$window])
    cores_of_ranks: cores = $worker_cores or ($engine_process_cores unless on (instance) $worker_cores)
    missing_ranks: cores ({ANY_MEMBER}) =
        ($cores_of_ranks < {STILL}) and on (instance) (max by (instance) ($cores_of_ranks) > {SPINS})
    """,
    *map(_of_the_other, ("load_of_model", "waiting_of_model", "output_tokens_of_model", "token_counts_of_model")),
)

load_of_peers = signal(
    # at least 1: a multiple of zero is meaningless
    "requests / median of its peers: ratio = "
    + _beside_peers(
        "$load_of_model", "/", "clamp_min($load_of_model_of_the_other, 1)", "clamp_min($median_load_of_peers, 1)"
    ),
    "its requests / the median of its peers: {value}",
)
load_beyond_peers = signal(
    "requests above the median of its peers: requests = "
    + _beside_peers("$load_of_model", "-", "$load_of_model_of_the_other", "$median_load_of_peers"),
    "requests above the median of its peers: {value}",
)
sign_of_imbalance = signal(
    "imbalance at a scrape: bool ="
    " ($requests_per_median_of_its_peers > bool 2) * ($requests_above_the_median_of_its_peers >= bool 4)",
    "it holds over twice as many requests as its peers, and at least 4 more: {value}",
)
peers_waiting = signal(
    "requests waiting (median of its peers): requests = "
    + _beside_peers(
        "0 * $waiting_of_model", "+", "$waiting_of_model_of_the_other", f"quantile {PEERS} (0.5, $waiting_of_model)"
    ),
    "waiting requests at the median of its peers: {value}",
    group=USUAL_MEMBER,
)
peers = signal(
    # the other of two engines counts if it generates tokens: a standby is idle on purpose
    "engines serving the same model: engines = "
    + _beside_peers(
        "0 * $load_of_model",
        "+",
        "1 + ($token_counts_of_model_of_the_other > bool 0)",
        f"count {PEERS} ($load_of_model)",
    ),
    "engines serving the same model: {value}",
)
tokens_of_peers = signal(
    "tokens generated / median of its peers: ratio = "
    + _beside_peers(
        "$output_tokens_of_model",
        "/",
        "clamp_min($output_tokens_of_model_of_the_other, 1)",
        f"clamp_min(quantile {PEERS} (0.5, $output_tokens_of_model), 1)",
    ),
    "its generated tokens / the median of its peers: {value}",
    context=True,
    group=USUAL_MEMBER,
)

overloaded = tokens_of_peers.at_least(
    1, judged("an overloaded replica generates no fewer tokens than its peers, a slow one does")
)
slower_than_peers = overloaded.opposite
balanced = load_of_peers.at_most(2, judged("a smaller imbalance may be chance: requests differ in length"))
"""It holds for a server without peers too: it is its own median."""

servers = signal(
    f"servers with the same model: servers = max by ($by) (0 * $load_of_model + on ({MODEL}) group_left ()"
    f" count {PEERS} (count by (instance, {MODEL}) ($load_of_model)))",
    "servers with the same model: {value}",
)

# -- the data-parallel engines of one server --------------------------------------------------------------------------

engines = signal(
    "engines of the server: engines ="
    " count by ($by) (count by (instance, engine) (count_over_time(vllm:num_requests_running[$window])))",
    "engines of this server: {value}",
    context=True,
)
requests_stuck_on_all_engines = signal(
    "requests in flight while no engine makes progress: requests = $requests_in_flight_without_progress",
    "requests in flight while none of the engines makes progress: {value}",
    throughout=True,
    culprit_promql="sum by (instance, engine) ($running_minimum_by_series) > 0",
    culprit_label="engine {engine}",
)

engines_missing = signal(
    "engines missing from a pass: processes = count by ($by) ($missing_ranks) or 0 * count by ($by) ($cores_of_ranks)",
    "engines or workers that use no CPU while a peer uses a whole core: {value}",
    culprit_promql='label_replace(label_replace($missing_ranks, "named", "$$1", "rank", "([0-9]+)([.].*|)"),'
    ' "named", "0", "rank", "")',
    culprit_label="engine {named} lags (PID {pid})",
)
expert_balance = signal(
    "expert balance (mean rank / busiest rank): share ="
    f" $tokens_of_mean_rank / ($tokens_of_busiest_rank > 0 and $balance_lines >= {FEWEST_BALANCES})"
    " and on (instance) $balance_is_by_rank or 1 + 0 * ($balance_lines == 0)",
    "the mean expert-parallel rank gets {value} of the tokens of the busiest one",
    needs=f"{FEWEST_BALANCES} lines of EPLB's balance (--eplb-config, log_balancedness), of vLLM 0.32 or later",
)
ranks_of_the_server = signal(
    "ranks of the server: ranks = $world_size",
    "ranks of all engines of this server: {value}",
)
tokens_of_expert_ranks = signal(
    "tokens per rank and step: tokens = $tokens_of_mean_rank / ($balance_lines > 0) or $balance_lines",
    "tokens of a rank in a step, added up over its MoE layers: {value}",
)

# -- tensor-parallel ranks ---------------------------------------------------------------------------------------------

WHICH_RANK = "$named_still_worker or $named_still_gpu"

ranks_out_of_step = signal(
    "ranks out of step: ranks = ($still_workers > 0) or $ranks_busy_waiting or $still_workers",
    "ranks that stand still while a peer busy-waits, or that busy-wait at low power: {value}",
    culprit_promql=WHICH_RANK,
    culprit_label="{named}",
)
works_unseen = signal(
    "GPU or engine at work: bool = "
    + any_of(
        gpu="(count by (instance) ($gpus_computing) > bool 0)",
        engine=f"($engine_cores > bool {SPINS})",
        worker=f"($only_worker_cores > bool {SPINS})",
    ),
    "a GPU computes, or the engine uses a whole CPU core: {value}",
)
stood_still = signal(
    "standstill, late token, failed probe or compilation: bool = "
    + any_of(
        still="($stuck_requests[1m] > bool 0)",
        late="($first_tokens_after_10_s > bool 0.5)",
        pauses="($pauses_over_10_s > bool 0.5)",
        probe="($engine_seen + on (instance) group_left () $probe_failures by (instance))",
        stopped="($stopped_processes_of_the_engine[30s] > bool 0)",
        unseen="$works_or_hangs_unseen",
        compiled="$compilation_by_log_or_processes",
    ),
    "nothing moved although the engine had work, a token or the probe was late, or kernels were compiled: {value}",
    formerly=("standstill or compilation",),
)
ranks_missing_from_collective = signal(
    # the log decides if neither processes nor GPUs are observed; NCCL does not count captured graphs: none is no proof
    "ranks missing from a collective: ranks ="
    " ($nccl_processes_missing > 0) or $ranks_out_of_step or $log_waits_for_a_rank",
    "ranks missing from a collective (by NCCL, processes, GPUs or the log): {value}",
    culprit_promql=f"$named_nccl_rank or ({WHICH_RANK}) unless on (instance) $named_nccl_rank",
    culprit_label="{named}",
)
ranks = signal(
    "tensor-parallel ranks: ranks = $config_tensor_parallel_size"
    ' or count by ($by) (last_over_time(diag_vllm_process_cpu_seconds_total{role="worker"}[$window]))'
    # an engine without workers computes by itself
    ' or 0 * count by ($by) (last_over_time(diag_vllm_process_cpu_seconds_total{role="engine"}[$window])) + 1',
    "tensor-parallel ranks: {value}",
    context=True,
)
half_of_the_ranks = signal(
    "half of the tensor-parallel ranks: ranks = $config_tensor_parallel_size / 2",
    "half of the tensor-parallel ranks: {value}",
)
odd_ranks = signal(
    "tensor-parallel ranks left over by halving: ranks = $config_tensor_parallel_size % 2",
    "tensor-parallel ranks left over by halving: {value}",
)
twice_the_stages = signal(
    "twice the pipeline-parallel stages: stages ="
    " 2 * ($config_pipeline_parallel_size or 1 + 0 * $config_tensor_parallel_size)",
    "twice the pipeline-parallel stages: {value}",
)
log_waits = signal(
    "a rank waits for another one, in the log: bool = $log_waits_for_a_rank",
    "the log reports a rank waiting for another one: {value}",
    formerly=("shm_broadcast_wait in the log",),
)
