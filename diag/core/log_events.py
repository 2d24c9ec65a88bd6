"""The events and the start-up phases that the exporter reads from a vLLM server's log, each declared once.

An event is a value of the label `event` of diag_vllm_log_events_total, a phase one of the label `phase` of
diag_vllm_startup_phase. diag/log/patterns.toml declares the lines that show them, diag/knowledge/ the
incidents that read them. An event that no incident reads states why it is counted.
"""

from typing import Literal, NamedTuple


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
DRIVER_TOO_OLD = "driver_too_old"
DRIVER_MISMATCH = "driver_mismatch"
FABRIC_NOT_READY = "fabric_not_ready"
KV_TRANSFER_FAILED = "kv_transfer_failed"
KV_BLOCKS_EXPIRED = "kv_blocks_expired"
KV_LOAD_FAILED = "kv_load_failed"
MULTIMODAL_CACHE_MISS = "multimodal_cache_miss"
REQUEST_PREPROCESSING_FAILED = "request_preprocessing_failed"
INPUT_THREAD_DIED = "input_thread_died"
OUTPUT_CORRUPTED = "output_corrupted"
KV_SCALES_MISSING = "kv_scales_missing"
FLOAT16_CAST = "float16_cast"
CUDA_ERROR = "cuda_error"
NCCL_TIMEOUT = "nccl_timeout"
COMPILED_WHILE_SERVING = "compiled_while_serving"
SCHEDULER_PAUSED = "scheduler_paused"
SCHEDULER_RESUMED = "scheduler_resumed"
EXPERT_BALANCE = "eplb_balance"
ALL_TO_ALL_TIMEOUT = "all_to_all_timeout"
CUT_AT_SHUTDOWN = "requests_cut_at_shutdown"
DRAIN_STARTED = "drain_started"
DRAIN_ENDED = "drain_ended"
SCALING_STARTED = "elastic_scaling_started"
SCALING_ENDED = "elastic_scaling_ended"
WEIGHTS_DISCARDED = "weights_discarded"
WEIGHTS_RELOADED = "weights_reloaded"

