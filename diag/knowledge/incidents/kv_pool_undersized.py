"""The KV pool is too small for the lengths of these requests: they pass nearly one at a time."""

from diag.incident import Incident, LookAlike, judged, measured
from diag.knowledge.shared_fixes import MORE_KV_CAPACITY
from diag.signals import (
    kv_cache_usage_with_next,
    preemptions_per_request,
    requests_running,
    requests_the_kv_pool_holds,
    requests_waiting_median,
)

incident = Incident(
    id="kv_pool_undersized",
    title="The KV pool holds only a handful of requests of this length",
    severity="warning",
    per=("instance", "engine"),
    cause="""
        A request of the observed length takes a quarter of the KV pool or more, so hardly any run at the same time and
        batching, which is where the throughput comes from, does not happen.
    """,
    impact="requests are served nearly one after the other; everybody else waits",
    symptoms=(
        requests_the_kv_pool_holds.below(4, judged("below four, no cap or watermark helps: only a larger pool does")),
        requests_running.below(4, measured("1 runs while 5 wait", "kv_undersized")),
        requests_waiting_median.at_least(1, judged("somebody waits in at least half of the samples")),
    ),
    supports=(
        kv_cache_usage_with_next.above(0.9, measured("1.03: the next prompt does not fit", "kv_undersized")),
        preemptions_per_request.above(0.2, measured("0.35 with one or two requests running", "kv_undersized")),
    ),
    looks_like=(
        LookAlike("kv_eviction_cascade", distinguish="There, many requests run and evict each other."),
        LookAlike("queue_saturation", distinguish="There, a low --max-num-seqs keeps the pool empty."),
    ),
    explains=("kv_pool_saturated",),
    fixes=MORE_KV_CAPACITY,
    mitigate=("Divert long prompts to a server with a larger pool.",),
    hand_over=("the size of the pool and --max-model-len from the log, and the lengths of the prompts",),
    do_not=("Do not lower --max-num-seqs: halving a handful frees almost nothing.",),
)
