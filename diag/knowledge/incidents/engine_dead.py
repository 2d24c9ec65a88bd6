"""The server no longer responds, or its engine has died while /metrics still responds."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, measured
from diag.knowledge import shared_fixes

incident = Incident(
    id="engine_dead",
    title="Server stopped responding",
    severity="critical",
    outage=True,
    per=("instance",),
    window="1m",
    live_window="15s",
    cause="""
        When EngineCore dies, the API server raises EngineDeadError and shuts down within seconds; connections are
        refused from then on. With VLLM_KEEP_ALIVE_ON_ENGINE_DEATH it stays up: /metrics still answers, /health answers
        503, and every request fails at once. A lost host, a killed container or a broken network path look to a scraper
        as if the server had ended.
    """,
    impact="every request fails",
    symptoms=(
        signals.evidence_of_death.at_least(
            1, measured("after the kill of the engine each of the three shows", "engine_dead")
        ),
        signals.signs_of_life.at_most(
            0,
            documented(
                "an engine that generates tokens, or whose /health answers 200, is alive; a requested stop is no crash",
                "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/entrypoints/serve/instrumentator/health.py",
            ),
        ),
    ),
    supports=(
        signals.successful_scrapes.at_most(0, measured("every scrape after the kill was refused", "engine_dead")),
        signals.engine_dead_by_health.at_least(
            1, measured("vLLM answers /health with 503 for a dead engine alone", "engine_dead_page_lives")
        ),
        signals.engine_death_logged.at_least(1, measured("the API server logs EngineDeadError", "engine_dead")),
        signals.engines_lost.at_least(1, judged("the API server fails all requests once one of its engines is gone")),
        signals.engine_process_missing.at_least(
            1, judged("a server without an engine process cannot serve any request")
        ),
    ),
    looks_like=(
        LookAlike(
            "startup_slow",
            distinguish="A start is under way, however long it takes: the log or the process table shows it.",
            requires=signals.start_under_way.at_most(0, judged("a server that is being started comes back by itself")),
        ),
        LookAlike(
            "elastic_scaling",
            distinguish="While the number of engines changes, /metrics and /health answer HTTP 503 as well. Only the "
            "server's log or such an answer shows it: Prometheus keeps no status of a failed scrape.",
            requires=signals.elastic_scaling.at_most(
                0, judged("a server that scales answers again when it has switched")
            ),
        ),
        LookAlike("engine_stalled", distinguish="/metrics keeps answering, and the engine process is there."),
        LookAlike("a sleeping engine", distinguish="/metrics answers, and shows the sleep state."),
        LookAlike("startup_failed", distinguish="The server has not answered since it was started last."),
    ),
    crash=signals.crashed_lately.at_least(1, judged("a server that was restarted on purpose did not crash before")),
    explains=("data_parallel_lockstep", "engine_stalled", "requests_aborted", "requests_failing", "contract_breached"),
    sign=signals.sign_of_death,
    quotes=signals.quoted_error,
    fixes=(
        *shared_fixes.LET_GO_ON,
        *shared_fixes.READ_LOG,
        Fix(
            change="Restart the server, and have the platform do so next time (a livenessProbe; Restart=always, since "
            "vLLM may exit with status 0).",
            effect="/metrics answers again once the server has started",
            why=judged("a dead engine does not recover"),
        ),
    ),
    operations=("log", "drain", "restart"),
    mitigate=(
        "Take the server out of rotation: a load balancer that only checks TCP keeps sending requests to it.",
        "If the host itself is lost, start a replica on another one.",
    ),
    hand_over=(
        "the log from the last normal line to its end, `dmesg -T | tail -100` for the OOM killer and Xid lines, and "
        "the time of the failure from the dashboard",
    ),
)