LOG_EVENTS = (
    LogEvent(
        CUDA_OUT_OF_MEMORY,
        "An allocation on a GPU failed.",
        ("wanted_gibibytes", "total_gibibytes", "free_gibibytes"),
        out_of_memory=True,
        on_device=True,
        start_failure=True,
    ),
    LogEvent(
        NO_KV_CACHE_MEMORY,
        "No GPU memory is left for the KV cache.",
        out_of_memory=True,
        on_device=True,
        start_failure=True,
    ),
    LogEvent(
        MAX_MODEL_LEN_EXCEEDS_KV_CACHE,
        "The KV cache cannot hold one request of the longest context.",
        ("max_model_len", "needed_gibibytes", "available_gibibytes", "estimated_max_model_len"),
        out_of_memory=True,
        on_device=True,
        start_failure=True,
    ),
    LogEvent(
        FREE_MEMORY_BELOW_REQUESTED,
        "Less GPU memory is free at start than --gpu-memory-utilization asks for.",
        ("free_gibibytes", "total_gibibytes", "utilization", "requested_gibibytes"),
        out_of_memory=True,
        on_device=True,
        start_failure=True,
    ),
    LogEvent(SHM_BROADCAST_WAIT, "A rank has waited for another one for a minute.", ("seconds",)),
    LogEvent(
        "rpc_timeout",
        "A call from the API server to the engine timed out.",
        unread="It names the call that a stalled engine did not answer; engine_stalled reads the stall in counters.",
    ),
    LogEvent(ENGINE_DEAD, "The engine ended while the API server still runs."),
    LogEvent(ENGINE_START_FAILED, "A start ended with an error."),
    LogEvent(WORKER_DIED, "A worker process ended by itself.", ("exit_code",), fatal=True),
    LogEvent(
        KILLED_BY_SIGNAL,
        "A process of the server was ended by a signal: it crashed, or a user or the kernel killed it.",
        start_failure=True,
        fatal=True,
    ),
    LogEvent(SHUT_DOWN, "The server received a request to stop, and stopped in order."),
    LogEvent(
        CUT_AT_SHUTDOWN,
        "A request failed because the server was told to stop: in flight, or sent while it waited for those in flight.",
        ("requests", "refused"),
    ),
    LogEvent(
        DRAIN_STARTED, "An engine that was told to stop waits for its requests in flight.", ("requests", "seconds")
    ),
    LogEvent(DRAIN_ENDED, "An engine that was told to stop has no request left."),
    LogEvent(
        NCCL_TIMEOUT, "A collective operation of the ranks timed out.", on_device=True, start_failure=True, fatal=True
    ),
    LogEvent(
        ALL_TO_ALL_TIMEOUT,
        "An all-to-all of the expert-parallel ranks (DeepEP, NVSHMEM) timed out or could not be set up.",
        on_device=True,
        start_failure=True,
        fatal=True,
    ),
    LogEvent(CUDA_ERROR, "CUDA, cuBLAS, cuDNN or NCCL failed.", on_device=True, start_failure=True, fatal=True),
    LogEvent(
        DRIVER_TOO_OLD,
        "The NVIDIA driver is older than the CUDA that vLLM was built with.",
        on_device=True,
        start_failure=True,
    ),
    LogEvent(
        DRIVER_MISMATCH,
        "The CUDA libraries do not fit the NVIDIA driver that is loaded (errors 803 and 804).",
        on_device=True,
        start_failure=True,
    ),
    LogEvent(
        FABRIC_NOT_READY,
        "The NVSwitch fabric is not initialized (error 802): its manager does not run.",
        on_device=True,
        start_failure=True,
    ),
    LogEvent(COMPILED_WHILE_SERVING, "A kernel or a graph was compiled after the server was ready.", on_device=True),
    LogEvent(GRAMMAR_FAILED, "The grammar of a structured output could not be compiled."),
    LogEvent(GRAMMAR_REJECTED, "The grammar of a structured output refused a generated token."),
    LogEvent(
        "custom_all_reduce_disabled",
        "vLLM fell back to NCCL for the all-reduce of the ranks.",
        unread="It explains slow tensor parallelism to a reader; tp_interconnect_bound decides by measured traffic.",
    ),
    LogEvent(
        EXPERT_BALANCE,
        "The tokens of the expert-parallel ranks in one step: mean and highest, as EPLB logs them with"
        " log_balancedness.",
        ("balancedness", "avg_tokens", "max_tokens"),
        summed=("avg_tokens", "max_tokens"),
    ),
    LogEvent(
        "preemption_v0",
        "The engine of vLLM before 0.11 preempted a request.",
        unread="vLLM's page counts preemptions; the line is for a log without a page.",
    ),
    LogEvent(KV_TRANSFER_FAILED, "A KV connector (NIXL, Mooncake) failed to transfer KV blocks or to reach its peer."),
    LogEvent(KV_BLOCKS_EXPIRED, "A prefill instance freed KV blocks that no decode instance had fetched in time."),
    LogEvent(KV_LOAD_FAILED, "KV blocks could not be loaded: their requests failed, or were computed again."),
    LogEvent(MULTIMODAL_CACHE_MISS, "The engine lacks a multimodal item that the API server believes it has cached."),
    LogEvent(REQUEST_PREPROCESSING_FAILED, "The engine failed a request before its scheduler saw it."),
    LogEvent(INPUT_THREAD_DIED, "The engine's input thread ended: no request reaches the scheduler any more."),
    LogEvent(SCHEDULER_PAUSED, "A client paused the scheduler (POST /pause): requests wait, and none is scheduled."),
    LogEvent(SCHEDULER_RESUMED, "The scheduler resumed after a pause (POST /resume)."),
    LogEvent(SCALING_STARTED, "An engine prepares another number of data-parallel engines (POST /scale_elastic_ep)."),
    LogEvent(SCALING_ENDED, "The server has, or failed to get, another number of data-parallel engines."),
    LogEvent(WEIGHTS_DISCARDED, "The weights were discarded without a copy in host memory (POST /sleep?level=2)."),
    LogEvent(WEIGHTS_RELOADED, "The weights were loaded again into a running server."),
    LogEvent(OUTPUT_CORRUPTED, "Logits were NaN (counted with VLLM_COMPUTE_NANS_IN_LOGITS=1)."),
    LogEvent(KV_SCALES_MISSING, "The checkpoint has no scales for the FP8 KV cache: vLLM uses 1.0."),
    LogEvent(FLOAT16_CAST, "A bfloat16 model runs in float16, which overflows at 65,504."),
)
OUT_OF_MEMORY = tuple(event.name for event in LOG_EVENTS if event.out_of_memory)
ON_DEVICE = frozenset(event.name for event in LOG_EVENTS if event.on_device)
FATAL = tuple(event.name for event in LOG_EVENTS if event.fatal or event.out_of_memory)
NO_START_FAILURE = tuple(event.name for event in LOG_EVENTS if not event.start_failure)
QUOTED = (ON_DEVICE - {COMPILED_WHILE_SERVING}) | {*FATAL, ENGINE_DEAD, ENGINE_START_FAILED}
"""Events whose log line is quoted: the server or a part of it has ended, or is about to."""


