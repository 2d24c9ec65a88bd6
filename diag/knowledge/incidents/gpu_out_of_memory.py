"""Memory did not suffice: at start, in capture, in warm-up or under load; the log says how much was missing."""

from diag.incident import Fix, Incident, LookAlike, documented, judged, measured, reported
from diag.knowledge.shared_fixes import CONSERVING_MEMORY, FP8_HARDWARE
from diag.signals import (
    context_that_fits,
    half_of_what_is_captured,
    happened,
    host_memory_of_others,
    out_of_memory,
    running_value,
    switched_off,
    utilization_that_fits,
    utilization_with_room,
)

SAID = judged("the log's own words decide which of these it was")
SIZED = documented("vLLM refuses a largest size beside sizes that contradict it", CONSERVING_MEMORY)

incident = Incident(
    id="gpu_out_of_memory",
    title="The GPU's memory does not suffice",
    severity="critical",
    per=("instance",),
    hold="0s",
    cause="""
        vLLM plans with --gpu-memory-utilization of the whole GPU: weights, activations at the largest step, CUDA graphs
        (inside that share since 0.20, beside it before), and what is left becomes the KV pool. One of them did not fit.
    """,
    impact="the engine does not start, or dies under load with every request on it",
    symptoms=(out_of_memory.at_least(1, measured("the log's own words, with the numbers", "fail_max_model_len")),),
    supports=(host_memory_of_others.above(0.02, judged("what others hold is missing here")),),
    looks_like=(
        LookAlike(
            "kv_pool_saturated",
            distinguish="A full KV pool makes requests wait; it is no lack of memory of the process.",
        ),
        LookAlike("gpu_memory_contended", distinguish="There, another process holds the memory that is missing."),
    ),
    explains=("startup_failed",),
    fixes=(
        Fix(
            flag="--max-model-len",
            value=context_that_fits,
            direction="lower",
            change="Serve no longer contexts than the KV pool can hold.",
            effect="the engine starts",
            only_if=(happened("max_model_len_exceeds_kv_cache").at_least(1, SAID),),
            risk="longer requests are refused",
            rollback="the old length again, and restart",
            why=documented("the context length sets what the KV pool has to hold", CONSERVING_MEMORY),
        ),
        Fix(
            flag="--gpu-memory-utilization",
            value=utilization_that_fits,
            rounding="hundredth_below",
            least=0.05,
            direction="lower",
            change="Plan with the memory that is free, or first end the process that holds the rest.",
            effect="the engine starts; the KV pool shrinks by as much",
            only_if=(happened("free_memory_below_requested").at_least(1, SAID), switched_off("kv_cache_memory_bytes")),
            risk="fewer requests at once",
            rollback="the old share again, and restart",
            why=reported("free 67.24 of 79.25 GiB: 0.84", "https://github.com/ovg-project/kvcached/issues/110"),
        ),
        Fix(
            flag="--gpu-memory-utilization",
            value=utilization_with_room,
            rounding="hundredth_below",
            least=0.05,
            direction="lower",
            change="Leave room beside vLLM's share for what was wanted.",
            effect="the allocation that failed fits",
            only_if=(happened("cuda_out_of_memory").at_least(1, SAID), switched_off("kv_cache_memory_bytes")),
            risk="fewer requests at once",
            rollback="the old share again, and restart",
            why=reported("136 MiB wanted, 120.88 free at 0.98", "https://github.com/vllm-project/vllm/issues/57475"),
        ),
        Fix(
            flag="--max-cudagraph-capture-size",
            value=half_of_what_is_captured,
            direction="lower",
            change="Where it happened in the capture: capture graphs up to half the size, fewer of them.",
            effect="the graphs take a fraction of their memory",
            only_if=(
                happened("cuda_out_of_memory").at_least(1, SAID),
                switched_off("enforce_eager"),
                running_value("cudagraph_capture_sizes").at_most(0, SIZED),
                running_value("compilation_config").at_most(0, SIZED),
            ),
            risk="batches above it run without graphs",
            rollback="remove the flag and restart",
            why=documented("graphs cost memory for each size", CONSERVING_MEMORY),
        ),
        Fix(
            flag="--kv-cache-dtype",
            value="fp8",
            change="Where no KV memory is left: store it in FP8, use more GPUs, or quantize the weights.",
            effect="the engine starts",
            only_if=(happened("no_kv_cache_memory").at_least(1, SAID), FP8_HARDWARE),
            risk="a small loss of accuracy; the attention backend must support it",
            rollback="--kv-cache-dtype auto and restart",
            why=documented("what reduces memory", CONSERVING_MEMORY),
        ),
    ),
    mitigate=(
        "Where it died under load: restart it with the lower value that `diag doctor` computes, behind a rate limit.",
        "Where it never started: the old configuration still works, roll back to it.",
    ),
    hand_over=("the line of the log with its numbers, `nvidia-smi` at that moment, and the launch command",),
    do_not=("Do not raise --gpu-memory-utilization for an out of memory outside of the KV pool: it takes more away.",),
)
