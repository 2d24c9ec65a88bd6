"""The lines of vLLM's log that mean something, as one table: every text that vLLM 0.6.0 - 0.33.0 has had for them.

To add a line, add a Pattern with the files that log it, and a line of tests/data/logs/texts.tsv; a new event is
declared in diag/core/log_events.py first. `recognise` reads the table.
"""

from diag.exporter.log.launch_patterns import LAUNCH_PATTERNS
from diag.exporter.log.pattern import BAR, FAILED, SAID, UVICORN, WARNED, Pattern
from diag.exporter.log.serving_patterns import CORRUPTED, SERVING_PATTERNS, STATS

_TAG = r"(?:\[\w+\] )?"
_SIZE = r"[\d.]+ ?(?:[KMG]i?B|bytes)?"
_LENGTH = (
    rf"\(?(?P<max_model_len>\d+)\), \((?P<needed_gibibytes>{_SIZE}) KV cache is needed.*?"
    rf"KV cache memory \((?P<available_gibibytes>{_SIZE})\)"
    r"(?:.*?estimated maximum model length is (?P<estimated_max_model_len>\d+))?"
)
_FULL = r"Maximum concurrency for (?P<max_model_len>[\d,]+) tokens per request: (?P<kv_cache_max_concurrency>[\d.]+)x"
_POOL = rf"KV cache size: (?P<kv_cache_size_tokens>[\d,]+) tokens(?:, {_FULL})?"
_FREE = rf"\((?P<free_gibibytes>{_SIZE})/(?P<total_gibibytes>{_SIZE})\)"
_ASKED = rf"\((?P<utilization>[\d.]+), (?P<requested_gibibytes>{_SIZE})\)"
_TRIED = (
    rf"Tried to allocate (?P<wanted_gibibytes>{_SIZE})\.?"
    rf"(?: GPU \d* ?has a total capaci?ty of (?P<total_gibibytes>{_SIZE})"
    rf" of which (?P<free_gibibytes>{_SIZE}) is free)?"
)
_TRIED_OLD = (
    rf"Tried to allocate (?P<wanted_gibibytes>{_SIZE}) \(GPU \d+; (?P<total_gibibytes>{_SIZE}) total capacity;"
    rf"(?:.*? (?P<free_gibibytes>{_SIZE}) free)?"
)
_CUDA = (
    r"(?:CUDA initialization: )?"
    r"(?:Unexpected error from cudaGetDeviceCount\(\).{0,200}?Error \d+: |CUDA (?:driver )?error(?: \d+)?: )?"
)
_DRIVER = (
    r"system not yet initialized|system has unsupported display driver|forward compatibility was attempted"
    r"|CUDA driver version is insufficient"
)

_UTILS = "api_utils.py utils.py"
_ASYNC = "async_llm.py async_llm_engine.py client.py core_client.py"
_GRAMMAR = "backend_xgrammar.py grammar.py scheduler.py __init__.py"
_NCCL = "ProcessGroupNCCL.cpp ProcessGroupNCCL.hpp"
"""Files that log, by any release; torch's own have its head, not vLLM's."""
_DEADLY = r"(?:Killed|Segmentation fault|Aborted|Bus error|Illegal instruction)"
"""What a shell says of a child that a signal ended, behind its script, its line and the PID."""

