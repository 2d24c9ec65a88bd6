"""Signals of HTTP answers at inference routes: errors (5xx), requests that are refused (4xx) and that clients give up.

vLLM counts answers in http_requests_total{handler,method,status}, with the status as "5xx" (or "500", if its server is
instrumented otherwise). A series is born at its first event, with all events since the last scrape as its first value:
increase() counts none of these. A series with fewer samples in the window than its server's page was born in the
window, unless the server was restarted; its highest value is the number of its events. A stream whose status was sent
before it failed is 2xx over HTTP; the engine counts it as finished_reason="error" (vLLM 0.12 and later).

Under Ray Serve no vLLM answers HTTP: its proxy does, and counts answers on the metrics page of the same node (seen with
Ray 2.60). The counters of other gateways have no label in common with the server.

Requests that clients give up before they are finished count as answered over HTTP and as finished nowhere:
`finished_reason="abort"` stays at 0.

Three sources count refusals. vLLM's page lacks those of its authentication (401), which stands in front of the counter,
and groups the rest as 4xx. The access log has each status, if it is read and not turned off. Work of the engine shows
that requests succeed, whoever answers HTTP. Of page and log the larger count is taken: one may lack what the other has.
A request that is no POST is a probe, a scanner or a browser, and does not count.
"""

from diag.core import log_events as events
from diag.core.incident import Condition, judged
from diag.knowledge.signals.expressions import ANY_MEMBER, any_of, labelled, parts, signal
from diag.vllm.routes import GENERATING_ROUTES, POOLING_ROUTES

ROUTES = f"{GENERATING_ROUTES}|{POOLING_ROUTES}"
SERVED, REFUSED, FAILED = (
    f'http_requests_total{{handler=~"{ROUTES}",method!~"GET|HEAD|OPTIONS",status=~"{status}"}}'
    for status in ("2..", "4..", "5..")
)
FAILED_AT_RAY, ANSWERED_BY_RAY = (
    f'ray_serve_num_http_requests_total{{route=~"{ROUTES}",status_code=~"{status}"}}' for status in ("5..", "2..|5..")
)
FEWEST_ANSWERS, FEWEST_FAILED = 10, 5
"""A share of fewer answers may be chance; fewer errors may be one request that its client has sent again."""
FEATURES = {
    "structured output": f"{events.GRAMMAR_FAILED}|{events.GRAMMAR_REJECTED}",
    "images, audio or video": events.MULTIMODAL_CACHE_MISS,
    "multimodal input or adapter": events.REQUEST_PREPROCESSING_FAILED,
    "KV cache transfer": f"{events.KV_TRANSFER_FAILED}|{events.KV_BLOCKS_EXPIRED}|{events.KV_LOAD_FAILED}",
}
"""Features of requests that fail, by the events in the log."""
FEW_GIVEN_UP = 10
"""Requests given up below which their ages may be chance."""
MOST_BY_DESIGN = 0.33
"""Share of requests given up above which unknown ages hide harm: 28 % where an editor cancels completions, measured."""
SIGNS_OF_HARM = {
    "time-out": "($ages_when_given_up_p90_per_p10 <= bool 2.5) * ($mean_age_when_given_up >= bool 1)",
    "queue time": "$queue_time_per_end_to_end_latency > bool 0.25",
    "late first tokens": "1 - $ttft_within_slo / ($first_tokens >= 10) > bool 0.1",
    "sudden rise": "$requests_given_up_by_their_clients > bool 3 * clamp_min($usual_share_given_up, 0.1)",
    "many, at unknown ages": "$many_given_up",
}
"""Evidence that users are harmed; without any, clients may cancel by design, as an editor that completes code does."""
FEWEST_REFUSED, FEWEST_EARLIER = 20, 100
"""Refused answers in the window, and answers before it, below which a client's habit may look like a change."""
LONG_ROW, ROWS_BEFORE = 30, 3
"""Requests refused one after the other in the log, and how often as long as any such row before, whatever the time."""
LOGGED = "diag_vllm_log_answers_total"
SERVED_IN_LOG = f'{LOGGED}{{status="2xx"}}'
_ROW = 'max by ($by) (last_over_time(diag_vllm_log_refused_in_a_row{{row="{}"}}[$window]))'


