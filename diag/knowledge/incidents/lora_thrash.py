"""More LoRA adapters are asked for than have room at once: their requests take turns, whatever else is free."""

from dataclasses import replace

from diag.incident import Fix, Incident, LookAlike, documented, measured, reported
from diag.signals import (
    adapters,
    adapters_kept,
    adapters_per_slot,
    kv_cache_usage_peak,
    queue_time,
    queue_time_share,
    running_value,
    switched_off,
    waits_for_a_slot,
)

LORA = "https://docs.vllm.ai/en/latest/features/lora/"
SCHEDULING = "https://github.com/vllm-project/vllm/pull/15422"

SLOTS = Fix(
    flag="--max-loras",
    value=adapters,
    least=2,
    direction="raise",
    only_if=(switched_off("max_cpu_loras"),),
    change="Let as many adapters run together as were asked for within five minutes.",
    effect="no waiting request is deferred; the time spent waiting falls",
    risk="memory for --max-lora-rank is set aside for each of them in every layer, which the KV pool loses; each step "
    "gathers from more adapters",
    rollback="the old number again, and restart",
    why=documented("--max-loras is the number of adapters in one batch", LORA),
)

incident = Incident(
    id="lora_thrash",
    title="LoRA adapters take turns in too few slots",
    severity="warning",
    per=("instance",),
    hold="2m",
    cause="""
        A batch holds requests of at most --max-loras adapters, 1 by default. A request of another one is passed over
        until the last request of one of these has ended, however much room the KV pool and --max-num-seqs have; busy
        adapters keep their slots and the others starve. Each change of adapters is copied to the GPU besides.
    """,
    impact="users of some adapters wait for their first token behind users of others, on a server with room to spare",
    symptoms=(
        adapters_per_slot.above(1, measured("6 adapters in 2 slots", "lora_thrash")),
        waits_for_a_slot.above(0.5, measured("all that wait are deferred; 0 with as many slots", "lora_thrash")),
        queue_time.above("queue_seconds", measured("2.4 s with room for all in the pool", "lora_thrash")),
        queue_time_share.above(0.25, measured("0.65 of the latency", "lora_thrash")),
    ),
    supports=(kv_cache_usage_peak.below(0.9, measured("0.07: capacity is not what they wait for", "lora_thrash")),),
    looks_like=(
        LookAlike("queue_saturation", distinguish="There, requests wait for capacity: none of them is deferred."),
        LookAlike("kv_pool_saturated", distinguish="There, the pool is full, whatever the adapter."),
        LookAlike("a transfer of KV cache", distinguish="It defers requests too, with no more adapters than slots."),
        LookAlike("adapters that are used in turn", distinguish="There are more of them than slots, and nobody waits."),
    ),
    explains=("contract_breached",),
    fixes=(
        SLOTS,
        replace(
            SLOTS,
            also=(("--max-cpu-loras", adapters_kept),),
            only_if=(running_value("max_cpu_loras").at_least(1, documented("--max-loras unless it is set", LORA)),),
            change="Let as many adapters run together as were asked for within five minutes, and keep no fewer in the "
            "memory of the host.",
            rollback="the old numbers again, and restart",
        ),
        Fix(
            change="Where the memory does not suffice: send each adapter to replicas of its own, so that none is "
            "asked for more adapters than it has slots.",
            effect="LoRA adapters asked for / --max-loras falls to 1 on every replica",
            restart=False,
            why=reported("requests beyond the slots stay in the queue", SCHEDULING),
        ),
    ),
    mitigate=("Route the adapters that wait to another replica.",),
    hand_over=("the number of adapters and requests of each per minute, --max-loras, --max-lora-rank",),
    do_not=(
        "Do not raise --max-num-seqs or the KV pool: both have room.",
        "Do not add replicas behind a balancer that knows no adapters: each is asked for all of them.",
    ),
)
