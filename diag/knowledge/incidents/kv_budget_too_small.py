"""A low --gpu-memory-utilization leaves GPU memory unused, and the load does not need it."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged
from diag.knowledge import shared_fixes

CONSERVING_MEMORY = "https://docs.vllm.ai/en/latest/configuration/conserving_memory.html"
PREFIX_CACHING = "https://docs.vllm.ai/en/latest/features/automatic_prefix_caching.html"

incident = Incident(
    id="kv_budget_too_small",
    title="GPU memory left unused",
    severity="info",
    per=("instance",),
    live_window="5m",
    hold="12h",  # through the busiest hour of a day: a quiet night proves nothing
    cause="""
        vLLM allocates its share of the GPU at start-up and leaves the rest to other processes, but there are none. The
        requests fill less than half of the KV cache, so none of them waits for memory. The prefix cache would benefit:
        blocks that only the prefix cache holds count as free and are evicted first.
    """,
    impact="none for users; paid-for GPU memory stays unused",
    symptoms=(
        signals.kv_cache_usage_peak.below(0.5, judged("twice as many of these requests would fit")),
        signals.running_value("gpu_memory_utilization").below(
            0.85, documented("the default is 0.9 or 0.92", CONSERVING_MEMORY)
        ),
        signals.gpu_memory_free_share.above(0.15, judged("CUDA graphs, NCCL and fragmentation need less")),
        signals.requests_finished.at_least(10, judged("a server without traffic shows nothing about its load")),
    ),
    supports=(
        signals.prefix_cache_hit_rate.below(0.6, judged("a larger KV cache keeps more prefixes if prompts share any")),
    ),
    looks_like=(
        LookAlike(
            "a quiet hour",
            distinguish="The KV cache is sized for the busiest hour: check its peak usage in that hour first.",
            requires=signals.requests_running_median.at_least(
                1, judged("a server that idles between requests is a different incident (engine_underfed)")
            ),
        ),
        LookAlike(
            "gpu_memory_contended",
            distinguish="The share is low because other processes need the rest.",
            requires=signals.serving_gpu_memory_of_others.at_most(
                0.02, judged("memory that another process has freed will be allocated again")
            ),
        ),
        LookAlike(
            "a KV cache of a fixed size",
            distinguish="Its size is pinned by --num-gpu-blocks-override or --kv-cache-memory-bytes, whatever the "
            "share.",
            requires=signals.settings_that_pin_kv_cache.at_most(
                0, documented("both take precedence over --gpu-memory-utilization", CONSERVING_MEMORY)
            ),
        ),
    ),
    fixes=(
        shared_fixes.USE_FREE_MEMORY._replace(
            change=f"Give vLLM the free memory of the GPU, except for a reserve of {100 * signals.RESERVE:g} %: the "
            "prefix cache keeps more, and a busier day has room.",
            effect=f"GPU memory free falls to {100 * signals.RESERVE:g} %; the prefix cache hit rate rises where "
            "prompts share a prefix",
            only_if=(),
            why=documented("cached blocks are kept until their memory is needed", PREFIX_CACHING),
        ),
        Fix.without_restart(
            change="Or use the unused memory otherwise: run a second, smaller model on this GPU, or move this model "
            "to a smaller GPU, if usage in its busiest hour is the same.",
            effect="GPU memory free falls; nothing changes for the users of this server",
            why=judged("half of the KV cache is never used"),
        ),
    ),
    mitigate=("No immediate mitigation is needed.",),
    hand_over=("KV cache usage (peak) over the last week, and what else is planned for this GPU",),
    do_not=("Do not lower --gpu-memory-utilization further: the KV cache is the first to shrink.",),
)