def _with_births(name: str, series: str) -> str:
    """Return the parts `NAME_born` and `NAME_by_route`: answers of each route, those at a birth included."""
    return f"""
    {name}_late: samples = count_over_time({series}[$window]) < on (instance) group_left () $page_samples
    {name}_born: answers =
        (max_over_time({series}[$window]) and ${name}_late) unless on (instance) $restarted_in_window
    {name}_by_route: answers = sum by ($by, handler) (${name}_born or increase({series}[$window]))
    """


def _features() -> str:
    """Return the lines of the log in the window by the feature that they are about."""
    lines = "|".join(FEATURES.values())
    counted = f'increase(diag_vllm_log_events_total{{event=~"{lines}"}}[$window]) >= 1'
    for feature, named in FEATURES.items():
        counted = f'label_replace({counted}, "feature", "{feature}", "event", "{named}")'
    return counted


def _logged(status: str) -> str:
    """Return the answers of a status in the log."""
    return f'sum by ($by) (increase({LOGGED}{{status=~"{status}"}}[$window]))'


PARTS = parts(
    f"""
    page_samples: samples ({ANY_MEMBER}) = max by (instance) ($requests_running_sampled)
    restarted_in_window: ({ANY_MEMBER}) =
        max by (instance) (changes(process_start_time_seconds[$window])) > 0
        or max by (instance) (resets(vllm:prompt_tokens_total[$window])) > 0
    served_answers: answers = sum by ($by) (increase({SERVED}[$window]))
    # a full queue refuses requests with 503 where --max-num-queued-reqs is set: the load is shed on purpose
    shed_requests: requests = sum by (instance) (increase(vllm:admission_rejections_total[$window]))
    failed_over_http: answers = sum by ($by) ($failed_answers_by_route) or 0 * $served_answers
    failed_and_not_shed: answers = clamp_min($failed_over_http - $shed_requests, 0) or $failed_over_http
    answers_over_http: answers = $failed_and_not_shed + ($served_answers or 0 * $failed_and_not_shed)
    engine_errors: requests = sum by ($by) (increase(vllm:request_success_total{{finished_reason="error"}}[$window]))
    answers_of_ray_serve: answers = sum by ($by) (increase({ANSWERED_BY_RAY}[$window]))
    failed_at_ray_serve: answers = sum by ($by) (increase({FAILED_AT_RAY}[$window])) or 0 * $answers_of_ray_serve
    answers: answers = {any_of(http="$answers_over_http", ray="$answers_of_ray_serve", engine="$finished_requests")}
    failed_share: share =
        $failures * ($failures >= bool {FEWEST_FAILED}) / ($answers >= {FEWEST_ANSWERS}) or 0 * ($failures == 0)
    failing_features: lines = {_features()}
    # HTTP counts a response when it ends, even if the client has disconnected; vLLM counts requests that it finished.
    # Several prompts in one HTTP request hide some. Without vLLM's own HTTP server: requests with a first token that
    # are neither finished nor running.
    responses_ok: responses =
        sum by ($by) (increase(http_requests_total{{handler=~"{GENERATING_ROUTES}",status=~"2.."}}[$window]))
    requests_completed: requests =
        sum by ($by) (increase(vllm:request_success_total{{finished_reason!~"abort|"}}[$window]))
    # the growth of a counter between two scrapes of the window: increase() extrapolates beyond them. Across a restart
    # the difference of maximum and minimum would be all that the former process had counted.
    first_tokens_seen: requests =
        sum by ($by) (max_over_time(vllm:time_to_first_token_seconds_count[$window])
          - min_over_time(vllm:time_to_first_token_seconds_count[$window]))
    requests_completed_seen: requests =
        sum by ($by) (max_over_time(vllm:request_success_total{{finished_reason!~"abort|"}}[$window])
          - min_over_time(vllm:request_success_total{{finished_reason!~"abort|"}}[$window]))
    counter_resets: restarts = sum by ($by) (resets(vllm:time_to_first_token_seconds_count[$window]))
    requests_lost: requests =
        $first_tokens_seen - $requests_completed_seen - $running_highest and ($counter_resets == 0) and $ends_counted
    # a counter of finished requests that has ended grows by less and less in the window: its requests are not given up
    ends_counted: requests = sum by ($by) (last_over_time(vllm:request_success_total[2m]))
    requests_given_up: requests = clamp_min($responses_ok - $requests_completed, 0) and $ends_counted
    # The ages at which requests were given up: vLLM's HTTP server times every response, the engine those that finish.
    # Both histograms have the edges 0.5, 1, 1.5, 2, 2.5, 5, 10, 30 and 60 s. Responses of other routes and errors end
    # within the first of them.
    http_responses: responses = sum by ($by) (increase(http_requests_total[$window]))
    http_seconds: seconds =
        sum by ($by) (increase(http_request_duration_seconds_sum{{handler=~"{GENERATING_ROUTES}"}}[$window]))
    http_responses_by_age: responses = sum by ($by, le) (increase(http_request_duration_highr_seconds_bucket[$window]))
    finished_by_age: requests = sum by ($by, le) (increase(vllm:e2e_request_latency_seconds_bucket[$window]))
    given_up_by_age: requests =
        clamp_min($http_responses_by_age - $finished_by_age
          - on ($by) group_left () ($http_responses - $responses_ok), 0)
    usual_share_given_up: share =
        clamp_min($responses_ok[1h] offset 10m - $requests_completed[1h] offset 10m, 0)
        / ($responses_ok[1h] offset 10m >= 100)
    time_out_measured: bool = $ages_when_given_up_p90_per_p10 * $mean_age_when_given_up
    # the death of an engine loses the requests in flight
    many_given_up: bool =
        ($requests_given_up_by_their_clients > bool {MOST_BY_DESIGN}) unless $time_out_measured
        and ($requests_given_up >= {FEW_GIVEN_UP} or $requests_lost >= {FEW_GIVEN_UP})
        unless on (instance) $server_or_engine_dead > 0
    signs_of_harm: bool = {labelled("sign", SIGNS_OF_HARM)}
    # -- requests that are refused
    # none in the log is no evidence of none: the access log may be turned off
    refused_in_log: answers = {_logged("4.+")} > 0
    served_in_log: answers = {_logged("2xx")} > 0
    unauthorized_in_log: answers = {_logged("401|403")} and $refused_in_log
    not_found_in_log: answers = {_logged("404")} and $refused_in_log
    invalid_in_log: answers = {_logged("400|413|422")} and $refused_in_log
    too_large_in_log: answers = {_logged("413")} and $refused_in_log
    # vLLM's HTTP server exports this histogram from its start on: it answered nothing where it is 0
    http_is_counted: answers = 0 * sum by ($by) (last_over_time(http_request_duration_highr_seconds_count[$window]))
    refused_over_http: answers = sum by ($by) ($refused_answers_by_route) or 0 * $served_answers
    refused_total: answers = {any_of(http="$refused_over_http", log="$refused_in_log", none="$http_is_counted")}
    unsuccessful_answers: answers = $refused_total + ($failed_over_http or 0 * $refused_total)
    refused_per_answer: share =
        $refused_total / ($unsuccessful_answers + ($served_answers or $served_in_log or 0 * $refused_total) > 0)
    refused_share: share =
        $refused_per_answer * ($refused_total >= bool {FEWEST_REFUSED}) or 0 * ($finished_requests == 0)
    # the counters at the beginning of the window hold all answers since the start of the server
    served_before: answers = sum by ($by) (min_over_time({SERVED}[$window]))
    refused_before: answers =
        sum by ($by) (min_over_time({REFUSED}[$window]) unless $refused_answers_born) or 0 * $served_before
    refused_share_before: share =
        ($refused_before / ($served_before + $refused_before >= {FEWEST_EARLIER}))
        unless on (instance) $restarted_in_window
    # the order of the log's lines, which mostly have no time
    refused_row: answers = {_ROW.format("current")} >= {ROWS_BEFORE} * {_ROW.format("longest")}
    long_refused_row: answers = $refused_row >= {LONG_ROW}
    # if most answers are errors of the server, requests_failing is about them
    refused_mostly: answers =
        $refused_total * ($refused_total >= bool 0.5 * $unsuccessful_answers)
        and ($unsuccessful_answers >= {FEWEST_ANSWERS})
    name_asked_at: unix time = last_over_time(diag_vllm_log_refused_name_timestamp_seconds[$window])
    names_asked_lately: unix time = $name_asked_at > time() - 300
    """,
    # an idle server has no series of answers
    "failures: answers = "
    + any_of(
        http="$failed_and_not_shed",
        ray="$failed_at_ray_serve",
        engine="$engine_errors",
        idle="0 * ($finished_requests == 0)",
    ),
    _with_births("failed_answers", FAILED),
    _with_births("refused_answers", REFUSED),
    # a stream counts when it begins to run; lines of a log that is read alone count by their order
    "successes: requests = "
    + any_of(
        http="$served_answers and on (instance) $page_samples",
        engine="$finished_requests",
        running="$running_highest",
        log="$served_in_log unless on (instance) $long_refused_row",
    ),
    "served_since_start: answers = "
    + any_of(
        http=f"sum by ($by) (last_over_time({SERVED}[$window])) unless on (instance) $restarted_in_window",
        log=f"sum by ($by) (last_over_time({SERVED_IN_LOG}[$window]))",
    ),
)

