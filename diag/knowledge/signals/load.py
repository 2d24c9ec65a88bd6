"""Signals of an engine's load: requests running, waiting and in flight, and queue time."""

from diag.core.incident import Signal
from diag.knowledge.signals.expressions import FINISHED, RUNNING, WAITING, configured, counted, gauge, least_of

ENOUGH = 10
"""Finished requests below which a habit of the clients may be chance; a reasoning model may finish two a minute."""

requests_running = Signal(
    "requests running (mean)",
    gauge("avg_over_time(", RUNNING),
    "mean number of running requests: {value}",
    "requests",
)
requests_running_median = Signal(
    "requests running (median)",
    gauge("quantile_over_time(0.5, ", RUNNING),
    "median number of running requests: {value}",
    "requests",
)
requests_running_floor = Signal(
    "requests running, least / most",
    f"{gauge('min_over_time(', RUNNING)} / ({gauge('max_over_time(', RUNNING)} > 0)",
    "the lowest number of running requests is {value} of the highest: 100 % is a flat line, held down by a cap",
    "share",
)
SEQUENCE_CAP = least_of(configured("max_num_active_seqs"), configured("max_num_seqs"))
# vLLM counts the running requests at the end of a step, when those that ended in it have left: with answers of 16
# tokens a sixteenth of them, so that 16 at the cap look like 15.
ENDING = f"{FINISHED} / ({counted('vllm:iteration_tokens_total_count')} > 0)"


def share_of_cap(running: str) -> str:
    """The share of the sequence cap that a step has, where so many requests run on after it."""
    in_step = f"round({running} + {ENDING} or {running})"
    return f"clamp_max({in_step} / on (instance) group_left () {SEQUENCE_CAP}, 1)"


running_share_of_cap = Signal(
    "requests running / --max-num-seqs (peak)",
    share_of_cap(gauge("max_over_time(", RUNNING)),
    "running requests peak at {value} of the sequence cap",
    "share",
    window_scaling="peak",
)
requests_waiting_median = Signal(
    "requests waiting (median)",
    gauge("quantile_over_time(0.5, ", WAITING),
    "median number of waiting requests: {value}",
    "requests",
)
requests_waiting_peak = Signal(
    "requests waiting (peak)",
    gauge("max_over_time(", WAITING),
    "peak number of waiting requests: {value}",
    "requests",
    window_scaling="peak",
)
waiting_share = Signal(
    "waiting share of requests",
    f"{gauge('avg_over_time(', WAITING)} / "
    f"(({gauge('avg_over_time(', WAITING)} + {gauge('avg_over_time(', RUNNING)}) > 0 or "
    f"1 + 0 * {gauge('avg_over_time(', WAITING)})",
    "{value} of the requests in the server are waiting rather than running",
    "share",
)
# vLLM books queue time when a request finishes. Until then Little's law says it by the gauges, where the engine moves:
# all the time that was waited in the window is shared by the requests that have got their first token and those that
# still wait, and of the time in the server it is the share that the waiting requests have of all.
WINDOW_SECONDS = (
    "(sum by ($by) (increase(vllm:generation_tokens_total[$window]))"
    " / (sum by ($by) (rate(vllm:generation_tokens_total[$window])) > 0))"
)
STARTED = counted("vllm:time_to_first_token_seconds_count")
queue_time_share = Signal(
    "queue time / end-to-end latency",
    f"{counted('vllm:request_queue_time_seconds_sum')} / ({counted('vllm:e2e_request_latency_seconds_sum')} > 0)"
    f" or ({waiting_share.promql}) and {WINDOW_SECONDS}",
    "queue time is {value} of the time that requests spend in the server",
    "share",
)
queue_time = Signal(
    "queue time (mean)",
    f"{counted('vllm:request_queue_time_seconds_sum')} / ({counted('vllm:request_queue_time_seconds_count')} >= 3)"
    f" or {gauge('avg_over_time(', WAITING)} * {WINDOW_SECONDS}"
    f" / clamp_min({STARTED} + {gauge('avg_over_time(', WAITING)}, 1)",
    "mean queue time: {value}",
    "seconds",
)
requests_finished = Signal(
    "requests finished",
    f"{FINISHED} >= {ENOUGH}",
    "finished requests: {value}",
    "requests",
    window_scaling="peak",
    needs=f"{ENOUGH} of them",
)

# HTTP counts an answer when it ends, also where the client has hung up, and vLLM counts what it finished. Several
# prompts in one HTTP request hide some. Without vLLM's own HTTP server: first tokens of answers that neither were
# finished nor run.
ANSWERED = counted(
    "http_requests_total", 'handler=~"/v1/(completions|chat/completions|responses|messages)|/generate",status="2xx"'
)
COMPLETED = counted("vllm:request_success_total", 'finished_reason!="abort"')
FIRST_TOKENS, ENDED = "vllm:time_to_first_token_seconds_count", 'vllm:request_success_total{finished_reason!="abort"}'


def grown(counter: str) -> str:
    """What a counter grew by between two scrapes of the window: increase() adds what lies outside of them."""
    return f"sum by ($by) (max_over_time({counter}[$window]) - min_over_time({counter}[$window]))"


LOST = f"({grown(FIRST_TOKENS)} - {grown(ENDED)} - sum by ($by) (max_over_time({RUNNING}[$window])))"
share_given_up = Signal(
    "requests given up by their clients",
    f"clamp_min({ANSWERED} - {COMPLETED}, 0) / ({ANSWERED} >= 10)"
    f" or clamp_min({LOST}, 0) / ({grown(FIRST_TOKENS)} >= 10)",
    "clients gave up {value} of the requests before they were finished",
    "share",
)
slowest_finished = Signal(
    "end-to-end latency (99th percentile)",
    "histogram_quantile(0.99, sum by ($by, le) (increase(vllm:e2e_request_latency_seconds_bucket[$window])))",
    "of the requests that finished, 99 % took less than {value}",
    "seconds",
)


def in_flight(window: str, function: str = "min_over_time") -> str:
    """The minimum (or maximum) number of requests running or waiting in any sample of the window."""
    running, waiting = (f"sum by ($by) ({function}({gauge_name}[{window}]))" for gauge_name in (RUNNING, WAITING))
    return f"({running} + {waiting})"


requests_in_flight = Signal(
    "requests in flight (minimum)",
    in_flight("$window"),
    "minimum number of requests in flight: {value}",
    "requests",
)
requests_in_flight_peak = Signal(
    "requests in flight (peak)",
    in_flight("$window", "max_over_time"),
    "peak number of requests in flight: {value}",
    "requests",
    window_scaling="peak",
)
replicas_that_run_all = Signal(
    "replicas that run the load",
    f"{requests_in_flight_peak.promql} / ({requests_running.promql} > 0)",
    "{value} servers like this one run the peak number of requests in flight",
    "replicas",
)
