"""The table of log lines that have a meaning: every text that vLLM 0.6.0 - 0.33.0 has had for them.

To add a line, add a Pattern with the files that log it, and a line of tests/data/logs/texts.tsv; a new event is
declared in diag/core/log_events.py first. `recognise` searches the table.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from diag.core.log_events import CUDA_GRAPH_CAPTURE, LOG_EVENTS, STARTUP_PHASES

Kind = Literal["banner", "hint", "stage", "progress", "setting", "event", "serves", "ends", "fatal"]
"""The meaning of a line. A banner begins a new start; a hint does so only if no start is under way; a stage has been
reached by a start; progress is made inside a stage; a setting is of the configuration; an event is counted; "serves"
and "ends" show the server at work and shutting down; "fatal" is printed by a command that cannot start.
"""
PHASES = tuple(phase.name for phase in STARTUP_PHASES)
KERNEL_WARM_UP = "kernel_warm_up"
_BEFORE_CAPTURE = PHASES.index(CUDA_GRAPH_CAPTURE)
STAGES = (*PHASES[:_BEFORE_CAPTURE], KERNEL_WARM_UP, *PHASES[_BEFORE_CAPTURE:])
"""The phases, with warm_up in two parts: kernels are warmed up before the graphs are captured."""
EVENTS = tuple(event.name for event in LOG_EVENTS)

RAW = ""
"""The level of a line without a head: a traceback, a progress bar, the output of a library."""
NO_HEAD = frozenset({RAW})
INFO, WARNING, ERROR = frozenset({"INFO", "DEBUG"}), frozenset({"WARNING"}), frozenset({"ERROR"})
UP_TO_WARNING = INFO | WARNING
FAILED = frozenset({RAW, "ERROR", "CRITICAL"})
UVICORN = frozenset({RAW, "INFO"})


@dataclass(frozen=True)
class Pattern:
    """A text that vLLM wrote in the releases from `first` to `last`.

    `begins` is a regular expression without groups. `numbers` is searched in the whole text; its groups are fields of
    the event, or flags of the configuration. `logger` names the files, one space between them, that have logged it in
    any release, as they stand in a line's head: once clients are served, the line counts from them only. It is "" for a
    text without a head of vLLM's: an exception, a bar, uvicorn's lines, the output of a library or a shell. An
    exception counts in a record of the end of an engine or a worker, or in one that shows `record_event`. A device's
    runtime prints a line that `aborts` before it aborts its process: once clients are served, a death proves the line.
    """

    kind: Kind
    name: str
    begins: str
    levels: frozenset[str]
    first: str = "0.6.0"
    last: str = "0.33.0"
    numbers: str = ""
    logger: str = ""
    record_event: str = ""
    aborts: bool = False


_banner, _hint, _stage = partial(Pattern, "banner"), partial(Pattern, "hint"), partial(Pattern, "stage")
_setting, _event, _fatal = partial(Pattern, "setting"), partial(Pattern, "event"), partial(Pattern, "fatal")
_progress, _ends = partial(Pattern, "progress", ""), partial(Pattern, "ends", "")
_serves = partial(Pattern, "serves", "")
_core = partial(_event, logger="core.py core_client.py")

_TAG = r"(?:\[\w+\] )?"
_SIZE = r"[\d.]+ ?(?:[KMG]i?B|bytes)?"
_LENGTH = (
    rf"\(?(?P<max_model_len>\d+)\), \((?P<needed_gibibytes>{_SIZE}) KV cache is needed.*?"
    rf"KV cache memory \((?P<available_gibibytes>{_SIZE})\)"
    r"(?:.*?estimated maximum model length is (?P<estimated_max_model_len>\d+))?"
)
_CONCURRENCY = (
    r"Maximum concurrency for (?P<max_model_len>[\d,]+) tokens per request: (?P<kv_cache_max_concurrency>[\d.]+)x"
)
_KV_CACHE_SIZE = rf"KV cache size: (?P<kv_cache_size_tokens>[\d,]+) tokens(?:, {_CONCURRENCY})?"
_FREE = rf"\((?P<free_gibibytes>{_SIZE})/(?P<total_gibibytes>{_SIZE})\)"
_REQUESTED = rf"\((?P<utilization>[\d.]+), (?P<requested_gibibytes>{_SIZE})\)"
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
"""The files that log, of any release; torch's files have torch's head, not vLLM's."""
_DEADLY = r"(?:Killed|Segmentation fault|Aborted|Bus error|Illegal instruction)"
"""A shell reports so that a signal ended a child, behind the script, its line and the PID."""

