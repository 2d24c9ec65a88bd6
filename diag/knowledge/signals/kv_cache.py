"""Signals of the KV cache: usage, preemptions, how many requests fit, and the prefix cache."""

from diag.core.incident import Part, Signal, reported
from diag.knowledge.signals.load import ENOUGH


def cache_config_has(label: str, pattern: str) -> str:
    """Return 1 for each instance whose label of vllm:cache_config_info matches the pattern, else 0."""
    return (
        f'(max by (instance) (last_over_time(vllm:cache_config_info{{{label}=~"{pattern}"}}[$window]))'
        " or 0 * max by (instance) (last_over_time(vllm:cache_config_info[$window])))"
    )


PARTS: tuple[Part, ...] = (
    # The KV cache that a prompt takes for itself: the whole prompt, unless prompts share prefixes. Then it is the cache
    # that a running request holds, minus half of an output, its mean progress.
    Part("prefix_cache_hits", "sum by ($by) (increase(vllm:prefix_cache_hits_total[$window]))", "tokens"),
    Part(
        "prefix_cache_hits_of_any_release",
        "$prefix_cache_hits or sum by ($by) (increase(vllm:gpu_prefix_cache_hits_total[$window]))",
        "tokens",
    ),
    Part(
        "prefix_cache_queries_of_any_release",
        "sum by ($by) (increase(vllm:prefix_cache_queries_total[$window]))"
        " or sum by ($by) (increase(vllm:gpu_prefix_cache_queries_total[$window]))",
        "tokens",
    ),
    Part("mean_prompt_tokens", "$finished_prompt_tokens / ($finished_requests >= 3)", "tokens"),
    Part("mean_output_tokens", "$finished_output_tokens / ($finished_requests >= 3)", "tokens"),
    Part(
        "tokens_held_per_running_request",
        "$kv_cache_usage_mean * on (instance) group_left () $config_kv_cache_size_tokens"
        " / ($requests_running_mean > 0)",
        "tokens",
    ),
    Part(
        "unshared_prompt_tokens",
        "($mean_prompt_tokens unless ($prefix_cache_hits > 0.1 * $finished_prompt_tokens))"
        " or clamp_min($tokens_held_per_running_request - $mean_output_tokens / 2, 0)",
        "tokens",
    ),
    Part("tokens_per_request", "$unshared_prompt_tokens + $mean_output_tokens", "tokens"),
    # vLLM exports how many requests of --max-model-len fit, also for hybrid models; before 0.24 the KV cache size of a
    # hybrid model is unknown. A request that does not fit matters if none runs and requests wait.
    Part(
        "contexts_that_fit_kv_cache",
        "$config_kv_cache_max_concurrency or $config_kv_cache_size_tokens / $config_max_model_len",
        "requests",
    ),
    Part("requests_wait_while_none_runs", "$requests_running_peak == 0 and $requests_waiting_minimum > 0"),
    # At most --max-num-seqs requests ran at the peak, even if the flag is unknown.
    Part("whole_requests_that_fit_kv_cache", "round($requests_that_fit_the_kv_cache)", "requests"),
    # The usage with one more prompt of mean length, or, while too few requests finish, with one more like those that
    # run; the usage alone if neither is known.
    Part(
        "kv_cache_share_of_next_prompt",
        "$unshared_prompt_tokens / on (instance) group_left () $config_kv_cache_size_tokens"
        " or $kv_cache_usage_mean / ($requests_running_mean > 0)",
        "share",
    ),
)

