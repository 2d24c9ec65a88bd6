"""Clients disconnect before their requests finish: a time-out in front of the server is shorter than its latency."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, measured

METRICS = "https://docs.vllm.ai/en/latest/usage/metrics.html"

ONE_AGE = signals.spread_of_ages_given_up.at_most(
    2.5, judged("ages from a time-out lie within one or two buckets; users who stop at random spread them twentyfold")
)

incident = Incident(
    id="requests_aborted",
    title="Clients give up before their requests finish",
    severity="warning",
    per=("instance",),
    hold="2m",
    cause="""
        A client, or a gateway on its behalf, closes the connection when its time-out is over, and vLLM aborts the
        request. What was computed for it is lost; where it is retried, the server computes it again, and the load that
        makes it slow grows. vLLM counts such a request as answered over HTTP, and as finished nowhere.
    """,
    impact="users get an error or half an answer, and the server computes tokens that no client reads",
    symptoms=(
        signals.share_given_up.above(
            0.2, measured("25 % behind a time-out of 4 s, 5 % where a few users stop", "requests_aborted")
        ),
        signals.harm_of_giving_up.at_least(
            1, judged("a share alone is no evidence: editors that complete code cancel a quarter of their requests")
        ),
    ),
    supports=(
        ONE_AGE,
        signals.age_given_up.at_least(
            1, judged("no gateway's time-out is shorter than a second; a cancelled completion is")
        ),
        signals.queue_time_share.above(0.25, judged("much of the time-out is spent in the queue")),
    ),
    looks_like=(
        LookAlike(
            "users who stop an answer",
            distinguish="They stop at any age; a time-out ends many requests at the same age.",
            refuted_by=ONE_AGE,
        ),
        LookAlike(
            "requests_cancelled",
            distinguish="Clients cancel by design: requests end young, without a queue and without late tokens.",
        ),
        LookAlike("requests that are refused", distinguish="They end with a status of 400 or above."),
        LookAlike("engine_stalled", distinguish="No token moves at all: clients give up because nothing comes."),
    ),
    fixes=(
        Fix.without_restart(
            change="Find the time-out of about {value} in the gateway, the load balancer or the clients, and at least "
            "double it: that is the mean age at which requests are given up.",
            value=signals.age_given_up,
            only_if=(ONE_AGE,),
            effect="requests finish, and none is computed twice",
            why=documented("the HTTP server times each response, the engine each request that finishes", METRICS),
        ),
        Fix.without_restart(
            change="Stream the answers and let the gateway's time-out count silence, not the whole answer: a stream is "
            "silent for the time to its first token and between two tokens only.",
            effect="long answers outlive the time-out",
            why=judged("most gateways have a read time-out beside the one for the whole request"),
        ),
        Fix.without_restart(
            change="Bound the output by max_tokens in the requests, to what is generated within the time-out.",
            effect="answers end before the time-out",
            why=judged("the latency of a long answer is its length times the inter-token latency"),
        ),
    ),
    operations=("scale",),
    mitigate=("Stop retries at the gateway, or have them wait longer each time: a retried request starts anew.",),
    hand_over=("the time-outs of every proxy between client and server, and the age at which requests end there",),
    do_not=("Do not lower the time-outs to shed load: what was computed until then is lost. Limit the concurrency.",),
)
