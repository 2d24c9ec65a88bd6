"""Signals of a server's log: events, errors, settings, and the numbers of an out-of-memory error.

The metrics are described in docs/metrics.md. If a whole family is missing, its signals are missing too.
"""

from diag.core import log_events as events
from diag.core.incident import Condition, Signal, judged
from diag.knowledge.signals.expressions import declared, setting_value

EVENT_TIME = "diag_vllm_log_event_last_timestamp_seconds"
CLAIM_TIME = "diag_vllm_log_claim_timestamp_seconds"
HEARSAY_TIME = "diag_vllm_log_hearsay_timestamp_seconds"
LOG_CRASH = "diag_vllm_log_crash_timestamp_seconds"
LOG_ERROR = "diag_vllm_log_error_timestamp_seconds"
RECENT = "5m"
LEAST_SHARE = 0.3
"""A smaller share of a GPU's memory holds no model worth a server: the GPU has to be freed instead."""
SINCE_START = (
    "engine_death",
    events.ENGINE_START_FAILED,
    events.FAULT_HELD,
    events.SCALING_STARTED,
    events.SCHEDULER_PAUSED,
    events.SHUT_DOWN,
    events.WEIGHTS_DISCARDED,
    events.WORKER_DIED,
)
"""Events that matter until the next start, each as the part `NAME_since_start`."""


def event_time(*names: str) -> str:
    """Return the time of the last log line that shows one of these events; 0 if there was none."""
    return f'max by ($by) (last_over_time({EVENT_TIME}{{event=~"{"|".join(names)}"}}[$window]))'


def log_value(event: str, field: str) -> str:
    """Return a number of the last log line that shows the event, one for each subject."""
    return f'max by ($by) (last_over_time(diag_vllm_log_value{{event="{event}",field="{field}"}}[$window]))'


def lately(part: str, seconds: int) -> str:
    """Return 1 if the time that a part has is at most so many seconds ago, else 0."""
    return f"(${part} > bool 0) * (time() - ${part} < bool {seconds})"


def since_start(name: str) -> str:
    """Return 1 if the event of the part time_of_NAME was logged and nothing has started since, else 0."""
    return f"($time_of_{name} >= bool clamp_min($last_startup_progress, 1))"


def recently(name: str) -> str:
    """Return 1 if the event of the part time_of_NAME was logged recently, or ended the last start."""
    return (
        f"($time_of_{name} > bool 0) * clamp_max((time() - $time_of_{name} < bool 300)"
        f" + ($time_of_{name} >= bool $last_startup_progress) * (1 - $vllm_up), 1)"
    )


PARTS, SIGNALS = declared(
    vars(),
    *(f"time_of_{event.name}: unix time = {event_time(event.name)}" for event in events.LOG_EVENTS),
    f"""
    time_of_out_of_memory: unix time = {event_time(*events.OUT_OF_MEMORY)}
    """,
    *(f"{name}_since_start: bool = {since_start(name)}" for name in SINCE_START),
)


def not_set(flag: str) -> Condition:
    """Return the condition that a switch is off or a setting not given; without a source, the default (off) holds."""
    off = f"(1 - ({setting_value(flag)})) or 0 * $vllm_up by (instance) + 1"
    name = f"--{flag.replace('_', '-')} not set"
    return Signal(name, off, "the flag is not set: {value}", "bool").at_least(
        1, judged("a flag that is set already is not proposed")
    )


def given(flag: str) -> Condition:
    """Return the condition that a setting is given; without a source, the default (not given) holds."""
    on = f"({setting_value(flag)} > bool 0) or 0 * $vllm_up by (instance)"
    name = f"--{flag.replace('_', '-')} set"
    return Signal(name, on, "the flag is set: {value}", "bool").at_least(
        1, judged("a flag that is not set cannot be removed")
    )


def logged(event: str) -> Signal:
    words = event.replace("_", " ")
    return Signal(
        f"{words} in the log",
        recently(event),
        f"the log reports {words}: {{value}}",
        "bool",
        formerly=(f"{event} in the log",) if "_" in event else (),
    )
