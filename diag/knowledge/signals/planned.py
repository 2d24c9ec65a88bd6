"""Signals of planned operations: shutdowns, sleep and weight updates, elastic scaling.

While one is under way, a server answers nothing or stands still on purpose; what it breaks is another matter.
"""

from diag.core.incident import Part, Signal
from diag.core.log_events import (
    CUT_AT_SHUTDOWN,
    DRAIN_ENDED,
    DRAIN_STARTED,
    SCALING_ENDED,
    SCALING_STARTED,
    WEIGHTS_DISCARDED,
    WEIGHTS_RELOADED,
)
from diag.knowledge.signals.expressions import GENERATING_ROUTES, POOLING_ROUTES, any_of
from diag.knowledge.signals.forward_progress import SLEEP_STATE
from diag.knowledge.signals.log import log_value
from diag.knowledge.signals.startup import TOLD_FOR

LONGEST_SCALING = 1800
"""Seconds for which an elastic scaling explains a standstill: one from 4 to 5 engines takes 55 s (vllm#20775), and new
engines that read a large model from a slow disk take minutes."""
LONGEST_UPDATE = "10m"
"""A weight operation that was in flight this long ago and still is explains no standstill: it hangs."""
NO_WEIGHTS = (
    "/sleep|/wake_up|/pause|/resume|/is_.*|/reset_.*|/abort_requests|/tokenize|/detokenize|/(start|stop)_profile"
)
"""HTTP routes that load no weights into the model, beside those of inference."""


def _recently(name: str) -> str:
    """Return 1 if the event of the part time_of_NAME was logged within 15 minutes, else 0."""
    return f"($time_of_{name} > bool 0) * (time() - $time_of_{name} < bool {TOLD_FOR})"


PARTS: tuple[Part, ...] = (
    # -- shutdowns
    Part("requests_cut_lately", _recently(CUT_AT_SHUTDOWN), "bool"),
    # a drain that never ends is ended by SIGKILL; the next start shows that it is over
    Part(
        "drain_killed",
        f"($time_of_{DRAIN_STARTED} > bool $time_of_{DRAIN_ENDED})"
        f" * ($last_startup_progress > bool $time_of_{DRAIN_STARTED}) * {_recently(DRAIN_STARTED)}",
        "bool",
    ),
    Part(
        "latency_buckets_within_an_hour",
        "sum by ($by, le) (max_over_time(vllm:e2e_request_latency_seconds_bucket[1h]))",
    ),
    # -- sleep and weights
    Part(
        "slept_at_level_2",
        f'max by ($by) (max_over_time({SLEEP_STATE}{{sleep_state="discard_all"}}[1d]))',
        "bool",
    ),
    Part(
        "wake_up_calls",
        'sum by ($by) (last_over_time(http_requests_total{handler="/wake_up",status="2xx"}[$window]))',
        "calls",
    ),
    # The calls that may have loaded weights: /collective_rpc, /update_weights, a route of a plugin. A trainer may call
    # any of them, so every call since the start of the server counts as a reload.
    Part(
        "calls_that_may_load_weights",
        'sum by ($by) (last_over_time(http_requests_total{method!="GET",status="2xx",'
        f'handler!~"{GENERATING_ROUTES}|{POOLING_ROUTES}|{NO_WEIGHTS}"}}[$window]))',
        "calls",
    ),
    Part(
        "weights_reloaded_by_log",
        f"($time_of_{WEIGHTS_RELOADED} > bool 0) * ($time_of_{WEIGHTS_RELOADED} >= bool $last_startup_progress)"
        f" * ($time_of_{WEIGHTS_RELOADED} >= bool $time_of_{WEIGHTS_DISCARDED})",
        "bool",
    ),
    Part(
        "weights_loaded_again",
        any_of(call="($calls_that_may_load_weights > bool 0)", log="$weights_reloaded_by_log", none="$scraped"),
        "bool",
    ),
    Part("asleep_now", f'max by ($by) (1 - last_over_time({SLEEP_STATE}{{sleep_state="awake"}}[$window]))', "bool"),
    Part(
        "weight_operations",
        "max by (instance) (last_over_time(vllm:rl_weight_update_operations_in_flight[$window])"
        " or last_over_time(vllm:sleep_mode_operations_in_flight[$window]))",
        "calls",
    ),
    Part(
        "weights_in_transfer",
        f"($weight_operations > bool 0) unless on (instance) ($weight_operations offset {LONGEST_UPDATE} > 0)",
        "bool",
    ),
    # -- elastic scaling
    Part("scales_by_page", "max by (instance) (last_over_time(diag_vllm_elastic_scaling[$window]))", "bool"),
    Part(
        "scales_by_log",
        f"${SCALING_STARTED}_since_start by (instance)"
        f" * ($time_of_{SCALING_STARTED} by (instance) > bool $time_of_{SCALING_ENDED} by (instance))"
        f" * (time() - $time_of_{SCALING_STARTED} by (instance) < bool {LONGEST_SCALING})",
        "bool",
    ),
    Part("scales", "$scales_by_page or $scales_by_log", "bool"),
)

requests_cut_at_shutdown = Signal(
    "requests cut off by a shutdown",
    any_of(cut="$requests_cut_lately", killed="$drain_killed"),
    "requests failed within 15 minutes because the server was told to stop: {value}",
    "bool",
)
requests_in_flight_at_shutdown = Signal(
    "requests in flight cut off",
    log_value(CUT_AT_SHUTDOWN, "requests"),
    "requests in flight that the shutdown cut off: {value}",
    "requests",
)
requests_refused_at_shutdown = Signal(
    "requests refused during the drain",
    log_value(CUT_AT_SHUTDOWN, "refused"),
    "requests that arrived during the drain and failed: {value}",
    "requests",
)
shutdown_time = Signal(
    "time of the last request cut off",
    f"$time_of_{CUT_AT_SHUTDOWN} > 0 or $time_of_{DRAIN_STARTED}",
    "the last request was cut off at {value}",
    "unix time",
)
waited_for_requests = Signal(
    "shutdown with a drain",
    f"{_recently(DRAIN_STARTED)} or $scraped",
    "the engine waited for its requests before it ended: {value}",
    "bool",
)
latency_of_long_requests = Signal(
    "end-to-end latency (p99 of an hour)",
    "histogram_quantile(0.99, $latency_buckets_within_an_hour)",
    "99 % of the requests took at most {value}",
    "seconds",
)
woken_without_weights = Signal(
    "awake without weights",
    any_of(page="($slept_at_level_2 > bool 0)", log=f"${WEIGHTS_DISCARDED}_since_start")
    + " * (1 - $asleep_now) * ($wake_up_calls > bool 0) * (1 - $weights_loaded_again) or $scraped",
    "the engine woke from sleep level 2, and nothing has loaded weights since its start: {value}",
    "bool",
)
elastic_scaling = Signal(
    "elastic scaling under way",
    "$scales or $scraped",
    "the number of data-parallel engines is being changed: {value}",
    "bool",
)
scaling_time = Signal(
    "time of the last elastic scaling",
    f"$time_of_{SCALING_STARTED}",
    "the last elastic scaling began at {value}",
    "unix time",
)
changes_under_way = Signal(
    "change under way",
    "$engine_seen + on (instance) group_left () ($weights_in_transfer > 0 or $scales > 0) or $engine_seen",
    "a weight update, a sleep, a wake-up or an elastic scaling is under way: {value}",
    "bool",
)
