"""A start takes longer than usual in one of its phases."""

from diag.incident import Fix, Incident, LookAlike, documented, judged, reported
from diag.signals import (
    probe_failures_allowed,
    starting,
    startup_overdue,
    startup_seconds,
    twice_the_startup,
)

PROBES = "https://kubernetes.io/docs/tasks/configure-pod-container/configure-liveness-readiness-startup-probes/"
ENVIRONMENT = "https://docs.vllm.ai/en/latest/configuration/env_vars.html"

incident = Incident(
    id="startup_slow",
    title="The start takes unusually long",
    severity="warning",
    per=("instance",),
    cause="""
        Loading weights from a slow disk or over the network, a compile without its cache (222 s cold and 53 s warm have
        been reported, 2,219 s with large kernels), or a warm-up of kernels: the server is not ready, and not broken.
    """,
    impact="capacity is missing for minutes, and an impatient probe kills the start just before it ends",
    symptoms=(
        starting.at_least(1, judged("a start that is over is no longer slow")),
        startup_overdue.above(
            1,
            reported(
                "phases take seconds to minutes; 222.8 s for a cold compile is usual",
                "https://github.com/vllm-project/vllm/issues/52682",
            ),
        ),
    ),
    supports=(startup_seconds.above(600, documented("VLLM_ENGINE_READY_TIMEOUT_S is 600 s", ENVIRONMENT)),),
    looks_like=(
        LookAlike(
            "cuda_graph_capture_hang",
            distinguish="There, the phase is the capture, and nothing moves for five minutes.",
        ),
        LookAlike("startup_failed", distinguish="There, an error ended it."),
    ),
    fixes=(
        Fix(
            command="startupProbe: {periodSeconds: 10, failureThreshold: {value}}",
            value=probe_failures_allowed,
            change="Have the platform wait for as long as this start takes, and half as long again.",
            effect="the start is not killed before it ends",
            restart=False,
            why=documented("failureThreshold x periodSeconds is the time a start may take", PROBES),
        ),
        Fix(
            environment="VLLM_ENGINE_READY_TIMEOUT_S",
            value=twice_the_startup,
            least=600,
            direction="raise",
            change="Have vLLM wait for its own engine for twice as long.",
            effect="the API server does not give up on an engine that still loads",
            versions=("0.14.0", ""),
            why=documented("600 s by default", ENVIRONMENT),
        ),
        Fix(
            change="Keep the compile cache (~/.cache/vllm) and the weights on a volume that outlives the container.",
            effect="the phases compile and load_weights shrink at the next start",
            why=reported("222.8 s cold, 53.4 s warm", "https://github.com/vllm-project/vllm/issues/52682"),
        ),
    ),
    mitigate=("Keep the old replica in rotation until this one is ready.",),
    hand_over=(
        "the time line of phases that `diag doctor --log` prints, and where the weights and the compile cache lie",
    ),
    do_not=("Do not restart it while a phase moves: the next start begins at the beginning.",),
)