kv_cache_usage_peak = Signal(
    "KV cache usage (peak)",
    "max by ($by) (max_over_time(vllm:kv_cache_usage_perc[$window]) and $kv_cache_usage_sampled)"
    " or max by ($by) (max_over_time(vllm:gpu_cache_usage_perc[$window]) and $gpu_cache_usage_sampled)",
    "KV cache usage peaks at {value}",
    "share",
    window_scaling="peak",
)
kv_cache_usage_median = Signal(
    "KV cache usage (median)",
    "max by ($by) (quantile_over_time(0.5, vllm:kv_cache_usage_perc[$window]) and $kv_cache_usage_sampled)"
    " or max by ($by) (quantile_over_time(0.5, vllm:gpu_cache_usage_perc[$window]) and $gpu_cache_usage_sampled)",
    "median KV cache usage is {value}",
    "share",
)
preemptions_per_request = Signal(
    "preemptions / finished request",
    # fewer than three preemptions are no rate: among ten requests they are chance, among a few they may be a habit
    "$preemptions * ($preemptions >= bool 3) / clamp_min($finished_requests, 1)"
    f" and ($preemptions <= 0 or $preemptions >= 3 or $finished_requests >= {ENOUGH})",
    "{value} preemptions per finished request",
    "ratio",
    needs=f"3 preemptions or {ENOUGH} finished requests",
)
PR_44594 = "https://github.com/vllm-project/vllm/pull/44594"
PREEMPTION_RATES = reported("0.08 in a healthy run, 2.4 in a cascade, 0.42 once it was fixed", PR_44594)
preempts = preemptions_per_request.above(0.2, PREEMPTION_RATES)
hardly_preempts = preemptions_per_request.at_most(0.2, PREEMPTION_RATES)
requests_that_fit_kv_cache = Signal(
    "requests that fit the KV cache",
    "$kv_pool_fill / $tokens_per_request * on (instance) group_left () $config_kv_cache_size_tokens",
    "requests of the observed mean length that fit the KV cache: {value}",
    "requests",
)
longest_requests_that_fit = Signal(
    "requests that fit the KV cache, the longest where none runs",
    "($requests_wait_while_none_runs + on (instance) group_left () ($contexts_that_fit_kv_cache < 1))"
    " or $requests_that_fit_the_kv_cache",
    "requests of the observed mean length (of --max-model-len where none is admitted) that fit the KV cache: {value}",
    "requests",
    formerly=("requests that fit the KV cache",),
)
fitting_share_of_running = Signal(
    "requests that fit the KV cache / running (peak)",
    "($whole_requests_that_fit_kv_cache / on (instance) group_left () $config_max_num_seqs >= 1)"
    " or $whole_requests_that_fit_kv_cache / ($requests_running_peak > 0)",
    "the KV cache holds {value} of the peak number of running requests",
    "share",
)
kv_cache_usage_with_next = Signal(
    "KV cache usage with one more request",
    "($kv_cache_usage_median + $kv_cache_share_of_next_prompt) or $kv_cache_usage_median",
    "with one more prompt, KV cache usage would be {value}",
    "share",
)
# A preemption frees its blocks at once, so a scrape seldom hits the full KV cache: usage falls by one request.
kv_cache_usage_peak_with_next = Signal(
    "KV cache usage with one more request (peak)",
    "($kv_cache_usage_peak + $tokens_per_request / on (instance) group_left () $config_kv_cache_size_tokens)"
    " or $kv_cache_usage_peak",
    "with one more request of the observed mean length, KV cache usage would peak at {value}",
    "share",
    window_scaling="peak",
    formerly=("KV cache usage (peak)",),
)
prefix_cache_hit_rate = Signal(
    "prefix cache hit rate",
    "(($prefix_cache_hits_of_any_release / ($prefix_cache_queries_of_any_release > 0))"
    ' or (min by ($by) (last_over_time(vllm:cache_config_info{enable_prefix_caching="False"}[$window])) - 1))'
    f" and $finished_requests >= {ENOUGH}",
    "prefix cache hit rate: {value}",
    "share",
    needs=f"{ENOUGH} finished requests",
)
blocks_per_prompt = Signal(
    "KV blocks / prompt",
    "$mean_prompt_tokens / on (instance) group_left () $config_block_size",
    "a prompt spans {value} KV blocks on average; only whole blocks can be shared",
    "blocks",
    needs="3 finished requests",
)
replicas_that_hold_all = Signal(
    "replicas whose KV caches hold the load",
    "$requests_in_flight_peak / ($requests_that_fit_the_kv_cache > 0)",
    "{value} KV caches of this size hold the peak number of requests in flight",
    "replicas",
)
headroom_of_one_answer = Signal(
    "mean output length / KV cache size",
    # the growth of all running requests together until one of them finishes and frees its blocks
    "$mean_output_tokens / on (instance) group_left () $config_kv_cache_size_tokens",
    "the running requests grow by {value} of the KV cache until one of them finishes",
    "share",
)
