"""The log reports that the engine did not start, and why."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, judged, measured
from diag.knowledge import shared_fixes

incident = Incident(
    id="startup_failed",
    title="Engine start-up failed",
    severity="critical",
    per=("instance",),
    window="1m",
    hold="0s",
    immediate="the log states that the start ended with an error; a supervisor's next start hides it in a minute",
    cause="""
        A worker or the engine raised an error before the server was ready: an unsupported setting on this hardware, too
        little memory, a missing model, or a flag that this release does not have. The root cause is logged above the
        last traceback.
    """,
    impact="the server never becomes ready; under a supervisor it restarts and fails in a loop",
    symptoms=(
        signals.startup_failed.at_least(1, measured("the engine logs that it failed", "startup_crash_blocksize16")),
    ),
    looks_like=(
        LookAlike("startup_slow", distinguish="The start continues, and no error has ended it."),
        LookAlike("engine_dead", distinguish="The server had answered before."),
        LookAlike("crash_loop", distinguish="It was started again, and failed again."),
    ),
    explains=(
        "server_crashed",
        "engine_dead",
    ),
    quotes=signals.quoted_error,
    lints=True,
    fixes=(
        *shared_fixes.READ_LOG,
        Fix(
            change="Correct what the error names and start again; `diag doctor --log` follows the start.",
            effect="the start-up phases complete and /metrics answers",
            why=judged("a start that failed because of its settings fails again with them"),
        ),
    ),
    operations=("log", "rollback"),
    mitigate=("Roll back to the last configuration or image that started.",),
    hand_over=("the log from its first line to the error, the image digest and the launch command",),
    do_not=("Do not let the supervisor restart it endlessly: every attempt loads the weights again.",),
)
