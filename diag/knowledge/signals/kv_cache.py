"""Signals of the KV cache: usage, preemptions, how many requests fit, and the prefix cache."""

from diag.core.incident import Signal, reported
from diag.knowledge.signals.expressions import (
    FINISHED,
    GENERATED_TOKENS,
    KV_USAGE,
    PREEMPTIONS,
    PROMPT_TOKENS,
    RUNNING,
    WAITING,
    configured,
    counted,
    gauge,
    renamed,
)
from diag.knowledge.signals.load import ENOUGH, requests_in_flight_peak

kv_cache_usage_peak = Signal(
    "KV cache usage (peak)",
    renamed("max_over_time(", *KV_USAGE),
    "KV cache usage peaks at {value}",
    "share",
    window_scaling="peak",
)
kv_cache_usage_median = Signal(
    "KV cache usage (median)",
    renamed("quantile_over_time(0.5, ", *KV_USAGE),
    "median KV cache usage is {value}",
    "share",
)
preemptions_per_request = Signal(
    "preemptions / finished request",
    # fewer than three preemptions are no rate: among ten requests they are chance, among a few they may be a habit
    f"{PREEMPTIONS} * ({PREEMPTIONS} >= bool 3) / clamp_min({FINISHED}, 1)"
    f" and ({PREEMPTIONS} <= 0 or {PREEMPTIONS} >= 3 or {FINISHED} >= {ENOUGH})",
    "{value} preemptions per finished request",
    "ratio",
    needs=f"3 preemptions or {ENOUGH} finished requests",
)
PR_44594 = "https://github.com/vllm-project/vllm/pull/44594"
PREEMPTION_RATES = reported("0.08 in a healthy run, 2.4 in a cascade, 0.42 once it was fixed", PR_44594)
preempts = preemptions_per_request.above(0.2, PREEMPTION_RATES)
hardly_preempts = preemptions_per_request.at_most(0.2, PREEMPTION_RATES)
# The KV cache that a prompt takes for itself: all of the prompt, unless prompts share prefixes. Then it is what a
# running request holds, minus half of an output, which is what it has generated on average.
PROMPT = f"({PROMPT_TOKENS} / ({FINISHED} >= 3))"
ANSWER = f"({GENERATED_TOKENS} / ({FINISHED} >= 3))"
HOLDS_NOW = (
    f"({renamed('avg_over_time(', *KV_USAGE)} * on (instance) group_left () {configured('kv_cache_size_tokens')}"
    f" / ({gauge('avg_over_time(', RUNNING)} > 0))"
)
OWN_PROMPT = (
    f"(({PROMPT} unless ({counted('vllm:prefix_cache_hits_total')} > 0.1 * {PROMPT_TOKENS}))"
    f" or clamp_min({HOLDS_NOW} - {ANSWER} / 2, 0))"
)
TOKENS_PER_REQUEST = f"({OWN_PROMPT} + {ANSWER})"
requests_that_fit_kv_cache = Signal(
    "requests that fit the KV cache",
    f"$kv_pool_fill / {TOKENS_PER_REQUEST} * on (instance) group_left () {configured('kv_cache_size_tokens')}",
    "requests of the observed mean length that fit the KV cache: {value}",
    "requests",
)
# vLLM itself says how many requests of --max-model-len fit, hybrid models included; before 0.24, the size of the KV
# cache is not known of a hybrid model. That a request does not fit matters where nothing runs and somebody waits.
SIZE_IN_CONTEXTS = f"{configured('kv_cache_size_tokens')} / {configured('max_model_len')}"
CONTEXTS_THAT_FIT = f"({configured('kv_cache_max_concurrency')} or {SIZE_IN_CONTEXTS})"
NOTHING_ADMITTED = f"({gauge('max_over_time(', RUNNING)} == 0 and {gauge('min_over_time(', WAITING)} > 0)"
longest_requests_that_fit = Signal(
    "requests that fit the KV cache, the longest where none runs",
    f"({NOTHING_ADMITTED} + on (instance) group_left () ({CONTEXTS_THAT_FIT} < 1))"
    f" or {requests_that_fit_kv_cache.promql}",
    "requests of the observed mean length (of --max-model-len where none is admitted) that fit the KV cache: {value}",
    "requests",
    formerly=("requests that fit the KV cache",),
)
# At most --max-num-seqs requests ran at the peak, also where the flag is not known.
HELD = f"round({requests_that_fit_kv_cache.promql})"
fitting_share_of_running = Signal(
    "requests that fit the KV cache / running (peak)",
    f"({HELD} / on (instance) group_left () {configured('max_num_seqs')} >= 1)"
    f" or {HELD} / ({gauge('max_over_time(', RUNNING)} > 0)",
    "the KV cache holds {value} of the peak number of running requests",
    "share",
)
# The usage with one more prompt of mean length, or, while too few requests finish, with one more like those that run;
# the usage alone where neither is known.
NEXT_PROMPT = (
    f"({OWN_PROMPT} / on (instance) group_left () {configured('kv_cache_size_tokens')}"
    f" or {renamed('avg_over_time(', *KV_USAGE)} / ({gauge('avg_over_time(', RUNNING)} > 0))"
)
kv_cache_usage_with_next = Signal(
    "KV cache usage with one more request",
    f"({kv_cache_usage_median.promql} + {NEXT_PROMPT}) or {kv_cache_usage_median.promql}",
    "with one more prompt, KV cache usage would be {value}",
    "share",
)
# A preemption frees its blocks at once, so a scrape seldom hits the full KV cache: usage falls by one request.
KV_CACHE_SIZE = f"on (instance) group_left () {configured('kv_cache_size_tokens')}"
kv_cache_usage_peak_with_next = Signal(
    "KV cache usage with one more request (peak)",
    f"({kv_cache_usage_peak.promql} + {TOKENS_PER_REQUEST} / {KV_CACHE_SIZE}) or {kv_cache_usage_peak.promql}",
    "with one more request of the observed mean length, KV cache usage would peak at {value}",
    "share",
    window_scaling="peak",
    formerly=("KV cache usage (peak)",),
)
PREFIX_HITS, PREFIX_QUERIES = (
    f"({counted(f'vllm:prefix_cache_{kind}_total')} or {counted(f'vllm:gpu_prefix_cache_{kind}_total')})"
    for kind in ("hits", "queries")
)
prefix_cache_hit_rate = Signal(
    "prefix cache hit rate",
    f"(({PREFIX_HITS} / ({PREFIX_QUERIES} > 0))"
    ' or (min by ($by) (last_over_time(vllm:cache_config_info{enable_prefix_caching="False"}[$window])) - 1))'
    f" and {FINISHED} >= {ENOUGH}",
    "prefix cache hit rate: {value}",
    "share",
    needs=f"{ENOUGH} finished requests",
)
blocks_per_prompt = Signal(
    "KV blocks / prompt",
    f"({PROMPT_TOKENS} / ({FINISHED} >= 3)) / on (instance) group_left () {configured('block_size')}",
    "a prompt spans {value} KV blocks on average; only whole blocks can be shared",
    "blocks",
    needs="3 finished requests",
)
replicas_that_hold_all = Signal(
    "replicas whose KV caches hold the load",
    f"{requests_in_flight_peak.promql} / ({requests_that_fit_kv_cache.promql} > 0)",
    "{value} KV caches of this size hold the peak number of requests in flight",
    "replicas",
)
headroom_of_one_answer = Signal(
    "mean output length / KV cache size",
    # the growth of all running requests together until one of them finishes and frees its blocks
    f"({GENERATED_TOKENS} / ({FINISHED} >= 3)) / on (instance) group_left () {configured('kv_cache_size_tokens')}",
    "the running requests grow by {value} of the KV cache until one of them finishes",
    "share",
)
