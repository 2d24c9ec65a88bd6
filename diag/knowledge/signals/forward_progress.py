"""Signals of forward progress: the engine processes tokens, and the server responds."""

from diag.core import log_events as events
from diag.knowledge.signals.expressions import any_of, parts, signal
from diag.knowledge.signals.log import CLAIM_TIME, EVENT_TIME, HEARSAY_TIME, event_time

WARM_STEPS = 100
"""Steps after which an engine has seen the common batch shapes; each earlier step may compile a kernel."""
STOPPING_SECONDS = 60
"""Seconds between the log line of a requested stop and the last page of the server."""
OOM_KILL_SECONDS = 120
"""Seconds between the end of a server and the kill of a process by the kernel; one of them is seen at a scrape."""
SLEEP_STATE = "vllm:engine_sleep_state"
HEALTH = "diag_vllm_health_status"
WORKER_EXIT = f'diag_vllm_log_value{{event="{events.WORKER_DIED}",field="exit_code"}}'
DEATHS_OF_ENGINES = (events.ENGINE_DEAD, events.WORKER_DIED)
DEATHS = (*DEATHS_OF_ENGINES, events.KILLED_BY_SIGNAL)


def _called(path: str) -> str:
    """Return the number of successful calls of a path of the API server since its start."""
    return f'sum by (instance) (last_over_time(http_requests_total{{handler="{path}",status="2xx"}}[$window]))'


PARTS = parts(
    vars(),
    f"""
    # Time of the server's end: its last response, or the time in its log if no scrape has seen a response.
    time_of_death_line: unix time = {event_time(*DEATHS)}
    claimed_death: lines =
        count by ($by) (last_over_time({CLAIM_TIME}{{state="open",event=~"{"|".join(DEATHS_OF_ENGINES)}"}}[$window]))
    """,
    event_time=event_time,
)

progress = signal(
    "tokens and requests processed: tokens ="
    " $tokens_and_requests_counted + ($kv_cache_usage_changes or 0 * $tokens_and_requests_counted)",
    "tokens and requests processed (changes of KV cache usage included): {value}",
    context=True,
    window_scaling="peak",
)
steps_per_second = signal(
    "engine steps / s: 1/s = sum by ($by) (rate(vllm:iteration_tokens_total_count[$window]))",
    "engine steps per second: {value}",
)
requests_stuck = signal(
    "requests in flight without progress: requests ="
    " 0 * ($tokens_and_requests_processed[30s] > 0) or ($probe_failed_and_nothing_moves > 0) or $stuck_for_two_minutes"
    " or ($two_requests_stand_still == 0) or (0 * ($long_prefill_steps > 0))"
    " or ($two_requests_stand_still * $seen_for_25_s unless ($first_steps unless on (instance) $gpus_busy_waiting)"
    " unless on (instance) $may_compile)",
    "requests in flight without any progress: {value}",
    needs=f"two minutes in the first {WARM_STEPS} steps of an engine whose GPUs do not busy-wait, or where it compiles"
    " kernels (as for a first LoRA adapter)",
)
requests_without_progress = signal(
    "requests in flight while nothing moves: requests = $stuck_requests",
    "requests in flight in a window without any progress: {value}",
    throughout=True,
)
standstill_was_prefill = signal(
    "steps with long prefills: bool = (0 * $stuck_for_two_minutes) or $long_prefill_steps",
    "steps of over 10 s with long prefills, which the engine has come out of: {value}",
    hindsight=True,
)
asleep = signal(
    # a release before 0.11.1 does not export it, and no release exports that a request put it to sleep
    "engine asleep: bool ="
    f' 1 - min by ($by) (last_over_time({SLEEP_STATE}{{sleep_state="awake"}}[$window])) or $engine_seen',
    "the engine is asleep: {value}",
)
sleep_level = signal(
    f'sleep level: level = max by ($by) (last_over_time({SLEEP_STATE}{{sleep_state="weights_offloaded"}}[$window]))'
    f' + 2 * max by ($by) (last_over_time({SLEEP_STATE}{{sleep_state="discard_all"}}[$window]))',
    "the engine sleeps at level {value}",
)
scheduler_paused = signal(
    "scheduler paused: bool = $engine_seen + on (instance) group_left ()"
    " (($paused_by_log and $pause_logged) or $paused_by_page or $paused_by_log)"
    # without a log and without the metrics of vLLM's own HTTP server, no pause is seen
    " or $engine_seen",
    "the scheduler was paused (POST /pause) and has not been resumed: {value}",
)
endpoint_without_vllm = signal(
    # an exporter answers whether or not vLLM does
    "metrics endpoint without vLLM's metrics: bool = max by (instance) (max_over_time(up[$window]))"
    ' unless on (instance) last_over_time(diag_scrape_success{collector="vllm"}[$window])',
    "an endpoint answered without vLLM's metrics: {value}",
)
serves = signal(
    "vLLM's metrics available: bool ="
    " max by (instance) (max_over_time(diag_vllm_up[$window])) or max by (instance) (max_over_time(up[$window]))",
    "vLLM's metrics were available: {value}",
)

# -- death ------------------------------------------------------------------------------------------------------------

