"""The KV cache is filling up and will be full within minutes at the present rate: before the first preemption."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged
from diag.knowledge import shared_fixes

TUNING = "https://docs.vllm.ai/en/latest/configuration/optimization.html#preemption"
incident = Incident(
    id="kv_cache_filling",
    title="KV cache fills up",
    severity="info",
    per=("instance", "engine"),
    hold="30s",
    cause="""
        Running requests grow by a token per step, and more prompts arrive than requests end, so KV blocks are taken
        faster than they are freed. Once none is free, vLLM preempts the request that it admitted last.
    """,
    impact="none yet; when the KV cache is full, requests are preempted or queue",
    symptoms=(
        signals.full_soon,
        signals.kv_cache_usage_now.above(0.85, judged("below {threshold} a burst fits that no rate foretells")),
        signals.kv_cache_growth.above(2.5, judged("chance alone exceeds it in about one window of 160")),
    ),
    ended_by=signals.kv_cache_usage_now,
    looks_like=(
        LookAlike(
            "growth that ends by itself",
            distinguish="Requests that started together grow together, and all of them fit at their full length.",
            requires=signals.kv_cache_usage_at_full_length.at_least(
                1.2, judged("of requests that grow together, the short ones end before the long ones are long")
            ),
        ),
        LookAlike(
            "kv_eviction_cascade",
            distinguish="Requests are preempted already: the KV cache was full.",
            requires=signals.preemptions_per_request.at_most(
                0, documented("vLLM preempts when no KV block is free", TUNING)
            ),
        ),
    ),
    fixes=(
        Fix.without_restart(
            change="Limit gateway concurrency to {value} per engine: what the KV cache holds at the observed mean "
            "length.",
            value=signals.requests_that_fit_kv_cache,
            effect="KV cache usage stops rising before the first preemption; excess requests queue at the gateway",
            while_it_lasts=True,
            expects=(signals.full_soon.opposite,),
            why=judged("a preemption costs a recompute, a request at the gateway only waits"),
        ),
        *(fix._replace(expects=(signals.full_soon.opposite,)) for fix in shared_fixes.MORE_KV_CAPACITY),
    ),
    operations=("scale",),
    mitigate=("Add a replica, or limit the concurrency at the gateway, before requests are preempted.",),
    hand_over=("KV cache usage and requests running over an hour, and the lengths of prompts and outputs",),
    do_not=("Do not raise --max-num-seqs: more requests fill the KV cache sooner.",),
)
