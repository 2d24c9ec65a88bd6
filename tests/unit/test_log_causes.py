"""Short logs of which an earlier release told no cause, or a wrong one, each beside a neighbour."""

# ruff: noqa: E501  # real lines of logs

from pathlib import Path

import pytest
from support.reports import judged_logs as judged
from support.rows import each_row

from diag.report.terminal import render

ENGINE = "(EngineCore_DP0 pid=70) ERROR 04-02 18:42:42 [{}] {}"
API = "(APIServer pid=1) "
RAISED = "Traceback (most recent call last):"
FRAME = '  File "/opt/venv/lib/python3.12/site-packages/{}", line 12, in {}'
FREE = (
    "ValueError: Free memory on device cuda:0 (36.75/121.63 GiB) on startup is less than",
    "desired GPU memory utilization (0.85, 103.38 GiB).",
)
V0 = "ERROR 08-16 18:12:26 [engine.py:458] "
TORN = [
    V0 + RAISED,
    V0 + FRAME.format("vllm/engine/multiprocessing/engine.py", "from_engine_args"),
    V0 + "    return x",
]
WRAPPED = (
    "ValueError: The decoder prompt contains a(n) image item with",
    "length 6105, which exceeds the pre-allocated encoder cache size 6084. Please",
    "reduce the input size or increase the encoder cache size by setting",
    "--limit-mm-per-prompt at startup.",
)
PLATFORM = "INFO 05-20 20:12:25 [__init__.py:252] {}"
NUMA = "RuntimeError: NUMA binding was requested, but vLLM could not detect the GPU-to-NUMA topology automatically. Pass --numa-bind-nodes explicitly or disable --numa-bind."
LMCACHE = [
    "[2025-04-02 18:42:41,553] LMCache DEBUG: Evicting 1 chunk from gpu memory (gpu_storage_backend.py:268:lmcache)"
]
WAITS = "(EngineCore_DP0 pid=9) INFO 10-01 14:35:16 [ray_utils.py:240] Waiting for creating a placement group of specs for 10 seconds."
CANCELLED = "slurmstepd: error: *** JOB 1112356 ON n15a CANCELLED AT 2025-10-01T14:35:57 ***"
SHM = "(EngineCore pid=2025) INFO 08-13 11:{}:02 [shm_broadcast.py:802] No available shared memory broadcast block found in 60 seconds."
STOPPED = [
    RAISED,
    FRAME.format("vllm/entrypoints/openai/api_server.py", "signal_handler"),
    '    raise KeyboardInterrupt("terminated")',
]
BEGUN = "INFO 07-31 16:31:38 [api_server.py:1755] vLLM API server version 0.10.0"
BEGUN_0_23 = [f"{API}INFO 06-22 01:20:{second} [utils.py:306]  version 0.23.0" for second in (1, 2)]
DIED = [
    f"{API}ERROR 05-20 20:54:32 [async_llm.py:704] {text}"
    for text in (
        "AsyncLLM output_handler failed.",
        RAISED,
        FRAME.format("vllm/v1/engine/async_llm.py", "output_handler"),
    )
]
CUDA_TAIL = ENGINE.format(
    "core.py:844", "Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda for more information."
)
NO_BLOCKS = ENGINE.format(
    "core.py:1", "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."
)
STARTS = [ENGINE.format("core.py:1", "EngineCore failed to start."), ENGINE.format("core.py:1", RAISED)]
CPU_FRAME = ENGINE.format("core.py:1", FRAME.format("vllm/v1/worker/cpu_worker.py", "determine_available_memory"))
GPU_FRAME = ENGINE.format("core.py:1", FRAME.format("vllm/v1/worker/gpu_worker.py", "determine_available_memory"))
SYMBOL = "OSError: {}: undefined symbol: _ZN3Mki2DlC1ERKNSt7__cxx1112basic_stringIcEEEb"
PROBED = "Warning Unhealthy 2m kubelet Liveness probe failed: HTTP probe failed with statuscode: 404"
ZMQ = "zmq.error.ZMQError: Operation not supported"
SHORT = (
    "ValueError: To serve at least one request with the model's max seq len ({}), ({} GiB KV cache is needed, which is"
    " larger than the available KV cache memory ({} GiB). Based on the available memory, the estimated maximum model"
    " length is {}. Try increasing `gpu_memory_utilization`."
)
WORKER = ENGINE.replace("EngineCore_DP0", "Worker_TP4")
STEP_OF = '  File "{}", line 12, in execute_model'
STEP = ENGINE.format("core.py:1", STEP_OF.format("/opt/lib/python3.12/site-packages/vllm/v1/worker/utils.py"))
NATIVE = [
    f'  File "<unknown>", line 0, in {frame}'
    for frame in ("frob::dispatchMoeGemmSelect<cutlass::Sm90>", "_PyEval_EvalFrameDefault")
]
TRITON = [
    FRAME.format("vllm/v1/attention/backends/mla/triton_mla.py", "forward_mqa"),
    FRAME.format("triton/compiler/code_generator.py", "visit_Assign"),
    "triton.compiler.errors.CompilationError: at 86:24:",
    "        acc = acc * re_scale[:, None]",
    "Cannot make_shape_compatible: incompatible dimensions at index 0: 256 and 512",
]
NO_NAME = "ImportError: cannot import name 'frob' from 'vllm.utils' (/opt/venv/site-packages/vllm/utils.py)"
SERVES = [
    f"{API}INFO 11-20 10:00:00 [api_server.py:1000] vLLM API server version 0.20.0",
    f"{API}INFO:     Application startup complete.",
    f'{API}INFO:     10.0.0.1:5000 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    f"{API}INFO 11-20 10:05:00 [loggers.py:259] Engine 000: Avg prompt throughput: 100.0 tokens/s, Avg generation"
    " throughput: 100.0 tokens/s, Running: 4 reqs, Waiting: 0 reqs, GPU KV cache usage: 3.0%, Prefix cache hit rate: 0.0%",
]
CRASH = "Fatal Python error: Segmentation fault"
CRASH_IN_DECODE = [
    "",
    "Current thread 0x00007f (most recent call first):",
    '  File "/usr/lib/python3/site-packages/flashinfer/decode.py", line 514 in begin_forward',
    '  File "/usr/lib/python3/site-packages/vllm/v1/worker/gpu_model_runner.py", line 149 in execute_model',
]
OTHER_THREAD = [
    *CRASH_IN_DECODE[:1],
    *CRASH_IN_DECODE[2:],
    CRASH_IN_DECODE[1],
    '  File "/usr/lib/python3/site-packages/frob/a.py", line 1 in f',
]
ASSERTED = (
    "python3: /project/lib/Conversion/TritonGPUToLLVM/Utility.cpp:102: void lower(): Assertion `idx < size' failed."
)
UNCAUGHT = "terminate called after throwing an instance of 'c10::DistBackendError'"
WATCHDOG = (
    "[PG ID 2 PG GUID 3 Rank 1] Process group watchdog thread terminated with exception: [Rank 1] Watchdog caught"
    " collective operation timeout: WorkNCCL(SeqNum=4423, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096,"
    " Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
)
NIXL_ERROR = [
    f"(Worker_DP0_EP0 pid=70) ERROR 11-20 10:06:00 [nixl_connector.py:815] {line}"
    for line in (
        "Traceback (most recent call last):",
        '  File "/usr/lib/python3/site-packages/vllm/nixl_connector.py", line 4, in _nixl_handshake',
        "    raise RuntimeError(",
        "RuntimeError: Remote NIXL agent engine ID mismatch. Expected 7f3c-dp0,received 91aa-dp0.",
    )
]
BROKEN_FRAME = [
    "(VllmWorker rank=0 pid=20455) ERROR 07-08 15:41:43 [multiproc_executor.py:487]   File"
    ' "/usr/lib/python3/site-packages/vllm/model_executor/models/deepseek_v2.py", l',
    "ine 743, in __init__",
    "(VllmWorker rank=0 pid=20455) ERROR 07-08 15:41:43 [multiproc_executor.py:487]     assert isinstance(layer,"
    " DeepseekV2DecoderLayer)",
]
BOX = [
    "╭──────────────────── Traceback (most recent call last) ─────────────────────╮",
    "│ /usr/lib/python3/site-packages/vllm/entrypoints/cli/main.py:54 in main     │",
    "│ ❱ 54 │   args.dispatch_function(args)                                      │",
    "╰────────────────────────────────────────────────────────────────────────────╯",
    "ValueError: User-specified max_model_len (131072) is greater than the derived max_model_len"
    " (max_position_embeddings=32768 or model_max_length=None in model's config.json).",
]
REFUSED = f'{API}INFO:     192.168.100.1:39972 - "POST /v1/chat/completions HTTP/1.1" 400 Bad Request'
SERVED = REFUSED.replace("400 Bad Request", "200 OK")
SCRIPT = [
    "INFO 04-02 18:42:40 [utils.py:233] non-default args: {'max_model_len': 16384}",
    "(EngineCore_DP0 pid=70) INFO 04-02 18:42:40 [core.py:107] Initializing a V1 LLM engine (v0.20.0) with config: model='/m'",
    "INFO 04-02 18:42:41 [llm.py:391] Supported tasks: ['generate']",
    "INFO 04-02 18:42:41 [loggers.py:271] Engine 000: Avg prompt throughput: 221.8 tokens/s, Avg generation throughput: 54.7 tokens/s, Running: 51 reqs, Waiting: 0 reqs, GPU KV cache usage: 9.0%, Prefix cache hit rate: 0.0%",
]
BAR = "Processed prompts:   3%|3         | 3/100 [00:23<08:51,  5.48s/it, est. speed input: 688.36 toks/s, output: 27.06 toks/s]"
STEPPED = [
    ENGINE.format("core.py:1", RAISED),
    ENGINE.format("core.py:1", FRAME.format("vllm/v1/core/sched/scheduler.py", "schedule")),
    ENGINE.format("core.py:1", "AssertionError: Only frobs can be preempted"),
    "/usr/lib/python3.12/multiprocessing/resource_tracker.py:279: UserWarning: resource_tracker: There appear to be 1 leaked shared_memory objects to clean up at shutdown",
]
BUDGET = """(EngineCore_DP0 pid=70) INFO 04-02 18:42:30 [core.py:107] Initializing a V1 LLM engine (v0.20.0) with config: model='/m'
(EngineCore_DP0 pid=70) INFO 04-02 18:42:31 [gpu_worker.py:298] Available KV cache memory: {} GiB"""
HARMONY = "openai_harmony.HarmonyError: invalid tiktoken vocab file: could not split on ' ' at line 1"
NEURON = "(EngineCore_DP0 pid=70) WARNING:vllm_neuron.worker.model_runner:Structured outputs are not supported with on-device sampling."
GRAMMAR = ENGINE.format(
    "backend_xgrammar.py:180",
    "Failed to advance FSM for request chatcmpl-9f34f0 for tokens 1576. Please file an issue.",
)
ASCEND = ["INFO 04-02 18:42:40 [__init__.py:46] - ascend -> vllm_ascend:register"]
QUOTED = "RuntimeError: Worker failed with error '{}', please check the stack trace above for the root cause"
NO_TEMPLATE = "ERROR 02-22 18:32:42 [serving_chat.py:147] Error in applying chat template from request: As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat template if the tokenizer does not define one."
UNSERVED = "(APIServer pid=1) ERROR 02-22 18:32:42 [serving_chat.py:147] Error with model error=ErrorInfo(message='The model `gpt-4o` does not exist.', type='NotFoundError', param='model', code=404)"
UNSERVED_404 = '(APIServer pid=1) INFO:     10.0.0.7:51180 - "POST /v1/chat/completions HTTP/1.1" 404 Not Found'
SERVING = ['(APIServer pid=1) INFO:     10.0.0.7:51180 - "POST /v1/chat/completions HTTP/1.1" 200 OK'] * 2
WORKER_FAILED = "RuntimeError: Worker failed with error ''NoneType' object has no attribute 'size'', please check the stack trace above for the root cause"
LORA_FAILS = [
    FRAME.format("vllm/lora/ops/triton_ops/lora_shrink_op.py", "_lora_shrink"),
    "AssertionError: odd frobs of an adapter",
]
NPU_FAILED = "[1028] [2026-05-08 03:20:32:683] torch.distributed: [ERROR] [1130] Find exception, query:build/compiler_depend.ts:61 NPU function error: acl::AclQueryEventRecordedStatus(event_, &currStatus), error code is 507011"
PLUGIN_ARGS = "INFO 04-02 18:42:40 [utils.py:233] non-default args: {'model_tag': 'm', 'decode_context_parallel_size': 8, 'speculative_config': {'method': 'mtp'}}"
BAD_IMAGE = "torch.AcceleratorError: CUDA error: device kernel image is invalid"
NO_IMAGE = "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device"
NO_IMAGE_FRAME = (
    "frame #5: <unknown function> + 0x8e2f6 (0x7e33032b72f6 in /opt/venv/lib/python3.12/site-packages/lmcache/c_ops.so)"
)

