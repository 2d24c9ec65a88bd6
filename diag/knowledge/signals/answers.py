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
from diag.knowledge.signals.expressions import declared
from diag.knowledge.signals.load import SLOW_BURN
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
BURN_OF_A_SIGN = SLOW_BURN.factor / 2
"""Burn rate of one scrape that shows failing answers: half of what is told, as half of a symptom ends its alert."""
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
    "sudden rise": "($requests_given_up_by_their_clients > bool 3 * clamp_min($usual_share_given_up, 0.1))"
    " * ($mean_age_when_given_up >= bool 1)",  # an editor that begins to complete code raises them as well
}
"""Evidence that users are harmed; without any, clients may cancel by design, as an editor that completes code does."""
FEWEST_REFUSED, FEWEST_EARLIER = 20, 100
"""Refused or failed answers in the window, and answers before it, below which a habit may look like a change."""
SURGE, WAVE, MANY_REFUSED = 10, 3, 0.2
"""How many times the share before errors and client errors are when they surge; the share of client errors then."""
LONG_ROW, ROWS_BEFORE = 30, 3
"""Requests refused one after the other in the log, and how often as long as any such row before, whatever the time."""
LOGGED = "diag_vllm_log_answers_total"
SERVED_IN_LOG = f'{LOGGED}{{status="2xx"}}'
_ROW = 'max by ($by) (last_over_time(diag_vllm_log_refused_in_a_row{{row="{}"}}[$window]))'


def _with_births(name: str, series: str) -> str:
    """Return the parts `NAME_born` and `NAME_by_route`: answers of each route, those at a birth included."""
    return f"""
    {name}_late: samples = count_over_time({series}[$window]) < on (instance) group_left () $page_scrapes
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


PARTS, SIGNALS = declared(
    vars(),
    f"""
    # the order of the log's lines, which mostly have no time
    refused_row: answers = {_ROW.format("current")} >= {ROWS_BEFORE} * {_ROW.format("longest")}
    """,
    _with_births("failed_answers", FAILED),
    _with_births("refused_answers", REFUSED),
)

MOST_FAIL: Condition = SIGNALS["failed_share"].above(
    0.5, judged("most requests fail: the server is down for its users")
)
