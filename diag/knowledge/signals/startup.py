"""Signals of a server's life cycle: starts, crashes, shutdowns, sleep and weight updates, elastic scaling, upgrades.

While a planned operation is under way, a server answers nothing or stands still on purpose; what it breaks is another
matter.

Across an upgrade a quarter of an hour now is compared with one some time ago, when another release ran. ITL grows at
most in proportion to the requests that share a step, so its ratio is divided by how many more run now, on average or at
the peak: the rest is not due to load. While requests wait, the server generates at its capacity; if it once generated
more, its capacity was higher. Times whose requests were longer or less cached are not compared.
"""

from diag.core import log_events as events
from diag.knowledge.signals.expressions import any_of, labelled, parts, signal
from diag.knowledge.signals.forward_progress import OOM_KILL_SECONDS, SLEEP_STATE
from diag.knowledge.signals.log import EVENT_TIME, LOG_CRASH, lately, log_value, since_start
from diag.vllm.routes import GENERATING_ROUTES, POOLING_ROUTES

PHASE = "diag_vllm_startup_phase"
SPENT = "diag_vllm_startup_phase_seconds"
IS_STARTING = f'phase=~"{"|".join(events.STARTING)}"'
LOADING = 'phase="load_weights"'
LONGEST_SILENCE = 3600
"""Seconds without a log line after which a start is over; kernels were compiled for 2,219 s (vllm#34399)."""
NO_LINE_YET = 600
"""Seconds for which a server process without any output is starting: VLLM_ENGINE_READY_TIMEOUT_S."""

TOLD_FOR = 900
"""Seconds for which a crash stays told, whatever starts after it."""

USUAL_SECONDS = {phase.name: phase.usual_seconds for phase in events.STARTUP_PHASES if phase.usual_seconds}

LONGEST_SCALING = 1800
"""Seconds for which an elastic scaling explains a standstill: one from 4 to 5 engines takes 55 s (vllm#20775), and new
engines that read a large model from a slow disk take minutes."""
LONGEST_UPDATE = "10m"
"""A weight operation that was in flight this long ago and still is explains no standstill: it hangs."""
NO_WEIGHTS = (
    "/sleep|/wake_up|/pause|/resume|/is_.*|/reset_.*|/abort_requests|/tokenize|/detokenize|/(start|stop)_profile"
)
"""HTTP routes that load no weights into the model, beside those of inference."""
MAY_LOAD_WEIGHTS = (
    f'http_requests_total{{method!="GET",status="2xx",handler!~"{GENERATING_ROUTES}|{POOLING_ROUTES}|{NO_WEIGHTS}"}}'
)
DRAIN_TIME = f"time_of_{events.DRAIN_STARTED}"
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


def _change(part: str, ago: str) -> str:
    """Return a part as a multiple of its value at the offset `ago`."""
    return f"${part}[{SPAN}] / (${part}[{SPAN}] offset {ago} > 0)"


