"""The signals that our incidents share: one PromQL expression each.

Only range functions look at samples, so one missed scrape blinds nothing; a gauge needs three samples in the window. A
metric that vLLM renamed is `(new or old)`. Comparisons inside an expression are `bool`, so a signal is missing only
where telemetry is missing. Metric names and their versions: vLLM 0.8 - 0.33, from its source.
"""

from dataclasses import replace

from diag.core.incident import Signal, reported


def edge(limit: str) -> str:
    """Match a histogram's bucket edge, written 1 or 1.0 by different exporters."""
    return f'le=~"{limit}|{limit}[.]0"'


def counted(metric: str, matchers: str = "") -> str:
    """How much a counter grew in the window, per subject."""
    selected = f"{metric}{{{matchers}}}" if matchers else metric
    return f"sum by ($by) (increase({selected}[$window]))"


def gauge(function: str, metric: str, join: str = "sum") -> str:
    """A range function over a gauge with at least three samples; `function` ends where the range selector begins."""
    return f"{join} by ($by) ({function}{metric}[$window]) and count_over_time({metric}[$window]) >= 3)"


def renamed(function: str, new: str, old: str, join: str = "max") -> str:
    """`gauge` over a metric that had another name before; the new name wins where a page has both."""
    return f"({gauge(function, new, join)} or {gauge(function, old, join)})"


def configured(flag: str) -> str:
    """The running value of a flag, one per instance; absent where no source knows it."""
    return f'max by (instance) (last_over_time(diag_vllm_config{{flag="{flag}"}}[$window]))'


def least_of(one: str, other: str) -> str:
    """The smaller of two numbers, or the one that is known."""
    return f"((({one}) < ({other})) or ({other}) or ({one}))"


KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
ITL = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
FINISHED = counted("vllm:request_success_total")
PREEMPTIONS = counted("vllm:num_preemptions_total")
PROMPT_TOKENS = counted("vllm:request_prompt_tokens_sum")
GENERATED_TOKENS = counted("vllm:request_generation_tokens_sum")


def itl(suffix: str, matchers: str = "") -> str:
    """Growth of the inter-token histogram under its new or its old name."""
    new, old = (counted(f"{name}_{suffix}", matchers) for name in ITL)
    return f"({new} or {old})"


# -- load -------------------------------------------------------------------------------------------------------------

requests_running = Signal(
    "requests running (mean)",
    gauge("avg_over_time(", RUNNING),
    "{value} requests are running on average",
    "requests",
)
requests_running_median = Signal(
    "requests running (median)",
    gauge("quantile_over_time(0.5, ", RUNNING),
    "{value} requests are running in the median sample",
    "requests",
)
requests_running_floor = Signal(
    "requests running, least / most",
    f"{gauge('min_over_time(', RUNNING)} / ({gauge('max_over_time(', RUNNING)} > 0)",
    "the lowest number of running requests is {value} of the highest: 100 % is a flat line, held down by a cap",
    "share",
)
SEQUENCE_CAP = least_of(configured("max_num_active_seqs"), configured("max_num_seqs"))
running_share_of_cap = Signal(
    "requests running / --max-num-seqs (peak)",
    f"{gauge('max_over_time(', RUNNING)} / on (instance) group_left () {SEQUENCE_CAP}",
    "running requests peak at {value} of the sequence cap",
    "share",
    window_scaling="peak",
)
requests_waiting_median = Signal(
    "requests waiting (median)",
    gauge("quantile_over_time(0.5, ", WAITING),
    "{value} requests are waiting in the median sample",
    "requests",
)
requests_waiting_peak = Signal(
    "requests waiting (peak)",
    gauge("max_over_time(", WAITING),
    "at most {value} requests were waiting",
    "requests",
    window_scaling="peak",
)
waiting_share = Signal(
    "waiting share of requests",
    f"{gauge('avg_over_time(', WAITING)} / "
    f"(({gauge('avg_over_time(', WAITING)} + {gauge('avg_over_time(', RUNNING)}) > 0 or "
    f"1 + 0 * {gauge('avg_over_time(', WAITING)})",
    "{value} of the requests in the server are waiting rather than running",
    "share",
)
deferred_share = Signal(
    "deferred share of waiting requests",
    # a page without reasons (before vLLM 0.20) counts nothing as deferred
    f"sum by ($by) (avg_over_time({WAITING}_by_reason{{reason='deferred'}}[$window]))"
    f" / ({gauge('avg_over_time(', WAITING)} > 0) or 0 * {gauge('avg_over_time(', WAITING)}",
    "{value} of the waiting requests are deferred for a reason other than capacity",
    "share",
)
queue_time_share = Signal(
    "queue time / end-to-end latency",
    f"{counted('vllm:request_queue_time_seconds_sum')} / ({counted('vllm:e2e_request_latency_seconds_sum')} > 0)",
    "queue time is {value} of the end-to-end latency of finished requests",
    "share",
)
queue_time = Signal(
    "queue time (mean)",
    f"{counted('vllm:request_queue_time_seconds_sum')} / ({counted('vllm:request_queue_time_seconds_count')} >= 3)",
    "mean queue time: {value}",
    "seconds",
)
requests_finished = Signal(
    "requests finished", FINISHED, "{value} requests finished", "requests", window_scaling="peak"
)

