"""Signals of planned operations: shutdowns, sleep and weight updates, elastic scaling, upgrades of vLLM.

While one is under way, a server answers nothing or stands still on purpose; what it breaks is another matter.

Across an upgrade a quarter of an hour now is compared with one some time ago, when another release ran. ITL grows at
most in proportion to the requests that share a step, so its ratio is divided by how many more run now, on average or at
the peak: the rest is not due to load. While requests wait, the server generates at its capacity; if it once generated
more, its capacity was higher. Times whose requests were longer or less cached are not compared.
"""

from collections.abc import Iterator

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
from diag.knowledge.signals.expressions import ANY_MEMBER, EVERY_MEMBER, any_of
from diag.knowledge.signals.forward_progress import SLEEP_STATE
from diag.knowledge.signals.log import log_value
from diag.knowledge.signals.startup import TOLD_FOR
from diag.vllm.routes import GENERATING_ROUTES, POOLING_ROUTES

LONGEST_SCALING = 1800
"""Seconds for which an elastic scaling explains a standstill: one from 4 to 5 engines takes 55 s (vllm#20775), and new
engines that read a large model from a slow disk take minutes."""
LONGEST_UPDATE = "10m"
"""A weight operation that was in flight this long ago and still is explains no standstill: it hangs."""
NO_WEIGHTS = (
    "/sleep|/wake_up|/pause|/resume|/is_.*|/reset_.*|/abort_requests|/tokenize|/detokenize|/(start|stop)_profile"
)
"""HTTP routes that load no weights into the model, beside those of inference."""
SPAN = "15m"
AGO = ("30m", "1h", "1d")
"""Offsets of the comparison: half an hour or an hour ago the load is similar; a day ago it was the same time of day."""
INFO = 'diag_vllm_info{version!=""}'
MOST_LONGER = 1.33
"""Mean lengths of two times of one load differ by up to 1.07 (kv_cascade, kv_cascade_base)."""
MOST_REQUESTS = 1.33
"""Runs of one load differ by up to 1.21 in requests in flight (engine_stalled, healthy)."""
FEWEST_TOKENS, FEWEST_REQUESTS = 1000, 10
"""In either quarter of an hour; below them single requests decide (judged)."""
SPEEDS = {"slower_decode": "ITL", "lower_throughput": "time per output token of the whole server"}
"""Measures of speed: the names of the parts, and their names in a report."""


def _recently(name: str) -> str:
    """Return 1 if the event of the part time_of_NAME was logged within 15 minutes, else 0."""
    return f"($time_of_{name} > bool 0) * (time() - $time_of_{name} < bool {TOLD_FOR})"


def _change(part: str, ago: str) -> str:
    """Return a part as a multiple of its value at the offset `ago`."""
    return f"${part}[{SPAN}] / (${part}[{SPAN}] offset {ago} > 0)"