error_burn_rate = signal(
    "error budget burn rate of failed answers: ratio = $failed_share / (1 - $objective)",
    "failed answers burn the error budget at {value} times the sustainable rate",
    needs=f"{FEWEST_ANSWERS} answers, of which some failed",
)
failed_share = signal(
    "failed share of answers (HTTP 5xx): share = $failed_share",
    "{value} of the answers at inference routes are errors of the server (HTTP 5xx); client errors are not counted",
    needs=f"{FEWEST_ANSWERS} answers, of which some failed",
)
failed_answers = signal(
    "failed answers (HTTP 5xx): answers = $failures",
    "answers at inference routes that are errors of the server: {value}",
    window_scaling="peak",
    culprit_promql="$failed_answers_by_route >= 1",
    culprit_label="{handler} {value}",
)
sign_of_failing = signal(
    "failing at a scrape: bool = $failures / ($answers > 0) > bool 0.1",
    "more than 10 % of a few answers are errors of the server: {value}",
)
shed = signal(
    # the API server refuses for all engines
    "requests refused by a full queue: requests ="
    " 0 * $requests_running_peak + on (instance) group_left () $shed_requests",
    "requests answered with HTTP 503 because --max-num-queued-reqs already wait: {value}",
    window_scaling="peak",
)
engine_errors = signal(
    "requests that the engine ended with an error: requests = $engine_errors",
    'requests that the engine ended with finished_reason="error": {value}',
    window_scaling="peak",
)
failing_feature = signal(
    "log lines about failed requests: lines ="
    " count by ($by) ($failing_features) or 0 * $log_errors or 0 * $last_startup_progress",
    "kinds of log lines about failed requests: {value}",
    window_scaling="peak",
    culprit_promql="$failing_features",
    culprit_label="{feature}: {value} lines {event}",
)
MOST_FAIL: Condition = failed_share.above(0.5, judged("most requests fail: the server is down for its users"))

