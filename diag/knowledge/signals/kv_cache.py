"""Signals of the KV cache (usage, preemptions, how many requests fit, the prefix cache) and of KV connectors.

A KV connector transfers KV blocks between prefill and decode instances, or offloads them. vLLM counts what it asks a
connector for (external_prefix_cache_queries, from 0.11.1 on): 0 without a connector, so that nothing can have failed.
With one, failures are known where the connector exports them (NIXL from 0.11.1 on, Mooncake from 0.33 on) or the log is
followed; LMCache and others have metrics of their own that a page may not show.
"""

from collections.abc import Iterable

from diag.core.incident import reported
from diag.core.log_events import KV_BLOCKS_EXPIRED, KV_LOAD_FAILED, KV_TRANSFER_FAILED
from diag.knowledge.signals.expressions import (
    FULLEST_MEMBER,
    PREFIX_CACHE_HITS,
    PREFIX_CACHE_QUERIES,
    any_of,
    cache_config_has,
    labelled,
    parts,
    renamed,
    signal,
    times_the_capacity,
    usage,
    within,
)
from diag.knowledge.signals.load import ENOUGH

KV_ERRORS = f'diag_vllm_log_events_total{{event=~"{KV_TRANSFER_FAILED}|{KV_BLOCKS_EXPIRED}|{KV_LOAD_FAILED}"}}'
KV_FETCHES = 'vllm:num_requests_kv_fetch_by_stage{stage=~"waiting_to_start|in_progress"}'
OFFLOADING = "|".join(
    f"{name}_total"
    for name in (
        "kv_offload_store_bytes",
        "simple_kv_offload_save_outcomes",
        "mooncake_store_operation_keys",
        "umbp_transfer_submitted",
        "hf3fs_num_failed_save",
    )
)
"""Counters that a page has if its connector offloads KV blocks."""
FEW = 2.5
"""Failures; fewer than three are no rate. `increase` extrapolates, so a count is not a whole number."""
FAILED_OFFLOADS = {
    what: f"sum by ($by) (increase(vllm:{name}_total[$window]))"
    for what, name in {
        "promotion of a tier": "kv_offload_tiering_promotion_job_failures",
        "cascade of a tier": "kv_offload_tiering_cascade_job_failures",
        "HF3FS load": "hf3fs_num_failed_load",
        "HF3FS save": "hf3fs_num_failed_save",
    }.items()
}
"""Jobs of offloading that fail; vLLM has no counter of jobs that succeed."""
NO_ROOM = (
    "kv_offload_allocation_failure_total",
    "kv_offload_tiering_promotion_allocation_failures_total",
    'simple_kv_offload_save_outcomes_total{outcome="dropped_cpu_full"}',
)
BY_DESIGN = ("kv_offload_tiering_backpressure_stores_dropped_total", "kv_offload_stores_skipped_total")
"""Stores that vLLM leaves out: for lack of room, or as its settings have it. Neither is a failure."""
DROPPED_STORES = {"no room in host memory": "$stores_without_room", "a slow tier, or not reused": "$stores_held_back"}


def _increases(names: Iterable[str]) -> str:
    """Return the sum of the increases of those counters that a page has."""
    series = {str(at): f"increase(vllm:{name}[$window])" for at, name in enumerate(names)}
    return f"sum by ($by) ({labelled('of', series)})"


LARGEST_KERNEL_BLOCK = 256
"""Tokens of the largest KV block that an attention backend asks for; a hybrid model's is larger (528, 1,056, 3,584)."""
FINE = 64
"""Tokens to which vLLM's documentation lowers --prefix-match-unit for a start."""
FLAT = 0.95
"""Share of the sequence cap from which on the number of running requests is a flat line at it."""


