"""The events and the start-up phases that the exporter reads from a vLLM server's log (log_events.toml).

Events and phases to which Python refers have a name here. An event that no incident reads states why it is counted.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from diag.core.declarations import PACKAGE, read


class LogEvent(NamedTuple):
    """One event. `fields` are the numbers in its line, published as diag_vllm_log_value; of those in `summed` the
    sum over all lines is published too, as diag_vllm_log_value_total.

    out_of_memory: memory ran out on a GPU. on_device: the event happens in the engine and its workers, so a line of the
    API server, which logs what clients sent, is no proof of it. start_failure: a reason for a failed start, which the
    doctor names. fatal: a reason for the death of a serving engine. unread: why it is counted if no incident reads it.
    """

    name: str
    meaning: str
    fields: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    out_of_memory: bool = False
    on_device: bool = False
    start_failure: bool = False
    fatal: bool = False
    unread: str = ""


class StartupPhase(NamedTuple):
    """One phase of a start; `usual_seconds` is the longest time reported for it, 0 if it takes none."""

    name: str
    meaning: str
    usual_seconds: int


class LogTable(NamedTuple):
    """The file, log_events.toml: events by name, and phases by name in their order."""

    event: Mapping[str, LogEvent]
    phase: Mapping[str, StartupPhase]


_TABLE = read(PACKAGE / "core" / "log_events.toml", LogTable)
LOG_EVENTS, STARTUP_PHASES = tuple(_TABLE.event.values()), tuple(_TABLE.phase.values())

CUDA_OUT_OF_MEMORY = "cuda_out_of_memory"
NO_KV_CACHE_MEMORY = "no_kv_cache_memory"
MAX_MODEL_LEN_EXCEEDS_KV_CACHE = "max_model_len_exceeds_kv_cache"
FREE_MEMORY_BELOW_REQUESTED = "free_memory_below_requested"
SHM_BROADCAST_WAIT = "shm_broadcast_wait"
ENGINE_DEAD = "engine_dead"
ENGINE_START_FAILED = "engine_start_failed"
WORKER_DIED = "worker_died"
KILLED_BY_SIGNAL = "killed_by_signal"
SHUT_DOWN = "shut_down"
GRAMMAR_FAILED = "grammar_failed"
GRAMMAR_REJECTED = "grammar_rejected"
TOOL_PARSER_FAILED = "tool_parser_failed"
KV_TRANSFER_FAILED = "kv_transfer_failed"
KV_BLOCKS_EXPIRED = "kv_blocks_expired"
KV_LOAD_FAILED = "kv_load_failed"
MULTIMODAL_CACHE_MISS = "multimodal_cache_miss"
REQUEST_PREPROCESSING_FAILED = "request_preprocessing_failed"
OUTPUT_CORRUPTED = "output_corrupted"
KV_SCALES_MISSING = "kv_scales_missing"
FLOAT16_CAST = "float16_cast"
CUDA_ERROR = "cuda_error"
NCCL_TIMEOUT = "nccl_timeout"
COMPILED_WHILE_SERVING = "compiled_while_serving"
SCHEDULER_PAUSED = "scheduler_paused"
EXPERT_BALANCE = "eplb_balance"
ALL_TO_ALL_TIMEOUT = "all_to_all_timeout"
CUT_AT_SHUTDOWN = "requests_cut_at_shutdown"
DRAIN_STARTED = "drain_started"
DRAIN_ENDED = "drain_ended"
SCALING_STARTED = "elastic_scaling_started"
FAULT_HELD = "engine_fault_held"
FAULT_OVER = "engine_fault_over"
STACK_DUMPED = "stack_dumped"
WEIGHTS_DISCARDED = "weights_discarded"
OUT_OF_MEMORY = tuple(event.name for event in LOG_EVENTS if event.out_of_memory)
ON_DEVICE = frozenset(event.name for event in LOG_EVENTS if event.on_device)
FATAL = tuple(event.name for event in LOG_EVENTS if event.fatal or event.out_of_memory)
NO_START_FAILURE = tuple(event.name for event in LOG_EVENTS if not event.start_failure)
QUOTED = (ON_DEVICE - {COMPILED_WHILE_SERVING}) | {*FATAL, ENGINE_DEAD, ENGINE_START_FAILED}
"""Events whose log line is quoted: the server or a part of it has ended, or is about to."""

CUDA_GRAPH_CAPTURE = "cuda_graph_capture"
WARM_UP = "warm_up"
READY = "ready"
STARTING = tuple(phase.name for phase in STARTUP_PHASES if phase.name != READY)
"""The phases before a server answers."""

ANSWERS = "http_requests_total"
"""The metric that counts the answers of the access log."""


class EventLine(NamedTuple):
    """The last line of a log that shows an event, without secrets; `number` is 0 if unknown, `at` unix time, and
    `frames` are the innermost ones of its traceback, "" if unknown.

    Of the exceptions that ended requests, `event` is the metric that counts the answers.
    """

    event: str
    text: str
    file: str
    number: int
    process: str
    at: float
    frames: str = ""


LogState = Literal["failed", "dead", "shut down", "stopped", "starting", "serving", "lost", "script failed", "run over"]


class LogContext(NamedTuple):
    """Evidence of a log alone beside the line that ended its server.

    `nearby` are the lines around it, with those of the kernel and of libraries in the minutes before, and `numbers`
    the line number of each, 0 for unknown; `platform` is vLLM's name of the device ("cuda", "rocm", "xpu", ...),
    `phase` the phase of the start in which it failed, READY for a server at work; "" if unknown; `error` is the text
    of the line that ended it, whole, without secrets; `launch` is its command, "" unless all of its options are known.
    """

    nearby: str = ""
    platform: str = ""
    phase: str = ""
    numbers: tuple[int, ...] = ()
    error: str = ""
    launch: str = ""


class LogEnding(NamedTuple):
    """How a log ends, at a unix time: the state of its server then, which nothing but the log shows.

    "stopped": it was ended from outside; "lost": its last line tells no state; "script failed", "run over": the engine
    of a script without a server had started, and the script raised an exception, or the log ends without one. `phase`
    is that of a start under way, with the share that is done, if known. `errors` are the lines of errors since the
    server began, and `processes` those that logged an exception; `last` is the text of the last line that vLLM logged,
    without secrets; `lines` are the last lines of each event; `context` is what stands around the line that ended the
    server. `failed` of the last `answered` requests for inference ended with HTTP 5xx, `refused` with 4xx; `succeeded`
    is false if none of all did; `not_done` is the last route that changes the server and was last answered with HTTP
    5xx; `is_unhealthy`: the last answer of /health was 503; `raised` is the exception of an engine or a worker behind
    which no line shows work; `load` are the requests and tokens of the last stats lines, in words, "" without one.
    `is_still`: the server was at work, and its last stats line reports requests and no token. `waits` is the line of an
    engine at work whose ranks wait for each other, and behind which it has generated no token. `is_timed` is false if
    no line has a time: `at` is then that of the file. `goes_on`: another server in the same log is at work behind the
    failed start. `reason` is the line that explains the failure.
    """

    state: LogState
    at: float
    errors: int = 0
    processes: int = 0
    last: str = ""
    lines: tuple[EventLine, ...] = ()
    phase: str = ""
    done: float | None = None
    context: LogContext = LogContext()
    failed: int = 0
    answered: int = 0
    refused: int = 0
    succeeded: bool = True
    not_done: str = ""
    is_unhealthy: bool = False
    raised: str = ""
    load: str = ""
    is_still: bool = False
    waits: str = ""
    is_timed: bool = True
    goes_on: bool = False
    reason: EventLine | None = None
