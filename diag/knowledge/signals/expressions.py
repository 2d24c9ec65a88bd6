"""Parts that signals of many files use: counters of requests and tokens, gauges of load, values of flags.

Only range functions look at samples, so one missed scrape hides nothing; a gauge needs three samples in the window. A
metric that vLLM renamed is `(new or old)`. Comparisons inside an expression are `bool`, so a signal is missing only
if telemetry is missing. Metric names and their versions: vLLM 0.8 - 0.33, from its source.
"""

from diag.core.incident import Part

KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
NOW = {gauge: f"sum by ($by) (last_over_time({gauge}[$window]))" for gauge in (RUNNING, WAITING)}
IN_FLIGHT = " + ".join(NOW.values())
CAPACITY = 'vllm:num_requests_waiting_by_reason{reason="capacity"}'
ITL = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
CONFIG = (
    "api_server_count",
    "block_size",
    "data_parallel_size",
    "enable_chunked_prefill",
    "enlarged_block_size",
    "gpu_memory_utilization",
    "kv_cache_max_concurrency",
    "kv_cache_memory_bytes",
    "kv_cache_size_tokens",
    "kv_offloading_size",
    "max_cpu_loras",
    "max_model_len",
    "max_num_active_seqs",
    "max_num_batched_tokens",
    "max_num_seqs",
    "num_gpu_blocks_override",
    "pipeline_parallel_size",
    "prefix_match_unit",
    "tensor_parallel_size",
)
"""Settings of a running server that expressions read, each as the part `config_NAME`."""


def renamed(function: str, names: tuple[str, ...], suffix: str = "") -> str:
    """Return a range function of a metric under the name that the release gives it, with `suffix` behind the name."""
    return " or ".join(f"{function}({name}{suffix}[$window])" for name in names)


SLOWEST_MEMBER = "the slowest member: in tensor parallelism, each step waits for it"
ANY_MEMBER = "the largest value: one member that shows it is enough"
EVERY_MEMBER = "the largest value: it is 0 only if all members are"
USUAL_MEMBER = "the median: it shows what is usual among peers, whatever a few of them do"
FULLEST_MEMBER = "the fullest member: a setting applies to all of them, and it has the least to give"
"""Reasons for the member that stands for its group (`Part.group`)."""


def configured(setting: str) -> str:
    """Return the running value of a setting, one per instance; missing if no source publishes it."""
    return f'max by (instance) (last_over_time(diag_vllm_config{{flag="{setting}"}}[$window]))'


def setting_value(setting: str) -> str:
    """Return the running value of any setting: its part if it has one, otherwise the expression."""
    return f"$config_{setting}" if setting in CONFIG else configured(setting)


def edge(limit: str) -> str:
    """Return the matcher of a histogram bucket, whose edge is written 1 or 1.0 by different exporters."""
    return f'le="{limit}"' if "." in limit else f'le=~"{limit}|{limit}[.]0"'


def within(limit: str, *names: str) -> str:
    """Return the observations at or below an edge of a histogram, under the name that the release gives it."""
    return f"sum by ($by) ({renamed('increase', names, f'_bucket{{{edge(limit)}}}')})"


def any_of(**signs: str) -> str:
    """Return the largest of several signs: 1 if one shows, 0 if none of those that can be observed does."""
    named = (f'label_replace({sign}, "sign", "{name}", "", "")' for name, sign in signs.items())
    return f"max by ($by) ({' or '.join(named)})"


def times_the_capacity(concurrency: str) -> str:
    """Return how many servers a load needs: by its concurrency, `concurrency` servers.

    Clients that wait for their answers keep so many requests in flight. Those that do not leave a backlog, which grows
    for as long as more requests arrive than are answered, or until they give up: then that ratio is the load, whatever
    the backlog.
    """
    return (
        f"($arrivals_per_answer_of_impatient_clients < {concurrency}"
        f" or $arrivals_per_answer_of_growing_backlog < {concurrency} or {concurrency})"
    )


def waiting_for_capacity(function: str, of_all: str = "") -> str:
    """Return a function, such as `max_over_time({}[$window])`, of the requests that wait for capacity, by series.

    vLLM 0.20 and later also counts waiting requests by reason. A deferred one waits for a KV transfer, a grammar or a
    LoRA slot: more capacity would not run it. Earlier releases export only the sum; `of_all` is its part.
    """
    return f"{function.format(CAPACITY)} or ignoring (reason) {of_all or function.format(WAITING)}"


