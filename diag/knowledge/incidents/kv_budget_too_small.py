"""A low --gpu-memory-utilization leaves memory of the GPU to nobody, and the load does not miss it either."""

from diag.incident import Fix, Incident, LookAlike, documented, judged
from diag.signals import (
    gpu_memory_free_share,
    kv_cache_usage_peak,
    memory_of_strangers,
    pool_by_order,
    prefix_cache_hit_ratio,
    requests_finished,
    requests_running_median,
    running_value,
    utilization_that_uses_free_memory,
)

CONSERVING_MEMORY = "https://docs.vllm.ai/en/latest/configuration/conserving_memory.html"
PREFIX_CACHING = "https://docs.vllm.ai/en/latest/features/automatic_prefix_caching.html"

incident = Incident(
    id="kv_budget_too_small",
    title="GPU memory is paid for and left to nobody",
    severity="info",
    per=("instance",),
    hold="12h",  # a quiet night says nothing: it has to hold through the busiest hour of a day
    cause="""
        vLLM takes its share of the GPU at start and leaves the rest to others, of whom there are none. The requests
        that come fill less than half of the pool, so none of them waits for what is missing. Prefixes that could be
        kept in it do: blocks that only the prefix cache holds count as free, and are the first to go.
    """,
    impact="none: memory that is paid for is used by nobody",
    symptoms=(
        kv_cache_usage_peak.below(0.5, judged("twice these requests would fit")),
        running_value("gpu_memory_utilization").below(0.85, documented("0.9 or 0.92 by default", CONSERVING_MEMORY)),
        gpu_memory_free_share.above(0.15, judged("graphs, NCCL and fragmentation need less")),
        requests_finished.at_least(10, judged("a server that nobody uses tells nothing about its load")),
    ),
    supports=(prefix_cache_hit_ratio.below(0.6, judged("a larger pool keeps more prefixes, where some are shared")),),
    looks_like=(
        LookAlike(
            "a quiet hour",
            distinguish="The pool is there for the busiest hour: look at the peak of that one first.",
            requires=requests_running_median.at_least(1, judged("a server that idles in between is underfed")),
        ),
        LookAlike(
            "gpu_memory_contended",
            distinguish="There, the share is low because others need the rest.",
            requires=memory_of_strangers.at_most(0.02, judged("what another program frees it will want again")),
        ),
        LookAlike(
            "a pool of a fixed size",
            distinguish="--num-gpu-blocks-override or --kv-cache-memory-bytes sets it, whatever the share.",
            requires=pool_by_order.at_most(0, documented("both take precedence", CONSERVING_MEMORY)),
        ),
    ),
    fixes=(
        Fix(
            flag="--gpu-memory-utilization",
            value=utilization_that_uses_free_memory,
            rounding="hundredth_below",
            least=0.05,
            most=0.95,
            direction="raise",
            change="Give vLLM the memory that is free on the GPU, but for 5 % of it: the prefix cache keeps more, and "
            "a busier day has room.",
            effect="GPU memory free falls to 0.05; the prefix cache hit ratio rises where prompts share a beginning",
            risk="out of memory at start-up or under load when something else uses the GPU",
            rollback="the old share again, and restart",
            why=documented("cached blocks are kept until their room is needed", PREFIX_CACHING),
        ),
        Fix(
            change="Or use what is left for something else: a second, smaller model beside it, or a smaller GPU for "
            "this one, if its busiest hour looks the same.",
            effect="GPU memory free falls; nothing changes for this server's users",
            restart=False,
            why=judged("half of the pool is never used"),
        ),
    ),
    mitigate=("Nothing needs relief.",),
    hand_over=("KV cache usage (peak) over the last week, and what else is planned for this GPU",),
    do_not=("Do not lower --gpu-memory-utilization to tidy up: the pool shrinks first.",),
)
