"""Signals of an engine's load and of the latency SLO: requests, queue time, and how fast the error budget burns."""

from diag.core.incident import Part, Signal
from diag.knowledge.signals.expressions import GENERATING_ROUTES, edge

ENOUGH = 10
"""Finished requests below which a habit of the clients may be chance; a reasoning model may finish two a minute."""
BUDGETS = {"TTFT": "ttft", "inter-token latency": "itl", "end-to-end latency": "e2e"}
"""Latencies with an SLO, and the prefix of the names of their parts."""
LATENCIES = {latency: (f"${name}_count", f"${name}_within_slo") for latency, name in BUDGETS.items()}
"""All observations of each latency, and those within the SLO."""


def _within(metric: str, limit: str) -> str:
    return f"sum by ($by) (increase({metric}_bucket{{{edge(limit)}}}[$window]))"


def _burn_rate(name: str) -> str:
    """Return the burn rate of an error budget: 1 uses it up in exactly a month.

    A late observation among fewer than ten may be chance: it counts as 1; if that is the highest rate, the result is
    unknown.
    """
    late = f"(${name}_count - ${name}_within_slo)"
    return f"{late} / (${name}_count >= 10) / (1 - $objective) or {late} > bool 0"


PARTS: tuple[Part, ...] = (
    # -- load
    Part(
        "sequence_cap",
        "($config_max_num_active_seqs < $config_max_num_seqs) or $config_max_num_seqs or $config_max_num_active_seqs",
        "requests",
    ),
    # vLLM reports running requests after the step, so requests that finish in it are missing: with answers of 16 tokens
    # a sixteenth of them, so that 16 at the cap look like 15.
    Part("requests_ending_per_step", "$finished_requests / ($engine_steps > 0)", "requests"),
    Part(
        "requests_in_step_peak",
        "round($requests_running_peak + $requests_ending_per_step or $requests_running_peak)",
        "requests",
    ),
    # vLLM records queue time when a request finishes. Until then Little's law gives it from the gauges, if the engine
    # makes progress: the total queue time in the window is divided by the requests with a first token and those still
    # waiting; its share of the time in the server is the share of waiting requests.
    Part("output_tokens_rate", "sum by ($by) (rate(vllm:generation_tokens_total[$window]))", "tokens/s"),
    Part("window_seconds", "$output_tokens / ($output_tokens_rate > 0)", "seconds"),
    Part(
        "finished_with_queue_time",
        "sum by ($by) (increase(vllm:request_queue_time_seconds_count[$window]))",
        "requests",
    ),
    # HTTP counts a response when it ends, even if the client has disconnected; vLLM counts requests that it finished.
    # Several prompts in one HTTP request hide some. Without vLLM's own HTTP server: requests with a first token that
    # are neither finished nor running.
    Part(
        "responses_ok",
        f'sum by ($by) (increase(http_requests_total{{handler=~"{GENERATING_ROUTES}",status=~"2.."}}[$window]))',
        "responses",
    ),
    Part(
        "requests_completed",
        'sum by ($by) (increase(vllm:request_success_total{finished_reason!~"abort|"}[$window]))',
        "requests",
    ),
    # the growth of a counter between two scrapes of the window: increase() extrapolates beyond them
    Part(
        "first_tokens_seen",
        "sum by ($by) (max_over_time(vllm:time_to_first_token_seconds_count[$window])"
        " - min_over_time(vllm:time_to_first_token_seconds_count[$window]))",
        "requests",
    ),
    Part(
        "requests_completed_seen",
        'sum by ($by) (max_over_time(vllm:request_success_total{finished_reason!~"abort|"}[$window])'
        ' - min_over_time(vllm:request_success_total{finished_reason!~"abort|"}[$window]))',
        "requests",
    ),
    Part("requests_lost", "$first_tokens_seen - $requests_completed_seen - $running_highest", "requests"),
    # -- the latency SLO
    Part("ttft_count", "$first_tokens", "requests"),
    Part("ttft_within_slo", _within("vllm:time_to_first_token_seconds", "$ttft_seconds"), "requests"),
    Part(
        "itl_within_slo",
        f"{_within('vllm:inter_token_latency_seconds', '$itl_seconds')}"
        f" or {_within('vllm:time_per_output_token_seconds', '$itl_seconds')}",
        "tokens",
    ),
    Part("e2e_count", "sum by ($by) (increase(vllm:e2e_request_latency_seconds_count[$window]))", "requests"),
    Part("e2e_within_slo", _within("vllm:e2e_request_latency_seconds", "$e2e_seconds"), "requests"),
    *(Part(f"{name}_burn_rate", _burn_rate(name), "ratio") for name in BUDGETS.values()),
    Part(
        "burn_rates",
        " or ".join(
            f'label_replace(${name}_burn_rate, "latency", "{latency}", "", "")' for latency, name in BUDGETS.items()
        ),
        "ratio",
    ),
)

