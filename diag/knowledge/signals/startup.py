"""Signals of a start: its phases, how long they take, and whether it is under way, has failed or fails again."""

from diag.core.incident import Signal
from diag.core.log_events import ENGINE_START_FAILED, NO_START_FAILURE
from diag.core.startup_phases import CUDA_GRAPH_CAPTURE, STARTING, STARTUP_PHASES
from diag.knowledge.signals.expressions import RUNNING
from diag.knowledge.signals.host import (
    EVENT_TIME,
    LAST_PROGRESS,
    LAST_PROGRESS_OF_INSTANCE,
    SERVES,
    event_time,
    last,
)

PHASE = "diag_vllm_startup_phase"
SPENT = "diag_vllm_startup_phase_seconds"
IS_STARTING = f'phase=~"{"|".join(STARTING)}"'
IN_PHASE = last(PHASE, IS_STARTING)
FAILED_SINCE = f"({event_time(ENGINE_START_FAILED)} - ({LAST_PROGRESS}))"
startup_failed = Signal(
    "engine start failed",
    # no new start has been seen since that log line, and /metrics does not answer
    f"({event_time(ENGINE_START_FAILED)} > bool 0) * ({FAILED_SINCE} >= bool 0) * (1 - {SERVES})",
    "the log reports a failed engine start, and nothing has started since: {value}",
    "bool",
    culprit_promql=f'(last_over_time({EVENT_TIME}{{event!~"{"|".join(NO_START_FAILURE)}"}}[$window]) > 0)'
    f" >= on (instance) group_left () ({LAST_PROGRESS_OF_INSTANCE})",
    culprit_label="{event}",
)
starting = Signal(
    "engine starting",
    f"({IN_PHASE}) * (1 - {SERVES}) * (1 - ({startup_failed.promql}))",
    "the log shows a start in progress and /metrics does not answer yet: {value}",
    "bool",
    culprit_promql=f"last_over_time({SPENT}[$window]) and on (instance, phase)"
    f" (last_over_time({PHASE}{{{IS_STARTING}}}[$window]) == 1)",
    culprit_label="{phase} for {value}",
    culprit_unit="seconds",
)
# a zombie has ended: it keeps its CPU time until its parent asks for it
RUNNING_PROCESSES = (
    "count by ($by) (last_over_time(diag_vllm_process_cpu_seconds_total[$window]) unless on (instance, pid)"
    ' (last_over_time(diag_vllm_process_state{state="zombie"}[$window]) == 1))'
)
processes = Signal(
    "vLLM processes",
    RUNNING_PROCESSES,
    "running processes of this vLLM: {value}",
    "processes",
)


LONGEST_SILENCE = 3600
"""Seconds without a line after which nothing starts any more; kernels were compiled for 2,219 s (vllm#34399)."""
NO_LINE_YET = 600
"""Seconds for which a server process that has shown nothing yet is starting: VLLM_ENGINE_READY_TIMEOUT_S."""
SCRAPED = "0 * max by ($by) (last_over_time(up[$window]))"
PROCESS_START = last("diag_vllm_process_start_time_seconds")
# No process is left only where the collector has seen some: it goes on counting the roles that it saw, and may never
# see the processes of another container.
NO_PROCESS = "(sum by ($by) (last_over_time(diag_vllm_processes[$window])) <= 0)"
SEEN_TODAY = "count by ($by) (count_over_time(diag_vllm_process_start_time_seconds[1d]))"
ALIVE = f"(({processes.promql} > bool 0) or {NO_PROCESS} or 0 * {SEEN_TODAY} or {SCRAPED} + 1)"
STARTS_BY_LOG = f"({starting.promql}) * {ALIVE} * (time() - ({LAST_PROGRESS}) < bool {LONGEST_SILENCE})"
# neither the log nor the page has shown this process yet
STARTS_BY_PROCESS = (
    f"(time() - ({PROCESS_START}) < bool {NO_LINE_YET})"
    f" * (({PROCESS_START} > bool {LAST_PROGRESS}) or {SCRAPED} + 1)"
    f" * (({PROCESS_START} - 1 > bool max by ($by) (last_over_time(process_start_time_seconds[1d]))) or {SCRAPED} + 1)"
)
start_under_way = Signal(
    "start under way",
    f"clamp_max(({STARTS_BY_LOG} or {SCRAPED}) + ({STARTS_BY_PROCESS} or {SCRAPED}), 1)",
    "the log or the process table shows a start under way: {value}",
    "bool",
)
last_start_failed = Signal(
    "last start failed",
    f"({startup_failed.promql}) or {SCRAPED}",
    "the last start failed before the server was ready: {value}",
    "bool",
)
CHANGES = "max by ($by) (changes({}[15m]))"
crashes_in_a_row = Signal(
    "crashes in a row",
    f"({last('diag_vllm_log_consecutive_crashes')}"
    f" or {CHANGES.format('diag_vllm_process_start_time_seconds')} or {CHANGES.format('process_start_time_seconds')})"
    " and on (instance) (count by (instance) (count_over_time(diag_vllm_up[1d]))"
    f" or count by (instance) (count_over_time({RUNNING}[1d])))",
    "crashes in a row: {value}",
    "crashes",
)