PARTS = parts(
    f"""
    # The KV cache that a prompt takes for itself: the whole prompt, unless prompts share prefixes. Then it is the cache
    # that a running request holds, minus half of an output, its mean progress.
    prefix_cache_hits: tokens = sum by ($by) (increase({PREFIX_CACHE_HITS[0]}[$window]))
    prefix_cache_hits_of_any_release: tokens =
        $prefix_cache_hits or sum by ($by) (increase({PREFIX_CACHE_HITS[1]}[$window]))
    prefix_cache_queries_of_any_release: tokens =
        {renamed("sum by ($by) (increase({}[$window]))", PREFIX_CACHE_QUERIES)}
    mean_prompt_tokens: tokens = $finished_prompt_tokens / ($finished_requests >= 3)
    mean_output_tokens: tokens = $finished_output_tokens / ($finished_requests >= 3)
    tokens_held_per_running_request: tokens =
        $kv_cache_usage_mean * on (instance) group_left () $config_kv_cache_size_tokens / ($requests_running_mean > 0)
    unshared_prompt_tokens: tokens =
        ($mean_prompt_tokens unless ($prefix_cache_hits > 0.1 * $finished_prompt_tokens))
        or clamp_min($tokens_held_per_running_request - $mean_output_tokens / 2, 0)
    tokens_per_request: tokens = $unshared_prompt_tokens + $mean_output_tokens
    # vLLM exports how many requests of --max-model-len fit, also for hybrid models; before 0.24 the KV cache size of a
    # hybrid model is unknown. A request that does not fit matters if none runs and requests wait.
    contexts_that_fit_kv_cache: requests =
        $config_kv_cache_max_concurrency or $config_kv_cache_size_tokens / $config_max_model_len
    requests_wait_while_none_runs = $requests_running_peak == 0 and $requests_waiting_minimum > 0
    # At most --max-num-seqs requests ran at the peak, even if the flag is unknown.
    whole_requests_that_fit_kv_cache: requests = round($requests_that_fit_the_kv_cache)
    # With requests that differ in length a mean says little: where clearly more run than fit by the mean, the KV cache
    # that they hold tells how many like them fit.
    requests_like_the_running_that_fit = $kv_pool_fill * $requests_running_mean / ($kv_cache_usage_mean > 0)
    requests_with_room: requests =
        ($requests_that_fit_the_kv_cache >= 0.8 * $requests_running_peak) or $requests_like_the_running_that_fit
    # As many requests run as the cap admits, in half of the samples or more: the cap has bound before the KV cache.
    held_by_the_cap: share =
        ($requests_running_median + $requests_ending_per_step or $requests_running_median)
        / on (instance) group_left () $sequence_cap >= {FLAT}
    # The usage with one more prompt of mean length, or, while too few requests finish, with one more like those that
    # run; the usage alone if neither is known.
    kv_cache_share_of_next_prompt: share =
        $unshared_prompt_tokens / on (instance) group_left () $config_kv_cache_size_tokens
        or $kv_cache_usage_mean / ($requests_running_mean > 0)
    # Hits end at a whole block, or at a multiple of --prefix-match-unit (0.26). vLLM enlarges the blocks of a hybrid
    # model until one holds a Mamba state. Early releases (vllm#42966) export the old size; their log has the new one.
    prefix_match_tokens: tokens = $config_prefix_match_unit or $config_enlarged_block_size or $config_block_size
    coarse_prefix_match_tokens: tokens =
        $prefix_match_tokens > {LARGEST_KERNEL_BLOCK}
        unless max by (instance) (last_over_time(vllm:cache_config_info{{enable_prefix_caching="False"}}[$window]))
    # -- KV connectors
    external_cache_queries: tokens = sum by ($by) (last_over_time(vllm:external_prefix_cache_queries_total[$window]))
    external_cache_hits: tokens = sum by ($by) (last_over_time(vllm:external_prefix_cache_hits_total[$window]))
    prompt_tokens_from_connector: tokens =
        sum by ($by) (increase(vllm:external_prefix_cache_hits_total[$window])) or 0 * $prompt_tokens
    no_kv_connector: bool = 0 * ($external_cache_queries == 0)
    nixl_transfers_failed: transfers = sum by ($by) (increase(vllm:nixl_num_failed_transfers_total[$window]))
    nixl_leases_expired: requests = sum by ($by) (increase(vllm:nixl_num_kv_expired_reqs_total[$window]))
    nixl_transfers: transfers = sum by ($by) (increase(vllm:nixl_xfer_time_seconds_count[$window]))
    mooncake_transfers_failed: transfers =
        sum by ($by) (increase(vllm:mooncake_num_failed_transfers_total[$window]))
        + sum by ($by) (increase(vllm:mooncake_num_failed_recvs_total[$window]))
    mooncake_leases_expired: requests = sum by ($by) (increase(vllm:mooncake_num_kv_expired_reqs_total[$window]))
    mooncake_transfers: transfers = sum by ($by) (increase(vllm:mooncake_xfer_time_seconds_count[$window]))
    kv_errors_logged: lines = sum by ($by) (increase({KV_ERRORS}[$window]))
    kv_transfer_errors_share: share =
        ($kv_errors_logged >= {FEW}) / ($kv_errors_logged + $finished_requests or $kv_errors_logged)
        or 0 * ($kv_errors_logged == 0)
    requests_fetching_kv: requests = sum by ($by) (min_over_time({KV_FETCHES}[$window]))
    all_wait_for_kv: bool =
        ($requests_in_flight_without_progress > bool 0) * ($requests_fetching_kv > bool 0)
        * ($running_highest == bool 0)
    kv_transfers_lost_share: share =
        $nixl_lost_share or $mooncake_lost_share or $kv_transfer_errors_share or $no_kv_connector
    # -- offloading: counters of stored KV blocks, in bytes, blocks or tokens, by connector and release
    kv_blocks_stored: bool =
        max by ($by) ((increase(vllm:kv_offload_total_bytes_total{{transfer_type="GPU_to_CPU"}}[$window])
            or increase(vllm:kv_offload_store_bytes_total[$window])
            or increase(vllm:simple_kv_offload_save_outcomes_total{{outcome="stored"}}[$window])
            or increase(vllm:mooncake_store_operation_bytes_total{{operation="save_put"}}[$window])
            or increase(lmcache:num_stored_tokens_total[$window])) > bool 0)
    # Series by tier and operation begin with the first failure: a page with others of the connector has none. Fewer
    # than three are no rate.
    offloads: series = count by ($by) (last_over_time({{__name__=~"vllm:({OFFLOADING})"}}[$window]))
    failed_offload_jobs: jobs = sum by ($by) ({labelled("offload", {**FAILED_OFFLOADS, "none": "0 * $offloads"})})
    failed_job_share: share =
        ($failed_offload_jobs >= {FEW}) / ($failed_offload_jobs + $finished_requests) or 0 * ($failed_offload_jobs == 0)
    failed_mooncake_keys: keys =
        sum by ($by) (increase(vllm:mooncake_store_operation_failed_keys_total[$window])) >= {FEW}
    failed_umbp_objects: objects = sum by ($by) (increase(vllm:umbp_transfer_failed_total[$window])) >= {FEW}
    failed_key_share: share =
        $failed_mooncake_keys / sum by ($by) (increase(vllm:mooncake_store_operation_keys_total[$window]))
        or $failed_umbp_objects / sum by ($by) (increase(vllm:umbp_transfer_submitted_total[$window]))
    stores_without_room: stores = {_increases(NO_ROOM)}
    stores_held_back: stores = {_increases(BY_DESIGN)}
    dropped_stores: stores = sum by ($by) ({labelled("reason", DROPPED_STORES)})
    # tokens that fill the GPU's own cache twice; if its size is unknown, those that fill a large one
    kv_cache_turnover: tokens = 2 * $config_kv_cache_size_tokens or 2000000 + 0 * $external_cache_queries by (instance)
    """,
    *(
        f"""
    # failures and expired leases: only a prefill instance sees that KV blocks expire, and it counts no transfer; each
    # rank counts its own
    {connector}_transfers_lost: transfers =
        ${connector}_transfers_failed
        + (${connector}_leases_expired / on (instance) group_left ()
          ($config_tensor_parallel_size or 1 + 0 * sum by (instance) (${connector}_transfers_failed))
          or 0 * ${connector}_transfers_failed)
    # per transfer and finished request: 0 without a failure, missing while there are too few of them for a rate
    {connector}_lost_share: share =
        (${connector}_transfers_lost >= {FEW})
        / (${connector}_transfers_failed + ${connector}_transfers + $finished_requests)
        or 0 * (${connector}_transfers_lost == 0)
    """
        for connector in ("nixl", "mooncake")
    ),
)