# -- forward progress -------------------------------------------------------------------------------------------------


def in_flight(window: str, function: str = "min_over_time") -> str:
    """The least (or most) number of requests running or waiting at any sample of the window."""
    running, waiting = (f"sum by ($by) ({function}({each}[{window}]))" for each in (RUNNING, WAITING))
    return f"({running} + {waiting})"


def moved(window: str) -> str:
    """Tokens, requests, and moves of the KV gauge in the window: 0 is a standstill.

    A prefill in chunks with nobody decoding yields no token until it ends, but each chunk takes KV blocks, and every
    step reports its gauges. Running and waiting do not count: they move in a scheduler's deadlock too.
    """
    counters = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:request_success_total")
    grown = " + ".join(f"sum by ($by) (increase({each}[{window}]))" for each in counters)
    new, old = (f"sum by ($by) (changes({each}[{window}]))" for each in KV_USAGE)
    return f"({grown} + ({new} or {old} or 0 * ({grown})))"


def seen_before(age: str) -> str:
    """1 where there are samples older than `age`: a shorter standstill proves nothing."""
    return f"(sum by ($by) (count_over_time({RUNNING}[$window] offset {age})) > bool 0)"


def stuck(window: str, least: int) -> str:
    """Requests in flight all through a window in which nothing moved; 0 where something did."""
    return f"{in_flight(window)} * ({in_flight(window)} >= bool {least}) * ({moved(window)} == bool 0)"