successful_scrapes = signal(
    "successful scrapes: share ="
    " max by (instance) ((avg_over_time(diag_vllm_up[$window]) and count_over_time(diag_vllm_up[$window]) >= 3)"
    " or (avg_over_time(up[$window]) and count_over_time(up[$window]) >= 3))"
    " and on (instance) $answered_before",
    "{value} of scrapes succeeded (the server had answered before)",
)
engine_death_logged = signal(
    "death of the engine in the log: bool = $engine_death_since_start * (1 - $engine_start_failed_since_start)",
    "the log reports the death of the engine, and nothing has started since: {value}",
)
engine_processes = signal(
    'engine processes: processes = max by ($by) (last_over_time(diag_vllm_processes{role="engine"}[$window]))',
    "running engine processes of this server: {value}",
)
engine_process_missing = signal(
    "no engine process: bool = ($engine_processes == bool 0) and on (instance) $sees_processes",
    "no engine process of this server runs: {value}",
)
# The API server fails all requests once one data-parallel engine has ended. A process is
# missing only if as many as engines were seen most of the time: some may run on other hosts, and a fork may have an
# engine's name for a moment.
engines_lost = signal(
    "engine process lost: bool ="
    " ($engine_processes < bool $engines_running) * ($usual_engine_processes >= bool $engines_running)"
    " and on (instance) $sees_processes",
    "a data-parallel engine's process has ended: {value}",
)
orphaned_engines = signal(
    "engine processes without an API server: processes = sum by ($by) ($orphaned) or $scraped",
    "engine processes whose API server has ended: {value}",
    culprit_promql="$orphaned == 1",
    culprit_label="PID {pid} on {host}",
)
# An exporter that sees no API server may serve one on another host: as long as the page answers, an orphan on this host
# is that of another server.
server_left_orphans = signal(
    "API server ended before its engine: bool ="
    " ($engine_processes_without_an_api_server >= bool 1) * ($api_servers_running == bool 0) * $does_not_answer",
    "no API server runs, and an engine process that it started does: {value}",
)
gpu_memory_of_orphans = signal(
    "GPU memory held by orphaned processes: bytes ="
    ' sum by ($by) (last_over_time(diag_gpu_process_memory_bytes{role=~"engine|worker"}[$window]))'
    " * $api_server_ended_before_its_engine",
    "processes without an API server hold {value} of GPU memory",
)
shut_down = signal(
    f"shut down in order: bool = ${events.SHUT_DOWN}_since_start * (1 - $vllm_up)",
    "the log reports an orderly shutdown, and nothing has started since: {value}",
)
engine_dead_by_health = signal(
    "engine dead by its health check: bool = max by ($by) ($health_fails_in_a_row) * ($health_last == bool 503)",
    "GET /health is answered with HTTP 503, at least three times in a row: {value}",
)
evidence_of_death = signal(
    # the death that the log claims of an idle server, whose page speaks for its API server alone, is unknown
    "server or engine dead: bool = ($signs_of_death > 0) or ($signs_of_death unless on (instance) $claimed_death)",
    "/metrics does not answer any more, /health or the log reports the death of the engine, or its process has ended:"
    " {value}",
    culprit_promql=f'(last_over_time({EVENT_TIME}{{event=~"{"|".join(events.FATAL)}"}}[$window]) > 0)'
    " >= on (instance) group_left () ($last_startup_progress by (instance))"
    f" or label_replace($worker_exit_code < 0 and on (instance) (${events.WORKER_DIED}_since_start) > 0,"
    ' "event", "killed_by_signal", "", "")'
    f" or label_replace(abs($time_of_oom_kill by (instance) - $server_end_time) < {OOM_KILL_SECONDS},"
    ' "event", "kernel_oom_kill", "", "")'
    ' or label_replace($api_server_stopped by (instance) > 0, "event", "api_server_stopped", "", "")'
    # output of a library or the shell lacks vLLM's log prefix: a client may have sent it, so it only explains a death
    f' or label_replace((last_over_time({HEARSAY_TIME}{{event=~"{"|".join(events.FATAL)}"}}[$window])'
    f" > on (instance) group_left () ($last_up_time by (instance) - {OOM_KILL_SECONDS})),"
    ' "event", "$$1 (without proof that vLLM logged it)", "event", "(.*)")',
    culprit_label="{event}",
    formerly=("evidence of death",),
)
sign_of_death = signal(
    "death at a scrape: bool = "
    + any_of(
        page="$does_not_answer",
        health="($health_last == bool 503)",
        process="$no_engine_process",
        part="$engine_process_lost",
        log="$death_of_the_engine_in_the_log",
    ),
    "/metrics does not answer, /health or the log reports a dead engine, or its process is missing: {value}",
)
tokens_or_shutdown = signal(
    "generating tokens, or stopped on purpose: bool = "
    + any_of(tokens="$generates_beyond_doubt", shutdown="$shut_down_in_order", stops="$stops")
    + " or 0 * max by ($by) (count_over_time(up[$window]))",
    "tokens are processed, or the server was shut down in order: {value}",
    formerly=("generating, or shut down in order", "tokens or an orderly shutdown"),
)
signs_of_life = signal(
    "engine alive, or stopped on purpose: bool = "
    + any_of(tokens="$generating_tokens_or_stopped_on_purpose", health="$health_passes"),
    "tokens are processed, GET /health is answered with HTTP 200, or the server was shut down in order: {value}",
    formerly=("engine alive, or shut down in order",),
)
death_claimed = signal(
    "engine death claimed by the log: bool = $claimed_death > bool 0",
    "the log claims the death of the engine, and nothing that is measured proves or refutes it: {value}",
)
