"""PromQL that the signals share: metric names, and range functions over counters, gauges and settings.

Only range functions look at samples, so one missed scrape blinds nothing; a gauge needs three samples in the window. A
metric that vLLM renamed is `(new or old)`. Comparisons inside an expression are `bool`, so a signal is missing only
where telemetry is missing. Metric names and their versions: vLLM 0.8 - 0.33, from its source.
"""


def edge(limit: str) -> str:
    """A matcher for a histogram bucket, whose edge is written 1 or 1.0 by different exporters."""
    return f'le="{limit}"' if "." in limit else f'le=~"{limit}|{limit}[.]0"'


def counted(metric: str, matchers: str = "") -> str:
    """The increase of a counter in the window, per subject."""
    selected = f"{metric}{{{matchers}}}" if matchers else metric
    return f"sum by ($by) (increase({selected}[$window]))"


def gauge(function: str, metric: str, join: str = "sum") -> str:
    """A range function over a gauge with at least three samples; `function` ends where the range selector begins."""
    return f"{join} by ($by) ({function}{metric}[$window]) and count_over_time({metric}[$window]) >= 3)"


def renamed(function: str, new: str, old: str, join: str = "max") -> str:
    """`gauge` over a metric that vLLM renamed; the new name wins where a server exports both."""
    return f"({gauge(function, new, join)} or {gauge(function, old, join)})"


def configured(flag: str) -> str:
    """The running value of a flag, one per instance; missing where no source publishes it."""
    return f'max by (instance) (last_over_time(diag_vllm_config{{flag="{flag}"}}[$window]))'


def least_of(one: str, other: str) -> str:
    """The smaller of two numbers, or the known one if the other is missing."""
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
    """The increase of the inter-token latency histogram under its new or its old name."""
    new, old = (counted(f"{name}_{suffix}", matchers) for name in ITL)
    return f"({new} or {old})"


def cache_config_has(label: str, pattern: str) -> str:
    """1 or 0: whether a label of vllm:cache_config_info matches the pattern."""
    info = "vllm:cache_config_info"
    return (
        f'(max by (instance) (last_over_time({info}{{{label}=~"{pattern}"}}[$window]))'
        f" or 0 * max by (instance) (last_over_time({info}[$window])))"
    )