progress = Signal(
    "tokens and requests processed",
    moved("$window"),
    "{value} tokens and requests were processed, counting changes of KV cache usage",
    "tokens",
    window_scaling="peak",
)
steps_per_second = Signal(
    "engine steps / s",
    "sum by ($by) (rate(vllm:iteration_tokens_total_count[$window]))",
    "{value} engine steps per second",
    "1/s",
)
requests_in_flight = Signal(
    "requests in flight (minimum)",
    in_flight("$window"),
    "at least {value} requests were in flight throughout",
    "requests",
)
requests_in_flight_peak = Signal(
    "requests in flight (peak)",
    in_flight("$window", "max_over_time"),
    "at most {value} requests were in flight",
    "requests",
    window_scaling="peak",
)
# The exporter's (or --probe's) own request got no token, and nobody else's did either.
PROBE_FAILED = (
    f"({moved('$window')} == bool 0) * on (instance) group_left () "
    "(1 - max by (instance) (last_over_time(diag_probe_success[$window])))"
)
# One request alone may be one huge prefill in one step, which moves nothing either: it gets two minutes.
requests_stuck = Signal(
    "requests in flight without progress",
    f"({PROBE_FAILED} > 0) or (({stuck('2m', 1)} * {seen_before('100s')}) > 0)"
    f" or ({stuck('$window', 2)} == 0) or ({stuck('$window', 2)} * {seen_before('25s')})",
    "{value} requests are in flight and none of them makes progress",
    "requests",
)
other_page = Signal(
    "metrics endpoint without vLLM's metrics",
    # an exporter answers whether or not vLLM does
    "max by (instance) (max_over_time(up[$window]))"
    ' unless on (instance) last_over_time(diag_scrape_success{collector="vllm"}[$window])',
    "an endpoint answered without vLLM's metrics: {value}",
    "bool",
)
serves = Signal(
    "vLLM's metrics available",
    "max by (instance) (max_over_time(diag_vllm_up[$window]))",
    "vLLM's metrics were available: {value}",
    "bool",
)
page_answers = Signal(
    "successful scrapes",
    "max by (instance) ((avg_over_time(diag_vllm_up[$window]) and count_over_time(diag_vllm_up[$window]) >= 3)"
    " or (avg_over_time(up[$window]) and count_over_time(up[$window]) >= 3))"
    f" and on (instance) count by (instance) (count_over_time({RUNNING}[1d]))",
    "{value} of scrapes succeeded (the server had answered before)",
    "share",
)

# -- KV cache ---------------------------------------------------------------------------------------------------------

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
    # fewer than three preemptions are an accident, not a rate
    f"{PREEMPTIONS} * ({PREEMPTIONS} >= bool 3) / clamp_min({FINISHED}, 1)",
    "{value} preemptions per finished request",
    "ratio",
)
PR_44594 = "https://github.com/vllm-project/vllm/pull/44594"
EVICTION_RATES = reported("0.08 in a run called healthy, 0.42 cured and 2.4 sick", PR_44594)
evicts = preemptions_per_request.above(0.2, EVICTION_RATES)
hardly_evicts = preemptions_per_request.at_most(0.2, EVICTION_RATES)
# What of a prompt takes room of its own: all of it, but where prompts share what they begin with, what one that runs
# holds less half an answer, which is how far it has come on average.
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
requests_the_kv_pool_holds = Signal(
    "requests that fit the KV cache",
    f"$kv_pool_fill / {TOKENS_PER_REQUEST} * on (instance) group_left () {configured('kv_cache_size_tokens')}",
    "the KV cache holds {value} requests of the observed mean length",
    "requests",
)
# What ran at the peak is no more than --max-num-seqs, also where that is not known.
HELD = f"round({requests_the_kv_pool_holds.promql})"
kv_pool_share_of_running = Signal(
    "requests that fit the KV cache / running (peak)",
    f"({HELD} / on (instance) group_left () {configured('max_num_seqs')} >= 1)"
    f" or {HELD} / ({gauge('max_over_time(', RUNNING)} > 0)",
    "the KV cache holds {value} of the peak number of running requests",
    "share",
)
# No more than are in the server at its fullest, and no more than the pool holds; nothing where its size is not known.
requests_worth_admitting = Signal(
    "requests worth admitting",
    f"({requests_the_kv_pool_holds.promql} < {requests_in_flight_peak.promql})"
    f" or ({requests_in_flight_peak.promql} and {requests_the_kv_pool_holds.promql})",
    "{value} requests could run at once: as many as arrived, as far as the KV cache holds them",
    "requests",
)
most_sequences = Signal(
    "--max-num-batched-tokens",
    # vLLM refuses more sequences than tokens in a step; no release since 0.8 has a default below 2,048
    f"{configured('max_num_batched_tokens')} or 2048 + 0 * {configured('max_num_seqs')}",
    "a step processes up to {value} tokens, at least one per request",
    "tokens",
)
# The usage that the next request of mean prompt length would bring about; the usage alone where the pool's size or the
# prompts' length is not known.
NEXT_PROMPT = f"{OWN_PROMPT} / on (instance) group_left () {configured('kv_cache_size_tokens')}"
kv_cache_usage_with_next = Signal(
    "KV cache usage with one more request",
    f"({kv_cache_usage_median.promql} + {NEXT_PROMPT}) or {kv_cache_usage_median.promql}",
    "with one more prompt, KV cache usage would be {value}",
    "share",
)

