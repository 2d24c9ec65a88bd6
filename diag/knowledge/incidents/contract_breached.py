"""The latency SLO is violated, for any cause: the alert that pages."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, judged

incident = Incident(
    id="contract_breached",
    title="Latency SLO violated",
    severity="critical",
    per=("instance", "engine"),
    hold="2m",
    burns=(signals.FAST_BURN, signals.SLOW_BURN),
    cause="""
        TTFT, inter-token latency or end-to-end latency misses the SLO of diag.toml so often that the monthly error
        budget is exhausted within days. This incident states the impact on users, not its cause: the cause is another
        incident, or more load than the server was sized for.
    """,
    impact="more responses miss the latency SLO than the objective allows",
    symptoms=(signals.error_budget_burn_rate.above(signals.FAST_BURN.factor, signals.SPENDS_BUDGET_FAST),),
    supports=(
        signals.budget_spent_early,
        signals.waiting_share.above(0.33, judged("a high share means that TTFT is queue time, not computation")),
        signals.requests_running.at_least(1, judged("the engine is processing requests")),
        signals.NEAR_BANDWIDTH,
        signals.NEAR_COMPUTE,
    ),
    looks_like=(
        LookAlike(
            "engine_stalled",
            distinguish="No request gets a token at all: no request finishes, so no latency is counted.",
        ),
        LookAlike("queue_saturation", distinguish="Queue time is what is long: it is a cause of the violation."),
    ),
    fixes=(
        Fix.without_restart(
            change="Add a replica or divert part of the traffic: where nothing else is wrong, the load exceeds what "
            "the server can serve within the SLO.",
            effect="the share of late responses falls",
            only_if=(signals.balanced,),
            why=judged("a server at its capacity limit gets slower for all requests"),
        ),
        Fix.without_restart(
            change="If no user complains, the SLO is stricter than users expect: set it in diag.toml.",
            effect="the error budget is computed against the real SLO",
            why=judged("an alert without any action is noise"),
        ),
    ),
    operations=("scale",),
    mitigate=("Shed or divert load at the gateway: the longest prompts first, then batch clients.",),
    hand_over=("the SLO of diag.toml, the dashboard of the last six hours, and the output of `diag doctor`",),
    do_not=(
        "Do not restart a server that is merely slow: it comes back with an empty prefix cache and the same load.",
    ),
)
