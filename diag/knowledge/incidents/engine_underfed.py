"""The engine idles most of the time although requests arrive: the latency that users notice has another source."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, judged, measured

incident = Incident(
    id="engine_underfed",
    title="Engine idle between requests",
    severity="info",
    per=("instance", "engine"),
    window="1h",  # bursts leave an engine idle between them
    live_window="1h",
    hold="12h",  # a quiet night is normal
    cause="""
        Requests are served, but in most samples none is running: the engine waits for its clients. If users still
        report high latency, it arises before the request reaches vLLM or after the response has left it.
    """,
    impact="none on this server; if users report high latency, it arises in front of this server",
    symptoms=(
        signals.requests_running_median.at_most(
            0, measured("0 requests run in the median sample", "healthy_after_cascade")
        ),
        signals.requests_running.below(1, measured("0.4 requests run on average", "healthy_after_cascade")),
        signals.requests_by_latency.below(
            0.5, judged("an engine that holds {threshold} requests on average idles most of the time")
        ),
        signals.requests_waiting_peak.at_most(0, judged("no request waited in any sample")),
        signals.requests_finished.at_least(10, judged("with less traffic, an idle moment proves nothing")),
    ),
    supports=(signals.bandwidth_share.below(signals.EMPTY, signals.REACHED),),
    looks_like=(
        LookAlike(
            "engine_stalled",
            distinguish="The gauges of an engine that hangs, compiles or is in one long step keep their last values; a "
            "token or a probe that was late shows it afterwards.",
            requires=signals.stood_still.at_most(
                0, judged("a standstill is no idleness, whatever number of requests it shows")
            ),
        ),
    ),
    fixes=(
        Fix.without_restart(
            change="Check what is in front of the server: the gateway's latency and limits, the client's connection "
            "pool, and the time between its requests.",
            effect="more requests run",
            why=judged("the engine has capacity to spare"),
        ),
    ),
    mitigate=("Nothing is wrong on this server; check the load balancer, the gateway and the clients.",),
    hand_over=("the request rate at the gateway, and `requests finished` on this server",),
)
