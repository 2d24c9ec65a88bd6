"""The number of data-parallel engines is being changed: requests are answered with HTTP 503 until it is done."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged

DEPLOYMENT = "https://docs.vllm.ai/en/latest/serving/expert_parallel_deployment/"
RFC = "https://github.com/vllm-project/vllm/issues/20323"

incident = Incident(
    id="elastic_scaling",
    title="Elastic expert parallelism scales",
    severity="info",
    per=("instance",),
    window="1m",
    live_window="15s",
    hold="0s",
    cause="""
        A client called POST /scale_elastic_ep. vLLM starts or ends engines, moves the experts between the ranks and
        switches to the new group. From the switch to its end, vLLM answers every request with HTTP 503, /metrics and
        /health too; with VLLM_ELASTIC_EP_DRAIN_REQUESTS it first waits for the requests in flight. After a scale-up the
        counters of the page begin at 0.
    """,
    impact="requests get HTTP 503 or stand still for the time of the switch",
    symptoms=(
        signals.elastic_scaling.at_least(
            1, documented("the engines log the beginning, the API server the end", DEPLOYMENT)
        ),
    ),
    looks_like=(
        LookAlike(
            "engine_dead",
            distinguish="No scaling is under way, or it has not ended for "
            f"{signals.LONGEST_SCALING // 60} min: the server will not answer by itself.",
        ),
        LookAlike("data_parallel_lockstep", distinguish="The engines stand still, and no scaling is under way."),
    ),
    explains=("replicas_unbalanced", "requests_failing", "contract_breached"),
    began=signals.scaling_time,
    fixes=(
        Fix.without_restart(
            change="Send requests to another replica until the server answers again: during the switch POST "
            "/is_scaling_elastic_ep gets HTTP 503 like every request, after it false.",
            effect="requests are answered again, by the new number of engines",
            why=documented("the server refuses requests with HTTP 503 while it switches", RFC),
        ),
        Fix(
            change=f"If it has not ended after {signals.LONGEST_SCALING // 60} min, read `[Elastic EP]` in the log: "
            "the last line names the step that does not end, `Scale failed` why. Then restart the server with the new "
            "--data-parallel-size.",
            effect="the step that hangs is known, and the server serves again",
            why=judged("a group of ranks that did not switch as a whole does not recover"),
        ),
    ),
    mitigate=("Have the gateway retry HTTP 503 on another replica.",),
    do_not=("Do not restart engines or the server while it scales: the group has to begin anew.",),
)