PARTS: tuple[Part, ...] = (
    *(Part(f"config_{name}", configured(name)) for name in CONFIG),
    # -- counters: their increase in the window
    Part("finished_requests", "sum by ($by) (increase(vllm:request_success_total[$window]))", "requests"),
    Part("backlog_growth", "sum by ($by) (delta(vllm:num_requests_waiting[$window]))", "requests"),
    # a queue of clients that wait for their answers goes up and down by a few requests
    Part(
        "arrivals_per_answer_of_growing_backlog",
        "1 + ($backlog_growth > 0.05 * $queued_highest) / ($finished_requests > 0) > 1.03",
        "ratio",
    ),
    # Where clients give up, few answers are completed whatever the load: what arrives is weighed by the tokens that an
    # answer of this server has, those that it generates are its capacity.
    Part(
        "tokens_per_answer_since_start",
        "$answer_tokens_since_start / ($requests_since_start >= 10)",
        "tokens",
    ),
    Part(
        "arrivals_of_impatient_clients",
        "$responses_ok and $requests_given_up > 0.1 * $responses_ok",
        "requests",
    ),
    Part(
        "arrivals_per_answer_of_impatient_clients",
        "0 * $output_tokens + on (instance) group_left () ($arrivals_of_impatient_clients by (instance)"
        " * $tokens_per_answer_since_start by (instance) / ($output_tokens by (instance) > 0)) > 1",
        "ratio",
    ),
    Part("preemptions", "sum by ($by) (increase(vllm:num_preemptions_total[$window]))", "preemptions"),
    Part("prompt_tokens", "sum by ($by) (increase(vllm:prompt_tokens_total[$window]))", "tokens"),
    Part("output_tokens", "sum by ($by) (increase(vllm:generation_tokens_total[$window]))", "tokens"),
    Part("engine_steps", "sum by ($by) (increase(vllm:iteration_tokens_total_count[$window]))", "steps"),
    Part("finished_prompt_tokens", "sum by ($by) (increase(vllm:request_prompt_tokens_sum[$window]))", "tokens"),
    Part("finished_output_tokens", "sum by ($by) (increase(vllm:request_generation_tokens_sum[$window]))", "tokens"),
    Part("queue_seconds_total", "sum by ($by) (increase(vllm:request_queue_time_seconds_sum[$window]))", "seconds"),
    Part(
        "end_to_end_seconds_total", "sum by ($by) (increase(vllm:e2e_request_latency_seconds_sum[$window]))", "seconds"
    ),
    Part("first_tokens", "sum by ($by) (increase(vllm:time_to_first_token_seconds_count[$window]))", "requests"),
    # -- gauges of each series, with all of its labels
    Part("running_peak_by_series", "max_over_time(vllm:num_requests_running[$window])", "requests"),
    Part("running_minimum_by_series", "min_over_time(vllm:num_requests_running[$window])", "requests"),
    Part("running_average_by_series", "avg_over_time(vllm:num_requests_running[$window])", "requests"),
    Part("running_last_by_series", "last_over_time(vllm:num_requests_running[$window])", "requests"),
    Part("queued_peak_by_series", "max_over_time(vllm:num_requests_waiting[$window])", "requests"),
    Part("queued_minimum_by_series", "min_over_time(vllm:num_requests_waiting[$window])", "requests"),
    # the requests that wait for capacity: all queued ones except the deferred
    Part(
        "waiting_peak_by_series",
        waiting_for_capacity("max_over_time({}[$window])", "$queued_peak_by_series"),
        "requests",
    ),
    Part(
        "waiting_minimum_by_series",
        waiting_for_capacity("min_over_time({}[$window])", "$queued_minimum_by_series"),
        "requests",
    ),
    Part("queued_average_by_series", "avg_over_time(vllm:num_requests_waiting[$window])", "requests"),
    Part(
        "waiting_average_by_series",
        waiting_for_capacity("avg_over_time({}[$window])", "$queued_average_by_series"),
        "requests",
    ),
    # -- gauges with at least three samples in the window
    Part("requests_running_sampled", "count_over_time(vllm:num_requests_running[$window]) >= 3", "samples"),
    Part("queued_samples_by_series", "count_over_time(vllm:num_requests_waiting[$window])", "samples"),
    Part(
        "requests_waiting_sampled",
        f"({waiting_for_capacity('count_over_time({}[$window])', '$queued_samples_by_series')}) >= 3",
        "samples",
    ),
    Part("kv_cache_usage_sampled", "count_over_time(vllm:kv_cache_usage_perc[$window]) >= 3", "samples"),
    Part("gpu_cache_usage_sampled", "count_over_time(vllm:gpu_cache_usage_perc[$window]) >= 3", "samples"),
    Part("requests_running_peak", "sum by ($by) ($running_peak_by_series and $requests_running_sampled)", "requests"),
    Part(
        "requests_running_minimum",
        "sum by ($by) ($running_minimum_by_series and $requests_running_sampled)",
        "requests",
    ),
    Part(
        "requests_waiting_mean", "sum by ($by) ($waiting_average_by_series and $requests_waiting_sampled)", "requests"
    ),
    Part(
        "requests_waiting_minimum",
        "sum by ($by) ($waiting_minimum_by_series and $requests_waiting_sampled)",
        "requests",
    ),
    Part(
        "kv_cache_usage_mean",
        "max by ($by) (avg_over_time(vllm:kv_cache_usage_perc[$window]) and $kv_cache_usage_sampled)"
        " or max by ($by) (avg_over_time(vllm:gpu_cache_usage_perc[$window]) and $gpu_cache_usage_sampled)",
        "share",
    ),
    # -- gauges by any number of samples
    Part("running_lowest", "sum by ($by) ($running_minimum_by_series)", "requests"),
    Part("running_highest", "sum by ($by) ($running_peak_by_series)", "requests"),
    Part("waiting_lowest", "sum by ($by) ($waiting_minimum_by_series)", "requests"),
    # deferred requests do not wait for capacity, and they are in flight
    Part("queued_lowest", "sum by ($by) ($queued_minimum_by_series)", "requests"),
    Part("queued_highest", "sum by ($by) ($queued_peak_by_series)", "requests"),
    # -- inter-token latency, whose histogram vLLM renamed
    Part("itl_count", f"sum by ($by) ({renamed('increase', ITL, '_count')})", "tokens"),
    Part("itl_sum", f"sum by ($by) ({renamed('increase', ITL, '_sum')})", "seconds"),
)
