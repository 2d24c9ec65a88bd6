"""Clients cancel many requests although nothing is slow: completions that are cancelled by typing, for example."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, judged, measured

incident = Incident(
    id="requests_cancelled",
    title="Clients cancel many requests by design",
    severity="info",
    per=("instance",),
    cause="""
        Clients that no longer need an answer disconnect: an editor cancels a completion at the next key, a user stops
        reading. vLLM aborts the request at once. Nothing in the server makes clients leave: the requests end young or
        at any age, without a queue, and first tokens come in time.
    """,
    impact="prefills and tokens of the cancelled requests are computed for no reader",
    symptoms=(
        signals.share_given_up.above(
            0.2, measured("25 % where an editor cancels completions, 5 % where a few users stop", "requests_cancelled")
        ),
        signals.harm_of_giving_up.at_most(0, judged("no time-out, no queue, no late first token, and no sudden rise")),
    ),
    supports=(signals.age_given_up.below(1, judged("a key is pressed within a second")),),
    looks_like=(
        LookAlike(
            "engine_dead",
            distinguish="A server that ends loses the requests in flight; none of their clients has hung up.",
            requires=signals.evidence_of_death.at_most(
                0, judged("only a server that answers finishes or aborts requests")
            ),
        ),
        LookAlike("requests_aborted", distinguish="A time-out, a queue or late tokens make the clients give up."),
    ),
    fixes=(
        Fix.without_restart(
            change="If the cancelled requests cost too much, let the clients wait for a pause in typing (some 200 ms) "
            "before they send a completion, and bound max_tokens.",
            effect="fewer requests are cancelled",
            why=judged("a request that is not sent costs nothing"),
        ),
    ),
    mitigate=("None is needed: no user waits. Leave these requests out of the error rate of the gateway.",),
    hand_over=("the clients that cancel, and whether they do so by design",),
)