startup_overdue = Signal(
    "start-up phase / its usual duration",
    "max by ($by) ("
    + " or ".join(
        f'last_over_time({SPENT}{{phase="{phase.name}"}}[$window]) / {phase.usual_seconds}'
        for phase in STARTUP_PHASES
        if phase.usual_seconds
    )
    + ")",
    "the slowest start-up phase has taken {value} times its usual duration",
    "ratio",
    culprit_promql=f"last_over_time({SPENT}[$window]) > 1",
    culprit_label="{phase} {value}",
    culprit_unit="seconds",
)
time_without_startup_progress = Signal(
    "time without start-up progress",
    f"(time() - ({LAST_PROGRESS})) * ({IN_PHASE})",
    "the start has made no progress for {value}",
    "seconds",
)
in_graph_capture = Signal(
    "in CUDA-graph capture",
    last(PHASE, f'phase="{CUDA_GRAPH_CAPTURE}"'),
    "the start is in CUDA-graph capture: {value}",
    "bool",
)
processes_still_running = Signal(
    "vLLM processes still running",
    f"{RUNNING_PROCESSES} or {NO_PROCESS} or 0 * {SEEN_TODAY} or 0 * {LAST_PROGRESS} + 1",
    "running processes of this vLLM (1 where none has been seen yet): {value}",
    "processes",
)
startup_seconds = Signal(
    "start-up time so far",
    f"sum by ($by) (last_over_time({SPENT}[$window]))",
    "the start has taken {value} so far",
    "seconds",
)
twice_the_startup = Signal(
    "twice the start-up time so far",
    f"2 * sum by ($by) (last_over_time({SPENT}[$window]))",
    "twice the start-up time so far is {value}",
    "seconds",
)
LOADING = 'phase="load_weights"'
LOADS = last(PHASE, LOADING)
weights_read_rate = Signal(
    "weights read from storage / s",
    f"sum by ($by) (rate(diag_vllm_process_read_bytes_total[$window])) * ({LOADS} == 1)",
    "vLLM reads its weights at {value} per second",
    "bytes",
)
weights_time_left = Signal(
    "time until the weights are loaded",
    f"(1 / ({last('diag_vllm_startup_progress_ratio')} > 0) - 1) * ({last(SPENT, LOADING)}) * ({LOADS} == 1)",
    "at this rate the rest of the weights takes {value}",
    "seconds",
)
probe_failures_allowed = Signal(
    "startupProbe failureThreshold (10 s period)",
    f"ceil(1.5 * sum by ($by) (last_over_time({SPENT}[$window])) / 10)",
    "{value} probes, 10 s apart, cover 1.5 times the start-up time so far",
    "probes",
)