INSPECTED = [
    ENGINE.format("registry.py:321", line)
    for line in (
        RAISED,
        FRAME.format("vllm/model_executor/models/registry.py", "_run_in_subprocess"),
        "subprocess.CalledProcessError: Command '['/opt/venv/bin/python', '-m', 'vllm.model_executor.models.registry']'"
        " died with <Signals.SIGTERM: 15>.",
        "The above exception was the direct cause of the following exception:",
        RAISED,
        FRAME.format("vllm/model_executor/models/registry.py", "inspect_model_cls"),
        "RuntimeError: Error raised in subprocess:",
    )
]
PLUGIN = [
    f"ERROR 06-22 01:20:00 [__init__.py:64] {line}"
    for line in (
        "Failed to load plugin frob",
        RAISED,
        FRAME.format("vllm/plugins/__init__.py", "load_plugins_by_group"),
        FRAME.format("frob/base.py", "<module>"),
        "ModuleNotFoundError: No module named 'frob_chain.docstore'",
    )
] + BEGUN_0_23
TRUST = "ValueError: acme/frob Please pass the argument `trust_remote_code=True` to allow custom code to be run."
DOTTED = ENGINE.format(
    "core.py:1", '  File "/root/.cache/huggingface/modules/transformers_modules/{}/p.py", line 46, in f'
)
MODULE = ENGINE.format("core.py:1", "ModuleNotFoundError: No module named 'transformers_modules.Frob-4'")
IN_MODEL = ENGINE.format("core.py:1", FRAME.format("vllm/model_executor/models/llama.py", "__init__"))
NULL = ENGINE.format("core.py:1", "TypeError: unsupported operand type(s) for *: 'int' and 'NoneType'")
PER_LAYER = (
    f"{API}[transformers] Reading global config value for per-layer attribute `head_dim` on a heterogeneous config."
)
SHAPE = ENGINE.format(
    "core.py:1", "AssertionError: Attempted to load weight (torch.Size([512])) into parameter (torch.Size([256]))"
)
NVML = ENGINE.format(
    "core.py:1", 'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":995'
)
FULL = ENGINE.format(
    "core.py:1",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has a total capacity of 79.33 GiB"
    " of which 508.44 MiB is free. Including non-PyTorch memory, this process has 78.33 GiB memory in use.",
)
AUDIO = [
    ENGINE.format("core.py:1", FRAME.format("vllm/model_executor/models/transformers/multimodal.py", "get_max")),
    ENGINE.format("core.py:1", "ValueError: Unable to get max input length from FrobAudioConfig."),
]
LOOP = [
    line
    for minute in range(42, 48)
    for line in (
        f"INFO 04-02 18:{minute}:40 [utils.py:253] non-default args: {{'model': 'acme/frob'}}",
        f"INFO 04-02 18:{minute}:50 [model.py:631] Resolved architecture: LlamaForCausalLM",
        "Entry failed | type=AttributeError: FrobBackend has no attribute all_special_tokens_extended",
    )
]
FIELD = [
    f"ERROR 07-18 01:45:49 [chat_utils.py:1272] {line}"
    for line in (
        RAISED,
        FRAME.format("vllm/entrypoints/chat_utils.py", "apply_mistral_chat_template"),
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ChatCompletionRequest",
        "tools.0.function.description",
        "  Input should be a valid string [type=string_type, input_value=None, input_type=NoneType]",
    )
]


