"""The scheduler admits no request: the one at the head of the queue does not fit the KV cache, even an empty one."""

from diag import signals
from diag.core.metric_prefix import WAITING
from diag.incident import Fix, Incident, LookAlike, documented, measured, reported
from diag.knowledge import shared_fixes

SCHEDULER = "https://docs.vllm.ai/en/latest/configuration/engine_args.html#schedulerconfig"
HEAD_OF_THE_QUEUE = "https://github.com/vllm-project/vllm/issues/39734"
NOT_ADMITTED = signals.requests_not_admitted.at_least(
    1, measured("8 requests waited and none ran until the long prompt was given up", "admission_deadlock")
)

incident = Incident(
    id="admission_deadlock",
    title="Scheduler admits no request",
    severity="critical",
    outage=True,
    per=("instance", "engine"),
    window="1m",
    cause="""
        The request at the head of the queue needs more KV blocks than the KV cache has, so it is never admitted, and
        the scheduler admits no request behind it. vLLM accepts such a request where --max-model-len is larger than what
        the cache holds, or where it reserves the full length of a prompt of which sliding-window layers keep only a
        part. The engine itself is healthy and continues as soon as that request is gone.
    """,
    impact="every request waits, none gets a token, and /health answers 200",
    symptoms=(NOT_ADMITTED,),
    supports=(
        signals.kv_cache_usage_peak.below(
            0.5, reported("0 % for 9 minutes, with 5 or 6 requests waiting", f"{HEAD_OF_THE_QUEUE[:-5]}45414")
        ),
    ),
    looks_like=(
        shared_fixes.NOT_ASLEEP,
        LookAlike(
            "engine_stalled",
            distinguish="Requests run, or a process of the engine is stopped: the engine hangs within a step.",
        ),
        LookAlike(
            "prefill_decode_contention",
            distinguish="A step with a very long prefill stops the gauges while it lasts. It ends by itself.",
            requires=shared_fixes.NO_LONG_PREFILL,
        ),
        LookAlike(
            "queue_saturation",
            distinguish="Requests queue too, but others run and tokens are generated.",
            refuted_by=NOT_ADMITTED,
        ),
        LookAlike(
            "deferred requests",
            distinguish=f"{WAITING}_by_reason calls all of them deferred: they wait for a KV transfer, "
            "a grammar or a LoRA slot, not for the KV cache.",
            refuted_by=NOT_ADMITTED,
        ),
        shared_fixes.NOT_PAUSED,
        shared_fixes.NOT_CHANGING,
    ),
    explains=("queue_saturation", "kv_pool_saturated", "replicas_unbalanced", "requests_aborted", "contract_breached"),
    fixes=(
        Fix.without_restart(
            change="Drop the request at the head of the queue: let its client or the gateway give it up, which aborts "
            "it. It is the one that has waited longest.",
            effect="all other requests are admitted at once",
            while_it_lasts=True,
            why=measured("its client gave up after 50 s, and the queue moved within a second", "admission_deadlock"),
        ),
        shared_fixes.SAVE_STACKS,
        Fix(
            flag="--max-model-len",
            value=signals.longest_that_is_admitted,
            direction="lower",
            change="Accept no request that the KV cache cannot hold: longer ones are refused with HTTP 400.",
            effect="a request that is too long gets an error instead of blocking the queue",
            risk="requests above that length are refused",
            rollback="set the old value again",
            why=documented("--max-model-len bounds prompt and output together", SCHEDULER),
        ),
        Fix(
            flag="--no-scheduler-reserve-full-isl",
            value="",
            change="Admit a prompt by its first chunk. It helps where the model has layers that never hold the whole "
            "prompt, such as sliding windows; a prompt that exceeds the KV cache does not run with it either.",
            effect="long prompts that fit chunk by chunk are admitted",
            only_if=(signals.not_set("no_scheduler_reserve_full_isl"),),
            risk="more requests are admitted than fit to their end: preemptions may rise",
            rollback="remove the flag",
            why=reported("the workaround for the deadlock of a model with sliding windows", HEAD_OF_THE_QUEUE),
        ),
        *shared_fixes.MORE_KV_CAPACITY,
    ),
    operations=("drain", "restart"),
    mitigate=(
        "Drop the request that has waited longest, at the gateway or by its client: all others then go on at once.",
        "Have the gateway give up requests that have had no token for a minute.",
    ),
    hand_over=(
        "the KV cache size and --max-model-len from the log, the release, and the length of the longest prompt at the "
        "gateway",
    ),
    do_not=(
        "Do not restart the server for it: the client sends the same request again, and it blocks the queue again.",
        "Do not add replicas: the retried request blocks them one after the other.",
    ),
)
