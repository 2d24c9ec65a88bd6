"""Kernels or graphs are compiled while requests are served, and every stream waits for the compiler."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, judged, reported

CASE = "https://github.com/vllm-project/vllm/issues/48752"

PAUSES = signals.stream_pauses.at_least(1, judged("a compilation that pauses no stream harms no user"))
incident = Incident(
    id="compiling_while_serving",
    title="Compilation while serving",
    severity="warning",
    per=("instance",),
    cause="""
        A request has a shape that warm-up did not cover: Triton, TileLang, CuTeDSL or torch.compile builds the kernel
        in the middle of a step. It takes from tenths of a second to minutes, once for each shape and each worker, and
        again after each restart where the cache is not kept.
    """,
    impact="all running streams pause while the compiler runs",
    symptoms=(signals.compiled_recently.at_least(1, reported("vLLM warns of it in its log", CASE)), PAUSES),
    looks_like=(
        LookAlike("startup_slow", distinguish="A start compiles too, before the server is ready: that is not counted."),
        LookAlike("prefill_decode_contention", distinguish="A long prompt accounts for each pause."),
        LookAlike("tp_communication_stall", distinguish="The pause does not end."),
    ),
    explains=("contract_breached",),
    fixes=(
        Fix.without_restart(
            change="Keep the caches of the compilers (~/.cache/vllm, ~/.triton/cache) on a volume that outlives the "
            "container.",
            effect="each shape is compiled once, not after every restart",
            why=reported(
                "a cold cache takes 222.8 s, a warm one 53.4 s", "https://github.com/vllm-project/vllm/issues/52682"
            ),
        ),
        Fix.without_restart(
            change="Before a new server gets traffic, send it what clients will send: short and long prompts, several "
            "at a time, each sampling option in use.",
            effect="the log reports no compilation while users wait",
            why=judged("the server compiles each kernel once"),
        ),
    ),
    mitigate=("Wait: each shape is compiled once; after a restart all of them are compiled again.",),
    hand_over=(
        "the lines of the log with `during inference`, the vLLM version, the GPU, and the launch command; started with "
        "--jit-monitor-verbose, vLLM also names the shapes",
    ),
    do_not=("Do not restart the server: it compiles all of it again.",),
)