def told(folder: Path, lines: list[str]) -> str:
    """The short report on a log, as one line, from its verdict on."""
    log = folder / "server.log"
    log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return " ".join(render(judged(log)).split())


@pytest.mark.slow
@each_row(
    "lines, says, says_not",
    [
        # errors of vLLM, and no state of a server
        ([GRAMMAR], "grammar of a request's structured output", "neither a start"),
        ([GRAMMAR, NEURON, GRAMMAR], "on_device_sampling_config", "neither a start"),
        ([ENGINE.format("worker.py:1", "The blue widget of rank 3 does not turn")], 'says: "The blue widget of', "neither"),
        ([line.replace("ERROR", "INFO") for line in [GRAMMAR]], "neither a start of vLLM", "grammar"),
        ([SHM.format(27), SHM.format(28)], "ranks of its engine wait for each other", "neither a start"),
        # device, path, frame
        ([*STARTS, CPU_FRAME, NO_BLOCKS], "VLLM_CPU_KVCACHE_SPACE", "other processes on the GPU"),
        ([*STARTS, GPU_FRAME, NO_BLOCKS], "--gpu-memory-utilization", "VLLM_CPU_KVCACHE_SPACE"),
        ([RAISED, FRAME.format("zmq/_future.py", "poll"), ZMQ], "socket that it had closed", "file system"),
        ([RAISED, FRAME.format("zmq/sugar/socket.py", "bind"), ZMQ], "VLLM_RPC_BASE_PATH", "had closed"),
        ([SYMBOL.format("/usr/local/Ascend/nnal/atb/lib/libtbe_adapter.so")], "torch_npu and the libraries", "uv pip"),
        ([SYMBOL.format("/opt/venv/site-packages/vllm/_C.abi3.so")], "uv pip install", "torch_npu"),
        ([HARMONY], "pointer of Git LFS", "--middleware"),
        (["KeyError: 'getpwuid(): uid not found: 1002700000'"], "Set USER=vllm", "or set TORCHINDUCTOR_CACHE_DIR"),
        # the job ended by its owner
        ([BEGUN, *STOPPED, "KeyboardInterrupt: terminated"], "was ended with SIGTERM", "(a signal"),
        ([BEGUN, "Killed"], "mostly by the kernel's OOM killer", "SIGTERM"),
        (
            [*BEGUN_0_23, *(f"(EngineCore pid=3) {text}" for text in (RAISED, FRAME.format("vllm/v1/engine/core.py", "run"), "KeyboardInterrupt")), *(f"{API}{text}" for text in (RAISED, FRAME.format("vllm/v1/engine/utils.py", "wait"), "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"))],
            "the signal SIGINT",
            "dmesg",
        ),
        ([f"0: {WAITS}", f"0: {WAITS}", "srun: Job step aborted", CANCELLED], "Ray had no free GPU", "no state"),
        (["[2026-01-29T04:03:03.675] error: *** JOB 2 ON gpu-110 CANCELLED AT 2026-01-29T04:03:03 DUE to SIGNAL Terminated ***"], "Slurm ended the job", "neither"),
        ([BEGUN, CANCELLED], "scancel", "Mend what that sentence names"),
        # forms
        ([*FREE], "asks for 103.38 GiB", "is less than\"."),
        ([FREE[0], "INFO 04-02 18:42:42 [x.py:1] next"], "is less than", "asks for 103.38"),
        ([f"{V0}size_k must divisible by BLOCK_SIZE_K", *TORN], "BLOCK_SIZE_K, and --tensor-parallel-size", "without an error"),
        ([f"2025-05-30 18:28:27.890 | {text}" for text in (FRAME.format("vllm/model_executor/layers/linear.py", "apply"), "    return x", "RuntimeError: CUDA error: no kernel image is available for execution on the device")], "startup_failed", "CANNOT TELL"),
        ([f"{API}{WRAPPED[0]}", *WRAPPED[1:], ENGINE.format("core.py:1101", "EngineCore encountered a fatal error.")], "--max-num-batched-tokens 6105", "livenessProbe"),
        # a platform, a parent's line, a component's frames; a library's line has the year
        ([PLATFORM.format("No platform detected, vLLM is running on UnspecifiedPlatform")], "runtimeClassName nvidia", "neither a start"),
        ([PLATFORM.format("Automatically detected platform cuda.")], "during a start", "runtimeClassName"),
        ([RAISED, FRAME.format("vllm/utils/numa_utils.py", "_get_numa_node"), NUMA, "srun: error: n1: task 0: Exited with exit code 1"], "Start without --numa-bind", "Slurm ends the others"),
        ([*LMCACHE, *STARTS, ENGINE.format("core.py:1", FRAME.format("lmcache/v1/cache_engine.py", "retrieve")), ENGINE.format("core.py:1", "AttributeError: 'NoneType' object has no attribute 'tensor'")], "another release's scheduler", "kubelet"),
        ([*LMCACHE, *STARTS, NO_BLOCKS], "2025-04-02 18:42:42", "2026-04-02"),
        ([LMCACHE[0].replace("04-02", "03-02"), *STARTS, NO_BLOCKS], "2026-04-02 18:42:42", "2025-04-02"),
        # the engine's lines are missing
        (["(Worker_TP0 pid=160) INFO 05-20 20:54:32 [multiproc_executor.py:775] Parent process exited, terminating worker queues", *DIED], "the engine's own, which name the cause, are missing", "Ruled out"),
        ([CUDA_TAIL, *DIED], "the log begins below the line 'Assertion", "are missing"),
        ([GPU_FRAME, *DIED], "engine_dead", "are missing"),
        # a message goes on below its line, where its sentence was broken or says more; another line does not
        (["AssertionError: Workspace is locked but allocation from", "'turboquant_attn.py:747:_continuation_prefill' requires 8.06 MB,", "current size is 0.76 MB."], "current size is 0.76 MB", "Search vLLM's issues"),
        (["ImportError: The frob backend requires transformers>=5.0.0.dev0", "             for encoder models, but got 4.57.1"], "pip install 'transformers>=5.0.0.dev0'", "Search"),
        (["ValueError: There is no module or parameter named 'image_newline' in", "FrobForCausalLM."], "which FrobForCausalLM in this vLLM", "raised in vLLM's code"),
        (["ValueError: the frob store overflowed.", "Try setting frob_align to 16"], 'The error asks: "Try setting frob_align to 16"', "Search"),
        (["RuntimeError: No GPU available", "root@node:~$ vllm serve"], "sees no GPU", "root@node"),
        # what vLLM logs of a worker ended it, whatever its peers log then; without a PID too; a script's ended no engine
        ([WORKER.format("multiproc_executor.py:751", "ValueError: Frob was not frobnicated"), WORKER.replace("ERROR", "INFO").format("multiproc_executor.py:709", "Parent process exited")], "a failed start", "no state"),
        ([WORKER.format("frob.py:751", "ValueError: Frob was not frobnicated"), WORKER.replace("ERROR", "INFO").format("frob.py:709", "The next file")], "no state of a server", "a failed start"),
        ([line.replace(" pid=70", "") for line in (STEP, ENGINE.format("core.py:1", "TypeError: a frob is not subscriptable"))], "a dead engine", "no state"),
        # an error that only points to another one is told by that
        ([V0 + "ModuleNotFoundError: No module named 'triton.compiler'; 'triton' is not a package", "ValueError: Model architectures ['FrobForCausalLM'] failed to be inspected. Please check the logs"], "a file triton.py", "the import error above"),
        ([V0 + "All is well", "ValueError: Model architectures ['FrobForCausalLM'] failed to be inspected. Please check the logs"], "the import error above", "triton"),
        # a native stack, a fork, a plugin's platform, options that the lines hint at
        ([*STARTS, "!!!!!!! Segfault encountered !!!!!!!", *NATIVE], "Start with --moe-backend triton", "Read the first frames"),
        ([*STARTS, "!!!!!!! Segfault encountered !!!!!!!", *(line.replace("MoeGemm", "Frob") for line in NATIVE)], "A native function crashed", "--moe-backend triton"),
        ([RAISED, STEP_OF.format("/workspace/vllm_hybrid/vllm/v1/worker/gpu_model_runner.py"), "ValueError: odd frobs"], "raised in vllm_hybrid", "--speculative-config"),
        ([RAISED, STEP_OF.format("/workspace/vllm-0.9.1/vllm/v1/worker/gpu_model_runner.py"), "ValueError: odd frobs"], "Upgrade vLLM (", "a fork"),
        ([RAISED, STEP_OF.format("/vllm-workspace/vllm/vllm/v1/worker/gpu_model_runner.py"), "ValueError: odd frobs"], "the plugin's newest release", "a fork"),
        (["Per-position acceptance rate of the draft: 0.8", RAISED, STEP_OF.format("/opt/vllm/v1/worker/gpu_model_runner.py"), "ValueError: odd frobs"], "Start without --speculative-config; start", "--enable-lora"),
        ([RAISED, STEP_OF.format("/workspace/vllm_hybrid/vllm/v1/core/sched/scheduler.py"), "AssertionError: Only frobs can be preempted"], "raised in vllm_hybrid", "a defect of vLLM"),
        ([RAISED, STEP_OF.format("/opt/venv/vllm/v1/core/sched/scheduler.py"), "AssertionError: Only frobs can be preempted"], "a defect of vLLM", "a fork"),
        # a plugin's part, a worker's missing traceback, LoRA in the test run, drafts that a grammar refuses
        ([RAISED, FRAME.format("vllm_ascend/distributed/kv_transfer/kv_p2p/mooncake_connector.py", "start_load_kv"), "IndexError: list index out of range"], "the plugin's KV connector", "vendor's library"),
        ([RAISED, FRAME.format("vllm_ascend/distributed/parallel_state.py", "init_ascend_model_parallel"), "IndexError: list index out of range"], "vendor's library", "KV connector"),
        ([RAISED, FRAME.format("vllm_ascend/utils.py", "_weight_to_nz"), "AttributeError: 'AscendFrobLinear' object has no attribute 'weight'"], "Serve the W8A8 build", "vendor's library"),
        ([RAISED, FRAME.format("vllm_ascend/spec_decode/eagle_proposer.py", "_propose"), "AttributeError: 'Frob' object has no attribute 'frobs'"], "without --speculative-config", "vendor's library"),
        ([*ASCEND, RAISED, FRAME.format("vllm/v1/executor/multiproc_executor.py", "get_response"), WORKER_FAILED], "the worker's own traceback", "the plugin's newest release"),
        ([*ASCEND, RAISED, FRAME.format("vllm/v1/worker/gpu_model_runner.py", "execute_model"), "ValueError: odd frobs"], "the plugin's newest release", "own traceback"),
        ([RAISED, FRAME.format("vllm/v1/worker/gpu_model_runner.py", "profile_run"), *LORA_FAILS], "uses no adapter of yours", "without that adapter"),
        ([RAISED, FRAME.format("vllm/v1/worker/gpu_model_runner.py", "execute_model"), *LORA_FAILS], "without that adapter", "of yours"),
        ([*ASCEND, RAISED, FRAME.format("vllm_ascend/ops/triton/layernorm_gated.py", "fwd"), "    _layer_norm_fwd_kernel[grid](", "TypeError: 'function' object is not subscriptable"], "pip uninstall -y triton triton-ascend", "CPU backend"),
        (["(EngineCore pid=9) INFO 04-02 18:42:40 [tpu_runner.py:210] Init mesh", RAISED, STEP_OF.format("/opt/vllm/v1/core/sched/scheduler.py"), "AttributeError: 'list' object has no attribute 'tolist'"], "the plugin's newest release", "a defect of vLLM"),
        ([*SERVES, ENGINE.format("core.py:1849", "Invocation of add_lora method failed")], "the adapter is not loaded", "CRITICAL"),
        ([*SERVES, ENGINE.format("core.py:1849", "Invocation of add_lora method is slow")], "NO FAILURE FOUND", "not loaded"),
        # the options that a plugin mostly lacks, a package's own kernels, the platform, the backend that raised
        ([PLUGIN_ARGS, RAISED, FRAME.format("vllm_ascend/worker/block_table.py", "compute"), "RuntimeError: odd frobs of a table"], "start without --speculative-config and --decode-context-parallel-size", "--async-scheduling"),
        ([PLUGIN_ARGS.replace("speculative_config", "seed").replace("decode_context_parallel_size", "port"), RAISED, FRAME.format("vllm_ascend/worker/block_table.py", "compute"), "RuntimeError: odd frobs of a table"], "vendor's library", "start without"),
        ([RAISED, FRAME.format("vllm_ascend/worker/block_table.py", "compute"), "RuntimeError: odd frobs of a table"], "the newest release of all three", "start without"),
        ([RAISED, STEP_OF.format("/opt/vllm/v1/worker/gpu_model_runner.py"), NO_IMAGE, NO_IMAGE_FRAME], "the package lmcache has no kernels", "torch or vLLM has no kernels"),
        ([RAISED, STEP_OF.format("/opt/vllm/v1/worker/gpu_model_runner.py"), NO_IMAGE, NO_IMAGE_FRAME.replace("lmcache", "torch")], "torch or vLLM has no kernels", "the package torch"),
        (["INFO 04-02 18:42:40 [x.py:1] quantization=mxfp4", RAISED, STEP_OF.format("/opt/vllm/v1/worker/gpu_model_runner.py"), NO_IMAGE.replace("CUDA", "HIP")], "AMD GPU's architecture", "Blackwell"),
        ([RAISED, FRAME.format("vllm/v1/structured_output/backend_guidance.py", "serialize"), "KeyError: 'triggers'"], "backend xgrammar", "backend guidance"),
        ([RAISED, FRAME.format("vllm/v1/structured_output/backend_xgrammar.py", "compile"), "KeyError: 'triggers'"], "backend guidance", "backend xgrammar"),
        ([RAISED, FRAME.format("kvbm/vllm_integration/connector_leader.py", "build"), "KeyError: 'cmpl-1'"], "the connector that moves", "scheduler"),
        ([PLATFORM.format("Automatically detected platform rocm."), RAISED, STEP_OF.format("/opt/vllm/v1/worker/gpu_model_runner.py"), BAD_IMAGE], "AMD GPU's architecture", "NVIDIA"),
        ([PLATFORM.format("Automatically detected platform cuda."), RAISED, STEP_OF.format("/opt/vllm/v1/worker/gpu_model_runner.py"), BAD_IMAGE], "NVIDIA driver", "AMD"),
        # what only NVIDIA's GPUs have is offered to no other one
        (["(EngineCore pid=7) INFO 07-25 22:35:39 [fp8.py:407] Using TRITON Fp8 MoE backend out of potential backends: ['TRITON', 'MARLIN', 'XPU', 'CPU']", RAISED, STEP_OF.format("/opt/vllm/v1/worker/gpu_model_runner.py"), "NotImplementedError: WFP4A16 MoE is unsupported on SM80."], "--moe-backend marlin", "xpu"),
        ([PLATFORM.format("Automatically detected platform xpu."), RAISED, STEP_OF.format("/opt/vllm/v1/worker/gpu_model_runner.py"), "NotImplementedError: WFP4A16 MoE is unsupported on SM80."], "engine_dead", "marlin"),
        ([PLATFORM.format("Automatically detected platform cuda."), RAISED, STEP_OF.format("/opt/vllm/v1/worker/gpu_model_runner.py"), "NotImplementedError: WFP4A16 MoE is unsupported on SM80."], "--moe-backend marlin", "xpu"),
        # a native crash ends the log of a server at work; work behind it shows that another process crashed
        ([*SERVES, CRASH], "CRITICAL engine_dead", "Read the first frames"),
        ([*SERVES, CRASH, *CRASH_IN_DECODE], "--attention-backend TRITON_ATTN", "Read the first frames"),
        ([*SERVES, CRASH, *OTHER_THREAD], "Read the first frames", "--attention-backend TRITON_ATTN"),
        ([*SERVES, CRASH, *SERVES[-2:], *SERVES[-2:]], "NO FAILURE FOUND", "engine_dead"),
        # the last line that names the cause of a log without a state, and its number
        ([PROBED, "a line", PROBED, "another line"], "statuscode: 404 (line 3)", "(line 1)"),
        # a crash behind a head that no pattern has is no all-clear; a client's words are no crash
        ([*SERVES, f"2026-11-20T10:05:02Z frob[7]: {CRASH}"], "CANNOT TELL", "NO FAILURE FOUND"),
        ([*SERVES, f"{API}INFO 11-20 10:05:02 [logger.py:39] Received request: prompt: {CRASH}"], "NO FAILURE FOUND", "CANNOT TELL"),
        ([*SERVES, "corrupted size vs. prev_size"], "corrupted the process's memory", "NO FAILURE FOUND"),
        ([*SERVES, ASSERTED, "Fatal Python error: Aborted"], "Triton's compiler stopped", "a signal"),
        ([*SERVES, UNCAUGHT, f"  what():  {WATCHDOG}"], "engine_device_fault", "Act on the"),
        ([*SERVES, UNCAUGHT, f"  what():  {WATCHDOG}", ENGINE.format("core.py:1", "EngineCore encountered a fatal error."), ENGINE.format("core.py:1", "RuntimeError: Executor failed.")], "engine_device_fault", "Act on the"),
        ([*SERVES, *(SERVES[3].replace("05:00", f"05:{s}") for s in (10, 20, 30)), SERVES[2], f"[rank1]:[E1120 10:05:32.000000000 ProcessGroupNCCL.cpp:688] {WATCHDOG.partition(': ')[2]}"], "CANNOT TELL", "NO FAILURE FOUND"),
        ([*SERVES, UNCAUGHT, "  what():  [Rank 4] HCCL watchdog thread terminated with exception:", NPU_FAILED], "failed with 507011", "Act on the"),
        ([*SERVES, UNCAUGHT, "  what():  The frob is not there"], "The frob is not there (", "NO FAILURE FOUND"),
        ([*SERVES, UNCAUGHT.partition(" after")[0] + " without an active exception"], "A thread of native code", "every request fails"),
        ([WORKER.format("multiproc_executor.py:146", "Worker proc VllmWorker-1 died unexpectedly, shutting down executor."), SERVES[-1]], "CRITICAL engine_dead", "no incident fits"),
        # a request's error alone is told, with its number, and no failed start
        (["ValueError: 'max_tokens' or 'max_completion_tokens' is too large: 32000. This model's maximum context length is 32768 tokens and your request has 1500 input tokens."], "names a cause, but no state", "startup_failed"),
        (["ValueError: 'max_model_len' is too large: 32000."], "startup_failed", "no state"),
        ([*SERVES, *NIXL_ERROR], "an error of its log: RuntimeError: Remote NIXL", "CRITICAL"),
        # a frame broken within it, and a traceback in a box
        (BROKEN_FRAME, "takes every layer of a DeepSeek model", "no state"),
        (BOX, "Start with --max-model-len 32768", "no state"),
        # the end of a long line decides too
        ([f"{API}RuntimeError: {'the frob is odd, ' * 30}No supported CUDA architectures found for major versions [10]."], "major", "raised"),
        # a log that names a cause and no state is headed by the cause
        (["# ModuleNotFoundError: No module named 'soundfile'"], "names a cause, but no state of a server", "shows no state"),
        (["# The widget of rank 3 does not turn"], "shows no state", "names a cause"),
        # what an engine logs behind the bar of a script, which has no clients; a server's is perhaps a client's
        ([*SCRIPT, f"{BAR}{ENGINE.format('core.py:1', 'EngineCore encountered a fatal error.')}", *STEPPED], "Only frobs can be preempted", "from outside"),
        ([BEGUN, SERVED, *SCRIPT[1:], f"{BAR}{ENGINE.format('core.py:1', 'EngineCore encountered a fatal error.')}", *STEPPED], "from outside", "engine_dead"),
        # an exception's own coded lines, and another start in the log, decide
        ([f"{V0}RuntimeError: The process exits for this inner error, and the current working operator name is Frob.", f"{V0}[PID: 652] Memory_Allocation_Failure(EL0004): Failed to allocate memory."], "memory of an NPU is full", "operator Frob failed"),
        ([*BUDGET.format("-1.27").splitlines(), *STARTS, NO_BLOCKS], "only if nvidia-smi shows no other", "hold memory of the same GPU"),
        ([*BUDGET.format("31.01").splitlines(), *BUDGET.format("-1.27").splitlines(), *STARTS, NO_BLOCKS], "hold memory of the same GPU", "--gpu-memory-utilization 0.95"),
        # the reason below Triton's place, and no backend that no line offers; whose import failed; whose registration
        ([*STARTS, *(ENGINE.format("core.py:1", text) for text in TRITON)], "number format: Cannot make_shape", "FLASHMLA"),
        ([*STARTS, *(ENGINE.format("core.py:1", text) for text in (FRAME.format("frob_omni/models/qwen.py", "<module>"), NO_NAME))], "The package frob_omni was made for another release", "own files"),
        ([*STARTS, *(ENGINE.format("core.py:1", text) for text in (FRAME.format("vllm/worker/utils.py", "<module>"), NO_NAME))], "vLLM's own files are of two", "The package"),
        # the class of an exception within a function
        ([*STARTS, *(ENGINE.format("core.py:1", text) for text in (FRAME.format("frob/compiler.py", "compile"), "frob._mlir._site_initialize.<locals>.FrobError: The pass pipeline has no frobs"))], 'says: "The pass pipeline has no frobs"', "search for"),
        ([*STARTS, *(ENGINE.format("core.py:1", text) for text in (FRAME.format("frob/compiler.py", "compile"), "frob <local> of FrobError: The pass pipeline"))], "EngineCore failed to start", 'says: "The pass'),
        # an alternative that stands alone is no second one
        ([*BEGUN_0_23, f"{API}INFO 06-22 01:20:03 [utils.py:261] non-default args: {{'model': 'm'}}", *(line.replace("04-02 18", "06-22 18") for line in (*STARTS, *(ENGINE.format("core.py:1", text) for text in (FRAME.format("vllm/v1/attention/backends/mla/frob.py", "forward"), "RuntimeError: MLA_SPARSE has odd frobs"))))], "Do now Upgrade vLLM; restart", "f it stays"),
        # a child ended from outside; a plugin that vLLM goes on without, but not that of its device
        (INSPECTED, "ended from outside with SIGTERM", "Mend the import error"),
        ([line.replace("died with <Signals.SIGTERM: 15>", "returned non-zero exit status 1") for line in INSPECTED], "Mend the import error", "from outside"),
        ([*PLUGIN, *(f"{API}{line}" for line in (RAISED, FRAME.format("vllm/entrypoints/openai/api_server.py", "<module>"), TRUST))], "start with --trust-remote-code", "frob_chain"),
        ([*PLUGIN, *(f"{API}{line}" for line in (RAISED, FRAME.format("vllm/entrypoints/openai/api_server.py", "<module>"), "RuntimeError: Failed to infer device type"))], "frob_chain", "no driver"),
        # a folder with a dot, a value of config.json that is null, a config that Transformers gives layer by layer
        ([*STARTS, DOTTED.format("Frob-4.5-VL"), MODULE], "The model's folder Frob-4.5-VL has a dot", "Put the model's folder"),
        ([*STARTS, DOTTED.format("Frob-4"), MODULE], "Put the model's folder", "has a dot"),
        ([*STARTS, IN_MODEL, ENGINE.format("core.py:1", "    self.q_size = self.num_heads * self.head_dim"), NULL], "no number for head_dim", "Sure guess"),
        ([*STARTS, IN_MODEL, ENGINE.format("core.py:1", "    return self.scale(x)"), NULL], "Sure guess", "no number for"),
        ([PER_LAYER, *STARTS, IN_MODEL, SHAPE], "gives the model's head_dim layer by layer", "--hf-overrides"),
        ([*STARTS, IN_MODEL, SHAPE], "--hf-overrides", "layer by layer"),
        # whose socket; whose memory; who forced the backend
        ([*STARTS, GPU_FRAME, ENGINE.format("core.py:1", "zmq.error.ZMQError: Address already in use (addr='ipc:///tmp/lmcache_rpc_port_0')")], "lmcache_rpc_port", "--data-parallel-rpc-port"),
        ([*STARTS, GPU_FRAME, ENGINE.format("core.py:1", "zmq.error.ZMQError: Address already in use (addr='ipc:///tmp/0a-1b')")], "has the local socket /tmp/0a-1b", "lmcache"),
        ([*STARTS, ENGINE.format("core.py:1", FRAME.format("vllm/model_executor/layers/linear.py", "create_weights")), NVML], "the model alone is too large", "lower --gpu-memory-utilization by 0.05"),
        ([*STARTS, GPU_FRAME, NVML], "lower --gpu-memory-utilization by 0.05", "the model alone"),
        ([*STARTS, ENGINE.format("core.py:1", FRAME.format("vllm/v1/sample/ops/topk_topp_sampler.py", "flashinfer_sample")), FULL], "the sampler's memory", "weights were still loading"),
        ([*STARTS, GPU_FRAME, FULL], "the largest step", "sampler"),
        ([SCRIPT[0].replace("16384", "16384, 'model_impl': 'transformers'"), *STARTS, AUDIO[0], AUDIO[1]], "Start without --model-impl", "a defect"),
        ([SCRIPT[0], *STARTS, AUDIO[0], AUDIO[1]], "no code of its own", "--model-impl"),
        # an NPU's advice needs an NPU's words
        ([*LMCACHE, LMCACHE[0].replace("DEBUG: Evicting 1 chunk from gpu memory", "WARNING: Failed to allocate memory for the KV cache."), *STARTS, ENGINE.format("core.py:1", FRAME.format("lmcache/v1/gpu_connector.py", "to_gpu")), ENGINE.format("core.py:1", "AttributeError: 'NoneType' object has no attribute 'tensor'")], "--kv-transfer-config", "NPU"),
        # the line below decides what native code says
        ([*STARTS, UNCAUGHT.replace("DistBackendError", "AcceleratorError"), "[rank2]:[E204 23:13:49.07 ProcessGroupNCCL.cpp:2057] [PG ID 2] Process group watchdog thread", "", "  what():  CUDA error: unspecified launch failure"], "unspecified launch failure", "Act on the 'what():' line"),
        ([*STARTS, UNCAUGHT.replace("DistBackendError", "AcceleratorError")], "Act on the 'what():' line", "launch failure"),
        # of a crash loop without a reason, the exception in the last lines
        (LOOP, 'pip install "transformers<5"', "Roll back"),
        ([line.replace("AttributeError: F", "f") for line in LOOP], "Roll back", "transformers<5"),
        # the request's field that is wrong
        ([REFUSED, *FIELD, REFUSED], "tools.0.function.description is None", "roles and order"),
        # a worker's error that only the engine quotes, by its own words; the server's own line beside refusals
        ([*STARTS, ENGINE.format("core.py:1", FRAME.format("vllm/v1/executor/multiproc_executor.py", "get_response")), ENGINE.format("core.py:1", QUOTED.format("No plugins available for NIXL, cannot start transfers!"))], "finds none of its plugins", "executor"),
        ([*STARTS, ENGINE.format("core.py:1", FRAME.format("vllm/v1/executor/multiproc_executor.py", "get_response")), ENGINE.format("core.py:1", QUOTED.format("the frobs differ in size"))], "the worker's own traceback", "plugins"),
        ([NO_TEMPLATE, REFUSED] * 3, "defines no chat template", "Read the reason in the body"),
        # what the model wrote, and a name that a client asks for; lines behind the last of a start; two layouts in one file
        ([*SERVING, UNSERVED, UNSERVED_404], "GET /v1/models lists", "Mount or create"),
        ([BEGUN, "(CELL HANGS HERE)"], "behind it stands '(CELL HANGS HERE)'", "failed"),
        ([BEGUN], "The last line: ", "behind it"),
        # figures of the error
        ([SHORT.format(250000, "1.8", "0.35", 856)], "A length that fits would serve nobody", "Start with --max-model-len 856"),
        ([SHORT.format(262144, "24.0", "3.18", 34736)], "Start with --max-model-len 34736", "would serve nobody"),
    ],
)  # fmt: skip
def test_what_the_lines_say_is_told(tmp_path: Path, lines: list[str], says: str, says_not: str) -> None:
    text = told(tmp_path, lines)
    assert says in text, text
    assert says_not not in text, text


