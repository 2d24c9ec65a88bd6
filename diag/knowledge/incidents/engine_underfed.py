"""The engine sits idle for most of the time while requests do come in: what users wait for is not here."""

from diag.incident import Fix, Incident, LookAlike, judged, measured
from diag.signals import (
    requests_finished,
    requests_running,
    requests_running_median,
    requests_waiting_peak,
)

incident = Incident(
    id="engine_underfed",
    title="The engine idles between requests",
    severity="info",
    per=("instance", "engine"),
    hold="12h",  # a quiet night is no news
    cause="""
        Requests are served, but in most samples none is running: the engine waits for its clients. If users complain
        nevertheless, the time is lost before the request reaches vLLM or after the answer has left it.
    """,
    impact="none here; if users complain, look in front of this server",
    symptoms=(
        requests_running_median.at_most(0, measured("0 in the median sample", "healthy_after_cascade")),
        requests_running.below(1, measured("0.4 on average", "healthy_after_cascade")),
        requests_waiting_peak.at_most(0, judged("nobody waited at any sample")),
        requests_finished.at_least(10, judged("a server that nobody uses is idle, not underfed")),
    ),
    looks_like=(LookAlike("engine_stalled", distinguish="There, requests are in flight and do not finish."),),
    fixes=(
        Fix(
            change="Look in front of the server: the gateway's own latency and limits, the client's connection pool, "
            "the time between its requests.",
            effect="requests running rise",
            restart=False,
            why=judged("the engine has room"),
        ),
    ),
    mitigate=("Nothing is wrong on this server; look at the balancer, the gateway and the clients.",),
    hand_over=("the rate of requests at the gateway beside `requests finished` here",),
)
