"""KV-cache preemption cascade: every preemption costs a recompute, which makes the next preemption likelier."""

from diag import signals
from diag.incident import Effect, Fix, Incident, LookAlike, documented, judged, measured
from diag.knowledge import shared_fixes

TUNING = "https://docs.vllm.ai/en/latest/configuration/optimization.html#preemption"

SIX = measured("64 -> 6: preemptions per finished request 1.33 -> 0.09", "cure_max_num_seqs_mean")
CAPPED = (
    "trades throughput for steady inter-token latency: in the measurements, throughput fell by a quarter to a half and "
    "TTFT about doubled"
)
CAP = Fix(
    flag="--max-num-active-seqs",
    value=signals.requests_that_fit_kv_cache,
    direction="lower",
    only_if=(
        signals.fitting_share_of_running.below(1, judged("a cap above the number of running requests has no effect")),
    ),
    change="Run no more requests than the KV cache holds at the observed mean length. The CUDA graphs are unaffected.",
    effect=f"preemptions per finished request fall below {signals.hardly_preempts.limit_with_unit}; inter-token "
    "latency becomes steady; more requests wait",
    risk=CAPPED,
    rollback="remove the flag",
    expects=(signals.hardly_preempts,),
    why=SIX,
)

incident = Incident(
    id="kv_eviction_cascade",
    title="KV-cache preemption cascade",
    severity="critical",
    per=("instance", "engine"),
    cause="""
        Every running request grows by one token per step until no KV block is free. vLLM then preempts the request that
        it admitted last, frees its blocks and puts it back at the head of the queue. When that request resumes, its
        prompt and its output so far are recomputed. The recompute takes step time from all other requests, so they stay
        longer and more of them are preempted.
    """,
    impact="running streams pause for seconds, new requests queue; preempted requests are recomputed",
    symptoms=(
        signals.preempts,
        signals.kv_cache_usage_peak_with_next.above(
            0.9, measured("102-115 % at any cadence: every preemption frees the blocks of one request", "kv_cascade")
        ),
        signals.requests_waiting_median.at_least(1, documented("a preempted request goes back to the queue", TUNING)),
    ),
    supports=(
        signals.kv_cache_usage_median.above(0.8, measured("median usage is 84-95 % in a cascade", "kv_cascade_base")),
        signals.preempted_again.above(0.02, measured("34 % of the requests, 0 % without a cascade", "kv_cascade")),
        signals.stream_pauses_per_request.above(
            0.01, measured("0.01-0.14 while preempted requests are recomputed", "kv_cascade")
        ),
    ),
    looks_like=(
        LookAlike(
            "kv_pool_undersized",
            distinguish="Only a handful of requests run: one long prompt fills the KV cache.",
            requires=signals.requests_running.at_least(
                4, judged("below {threshold}, halving --max-num-seqs frees almost nothing")
            ),
        ),
        LookAlike(
            "kv_pool_saturated",
            distinguish="The KV cache is just as full and the queue as long, but no request is preempted.",
        ),
        LookAlike("queue_saturation", distinguish="Requests queue too, but the KV cache has room for them."),
    ),
    explains=("kv_pool_saturated", "queue_saturation", "requests_aborted", "contract_breached"),
    may_explain=(Effect("replicas_unbalanced", where=(signals.slower_than_peers,)),),
    fixes=(
        Fix.without_restart(
            change="Limit gateway concurrency to {value} per engine (what the KV cache holds at the observed mean "
            "length) until the cache is enlarged.",
            value=signals.requests_that_fit_kv_cache,
            effect="preemptions end once the requests that run now have finished; excess requests queue at the gateway",
            risk=CAPPED,
            expects=(signals.hardly_preempts,),
            why=SIX,
        ),
        *(fix._replace(expects=(signals.hardly_preempts,)) for fix in shared_fixes.MORE_KV_CAPACITY),
        CAP,
        CAP._replace(
            flag="--max-num-seqs",
            instead_of=CAP.flag,
            change="Admit no more requests than the KV cache holds at the observed mean length.",
            rollback="set the old value again",
        ),
        Fix(
            flag="--watermark",
            value=signals.headroom_of_one_answer,
            rounding="hundredth_below",
            least=0.05,
            most=0.2,
            direction="raise",
            change="Admit a new request only while {value} of the KV cache stays free: the amount by which the "
            "running requests grow until one of them finishes, and at least the amount that was measured to help.",
            effect="preemptions per finished request fall by about half",
            risk="preemptions only halve; others reported that TTFT rose from 6.6 to 11.2 s",
            rollback="--watermark 0",
            why=measured("0.05: preemptions per finished request 1.33 -> 0.69", "cure_watermark"),
        ),
        Fix.without_restart(
            change="Route long and short prompts to separate servers.",
            effect="one long prompt no longer causes the preemption of many short requests",
            only_if=(
                signals.prompt_lengths_spread.above(
                    8, judged("with lengths this mixed, few requests hold most of the cache")
                ),
            ),
            why=judged("long prompts hold most of the KV cache"),
        ),
    ),
    operations=("scale",),
    mitigate=(
        "Lower the concurrency limit at the gateway until no request waits: preemptions end within a minute of that.",
        "Divert the longest prompts first: they hold most of the KV cache.",
    ),
    hand_over=(
        "the distribution of prompt and output lengths, the KV cache size from the log, and the launch command",
    ),
    do_not=(
        "Do not lower --gpu-memory-utilization: it shrinks the KV cache.",
        "Do not raise --max-num-seqs: more requests in the same KV cache are preempted sooner.",
    ),
)
