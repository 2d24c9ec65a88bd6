"""The fixes that our incidents share."""

from diag.core.incident import Fix, documented, judged, measured
from diag.knowledge.signals.engine import (
    gpu_compute_capability_has_fp8,
    gpu_memory_free_share,
    kv_bytes_with_free_memory,
    kv_cache_is_fp8,
    replicas_that_hold_all,
    unless_unset,
    utilization_that_uses_free_memory,
)
from diag.knowledge.signals.gpu import host_memory_of_others

QUANTIZED_KV = "https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache.html"
CONSERVING_MEMORY = "https://docs.vllm.ai/en/latest/configuration/conserving_memory.html"

FP8_HARDWARE = gpu_compute_capability_has_fp8.at_least(
    1, documented("needs hardware FP8 and an attention backend that reads it", QUANTIZED_KV)
)
MORE_KV_CAPACITY = (
    Fix(
        flag="--num-gpu-blocks-override",
        change="Let vLLM size the KV pool from the memory it has: the pool is as small as it is by order.",
        effect="the KV pool grows to what --gpu-memory-utilization allows; waiting and preemptions fall",
        only_if=(
            unless_unset("num_gpu_blocks_override").at_least(1, documented("unset by default", CONSERVING_MEMORY)),
        ),
        risk="none known: vLLM profiles the memory at start and refuses what does not fit",
        rollback="set the override again and restart",
        why=measured(
            "a pool four times as large: 0 preemptions, TTFT 4.5 -> 0.025 s, 1.5 to 2.3 times the output",
            "kv_cascade_base",
        ),
    ),
    Fix(
        flag="--gpu-memory-utilization",
        value=utilization_that_uses_free_memory,
        rounding="hundredth_below",
        least=0.05,
        most=0.95,
        direction="raise",
        change="Give vLLM the memory that is free on the GPU, but for 5 % of it.",
        effect="the KV pool grows by the memory gained",
        only_if=(
            gpu_memory_free_share.above(0.06, judged("leave room for graphs, NCCL and fragmentation")),
            host_memory_of_others.at_most(0.02, judged("what another program frees it will want again")),
            unless_unset("kv_cache_memory_bytes").at_most(0, documented("overrides the share", CONSERVING_MEMORY)),
        ),
        risk="out of memory at start-up or under load when something else uses the GPU",
        rollback="set the old value again and restart",
        why=documented("the fraction of GPU memory for the model executor", CONSERVING_MEMORY),
    ),
    Fix(
        flag="--kv-cache-memory-bytes",
        value=kv_bytes_with_free_memory,
        direction="raise",
        change="Give the KV pool the memory that is free on the GPU, but for 5 % of it: its size is set by order.",
        effect="the KV pool grows by the memory gained",
        only_if=(
            unless_unset("kv_cache_memory_bytes").at_least(1, documented("unset by default", CONSERVING_MEMORY)),
            gpu_memory_free_share.above(0.06, judged("leave room for graphs, NCCL and fragmentation")),
            host_memory_of_others.at_most(0.02, judged("what another program frees it will want again")),
        ),
        risk="out of memory at start-up or under load when something else uses the GPU",
        rollback="set the old size again and restart",
        why=documented("the size of the KV cache of each GPU, in bytes", CONSERVING_MEMORY),
    ),
    Fix(
        flag="--kv-cache-dtype",
        value="fp8",
        change="Store the KV cache in FP8: the same memory holds about twice the tokens.",
        effect="requests the KV pool holds double; waiting and preemptions fall",
        only_if=(
            FP8_HARDWARE,
            kv_cache_is_fp8.at_most(0, documented("nothing is gained twice", QUANTIZED_KV)),
        ),
        risk="a small loss of accuracy: evaluate your model; the attention backend must support it",
        rollback="--kv-cache-dtype auto and restart",
        why=documented("half the bytes per token of a 16-bit cache", QUANTIZED_KV),
    ),
    Fix(
        change="Run {value} replicas of it: each request then meets a pool that is less contended.",
        value=replicas_that_hold_all,
        rounding="up",
        least=2,
        effect="waiting and KV usage fall on every replica",
        restart=False,
        why=measured("capacity is the one real cure", "kv_cascade_base"),
    ),
)
