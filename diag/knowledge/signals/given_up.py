"""Signals of requests that clients give up before they are finished: how many, at what age, and what harm shows.

vLLM counts such a request as answered over HTTP and as finished nowhere; `finished_reason="abort"` stays at 0.
"""

from diag.core.incident import Part, Signal
from diag.knowledge.signals.expressions import GENERATING_ROUTES

FEW_GIVEN_UP = 10
"""Requests given up below which their ages may be chance."""
SIGNS_OF_HARM = {
    "time-out": "($ages_when_given_up_p90_per_p10 <= bool 2.5) * ($mean_age_when_given_up >= bool 1)",
    "queue time": "$queue_time_per_end_to_end_latency > bool 0.25",
    "late first tokens": "1 - $ttft_within_slo / ($first_tokens >= 10) > bool 0.1",
    "sudden rise": "$requests_given_up_by_their_clients > bool 3 * clamp_min($usual_share_given_up, 0.1)",
}
"""Evidence that users are harmed; without any, clients may cancel by design, as an editor that completes code does."""

PARTS: tuple[Part, ...] = (
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
    # the growth of a counter between two scrapes of the window: increase() extrapolates beyond them. Across a restart
    # the difference of maximum and minimum would be all that the former process had counted.
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
    Part("counter_resets", "sum by ($by) (resets(vllm:time_to_first_token_seconds_count[$window]))", "restarts"),
    Part(
        "requests_lost",
        "$first_tokens_seen - $requests_completed_seen - $running_highest and ($counter_resets == 0)",
        "requests",
    ),
    Part("requests_given_up", "clamp_min($responses_ok - $requests_completed, 0)", "requests"),
    # The ages at which requests were given up: vLLM's HTTP server times every response, the engine those that finish.
    # Both histograms have the edges 0.5, 1, 1.5, 2, 2.5, 5, 10, 30 and 60 s. Responses of other routes and errors end
    # within the first of them.
    Part("http_responses", "sum by ($by) (increase(http_requests_total[$window]))", "responses"),
    Part(
        "http_seconds",
        f'sum by ($by) (increase(http_request_duration_seconds_sum{{handler=~"{GENERATING_ROUTES}"}}[$window]))',
        "seconds",
    ),
    Part(
        "http_responses_by_age",
        "sum by ($by, le) (increase(http_request_duration_highr_seconds_bucket[$window]))",
        "responses",
    ),
    Part(
        "finished_by_age", "sum by ($by, le) (increase(vllm:e2e_request_latency_seconds_bucket[$window]))", "requests"
    ),
    Part(
        "given_up_by_age",
        "clamp_min($http_responses_by_age - $finished_by_age"
        " - on ($by) group_left () ($http_responses - $responses_ok), 0)",
        "requests",
    ),
    Part(
        "usual_share_given_up",
        "clamp_min($responses_ok[1h] offset 10m - $requests_completed[1h] offset 10m, 0)"
        " / ($responses_ok[1h] offset 10m >= 100)",
        "share",
    ),
    Part(
        "signs_of_harm",
        " or ".join(f'label_replace({promql}, "sign", "{sign}", "", "")' for sign, promql in SIGNS_OF_HARM.items()),
        "bool",
    ),
)

share_given_up = Signal(
    "requests given up by their clients",
    "$requests_given_up / ($responses_ok >= 10) or clamp_min($requests_lost, 0) / ($first_tokens_seen >= 10)",
    "clients gave up {value} of the requests before they were finished",
    "share",
)
age_given_up = Signal(
    "mean age when given up",
    f"($http_seconds - $end_to_end_seconds_total) / ($requests_given_up >= {FEW_GIVEN_UP})",
    "requests are given up at a mean age of {value}",
    "seconds",
    needs=f"{FEW_GIVEN_UP} of them, and the metrics of vLLM's own HTTP server",
)
spread_of_ages_given_up = Signal(
    "ages when given up, p90 / p10",
    "histogram_quantile(0.9, $given_up_by_age) / (histogram_quantile(0.1, $given_up_by_age) > 0)"
    f" and on ($by) $requests_given_up >= {FEW_GIVEN_UP}",
    "of the requests given up, the 90th percentile of the age is {value} times the 10th",
    "ratio",
    needs=f"{FEW_GIVEN_UP} of them, and the metrics of vLLM's own HTTP server",
)
harm_of_giving_up = Signal(
    "harm behind requests given up",
    "max by ($by) ($signs_of_harm)",
    "a time-out, a queue, a late first token, or a sudden rise is behind them: {value}",
    "bool",
    culprit_promql="$signs_of_harm > 0",
    culprit_label="{sign}",
)
