"""Requests queue although the KV cache has room: the sequence cap or the token budget of a step is the limit."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, measured
from diag.knowledge import shared_fixes

SCHEDULER = "https://docs.vllm.ai/en/latest/configuration/engine_args.html#schedulerconfig"

AT_THE_CAP = signals.running_share_of_cap.at_least(
    1, documented("the scheduler admits up to --max-num-seqs", SCHEDULER)
)
CAPS = (
    (
        "--max-num-seqs",
        signals.not_set("max_num_active_seqs"),
        signals.most_sequences,
        "; larger CUDA graphs take more memory",
    ),
    (
        "--max-num-active-seqs",
        signals.running_value("max_num_active_seqs").at_least(
            1, documented("the flag is set, and it is the lower cap", SCHEDULER)
        ),
        signals.running_value("max_num_seqs"),
        "",
    ),
)
"""The flags that cap sequences: the condition for each, its upper bound, and a further risk."""
NEXT_BINDER = (
    (
        signals.room_beyond_the_load.at_least(1, judged("the load ends before the KV cache does")),
        "Admit the peak of the observed load with a quarter of headroom, as a power of two. The KV cache has room for "
        "it; the next limit is the token budget of a step or memory bandwidth.",
    ),
    (
        signals.room_beyond_the_load.below(1, judged("the KV cache ends before the load does")),
        "Admit as many requests as the KV cache holds at the observed lengths: it is the next limit, below the peak of "
        "the observed load.",
    ),
)
"""The limits that follow the sequence cap: a condition and the sentence about the fix."""

incident = Incident(
    id="queue_saturation",
    title="Requests queue while the KV cache has room",
    severity="warning",
    per=("instance", "engine"),
    hold="2m",  # a KV cache that is too small looks the same until it was full for half of the window
    cause="""
        More requests arrive than the scheduler admits at a time. Either the sequence cap (--max-num-seqs) is reached,
        and the number of running requests is a flat line; or prefill uses up the token budget of each step
        (--max-num-batched-tokens), and fewer requests run than the cap allows. The KV cache is not the limit.
    """,
    impact="most of TTFT is queue time",
    symptoms=(
        signals.queue_time.above(
            "queue_seconds", measured("8 s at the cap, 0 on a healthy server", "queue_saturation")
        ),
        signals.waiting_share.above(
            0.33, measured("83 % at the cap; 15 % where a prefill delays a few requests", "queue_saturation")
        ),
        signals.queue_time_share.above(
            0.25, measured("82 % at the cap; 6-17 % behind a few prefills", "queue_saturation")
        ),
        signals.requests_waiting_median.at_least(
            1, judged("a queue that is empty half of the time was a burst, and is gone")
        ),
    ),
    supports=(
        AT_THE_CAP,
        signals.requests_running_floor.at_least(
            0.9, measured("4 of 4 sequences run in nearly every sample", "queue_saturation")
        ),
        signals.NEAR_BANDWIDTH,
        signals.NEAR_COMPUTE,
        signals.ttft_missed_soon,
        signals.shed.at_least(1, documented("a request beyond --max-num-queued-reqs is answered 503", SCHEDULER)),
    ),
    sign=signals.sign_of_a_queue,
    looks_like=(
        LookAlike(
            "kv_pool_saturated",
            distinguish="The next request does not fit the KV cache.",
            requires=signals.kv_cache_usage_with_next.at_most(
                0.9, measured("72 % in this recording, 3 % in queue_saturation", "cure_max_num_seqs_mean")
            ),
        ),
        LookAlike(
            "kv_eviction_cascade",
            distinguish="The waiting requests are preempted ones.",
            requires=signals.hardly_preempts,
        ),
        LookAlike(
            "deferred requests",
            distinguish="Requests wait for a KV transfer or a LoRA slot, whatever the cap.",
            requires=signals.deferred_share.at_most(
                0.5, documented("a request is deferred by a transient constraint, not by capacity", SCHEDULER)
            ),
        ),
        LookAlike(
            "admission_deadlock",
            distinguish="Requests wait and none runs.",
            requires=signals.requests_running_median.above(0, judged("an engine that runs nothing has places to give")),
        ),
        LookAlike("engine_stalled", distinguish="No request makes any progress."),
    ),
    explains=("requests_aborted", "contract_breached"),
    ended_by=signals.waiting_share,
    fixes=(
        *(
            Fix(
                flag=flag,
                value=signals.requests_to_admit,
                most=most,
                direction="raise",
                current=signals.sequence_cap,
                only_if=(AT_THE_CAP, is_set, reached),
                change=change,
                effect="fewer requests wait; KV cache usage rises",
                risk=f"inter-token latency rises as more requests share a step{memory}",
                rollback="set the old value again",
                why=judged(
                    "beyond the load a higher cap costs memory and gains nothing; beyond the KV cache, requests "
                    "preempt each other"
                ),
            )
            for flag, is_set, most, memory in CAPS
            for reached, change in NEXT_BINDER
        ),
        Fix(
            flag="--max-num-batched-tokens",
            value=signals.tokens_prefilled_within_pause,
            rounding="power_of_two_below",
            most=signals.twice_the_token_budget,
            direction="raise",
            change="Fewer requests run than --max-num-seqs allows, so the token budget is the limit: at most double "
            "it, as long as a step takes less than the stream pause threshold.",
            effect="prompt throughput rises; fewer requests wait",
            risk="steps take longer: inter-token latency grows in proportion",
            rollback="set the old value again",
            only_if=(
                signals.running_share_of_cap.below(1, documented("below the cap, the cap is not the limit", SCHEDULER)),
                signals.prefilled_per_step.below(
                    2048, judged("a step of more tokens keeps any GPU's arithmetic busy: a longer one gains nothing")
                ),
                signals.NEAR_COMPUTE.opposite,
            ),
            why=judged("prefill is what uses up the token budget"),
        ),
        shared_fixes.MORE_REPLICAS._replace(
            change="Run {value} replicas: as many as it takes to answer what arrives, at the concurrency that this "
            "server reaches.",
            value=signals.replicas_that_run_all,
            effect="fewer requests wait on every replica",
            why=judged("a server at the capacity of its hardware needs another replica"),
        ),
    ),
    operations=("scale",),
    mitigate=("Shed or divert load at the gateway: batch clients first.",),
    hand_over=(
        "the request rate at the gateway, and the running values of --max-num-seqs and --max-num-batched-tokens",
    ),
    do_not=("Do not mistake the queue for a hang: tokens are generated at the usual rate.",),
)
