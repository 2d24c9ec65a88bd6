"""Requests are in flight and nothing moves: not one token is read or written."""

from diag.incident import Fix, Incident, LookAlike, documented, judged, measured
from diag.signals import progress, requests_stuck

TROUBLESHOOTING = "https://docs.vllm.ai/en/latest/usage/troubleshooting.html"

incident = Incident(
    id="engine_stalled",
    title="The engine stands still with requests in flight",
    severity="critical",
    per=("instance", "engine"),
    window="1m",
    cause="""
        The engine loop does not come back from a step: a worker hangs in a kernel or a collective, or the process is
        stopped. /health, /version and /metrics go on answering 200, for the API server is another process. Some 300 s
        later (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS) the engine may give up and die.
    """,
    impact="every stream hangs, and no new request gets a token",
    symptoms=(
        requests_stuck.at_least(
            1,
            measured(
                "nothing moves for 30 s with two or more in flight; prefill froze no one above 10 s", "engine_stalled"
            ),
        ),
    ),
    supports=(progress.at_most(0, measured("0 for 42 s", "engine_stalled")),),
    looks_like=(
        LookAlike(
            "tp_communication_stall",
            distinguish="The page is the same. One worker without CPU time, or a GPU at full utilisation and little "
            "power, or the log's shm_broadcast line tells; none of these is on the page.",
        ),
        LookAlike("engine_dead", distinguish="There, the page itself no longer answers."),
        LookAlike("queue_saturation", distinguish="There, requests wait as well, but tokens flow."),
    ),
    explains=("queue_saturation", "kv_pool_saturated", "replicas_unbalanced", "contract_breached"),
    fixes=(
        Fix(
            change="Before anything is restarted, keep the evidence: the stack of EngineCore and of every worker.",
            command="py-spy dump --pid <pid>   # for each of: pgrep -f 'VLLM::'",
            effect="names the call that does not return",
            restart=False,
            why=documented("stack traces of the hanging processes come first", TROUBLESHOOTING),
        ),
        Fix(
            change="Take the server out of rotation and restart it: a stalled engine has not been seen to recover by "
            "itself unless the process was merely stopped.",
            effect="tokens move again; requests in flight are lost",
            why=judged("nothing on the page can be changed to wake it"),
        ),
    ),
    mitigate=(
        "Take the server out of rotation: /health goes on answering 200, so no probe does it for you.",
        "Have clients time out and retry elsewhere: what hangs here does not come back.",
    ),
    hand_over=(
        "the stack of EngineCore and of every worker, taken before the restart, and the log of the last ten minutes",
    ),
    do_not=(
        "Do not add load or replicas behind the same balancer: /health answers 200 and requests keep coming in.",
        "Do not trust the gauges: they are frozen at their last values.",
    ),
)
