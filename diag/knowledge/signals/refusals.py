"""Signals of requests for inference that are refused (HTTP 4xx): a wave of them, and a server that refuses all.

Three sources count answers. vLLM's page (http_requests_total) lacks those of its authentication (401), which stands in
front of the counter, and groups the rest as 4xx. The access log has each status, if it is read and not turned off. Work
of the engine shows that requests succeed, whoever answers HTTP. Of page and log the larger count is taken: one may lack
what the other has. A request that is no POST is a probe, a scanner or a browser, and does not count.
"""

from diag.core.incident import Signal
from diag.knowledge.signals.answers import FEWEST_ANSWERS, REFUSED, SERVED
from diag.knowledge.signals.expressions import any_of, parts

FEWEST_REFUSED, FEWEST_EARLIER = 20, 100
"""Refused answers in the window, and answers before it, below which a client's habit may look like a change."""
LONG_ROW, ROWS_BEFORE = 30, 3
"""Requests refused one after the other in the log, and how often as long as any such row before, whatever the time."""
LOGGED = "diag_vllm_log_answers_total"
SERVED_IN_LOG = f'{LOGGED}{{status="2xx"}}'
_ROW = 'max by ($by) (last_over_time(diag_vllm_log_refused_in_a_row{{row="{}"}}[$window]))'


def _logged(status: str) -> str:
    """Return the answers of a status in the log."""
    return f'sum by ($by) (increase({LOGGED}{{status=~"{status}"}}[$window]))'


PARTS = parts(
    f"""
    # none in the log is no evidence of none: the access log may be turned off
    refused_in_log: answers = {_logged("4.+")} > 0
    served_in_log: answers = {_logged("2xx")} > 0
    unauthorized_in_log: answers = {_logged("401|403")} and $refused_in_log
    not_found_in_log: answers = {_logged("404")} and $refused_in_log
    invalid_in_log: answers = {_logged("400|413|422")} and $refused_in_log
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

refused_share = Signal(
    "refused share of answers (HTTP 4xx)",
    "$refused_share",
    "{value} of the answers at inference routes are client errors (HTTP 4xx)",
    "share",
    culprit_promql="$refused_answers_by_route >= 1",
    culprit_label="{handler} {value}",
)
sign_of_refusing = Signal(
    "refusing at a scrape",
    "$refused_per_answer > bool 0.2",
    "more than 20 % of a few answers are client errors: {value}",
    "bool",
)
refused_growth = Signal(
    "refused share / refused share since the start of the server",
    # A share below 1 % counts as 1 %. A wave is news for an hour: a baseline that holds it would end it. A server that
    # was started within that hour has the beginning of the window.
    "$refused_share / clamp_min($refused_share_before[1h] or $refused_share_before, 0.01) or 0 * ($refused_share == 0)",
    "the share of client errors is {value} times the one of all answers before",
    "ratio",
    needs=f"{FEWEST_EARLIER} answers before",
)
refused_without_success = Signal(
    "requests refused while none succeeds",
    # few requests a minute need a longer look
    "0 * ($successes > 0 or $refused_total == 0) or $refused_mostly or ($refused_mostly[5m] and $successes[5m] == 0)"
    " or $long_refused_row",
    "requests for inference that were refused (HTTP 4xx) while no request succeeded: {value}",
    "answers",
    window_scaling="peak",
    needs=f"{FEWEST_ANSWERS} answers at inference routes",
    culprit_promql=f'label_replace(sum by (instance, status) (increase({LOGGED}{{status=~"4.+"}}[$window])) >= 1,'
    ' "what", "HTTP $$1", "status", "(.*)")'
    ' or label_replace($refused_answers_by_route >= 1, "what", "$$1", "handler", "(.*)")',
    culprit_label="{what}: {value}",
)
successes_before_refusals = Signal(
    "requests that succeeded before",
    f"$served_since_start * ($refused_total >= bool {FEWEST_ANSWERS})",
    "the same server process has answered {value} requests successfully before",
    "answers",
    window_scaling="peak",
)
unauthorized_answers = Signal(
    "answers 401 and 403 in the log",
    "$unauthorized_in_log",
    "requests refused for their API key (HTTP 401, 403): {value}",
    "answers",
    window_scaling="peak",
    needs="the access log",
)
not_found_answers = Signal(
    "answers 404 in the log",
    "$not_found_in_log",
    "requests for a model or a route that is not served (HTTP 404): {value}",
    "answers",
    window_scaling="peak",
    needs="the access log",
)
invalid_answers = Signal(
    "answers 400, 413 and 422 in the log",
    "$invalid_in_log",
    "requests with invalid or too long contents (HTTP 400, 413, 422): {value}",
    "answers",
    window_scaling="peak",
    needs="the access log",
)
names_asked_in_vain = Signal(
    "models and routes asked for in vain",
    "count by ($by) ($names_asked_lately) or 0 * $refused_in_log",
    "models and routes that requests of the last 5 minutes asked for and that are not served: {value}",
    "names",
    window_scaling="peak",
    culprit_promql="$names_asked_lately",
    culprit_label='{kind} "{name}"',
)