def _since(ago: str) -> str:
    """Return the parts that compare the last quarter of an hour with the one that ended at the offset `ago`."""
    factors = labelled("speed", {name: f"${part}_since_{ago}" for part, name in SPEEDS.items()})
    return f"""
    # one series, of the new release, if both times have one release each and these differ; caches are cold and kernels
    # are compiled in the first minutes of a release
    upgraded_within_{ago}: bool =
        ($release[{SPAN}] and on (instance, version) $release[5m] offset 20m and on (instance)
        ((count by (instance) ($release[{SPAN}]) == 1) and on (instance)
        (count by (instance) ($release[{SPAN}] offset {ago}) == 1)))
        unless on (instance, version) $release[{SPAN}] offset {ago}
    running_growth_since_{ago}: ratio = {_change("running_average", ago)}
    peak_growth_since_{ago}: ratio = {_change("running_highest", ago)}
    # growth of ITL beyond what more requests in a step explain; unknown if there are many more
    slower_decode_since_{ago}: ratio =
        {_change("seconds_per_token", ago)}
        / (clamp_min($running_growth_since_{ago} > $peak_growth_since_{ago} or $peak_growth_since_{ago}, 1)
        <= {MOST_REQUESTS})
    # the least factor by which tokens/s fell: requests wait all the time, so that the server runs at capacity
    lower_throughput_since_{ago}: ratio =
        $output_tokens[{SPAN}] offset {ago} / ($output_tokens[{SPAN}] > 0) and $waiting_lowest[{SPAN}] >= 1
    requests_like_those_of_{ago}_ago: ratio =
        ({_change("request_length", ago)} <= {MOST_LONGER})
        and on (instance) ({_change("prompt_tokens_per_output_token", ago)} <= {MOST_LONGER})
    slower_since_{ago}: ratio =
        label_replace(({factors}) and on (instance) $requests_like_those_of_{ago}_ago
          and on (instance) $upgraded_within_{ago}, "ago", "{ago}", "", "")
    """


PARTS = parts(
    vars(),
    f"""
    upgraded_release: series = {" or ".join(f"$upgraded_within_{ago}" for ago in AGO)}
    slower_speeds: ratio = {" or ".join(f"$slower_since_{ago}" for ago in AGO)}
    flags_of_other_value =
        {" or ".join(f"($flag_values[{SPAN}] != $flag_values[{SPAN}] offset {ago})" for ago in AGO)}
    """,
    *(
        f'{phase}_per_usual: ratio = last_over_time({SPENT}{{phase="{phase}"}}[$window]) / {usual}'
        for phase, usual in USUAL_SECONDS.items()
    ),
    *map(_since, AGO),
    LOG_CRASH=LOG_CRASH,
    OOM_KILL_SECONDS=OOM_KILL_SECONDS,
    SLEEP_STATE=SLEEP_STATE,
    lately=lately,
    since_start=since_start,
)

