"""The server crashed a short time ago and was started again: a new start does not erase the crash."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, judged
from diag.knowledge import shared_fixes

incident = Incident(
    id="server_crashed",
    title="Server crashed and was restarted",
    severity="warning",
    per=("instance",),
    window="1m",
    live_window="15s",
    hold="0s",
    immediate="a crash is one event; the second one within 15 minutes is no transient",
    cause="""
        The engine or the whole server ended by itself: a CUDA error, memory that ran out, a kill by the kernel or by a
        signal. A supervisor started it again. Until the reason is known, it may end again at any moment.
    """,
    impact="all requests in flight at the crash failed, and it may happen again",
    symptoms=(
        signals.crashed_lately.at_least(1, judged("what ended the server once within 15 minutes may end it again")),
        signals.started_since_crash.at_least(
            1, judged("a server that nothing has started again is dead, which is another incident")
        ),
    ),
    escalates=signals.crashes_or_down.at_least(
        1, judged("a second crash is no chance; a server that starts serves nobody")
    ),
    looks_like=(
        LookAlike("crash_loop", distinguish="It crashed at least three times in a row."),
        LookAlike("engine_dead", distinguish="It stays down: nothing starts it again."),
        LookAlike("a planned restart", distinguish="The log reports an orderly shutdown before the start."),
    ),
    explains=("engine_dead", "contract_breached"),
    quotes=signals.crash_time,
    began=signals.crash_time,
    fixes=(
        *shared_fixes.READ_LOG,
        Fix.without_restart(
            change="Find the reason of the crash before it comes back: the last lines before the start, and "
            "`dmesg -T | tail -100` for the OOM killer and Xid errors.",
            effect="no further crash for 15 minutes",
            why=judged("a new start does not remove the cause of the crash"),
        ),
    ),
    operations=("log",),
    mitigate=("Watch it for 15 minutes before it gets its full share of requests again.",),
    hand_over=("the log from the last normal line before the crash to the next start, and `dmesg -T | tail -100`",),
)