def test_a_log_without_times_tells_none(tmp_path: Path) -> None:
    text = told(tmp_path, [HARMONY])
    assert "since" not in text and "a failed start Do now" in text
    assert "no line of server.log has a time" in text
    timed = told(tmp_path, [f"(APIServer pid=1) ERROR 08-11 13:56:14 [core.py:1] {FREE[0]} {FREE[1]}"])
    assert "-08-11 13:56:14 UTC" in timed and "has a time" not in timed


@each_row(
    "answers, verdict",
    [
        ([REFUSED] * 3, "WARNING requests_refused"),
        ([REFUSED] * 2, "NO FAILURE FOUND"),
        ([SERVED, *[REFUSED] * 3], "NO FAILURE FOUND"),
        ([REFUSED.replace("POST /v1/chat/completions", "GET /robots.txt")] * 5, "NO FAILURE FOUND"),
    ],
)
def test_a_log_in_which_all_requests_are_refused_is_no_healthy_one(
    tmp_path: Path, answers: list[str], verdict: str
) -> None:
    alive = f'{API}INFO:     192.168.100.1:39972 - "GET /v1/models HTTP/1.1" 200 OK'
    assert told(tmp_path, [alive, *answers]).startswith(verdict)


@each_row("answers, verdict", [(["500 Internal Server Error"], "CANNOT TELL"), (["200 OK"], "NO FAILURE FOUND"), (["200 OK", "500 Internal Server Error"], "CANNOT TELL"), (["200 OK"] * 4 + ["500 Internal Server Error"], "NO FAILURE FOUND")])  # fmt: skip
def test_a_log_whose_last_answers_failed_is_no_all_clear(tmp_path: Path, answers: list[str], verdict: str) -> None:
    text = told(tmp_path, [REFUSED.replace("400 Bad Request", answer) for answer in answers])
    assert text.startswith(verdict)


