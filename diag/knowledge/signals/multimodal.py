"""Signals of requests that fail, or vanish, before the scheduler has seen them.

A request passes the API server, a socket and the engine's input thread before a gauge counts it. What is lost there is
in flight for its client only: its HTTP request ends without one that the engine finished, or the probe fails.
"""

from diag.core.incident import Signal
from diag.core.log_events import INPUT_THREAD_DIED, MULTIMODAL_CACHE_MISS, REQUEST_PREPROCESSING_FAILED
from diag.knowledge.signals.expressions import counted, in_flight
from diag.knowledge.signals.forward_progress import any_of, moved
from diag.knowledge.signals.host import HEARSAY_TIME, LAST_PROGRESS, event_time, last

RECENTLY = 300
"""Seconds for which a lost item counts: the caches disagree about it until the engine starts again."""
FULL_CORE = 0.9
SAID = last(HEARSAY_TIME, f'event="{MULTIMODAL_CACHE_MISS}"')
MISSED, DIED = event_time(MULTIMODAL_CACHE_MISS), event_time(INPUT_THREAD_DIED)
THREAD_DIED = f"(({DIED} > bool 0) * ({DIED} >= bool {LAST_PROGRESS}) or ({DIED} > bool 0))"
"""A thread that has died stays dead until the next start."""
NOTHING = f"({in_flight('$window', 'max_over_time')} == bool 0) * ({moved('$window')} == bool 0)"
COMPLETIONS = 'handler=~"/v1/(chat/)?completions",status!="4xx"'
# more than once: the requests of one batch may be counted a moment after the engine has finished them
AGAIN = f"(max by ($by) (changes(http_requests_total{{{COMPLETIONS}}}[$window])) > bool 1)"
ARRIVED = f"(({counted('http_requests_total', COMPLETIONS)} > bool 2.5) * {AGAIN})"
PROBED = "(max by ($by) (last_over_time(diag_probe_success[$window])) == bool 0)"
UNREACHED = f"{any_of(http=ARRIVED, probe=PROBED)} * {NOTHING}"
requests_unreached = Signal(
    "requests that do not reach the scheduler",
    any_of(thread=THREAD_DIED, unreached=f"({UNREACHED})"),
    "requests arrive over HTTP and none reaches the scheduler: {value}",
    "bool",
)
USED = "sum by ($by) (last_over_time(vllm:mm_cache_queries_total[$window]))"
ENGINE_CORES = 'max by ($by) (rate(diag_vllm_process_cpu_seconds_total{role="engine"}[$window]))'
INPUT_SPINS = f"(({ENGINE_CORES} > bool {FULL_CORE}) * ({USED} > bool 0))"
SAID_OF_LATE = f"(({SAID} > bool 0) * (time() - {SAID} < bool {RECENTLY}))"
multimodal_cache_lost = Signal(
    "multimodal items lost between the caches",
    any_of(
        log=f"(({MISSED} > bool 0) * (time() - {MISSED} < bool {RECENTLY}))",
        thread=f"({THREAD_DIED} * ({MISSED} > bool 0))",
        unreached=f"({any_of(spin=INPUT_SPINS, hearsay=SAID_OF_LATE)} * {UNREACHED})",
    )
    + f" or 0 * ({USED} == 0)",
    "the log names an item that the engine's multimodal cache lacks, or its input thread spins: {value}",
    "bool",
)
failed_before_the_scheduler = Signal(
    "requests that failed before the scheduler",
    counted("diag_vllm_log_events_total", f'event="{REQUEST_PREPROCESSING_FAILED}"'),
    "requests that the engine failed before its scheduler saw them: {value}",
    "requests",
    window_scaling="peak",
)
