"""More LoRA adapters are in use than have a slot: their requests take turns although there is capacity."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, measured, reported

LORA = "https://docs.vllm.ai/en/latest/features/lora/"
SCHEDULING = "https://github.com/vllm-project/vllm/pull/15422"

SLOTS = Fix(
    flag="--max-loras",
    value=signals.slots_for_adapters,
    least=2,
    direction="raise",
    current=signals.adapter_slots,
    only_if=(signals.not_set("max_cpu_loras"),),
    change="Give every adapter that was used within five minutes a slot; where some never get one, double the slots "
    "until no request is deferred.",
    effect="no waiting request is deferred; queue time falls",
    risk="each slot reserves memory for --max-lora-rank in every layer, which the KV cache loses; each step gathers "
    "from more adapters",
    rollback="set the old value again",
    why=documented("--max-loras is the number of adapters in one batch", LORA),
)
CROWDED = signals.adapters_per_slot.above(1, measured("6 adapters share 2 slots", "lora_thrash"))

incident = Incident(
    id="lora_thrash",
    title="LoRA adapters compete for too few slots",
    severity="warning",
    per=("instance",),
    hold="2m",
    cause="""
        A batch holds requests of at most --max-loras adapters (default 1). Requests of another adapter are skipped
        until the last request of one of these adapters has finished, however much capacity the KV cache and
        --max-num-seqs leave. Busy adapters keep their slots and the others starve. Every adapter change is also copied
        to the GPU.
    """,
    impact="TTFT rises for users of some adapters, on a server that has capacity to spare",
    symptoms=(
        CROWDED,
        signals.deferred_share_by_reason.above(
            0.5, measured("all waiting requests are deferred; none with as many slots as adapters", "lora_thrash")
        ),
        signals.queue_time.above(
            "queue_seconds", measured("2.4 s although the KV cache has room for all requests", "lora_thrash")
        ),
        signals.queue_time_share.above(0.25, measured("65 % of the end-to-end latency", "lora_thrash")),
    ),
    supports=(
        signals.kv_cache_usage_peak.below(0.9, measured("7 %: the requests do not wait for KV cache", "lora_thrash")),
    ),
    looks_like=(
        LookAlike("queue_saturation", distinguish="Requests wait for capacity: none of them is deferred."),
        LookAlike("kv_pool_saturated", distinguish="The KV cache is full, whatever the adapter."),
        LookAlike("a KV transfer", distinguish="Requests are deferred too, but there are no more adapters than slots."),
        LookAlike(
            "adapters used one after the other", distinguish="There are more adapters than slots, but no request waits."
        ),
    ),
    explains=("requests_aborted", "contract_breached"),
    ended_by=signals.deferred_share_by_reason,
    fixes=(
        SLOTS,
        SLOTS._replace(
            also=(("--max-cpu-loras", signals.adapters_kept),),
            only_if=(
                signals.running_value("max_cpu_loras").at_least(1, documented("the default is --max-loras", LORA)),
            ),
            change="Give every adapter that was used within five minutes a slot, and keep at least as many in host "
            "memory; where some never get a slot, double the slots.",
            rollback="set the old values again",
        ),
        Fix.without_restart(
            change="If memory does not suffice, route each adapter to its own replicas, so that no replica serves "
            "more adapters than it has slots.",
            effect=f"{CROWDED.signal.name} falls to {CROWDED.limit_with_unit} on every replica",
            why=reported("requests of adapters without a slot stay in the queue", SCHEDULING),
        ),
    ),
    operations=("scale",),
    mitigate=("Route the adapters whose requests wait to another replica.",),
    hand_over=("the number of adapters, the requests of each per minute, --max-loras and --max-lora-rank",),
    do_not=(
        "Do not raise --max-num-seqs or enlarge the KV cache: both have room.",
        "Do not add replicas behind a load balancer that ignores adapters: every replica then serves all of them.",
    ),
)
