"""The KV cache is full and requests queue for free blocks; hardly any is preempted, so no work is lost."""

from diag import signals
from diag.incident import Incident, LookAlike, judged, measured, reported
from diag.knowledge import shared_fixes

VLLM_43295 = "https://github.com/vllm-project/vllm/issues/43295"

incident = Incident(
    id="kv_pool_saturated",
    title="KV cache full, requests queue",
    severity="warning",
    per=("instance", "engine"),
    cause="""
        The KV cache holds as many requests as it can, and the next one does not fit before a running one finishes.
        Running requests keep their blocks, so nothing is recomputed: this is a lack of capacity, not a preemption
        cascade.
    """,
    impact="TTFT grows with the queue; running streams are not affected",
    symptoms=(
        signals.kv_cache_usage_with_next.above(
            0.9, reported("98.4 % with 43 requests waiting and no preemption", VLLM_43295)
        ),
        signals.requests_waiting_median.at_least(1, judged("at least one request waits in half of the samples")),
        signals.queue_time_share.above(0.25, measured("56-59 % with a full KV cache", "kv_saturated_fit")),
    ),
    supports=(
        signals.kv_cache_usage_peak.above(0.95, measured("usage peaks at 99 %", "kv_saturated_fit")),
        signals.waiting_share.above(0.33, judged("a third of the requests in the server do nothing but wait")),
        signals.ttft_missed_soon,
    ),
    looks_like=(
        LookAlike(
            "kv_eviction_cascade",
            distinguish="Running requests are preempted and recomputed.",
            requires=signals.hardly_preempts,
        ),
        LookAlike("queue_saturation", distinguish="Requests queue although the KV cache has room for them."),
    ),
    explains=("requests_aborted", "contract_breached"),
    ended_by=signals.requests_waiting_median,
    fixes=shared_fixes.MORE_KV_CAPACITY,
    operations=("scale",),
    mitigate=("Lower the concurrency limit at the gateway, or add a replica: no setting serves more from this cache.",),
    hand_over=("the request rate, the prompt and output lengths, and the KV cache size from the log",),
    do_not=("Do not raise --max-num-seqs: the KV cache, not the cap, limits how many requests run.",),
)