# -- prefill and decode -----------------------------------------------------------------------------------------------

MEDIAN_GAP = (
    f"(histogram_quantile(0.5, sum by ($by, le) (increase({ITL[0]}_bucket[$window])))"
    f" or histogram_quantile(0.5, sum by ($by, le) (increase({ITL[1]}_bucket[$window]))))"
)
ordinary_decode_share = Signal(
    "decode time at typical ITL",
    # weighted by time: a freeze is one gap among thousands, and most of the time
    f"{MEDIAN_GAP} * {itl('count')} / ({itl('sum')} > 0)",
    "{value} of decode time is spent at typical inter-token latency",
    "share",
)
freezes_per_request = Signal(
    "stream pauses / finished request",
    f"({itl('count')} - {itl('bucket', edge('$freeze_seconds'))}) / ({FINISHED} >= 3)",
    "{value} stream pauses (inter-token latency above freeze_seconds) per finished request",
    "ratio",
)
long_prefills = Signal(
    "prefills over freeze_seconds",
    f"{counted('vllm:request_prefill_time_seconds_count')}"
    f" - {counted('vllm:request_prefill_time_seconds_bucket', edge('$freeze_seconds'))}",
    "{value} prefills took longer than freeze_seconds",
    "requests",
    window_scaling="peak",
)
long_prompts = Signal(
    "prompts over 500 tokens",
    f"{counted('vllm:request_prompt_tokens_count')} - {counted('vllm:request_prompt_tokens_bucket', edge('500'))}",
    "{value} prompts of more than 500 tokens were prefilled",
    "requests",
    window_scaling="peak",
)
standstills = Signal(
    "stream pauses over 40 s",
    f"{itl('count')} - {itl('bucket', edge('40'))}",
    "{value} inter-token latencies exceeded 40 s",
    "pauses",
    window_scaling="peak",
)
prompt_lengths_spread = Signal(
    "prompt length p95 / p50",
    "histogram_quantile(0.95, sum by ($by, le) (increase(vllm:request_prompt_tokens_bucket[$window])))"
    " / (histogram_quantile(0.5, sum by ($by, le) (increase(vllm:request_prompt_tokens_bucket[$window]))) > 0)",
    "the 95th percentile of prompt lengths is {value} times the median",
    "ratio",
)
# What the prefix cache had was not prefilled; before 0.13 no page tells them apart.
PREFILLED = f"({counted('vllm:request_prefill_kv_computed_tokens_sum')} or {PROMPT_TOKENS})"
PREFILL_RATE = f"({PREFILLED} / ({counted('vllm:request_prefill_time_seconds_sum')} > 0))"
tokens_prefilled_in_a_freeze = Signal(
    "tokens prefilled in 60 % of freeze_seconds",
    # a margin of 0.6: prefill slows down as the context grows
    f"0.6 * $freeze_seconds * {PREFILL_RATE}",
    "{value} prompt tokens are prefilled in 60 % of freeze_seconds",
    "tokens",
)
PREFILLS_AT_A_TIME = "sum by ($by) (rate(vllm:request_prefill_time_seconds_sum[$window]))"
tokens_of_one_prompt_in_a_freeze = Signal(
    "tokens of one prompt in 60 % of freeze_seconds",
    # chunks last longer than whole prompts, and meet: those of every prompt that is prefilled share a step
    f"{tokens_prefilled_in_a_freeze.promql} / (1 + {PREFILLS_AT_A_TIME})",
    "{value} tokens of each concurrent prompt are prefilled in 60 % of freeze_seconds",
    "tokens",
)
threshold_share_of_step = Signal(
    "proposed threshold / --max-num-batched-tokens",
    # 256 is the least that is proposed; where the budget is not known, it is no objection
    f"clamp_min({tokens_of_one_prompt_in_a_freeze.promql}, 256) / on (instance) group_left ()"
    f" {configured('max_num_batched_tokens')} or 0 * {tokens_of_one_prompt_in_a_freeze.promql}",
    "the proposed threshold is {value} of a step's token budget",
    "share",
)