@each_row("calls, verdict", [(["/wake_up 500", "/is_sleeping 200"], "CANNOT TELL"), (["/wake_up 500", "/wake_up 200"], "NO FAILURE FOUND"), (["/start_profile 500"], "NO FAILURE FOUND")])  # fmt: skip
def test_a_call_that_should_change_the_server_and_failed_is_no_all_clear(
    tmp_path: Path, calls: list[str], verdict: str
) -> None:
    pairs = (call.split() for call in calls)
    lines = (
        SERVED.replace('/v1/chat/completions HTTP/1.1" 200', f'{route} HTTP/1.1" {status}') for route, status in pairs
    )
    text = told(tmp_path, [*SERVES, SERVED, *lines])
    assert text.startswith(verdict)
    assert ("the last call of /wake_up ended with HTTP 5xx" in " ".join(text.split())) == (verdict == "CANNOT TELL")


FULL_AT_WORK = (
    "(Worker_TP1 pid=510) (Worker_TP3 pid=512) ERROR 11-20 10:05:09 [multiproc_executor.py:932]"
    " torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB."
)
LOADED = "(Worker_TP3 pid=512) INFO 11-20 10:00:09 [gpu_model_runner.py:1985] Loading model from scratch..."
HEALTH = f'{API}INFO:     172.18.0.1:48712 - "GET /health HTTP/1.1" {{}}'
DEAD, ALIVE = HEALTH.format("503 Service Unavailable"), HEALTH.format("200 OK")


