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
    within,
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


def _since_start(counter: str) -> str:
    return f"sum by ($by) (last_over_time({counter}[$window]))"


PARTS = parts(
    f"""
    # -- load
    sequence_cap: requests =
        ($config_max_num_active_seqs < $config_max_num_seqs) or $config_max_num_seqs or $config_max_num_active_seqs
    # vLLM reports running requests after the step, so requests that finish in it are missing: with answers of 16 tokens
    # a sixteenth of them, so that 16 at the cap look like 15.
    requests_ending_per_step: requests = $finished_requests / ($engine_steps > 0)
    requests_in_step_peak: requests =
        round($requests_running_peak + $requests_ending_per_step or $requests_running_peak)
    share_of_known_cap: share = clamp_max($requests_in_step_peak / on (instance) group_left () $sequence_cap, 1)
    # Requests wait, the KV cache has room, and as many run at every scrape: a cap holds them, whatever its value. Where
    # the token budget or the adapters' slots hold them, their number varies, or those that wait are deferred.
    flat_at_a_cap: requests =
        ($requests_running_peak >= 2 and $requests_running_minimum >= 0.95 * $requests_running_peak)
        and $requests_waiting_minimum >= 1 and $kv_cache_usage_mean < 0.8
    # what the load needs: its peak with a quarter of headroom, as a power of two, by which CUDA graphs grow
    requests_for_the_load: requests =
        2 ^ ceil(log2(1.25 * clamp_min($requests_running_peak + $requests_waiting_peak, 1)))
    # vLLM records queue time when a request finishes: one that still waits, or whose client gave up, is not in it.
    # Little's law has all of them in the gauges, if the engine makes progress: the total queue time in the window is
    # divided by the requests with a first token and those still waiting; its share of the time in the server is the
    # share of waiting requests. The larger of both holds: survivors of a queue say little of it.
    output_tokens_rate: tokens/s = sum by ($by) (rate(vllm:generation_tokens_total[$window]))
    window_seconds: seconds = $output_tokens / ($output_tokens_rate > 0)
    finished_with_queue_time: requests = sum by ($by) (increase(vllm:request_queue_time_seconds_count[$window]))
    queued_mean: requests = sum by ($by) ($queued_average_by_series and $queued_samples_by_series >= 3)
    queue_time_of_finished: seconds = $queue_seconds_total / ($finished_with_queue_time >= 3)
    queue_time_by_gauges: seconds = $queued_mean * $window_seconds / clamp_min($first_tokens + $queued_mean, 1)
    queue_share_of_finished: share = $queue_seconds_total / ($end_to_end_seconds_total > 0)
    queue_share_by_gauges: share =
        $queued_mean / (($queued_mean + $requests_running_mean) > 0 or 1 + 0 * $queued_mean) and $window_seconds
    # -- the latency SLO
    ttft_count: requests = $first_tokens
    ttft_within_slo: requests = {within("$ttft_seconds", TTFT)}
    itl_within_slo: tokens = {within("$itl_seconds", ITL)}
    e2e_count: requests = sum by ($by) (increase(vllm:e2e_request_latency_seconds_count[$window]))
    e2e_within_slo: requests = {within("$e2e_seconds", E2E)}
    burn_rates: ratio = {_of_latencies("burn_rate")}
    late_latencies: seconds = {_of_latencies("p99")}
    # -- the KV cache: a straight line through the samples of the window, its value now, and what it leaves unexplained
    kv_cache_usage_slope: 1/s = {usage("deriv({}[$window])")}
    kv_cache_usage_variance = {usage("stdvar_over_time({}[$window])")}
    kv_cache_usage_rise: share = 2 * ($kv_cache_usage_now - $kv_cache_usage_mean)
    # how often the running requests were replaced; beyond a few times, usage has forgotten where it was
    turnovers = $finished_requests / ($requests_running_mean > 0)
    kv_cache_usage_by_chance =
        clamp_max(2 * $turnovers, 5) * ({SCATTER} * $kv_cache_usage_mean) ^ 2 / ($requests_running_mean > 0)
        + clamp_min(12 * $kv_cache_usage_variance - ($kv_cache_usage_slope * $window_seconds) ^ 2, 0)
        / clamp_min($turnovers, 1)
    # The mean length since the start: in a window, the requests that end first are the short ones. A cached prefix is
    # held once for all requests that share it.
    prompt_tokens_since_start: tokens = {_since_start("vllm:request_prompt_tokens_sum")}
    answer_tokens_since_start: tokens = {_since_start("vllm:request_generation_tokens_sum")}
    requests_since_start: requests = {_since_start("vllm:request_generation_tokens_count")}
    cached_tokens_since_start: tokens = {_since_start("vllm:prefix_cache_hits_total")} or 0 * $requests_since_start
    full_length: tokens =
        (clamp_min($prompt_tokens_since_start - $cached_tokens_since_start, 0) + $answer_tokens_since_start)
        / ($requests_since_start >= {ENOUGH})
    # While too few have ended, the full length is unknown. At a random moment, a request is halfway on average. It says
    # little of requests that started together, so that it counts in the last seconds before the KV cache is full only.
    usage_at_twice_the_present_length: share =
        2 * $kv_cache_usage_now and ($time_until_the_kv_cache_is_full <= {LAST_SECONDS})
    # -- the queue: arrivals and starts are random counts, so their difference is by chance the root of their sum
    waiting_slope: 1/s = sum by ($by) ({waiting_for_capacity("deriv({}[$window])")})
    queue_growth_rate: 1/s = $waiting_slope > 2 * sqrt(2 * $first_tokens) / ($window_seconds > 0)
    waiting_last: requests = sum by ($by) ({waiting_for_capacity("last_over_time({}[$window])")})
    waiting_now: requests = $requests_waiting_mean + $waiting_slope * $window_seconds / 2
    """,
    *map(_burn_rate, BUDGETS.values()),
    *(f"{name}_p99: seconds = {renamed(P99, names)}" for name, names in HISTOGRAMS.items()),
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