_HSA = r"Memory access fault|HW Exception"
_QUEUE = r":0:\S{1,60} *: ?\d{1,6} ?: .{0,200}aborting with error : HSA_STATUS_ERROR"
"""ROCm's runtime prints the place in its own code before the queue that failed."""
_EXECUTABLE = r"(?:\S{0,300}/)?vllm|exec: (?:\S{0,300}/)?(?:vllm|python[\d.]{0,8})"
_SCRIPT = r"\S{1,300}: (?:line \d{1,9}: |\d{1,9}: )?"
"""The script and its line, as bash and dash print them."""
_NOT_RUN = r"(?:command )?not found|cannot execute|No such file or directory|Permission denied"
_KERNEL = r"(?:kernel: )?(?:\[[^\]]{1,40}\] ?)?"
"""The head of a kernel's line, as dmesg and a serial console write it."""
_SERVER = r"(?:VLLM|vllm|python|pt_main|ray::|EngineCore|APIServer|Worker)"
"""Names of processes of a server, in the kernel's table."""
_NIXL = "nixl_connector.py worker.py base_worker.py pull_worker.py push_worker.py"
"""vLLM logs a failure with the file of the caller; NIXL's connector has been one file, then several."""
_COLLECTIVE = "custom_all_reduce.py"
_MOONCAKE = "mooncake_connector.py"
_SCHEDULER = "scheduler.py"
_STREAM = "serving.py serving_chat.py serving_completion.py speech_to_text.py"
_STOPS = r"\[shutdown\] EngineCore: "
_COUNT = r"count=(?P<requests>\d+)"
_DRAIN = _COUNT + r" timeout=(?P<seconds>\d+)"
_ALLOCATOR = r"(?:CuMem|XpuMem)Allocator: sleep freed [\d.]+ GiB memory in total, of which "
_RELOAD = "gpu_model_runner.py model_runner.py inplace.py"
_PREPROCESSING = "request_preprocessing_failed"
_STATS = r"(?:Engine \d+: |\d+ Engines Aggregated: )?Avg prompt throughput: "
_CORRUPTED = r".{0,400}, Corrupted: [1-9]"

_BALANCE = r"avg_tokens=(?P<avg_tokens>[\d.]+), max_tokens=(?P<max_tokens>\d+), balancedness=(?P<balancedness>[\d.]+)"

