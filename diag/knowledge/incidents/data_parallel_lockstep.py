"""The data-parallel engines of a server wait for each other: some hold requests, and none makes progress."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, reported
from diag.knowledge import shared_fixes

DATA_PARALLEL = "https://docs.vllm.ai/en/latest/serving/data_parallel_deployment/"
RAS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html"
INFINIBAND = "https://docs.kernel.org/infiniband/sysfs.html"
DRIFT = "https://github.com/vllm-project/vllm/issues/43547"

incident = Incident(
    id="data_parallel_lockstep",
    title="Data-parallel engines out of step",
    severity="critical",
    outage=True,
    per=("instance",),
    window="1m",
    live_window="10s",
    cause="""
        The engines of a mixture-of-experts model share their experts: each forward pass is a collective of all of them,
        and an engine without requests takes part with a dummy batch. If one engine skips a pass, has stopped or hangs,
        the others wait for it for ever. An engine with requests then stands still, although its peers hold none.
        /health and /metrics keep answering.
    """,
    impact="every stream hangs and no new request gets a token, on all engines of this server",
    symptoms=(
        signals.requests_stuck_on_all_engines.at_least(
            1, reported("one rank holds requests, its peers none, and no token is processed until a restart", DRIFT)
        ),
        signals.engines.at_least(2, documented("a single engine waits for no peer", DATA_PARALLEL)),
        signals.requests_running.above(0, judged("requests that are not admitted wait for memory, not for a peer")),
    ),
    supports=(
        signals.nccl_ranks_missing.at_least(
            1, documented("NCCL names the process that has not entered a collective", RAS)
        ),
        signals.infiniband_link_errors.above(0, documented("the counters of a sound link stand still", INFINIBAND)),
        signals.infiniband_ports_down.at_least(1, documented("no collective passes a port that is down", INFINIBAND)),
        signals.engines_missing.at_least(
            1,
            reported(
                "the peers of a missing rank busy-wait in their collective, and it uses no CPU itself",
                "https://github.com/vllm-project/vllm/issues/42354",
            ),
        ),
    ),
    looks_like=(
        LookAlike(
            "engine_stalled",
            distinguish="The engines of a dense model do not wait for each other: its peers go on with their own "
            "requests. Where the peers hold none, send one to each of them (header X-data-parallel-rank).",
        ),
        LookAlike(
            "tp_communication_stall",
            distinguish="A rank within one engine is missing; its peers are the ranks of the same engine.",
        ),
        shared_fixes.NOT_PAUSED,
        shared_fixes.NOT_CHANGING,
        LookAlike("engine_dead", distinguish="An engine process has ended; the API server shuts down after it."),
        LookAlike(
            "prefill_decode_contention",
            distinguish="All engines wait for the one that is in a step with a very long prefill. It ends by itself.",
            requires=shared_fixes.NO_LONG_PREFILL,
        ),
        LookAlike("admission_deadlock", distinguish="Requests wait and none runs: the scheduler does not admit them."),
    ),
    explains=("engine_stalled", "queue_saturation", "kv_pool_saturated", "replicas_unbalanced", "contract_breached"),
    fixes=(
        *shared_fixes.LET_GO_ON,
        shared_fixes.SAVE_STACKS,
        Fix(
            change="Take the server out of rotation and restart all of its engines together: one that is restarted "
            "alone does not join the collectives of the others.",
            effect="tokens are generated again; requests in flight are lost",
            only_if=shared_fixes.NOT_HALTED,
            while_it_lasts=True,
            why=judged("no setting of a running server lets an engine catch up with its peers"),
        ),
        Fix(
            change="If it recurs, upgrade vLLM, and until then keep every engine busy or use fewer engines: it begins "
            "when an engine has no request while its peers do.",
            effect="no engine skips a collective",
            only_if=shared_fixes.NOT_HALTED,
            why=reported("an engine that schedules no token returns without the collective", DRIFT),
        ),
    ),
    operations=("drain", "restart"),
    mitigate=(
        "Take the server out of rotation: /health keeps answering 200.",
        "Let clients time out and retry on another server: the requests that hang here will not finish.",
    ),
    hand_over=(
        "the stack traces of every engine and worker, the log of every engine for the last ten minutes, "
        "--data-parallel-size, the all2all backend, and which engines held requests",
    ),
    do_not=(
        "Do not restart one engine alone.",
        "Do not add load: the load balancer within vLLM sends it to the engines that hold none, where it hangs too.",
    ),
)