# -- what users were promised -----------------------------------------------------------------------------------------


def promised(metric: str, seconds: str) -> tuple[str, str]:
    """All that a histogram counted, and what it counted in time."""
    return counted(f"{metric}_count"), counted(f"{metric}_bucket", edge(seconds))


PROMISES = {
    "first token": promised("vllm:time_to_first_token_seconds", "$ttft_seconds"),
    "next token": (itl("count"), itl("bucket", edge("$itl_seconds"))),
    "whole answer": promised("vllm:e2e_request_latency_seconds", "$e2e_seconds"),
}
# How many times as fast as it may each error budget burns; not at all where fewer than ten were counted.
BURNS = " or ".join(
    f"label_replace(({count} - {in_time}) / clamp_min({count}, 1) * ({count} >= bool 10) / (1 - $objective),"
    f' "promise", "{promise}", "", "")'
    for promise, (count, in_time) in PROMISES.items()
)
budget_burn = Signal(
    "error budget burn rate",
    # the worst of them, where each can be judged: an edge that a page lacks makes it unknown
    f"max by ($by) ({BURNS}) and {' and '.join(in_time for _, in_time in PROMISES.values())}",
    "the error budget burns at {value} times the sustainable rate",
    "ratio",
    culprit_promql=f"({BURNS}) > 1",
    culprit_label="{promise} {value}",
)

# -- prefix cache -----------------------------------------------------------------------------------------------------

PREFIX_HITS, PREFIX_QUERIES = (
    f"({counted(f'vllm:prefix_cache_{each}_total')} or {counted(f'vllm:gpu_prefix_cache_{each}_total')})"
    for each in ("hits", "queries")
)
prefix_cache_hit_ratio = Signal(
    "prefix cache hit rate",
    f"({PREFIX_HITS} / ({PREFIX_QUERIES} > 0))"
    ' or (min by ($by) (last_over_time(vllm:cache_config_info{enable_prefix_caching="False"}[$window])) - 1)',
    "prefix cache hit rate: {value}",
    "share",
)
blocks_per_prompt = Signal(
    "KV blocks / prompt",
    f"({PROMPT_TOKENS} / ({FINISHED} >= 3)) / on (instance) group_left () {configured('block_size')}",
    "a prompt spans {value} KV blocks on average; only whole blocks can be shared",
    "blocks",
)

# -- what a fix asks --------------------------------------------------------------------------------------------------


def running_value(flag: str) -> Signal:
    """The value a flag runs with, for a fix that depends on it."""
    name = f"--{flag.replace('_', '-')}"
    return Signal(name, configured(flag), f"{name} is {{value}}")


def page_says(label: str, pattern: str) -> str:
    """1 or 0: whether the page's own cache configuration has this in a label."""
    info = "vllm:cache_config_info"
    return (
        f'(max by (instance) (last_over_time({info}{{{label}=~"{pattern}"}}[$window]))'
        f" or 0 * max by (instance) (last_over_time({info}[$window])))"
    )


def unless_unset(setting: str) -> Signal:
    """The value of a setting of the KV cache, and 0 where the page says that nobody set it."""
    unset = f'0 * max by (instance) (last_over_time(vllm:cache_config_info{{{setting}="None"}}[$window]))'
    return replace(running_value(setting), promql=f"{configured(setting)} or {unset}")


