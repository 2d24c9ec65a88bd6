"""Clients disconnect before their requests finish: a time-out in front of the server is shorter than its latency."""

from diag.incident import Fix, Incident, LookAlike, documented, judged, measured
from diag.signals import lost_at_one_age, lost_in_harm, queue_time_share, share_given_up, slowest_finished

METRICS = "https://docs.vllm.ai/en/latest/usage/metrics.html"

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
        share_given_up.above(
            0.2, measured("25 % behind a time-out of 4 s, 5 % where a few users stop", "requests_aborted")
        ),
        lost_in_harm.at_least(
            1, judged("completion clients cancel 20-30 % of their requests by design; without harm that is no incident")
        ),
    ),
    supports=(
        lost_at_one_age.above(0.7, measured("100 % from 2.5 s to 5 s: a time-out of 4 s", "requests_aborted")),
        queue_time_share.above(0.25, judged("much of the time-out is spent in the queue")),
    ),
    looks_like=(
        LookAlike(
            "users who stop an answer, and completion clients that cancel while their user types",
            distinguish="At any age, or below 1 s; a time-out ends many at the same age. No request queues for long.",
        ),
        LookAlike("requests that are refused", distinguish="They end with a status of 400 or above."),
        LookAlike("engine_stalled", distinguish="No token moves at all: clients give up because nothing comes."),
    ),
    fixes=(
        Fix(
            change="Set the time-outs of the gateway and of the clients well above {value}: within that time 99 % of "
            "the requests ended that were not given up. How long the others would have taken is not measured.",
            value=slowest_finished,
            rounding="up",
            effect="requests finish, and none is computed twice",
            restart=False,
            why=documented("end-to-end latency covers the queue, the prefill and every output token", METRICS),
        ),
        Fix(
            change="Stream the answers and let the gateway's time-out count silence, not the whole answer: a stream is "
            "silent for the time to its first token and between two tokens only.",
            effect="long answers outlive the time-out",
            restart=False,
            why=judged("most gateways have a read time-out beside the one for the whole request"),
        ),
        Fix(
            change="Bound the output by max_tokens in the requests, to what is generated within the time-out.",
            effect="answers end before the time-out",
            restart=False,
            why=judged("the latency of a long answer is its length times the inter-token latency"),
        ),
    ),
    mitigate=("Stop retries at the gateway, or have them wait longer each time: a retried request starts anew.",),
    hand_over=("the time-outs of every proxy between client and server, and the age at which requests end there",),
    do_not=("Do not lower the time-outs to shed load: what was computed until then is lost. Limit the concurrency.",),
)
