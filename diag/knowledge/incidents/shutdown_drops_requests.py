"""A planned stop of the server, as in a rolling update, ends requests that were still in flight."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, measured, reported

SHUTDOWN = "https://github.com/vllm-project/vllm/pull/36666"
GRACE = "https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination"
PATTERN = "https://github.com/llm-d/llm-d/issues/927"

DRAINED = signals.waited_for_requests.at_least(
    1, documented("the engine logs that it waits, and for how long", SHUTDOWN)
)
ABORTED = signals.waited_for_requests.at_most(0, documented("with a time-out of 0 s it aborts them at once", SHUTDOWN))
DROPPED = signals.requests_cut_at_shutdown.at_least(
    1, measured("6 streams were cut off at SIGTERM, none with a drain", "shutdown_drops_requests")
)
CUT = signals.requests_in_flight_at_shutdown.at_least(1, judged("each of them is an error that a user sees"))
REFUSED = signals.requests_refused_at_shutdown.at_least(
    1, judged("clients that went on during a drain of 27 s got 1,650 answers of HTTP 500 from vLLM 0.32")
)

incident = Incident(
    id="shutdown_drops_requests",
    title="Planned shutdown drops requests",
    severity="warning",
    per=("instance",),
    window="1m",
    live_window="15s",
    hold="0s",
    cause="""
        On SIGTERM vLLM aborts the requests in flight, unless --shutdown-timeout gives them time: it is 0 s by default.
        With a drain, requests that outlast the time-out, or the grace period of the platform (Kubernetes: 30 s, then
        SIGKILL), are lost as well. While it drains, vLLM still accepts connections and answers new requests with HTTP
        500: a load balancer has to stop sending before SIGTERM.
    """,
    impact="the requests in flight ended with an error or half an answer; each restart of a rolling update repeats it",
    symptoms=(DROPPED,),
    supports=(
        CUT,
        REFUSED,
        DRAINED,
    ),
    looks_like=(
        LookAlike("server_crashed", distinguish="Nothing asked it to stop: the log has no shutdown before the end."),
        LookAlike(
            "requests_aborted",
            distinguish="Clients hang up on a server that goes on: the server was not told to stop.",
        ),
        LookAlike(
            "a shutdown without requests",
            distinguish="The log has the same lines of the shutdown, and no request that failed after them.",
            refuted_by=DROPPED,
        ),
    ),
    explains=("requests_failing", "requests_aborted"),
    began=signals.shutdown_time,
    fixes=(
        Fix(
            flag="--shutdown-timeout",
            value=signals.latency_of_long_requests,
            rounding="up",
            least=30,
            most=600,
            change="Let the server finish its requests before it ends: the p99 of their latency, between 30 s and "
            "600 s.",
            effect="requests in flight at SIGTERM are answered",
            only_if=(ABORTED,),
            risk="a restart takes up to this long; requests that arrive then get HTTP 500: add the preStop hook",
            rollback="remove the flag",
            why=reported("a drain of 0 s, the default, aborts what is in flight", SHUTDOWN),
        ),
        Fix(
            change="Give the drain more time: raise --shutdown-timeout above the latency of the longest requests "
            "(p99: {value} s), or bound their length by max_tokens.",
            value=signals.latency_of_long_requests,
            rounding="up",
            effect="the drain ends before its time-out",
            only_if=(DRAINED, CUT),
            risk="a restart takes up to this long",
            why=measured("with 60 s every stream was answered", "shutdown_drained"),
        ),
        Fix.without_restart(
            change="Add a preStop hook that sleeps until the load balancer has taken the server out (`sleep 15`), "
            "before SIGTERM reaches vLLM.",
            effect="no request arrives at a server that drains",
            why=reported("gateways learn of a terminating pod seconds later", PATTERN),
        ),
        Fix(
            change="In Kubernetes, set terminationGracePeriodSeconds above the sleep of the preStop hook plus "
            "--shutdown-timeout plus 30 s: the kubelet ends the pod with SIGKILL after it, and its default is 30 s. "
            "With systemd: TimeoutStopSec; with Docker: stop_grace_period.",
            effect="the drain is not cut off by the platform",
            why=documented("the preStop hook counts within the grace period", GRACE),
        ),
    ),
    operations=("pause",),
    mitigate=(
        "Have the gateway retry the requests that failed on another replica: those without a first token are safe to "
        "repeat.",
        "Pause the rollout until the server drains: each further replica drops its requests too.",
    ),
    hand_over=(
        "the log from `[shutdown] API server: shutdown triggered` to its end, the launch command, and the pod's "
        "terminationGracePeriodSeconds and preStop hook",
    ),
    do_not=("Do not stop replicas with SIGKILL (`kubectl delete --force`, `docker kill`): nothing drains then.",),
)
