"""The server exits again and again without being stopped."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged
from diag.knowledge import shared_fixes

CRASH_LOOP = "https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#restart-policy"

incident = Incident(
    id="crash_loop",
    title="Server crash loop",
    severity="critical",
    per=("instance",),
    window="1m",
    live_window="15s",
    hold="0s",
    immediate="the third crash in a row is minutes after the first one: the count is the wait",
    cause="""
        A supervisor restarts the server each time it ends: a setting that cannot work, memory that does not suffice, a
        probe that kills it before it is ready, or a request that kills the engine whenever clients send it again. The
        count begins anew once the server has served for ten minutes, was stopped, or is ready after failed starts.
    """,
    impact="the server comes back for moments or not at all, and loses all its requests each time",
    symptoms=(
        signals.crashes_in_a_row.at_least(
            3,
            judged("one crash may be chance and a second one its echo; Kubernetes, too, counts until ten good minutes"),
        ),
    ),
    looks_like=(
        LookAlike("startup_failed", distinguish="It failed to start once or twice."),
        LookAlike("startup_slow", distinguish="One start takes long; none has ended."),
        LookAlike("engine_dead", distinguish="It stays down: nothing starts it again."),
    ),
    explains=("startup_failed", "server_crashed", "engine_dead", "engine_stalled", "contract_breached"),
    sign=signals.sign_of_crash,
    quotes=signals.quoted_error,
    lints=True,
    fixes=(
        *shared_fixes.READ_LOG,
        Fix(
            change="Correct what the error names and start the server once; `diag doctor --log` follows the start.",
            effect="the start-up phases complete, and the server serves for longer than ten minutes",
            only_if=(signals.not_quoted.at_most(0, judged("the log names an error to correct")),),
            why=judged("a start that failed three times in a row fails again"),
        ),
        Fix(
            change="If the log ends without an error, a probe or the kernel kills it: `kubectl describe pod` shows "
            "Liveness probe failed, Startup probe failed or OOMKilled. Let the startupProbe wait longer, or give the "
            "host more memory.",
            effect="the start runs to its end",
            only_if=(signals.not_quoted.at_least(1, judged("a kill from outside leaves no error in the log")),),
            why=documented("the kubelet restarts a container whose probe fails, with a growing delay", CRASH_LOOP),
        ),
        Fix.without_restart(
            change="If it serves before it crashes, hold back the clients and let them in one by one: a single request "
            "may be what ends the engine.",
            effect="the server serves for longer than ten minutes",
            only_if=(signals.last_start_failed.at_most(0, judged("a start that fails has met no request")),),
            why=judged("if a server starts well and crashes later, its load is the cause"),
        ),
    ),
    operations=("log", "drain", "rollback"),
    mitigate=(
        "Roll back to the last configuration or image that served.",
        "Take the server out of rotation: requests that reach it between two crashes are lost.",
    ),
    hand_over=("the log of two runs from first line to last, `kubectl describe pod`, and the launch command",),
    do_not=("Do not let the supervisor restart it endlessly: every attempt loads the weights again.",),
)