kv_cache_usage_peak = signal(
    "KV cache usage (peak): share = " + usage("max_over_time({}[$window])"),
    "KV cache usage peaks at {value}",
    window_scaling="peak",
    group=FULLEST_MEMBER,
)
kv_cache_usage_median = signal(
    "KV cache usage (median): share = " + usage("quantile_over_time(0.5, {}[$window])"),
    "median KV cache usage is {value}",
)
preemptions_per_request = signal(
    # fewer than three preemptions are no rate: among ten requests they are chance, among a few they may be a habit
    "preemptions / finished request: ratio = $preemptions * ($preemptions >= bool 3) / clamp_min($finished_requests, 1)"
    f" and ($preemptions <= 0 or $preemptions >= 3 or $finished_requests >= {ENOUGH})",
    "{value} preemptions per finished request",
    needs=f"3 preemptions or {ENOUGH} finished requests",
)
preempted_again = signal(
    # the lowest edge is 1: requests that were preempted once cannot be told from those that never were
    "requests preempted more than once: share ="
    f" 1 - {within('1', ('vllm:request_num_preemptions',))}"
    " / (sum by ($by) (increase(vllm:request_num_preemptions_count[$window])) >= 3)",
    "{value} of the finished requests were preempted, and recomputed, more than once",
    needs="vLLM 0.30 and 3 finished requests",
)
PR_44594 = "https://github.com/vllm-project/vllm/pull/44594"
PREEMPTION_RATES = reported("0.08 in a healthy run, 2.4 in a cascade, 0.42 once it was fixed", PR_44594)
preempts = preemptions_per_request.above(0.2, PREEMPTION_RATES)
hardly_preempts = preemptions_per_request.at_most(0.2, PREEMPTION_RATES)
requests_that_fit_kv_cache = signal(
    "requests that fit the KV cache: requests ="
    " $kv_pool_fill / $tokens_per_request * on (instance) group_left () $config_kv_cache_size_tokens",
    "requests of the observed mean length that fit the KV cache: {value}",
)
requests_to_admit = signal(
    "requests to admit: requests = ($requests_for_the_load < $requests_with_room) or $requests_with_room",
    "the observed load needs, and the KV cache holds, {value} requests at a time",
)
room_beyond_the_load = signal(
    "requests with room in the KV cache / requests of the load: ratio ="
    " $requests_with_room / ($requests_for_the_load > 0)",
    "the KV cache holds {value} times the requests of the observed load",
)
longest_requests_that_fit = signal(
    "requests that fit the KV cache, the longest where none runs: requests ="
    " ($requests_wait_while_none_runs + on (instance) group_left () ($contexts_that_fit_kv_cache < 1))"
    " or ($requests_like_the_running_that_fit and $held_by_the_cap) or $requests_that_fit_the_kv_cache",
    "requests of the observed mean length (of --max-model-len where none is admitted) that fit the KV cache: {value}",
    formerly=("requests that fit the KV cache",),
)
fitting_share_of_running = signal(
    "requests that fit the KV cache / running (peak): share ="
    " ($whole_requests_that_fit_kv_cache / on (instance) group_left () $config_max_num_seqs >= 1)"
    " or $whole_requests_that_fit_kv_cache / ($requests_running_peak > 0)",
    "the KV cache holds {value} of the peak number of running requests",
)
kv_cache_usage_with_next = signal(
    "KV cache usage with one more request: share ="
    " ($kv_cache_usage_median and $held_by_the_cap and $kv_cache_usage_median < 1)"
    " or ($kv_cache_usage_median + $kv_cache_share_of_next_prompt) or $kv_cache_usage_median",
    "with one more prompt, KV cache usage would be {value}",
)
room_for_another = signal(
    "room for another request beside the running ones: bool ="
    " ($kv_cache_usage_with_one_more_request <= bool 0.9) * ($requests_running_peak > bool 0)",
    "requests run, and another one fits the KV cache: {value}",
)
# A preemption frees its blocks at once, so a scrape seldom hits the full KV cache: usage falls by one request.
kv_cache_usage_peak_with_next = signal(
    "KV cache usage with one more request (peak): share ="
    " ($kv_cache_usage_peak + $tokens_per_request / on (instance) group_left () $config_kv_cache_size_tokens)"
    " or $kv_cache_usage_peak",
    "with one more request of the observed mean length, KV cache usage would peak at {value}",
    window_scaling="peak",
    formerly=("KV cache usage (peak)",),
)
prefix_cache_hit_rate = signal(
    "prefix cache hit rate: share = (($prefix_cache_hits_of_any_release / ($prefix_cache_queries_of_any_release > 0))"
    ' or (min by ($by) (last_over_time(vllm:cache_config_info{enable_prefix_caching="False"}[$window])) - 1))'
    f" and $finished_requests >= {ENOUGH}",
    "prefix cache hit rate: {value}",
    needs=f"{ENOUGH} finished requests",
)
blocks_per_prompt = signal(
    # the prefixes of a hybrid model are as long as those of others: its large blocks must not hide them
    "shareable parts / prompt: parts = $mean_prompt_tokens / on (instance) group_left ()"
    f" ({FINE} + 0 * $coarse_prefix_match_tokens or $prefix_match_tokens)",
    f"a prompt spans {{value}} parts that could be shared on average: KV blocks, or {FINE} tokens if blocks are larger",
    needs="3 finished requests",
    formerly=("KV blocks / prompt",),
)
prefix_match_length = signal(
    "tokens of which each prefix cache hit is a multiple: tokens ="
    " $prefix_match_tokens + on (instance) group_right () 0 * $mean_prompt_tokens",
    "each prefix cache hit is a multiple of {value} tokens",
    needs="3 finished requests",
)
whole_blocks_per_prompt = signal(
    "whole KV blocks / prompt: blocks = $mean_prompt_tokens / on (instance) group_left () $prefix_match_tokens",
    "a prompt spans {value} KV blocks on average; only whole blocks can be shared",
    needs="3 finished requests",
)
stores_mamba_states = signal(
    "Mamba states in the prefix cache: bool = " + cache_config_has("mamba_cache_mode", "align"),
    "the prefix cache stores Mamba states at the ends of blocks: {value}",
)
prompt_share_from_connector = signal(
    "prompt tokens from a KV connector: share = $prompt_tokens_from_connector / ($prompt_tokens > 0)",
    "a KV connector provides the KV cache of {value} of the prompt tokens",
)
replicas_that_hold_all = signal(
    "replicas whose KV caches hold the load: replicas = "
    + times_the_capacity("$requests_in_flight_peak / ($requests_that_fit_the_kv_cache > 0)")
    + " * $servers_with_the_same_model",
    "{value} servers like this one hold the load of all of them",
)
headroom_of_one_answer = signal(
    # the growth of all running requests together until one of them finishes and frees its blocks
    "mean output length / KV cache size: share ="
    " $mean_output_tokens / on (instance) group_left () $config_kv_cache_size_tokens",
    "the running requests grow by {value} of the KV cache until one of them finishes",
)

