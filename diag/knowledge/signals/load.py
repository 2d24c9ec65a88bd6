"""Signals of an engine's load and of the latency SLO: requests, queue time, burn rates, and forecasts of all three.

A forecast extends the present rate, and holds only while that rate stands out from chance. Chance is known by its
mechanism: requests arrive and end at random, and each takes or frees its KV blocks at once. Over a window in which F
requests ended, usage moves by the blocks of sqrt(2 F) requests of the usual scatter of lengths; a sawtooth or a plateau
adds what a straight line leaves unexplained. Requests that only grow, token by token, move usage without either.
"""

from diag.core.incident import BurnRateWindow, documented, judged
from diag.knowledge.signals.expressions import (
    E2E,
    ITL,
    TTFT,
    labelled,
    parts,
    renamed,
    signal,
    times_the_capacity,
    usage,
    waiting_for_capacity,
)

ENOUGH = 10
"""Finished requests below which a habit of the clients may be chance; a reasoning model may finish two a minute."""
BUDGETS = {"TTFT": "ttft", "inter-token latency": "itl", "end-to-end latency": "e2e"}
"""Latencies with an SLO, and the prefix of the names of their parts."""
HISTOGRAMS = {"ttft": TTFT, "itl": ITL, "e2e": E2E}
LATENCIES = {latency: (f"${name}_count", f"${name}_within_slo") for latency, name in BUDGETS.items()}
"""All observations of each latency, and those within the SLO."""
P99 = "histogram_quantile(0.99, sum by ($by, le) (increase({}_bucket[$window])))"
SCATTER = 1.4
"""Root mean square of the KV blocks of requests, as a multiple of their mean: that of exponential lengths (judged)."""
MONTH = 30 * 86_400
FORECAST_SECONDS, LAST_SECONDS = 900, 10
HORIZON = judged("a rate of the last minutes says little about what comes after a quarter of an hour")
WORKBOOK = "https://sre.google/workbook/alerting-on-slos/"
FAST_BURN, SLOW_BURN = BurnRateWindow(14.4, "1h", "5m"), BurnRateWindow(6, "6h", "30m")
SPENDS_BUDGET_FAST = documented(
    "{threshold} uses 2 % of a month's error budget in one hour; over six hours the threshold is "
    f"{SLOW_BURN.factor:g}",
    WORKBOOK,
)


def _burn_rate(name: str) -> str:
    """Return the part NAME_burn_rate, the burn rate of an error budget: 1 uses it up in exactly a month.

    A late observation among fewer than ten may be chance: it counts as 1; if that is the highest rate, the result is
    unknown.
    """
    late = f"(${name}_count - ${name}_within_slo)"
    return f"{name}_burn_rate: ratio = {late} / (${name}_count >= 10) / (1 - $objective) or {late} > bool 0"


def _of_latencies(part: str) -> str:
    """Return the parts `NAME_part` of all latencies with an SLO, each labelled with its latency."""
    return labelled("latency", {latency: f"${name}_{part}" for latency, name in BUDGETS.items()})


PARTS = parts(
    vars(),
    *map(_burn_rate, BUDGETS.values()),
    *(f"{name}_p99: seconds = {renamed(P99, names)}" for name, names in HISTOGRAMS.items() if names is not TTFT),
    f"""
    ttft_p99_by_itself: seconds = {renamed(P99, TTFT)}
    # a request has its first token before its last; interpolation within wide buckets may say otherwise
    ttft_p99: seconds = ($e2e_p99 < $ttft_p99_by_itself) or $ttft_p99_by_itself
    """,
)

