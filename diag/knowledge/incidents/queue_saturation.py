"""Requests wait although the KV pool has room: the sequence cap or the token budget binds."""

from diag.incident import Fix, Incident, LookAlike, documented, judged, measured
from diag.signals import (
    deferred_share,
    hardly_evicts,
    kv_cache_usage_with_next,
    most_sequences,
    queue_time,
    queue_time_share,
    replicas_that_run_all,
    requests_running_floor,
    requests_worth_admitting,
    running_share_of_cap,
    running_value,
    switched_off,
    tokens_prefilled_in_a_freeze,
    twice_the_token_budget,
    waiting_share,
)

SCHEDULER = "https://docs.vllm.ai/en/latest/configuration/engine_args.html#schedulerconfig"

AT_THE_CAP = running_share_of_cap.at_least(1, documented("the scheduler admits up to --max-num-seqs", SCHEDULER))

incident = Incident(
    id="queue_saturation",
    title="Requests queue in front of a server that has KV cache to spare",
    severity="warning",
    per=("instance", "engine"),
    hold="2m",  # a pool that is too small looks like this until half of the window has seen it full
    cause="""
        More requests arrive than the scheduler admits at a time. Either the sequence cap (--max-num-seqs) binds, and
        the number that run is a flat line, or the token budget of a step (--max-num-batched-tokens) is spent on
        prefill, and fewer run than the cap allows. The KV pool is not what they wait for.
    """,
    impact="the time to the first token is mostly waiting",
    symptoms=(
        queue_time.above("queue_seconds", measured("8 s at the cap, 0 on a healthy server", "queue_saturation")),
        waiting_share.above(0.33, measured("0.83 at the cap; 0.15 where a prefill delays a few", "queue_saturation")),
        queue_time_share.above(0.25, measured("0.82 at the cap; 0.06-0.17 behind a few prefills", "queue_saturation")),
    ),
    supports=(
        AT_THE_CAP,
        requests_running_floor.at_least(0.9, measured("4 of 4 in nearly every sample", "queue_saturation")),
    ),
    looks_like=(
        LookAlike(
            "kv_pool_saturated",
            distinguish="There, the next request does not fit into the KV pool.",
            requires=kv_cache_usage_with_next.at_most(0.9, measured("0.03 and 0.72", "cure_max_num_seqs_mean")),
        ),
        LookAlike(
            "kv_eviction_cascade",
            distinguish="There, the waiting requests are the evicted ones.",
            requires=hardly_evicts,
        ),
        LookAlike(
            "deferred requests",
            distinguish="There, requests wait for a KV transfer or a LoRA slot, whatever the cap.",
            requires=deferred_share.at_most(0.5, documented("deferred by transient constraints", SCHEDULER)),
        ),
        LookAlike("engine_stalled", distinguish="There, nothing moves at all."),
    ),
    fixes=(
        Fix(
            flag="--max-num-seqs",
            value=requests_worth_admitting,
            most=most_sequences,
            direction="raise",
            only_if=(AT_THE_CAP, switched_off("max_num_active_seqs")),
            change="Admit the requests that came, as far as the KV pool holds them at their observed mean length.",
            effect="requests waiting fall, KV usage rises",
            risk="each stream becomes slower as more share a step; larger CUDA graphs take more memory",
            rollback="set the old value again and restart",
            why=judged("the pool is the next bound; beyond it requests evict each other"),
        ),
        Fix(
            flag="--max-num-active-seqs",
            value=requests_worth_admitting,
            most=running_value("max_num_seqs"),
            direction="raise",
            only_if=(AT_THE_CAP, running_value("max_num_active_seqs").at_least(1, documented("it is set", SCHEDULER))),
            change="Run the requests that came, as far as --max-num-seqs and the KV pool allow.",
            effect="requests waiting fall, KV usage rises",
            risk="each stream becomes slower as more share a step",
            rollback="set the old value again and restart",
            why=judged("the lower of both caps is the one that binds"),
        ),
        Fix(
            flag="--max-num-batched-tokens",
            value=tokens_prefilled_in_a_freeze,
            rounding="power_of_two_below",
            most=twice_the_token_budget,
            direction="raise",
            change="The number that run stays below --max-num-seqs, so the token budget binds: double it, as far as a "
            "step stays within the freeze limit.",
            effect="prompt tokens per second rise, requests waiting fall",
            risk="longer steps: the gap between tokens grows in proportion",
            rollback="set the old value again and restart",
            only_if=(running_share_of_cap.below(1, documented("the cap is not what binds", SCHEDULER)),),
            why=judged("prefill is what fills the budget"),
        ),
        Fix(
            change="Run {value} replicas of it: as many as serve the requests that came at the number that runs here.",
            value=replicas_that_run_all,
            rounding="up",
            least=2,
            effect="requests waiting fall on every replica",
            restart=False,
            why=judged("a server at the capacity of its hardware needs a second one"),
        ),
    ),
    mitigate=("Shed or divert load at the gateway: batch clients first.",),
    hand_over=("the rate of requests at the gateway and the running --max-num-seqs and --max-num-batched-tokens",),
    do_not=("Do not take the wait for a hang: tokens flow at the usual rate.",),
)
