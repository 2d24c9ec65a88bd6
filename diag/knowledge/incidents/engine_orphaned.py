"""An engine process has outlived its API server: no request reaches it, and it keeps its memory."""

from diag import signals
from diag.incident import Effect, Fix, Incident, LookAlike, judged

ORPHANED = signals.orphaned_engines.at_least(
    1, judged("the kernel gives the children of a killed process to another parent; it ends none of them")
)
SERVER_ENDED = signals.server_left_orphans.at_least(1, judged("without an API server every request fails"))

incident = Incident(
    id="engine_orphaned",
    title="Engine process without an API server",
    severity="warning",
    per=("instance",),
    window="1m",
    live_window="15s",
    hold="0s",
    immediate="a process with another parent never returns to its own: waiting proves nothing more",
    cause="""
        The API server was killed (SIGKILL, out of memory) and its engine was not: the kernel gives the engine another
        parent, and it waits for requests that no process can send any more. It keeps its GPU memory and host memory,
        so the next start on this GPU runs out of memory.
    """,
    impact="no request reaches this engine, and the GPU memory that it holds is missing at the next start",
    symptoms=(ORPHANED,),
    supports=(
        signals.gpu_memory_of_orphans.above(0, judged("NVML names the processes that hold a GPU's memory")),
        SERVER_ENDED,
    ),
    looks_like=(
        LookAlike("engine_dead", distinguish="No engine process runs: the server ended as a whole."),
        LookAlike(
            "an engine without a server",
            distinguish="A script runs an engine by itself (the class LLM): its parent is that script, which runs.",
            refuted_by=ORPHANED,
        ),
    ),
    escalates=SERVER_ENDED,
    explains=("gpu_out_of_memory", "gpu_memory_contended", "requests_aborted", "contract_breached"),
    may_explain=(Effect("engine_dead", where=(SERVER_ENDED,)),),  # an orphan of an earlier server explains no death
    fixes=(
        Fix.without_restart(
            command="kill {pid}   # on {host}; kill -9 if it is still there after 10 s",
            change="End the engine process that was left behind; then start the server again.",
            effect="its GPU memory is free, and the server can start",
            only_if=(ORPHANED,),
            while_it_lasts=True,
            why=judged("vLLM's engine ends on SIGTERM, unless it hangs in a kernel of the GPU"),
        ),
        Fix(
            change="Have the platform end all processes of the server with it: KillMode=control-group in systemd, "
            "an init as PID 1 of the container.",
            effect="the next end of the API server leaves nothing behind",
            why=judged("the kernel ends no children of a killed process by itself"),
        ),
    ),
    operations=("drain", "restart"),
    mitigate=("Take the server out of rotation until it is started again.",),
    hand_over=("who or what ended the API server: `dmesg -T | tail -100`, the shell's or the supervisor's log",),
    do_not=("Do not start the server again first: it fails for lack of GPU memory.",),
)
