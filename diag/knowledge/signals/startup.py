"""Signals of a start: its phases, their durations, and whether it is in progress, has failed or fails repeatedly."""

from diag.core.incident import Signal
from diag.core.log_events import CUDA_GRAPH_CAPTURE, ENGINE_START_FAILED, NO_START_FAILURE, STARTING, STARTUP_PHASES
from diag.knowledge.signals.expressions import any_of, parts
from diag.knowledge.signals.forward_progress import OOM_KILL_SECONDS
from diag.knowledge.signals.log import EVENT_TIME, LOG_CRASH

PHASE = "diag_vllm_startup_phase"
SPENT = "diag_vllm_startup_phase_seconds"
IS_STARTING = f'phase=~"{"|".join(STARTING)}"'
LOADING = 'phase="load_weights"'
LONGEST_SILENCE = 3600
"""Seconds without a log line after which a start is over; kernels were compiled for 2,219 s (vllm#34399)."""
NO_LINE_YET = 600
"""Seconds for which a server process without any output is starting: VLLM_ENGINE_READY_TIMEOUT_S."""

TOLD_FOR = 900
"""Seconds for which a crash stays told, whatever starts after it."""

USUAL_SECONDS = {phase.name: phase.usual_seconds for phase in STARTUP_PHASES if phase.usual_seconds}
PARTS = parts(
    f"""
    # A server that has started anew in the window, or is gone: the window holds samples of a process that has ended.
    samples_of_a_former_process: series =
        (sum by ($by) (changes(process_start_time_seconds[$window]))
          or sum by ($by) (resets(vllm:generation_tokens_total[$window]))) > 0
        or count by ($by) ($running_last_by_series) unless count by ($by) ($running_last_by_series[1m])
    in_starting_phase: bool = max by ($by) (last_over_time({PHASE}{{{IS_STARTING}}}[$window]))
    # no new start has been seen since that log line, and /metrics does not answer
    start_failed: bool =
        ($time_of_{ENGINE_START_FAILED} > bool 0)
        * (($time_of_{ENGINE_START_FAILED} - $last_startup_progress) >= bool 0) * (1 - $vllm_up)
    # a zombie has ended: it keeps its CPU time until its parent reads its exit status
    zombies: processes = last_over_time(diag_vllm_process_state{{state="zombie"}}[$window]) == 1
    # an engine that outlived its API server starts nothing
    ended_or_orphaned: processes = $zombies or on (instance, pid) $orphaned == 1
    scraped: bool = 0 * $up_last
    process_start_time: unix time = max by ($by) (last_over_time(diag_vllm_process_start_time_seconds[$window]))
    # No process is left only if the collector has seen some: it keeps counting the roles that it saw, and may never see
    # the processes of another container.
    no_process_left: processes = sum by ($by) (last_over_time(diag_vllm_processes[$window])) <= 0
    processes_seen_today: series = count by ($by) (count_over_time(diag_vllm_process_start_time_seconds[1d]))
    processes_alive: bool = ($vllm_processes > bool 0) or $no_process_left or 0 * $processes_seen_today or $scraped + 1
    starts_by_log: bool =
        $engine_starting * $processes_alive * (time() - $last_startup_progress < bool {LONGEST_SILENCE})
    # neither the log nor the page has shown this process yet
    start_time_on_page: unix time = max by ($by) (last_over_time(process_start_time_seconds[1d]))
    starts_by_process: bool =
        (time() - $process_start_time < bool {NO_LINE_YET})
        * (($process_start_time > bool $last_startup_progress) or $scraped + 1)
        * (($process_start_time - 1 > bool $start_time_on_page) or $scraped + 1)
    # A crash stays told for 15 minutes, whatever starts after it. Without a log, a kill by the kernel shortly before
    # the start of the process that answers now is one.
    time_of_logged_crash: unix time = max by ($by) (last_over_time({LOG_CRASH}[$window])) or 0 * $time_of_engine_death
    latest_start_time: unix time = $process_start_time or $start_time_on_page
    time_of_kill_before_start: unix time =
        $time_of_oom_kill * ($time_of_oom_kill < bool $latest_start_time)
        * ($latest_start_time - $time_of_oom_kill < bool {OOM_KILL_SECONDS})
    newer_process: bool = ($latest_start_time > bool $time_of_crash) or $scraped
    ready_again: unix time = $last_startup_progress * ($in_phase_ready == 1) and $vllm_up == 1
    answers_again: unix time = $latest_start_time > $time_of_crash and $vllm_up == 1
    phase_seconds: seconds = sum by ($by) (last_over_time({SPENT}[$window]))
    # until the new process shows itself, the latest start time is that of the process that crashed
    start_since_crash: unix time =
        $latest_start_time > $time_of_crash or time() - $phase_seconds > $time_of_crash
        or $last_startup_progress > $time_of_crash
    loads_weights: bool = max by ($by) (last_over_time({PHASE}{{{LOADING}}}[$window]))
    """,
    # that the kernel killed nothing proves no health; a process that has answered for longer does
    "time_of_crash: unix time = "
    + any_of(
        log="$time_of_logged_crash",
        kernel="($time_of_kill_before_start > 0)",
        old=f"(0 * ($latest_start_time < time() - {TOLD_FOR}))",
    ),
    *(
        f'{phase}_per_usual: ratio = last_over_time({SPENT}{{phase="{phase}"}}[$window]) / {usual}'
        for phase, usual in USUAL_SECONDS.items()
    ),
)