@pytest.mark.slow
@each_row(
    "lines, verdict",
    [
        ([FULL_AT_WORK, DEAD], "CRITICAL gpu_out_of_memory"),
        ([*SERVES, FULL_AT_WORK], "NO FAILURE FOUND"),  # of an earlier server's worker
        ([SERVES[0], LOADED, *SERVES[1:], FULL_AT_WORK], "CANNOT TELL"),
        ([FULL_AT_WORK], "CANNOT TELL"),
        ([DEAD], "CANNOT TELL"),
        ([FULL_AT_WORK, SERVED], "NO FAILURE FOUND"),
        ([FULL_AT_WORK, ALIVE], "NO FAILURE FOUND"),
        ([DEAD, ALIVE], "NO FAILURE FOUND"),
        ([DEAD.replace("/health", "/frob")], "NO FAILURE FOUND"),
    ],
)
def test_a_worker_s_last_exception_and_a_503_at_health_are_no_all_clear(
    tmp_path: Path, lines: list[str], verdict: str
) -> None:
    cut = [] if lines[0] == SERVES[0] else SERVES[2:]
    assert told(tmp_path, [*cut, *lines]).startswith(verdict)


WOKEN = [
    SERVED.replace('/v1/chat/completions HTTP/1.1" 200 OK', '/wake_up HTTP/1.1" {}'),
    f"{API}Exception: Call to wake_up method failed: CUDA Error: {{}} at /w/csrc/cumem_allocator.cpp:175",
]