PATTERNS: tuple[Pattern, ...] = (
    # -- a start begins -----------------------------------------------------------------------------------------------
    Pattern(
        "banner", "logo", r"[ █▄▀]{10,60}version ", SAID, "0.17.0", numbers=r"version (?P<version>\S+)", logger=_UTILS
    ),
    Pattern(
        "banner",
        "version",
        r"vLLM (?:API )?server version ",
        SAID,
        numbers=r"version (?P<version>[^\s,]+)(?:, serving model (?P<model>.+))?",
        logger=f"api_server.py {_UTILS}",
    ),
    Pattern("banner", "args", r"(?:non-default )?args: ", SAID, logger=f"api_server.py cli_args.py {_UTILS}"),
    Pattern("hint", "platform", r"Automatically detected platform ", SAID, "0.6.6", logger="__init__.py"),
    Pattern(
        "hint",
        "config",
        r"Initializing (?:an|a V\d) LLM engine \(v",
        SAID,
        numbers=r"engine \(v(?P<version>[^)\s]+)\)",
        logger="core.py llm_engine.py",
    ),
    # -- and passes its stages ----------------------------------------------------------------------------------------
    Pattern("stage", "load_weights", r"Starting to load model ", SAID),
    Pattern("stage", "load_weights", r"Loading \w+ checkpoint shards:", BAR),
    Pattern("stage", "load_weights", r"Loading safetensors using [\w ]+:", BAR, "0.6.6.post1"),
    Pattern("stage", "load_weights", r"Multi-thread loading (?:pt checkpoint )?shards:", BAR, "0.10.2"),
    Pattern("stage", "compile", r"(?:Model loading|Loading model weights) took ", SAID),
    Pattern("stage", "compile", _TAG + r"Using cache directory: .* for vLLM's torch\.compile", SAID, "0.6.5"),
    Pattern("stage", "compile", _TAG + r"Starting torch\.compile", SAID, "0.19.0"),
    Pattern("stage", "compile", _TAG + r"Dynamo bytecode transform time", SAID, "0.6.5"),
    Pattern("stage", "compile", _TAG + r"Compiling a graph for ", SAID, "0.6.3.post1"),
    Pattern("stage", "compile", _TAG + r"Cache the graph ", SAID, "0.7.3"),
    Pattern("stage", "compile", _TAG + r"Directly load ", SAID, "0.7.3"),
    Pattern("stage", "compile", r"Warming up model for the compilation", SAID, "0.8.0"),
    Pattern("stage", "profile_memory", _TAG + r"torch\.compile (?:takes|took|and) ", SAID, "0.6.5"),
    Pattern("stage", "profile_memory", _TAG + r"saved AOT compiled function ", SAID, "0.11.1"),
    Pattern("stage", "profile_memory", _TAG + r"Initial profiling/warmup run took ", SAID, "0.18.0"),
    Pattern("stage", "profile_memory", r"Encoder cache will be initialized with ", SAID, "0.8.0"),
    Pattern("stage", "profile_memory", r"Profiling CUDA graph memory: ", SAID, "0.18.0"),
    Pattern("stage", "profile_memory", r"Estimated (?:\S+ )?CUDA graph memory: ", SAID, "0.18.0"),
    Pattern("stage", "allocate_kv_cache", r"Memory profiling (?:takes|results:) ", SAID, "0.6.4.post1", "0.10.2"),
    Pattern("stage", "allocate_kv_cache", r"Available KV cache memory: ", SAID, "0.9.1"),
    Pattern("stage", "allocate_kv_cache", r"Initial free memory .* reserved ", SAID, "0.10.2"),
    Pattern("stage", "allocate_kv_cache", r"(?:Explicitly|Auto) set \(.* GiB for KV cache", SAID, "0.22.0"),
    Pattern(
        "stage",
        "allocate_kv_cache",
        r"Overriding num_gpu_blocks=",
        SAID,
        numbers=r"num_gpu_blocks_override=(?P<num_gpu_blocks_override>\d+)",
    ),
    Pattern(
        "stage",
        "allocate_kv_cache",
        r"# (?:\w+ )?blocks: ",
        SAID,
        last="0.11.0",
        numbers=r"# (?!CPU)\w+ blocks: (?P<num_gpu_blocks>\d+)",
    ),
    Pattern("stage", "allocate_kv_cache", r"[\w+ ]{2,30} KV cache size: ", SAID, "0.8.0", numbers=_POOL),
    Pattern("stage", "allocate_kv_cache", r"Maximum concurrency for ", SAID, "0.6.3.post1", "0.27.1", numbers=_FULL),
    Pattern("stage", "kernel_warm_up", r"Compile and warming up model for size ", SAID, "0.8.0"),
    Pattern("stage", "kernel_warm_up", r"DeepG(?:EMM|emm)(?:\(\w+\))? warmup", BAR, "0.10.1"),
    Pattern("stage", "kernel_warm_up", r"JIT kernel warmup \(", BAR, "0.29.0"),
    Pattern("stage", "kernel_warm_up", r"Compiling CuTeDSL kernels:", BAR, "0.26.0"),
    Pattern("stage", "kernel_warm_up", r"\[Aiter Triton\] Pre-compiling ", BAR, "0.10.2", "0.14.1"),
    Pattern("stage", "cuda_graph_capture", r"Capturing (?!the model)(?:[\w-]+ ){0,4}CUDA graph", BAR, "0.6.6.post1"),
    Pattern("stage", "cuda_graph_capture", r"Capturing (?:the model for CUDA ?graphs|cudagraphs for )", SAID),
    Pattern("stage", "warm_up", r"Graph capturing finished in ", SAID),
    Pattern("stage", "warm_up", r"CUDA graph pool memory: ", SAID, "0.18.0"),
    Pattern("stage", "warm_up", r"init engine \(profile, create kv cache, warmup model\) took ", SAID, "0.6.5"),
    Pattern("stage", "warm_up", r"Starting vLLM (?:API )?server ", SAID, "0.7.3"),
    Pattern("stage", "ready", r"Application startup complete", UVICORN),
    Pattern("stage", "ready", r"Uvicorn running on ", UVICORN),
    Pattern("progress", "", r"Resolved architecture: ", SAID, "0.10.0"),
    Pattern("progress", "", r"Initializing model took ", SAID, "0.30.0"),
    Pattern("progress", "", r"Time spent downloading weights ", SAID, "0.8.0"),
    Pattern("progress", "", r"Loading weights took ", SAID, "0.8.0"),
    Pattern("progress", "", r"Loading drafter model", SAID, "0.8.5"),
    Pattern("progress", "", r"world_size=\d+ rank=\d+ ", SAID),
    Pattern("progress", "", r"rank \d+ in world size ", SAID, "0.8.0"),
    Pattern("progress", "", r"vLLM is using nccl==", SAID),
    Pattern("progress", "", r"(?:generating|reading) GPU P2P access cache ", SAID),
    Pattern("progress", "", r"Capturing a cudagraph ", SAID, "0.6.4.post1"),
    Pattern("progress", "", r"Encoder graph capturing finished |Encoder CUDA graph capture complete", SAID, "0.19.0"),
    Pattern("progress", "", r"Supported[_ ]tasks: ", SAID, "0.10.0"),
    Pattern("progress", "", r"Started server process |Waiting for application startup", UVICORN),
    Pattern("progress", "", r"Warming up done", SAID, "0.8.0"),
    # -- how it runs --------------------------------------------------------------------------------------------------
    Pattern("setting", "model", r"[ █▄▀]{10,60}model   ", SAID, "0.17.0", numbers=r"model   (?P<model>.+)"),
    Pattern("setting", "", r"Using max model len ", SAID, "0.10.0", numbers=r"len (?P<max_model_len>\d+)"),
    Pattern(
        "setting",
        "",
        r"Chunked prefill is enabled with ",
        SAID,
        numbers=r"max_num_batched_tokens=(?P<max_num_batched_tokens>\d+)",
    ),
    Pattern(
        "serves",
        "",
        rf"{STATS}(?!{CORRUPTED})",
        SAID,
        logger="loggers.py metrics.py",
    ),
    Pattern("serves", "", r"Received request ", SAID, logger="logger.py request_logger.py"),
    Pattern("serves", "", r"Exception in ASGI application", frozenset({"ERROR"})),
    Pattern("serves", "", r'[^\s"]{1,80} - "[A-Z]{3,7} /', frozenset({"INFO"})),
    Pattern("ends", "", r"\[shutdown\] API server: shutdown triggered", WARNED, "0.28.0", logger="launcher.py"),
    Pattern("ends", "", r"Shutting down FastAPI HTTP server\.", SAID, last="0.27.1", logger="launcher.py"),
    Pattern("ends", "", r"Shutting down$", UVICORN),
    Pattern("ends", "", r"Application shutdown complete|Finished server process ", UVICORN),
    # -- what goes wrong ----------------------------------------------------------------------------------------------
    Pattern("event", "cuda_out_of_memory", r"(?:CUDA|HIP|XPU) out of memory\. .*\(GPU \d", FAILED, numbers=_TRIED_OLD),
    Pattern("event", "cuda_out_of_memory", r"(?:CUDA|HIP|XPU) out of memory(?!\. .*\(GPU \d)", FAILED, numbers=_TRIED),
    Pattern("event", "cuda_out_of_memory", r"(?:(?:CUDA|HIP) error|Triton Error \[\w+\]): out of memory", FAILED),
    Pattern("event", "no_kv_cache_memory", r"No available memory for the cache blocks", FAILED),
    Pattern(
        "event", "no_kv_cache_memory", r"The worker already uses .* leaving none for the KV cache", FAILED, "0.33.0"
    ),
    Pattern(
        "event",
        "max_model_len_exceeds_kv_cache",
        r"To serve at least one request with the model",
        FAILED,
        "0.7.0",
        numbers=_LENGTH,
    ),
    Pattern(
        "event",
        "max_model_len_exceeds_kv_cache",
        r"The model's max seq len \(",
        FAILED,
        last="0.10.2",
        numbers=r"max seq len \((?P<max_model_len>\d+)\).*stored in KV cache \((?P<estimated_max_model_len>\d+)\)",
    ),
    Pattern(
        "event",
        "free_memory_below_requested",
        r"Free memory on device .* on startup is less than ",
        FAILED,
        "0.9.1",
        numbers=rf"{_FREE} on startup is less than .*?{_ASKED}",
    ),
    Pattern(
        "event",
        "free_memory_below_requested",
        r"Externally held weights on device .* exceed the desired ",
        FAILED,
        "0.32.0",
        numbers=rf"/(?P<total_gibibytes>{_SIZE})\) exceed .*?{_ASKED}",
    ),
    Pattern(
        "event",
        "shm_broadcast_wait",
        r"No available shared memory broadcast block ",
        WARNED,
        "0.8.2",
        numbers=r"in (?P<seconds>[\d.]+) second",
        logger="shm_broadcast.py",
    ),
    Pattern("event", "rpc_timeout", r"RPC call to \S+ timed out", FAILED, "0.6.5"),
    Pattern("event", "engine_dead", r"[\w.]*EngineDeadError\b", FAILED, logger=_ASYNC),
    Pattern(
        "event",
        "engine_dead",
        r"EngineCore encountered (?:a fatal error|an issue)",
        FAILED,
        "0.8.5.post1",
        logger="core.py",
    ),
    Pattern("event", "engine_dead", r"EngineCore hit an exception", FAILED, "0.7.0", "0.8.4", logger="core.py"),
    Pattern("event", "engine_dead", r"AsyncLLM output_handler failed", FAILED, "0.8.5.post1", logger=_ASYNC),
    Pattern("event", "engine_dead", r"Engine core proc(?:ess)? \S+ died unexpectedly", FAILED, "0.10.1", logger=_ASYNC),
    Pattern(
        "event",
        "engine_dead",
        r"\[shutdown\] MPClient: engine core exited unexpectedly",
        WARNED,
        "0.28.0",
        logger=_ASYNC,
    ),
    Pattern(
        "event", "engine_dead", r"Engine (?:loop is|background task|loop has) ", FAILED, last="0.10.2", logger=_ASYNC
    ),
    Pattern("event", "engine_dead", r"Engine iteration timed out\.", FAILED, last="0.10.2", logger=_ASYNC),
    Pattern("event", "engine_start_failed", r"Engine core initialization failed", FAILED, "0.8.4"),
    Pattern("event", "engine_start_failed", r"Engine process failed to start", FAILED, "0.6.2", "0.10.2"),
    Pattern(
        "event",
        "engine_start_failed",
        r"(?:EngineCore|EngineCoreProc|WorkerProc|RayWorkerProc) failed to start\.",
        FAILED,
        "0.6.4.post1",
    ),
    Pattern("event", "engine_start_failed", r"Timed out waiting for engine core processes to start", FAILED, "0.17.0"),
    Pattern("event", "engine_start_failed", r"Application startup failed", UVICORN | FAILED),
    Pattern(
        "event",
        "worker_died",
        r"(?:Worker proc|RayWorkerProc|Worker) \S+(?: pid \d+)? died(?: unexpectedly)?[, (]",
        FAILED,
        numbers=r"exit code: (?P<exit_code>-?\d+)",
        logger="multiproc_executor.py multiproc_worker_utils.py ray_executor.py ray_executor_v2.py",
    ),
    Pattern("event", "killed_by_signal", r"Fatal Python error: (?:Segmentation fault|Aborted|Bus error|Illegal)", BAR),
    Pattern("event", "killed_by_signal", r"!{5,9} Segfault encountered !{5,9}", BAR),
    Pattern("event", "killed_by_signal", r"terminate called after throwing an instance of ", BAR),
    Pattern("event", "killed_by_signal", rf"(?:\S+: line \d+: +\d+ )?{_DEADLY}(?: \(core dumped\))?(?: +\S.*)?$", BAR),
    Pattern(
        "event", "grammar_failed", r"Failed to compile grammar for request \S+$", FAILED, "0.28.0", logger=_GRAMMAR
    ),
    Pattern("event", "grammar_rejected", r"Failed to advance FSM for request ", FAILED, "0.8.0", logger=_GRAMMAR),
    Pattern("event", "grammar_rejected", r"Unexpected: grammar rejected tokens \[", FAILED, "0.22.0", logger=_GRAMMAR),
    Pattern(
        "event",
        "grammar_rejected",
        r"Unexpected: grammar terminated or rejected draft token",
        FAILED,
        "0.32.0",
        logger=_GRAMMAR,
    ),
    Pattern("event", "nccl_timeout", r"Watchdog caught collective operation timeout", FAILED, logger=_NCCL),
    Pattern("event", "nccl_timeout", r"Timeout at (?:NCCL work|collective): ", FAILED, logger=_NCCL),
    Pattern("event", "nccl_timeout", r"Some NCCL operations have failed or timed out", FAILED, logger=_NCCL),
    Pattern("event", "nccl_timeout", r"ProcessGroupNCCL's watchdog got stuck ", FAILED, logger=_NCCL),
    Pattern("event", "driver_too_old", _CUDA + r"The NVIDIA driver on your system is too old", FAILED),
    Pattern("event", "driver_too_old", _CUDA + r"CUDA driver version is insufficient", FAILED),
    Pattern("event", "driver_mismatch", _CUDA + r"system has unsupported display driver", FAILED),
    Pattern("event", "driver_mismatch", _CUDA + r"forward compatibility was attempted ", FAILED),
    Pattern("event", "driver_mismatch", r"(?:[\w.]{0,80}NVMLError_\w+: )?Driver/library version mismatch", FAILED),
    Pattern("event", "fabric_not_ready", _CUDA + r"system not yet initialized", FAILED),
    Pattern("event", "cuda_error", rf"(?:CUDA|HIP)(?: driver)? error(?: \d+)?: (?!out of memory|{_DRIVER})", FAILED),
    Pattern("event", "cuda_error", r"(?:CUBLAS|CUDNN|CUSOLVER|HIPBLAS)_STATUS_|cu[A-Z]\w+ error: ", FAILED),
    Pattern("event", "cuda_error", r"Triton Error \[\w+\]: (?!out of memory)", FAILED),
    Pattern("event", "cuda_error", r"NCCL error(?: in)?: ", FAILED),
    Pattern(
        "event",
        "compiled_while_serving",
        r"(?:Triton|CuTeDSL|TileLang) (?:kernel )?JIT compilation during inference: ",
        frozenset({"WARNING"}),
        "0.21.0",
        logger="jit_monitor.py",
    ),
    *LAUNCH_PATTERNS,
    *SERVING_PATTERNS,
)
