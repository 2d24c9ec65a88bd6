"""The log says that the engine did not start, and why."""

from diag.incident import Fix, Incident, LookAlike, documented, judged, measured
from diag.signals import startup_failed

TROUBLESHOOTING = "https://docs.vllm.ai/en/latest/usage/troubleshooting.html"

incident = Incident(
    id="startup_failed",
    title="The engine did not start",
    severity="critical",
    per=("instance",),
    hold="0s",
    cause="""
        A worker or the engine raised an error before the server was ready: a setting that this hardware does not take,
        no memory, a missing model, a flag that this release does not know. The root cause stands above the last
        traceback.
    """,
    impact="the server never becomes ready; under a supervisor it starts and fails again and again",
    symptoms=(startup_failed.at_least(1, measured("the engine's own words", "startup_crash_blocksize16")),),
    looks_like=(
        LookAlike("startup_slow", distinguish="There, the start goes on, and no error ends it."),
        LookAlike("engine_dead", distinguish="There, the server had answered before."),
    ),
    fixes=(
        Fix(
            change="Read the first error of this start: the ones below it follow.",
            command="grep -nE 'Error|error:' <the log> | head",
            effect="names the root cause",
            restart=False,
            why=documented("the root cause stands above 'Engine core initialization failed'", TROUBLESHOOTING),
        ),
        Fix(
            change="Correct what it names and start again; `diag doctor --log` follows the start.",
            effect="the phases pass and the page answers",
            why=judged("a start that failed for its settings fails again with them"),
        ),
    ),
    mitigate=("Roll back to the configuration or image that started last.",),
    hand_over=("the log from its first line to the error, the image's digest and the launch command",),
    do_not=("Do not let the supervisor restart it for ever: each attempt loads the weights again.",),
)
