"""One start-up phase takes longer than usual."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, reported
from diag.knowledge import shared_fixes

PROBES = "https://kubernetes.io/docs/tasks/configure-pod-container/configure-liveness-readiness-startup-probes/"
LOADING = "https://docs.vllm.ai/en/latest/api/vllm/config/load/"
SLOW_STORAGE = signals.weights_read_rate.below(
    500e6, judged("a local SSD delivers more; a network file system that is read page by page does not")
)
ENVIRONMENT = "https://docs.vllm.ai/en/latest/configuration/env_vars.html"

incident = Incident(
    id="startup_slow",
    title="Slow engine start-up",
    severity="warning",
    per=("instance",),
    cause="""
        Weights load from a slow disk or over the network, compilation runs without its cache (222 s cold and 53 s warm
        have been reported, 2,219 s with large kernels), or kernels warm up: the server is not ready, but not broken.
    """,
    impact="capacity is missing for minutes; a probe with a short timeout kills the server just before it is ready",
    symptoms=(
        signals.starting.at_least(1, judged("the start is still in progress")),
        signals.startup_overdue.above(
            1,
            reported(
                "phases take seconds to minutes; 222.8 s for a cold compilation is usual",
                "https://github.com/vllm-project/vllm/issues/52682",
            ),
        ),
    ),
    supports=(
        signals.startup_seconds.above(600, documented("VLLM_ENGINE_READY_TIMEOUT_S is 600 s by default", ENVIRONMENT)),
        SLOW_STORAGE,
        signals.weights_time_left.above(60, judged("more than a minute of loading is worth a look at the storage")),
    ),
    looks_like=(
        LookAlike(
            "cuda_graph_capture_hang",
            distinguish="The phase is CUDA-graph capture, and it makes no progress for five minutes.",
        ),
        LookAlike("startup_failed", distinguish="An error ended the start."),
    ),
    fixes=(
        Fix.without_restart(
            command="startupProbe: {periodSeconds: 10, failureThreshold: {value}}",
            value=signals.probe_failures_allowed,
            change="Let the platform wait 1.5 times as long as this start has taken so far.",
            effect="the server is not killed before it is ready",
            why=documented("failureThreshold x periodSeconds is the time that a start may take", PROBES),
        ),
        Fix(
            environment="VLLM_ENGINE_READY_TIMEOUT_S",
            value=signals.twice_the_startup,
            least=600,
            direction="raise",
            change="Let vLLM wait for its engine for twice the start-up time so far.",
            effect="the API server does not give up on an engine that is still loading",
            versions=("0.14.0", ""),
            why=documented("the default is 600 s", ENVIRONMENT),
        ),
        Fix(
            flag="--safetensors-load-strategy",
            value="eager",
            change="Read each file of the weights in one go instead of page by page, which is slow over a network. "
            "With the package runai-model-streamer, --load-format runai_streamer reads several files at once.",
            effect="the phase load_weights takes the size of the weights divided by what the storage delivers",
            only_if=(SLOW_STORAGE,),
            risk="a file of the weights at a time is held in host memory",
            rollback="remove the flag",
            why=documented("recommended for models on network filesystems", LOADING),
        ),
        shared_fixes.SAVE_STACKS,
        Fix(
            change="Keep the compile cache (~/.cache/vllm) and the weights on a persistent volume.",
            effect="the phases compile and load_weights are shorter at the next start",
            why=reported(
                "222.8 s with a cold cache, 53.4 s with a warm one", "https://github.com/vllm-project/vllm/issues/52682"
            ),
        ),
    ),
    operations=("pause",),
    mitigate=("Keep the old replica in rotation until this one is ready.",),
    hand_over=(
        "the timeline of phases that `diag doctor --log` prints, and where the weights and the compile cache are "
        "stored",
    ),
    do_not=("Do not restart it while a phase makes progress: the next start begins from scratch.",),
)
