"""Signals that compare with peers: an engine with the others of its model, a rank with the others of its engine.

The peers of an engine are all engines, itself included, that serve the same model name in the same job, namespace and
part of the site (such as its cluster): replicas, or the data-parallel ranks of one replica. Staging is no peer of
production. A peer counts if it has three samples in the window. With three or more engines the median shows
what is usual; with two, the other engine does.
"""

from diag.core.incident import GROUP, judged
from diag.core.log_events import EXPERT_BALANCE, SHM_BROADCAST_WAIT
from diag.knowledge.signals.expressions import USUAL_MEMBER, any_of, parts, signal
from diag.knowledge.signals.gpu import as_of_first_node
from diag.knowledge.signals.log import lately

MODEL = f"{', '.join(GROUP)}, model_name"
PEERS = f"by ({MODEL})"
"""The grouping in every expression over peers."""
AT_WORK = 0.25
"""Share of its power limit above which a GPU at full utilisation computes."""
STILL, SPINS = 0.05, 0.8
"""CPU cores: a worker below the first stands still, a worker above the second busy-waits or computes."""
BY_RANK = "0[.]3[2-9].*|0[.][4-9][0-9].*|[1-9][0-9]*[.].*"
"""Releases of vLLM that log the balance of ranks; before, EPLB compared the layers of each rank (vllm#51784)."""
WAITS = f"time_of_{SHM_BROADCAST_WAIT}"
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
    vars(),
    f"""
    # vLLM repeats the line every 60 s; at a start it tells of ranks that compile
    log_waits_for_a_rank: bool = {lately(WAITS, 120)} * (${WAITS} >= bool $last_startup_progress or 1 + 0 * ${WAITS})
    """,
    *map(_of_the_other, ("load_of_model", "waiting_of_model", "output_tokens_of_model", "token_counts_of_model")),
    EXPERT_BALANCE=EXPERT_BALANCE,
    as_of_first_node=as_of_first_node,
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