share_given_up = signal(
    # without responses, requests given up before their first token are not seen: a low share proves nothing
    "requests given up by their clients: share ="
    " $requests_given_up / ($responses_ok >= 10) or 0 * ($requests_given_up == 0)"
    " or (clamp_min($requests_lost, 0) / ($first_tokens_seen >= 10) > 0.2) or 0 * ($first_tokens_seen < 10)",
    "clients gave up {value} of the requests before they were finished",
)
age_given_up = signal(
    "mean age when given up: seconds ="
    f" ($http_seconds - $end_to_end_seconds_total) / ($requests_given_up >= {FEW_GIVEN_UP})",
    "requests are given up at a mean age of {value}",
    needs=f"{FEW_GIVEN_UP} of them, and the metrics of vLLM's own HTTP server",
)
spread_of_ages_given_up = signal(
    "ages when given up, p90 / p10: ratio ="
    " histogram_quantile(0.9, $given_up_by_age) / (histogram_quantile(0.1, $given_up_by_age) > 0)"
    f" and on ($by) $requests_given_up >= {FEW_GIVEN_UP}",
    "of the requests given up, the 90th percentile of the age is {value} times the 10th",
    needs=f"{FEW_GIVEN_UP} of them, and the metrics of vLLM's own HTTP server",
)
harm_of_giving_up = signal(
    # no harm is shown by ages, queue and first tokens together: without one of them it is unknown
    "harm behind requests given up: bool = max by ($by) ($signs_of_harm) > 0"
    " or 0 * ($time_out_measured + $queue_time_per_end_to_end_latency + $ttft_within_slo / ($first_tokens >= 10))",
    "a time-out, a queue, a late first token, or a sudden rise is behind them, or unknown ages of many: {value}",
    needs=f"{FEW_GIVEN_UP} of them with their ages, and the histograms of queue time and TTFT",
    culprit_promql="$signs_of_harm > 0",
    culprit_label="{sign}",
)
refused_share = signal(
    "refused share of answers (HTTP 4xx): share = $refused_share",
    "{value} of the answers at inference routes are client errors (HTTP 4xx)",
    culprit_promql="$refused_answers_by_route >= 1",
    culprit_label="{handler} {value}",
)
sign_of_refusing = signal(
    "refusing at a scrape: bool = $refused_per_answer > bool 0.2",
    "more than 20 % of a few answers are client errors: {value}",
)
refused_growth = signal(
    # A share below 1 % counts as 1 %. A wave is news for an hour: a baseline that holds it would end it. A server that
    # was started within that hour has the beginning of the window.
    "refused share / refused share since the start of the server: ratio ="
    " $refused_share / clamp_min($refused_share_before[1h] or $refused_share_before, 0.01)"
    " or 0 * ($refused_share == 0)",
    "the share of client errors is {value} times the one of all answers before",
    needs=f"{FEWEST_EARLIER} answers before",
)
refused_without_success = signal(
    # few requests a minute need a longer look
    "requests refused while none succeeds: answers ="
    " 0 * ($successes > 0 or $refused_total == 0) or $refused_mostly or ($refused_mostly[5m] and $successes[5m] == 0)"
    " or $long_refused_row",
    "requests for inference that were refused (HTTP 4xx) while no request succeeded: {value}",
    window_scaling="peak",
    needs=f"{FEWEST_ANSWERS} answers at inference routes",
    culprit_promql=f'label_replace(sum by (instance, status) (increase({LOGGED}{{status=~"4.+"}}[$window])) >= 1,'
    ' "what", "HTTP $$1", "status", "(.*)")'
    ' or label_replace($refused_answers_by_route >= 1, "what", "$$1", "handler", "(.*)")',
    culprit_label="{what}: {value}",
)
successes_before_refusals = signal(
    f"requests that succeeded before: answers = $served_since_start * ($refused_total >= bool {FEWEST_ANSWERS})",
    "the same server process has answered {value} requests successfully before",
    window_scaling="peak",
)
unauthorized_answers = signal(
    "answers 401 and 403 in the log: answers = $unauthorized_in_log",
    "requests refused for their API key (HTTP 401, 403): {value}",
    window_scaling="peak",
    needs="the access log",
)
not_found_answers = signal(
    "answers 404 in the log: answers = $not_found_in_log",
    "requests for a model or a route that is not served (HTTP 404): {value}",
    window_scaling="peak",
    needs="the access log",
)
invalid_answers = signal(
    "answers 400, 413 and 422 in the log: answers = $invalid_in_log",
    "requests with invalid or too long contents (HTTP 400, 413, 422): {value}",
    window_scaling="peak",
    needs="the access log",
)
too_large_answers = signal(
    "answers 413 in the log: answers = $too_large_in_log",
    "requests whose body is too large (HTTP 413): {value}",
    window_scaling="peak",
    needs="the access log",
)
names_asked_in_vain = signal(
    "models and routes asked for in vain: names = count by ($by) ($names_asked_lately) or 0 * $refused_in_log",
    "models and routes that requests of the last 5 minutes asked for and that are not served: {value}",
    window_scaling="peak",
    culprit_promql="$names_asked_lately",
    culprit_label='{kind} "{name}"',
)
