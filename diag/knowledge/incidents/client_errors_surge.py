"""Many requests are refused with HTTP 4xx all at once, on a server that refused few before."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, judged, measured
from diag.knowledge.signals import answers

incident = Incident(
    id="client_errors_surge",
    title="Wave of client errors (HTTP 4xx)",
    severity="info",
    per=("instance",),
    hold="2m",
    cause="""
        Clients send requests that the server refuses: a prompt beyond the context, a model name or an adapter that it
        does not serve, an invalid schema, an API key that has changed. The server works as configured. A wave that
        begins suddenly follows a change: a client's release, a renamed model, a shorter --max-model-len, a new key.
    """,
    impact="the affected clients get HTTP 4xx instead of an answer; other clients notice nothing",
    symptoms=(
        signals.refused_share.above(
            answers.MANY_REFUSED, measured("56 % in a wave of too long prompts, 1 % before it", "client_errors_surge")
        ),
        signals.refused_growth.above(answers.SURGE, judged("a steady share of client errors is no news")),
    ),
    sign=signals.sign_of_refusing,
    looks_like=(
        LookAlike("requests_failing", distinguish="HTTP 5xx are errors of the server."),
        LookAlike(
            "scans of unknown paths", distinguish="They hit other routes; inference routes alone are counted here."
        ),
    ),
    fixes=(
        Fix.without_restart(
            change="Look at the status of these answers in the access log: 400 is a prompt that is too long or a "
            "parameter or schema that is invalid, 401 a wrong API key, 404 a model or an adapter that is not served, "
            "413 a body above VLLM_HTTP_MAX_REQUEST_BODY_SIZE of the Rust frontend.",
            command='grep -oE \'"POST [^"]*" 4[0-9][0-9]\' {log} | sort | uniq -c | sort -rn',
            effect="the kind of client error is known",
            why=judged("the metric groups all client errors as 4xx; the access log has the status"),
        ),
        Fix.without_restart(
            change="Ask the clients that send these requests, or undo the change on the server (model name, "
            "adapters, --max-model-len, API key) that the wave began with.",
            effect="the share of client errors falls",
            why=judged("a wave that begins suddenly follows a change"),
        ),
    ),
    mitigate=("Nothing is wrong on this server; the answer that a client got states the reason.",),
    hand_over=("the body of one refused answer, and the time at which the wave began",),
    do_not=("Do not restart the server: the same requests are refused again.",),
)