# -- KV connectors -----------------------------------------------------------------------------------------------------

kv_transfers_lost = signal(
    "KV transfers that fail or expire / transfers and requests: share = "
    + any_of(stuck="$all_wait_for_kv", lost="$kv_transfers_lost_share"),
    "KV transfers fail, expire or never end: {value} of them",
)
error_share = signal(
    "requests that ended in an error: share ="
    ' sum by ($by) (increase(vllm:request_success_total{finished_reason="error"}[$window])) / ($finished_requests > 0)',
    "{value} of the finished requests ended in an internal error",
)
read_after_expiry = signal(
    "KV blocks read after they had expired: transfers ="
    " sum by ($by) (increase(vllm:nixl_num_notifications_after_expiry_total[$window]))",
    "transfers that ended after their KV blocks had been freed, so that other data may have been read: {value}",
    window_scaling="peak",
)
kv_blocks_stored = signal(
    "KV blocks are stored: bool = $kv_blocks_stored or $no_kv_connector",
    "KV blocks are stored outside the GPU: {value}",
)
failed_offloads = signal(
    "KV offload operations that fail / operations and requests: share = "
    + any_of(jobs="$failed_job_share", keys="$failed_key_share")
    + " or $no_kv_connector or 0 * $nixl_transfers or 0 * $mooncake_transfers",
    "operations of KV offloading fail: {value} of them",
    culprit_promql=" or ".join(
        (f"({labelled('offload', FAILED_OFFLOADS)}) >= {FEW}", "$failed_mooncake_keys", "$failed_umbp_objects")
    ),
    culprit_label="{offload}",
)
dropped_stores = signal(
    "stores to the offloaded KV cache left out / finished request: ratio ="
    f" $dropped_stores / ($finished_requests >= {FEW})",
    "stores that vLLM left out for every finished request: {value}",
    culprit_promql=f"({labelled('reason', DROPPED_STORES)}) >= {FEW}",
    culprit_label="{reason}",
)
external_hit_rate = signal(
    # a prefix is looked for outside only once the GPU's own cache has evicted it, so that has to be filled twice first
    "hit rate of the offloaded KV cache: share ="
    " $external_cache_hits / ($external_cache_queries > 0 and $external_cache_hits > 0)"
    " or 0 * ($external_cache_queries > on (instance) group_left () $kv_cache_turnover)",
    "since the start, {value} of the prompt tokens that the GPU did not have were found in the offloaded KV cache",
)
