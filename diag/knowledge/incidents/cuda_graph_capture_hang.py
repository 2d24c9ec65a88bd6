"""CUDA-graph capture never finishes: the port stays closed, so only the log and the GPUs show it."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, reported
from diag.knowledge import shared_fixes

GRAPHS = "https://docs.vllm.ai/en/latest/design/cuda_graphs.html"
CAT_430 = "https://github.com/1CatAI/1Cat-vLLM/issues/430"

incident = Incident(
    id="cuda_graph_capture_hang",
    title="CUDA-graph capture hang",
    severity="critical",
    per=("instance",),
    window="1m",
    cause="""
        The capture of a CUDA graph, often a collective inside it, does not return. The port is still closed, so vLLM
        exposes no metrics. The log stops at the progress bar of the capture, or repeats that a rank is waiting.
    """,
    impact="the server never becomes ready, and a restart hangs at the same point",
    symptoms=(
        signals.in_graph_capture.at_least(
            1, documented("the phase ends with the log line 'Graph capturing finished in'", GRAPHS)
        ),
        signals.time_without_startup_progress.above(300, judged("a capture takes from seconds to 2.5 minutes")),
    ),
    supports=(
        signals.ranks.above(1, judged("most hangs are in a collective, which needs several ranks")),
        signals.ranks_out_of_step.at_least(
            1, reported("a capture hung for 45 minutes at full GPU utilisation", CAT_430)
        ),
    ),
    looks_like=(
        LookAlike(
            "startup_failed",
            distinguish="The process has exited.",
            requires=signals.processes_still_running.at_least(1, judged("a process that has exited no longer hangs")),
        ),
        LookAlike(
            "startup_slow",
            distinguish="Compilation (up to 2,219 s reported) and weight loading are phases before the capture.",
        ),
        LookAlike("gpu_out_of_memory", distinguish="The log reports an out-of-memory error, and the process exits."),
    ),
    explains=("startup_slow",),
    fixes=(
        shared_fixes.SAVE_STACKS,
        Fix(
            flag="--disable-custom-all-reduce",
            value="",
            change="With tensor parallelism over PCIe, let NCCL do the all-reduce.",
            effect="the capture finishes within minutes",
            only_if=(
                signals.ranks.above(1, judged("a single rank has no collectives")),
                signals.nvlinks.at_most(0, judged("the custom all-reduce kernel is made for NVLink")),
                signals.not_set("disable_custom_all_reduce"),
            ),
            risk="latency at small batch sizes rises by a few percent",
            rollback="remove the flag",
            why=reported("start-up fell from more than 45 minutes to 3", CAT_430),
        ),
        Fix(
            flag="--compilation-config.cudagraph_mode",
            value="PIECEWISE",
            change="Capture the graphs without attention.",
            effect="the capture finishes if attention caused the hang",
            versions=("0.10.1", ""),
            risk="latency at small batch sizes rises by a few percent",
            rollback="remove the flag",
            why=documented("PIECEWISE is the mode between full graphs and none", GRAPHS),
        ),
        Fix(
            flag="--enforce-eager",
            value="",
            change="To prove that graph capture is the cause, start without CUDA graphs.",
            effect="the server becomes ready",
            only_if=(signals.not_set("enforce_eager"),),
            risk="throughput falls by 10 to 20 %, at small batch sizes by up to half",
            rollback="remove the flag",
            why=documented("no CUDA graphs are captured", GRAPHS),
        ),
    ),
    operations=("log", "rollback", "restart"),
    mitigate=("Send the traffic to the replicas that are ready; this one will not become ready by itself.",),
    hand_over=(
        "the stack trace of every rank (`py-spy dump --pid <pid>`), the log from its first line, `nvidia-smi topo "
        "-m`, and whether the server starts with `--enforce-eager`",
    ),
    do_not=("Do not raise the startupProbe threshold: a hang in a collective does not end by itself.",),
)