class StartupPhase(NamedTuple):
    """One phase of a start; `usual_seconds` is the longest time reported for it, 0 if it takes none."""

    name: str
    meaning: str
    usual_seconds: int


CUDA_GRAPH_CAPTURE = "cuda_graph_capture"
WARM_UP = "warm_up"
READY = "ready"

STARTUP_PHASES = (
    StartupPhase("process_start", "The process is there and reads its configuration.", 120),
    StartupPhase("load_weights", "The model's weights are downloaded and loaded onto the GPUs.", 900),
    StartupPhase("compile", "torch.compile translates the model.", 300),
    StartupPhase("profile_memory", "vLLM measures what a largest batch needs.", 120),
    StartupPhase("allocate_kv_cache", "The KV cache takes what memory is left.", 60),
    StartupPhase(CUDA_GRAPH_CAPTURE, "CUDA graphs are captured for each batch size.", 180),
    StartupPhase(WARM_UP, "Kernels are compiled and warmed up, and the API server starts.", 300),
    StartupPhase(READY, "The server answers requests.", 0),
)


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

    `nearby` are the lines around it, with those of the kernel and of libraries in the minutes before; `platform` is
    vLLM's name of the device ("cuda", "rocm", "xpu", ...), `phase` the phase of the start in which it failed, READY for
    a server at work; "" for unknown.
    """

    nearby: str = ""
    platform: str = ""
    phase: str = ""


class LogEnding(NamedTuple):
    """How a log ends, at a unix time: the state of its server then, which nothing but the log shows.

    "stopped": it was ended from outside; "lost": its last line tells no state; "script failed", "run over": the engine
    of a script without a server had started, and the script raised an exception, or the log ends without one. `phase`
    is that of a start under way, with the share that is done, if known. `errors` are the lines of errors since the
    server began, and `processes` those that logged an exception; `last` is the text of the last line that vLLM logged,
    without secrets; `lines` are the last lines of each event; `context` is what stands around the line that
    ended the server. `failed` of the last `answered` requests for inference ended with HTTP 5xx;
    `load` are the requests and tokens of the last stats lines, in words, "" without one. `is_still`: the server was at
    work, and its last stats line reports requests and no token. `waits` is the line of an engine at work whose ranks
    wait for each other, and behind which it has generated no token.
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
    load: str = ""
    is_still: bool = False
    waits: str = ""


STARTING = tuple(phase.name for phase in STARTUP_PHASES if phase.name != READY)
"""The phases before a server answers."""
