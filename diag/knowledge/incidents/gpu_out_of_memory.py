"""GPU memory ran out at start-up, in CUDA-graph capture, in warm-up or under load; the log has the numbers."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, measured, reported
from diag.knowledge import shared_fixes

SAID = judged("the line in the log decides which of these cases it is")
SIZED = documented(
    "vLLM refuses a maximum capture size that conflicts with explicit capture sizes", shared_fixes.CONSERVING_MEMORY
)
TOO_LONG = signals.logged("max_model_len_exceeds_kv_cache").at_least(1, SAID)
FAILED = signals.logged("cuda_out_of_memory").at_least(1, SAID)
UNPINNED = Fix(
    flag="--num-gpu-blocks-override",
    change="Let vLLM size the KV cache from free memory: its size is pinned by this flag.",
    effect="the KV cache grows to what --gpu-memory-utilization allows, and the engine starts if that suffices",
    only_if=(TOO_LONG, signals.given("num_gpu_blocks_override")),
    risk="none known: vLLM profiles the memory at start-up and refuses to start with what does not fit",
    rollback="set the override again",
    why=documented("unset, vLLM takes the number of blocks from its memory profile", shared_fixes.CONSERVING_MEMORY),
)
SMALLER_SHARE = Fix(
    flag="--gpu-memory-utilization",
    value=signals.utilization_that_fits,
    rounding="hundredth_below",
    least=signals.LEAST_SHARE,
    direction="lower",
    change="Plan with the memory that is free, or first end the process that holds the rest.",
    effect="the engine starts; the KV cache shrinks by the same amount",
    only_if=(signals.logged("free_memory_below_requested").at_least(1, SAID),),
    risk="fewer requests run concurrently",
    rollback="set the old value again",
    why=reported("67.24 of 79.25 GiB were free: 0.84 fits", "https://github.com/ovg-project/kvcached/issues/110"),
)

incident = Incident(
    id="gpu_out_of_memory",
    title="GPU out of memory",
    severity="critical",
    outage=True,
    per=("instance",),
    window="1m",
    hold="0s",
    immediate="the line in the log is the failure itself, written once: it leaves the window before a `for` is over",
    cause="""
        vLLM plans with the share --gpu-memory-utilization of the whole GPU: weights, activations of the largest step
        and CUDA graphs (inside that share since 0.20, outside of it before); the rest becomes the KV cache. One of
        these did not fit.
    """,
    impact="the engine does not start, or it dies under load and all its requests fail",
    symptoms=(
        signals.out_of_memory.at_least(1, measured("vLLM logs the error with its numbers", "fail_max_model_len")),
    ),
    supports=(signals.host_memory_of_others.above(0.02, judged("memory that other processes hold is missing here")),),
    looks_like=(
        LookAlike(
            "kv_pool_saturated",
            distinguish="A full KV cache makes requests queue; the process itself does not lack memory.",
        ),
        LookAlike("gpu_memory_contended", distinguish="Another process holds the memory that is missing."),
    ),
    explains=("startup_failed", "crash_loop", "engine_dead", "engine_stalled", "contract_breached"),
    quotes=signals.quoted_error,
    fixes=(
        UNPINNED,
        UNPINNED._replace(
            flag="--kv-cache-memory-bytes",
            only_if=(TOO_LONG, signals.given("kv_cache_memory_bytes")),
            rollback="set the size again",
            why=documented("it overrides --gpu-memory-utilization", shared_fixes.CONSERVING_MEMORY),
        ),
        Fix(
            flag="--max-model-len",
            value=signals.context_that_fits,
            direction="lower",
            change="Limit the context length to what fits the KV cache.",
            effect="the engine starts",
            only_if=(TOO_LONG,),
            risk="longer requests are rejected",
            rollback="set the old value again",
            why=documented(
                "the KV cache has to hold at least one request of the maximum context length",
                shared_fixes.CONSERVING_MEMORY,
            ),
        ),
        SMALLER_SHARE,
        SMALLER_SHARE._replace(
            value=signals.utilization_with_room,
            change="Leave room outside vLLM's share for the allocation that failed.",
            effect="the allocation that failed fits",
            only_if=(FAILED, signals.not_set("kv_cache_memory_bytes")),
            why=reported(
                "136 MiB were requested and 120.88 MiB free at 0.98",
                "https://github.com/vllm-project/vllm/issues/57475",
            ),
        ),
        Fix(
            flag="--max-cudagraph-capture-size",
            value=signals.half_of_default_capture_size,
            direction="lower",
            change="If it happened during capture, capture CUDA graphs only up to half the size.",
            effect="the CUDA graphs take a fraction of the memory",
            only_if=(
                FAILED,
                signals.not_set("enforce_eager"),
                signals.running_value("cudagraph_capture_sizes").at_most(0, SIZED),
                signals.running_value("compilation_config").at_most(0, SIZED),
            ),
            risk="batches above that size run without CUDA graphs",
            rollback="remove the flag",
            why=documented("every captured size costs memory", shared_fixes.CONSERVING_MEMORY),
        ),
        Fix(
            flag="--kv-cache-dtype",
            value="fp8",
            change="If no memory is left for the KV cache, store it in FP8, use more GPUs, or quantize the weights.",
            effect="the engine starts",
            only_if=(signals.logged("no_kv_cache_memory").at_least(1, SAID), shared_fixes.FP8_HARDWARE),
            risk="a small loss of accuracy; the attention backend must support FP8",
            rollback="--kv-cache-dtype auto",
            why=documented("these reduce the memory that vLLM needs", shared_fixes.CONSERVING_MEMORY),
        ),
        Fix.without_restart(
            change="Estimate before the next start what fits: the longest context, the number of requests, and what "
            "makes room.",
            command="diag budget {launch} --log {log}",
            effect="each part of the GPU memory, computed and as it was logged",
            why=judged("an estimate takes seconds, a start minutes"),
        ),
    ),
    operations=("log", "rollback", "restart"),
    mitigate=(
        "Restart it and limit concurrency at the gateway; if it never served, roll back to the last configuration that "
        "started.",
    ),
    hand_over=("the log line with its numbers, the output of `nvidia-smi` at that moment, and the launch command",),
    do_not=(
        "Do not raise --gpu-memory-utilization if an allocation outside the KV cache failed: it leaves even less room.",
    ),
)
