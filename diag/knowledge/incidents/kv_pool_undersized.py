"""The KV cache is too small for the length of these requests: they run nearly one at a time."""

from diag import signals
from diag.incident import Incident, LookAlike, judged, measured
from diag.knowledge import shared_fixes

incident = Incident(
    id="kv_pool_undersized",
    title="KV cache too small for the request length",
    severity="warning",
    per=("instance", "engine"),
    cause="""
        A request of the observed length takes a quarter of the KV cache or more. Hardly any requests run concurrently,
        so there is no batching, which is where the throughput comes from. Where the KV cache holds less than
        --max-model-len, a request that is longer than the KV cache is never admitted, and those behind it wait too.
    """,
    impact="requests are served nearly one after the other, or none at all; all others wait",
    symptoms=(
        signals.longest_requests_that_fit.below(
            4, judged("below {threshold}, no cap or watermark helps: only a larger KV cache does")
        ),
        signals.requests_running.below(4, measured("1 runs while 5 wait", "kv_undersized")),
        signals.requests_waiting_median.at_least(1, judged("at least one request waits in half of the samples")),
    ),
    supports=(
        signals.kv_cache_usage_with_next.above(0.9, measured("103 %: the next prompt does not fit", "kv_undersized")),
        signals.preemptions_per_request.above(0.2, measured("0.35 with one or two requests running", "kv_undersized")),
    ),
    looks_like=(
        LookAlike("kv_eviction_cascade", distinguish="Many requests run and preempt each other."),
        LookAlike(
            "queue_saturation",
            distinguish="A low --max-num-seqs leaves part of the KV cache empty: a larger one runs no more requests.",
            requires=signals.room_for_another.at_most(
                0, judged("the sequence cap, and not the KV cache, is the limit")
            ),
        ),
    ),
    explains=("kv_pool_saturated", "requests_aborted", "engine_stalled", "contract_breached"),
    ended_by=signals.requests_waiting_median,
    fixes=shared_fixes.MORE_KV_CAPACITY,
    mitigate=("Divert long prompts to a server with a larger KV cache.",),
    hand_over=("the KV cache size and --max-model-len from the log, and the prompt lengths",),
    do_not=("Do not lower --max-num-seqs: halving a handful of requests frees almost nothing.",),
)