def _since(ago: str) -> Iterator[Part]:
    """Yield the parts that compare the last quarter of an hour with the one that ended at the offset `ago`."""
    yield Part(
        f"upgraded_within_{ago}",
        # one series, of the new release, if both times have one release each and these differ; caches are cold and
        # kernels are compiled in the first minutes of a release
        f"($release[{SPAN}] and on (instance, version) $release[5m] offset 20m and on (instance)"
        f" ((count by (instance) ($release[{SPAN}]) == 1) and on (instance)"
        f" (count by (instance) ($release[{SPAN}] offset {ago}) == 1)))"
        f" unless on (instance, version) $release[{SPAN}] offset {ago}",
        "bool",
    )
    yield Part(f"running_growth_since_{ago}", _change("running_average", ago), "ratio")
    yield Part(f"peak_growth_since_{ago}", _change("running_highest", ago), "ratio")
    # growth of ITL beyond what more requests in a step explain; unknown if there are many more
    yield Part(
        f"slower_decode_since_{ago}",
        f"{_change('seconds_per_token', ago)}"
        f" / (clamp_min($running_growth_since_{ago} > $peak_growth_since_{ago} or $peak_growth_since_{ago}, 1)"
        f" <= {MOST_REQUESTS})",
        "ratio",
    )
    # the least factor by which tokens/s fell: requests wait all the time, so that the server runs at capacity
    yield Part(
        f"lower_throughput_since_{ago}",
        f"$output_tokens[{SPAN}] offset {ago} / ($output_tokens[{SPAN}] > 0) and $waiting_lowest[{SPAN}] >= 1",
        "ratio",
    )
    yield Part(
        f"requests_like_those_of_{ago}_ago",
        f"({_change('request_length', ago)} <= {MOST_LONGER})"
        f" and on (instance) ({_change('prompt_tokens_per_output_token', ago)} <= {MOST_LONGER})",
        "ratio",
    )
    factors = " or ".join(
        f'label_replace(${part}_since_{ago}, "speed", "{name}", "", "")' for part, name in SPEEDS.items()
    )
    yield Part(
        f"slower_since_{ago}",
        f"label_replace(({factors}) and on (instance) $requests_like_those_of_{ago}_ago"
        f' and on (instance) $upgraded_within_{ago}, "ago", "{ago}", "", "")',
        "ratio",
    )


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
        group=ANY_MEMBER,
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
    # vLLM's own HTTP server counts every call: if it counts and has counted none of these, there was none. Without its
    # counters and without the log, a reload is not seen.
    Part("calls_counted", "sum by ($by) (last_over_time(http_requests_total[$window]))", "calls"),
    Part(
        "weights_loaded_again",
        any_of(call="(($calls_that_may_load_weights or 0 * $calls_counted) > bool 0)", log="$weights_reloaded_by_log"),
        "bool",
    ),
    # Awake after the sleep, in the same process: a call of /wake_up was counted, or no restart came in between.
    Part(
        "woken_up",
        "($wake_up_calls > bool 0) or 0 * $calls_counted or 1 + 0 * (max by ($by) (resets("
        "vllm:generation_tokens_total[1d])) == 0)",
        "bool",
        group=ANY_MEMBER,
    ),
    Part(
        "weights_discarded",
        # not every backend logs it, so that a log without the line proves nothing
        any_of(page="($slept_at_level_2 > bool 0)", log=f"(${WEIGHTS_DISCARDED}_since_start > 0)"),
        "bool",
    ),
    Part(
        "asleep_now",
        f'max by ($by) (1 - last_over_time({SLEEP_STATE}{{sleep_state="awake"}}[$window]))',
        "bool",
        group=EVERY_MEMBER,
    ),
    Part(
        "weight_operations",
        "max by (instance) (last_over_time(vllm:rl_weight_update_operations_in_flight[$window])"
        " or last_over_time(vllm:sleep_mode_operations_in_flight[$window]))",
        "calls",
        group=ANY_MEMBER,
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
    Part("release", f"count by (instance, version) (last_over_time({INFO}[$window]))", "series"),
    Part("running_average", "sum by ($by) ($running_average_by_series)", "requests"),
    Part("cached_prompt_tokens", "$prefix_cache_hits or 0 * $prompt_tokens", "tokens"),
    Part("seconds_per_token", f"$itl_sum / ($itl_count >= {FEWEST_TOKENS})", "seconds"),
    Part("request_length", f"($prompt_tokens + $output_tokens) / ($finished_requests >= {FEWEST_REQUESTS})", "tokens"),
    # prompt tokens that are computed for each token of an answer
    Part(
        "prompt_tokens_per_output_token",
        "clamp_min($prompt_tokens - $cached_prompt_tokens, 0) / ($output_tokens > 0)",
        "tokens",
    ),
    *(part for ago in AGO for part in _since(ago)),
    Part("upgraded_release", " or ".join(f"$upgraded_within_{ago}" for ago in AGO), "series"),
    Part("slower_speeds", " or ".join(f"$slower_since_{ago}" for ago in AGO), "ratio"),
    # two releases within a day, and no two times to compare: unknown
    Part(
        "one_release_within_a_day",
        f"0 * (count by ($by) (count by ($by, version) (count_over_time({INFO}[1d]))) == 1)",
        "bool",
    ),
    # without a restart there was no upgrade, even if no exporter names the release
    Part(
        "not_restarted",
        "0 * (max by ($by) (resets(vllm:generation_tokens_total[1d])) == 0)",
        "bool",
        group=EVERY_MEMBER,
    ),
    Part("flag_values", "max by (instance, flag) (last_over_time(diag_vllm_config[$window]))"),
    Part(
        "flags_of_other_value",
        " or ".join(f"($flag_values[{SPAN}] != $flag_values[{SPAN}] offset {ago})" for ago in AGO),
    ),
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
woken_from_level_2 = Signal(
    "awake after weights were discarded",
    # "no" is proven by a page that shows no such sleep, by a sleep that lasts, or by calls of which none woke it up
    "($weights_discarded * (1 - $asleep_now) * $woken_up) or 0 * ($weights_discarded == 0)"
    " or 0 * ($asleep_now == 1) or 0 * ($woken_up == 0)",
    "the engine woke from sleep level 2, which discards the weights: {value}",
    "bool",
)
weights_reloaded = Signal(
    "weights loaded since the start",
    "$weights_loaded_again",
    "a call that may load weights was counted since the start, or the log shows a reload: {value}",
    "bool",
)
wake_ups = Signal(
    "calls of /wake_up",
    "$wake_up_calls or 0 * $calls_counted",
    "calls of /wake_up since the start: {value}",
    "calls",
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

upgraded = Signal(
    "upgraded within the last day",
    "max by ($by) ($upgraded_release) or $one_release_within_a_day or $not_restarted",
    "the server runs another release than before, and has for 20 minutes: {value}",
    "bool",
    culprit_promql="$upgraded_release",
    culprit_label="vLLM {version}",
)
slower_since_upgrade = Signal(
    "time per token / before the upgrade",
    "max by ($by) ($slower_speeds)",
    "at the same load, a token takes {value} times as long as before the upgrade",
    "ratio",
    needs="a quarter of an hour with the earlier release and requests like now's",
    culprit_promql="$slower_speeds > 1.1",
    culprit_label="{speed} {value}x that of {ago} ago",
)
flags_changed_with_upgrade = Signal(
    "settings that changed with the upgrade",
    f"count by ($by) ($flags_of_other_value) or 0 * max by ($by) (last_over_time(diag_vllm_config[{SPAN}]))",
    "settings that have another value than before the upgrade: {value}",
    "settings",
    context=True,
    culprit_promql="$flags_of_other_value",
    culprit_label="{flag}",
)
