"""What the log of a server says: events, errors, settings, and the numbers of an out-of-memory error.

The metrics are described in docs/metrics.md. Where a whole family is missing, its signals are missing too.
"""

from diag.core.incident import Condition, Signal, judged
from diag.core.log_events import (
    CUDA_OUT_OF_MEMORY,
    FREE_MEMORY_BELOW_REQUESTED,
    MAX_MODEL_LEN_EXCEEDS_KV_CACHE,
    OUT_OF_MEMORY,
)
from diag.knowledge.signals.expressions import configured

EVENT_TIME = "diag_vllm_log_event_last_timestamp_seconds"
HEARSAY_TIME = "diag_vllm_log_hearsay_timestamp_seconds"


def last(metric: str, matchers: str = "", join: str = "max", by: str = "$by") -> str:
    """The last sample of a gauge in the window, per subject."""
    return f"{join} by ({by}) (last_over_time({metric}{{{matchers}}}[$window]))"


LAST_PROGRESS = last("diag_vllm_startup_last_progress_timestamp_seconds")
LAST_PROGRESS_OF_INSTANCE = last("diag_vllm_startup_last_progress_timestamp_seconds", by="instance")
SERVES = last("diag_vllm_up")
LAST_SERVED = "max by (instance) (last_over_time(diag_vllm_up[$window]))"


def event_time(events: str) -> str:
    """The time of the last such log line; 0 if there was none."""
    return last(EVENT_TIME, f'event=~"{events}"')


def since_start(events: str) -> str:
    """1 where such a line was logged, and nothing has started since; else 0."""
    return f"({event_time(events)} > bool 0) * ({event_time(events)} >= bool {LAST_PROGRESS})"


LOG_ERROR = "diag_vllm_log_error_timestamp_seconds"
quoted_error = Signal(
    "error quoted from the log",
    f"count by ($by) (last_over_time({LOG_ERROR}[$window]))",
    "lines of the log that say why the server failed: {value}",
    "lines",
    culprit_promql=f"last_over_time({LOG_ERROR}[$window])",
    culprit_label="{text}",
)
not_quoted = Signal(
    "no error quoted from the log",
    f"1 - clamp_max(count by ($by) (last_over_time({LOG_ERROR}[$window])), 1)"
    f" or 0 * max by ($by) (last_over_time({EVENT_TIME}[$window])) + 1",
    "no line of the log says why the server failed: {value}",
    "bool",
)


def not_set(flag: str) -> Condition:
    """The switch is off or the setting is not given; where no source knows, the default (off) is assumed."""
    off = f"(1 - ({configured(flag)})) or 0 * {LAST_SERVED} + 1"
    name = f"--{flag.replace('_', '-')} not set"
    return Signal(name, off, "the flag is not set: {value}", "bool").at_least(
        1, judged("a flag that is set already is not proposed")
    )


def given(flag: str) -> Condition:
    """The setting is given; where no source knows, the default (not given) is assumed."""
    on = f"({configured(flag)} > bool 0) or 0 * {LAST_SERVED}"
    name = f"--{flag.replace('_', '-')} set"
    return Signal(name, on, "the flag is set: {value}", "bool").at_least(1, judged("what is not set cannot be removed"))


# -- out of memory ----------------------------------------------------------------------------------------------------

OOM = "|".join(OUT_OF_MEMORY)
RECENT = "5m"


def event_recently(events: str) -> str:
    """1 where such a line was logged recently, or ended a start after which no other began; else 0."""
    at = event_time(events)
    return (
        f"({at} > bool 0) * clamp_max((time() - {at} < bool 300) + ({at} >= bool {LAST_PROGRESS}) * (1 - {SERVES}), 1)"
    )


def log_value(event: str, field: str) -> str:
    """A number from the last such log line, per instance."""
    return last("diag_vllm_log_value", f'event="{event}",field="{field}"')


out_of_memory = Signal(
    "out-of-memory error in the log",
    event_recently(OOM),
    "the log reports an out-of-memory error: {value}",
    "bool",
    culprit_promql=f'last_over_time({EVENT_TIME}{{event=~"{OOM}"}}[$window]) > 0',
    culprit_label="{event}",
)


def logged(event: str) -> Signal:
    """Whether this event was logged, for a fix that depends on it."""
    return Signal(f"{event} in the log", event_recently(event), f"the log reports {event}: {{value}}", "bool")


utilization_that_fits = Signal(
    "GPU memory free at start",
    f"{log_value(FREE_MEMORY_BELOW_REQUESTED, 'free_gibibytes')}"
    f" / ({log_value(FREE_MEMORY_BELOW_REQUESTED, 'total_gibibytes')} > 0)",
    "{value} of the GPU's memory was free at start",
    "share",
)
context_that_fits = Signal(
    "longest context that fits the KV cache",
    f"{log_value(MAX_MODEL_LEN_EXCEEDS_KV_CACHE, 'estimated_max_model_len')}"
    f" or floor({log_value(MAX_MODEL_LEN_EXCEEDS_KV_CACHE, 'max_model_len')}"
    f" * {log_value(MAX_MODEL_LEN_EXCEEDS_KV_CACHE, 'available_gibibytes')}"
    f" / ({log_value(MAX_MODEL_LEN_EXCEEDS_KV_CACHE, 'needed_gibibytes')} > 0) / 16) * 16",
    "a context of {value} tokens fits the KV cache",
    "tokens",
)
utilization_with_room = Signal(
    "GPU memory share with room for the failed allocation",
    f"({configured('gpu_memory_utilization')}) - clamp_min({log_value(CUDA_OUT_OF_MEMORY, 'wanted_gibibytes')}"
    f" - {log_value(CUDA_OUT_OF_MEMORY, 'free_gibibytes')}, 0)"
    f" / ({log_value(CUDA_OUT_OF_MEMORY, 'total_gibibytes')} > 0) - 0.005",
    "a --gpu-memory-utilization of {value} leaves room for the failed allocation",
    "share",
)

half_of_default_capture_size = Signal(
    "half of the largest CUDA graph captured by default",
    # vLLM captures up to the smaller of 2 x --max-num-seqs and 512
    f"clamp_max({configured('max_num_seqs')}, 256)",
    "half of the largest CUDA graph captured by default is {value} tokens",
    "tokens",
)
