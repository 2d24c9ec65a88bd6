"""Signals of a server's life cycle: starts, crashes, shutdowns, sleep and weight updates, elastic scaling, upgrades.

While a planned operation is under way, a server answers nothing or stands still on purpose; what it breaks is another
matter.

Across an upgrade a quarter of an hour now is compared with one some time ago, when another release ran. ITL grows at
most in proportion to the requests that share a step, so its ratio is divided by the growth of their 90th percentile:
the rest is not due to load. Where requests come by chance, whether or not others have ended, a slower server holds more
of them: there the ratio is divided by how many more tokens are generated, which is the load. While requests wait, the
server generates at its capacity; if it once generated more, its capacity was higher. Times whose requests were longer
or less cached are not compared.
"""

from diag.core import log_events as events
from diag.knowledge.signals.expressions import declared, labelled
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
SAME_LOAD = 1.1
"""Tokens generated in two quarters of an hour of one load differ by chance: 5 % with 400 requests (judged)."""
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
    load_growth_since_{ago}: ratio =
        {_change("output_tokens", ago)} <= {SAME_LOAD} and $comes_by_chance[{SPAN}]
    # growth of ITL beyond what more requests in a step explain; unknown if there are many more at more load
    slower_decode_since_{ago}: ratio =
        {_change("seconds_per_token", ago)} / clamp_min($load_growth_since_{ago}
        or {_change("running_often", ago)} <= {MOST_REQUESTS}, 1)
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


PARTS, SIGNALS = declared(
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
)