startup_failed = signal(
    "engine start failed: bool = $start_failed",
    "the log reports a failed engine start, and nothing has started since: {value}",
    culprit_promql=f'(last_over_time({EVENT_TIME}{{event!~"{"|".join(events.NO_START_FAILURE)}"}}[$window]) > 0)'
    " >= on (instance) group_left () ($last_startup_progress by (instance))",
    culprit_label="{event}",
)
starting = signal(
    "engine starting: bool = $in_starting_phase * (1 - $vllm_up) * (1 - $start_failed)",
    "the log shows a start in progress and /metrics does not answer yet: {value}",
    culprit_promql=f"last_over_time({SPENT}[$window]) and on (instance, phase)"
    f" (last_over_time({PHASE}{{{IS_STARTING}}}[$window]) == 1)",
    culprit_label="{phase} for {value}",
    culprit_unit="seconds",
)
processes = signal(
    "vLLM processes: processes = count by ($by) (last_over_time(diag_vllm_process_cpu_seconds_total[$window])"
    " unless on (instance, pid) $ended_or_orphaned)",
    "running processes of this vLLM: {value}",
)
start_under_way = signal(
    "start under way: bool = clamp_max(($starts_by_log or $scraped) + ($starts_by_process or $scraped), 1)",
    "the log or the process table shows a start under way: {value}",
)
crashed_lately = signal(
    "crash within 15 minutes: bool = " + lately("time_of_crash", TOLD_FOR),
    "the server crashed within the last 15 minutes: {value}",
    culprit_promql=f"time() - last_over_time({LOG_CRASH}[$window]) < {TOLD_FOR}"
    ' or label_replace($time_of_kill_before_start > 0, "event", "kernel_oom_kill", "", "")',
    culprit_label="{event}",
)
started_since_crash = signal(
    "start since the crash: bool ="
    " (($last_startup_progress > bool $time_of_crash) or $scraped) + $newer_process > bool 0",
    "the server was started again after the crash: {value}",
    context=True,
    culprit_promql='label_replace($ready_again, "state", "recovered at", "", "")'
    ' or on (instance) label_replace($answers_again, "state", "restarted at", "", "")'
    ' or on (instance) label_replace($start_since_crash, "state", "restarting since", "", "")',
    culprit_label="{state} {value}",
    culprit_unit="unix time",
)
crashes_or_down = signal(
    "second crash, or not back yet: bool = " + any_of(again="($crashes_in_a_row >= bool 2)", down="$does_not_answer"),
    "the server crashed at least twice, or does not answer yet: {value}",
)
crash_time = signal(
    "time of the last crash: unix time = $time_of_crash",
    "the last crash was at {value}",
    culprit_promql=f'last_over_time({LOG_CRASH}{{text!=""}}[$window])',
    culprit_label="{text}",
)
last_start_failed = signal(
    "last start failed: bool = $start_failed or $scraped",
    "the last start failed before the server was ready: {value}",
)
crashes_in_a_row = signal(
    "crashes in a row: crashes = (max by ($by) (last_over_time(diag_vllm_log_consecutive_crashes[$window]))"
    " or max by ($by) (changes(diag_vllm_process_start_time_seconds[15m]))"
    " or max by ($by) (changes(process_start_time_seconds[15m])))"
    " and on (instance) ($vllm_seen_today or $engines_seen_today)",
    "crashes in a row: {value}",
)
sign_of_crash = signal(
    "crash at a scrape: bool = " + any_of(crashed="($crashes_in_a_row > bool 0)", down="$does_not_answer"),
    "the server does not answer, or has crashed and not served for long since: {value}",
)
startup_overdue = signal(
    "start-up phase / its usual duration: ratio ="
    f" max by ($by) ({' or '.join(f'${phase}_per_usual' for phase in USUAL_SECONDS)})",
    "the slowest start-up phase has taken {value} times its usual duration",
    culprit_promql=f"last_over_time({SPENT}[$window]) > 1",
    culprit_label="{phase} {value}",
    culprit_unit="seconds",
)
time_without_startup_progress = signal(
    "time without start-up progress: seconds = (time() - $last_startup_progress) * $in_starting_phase",
    "the start has made no progress for {value}",
)
in_graph_capture = signal(
    "in CUDA-graph capture: bool ="
    f' max by ($by) (last_over_time({PHASE}{{phase="{events.CUDA_GRAPH_CAPTURE}"}}[$window]))',
    "the start is in CUDA-graph capture: {value}",
)
processes_still_running = signal(
    "vLLM processes still running: processes ="
    " $vllm_processes or $no_process_left or 0 * $processes_seen_today or 0 * $last_startup_progress + 1",
    "running processes of this vLLM (1 where none has been seen yet): {value}",
    context=True,
)
startup_seconds = signal(
    "start-up time so far: seconds = $phase_seconds",
    "the start has taken {value} so far",
)
twice_the_startup = signal(
    "twice the start-up time so far: seconds = 2 * $phase_seconds",
    "twice the start-up time so far is {value}",
)
weights_read_rate = signal(
    "weights read from storage / s: bytes ="
    " sum by ($by) (rate(diag_vllm_process_read_bytes_total[$window])) * ($loads_weights == 1)",
    "vLLM reads its weights at {value} per second",
)
weights_time_left = signal(
    "time until the weights are loaded: seconds ="
    " (1 / (max by ($by) (last_over_time(diag_vllm_startup_progress_ratio[$window])) > 0) - 1)"
    f" * max by ($by) (last_over_time({SPENT}{{{LOADING}}}[$window])) * ($loads_weights == 1)",
    "at this rate the rest of the weights takes {value}",
)
probe_failures_allowed = signal(
    "startupProbe failureThreshold (10 s period): probes = ceil(1.5 * $phase_seconds / 10)",
    "{value} probes, 10 s apart, cover 1.5 times the start-up time so far",
)
requests_cut_at_shutdown = signal(
    "requests cut off by a shutdown: bool = " + any_of(cut="$requests_cut_lately", killed="$drain_killed"),
    "requests failed within 15 minutes because the server was told to stop: {value}",
)
requests_in_flight_at_shutdown = signal(
    "requests in flight cut off: requests = " + log_value(events.CUT_AT_SHUTDOWN, "requests"),
    "requests in flight that the shutdown cut off: {value}",
)
requests_refused_at_shutdown = signal(
    "requests refused during the drain: requests = " + log_value(events.CUT_AT_SHUTDOWN, "refused"),
    "requests that arrived during the drain and failed: {value}",
)
shutdown_time = signal(
    "time of the last request cut off: unix time ="
    f" $time_of_{events.CUT_AT_SHUTDOWN} > 0 or $time_of_{events.DRAIN_STARTED}",
    "the last request was cut off at {value}",
)
waited_for_requests = signal(
    f"shutdown with a drain: bool = {lately(DRAIN_TIME, TOLD_FOR)} or $scraped",
    "the engine waited for its requests before it ended: {value}",
)
latency_of_long_requests = signal(
    "end-to-end latency (p99 of an hour): seconds = histogram_quantile(0.99, $latency_buckets_within_an_hour)",
    "99 % of the requests took at most {value}",
)
woken_from_level_2 = signal(
    # "no" is proven by a page that shows no such sleep, by a sleep that lasts, or by calls of which none woke it up
    "awake after weights were discarded: bool ="
    " ($weights_discarded * (1 - $asleep_now) * $woken_up) or 0 * ($weights_discarded == 0)"
    " or 0 * ($asleep_now == 1) or 0 * ($woken_up == 0)",
    "the engine woke from sleep level 2, which discards the weights: {value}",
)
weights_reloaded = signal(
    "weights loaded since the start: bool = $weights_loaded_again",
    "a call that may load weights was counted since the start, or the log shows a reload: {value}",
)
wake_ups = signal(
    "calls of /wake_up: calls = $wake_up_calls or 0 * $calls_counted",
    "calls of /wake_up since the start: {value}",
)
elastic_scaling = signal(
    "elastic scaling under way: bool = $scales or $scraped",
    "the number of data-parallel engines is being changed: {value}",
)
scaling_time = signal(
    f"time of the last elastic scaling: unix time = $time_of_{events.SCALING_STARTED}",
    "the last elastic scaling began at {value}",
)
changes_under_way = signal(
    "change under way: bool ="
    " $engine_seen + on (instance) group_left () ($weights_in_transfer > 0 or $scales > 0) or $engine_seen",
    "a weight update, a sleep, a wake-up or an elastic scaling is under way: {value}",
)

upgraded = signal(
    "upgraded within the last day: bool ="
    " max by ($by) ($upgraded_release) or $one_release_within_a_day or $not_restarted",
    "the server runs another release than before, and has for 20 minutes: {value}",
    culprit_promql="$upgraded_release",
    culprit_label="vLLM {version}",
)
slower_since_upgrade = signal(
    "time per token / before the upgrade: ratio = max by ($by) ($slower_speeds)",
    "at the same load, a token takes {value} times as long as before the upgrade",
    needs="a quarter of an hour with the earlier release and requests like now's",
    culprit_promql="$slower_speeds > 1.1",
    culprit_label="{speed} {value}x that of {ago} ago",
)
flags_changed_with_upgrade = signal(
    "settings that changed with the upgrade: settings ="
    f" count by ($by) ($flags_of_other_value) or 0 * max by ($by) (last_over_time(diag_vllm_config[{SPAN}]))",
    "settings that have another value than before the upgrade: {value}",
    context=True,
    culprit_promql="$flags_of_other_value",
    culprit_label="{flag}",
)
