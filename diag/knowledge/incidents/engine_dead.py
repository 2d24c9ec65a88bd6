"""The server answered before and no longer answers."""

from diag.incident import Fix, Incident, LookAlike, documented, judged, measured
from diag.signals import start_under_way, successful_scrapes

TROUBLESHOOTING = "https://docs.vllm.ai/en/latest/usage/troubleshooting.html"

incident = Incident(
    id="engine_dead",
    title="Server stopped responding",
    severity="critical",
    per=("instance",),
    window="1m",
    live_window="15s",
    cause="""
        When EngineCore dies, the API server raises EngineDeadError and shuts down within a second; connections are
        refused from then on. A lost host, a killed container or a broken network path look the same to a scraper.
    """,
    impact="every request fails",
    symptoms=(successful_scrapes.at_most(0, measured("every scrape after the kill was refused", "engine_dead")),),
    looks_like=(
        LookAlike(
            "startup_slow",
            distinguish="A start is under way, however long it takes: the log or the process table shows it.",
            requires=start_under_way.at_most(0, judged("a server that is being started comes back by itself")),
        ),
        LookAlike("engine_stalled", distinguish="/metrics keeps answering; only the engine makes no progress."),
    ),
    explains=("engine_stalled", "contract_breached"),
    fixes=(
        Fix(
            change="Read the last lines of the server log before it is rotated: look for EngineDeadError, a CUDA "
            "error, an out-of-memory error, or a signal.",
            command="journalctl -u vllm -n 200   # or: kubectl logs --previous <pod>",
            effect="the log names what killed the server",
            restart=False,
            why=documented("the root cause is logged above EngineDeadError", TROUBLESHOOTING),
        ),
        Fix(
            change="Restart the server, and have the platform do so next time (Restart=on-failure, a livenessProbe).",
            effect="/metrics answers again once the server has started",
            why=judged("a dead engine does not recover"),
        ),
    ),
    mitigate=(
        "Take the server out of rotation: a load balancer that only checks TCP keeps sending requests to it.",
        "If the host itself is lost, start a replica on another one.",
    ),
    hand_over=(
        "the log from the last normal line to its end, `dmesg -T | tail -100` for the OOM killer and Xid lines, and "
        "the time of the failure from the dashboard",
    ),
)