FAILED_IN = [f"{API}{line}" for line in (RAISED, FRAME.format("vllm/v1/engine/core_client.py", "call_utility"))]


@each_row(
    "failures, says, says_not",
    [
        (["out of memory", "invalid argument"], "another process took the GPU memory", "Install vLLM"),
        (["out of memory", "", "invalid argument"], "Install vLLM", "another process took"),
    ],
)
def test_the_first_failure_of_a_call_is_its_cause(
    tmp_path: Path, failures: list[str], says: str, says_not: str
) -> None:
    lines = [
        line
        for failure in failures
        for line in (
            [WOKEN[0].format("500 Internal Server Error"), *FAILED_IN, WOKEN[1].format(failure)]
            if failure
            else [WOKEN[0].format("200 OK")]
        )
    ]
    text = told(tmp_path, [*SERVES, SERVED, *lines])
    assert text.startswith("CANNOT TELL") and says in text and says_not not in text, text


@each_row("later, ends", [(2, "with a server at work, behind the failed start"), (1, "with a failed start")])
def test_a_server_that_works_behind_the_failed_start_of_another_one_is_told(
    tmp_path: Path, later: int, ends: str
) -> None:
    failed = [BEGUN.replace("07-31", "04-02"), *STARTS, GPU_FRAME, NO_BLOCKS]
    text = told(tmp_path, [*failed, *[SERVED.removeprefix(API)] * later])
    assert text.startswith("CRITICAL") and f"Ends {ends}" in text


