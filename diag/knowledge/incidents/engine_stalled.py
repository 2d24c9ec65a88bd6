"""Requests are in flight and the engine makes no progress, or one of its processes is stopped."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, measured
from diag.knowledge import shared_fixes

WATCHDOG = "https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/utils/watch_dog.py"

incident = Incident(
    id="engine_stalled",
    title="Engine stalled",
    severity="critical",
    outage=True,
    per=("instance", "engine"),
    window="1m",
    live_window="10s",
    cause="""
        The engine loop does not return from a step: a worker hangs in a kernel or a collective, or the process is
        stopped. /health, /version and /metrics keep answering 200, because the API server is another process. After
        about 300 s (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS) the engine may give up and die.
    """,
    impact="every stream hangs and no new request gets a token",
    symptoms=(
        signals.stalled.at_least(
            1,
            measured(
                "no progress for 30 s with two or more requests in flight, or pauses of over 40 s that no prefill or "
                "preemption explains, or the kernel reports the engine or a worker as stopped throughout the window",
                "engine_stalled",
            ),
        ),
    ),
    supports=(
        signals.requests_without_progress.at_least(1, measured("no token was processed for 42 s", "engine_stalled")),
        signals.stack_dumped.at_least(1, documented("it dumps a process that was not fed in time", WATCHDOG)),
    ),
    looks_like=(
        LookAlike(
            "admission_deadlock",
            distinguish="Requests wait and none runs: the engine is healthy, and its scheduler admits no request.",
            requires=signals.requests_not_admitted.at_most(
                0, measured("5 requests ran when the engine stopped", "engine_stalled")
            ),
        ),
        shared_fixes.NOT_ASLEEP,
        shared_fixes.NOT_PAUSED,
        shared_fixes.NOT_CHANGING,
        LookAlike(
            "tp_communication_stall",
            distinguish="vLLM's metrics look the same. The distinguishing signs are one worker without CPU time, a "
            "GPU at full utilisation and low power, or the shm_broadcast line in the log.",
        ),
        LookAlike(
            "prefill_decode_contention",
            distinguish="A step with a very long prefill looks the same while it lasts. It ends by itself, and its "
            "prompt is booked.",
            requires=shared_fixes.NO_LONG_PREFILL,
        ),
        LookAlike("engine_dead", distinguish="/metrics itself no longer answers."),
        LookAlike("queue_saturation", distinguish="Requests queue too, but tokens are generated."),
    ),
    explains=("queue_saturation", "kv_pool_saturated", "replicas_unbalanced", "requests_aborted", "contract_breached"),
    fixes=(
        *shared_fixes.LET_GO_ON,
        Fix.without_restart(
            change="Read the file that the [Watchdog] line of the log names, with diag doctor FILE: it has the call in "
            "which the process stands.",
            effect="it names the call that does not return, without a tool on the host",
            only_if=(signals.stack_dumped.at_least(1, judged("without a dump there is no file")),),
            why=documented("the file has the stacks of all threads", WATCHDOG),
        ),
        shared_fixes.SAVE_STACKS,
        Fix(
            change="Take the server out of rotation and restart it: no stalled engine has been seen to recover by "
            "itself, unless the process was merely stopped.",
            effect="tokens are generated again; requests in flight are lost",
            only_if=(
                *shared_fixes.NOT_HALTED,
                signals.progress.at_most(0, judged("an engine that makes progress again needs no restart")),
            ),
            while_it_lasts=True,
            why=judged("no setting of a running server ends a stall"),
        ),
        shared_fixes.STACK_TRACES,
    ),
    operations=("drain", "restart"),
    mitigate=(
        "Take the server out of rotation: vLLM answers /health with 200 while an engine stalls, so no probe does it.",
        "Let clients time out and retry on another replica: the requests that hang here will not finish.",
    ),
    hand_over=(
        "the stack traces of EngineCore and of every worker, taken before the restart, and the log of the last ten "
        "minutes",
    ),
    do_not=(
        "Do not add load or replicas behind the same load balancer: a probe of /health does not fail, so requests "
        "keep arriving here.",
        "Do not trust the gauges: they keep their last values.",
    ),
)