PATTERNS: tuple[Pattern, ...] = (
    # -- a start begins -----------------------------------------------------------------------------------------------
    _banner("logo", r"[ █▄▀]{10,60}version ", INFO, "0.17.0", numbers=r"version (?P<version>\S+)", logger=_UTILS),
    _banner(
        "version",
        r"vLLM (?:API )?server version ",
        INFO,
        numbers=r"version (?P<version>[^\s,]+)(?:, serving model (?P<model>.+))?",
        logger=f"api_server.py {_UTILS}",
    ),
    _banner("args", r"(?:non-default )?args: ", INFO, logger=f"api_server.py cli_args.py {_UTILS}"),
    _hint(
        "platform",
        r"Automatically detected platform ",
        INFO,
        "0.6.6",
        numbers=r"platform (?P<platform>\w{1,20})",
        logger="__init__.py",
    ),
    _hint(
        "config",
        r"Initializing (?:an|a V\d) LLM engine \(v",
        INFO,
        numbers=r"engine \(v(?P<version>[^)\s]+)\)",
        logger="core.py llm_engine.py",
    ),
    # -- stages of a start --------------------------------------------------------------------------------------------
    _stage("load_weights", r"Starting to load model ", INFO),
    _stage("load_weights", r"Loading \w+ checkpoint shards:", NO_HEAD),
    _stage("load_weights", r"Loading safetensors using [\w ]+:", NO_HEAD, "0.6.6.post1"),
    _stage("load_weights", r"Multi-thread loading (?:pt checkpoint )?shards:", NO_HEAD, "0.10.2"),
    _stage("compile", r"(?:Model loading|Loading model weights) took ", INFO),
    _stage("compile", _TAG + r"Using cache directory: .* for vLLM's torch\.compile", INFO, "0.6.5"),
    _stage("compile", _TAG + r"Starting torch\.compile", INFO, "0.19.0"),
    _stage("compile", _TAG + r"Dynamo bytecode transform time", INFO, "0.6.5"),
    _stage("compile", _TAG + r"Compiling a graph for ", INFO, "0.6.3.post1"),
    _stage("compile", _TAG + r"Cache the graph ", INFO, "0.7.3"),
    _stage("compile", _TAG + r"Directly load ", INFO, "0.7.3"),
    _stage("compile", r"Warming up model for the compilation", INFO, "0.8.0"),
    _stage("profile_memory", _TAG + r"torch\.compile (?:takes|took|and) ", INFO, "0.6.5"),
    _stage("profile_memory", _TAG + r"saved AOT compiled function ", INFO, "0.11.1"),
    _stage("profile_memory", _TAG + r"Initial profiling/warmup run took ", INFO, "0.18.0"),
    _stage("profile_memory", r"Encoder cache will be initialized with ", INFO, "0.8.0"),
    _stage("profile_memory", r"Profiling CUDA graph memory: ", INFO, "0.18.0"),
    _stage("profile_memory", r"Estimated (?:\S+ )?CUDA graph memory: ", INFO, "0.18.0"),
    _stage("allocate_kv_cache", r"Memory profiling (?:takes|results:) ", INFO, "0.6.4.post1", "0.10.2"),
    _stage("allocate_kv_cache", r"Available KV cache memory: ", INFO, "0.9.1"),
    _stage("allocate_kv_cache", r"Initial free memory .* reserved ", INFO, "0.10.2"),
    _stage("allocate_kv_cache", r"(?:Explicitly|Auto) set \(.* GiB for KV cache", INFO, "0.22.0"),
    _stage(
        "allocate_kv_cache",
        r"Overriding num_gpu_blocks=",
        INFO,
        numbers=r"num_gpu_blocks_override=(?P<num_gpu_blocks_override>\d+)",
    ),
    _stage(
        "allocate_kv_cache",
        r"# (?:\w+ )?blocks: ",
        INFO,
        last="0.11.0",
        numbers=r"# (?!CPU)\w+ blocks: (?P<num_gpu_blocks>\d+)",
    ),
    _stage("allocate_kv_cache", r"[\w+ ]{2,30} KV cache size: ", INFO, "0.8.0", numbers=_KV_CACHE_SIZE),
    _stage("allocate_kv_cache", r"Maximum concurrency for ", INFO, "0.6.3.post1", "0.27.1", numbers=_CONCURRENCY),
    _stage("kernel_warm_up", r"Compile and warming up model for size ", INFO, "0.8.0"),
    _stage("kernel_warm_up", r"DeepG(?:EMM|emm)(?:\(\w+\))? warmup", NO_HEAD, "0.10.1"),
    _stage("kernel_warm_up", r"JIT kernel warmup \(", NO_HEAD, "0.29.0"),
    _stage("kernel_warm_up", r"Compiling CuTeDSL kernels:", NO_HEAD, "0.26.0"),
    _stage("kernel_warm_up", r"\[Aiter Triton\] Pre-compiling ", NO_HEAD, "0.10.2", "0.14.1"),
    _stage("cuda_graph_capture", r"Capturing (?!the model)(?:[\w-]+ ){0,4}CUDA graph", NO_HEAD, "0.6.6.post1"),
    _stage("cuda_graph_capture", r"Capturing (?:the model for CUDA ?graphs|cudagraphs for )", INFO),
    _stage("warm_up", r"Graph capturing finished in ", INFO),
    _stage("warm_up", r"CUDA graph pool memory: ", INFO, "0.18.0"),
    _stage("warm_up", r"init engine \(profile, create kv cache, warmup model\) took ", INFO, "0.6.5"),
    _stage("warm_up", r"Starting vLLM (?:API )?server ", INFO, "0.7.3"),
    _stage("ready", r"Application startup complete", UVICORN),
    _stage("ready", r"Uvicorn running on ", UVICORN),
    _progress(r"Resolved architecture: ", INFO, "0.10.0"),
    _progress(r"Initializing model took ", INFO, "0.30.0"),
    _progress(r"Time spent downloading weights ", INFO, "0.8.0"),
    _progress(r"Loading weights took ", INFO, "0.8.0"),
    _progress(r"Loading drafter model", INFO, "0.8.5"),
    _progress(r"world_size=\d+ rank=\d+ ", INFO),
    _progress(r"rank \d+ in world size ", INFO, "0.8.0"),
    _progress(r"vLLM is using nccl==", INFO),
    _progress(r"(?:generating|reading) GPU P2P access cache ", INFO),
    _progress(r"Capturing a cudagraph ", INFO, "0.6.4.post1"),
    _progress(r"Encoder graph capturing finished |Encoder CUDA graph capture complete", INFO, "0.19.0"),
    _progress(r"Supported[_ ]tasks: ", INFO, "0.10.0"),
    _progress(r"Started server process |Waiting for application startup", UVICORN),
    _progress(r"Warming up done", INFO, "0.8.0"),
    # -- configuration, work and shutdown -----------------------------------------------------------------------------
    _setting("model", r"[ █▄▀]{10,60}model   ", INFO, "0.17.0", numbers=r"model   (?P<model>.+)"),
    _setting("", r"Using max model len ", INFO, "0.10.0", numbers=r"len (?P<max_model_len>\d+)"),
    _setting(
        "", r"Chunked prefill is enabled with ", INFO, numbers=r"max_num_batched_tokens=(?P<max_num_batched_tokens>\d+)"
    ),
    _setting(
        "", r"Setting attention block size to \d", INFO, "0.10.0", numbers=r"to (?P<enlarged_block_size>\d+) tokens"
    ),
    _serves(rf"{_STATS}(?!{_CORRUPTED})", INFO, logger="loggers.py metrics.py"),
    _serves(r"Received request ", INFO, logger="logger.py request_logger.py"),
    _serves(r"Exception in ASGI application", ERROR),
    _serves(r'[^\s"]{1,80} - "[A-Z]{3,7} /', frozenset({"INFO"})),
    _ends(r"\[shutdown\] API server: shutdown triggered", UP_TO_WARNING, "0.28.0", logger="launcher.py"),
    _ends(r"Shutting down FastAPI HTTP server\.", INFO, last="0.27.1", logger="launcher.py"),
    _ends(r"Shutting down$", UVICORN),
    _ends(r"Application shutdown complete|Finished server process ", UVICORN),
    # -- failures -----------------------------------------------------------------------------------------------------
    _event("cuda_out_of_memory", r"(?:CUDA|HIP|XPU) out of memory\. .*\(GPU \d", FAILED, numbers=_TRIED_OLD),
    _event("cuda_out_of_memory", r"(?:CUDA|HIP|XPU) out of memory(?!\. .*\(GPU \d)", FAILED, numbers=_TRIED),
    _event("cuda_out_of_memory", r"(?:(?:CUDA|HIP) error|Triton Error \[\w+\]): out of memory", FAILED),
    _event("no_kv_cache_memory", r"No available memory for the cache blocks", FAILED),
    _event("no_kv_cache_memory", r"The worker already uses .* leaving none for the KV cache", FAILED, "0.33.0"),
    _event(
        "max_model_len_exceeds_kv_cache",
        r"To serve at least one request with the model",
        FAILED,
        "0.7.0",
        numbers=_LENGTH,
    ),
    _event(
        "max_model_len_exceeds_kv_cache",
        r"The model's max seq len \(",
        FAILED,
        last="0.10.2",
        numbers=r"max seq len \((?P<max_model_len>\d+)\).*stored in KV cache \((?P<estimated_max_model_len>\d+)\)",
    ),
    _event(
        "free_memory_below_requested",
        r"Free memory on device .* on startup is less than ",
        FAILED,
        "0.9.1",
        numbers=rf"{_FREE} on startup is less than .*?{_REQUESTED}",
    ),
    _event(
        "free_memory_below_requested",
        r"Externally held weights on device .* exceed the desired ",
        FAILED,
        "0.32.0",
        numbers=rf"/(?P<total_gibibytes>{_SIZE})\) exceed .*?{_REQUESTED}",
    ),
    _event(
        "shm_broadcast_wait",
        r"No available shared memory broadcast block ",
        UP_TO_WARNING,
        "0.8.2",
        numbers=r"in (?P<seconds>[\d.]+) second",
        logger="shm_broadcast.py",
    ),
    _event("rpc_timeout", r"RPC call to \S+ timed out", FAILED, "0.6.5"),
    _event("engine_dead", r"[\w.]*EngineDeadError\b", FAILED, logger=_ASYNC),
    _event(
        "engine_dead", r"EngineCore encountered (?:a fatal error|an issue)", FAILED, "0.8.5.post1", logger="core.py"
    ),
    _event("engine_dead", r"EngineCore hit an exception", FAILED, "0.7.0", "0.8.4", logger="core.py"),
    _event("engine_dead", r"AsyncLLM output_handler failed", FAILED, "0.8.5.post1", logger=_ASYNC),
    _event("engine_dead", r"Engine core proc(?:ess)? \S+ died unexpectedly", FAILED, "0.10.1", logger=_ASYNC),
    _event(
        "engine_dead", r"\[shutdown\] MPClient: engine core exited unexpectedly", UP_TO_WARNING, "0.28.0", logger=_ASYNC
    ),
    _event("engine_dead", r"MQLLMEngine is already dead", FAILED, last="0.10.2", logger="launcher.py"),
    _event("engine_dead", r"RuntimeError\('Engine process \(pid \d+\) died", FAILED, last="0.10.2", logger="client.py"),
    _event(
        "engine_dead",
        r"(?:Got|\w{1,40}Executor got) fatal signal from worker processes",
        FAILED,
        last="0.10.2",
        logger=f"{_ASYNC} multiproc_executor.py",
    ),
    _event("engine_dead", r"Engine (?:loop is|background task|loop has) ", FAILED, last="0.10.2", logger=_ASYNC),
    _event("engine_dead", r"Engine iteration timed out\.", FAILED, last="0.10.2", logger=_ASYNC),
    _event("engine_start_failed", r"Engine core initialization failed", FAILED, "0.8.4"),
    _event("engine_start_failed", r"Engine process failed to start", FAILED, "0.6.2", "0.10.2"),
    _event(
        "engine_start_failed",
        r"(?:EngineCore|EngineCoreProc|WorkerProc|RayWorkerProc) failed to start\.",
        FAILED,
        "0.6.4.post1",
    ),
    _event("engine_start_failed", r"Timed out waiting for engine core processes to start", FAILED, "0.17.0"),
    _event("engine_start_failed", r"Application startup failed", UVICORN | FAILED),
    _event(
        "worker_died",
        r"(?:Worker proc|RayWorkerProc|Worker) \S+(?: pid \d+)? died(?: unexpectedly)?[, (]",
        FAILED,
        numbers=r"exit code: (?P<exit_code>-?\d+)",
        logger="multiproc_executor.py multiproc_worker_utils.py ray_executor.py ray_executor_v2.py",
    ),
    _event("killed_by_signal", r"Fatal Python error: (?:Segmentation fault|Aborted|Bus error|Illegal)", NO_HEAD),
    _event("killed_by_signal", r"!{5,9} Segfault encountered !{5,9}", NO_HEAD),
    _event("killed_by_signal", r"terminate called after throwing an instance of ", NO_HEAD),
    _event("killed_by_signal", rf"(?:\S+: line \d+: +\d+ )?{_DEADLY}(?: \(core dumped\))?(?: +\S.*)?$", NO_HEAD),
    _event(
        "killed_by_signal",
        rf"{_KERNEL}(?:Out of memory|Memory cgroup out of memory): Killed process \d+ \({_SERVER}",
        NO_HEAD,
        aborts=True,
    ),
    _event("killed_by_signal", rf"{_KERNEL}{_SERVER}\S{{0,60}}\[\d+\]: segfault at ", NO_HEAD, aborts=True),
    _event("killed_by_signal", r"\[\S{1,80}:\d+ *:\d+:\d+\] Caught signal \d+ \(", NO_HEAD, aborts=True),  # UCX
    _event("cuda_error", rf"{_KERNEL}NVRM: Xid \(PCI:[\w:.]+\): (?!13,|31,|43,|45,)\d+", NO_HEAD, aborts=True),
    _event("cuda_error", rf"{_KERNEL}nvidia-nvswitch\d*: SXid \(PCI:[\w:.]+\): \d+, Fatal", NO_HEAD, aborts=True),
    _event("cuda_error", r"(?:Warning: )?NPU (?:warning|error), error code is 507\d{3}", FAILED | WARNING, aborts=True),
    _event("cuda_error", r"\[Error\]: The (?:aicore|aivec|vector core) execution ", NO_HEAD, aborts=True),
    _event("grammar_failed", r"Failed to compile grammar for request \S+$", FAILED, "0.28.0", logger=_GRAMMAR),
    _event("grammar_rejected", r"Failed to advance FSM for request ", FAILED, "0.8.0", logger=_GRAMMAR),
    _event("grammar_rejected", r"Unexpected: grammar rejected tokens \[", FAILED, "0.22.0", logger=_GRAMMAR),
    _event(
        "grammar_rejected", r"Unexpected: grammar terminated or rejected draft token", FAILED, "0.32.0", logger=_GRAMMAR
    ),
    _event("nccl_timeout", r"Watchdog caught collective operation timeout", FAILED, logger=_NCCL),
    _event("nccl_timeout", r"Timeout at (?:NCCL work|collective): ", FAILED, logger=_NCCL),
    _event("nccl_timeout", r"Some NCCL operations have failed or timed out", FAILED, logger=_NCCL),
    _event("nccl_timeout", r"ProcessGroupNCCL's watchdog got stuck ", FAILED, logger=_NCCL),
    _event("all_to_all_timeout", r"DeepEP (?:[\w-]{1,20} ){0,6}?timeout\b", NO_HEAD),
    _event("all_to_all_timeout", r"DeepEP error: (?:\w+ ){0,4}timeout|Fault detected in EP all2all ", FAILED),
    _event("all_to_all_timeout", r"\S{0,300}: (?:non-zero status: \d{1,5}:? )?nvshmem [\w ]{1,60} failed", NO_HEAD),
    _event("driver_too_old", _CUDA + r"The NVIDIA driver on your system is too old", FAILED),
    _event("driver_too_old", _CUDA + r"CUDA driver version is insufficient", FAILED),
    _event("driver_mismatch", _CUDA + r"system has unsupported display driver", FAILED),
    _event("driver_mismatch", _CUDA + r"forward compatibility was attempted ", FAILED),
    _event("driver_mismatch", r"(?:[\w.]{0,80}NVMLError_\w+: )?Driver/library version mismatch", FAILED),
    _event("fabric_not_ready", _CUDA + r"system not yet initialized", FAILED),
    _event("cuda_error", rf"(?:CUDA|HIP)(?: driver)? error(?: \d+)?: (?!out of memory|{_DRIVER})", FAILED),
    _event("cuda_error", r"(?:CUBLAS|CUDNN|CUSOLVER|HIPBLAS)_STATUS_|cu[A-Z]\w+ error: ", FAILED),
    _event("cuda_error", r"Triton Error \[\w+\]: (?!out of memory)", FAILED),
    _event("cuda_error", r"NCCL error(?: in)?: ", FAILED),
    _event("cuda_error", rf"(?:{_HSA}) by GPU node|HSA_STATUS_ERROR|{_QUEUE}", FAILED, aborts=True),
    _event("cuda_error", r"Failed to execute the model status=\d", FAILED),  # Neuron
    _event(
        "compiled_while_serving",
        r"(?:Triton|CuTeDSL|TileLang) (?:kernel )?JIT compilation during inference: ",
        WARNING,
        "0.21.0",
        logger="jit_monitor.py",
    ),
    # -- a launch that never becomes a server: lines of its parser, Python, a shell, a container runtime --------------
    _fatal("engine_start_failed", r"(?:vllm(?: serve)?|api_server\.py|__main__\.py): error: ", NO_HEAD),
    _fatal("engine_start_failed", rf"{_SCRIPT}(?:{_EXECUTABLE}): (?:{_NOT_RUN})", NO_HEAD),
    _fatal("engine_start_failed", rf"(?:{_EXECUTABLE}|zsh): command not found(?:: vllm)?$", NO_HEAD),
    _fatal(
        "engine_start_failed",
        r"(?:\S{0,100}/)?(?:nohup|timeout|env|setsid|slurmstepd): .{0,80}\bvllm\b.{0,40}No such file or directory",
        NO_HEAD,
    ),
    _fatal(
        "engine_start_failed",
        r"(?:OCI runtime|docker: Error|Error response) .{0,300}exec: \"?vllm\"?: executable file not found",
        NO_HEAD,
    ),
    _fatal("engine_start_failed", r"exec \S{1,300}: (?:no such file|exec format error|permission denied)", NO_HEAD),
    _fatal(
        "engine_start_failed",
        r"\S{0,300}python[\d.]{0,8}: (?:No module named vllm|Error while finding module specification for 'vllm)",
        NO_HEAD,
    ),
    # -- while the server serves: causes of slowness, and failed requests ---------------------------------------------
    _event("eplb_balance", r"EPLB step: \d+", INFO, "0.9.2", numbers=_BALANCE, logger="eplb_state.py"),
    _event("custom_all_reduce_disabled", r"Custom allreduce is disabled ", UP_TO_WARNING, logger=_COLLECTIVE),
    _event(
        "custom_all_reduce_disabled", r"Custom collectives are disabled ", UP_TO_WARNING, "0.27.0", logger=_COLLECTIVE
    ),
    _event(
        "preemption_v0", r"Sequence group \S+ is preempted by ", UP_TO_WARNING, last="0.10.2", logger="scheduler.py"
    ),
    _event("output_corrupted", _STATS + _CORRUPTED, INFO, "0.11.1", logger="loggers.py"),
    _event("output_corrupted", r"NaNs detected in logits: ", FAILED, "0.32.0"),
    _event(
        "kv_scales_missing",
        r"Using FP8 KV cache but no scaling factors provided",
        WARNING,
        last="0.6.6.post1",
        logger="model_runner.py",
    ),
    _event("kv_scales_missing", r"Using KV cache scaling factor 1\.0 for fp8", WARNING, logger="kv_cache.py"),
    _event("float16_cast", r"Casting torch\.bfloat16 to torch\.float16", WARNING, logger="config.py model.py"),
    _event("kv_transfer_failed", r"NIXL transfer failure: ", ERROR, "0.13.0", logger=_NIXL),
    _event(
        "kv_transfer_failed",
        r"NIXL transfer (?:failed for request|setup/initiation failed) ",
        ERROR,
        "0.11.1",
        "0.12.0",
        logger=_NIXL,
    ),
    _event("kv_transfer_failed", r"pulling kv_caches for .{0,300} failed: ", ERROR, "0.13.0", logger=_MOONCAKE),
    _event("kv_blocks_expired", r"Releasing expired KV blocks for request ", WARNING, "0.10.1", logger=_NIXL),
    _event(
        "kv_blocks_expired",
        r"Request \S+ timed out after \d+ seconds without being sent\.",
        WARNING,
        "0.13.0",
        logger=_MOONCAKE,
    ),
    _event("kv_load_failed", r"Failing \d+ request\(s\) due to KV load failure ", ERROR, "0.12.0", logger=_SCHEDULER),
    _event("kv_load_failed", r"Recovered from KV load failure: ", WARNING, "0.11.1", logger=_SCHEDULER),
    _event(
        "multimodal_cache_miss", r"Expected a cached item for mm_hash=", FAILED, "0.10.1", record_event=_PREPROCESSING
    ),
    _event("multimodal_cache_miss", r"Encoder cache miss for ", FAILED, "0.8.0"),
    _event(_PREPROCESSING, r"Unexpected error pre-processing request ", ERROR, "0.11.1", logger="core.py"),
    _event("scheduler_paused", r"setting pause state to PAUSED_(?:NEW|ALL)$", INFO, "0.21.0", logger=_SCHEDULER),
    _event("scheduler_resumed", r"setting pause state to UNPAUSED$", INFO, "0.21.0", logger=_SCHEDULER),
    # -- planned: shutdowns, elastic expert parallelism, sleep ---------------------------------------------------------
    _event("requests_cut_at_shutdown", r"Error in [\w ]{4,40} stream generator\.$", ERROR, logger=_STREAM),
    _core("requests_cut_at_shutdown", rf"{_STOPS}aborting in-flight requests ", INFO, "0.28.0", numbers=_COUNT),
    _core("drain_started", rf"{_STOPS}draining in-flight requests ", INFO, "0.28.0", numbers=_DRAIN),
    _core("drain_ended", rf"{_STOPS}request processing complete", INFO, "0.28.0"),
    _core("elastic_scaling_started", r"\[Elastic EP\] Received reconfiguration request ", INFO, "0.17.0"),
    _core("elastic_scaling_ended", r"\[Elastic EP\] Scale (?:up|down) completed, ", INFO, "0.17.0"),
    _event("elastic_scaling_ended", r"Scale failed: ", ERROR, "0.17.0", logger="api_router.py"),
    _event("weights_discarded", rf"{_ALLOCATOR}0\.00 GiB is backed up ", INFO, "0.11.1", logger="cumem.py xpumem.py"),
    _event("weights_reloaded", r"Reloading (?:weights inplace|and processing )", INFO, "0.11.1", logger=_RELOAD),
    _event("input_thread_died", r"Exception in thread Thread-\d+ \(process_input_sockets\):", NO_HEAD, "0.8.0"),
)
