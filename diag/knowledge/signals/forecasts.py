"""Signals of forecasts: when the KV cache is full, the queue misses the TTFT SLO, or an error budget is spent.

A forecast extends the present rate, and holds only while that rate stands out from chance. Chance is known by its
mechanism: requests arrive and end at random, and each takes or frees its KV blocks at once. Over a window in which F
requests ended, usage moves by the blocks of sqrt(2 F) requests of the usual scatter of lengths; a sawtooth or a plateau
adds what a straight line leaves unexplained. Requests that only grow, token by token, move usage without either.
"""

from diag.core.incident import Part, Signal, documented, judged
from diag.knowledge.signals.expressions import waiting_for_capacity
from diag.knowledge.signals.load import ENOUGH, error_budget_burn_rate

SCATTER = 1.4
"""Root mean square of the KV blocks of requests, as a multiple of their mean: that of exponential lengths (judged)."""
MONTH = 30 * 86_400
SOON = 900
HORIZON = judged("a rate of the last minutes says little about what comes after a quarter of an hour")
WORKBOOK = "https://sre.google/workbook/alerting-on-slos/"


def _usage(function: str) -> str:
    """Return a function of the usage of the KV cache, whose gauge vLLM renamed; a gauge needs three samples."""
    gauges = (("vllm:kv_cache_usage_perc", "kv"), ("vllm:gpu_cache_usage_perc", "gpu"))
    return " or ".join(
        f"max by ($by) ({function.format(gauge)} and ${name}_cache_usage_sampled)" for gauge, name in gauges
    )


def _since_start(counter: str) -> str:
    return f"sum by ($by) (last_over_time({counter}[$window]))"


PARTS: tuple[Part, ...] = (
    # -- the KV cache: a straight line through the samples of the window, its value now, and what it leaves unexplained
    Part("kv_cache_usage_slope", _usage("deriv({}[$window])"), "1/s"),
    Part("kv_cache_usage_variance", _usage("stdvar_over_time({}[$window])"), ""),
    Part("kv_cache_usage_rise", "2 * ($kv_cache_usage_now - $kv_cache_usage_mean)", "share"),
    # how often the running requests were replaced; beyond a few times, usage has forgotten where it was
    Part("turnovers", "$finished_requests / ($requests_running_mean > 0)"),
    Part(
        "kv_cache_usage_by_chance",
        f"clamp_max(2 * $turnovers, 5) * ({SCATTER} * $kv_cache_usage_mean) ^ 2 / ($requests_running_mean > 0)"
        " + clamp_min(12 * $kv_cache_usage_variance - ($kv_cache_usage_slope * $window_seconds) ^ 2, 0)"
        " / clamp_min($turnovers, 1)",
    ),
    # The mean length since the start: in a window, the requests that end first are the short ones. A cached prefix is
    # held once for all requests that share it.
    Part("prompt_tokens_since_start", _since_start("vllm:request_prompt_tokens_sum"), "tokens"),
    Part("answer_tokens_since_start", _since_start("vllm:request_generation_tokens_sum"), "tokens"),
    Part("requests_since_start", _since_start("vllm:request_generation_tokens_count"), "requests"),
    Part(
        "cached_tokens_since_start",
        f"{_since_start('vllm:prefix_cache_hits_total')} or 0 * $requests_since_start",
        "tokens",
    ),
    Part(
        "full_length",
        "(clamp_min($prompt_tokens_since_start - $cached_tokens_since_start, 0) + $answer_tokens_since_start)"
        f" / ($requests_since_start >= {ENOUGH})",
        "tokens",
    ),
    # -- the queue: arrivals and starts are random counts, so their difference is by chance the root of their sum
    Part("waiting_slope", f"sum by ($by) ({waiting_for_capacity('deriv({}[$window])')})", "1/s"),
    Part("queue_growth_rate", "$waiting_slope > 2 * sqrt(2 * $first_tokens) / ($window_seconds > 0)", "1/s"),
    Part("waiting_now", "$requests_waiting_mean + $waiting_slope * $window_seconds / 2", "requests"),
)

kv_cache_usage_now = Signal(
    "KV cache usage (now)",
    _usage("predict_linear({}[$window], 0)"),
    "KV cache usage is {value}",
    "share",
)
kv_cache_growth = Signal(
    "KV cache growth / chance",
    "$kv_cache_usage_rise / sqrt(clamp_min($kv_cache_usage_by_chance, 0.0001))",
    "KV cache usage rises by {value} times what requests that come and go at random explain",
    "ratio",
)
time_until_full = Signal(
    "time until the KV cache is full",
    "clamp_min(1 - $kv_cache_usage_now, 0) / ($kv_cache_usage_slope > 0)",
    "KV cache full in about {value} at this rate",
    "seconds",
    culprit_promql='label_replace($time_until_the_kv_cache_is_full, "forecast", "full", "", "")',
    culprit_label="{forecast} in about {value}",
    culprit_unit="seconds",
)
full_soon = time_until_full.at_most(SOON, HORIZON)
kv_cache_usage_at_full_length = Signal(
    "KV cache usage at full length",
    "$requests_running_peak * $full_length / on (instance) group_left () $config_kv_cache_size_tokens",
    "with every running request at its full length, KV cache usage would be {value}",
    "share",
    needs=f"{ENOUGH} finished requests",
)
time_until_ttft_missed = Signal(
    "time until queue time exceeds the TTFT SLO",
    # a new request waits for those before it: as many as start in its queue time; a month if the queue does not grow
    "clamp_min($ttft_seconds * $first_tokens / ($window_seconds > 0) - $waiting_now, 0) / $queue_growth_rate"
    f" or {MONTH} + 0 * $waiting_slope",
    "at this rate, queue time exceeds the TTFT SLO in about {value}",
    "seconds",
)
ttft_missed_soon = time_until_ttft_missed.at_most(SOON, HORIZON)
time_until_budget_spent = Signal(
    "time until a month's error budget is spent",
    f"{MONTH} / (${error_budget_burn_rate.id} > 0)",
    "at this rate, a whole month's error budget is spent in about {value}",
    "seconds",
    needs=error_budget_burn_rate.needs,
)
budget_spent_early = time_until_budget_spent.below(
    MONTH, documented("a burn rate of 1 spends the error budget in exactly 30 days", WORKBOOK)
)