startup_failed = Signal(
    "engine start failed",
    "$start_failed",
    "the log reports a failed engine start, and nothing has started since: {value}",
    "bool",
    culprit_promql=f'(last_over_time({EVENT_TIME}{{event!~"{"|".join(NO_START_FAILURE)}"}}[$window]) > 0)'
    " >= on (instance) group_left () ($last_startup_progress by (instance))",
    culprit_label="{event}",
)
starting = Signal(
    "engine starting",
    "$in_starting_phase * (1 - $vllm_up) * (1 - $start_failed)",
    "the log shows a start in progress and /metrics does not answer yet: {value}",
    "bool",
    culprit_promql=f"last_over_time({SPENT}[$window]) and on (instance, phase)"
    f" (last_over_time({PHASE}{{{IS_STARTING}}}[$window]) == 1)",
    culprit_label="{phase} for {value}",
    culprit_unit="seconds",
)
processes = Signal(
    "vLLM processes",
    "count by ($by) (last_over_time(diag_vllm_process_cpu_seconds_total[$window])"
    " unless on (instance, pid) $ended_or_orphaned)",
    "running processes of this vLLM: {value}",
    "processes",
)
start_under_way = Signal(
    "start under way",
    "clamp_max(($starts_by_log or $scraped) + ($starts_by_process or $scraped), 1)",
    "the log or the process table shows a start under way: {value}",
    "bool",
)
crashed_lately = Signal(
    "crash within 15 minutes",
    f"($time_of_crash > bool 0) * (time() - $time_of_crash < bool {TOLD_FOR})",
    "the server crashed within the last 15 minutes: {value}",
    "bool",
    culprit_promql=f"time() - last_over_time({LOG_CRASH}[$window]) < {TOLD_FOR}"
    ' or label_replace($time_of_kill_before_start > 0, "event", "kernel_oom_kill", "", "")',
    culprit_label="{event}",
)
started_since_crash = Signal(
    "start since the crash",
    "(($last_startup_progress > bool $time_of_crash) or $scraped) + $newer_process > bool 0",
    "the server was started again after the crash: {value}",
    "bool",
    context=True,
    culprit_promql='label_replace($ready_again, "state", "recovered at", "", "")'
    ' or on (instance) label_replace($answers_again, "state", "restarted at", "", "")'
    ' or on (instance) label_replace($start_since_crash, "state", "restarting since", "", "")',
    culprit_label="{state} {value}",
    culprit_unit="unix time",
)
crashes_or_down = Signal(
    "second crash, or not back yet",
    any_of(again="($crashes_in_a_row >= bool 2)", down="$does_not_answer"),
    "the server crashed at least twice, or does not answer yet: {value}",
    "bool",
)
crash_time = Signal(
    "time of the last crash",
    "$time_of_crash",
    "the last crash was at {value}",
    "unix time",
    culprit_promql=f'last_over_time({LOG_CRASH}{{text!=""}}[$window])',
    culprit_label="{text}",
)
last_start_failed = Signal(
    "last start failed",
    "$start_failed or $scraped",
    "the last start failed before the server was ready: {value}",
    "bool",
)
crashes_in_a_row = Signal(
    "crashes in a row",
    "(max by ($by) (last_over_time(diag_vllm_log_consecutive_crashes[$window]))"
    " or max by ($by) (changes(diag_vllm_process_start_time_seconds[15m]))"
    " or max by ($by) (changes(process_start_time_seconds[15m])))"
    " and on (instance) ($vllm_seen_today or $engines_seen_today)",
    "crashes in a row: {value}",
    "crashes",
)
sign_of_crash = Signal(
    "crash at a scrape",
    any_of(crashed="($crashes_in_a_row > bool 0)", down="$does_not_answer"),
    "the server does not answer, or has crashed and not served for long since: {value}",
    "bool",
)
startup_overdue = Signal(
    "start-up phase / its usual duration",
    f"max by ($by) ({' or '.join(f'${phase}_per_usual' for phase in USUAL_SECONDS)})",
    "the slowest start-up phase has taken {value} times its usual duration",
    "ratio",
    culprit_promql=f"last_over_time({SPENT}[$window]) > 1",
    culprit_label="{phase} {value}",
    culprit_unit="seconds",
)
time_without_startup_progress = Signal(
    "time without start-up progress",
    "(time() - $last_startup_progress) * $in_starting_phase",
    "the start has made no progress for {value}",
    "seconds",
)
in_graph_capture = Signal(
    "in CUDA-graph capture",
    f'max by ($by) (last_over_time({PHASE}{{phase="{CUDA_GRAPH_CAPTURE}"}}[$window]))',
    "the start is in CUDA-graph capture: {value}",
    "bool",
)
processes_still_running = Signal(
    "vLLM processes still running",
    "$vllm_processes or $no_process_left or 0 * $processes_seen_today or 0 * $last_startup_progress + 1",
    "running processes of this vLLM (1 where none has been seen yet): {value}",
    "processes",
    context=True,
)
startup_seconds = Signal("start-up time so far", "$phase_seconds", "the start has taken {value} so far", "seconds")
twice_the_startup = Signal(
    "twice the start-up time so far", "2 * $phase_seconds", "twice the start-up time so far is {value}", "seconds"
)
weights_read_rate = Signal(
    "weights read from storage / s",
    "sum by ($by) (rate(diag_vllm_process_read_bytes_total[$window])) * ($loads_weights == 1)",
    "vLLM reads its weights at {value} per second",
    "bytes",
)
weights_time_left = Signal(
    "time until the weights are loaded",
    "(1 / (max by ($by) (last_over_time(diag_vllm_startup_progress_ratio[$window])) > 0) - 1)"
    f" * max by ($by) (last_over_time({SPENT}{{{LOADING}}}[$window])) * ($loads_weights == 1)",
    "at this rate the rest of the weights takes {value}",
    "seconds",
)
probe_failures_allowed = Signal(
    "startupProbe failureThreshold (10 s period)",
    "ceil(1.5 * $phase_seconds / 10)",
    "{value} probes, 10 s apart, cover 1.5 times the start-up time so far",
    "probes",
)
