"""Too many requests for the KV pool: each eviction is work done twice, and makes the next one likelier."""

from dataclasses import replace

from diag.incident import Fix, Incident, LookAlike, documented, judged, measured
from diag.knowledge.shared_fixes import MORE_KV_CAPACITY
from diag.signals import (
    evicts,
    freezes_per_request,
    hardly_evicts,
    headroom_of_one_answer,
    kv_cache_usage_median,
    kv_cache_usage_peak,
    kv_pool_share_of_running,
    prompt_lengths_spread,
    requests_running,
    requests_the_kv_pool_holds,
    requests_waiting_median,
)

TUNING = "https://docs.vllm.ai/en/latest/configuration/optimization.html#preemption"

SIX = measured("64 -> 6: preemptions per request 1.33 -> 0.09", "cure_max_num_seqs_mean")
CAPPED = (
    "turns the cascade into a queue: a quarter to half of the throughput went, and the time to the first token was"
    " about twice as long, where it was measured; for those who prefer steady streams"
)
CAP = Fix(
    flag="--max-num-active-seqs",
    value=requests_the_kv_pool_holds,
    direction="lower",
    only_if=(kv_pool_share_of_running.below(1, judged("a cap that more than ran does not reach changes nothing")),),
    change="Run no more requests than the KV pool holds at their observed mean length; the CUDA graphs stay.",
    effect="preemptions per request fall below 0.2; streams become steady; requests waiting rise",
    risk=CAPPED,
    rollback="remove the flag and restart",
    expects=(hardly_evicts,),
    why=SIX,
)

incident = Incident(
    id="kv_eviction_cascade",
    title="KV-cache evictions feed on themselves",
    severity="critical",
    per=("instance", "engine"),
    cause="""
        Running requests grow by a token a step until no KV block is free. vLLM then preempts the request it admitted
        last, frees its blocks and puts it back at the head of the queue. On its return, prompt and output so far are
        prefilled again. That work takes step time from everyone, so requests stay longer and more are evicted.
    """,
    impact="answers stop in mid-stream for seconds and new requests queue, while the GPU does work twice",
    symptoms=(
        evicts,
        kv_cache_usage_peak.above(
            0.9, measured("peaks 0.94-1.0, while each eviction frees blocks and pulls the mean down", "kv_cascade")
        ),
        requests_waiting_median.at_least(1, documented("a preempted request goes back to the queue", TUNING)),
    ),
    supports=(
        kv_cache_usage_median.above(0.8, measured("median 0.84-0.95 in a cascade", "kv_cascade_base")),
        freezes_per_request.above(0.01, measured("0.01-0.14 while evicted requests are computed again", "kv_cascade")),
    ),
    looks_like=(
        LookAlike(
            "kv_pool_undersized",
            distinguish="Only a handful of requests run: one long prompt fills the pool.",
            requires=requests_running.at_least(4, judged("below that, halving --max-num-seqs frees almost nothing")),
        ),
        LookAlike(
            "kv_pool_saturated", distinguish="The pool is just as full and the queue as long; nothing is preempted."
        ),
        LookAlike("queue_saturation", distinguish="Requests wait as well, but the KV pool has room for them."),
    ),
    explains=("kv_pool_saturated", "queue_saturation", "replicas_unbalanced", "contract_breached"),
    fixes=(
        Fix(
            change="Let no more than {value} requests at a time through the gateway for each engine: what its pool"
            " holds at their mean length. Until the pool is larger.",
            value=requests_the_kv_pool_holds,
            effect="preemptions end with the requests that run now; who waits, waits at the gateway",
            risk=CAPPED,
            restart=False,
            expects=(hardly_evicts,),
            why=SIX,
        ),
        *(replace(each, expects=(hardly_evicts,)) for each in MORE_KV_CAPACITY),
        CAP,
        replace(
            CAP,
            flag="--max-num-seqs",
            instead_of=CAP.flag,
            change="Admit no more requests than the KV pool holds at their observed mean length.",
            rollback="set the old value again and restart",
        ),
        Fix(
            flag="--watermark",
            value=headroom_of_one_answer,
            rounding="hundredth_below",
            least=0.05,
            most=0.2,
            direction="raise",
            change="Admit a request only while {value} of the KV pool stays free: what those that run grow by until one"
            " of them ends, and no less than what was measured to help.",
            effect="preemptions per request roughly halve",
            risk="it only halves them; others saw the time to the first token rise from 6.6 to 11.2 s",
            rollback="--watermark 0 and restart",
            why=measured("0.05: preemptions per request 1.33 -> 0.69", "cure_watermark"),
        ),
        Fix(
            change="Route long and short prompts to servers of their own.",
            effect="one long prompt no longer evicts many short requests",
            restart=False,
            only_if=(prompt_lengths_spread.above(8, judged("lengths this mixed waste the pool on a few requests")),),
            why=judged("the long ones hold most of the pool"),
        ),
    ),
    mitigate=(
        "Let fewer requests in at the gateway until nobody waits: evictions end within a minute of that.",
        "Divert the longest prompts first: they hold most of the pool.",
    ),
    hand_over=(
        "the distribution of prompt and answer lengths, the size of the pool from the log, and the launch command",
    ),
    do_not=(
        "Do not lower --gpu-memory-utilization: it shrinks the pool.",
        "Do not raise --max-num-seqs: more requests in the same pool are evicted sooner.",
    ),
)
