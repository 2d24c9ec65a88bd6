"""The server answered before and does not answer any more."""

from diag.incident import Fix, Incident, LookAlike, documented, judged, measured
from diag.signals import page_answers

TROUBLESHOOTING = "https://docs.vllm.ai/en/latest/usage/troubleshooting.html"

incident = Incident(
    id="engine_dead",
    title="The server stopped answering",
    severity="critical",
    per=("instance",),
    window="1m",
    live_window="15s",
    cause="""
        When EngineCore dies, the API server says EngineDeadError and shuts itself down within a second; the port is
        refused from then on. A host that went away, a killed container or a network path look the same from here.
    """,
    impact="every request fails",
    symptoms=(
        page_answers.at_most(0, measured("refused from the scrape after the kill on, until the end", "engine_dead")),
    ),
    looks_like=(
        LookAlike("engine_stalled", distinguish="There, the page goes on answering and only the work stands still."),
    ),
    explains=("engine_stalled", "contract_breached"),
    fixes=(
        Fix(
            change="Read the last lines of the server's log before it is rotated away: EngineDeadError, a CUDA error, "
            "out of memory, or a signal from outside.",
            command="journalctl -u vllm -n 200   # or: kubectl logs --previous <pod>",
            effect="names what killed it",
            restart=False,
            why=documented("the root cause stands above EngineDeadError", TROUBLESHOOTING),
        ),
        Fix(
            change="Restart it, and have the platform do so next time (Restart=on-failure, a livenessProbe).",
            effect="the page answers again after the start-up time",
            why=judged("a dead engine does not come back"),
        ),
    ),
    mitigate=(
        "Take it out of rotation: a balancer that only looks at TCP goes on sending.",
        "Start a replica elsewhere where the host itself is gone.",
    ),
    hand_over=(
        "the log from the last good line to its end, `dmesg -T | tail -100` for the OOM killer and Xid lines, and the "
        "time of death by the dashboard",
    ),
)
