"""Every request for inference is refused with HTTP 4xx: a wrong key, a wrong model name, a limit that none keeps."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, measured

ENVS = "https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/envs.py"
KEYS = signals.unauthorized_answers.at_least(
    1, judged("vLLM answers 401 to a missing or wrong API key, a proxy 401 or 403")
)
NAMES = signals.not_found_answers.at_least(
    1, judged("vLLM answers 404 to a model, an adapter or a route that it lacks")
)
LIMITS = signals.invalid_answers.at_least(
    1, judged("vLLM answers 400 to a prompt beyond the context or an invalid parameter")
)
BODIES = signals.too_large_answers.at_least(1, documented("vLLM's Rust frontend answers 413 to a large body", ENVS))
SERVED_BEFORE = signals.successes_before_refusals.at_least(
    20, judged("more than the trial requests after a start: successes were normal, and now no user is served")
)

incident = Incident(
    id="requests_refused",
    title="Every request is refused with HTTP 4xx",
    severity="warning",
    per=("instance",),
    window="1m",
    cause="""
        Clients and server do not agree: the API key was changed on one side only, the clients ask for a model name, an
        adapter or a path that this server does not serve, or every prompt is beyond --max-model-len. Such a change
        mostly comes with a restart or a deployment. Engine, /health and /metrics look idle and healthy, since the
        requests end before they reach the engine; vLLM's own counters do not even count a 401.
    """,
    impact="no user of this server gets an answer",
    symptoms=(
        signals.refused_without_success.at_least(
            1, measured("314 answers in 36 s, none of them a success", "requests_refused")
        ),
    ),
    supports=(
        SERVED_BEFORE,
        KEYS,
        NAMES,
        LIMITS,
        BODIES,
        signals.names_asked_in_vain.at_least(1, judged("the log shows the names")),
    ),
    escalates=SERVED_BEFORE,
    sign=signals.sign_of_refusing,
    looks_like=(
        LookAlike("client_errors_surge", distinguish="Some clients are refused, while the requests of others succeed."),
        LookAlike("requests_failing", distinguish="HTTP 5xx are errors of the server."),
        LookAlike(
            "scans of unknown paths",
            distinguish="They ask for /, /robots.txt or /v1/models, or with GET; only a POST that wants inference "
            "counts.",
        ),
    ),
    explains=("client_errors_surge",),
    fixes=(
        Fix.without_restart(
            change="Compare the API key of the clients and the gateway with the one that this server was started with "
            "(--api-key or VLLM_API_KEY): without a valid key every answer is a 401.",
            effect="requests succeed",
            only_if=(KEYS,),
            why=judged("vLLM's authentication answers before the route and the model are looked at"),
        ),
        Fix.without_restart(
            change="Compare the model name and the path that clients send with what is served: "
            "--served-model-name, the adapters (GET /v1/models lists them), and the base URL of the clients, which "
            "ends in /v1.",
            effect="requests succeed",
            only_if=(NAMES,),
            why=judged("a renamed model or an adapter that is not loaded is answered 404"),
        ),
        Fix.without_restart(
            change="Read the reason in the body of one refused answer: the prompt with max_tokens exceeds "
            "--max-model-len, or a parameter or schema is invalid in this release. Undo the change of the limit or the "
            "client.",
            effect="requests succeed",
            only_if=(LIMITS,),
            why=judged("vLLM states the limit and the length in the answer"),
        ),
        Fix(
            change="Raise VLLM_HTTP_MAX_REQUEST_BODY_SIZE (bytes; 32 MiB if not set, 0: no limit), or have clients "
            "send images and audio by URL or smaller.",
            effect="requests with large contents succeed",
            risk="each body is held in host memory",
            rollback="unset the variable",
            only_if=(BODIES,),
            why=documented("only the Rust frontend (VLLM_USE_RUST_FRONTEND=1) has the limit, from 0.33 on", ENVS),
        ),
        Fix.without_restart(
            change="Look at the status of these answers, in the access log or by sending one of the requests again "
            "with curl -i: 401 is a wrong API key, 404 a model, an adapter or a route that is not served, 400 a prompt "
            "that is too long or an invalid parameter.",
            effect="the kind of refusal is known",
            why=judged("the metric groups all client errors as 4xx; the access log has the status"),
        ),
    ),
    operations=("drain", "rollback"),
    mitigate=(
        "Send the requests to a replica that answers them; if all replicas refuse them, undo the last change of "
        "clients, gateway, keys or flags.",
    ),
    hand_over=("the body of one refused answer, the request with its model name and path, and the last deployment",),
    do_not=("Do not restart the server with the same settings: the same requests are refused again.",),
)