requests_running = signal(
    "requests running (mean): requests = sum by ($by) ($running_average_by_series and $requests_running_sampled)",
    "mean number of running requests: {value}",
    context=True,
)
requests_running_median = signal(
    "requests running (median): requests ="
    " sum by ($by) (quantile_over_time(0.5, vllm:num_requests_running[$window]) and $requests_running_sampled)",
    "median number of running requests: {value}",
    context=True,
)
requests_running_floor = signal(
    "requests running, least / most: share = $requests_running_minimum / ($requests_running_peak > 0)",
    "the lowest number of running requests is {value} of the highest: 100 % is a flat line, held down by a cap",
)
running_share_of_cap = signal(
    "requests running / --max-num-seqs (peak): share = $share_of_known_cap or 1 + 0 * $flat_at_a_cap",
    "running requests peak at {value} of the sequence cap",
    window_scaling="peak",
)
sequence_cap = signal(
    "--max-num-seqs in effect: requests ="
    " 0 * $requests_running_peak + on (instance) group_left () $sequence_cap or $flat_at_a_cap",
    "at most {value} requests run at a time",
)
requests_waiting_median = signal(
    "requests waiting (median): requests ="
    f" sum by ($by) (({waiting_for_capacity('quantile_over_time(0.5, {}[$window])')}) and $requests_waiting_sampled)",
    "median number of waiting requests: {value}",
)
requests_waiting_peak = signal(
    "requests waiting (peak): requests = sum by ($by) ($waiting_peak_by_series and $requests_waiting_sampled)",
    "peak number of waiting requests: {value}",
    window_scaling="peak",
)
waiting_share = signal(
    "waiting share of requests: share = $requests_waiting_mean"
    " / (($requests_waiting_mean + $requests_running_mean) > 0 or 1 + 0 * $requests_waiting_mean)",
    "{value} of the requests in the server are waiting rather than running",
)
sign_of_a_queue = signal(
    # half of what a lasting queue has
    "queue at a scrape: bool = $waiting_last / clamp_min($waiting_last + $running_last, 1) > bool 0.16",
    "more than 16 % of the requests wait: {value}",
)
queue_time_share = signal(
    "queue time / end-to-end latency: share ="
    " ($queue_share_by_gauges > $queue_share_of_finished) or $queue_share_of_finished or $queue_share_by_gauges",
    "queue time is {value} of the time that requests spend in the server",
)
queue_time = signal(
    "queue time (mean): seconds ="
    " ($queue_time_by_gauges > $queue_time_of_finished) or $queue_time_of_finished or $queue_time_by_gauges",
    "mean queue time: {value}",
)
requests_finished = signal(
    f"requests finished: requests = $finished_requests >= {ENOUGH}",
    "finished requests: {value}",
    context=True,
    window_scaling="peak",
    needs=f"{ENOUGH} of them",
)
requests_by_latency = signal(
    # vLLM counts running requests after each step: it shows none of those that a single step answers
    "requests in the server (mean, by their latency): requests = $end_to_end_seconds_total / ($window_seconds > 0)",
    "by their end-to-end latency, {value} requests are in the server on average",
)
requests_in_flight = signal(
    "requests in flight (minimum): requests = $running_lowest + $queued_lowest",
    "minimum number of requests in flight: {value}",
    context=True,
)
requests_in_flight_peak = signal(
    "requests in flight (peak): requests = $running_highest + $queued_highest",
    "peak number of requests in flight: {value}",
    context=True,
    window_scaling="peak",
)
replicas_that_run_all = signal(
    "replicas that run the load: replicas = "
    + times_the_capacity("$requests_in_flight_peak / ($requests_running_mean > 0)")
    + " * $servers_with_the_same_model",
    "{value} servers like this one run the load of all of them",
)

# -- the latency SLO ---------------------------------------------------------------------------------------------------

error_budget_burn_rate = signal(
    # the highest burn rate, if each can be judged: without a bucket at the SLO the result is unknown
    "error budget burn rate: ratio ="
    " max by ($by) ($burn_rates) != 1 and $ttft_within_slo and $itl_within_slo and $e2e_within_slo",
    "the error budget burns at {value} times the sustainable rate",
    needs="10 responses, of which some are late",
    culprit_promql="$late_latencies and $burn_rates > 1",
    culprit_label="{latency} p99 {value}",
    culprit_unit="seconds",
)

kv_cache_usage_now = signal(
    "KV cache usage (now): share = " + usage("predict_linear({}[$window], 0)"),
    "KV cache usage is {value}",
)
kv_cache_growth = signal(
    "KV cache growth / chance: ratio = $kv_cache_usage_rise / sqrt(clamp_min($kv_cache_usage_by_chance, 0.0001))",
    "rise of the KV cache usage / what requests that come and go at random explain: {value}",
)
time_until_full = signal(
    "time until the KV cache is full: seconds = clamp_min(1 - $kv_cache_usage_now, 0) / ($kv_cache_usage_slope > 0)",
    "KV cache full in about {value} at this rate",
    culprit_promql='label_replace($time_until_the_kv_cache_is_full, "forecast", "full", "", "")',
    culprit_label="{forecast} in about {value}",
    culprit_unit="seconds",
)
full_soon = time_until_full.at_most(FORECAST_SECONDS, HORIZON)
kv_cache_usage_at_full_length = signal(
    "KV cache usage at full length: share ="
    " $requests_running_peak * $full_length / on (instance) group_left () $config_kv_cache_size_tokens"
    " or $usage_at_twice_the_present_length",
    "with every running request at its full length, KV cache usage would be {value}",
    needs=f"{ENOUGH} finished requests, or {LAST_SECONDS} s or less until it is full",
)
time_until_ttft_missed = signal(
    # a new request waits for those before it: as many as start in its queue time; a month if the queue does not grow
    "time until queue time exceeds the TTFT SLO: seconds ="
    " clamp_min($ttft_seconds * $first_tokens / ($window_seconds > 0) - $waiting_now, 0) / $queue_growth_rate"
    f" or {MONTH} + 0 * $waiting_slope",
    "at this rate, queue time exceeds the TTFT SLO in about {value}",
)
ttft_missed_soon = time_until_ttft_missed.at_most(FORECAST_SECONDS, HORIZON)
time_until_budget_spent = signal(
    f"time until a month's error budget is spent: seconds = {MONTH} / (${error_budget_burn_rate.id} > 0)",
    "at this rate, a whole month's error budget is spent in about {value}",
    needs=error_budget_burn_rate.needs,
)
budget_spent_early = time_until_budget_spent.below(
    MONTH, documented("a burn rate of 1 spends the error budget in exactly 30 days", WORKBOOK)
)