requests_running = Signal(
    "requests running (mean)",
    "sum by ($by) ($running_average_by_series and $requests_running_sampled)",
    "mean number of running requests: {value}",
    "requests",
)
requests_running_median = Signal(
    "requests running (median)",
    "sum by ($by) (quantile_over_time(0.5, vllm:num_requests_running[$window]) and $requests_running_sampled)",
    "median number of running requests: {value}",
    "requests",
)
requests_running_floor = Signal(
    "requests running, least / most",
    "$requests_running_minimum / ($requests_running_peak > 0)",
    "the lowest number of running requests is {value} of the highest: 100 % is a flat line, held down by a cap",
    "share",
)
running_share_of_cap = Signal(
    "requests running / --max-num-seqs (peak)",
    "clamp_max($requests_in_step_peak / on (instance) group_left () $sequence_cap, 1)",
    "running requests peak at {value} of the sequence cap",
    "share",
    window_scaling="peak",
)
requests_waiting_median = Signal(
    "requests waiting (median)",
    "sum by ($by) (quantile_over_time(0.5, vllm:num_requests_waiting[$window]) and $requests_waiting_sampled)",
    "median number of waiting requests: {value}",
    "requests",
)
requests_waiting_peak = Signal(
    "requests waiting (peak)",
    "sum by ($by) ($waiting_peak_by_series and $requests_waiting_sampled)",
    "peak number of waiting requests: {value}",
    "requests",
    window_scaling="peak",
)
waiting_share = Signal(
    "waiting share of requests",
    "$requests_waiting_mean"
    " / (($requests_waiting_mean + $requests_running_mean) > 0 or 1 + 0 * $requests_waiting_mean)",
    "{value} of the requests in the server are waiting rather than running",
    "share",
)
queue_time_share = Signal(
    "queue time / end-to-end latency",
    "$queue_seconds_total / ($end_to_end_seconds_total > 0) or $waiting_share_of_requests and $window_seconds",
    "queue time is {value} of the time that requests spend in the server",
    "share",
)
queue_time = Signal(
    "queue time (mean)",
    "$queue_seconds_total / ($finished_with_queue_time >= 3)"
    " or $requests_waiting_mean * $window_seconds / clamp_min($first_tokens + $requests_waiting_mean, 1)",
    "mean queue time: {value}",
    "seconds",
)
requests_finished = Signal(
    "requests finished",
    f"$finished_requests >= {ENOUGH}",
    "finished requests: {value}",
    "requests",
    window_scaling="peak",
    needs=f"{ENOUGH} of them",
)
share_given_up = Signal(
    "requests given up by their clients",
    "clamp_min($responses_ok - $requests_completed, 0) / ($responses_ok >= 10)"
    " or clamp_min($requests_lost, 0) / ($first_tokens_seen >= 10)",
    "clients gave up {value} of the requests before they were finished",
    "share",
)
slowest_finished = Signal(
    "end-to-end latency (99th percentile)",
    "histogram_quantile(0.99, sum by ($by, le) (increase(vllm:e2e_request_latency_seconds_bucket[$window])))",
    "of the requests that finished, 99 % took less than {value}",
    "seconds",
)
requests_in_flight = Signal(
    "requests in flight (minimum)",
    "$running_lowest + $waiting_lowest",
    "minimum number of requests in flight: {value}",
    "requests",
)
requests_in_flight_peak = Signal(
    "requests in flight (peak)",
    "$running_highest + $waiting_highest",
    "peak number of requests in flight: {value}",
    "requests",
    window_scaling="peak",
)
replicas_that_run_all = Signal(
    "replicas that run the load",
    "$requests_in_flight_peak / ($requests_running_mean > 0)",
    "{value} servers like this one run the peak number of requests in flight",
    "replicas",
)

# -- the latency SLO ---------------------------------------------------------------------------------------------------

error_budget_burn_rate = Signal(
    "error budget burn rate",
    # the highest burn rate, if each can be judged: without a bucket at the SLO the result is unknown
    "max by ($by) ($burn_rates) != 1 and $ttft_within_slo and $itl_within_slo and $e2e_within_slo",
    "the error budget burns at {value} times the sustainable rate",
    "ratio",
    needs="10 responses, of which some are late",
    culprit_promql="$burn_rates > 1",
    culprit_label="{latency} burn rate {value}",
)
