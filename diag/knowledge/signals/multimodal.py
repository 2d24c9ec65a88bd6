"""Signals of requests that fail, or vanish, before the scheduler has seen them.

A request passes the API server, a socket and the engine's input thread before a gauge counts it. What is lost there is
in flight for its client only: its HTTP request ends without one that the engine finished, or the probe fails.
"""

from diag.core.incident import Part, Signal
from diag.core.log_events import INPUT_THREAD_DIED, MULTIMODAL_CACHE_MISS, REQUEST_PREPROCESSING_FAILED
from diag.knowledge.signals.forward_progress import any_of
from diag.knowledge.signals.host import HEARSAY_TIME

RECENTLY = 300
"""Seconds for which a lost item counts: the caches disagree about it until the engine starts again."""
FULL_CORE = 0.9
COMPLETIONS = 'http_requests_total{handler=~"/v1/(chat/)?completions",status!="4xx"}'

PARTS: tuple[Part, ...] = (
    Part(
        "time_of_claimed_cache_miss",
        f'max by ($by) (last_over_time({HEARSAY_TIME}{{event="{MULTIMODAL_CACHE_MISS}"}}[$window]))',
        "unix time",
    ),
    # a thread that has died stays dead until the next start
    Part(
        "input_thread_died",
        f"($time_of_{INPUT_THREAD_DIED} > bool 0) * ($time_of_{INPUT_THREAD_DIED} >= bool $last_startup_progress)"
        f" or ($time_of_{INPUT_THREAD_DIED} > bool 0)",
        "bool",
    ),
    # more than once: the requests of one batch may be counted a moment after the engine has finished them
    Part("completions_counted_again", f"max by ($by) (changes({COMPLETIONS}[$window])) > bool 1", "bool"),
    Part("completions", f"sum by ($by) (increase({COMPLETIONS}[$window]))", "responses"),
    Part(
        "no_request_reaches_the_engine",
        any_of(http="(($completions > bool 2.5) * $completions_counted_again)", probe="($probe_success == bool 0)")
        + " * ($requests_in_flight_peak == bool 0) * ($tokens_and_requests_processed == bool 0)",
        "bool",
    ),
    Part("multimodal_cache_queries", "sum by ($by) (last_over_time(vllm:mm_cache_queries_total[$window]))", "items"),
    Part(
        "engine_cores",
        'max by ($by) (rate(diag_vllm_process_cpu_seconds_total{role="engine"}[$window]))',
        "cores",
    ),
    Part("input_thread_spins", f"($engine_cores > bool {FULL_CORE}) * ($multimodal_cache_queries > bool 0)", "bool"),
    Part(
        "cache_miss_claimed_recently",
        f"($time_of_claimed_cache_miss > bool 0) * (time() - $time_of_claimed_cache_miss < bool {RECENTLY})",
        "bool",
    ),
    Part(
        "cache_miss_logged_recently",
        f"($time_of_{MULTIMODAL_CACHE_MISS} > bool 0) * (time() - $time_of_{MULTIMODAL_CACHE_MISS} < bool {RECENTLY})",
        "bool",
    ),
    Part("cache_miss_killed_the_thread", f"$input_thread_died * ($time_of_{MULTIMODAL_CACHE_MISS} > bool 0)", "bool"),
    Part(
        "unreached_after_a_cache_miss",
        any_of(spin="$input_thread_spins", hearsay="$cache_miss_claimed_recently")
        + " * $no_request_reaches_the_engine",
        "bool",
    ),
)

requests_unreached = Signal(
    "requests that do not reach the scheduler",
    any_of(thread="$input_thread_died", unreached="$no_request_reaches_the_engine"),
    "requests arrive over HTTP and none reaches the scheduler: {value}",
    "bool",
)
multimodal_cache_lost = Signal(
    "multimodal items lost between the caches",
    any_of(
        log="$cache_miss_logged_recently",
        thread="$cache_miss_killed_the_thread",
        unreached="$unreached_after_a_cache_miss",
    )
    + " or 0 * ($multimodal_cache_queries == 0)",
    "the log names an item that the engine's multimodal cache lacks, or its input thread spins: {value}",
    "bool",
)
failed_before_the_scheduler = Signal(
    "requests that failed before the scheduler",
    f'sum by ($by) (increase(diag_vllm_log_events_total{{event="{REQUEST_PREPROCESSING_FAILED}"}}[$window]))',
    "requests that the engine failed before its scheduler saw them: {value}",
    "requests",
    window_scaling="peak",
)
