"""The server answers requests with HTTP 5xx, although its engine and its page look healthy."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, measured

STRUCTURED = "https://docs.vllm.ai/en/latest/features/structured_outputs.html"

incident = Incident(
    id="requests_failing",
    title="Requests fail with HTTP 5xx",
    severity="warning",
    per=("instance",),
    hold="2m",
    burns=(signals.FAST_BURN, signals.SLOW_BURN),
    cause="""
        The server accepts requests and answers them with an error of its own. The engine may be idle meanwhile, and
        /health and /metrics answer, because an error ends the request and not the engine. What fails is often one
        feature: a grammar that does not compile, a multimodal input, an adapter that does not load, a KV cache
        transfer, a chat template or a tool parser. The routes and the lines in the log show which one. Under Ray Serve,
        the answers of its proxy on the same node count; the counters of other gateways name no server.
    """,
    impact="users get HTTP 5xx instead of an answer",
    symptoms=(signals.error_burn_rate.above(signals.FAST_BURN.factor, signals.SPENDS_BUDGET_FAST),),
    supports=(
        signals.failed_share.above(0.1, measured("100 % where no grammar compiles", "requests_failing")),
        signals.failed_answers.at_least(5, judged("fewer errors may be one request that its client sends again")),
        signals.engine_errors.at_least(1, judged("the engine itself ended requests; otherwise the API server failed")),
        signals.failing_feature.at_least(1, judged("the log names the feature")),
    ),
    escalates=signals.MOST_FAIL,
    sign=signals.sign_of_failing,
    looks_like=(
        LookAlike(
            "engine_dead",
            distinguish="After its engine has died, an API server answers with HTTP 500 until it ends.",
        ),
        LookAlike("client_errors_surge", distinguish="Client errors are HTTP 4xx; they are not counted here."),
        LookAlike(
            "a server that starts or stops",
            distinguish="A starting server refuses connections and answers none; a stopping one fails a few requests, "
            "once.",
        ),
        LookAlike(
            "load that is shed",
            distinguish="With --max-num-queued-reqs a full queue answers with HTTP 503 on purpose; from vLLM 0.32 on, "
            "a counter of refused requests has these answers, and they are subtracted.",
        ),
        LookAlike("requests_aborted", distinguish="vLLM counts a request that its client gave up as 2xx, not as 5xx."),
    ),
    fixes=(
        Fix.without_restart(
            change="Read the error of one failed request: its traceback in the log names the feature.",
            command="grep -nE -A 30 'ERROR|Traceback' {log} | tail -n 80",
            effect="the cause is known",
            why=judged("vLLM answers each such request with 'Internal server error' only; the reason is in its log"),
        ),
        Fix.without_restart(
            change="Repeat one failed request without its schema, tools, adapter or images, one after the other: the "
            "part without which it succeeds is the cause. Correct that part in the clients, or route it elsewhere.",
            effect="the share of failed answers falls",
            why=measured("requests without the grammar were answered by the same server", "requests_failing"),
        ),
        Fix(
            flag="--structured-outputs-config",
            value='{"backend": "guidance"}',
            change="If requests with a schema fail, try another backend for grammars; keep the other keys.",
            effect="requests with a schema end with their output",
            only_if=(
                signals.failing_feature.at_least(
                    1, documented("the log shows that the backend could not compile a grammar", STRUCTURED)
                ),
            ),
            risk="backends differ in the schemas that they accept",
            rollback="set the old backend again",
            why=judged("backends differ in the grammars that they compile"),
        ),
        Fix(
            change="If the errors began with a deployment (release, flags, model, template), roll it back.",
            effect="the share of failed answers falls",
            why=judged("requests that worked before fail because something has changed"),
        ),
    ),
    operations=("drain", "rollback"),
    mitigate=(
        "Send the failing kind of request (route, feature) to another replica; if all kinds fail, take this server "
        "out of the load balancer once another replica is seen to answer them.",
        "Stop retries of HTTP 500 at the gateway: the same request fails again.",
    ),
    hand_over=("one failed request with its parameters, its lines in the log with the traceback, and the release",),
    do_not=(
        "Do not restart the server before its log is saved: the same requests fail again after the restart.",
        "Do not take all replicas out of the load balancer: if clients cause the errors, every replica has them.",
    ),
)