kv_cache_is_fp8 = Signal(
    "KV cache is quantized",
    page_says("cache_dtype", ".*(fp8|int8|int4|nvfp4|turboquant|octave|ultraquant).*"),
    "the KV cache is quantized already: {value}",
    "bool",
)
gpu_memory_total = Signal(
    "GPU memory (smallest GPU)",
    "min by (instance) (last_over_time(diag_gpu_memory_total_bytes[$window]))",
    "the smallest GPU has {value} of memory",
    "bytes",
)
FREE_SHARE = (
    "min by (instance) (min by (instance, gpu) (min_over_time(diag_gpu_memory_free_bytes[$window]))"
    " / on (instance, gpu) min by (instance, gpu) (min_over_time(diag_gpu_memory_total_bytes[$window]))"
    " unless on (instance, gpu) (last_over_time(diag_gpu_serving[$window]) == 0))"
)
gpu_memory_free_share = Signal("GPU memory free", FREE_SHARE, "{value} of the fullest GPU's memory is free", "share")
utilization_that_uses_free_memory = Signal(
    "GPU memory share for vLLM with the free memory",
    f"{configured('gpu_memory_utilization')} + {FREE_SHARE} - 0.05",
    "vLLM would use {value} of the GPU's memory and leave a 5 % reserve",
    "share",
)
kv_bytes_with_free_memory = Signal(
    "KV cache size that uses the free memory",
    f"{configured('kv_cache_memory_bytes')} + ({FREE_SHARE} - 0.05)"
    " * min by (instance) (last_over_time(diag_gpu_memory_total_bytes[$window]))",
    "the KV cache would be {value}, with 5 % of the GPU's memory left as a reserve",
    "bytes",
)
gpu_compute_capability_has_fp8 = Signal(
    "GPUs with FP8 (compute capability 8.9 or later)",
    'count by (instance) (last_over_time(diag_gpu_info{compute_capability=~"8[.]9|9[.].*|1[0-9][.].*"}[$window]))'
    " or 0 * count by (instance) (last_over_time(diag_gpu_info[$window]))",
    "{value} GPUs support FP8",
    "GPUs",
)
replicas_that_hold_all = Signal(
    "replicas whose KV caches hold the load",
    f"{requests_in_flight_peak.promql} / ({requests_the_kv_pool_holds.promql} > 0)",
    "{value} KV caches of this size hold the peak number of requests in flight",
    "replicas",
)
replicas_that_run_all = Signal(
    "replicas that run the load",
    f"{requests_in_flight_peak.promql} / ({requests_running.promql} > 0)",
    "{value} servers like this one run the peak number of requests in flight",
    "replicas",
)
chunked_prefill_is_off = Signal(
    "chunked prefill is off",
    f"(1 - {configured('enable_chunked_prefill')}) or 0 * max by (instance) (last_over_time({RUNNING}[$window]))",
    "chunked prefill is off: {value}",
    "bool",
)
sequences_in_a_step = Signal(
    "--max-num-seqs",
    f"clamp_min({configured('max_num_seqs')}, 256)",
    "a step processes at least {value} tokens: one per request, and enough for a prompt to make progress",
    "tokens",
)
twice_the_token_budget = Signal(
    "2 x --max-num-batched-tokens",
    f"2 * {configured('max_num_batched_tokens')}",
    "twice the token budget is {value} tokens",
    "tokens",
)
headroom_of_one_answer = Signal(
    "mean output length / KV cache size",
    # what the running requests grow by, together, until one of them ends and gives its blocks back
    f"({GENERATED_TOKENS} / ({FINISHED} >= 3)) / on (instance) group_left () {configured('kv_cache_size_tokens')}",
    "the running requests grow by {value} of the KV cache until one of them finishes",
    "share",
)