NINJA = (
    "subprocess.CalledProcessError: Command '['ninja', '-v', '-C', '/root/.cache/flashinfer/86/cached_ops', '-f',"
    " '/root/.cache/flashinfer/86/cached_ops/sampling/build.ninja']' returned non-zero exit status 1."
)
NVCC = "nvcc fatal   : Unknown option '-static-global-template-stub=false'"
HSA = (
    f":0:/{'longer_pathname_' * 6}/rocvirtual.cpp:3587: 1029384123 us: Callback: Queue 0x7f2 aborting with error :"
    " HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resulted in a hardware exception. code: 0x1016"
)
DIED_QUIETLY = "(EngineCore pid=1) ERROR 07-30 04:19:03 [multiproc_executor.py:311] Worker proc VllmWorker-6 died unexpectedly, shutting down executor."
EXITED = "Jan 28 10:40:08 localhost systemd[1]: vllm.service: Main process exited, code={}"
V0_FAILED = "Jan 28 10:40:07 localhost bash[3]: RuntimeError: Engine process failed to start. See stack trace for the root cause."


@pytest.mark.slow
@each_row(
    "lines, quoted, quotes_not",
    [
        # the compiler's own line below the wrapper, the library's above it, each with its number
        ([*STARTS, GPU_FRAME, *(ENGINE.format("core.py:1", text) for text in (NINJA, "[1/3] /usr/bin/nvcc -c x.cu", NVCC))], "Sure named by the error (line 6)", "Log subprocess"),
        ([HSA, DIED_QUIETLY], "aborting with error : HSA_STATUS_ERROR_EXCEPTION", "Log Worker proc"),
        ([HSA, DIED_QUIETLY, "(EngineCore pid=1) ERROR 07-30 04:19:04 [dump_input.py:72] Dumping input data with config: attention_backend=ROCM_AITER_MLA"], "TRITON_MLA", "dmesg -T | grep -i amdgpu: reset"),
        # one that names its cause stays, also far behind in its own line, and beside an information
        ([f"RuntimeError: Unexpected error from cudaGetDeviceCount(). {'Did you run some cuda functions? ' * 3}Error 803: system has unsupported display driver / cuda driver combination"], "Log RuntimeError: Unexpected error", "Log …"),
        (["(Worker_TP0 pid=160) INFO 05-20 20:54:32 [multiproc_executor.py:775] Parent process exited, terminating worker queues", *DIED], "Log AsyncLLM output_handler failed", "Log Parent"),
        ([HSA, *STARTS, GPU_FRAME, NO_BLOCKS], "Log ValueError: No available memory", "HSA_STATUS"),
        # an announced text without a traceback of its own has its number too
        ([f"{V0}size_k must divisible by BLOCK_SIZE_K", *TORN], "Sure named by the error (line 1)", "error Note"),
        # systemd's status 1 is the consequence; a signal is not
        ([V0_FAILED, EXITED.format("exited, status=1/FAILURE")], "Log RuntimeError: Engine process failed to start.", "Log Jan"),
        ([V0_FAILED, EXITED.format("killed, status=9/KILL")], "Log Jan 28 10:40:08 localhost systemd[1]", "Log Runtime"),
    ],
)  # fmt: skip
def test_the_line_that_names_the_cause_is_quoted(
    tmp_path: Path, lines: list[str], quoted: str, quotes_not: str
) -> None:
    text = told(tmp_path, lines)
    assert quoted in text, text
    assert quotes_not not in text, text


@each_row("thread, verdict", [("process_input_sockets", "CRITICAL"), ("_report_usage_worker", "NO FAILURE FOUND")])
def test_an_engine_whose_input_thread_ended_serves_nobody(tmp_path: Path, thread: str, verdict: str) -> None:
    lines = (
        f"Exception in thread Thread-3 ({thread}):",
        RAISED,
        FRAME.format("vllm/v1/engine/core.py", thread),
        "ValueError: odd",
    )
    assert told(tmp_path, [SERVED, *(f"(EngineCore_DP0 pid=245) {line}" for line in lines)]).startswith(verdict)


@each_row(
    "answers, is_told",
    [
        (["500 Internal Server Error", "200 OK"], True),
        (["500 Internal Server Error"] * 17, True),
        (["200 OK", "200 OK"], False),
    ],
)
def test_a_failed_answer_without_an_exception_says_how_to_see_it(
    tmp_path: Path, answers: list[str], is_told: bool
) -> None:
    text = told(tmp_path, [REFUSED.replace("400 Bad Request", answer) for answer in answers])
    assert ("--log-error-stack" in text) is is_told, text
