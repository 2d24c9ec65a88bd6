"""An exception ended the engine's loop, and with fault tolerance the engine waits to be told to go on."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented

SENTINEL = "https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/fault_tolerance/engine_core_sentinel.py"
ROUTES = "https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/entrypoints/serve/fault_tolerance/api_router.py"

incident = Incident(
    id="engine_awaits_recovery",
    title="Engine waits for recovery after a fault",
    severity="critical",
    outage=True,
    per=("instance",),
    window="1m",
    live_window="15s",
    cause="""
        With --enable-fault-tolerance an exception does not end the engine: it aborts its requests, reports the status
        unhealthy, and waits for the instruction retry. Without one in engine_recovery_timeout_sec it dies. If workers
        have ended, its status is dead, and it takes no instruction.
    """,
    impact="requests in flight were aborted, and new ones wait",
    symptoms=(
        signals.waits_for_recovery.at_least(
            1, documented("it logs the fault, and the recovery or the end of its time", SENTINEL)
        ),
    ),
    looks_like=(
        LookAlike("engine_dead", distinguish="`EngineDeadError` in the log: the engine does not wait any more."),
        LookAlike("engine_stalled", distinguish="No exception ended the loop: `[FT]` is not in the log."),
    ),
    explains=("engine_stalled", "admission_deadlock", "requests_aborted", "requests_failing", "contract_breached"),
    began=signals.fault_time,
    fixes=(
        Fix.without_restart(
            change="Ask which engines are unhealthy, and which exception it was.",
            command="curl -s http://SERVER/fault_tolerance/status",
            effect="it has the status of each engine: unhealthy can be recovered, dead cannot",
            why=documented("each engine reports its status", ROUTES),
        ),
        Fix.without_restart(
            change="If no engine is dead and the cause is gone (a link, a peer), have the engines go on. Then ask for "
            "the status again: the call is answered before the recovery is done.",
            command="curl -s -X POST -H 'Content-Type: application/json' -d '{\"instruction\": \"retry\"}' "
            "http://SERVER/fault_tolerance/apply",
            effect="the log has `status -> HEALTHY`, and tokens are generated again",
            why=documented("retry is the one instruction of an unhealthy engine", ROUTES),
        ),
        Fix(
            change="If an engine is dead, or retry fails, restart the server.",
            effect="the server serves again",
            why=documented("an engine that is not unhealthy rejects each instruction", SENTINEL),
        ),
    ),
    operations=("drain", "log", "restart"),
    mitigate=("Take the server out of rotation until the status of every engine is healthy.",),
    hand_over=("the log from 20 lines before `[FT] Busy loop raised` on, of every rank",),
    do_not=("Do not wait for the probe: the API server and the engine's process live while the engine waits.",),
)
