"""The KV pool is full and requests wait for room in it; nothing is evicted, so no work is lost."""

from diag.incident import Incident, LookAlike, judged, measured, reported
from diag.knowledge.shared_fixes import MORE_KV_CAPACITY
from diag.signals import (
    hardly_evicts,
    kv_cache_usage_peak,
    kv_cache_usage_with_next,
    queue_time_share,
    requests_waiting_median,
    waiting_share,
)

VLLM_43295 = "https://github.com/vllm-project/vllm/issues/43295"

incident = Incident(
    id="kv_pool_saturated",
    title="Requests wait for room in the KV pool",
    severity="warning",
    per=("instance", "engine"),
    cause="""
        The KV pool holds as many requests as it can, and the next one does not fit before another ends. Requests that
        run keep their blocks, so nothing is computed twice: this is a lack of capacity, not a thrash.
    """,
    impact="the time to the first token grows with the queue; streams that run are not disturbed",
    symptoms=(
        kv_cache_usage_with_next.above(0.9, reported("98.4 % with 43 waiting and not one preemption", VLLM_43295)),
        requests_waiting_median.at_least(1, judged("somebody waits in at least half of the samples")),
        queue_time_share.above(0.25, measured("0.56-0.59 before a full pool", "kv_saturated_fit")),
    ),
    supports=(
        kv_cache_usage_peak.above(0.95, measured("peak 0.99", "kv_saturated_fit")),
        waiting_share.above(0.33, judged("a third of the requests in the server only wait")),
    ),
    looks_like=(
        LookAlike(
            "kv_eviction_cascade",
            distinguish="There, running requests are evicted and computed again.",
            requires=hardly_evicts,
        ),
        LookAlike("queue_saturation", distinguish="There, the queue stands before a pool that has room."),
    ),
    fixes=MORE_KV_CAPACITY,
    mitigate=("Let fewer requests in at the gateway, or add a replica: no setting serves more from the same pool.",),
    hand_over=("the rate of requests and their lengths, and the size of the pool from the log",),
    do_not=("Do not raise --max-num-seqs: the pool, not the cap, decides how many run.",),
)
