"""CUDA-graph capture never ends: the port stays closed, and only log and GPU can tell."""

from diag.incident import Fix, Incident, LookAlike, documented, judged, reported
from diag.signals import (
    in_graph_capture,
    nvlinks,
    processes_there,
    ranks,
    ranks_apart,
    startup_silence,
    switched_off,
)

GRAPHS = "https://docs.vllm.ai/en/latest/design/cuda_graphs.html"
CAT_430 = "https://github.com/1CatAI/1Cat-vLLM/issues/430"

incident = Incident(
    id="cuda_graph_capture_hang",
    title="The start hangs in CUDA-graph capture",
    severity="critical",
    per=("instance",),
    window="1m",
    cause="""
        The capture of a graph, often a collective inside it, does not come back. The port is still closed, so vLLM has
        no page; the log stops at the bar of the capture, or repeats that a rank waits.
    """,
    impact="the server never becomes ready, and its replacement hangs in the same place",
    symptoms=(
        in_graph_capture.at_least(1, documented("the phase ends with 'Graph capturing finished in'", GRAPHS)),
        startup_silence.above(300, judged("captures take seconds to two and a half minutes")),
    ),
    supports=(
        ranks.above(1, judged("most hangs are in a collective")),
        ranks_apart.at_least(1, reported("45 minutes at full utilisation", CAT_430)),
    ),
    looks_like=(
        LookAlike(
            "startup_failed",
            distinguish="There, the process has ended.",
            requires=processes_there.at_least(1, judged("a process that has ended hangs no more")),
        ),
        LookAlike(
            "startup_slow",
            distinguish="Compiling (2,219 s have been reported) and loading weights are phases before the capture.",
        ),
        LookAlike("gpu_out_of_memory", distinguish="There, the log says so, and the process ends."),
    ),
    explains=("startup_slow",),
    fixes=(
        Fix(
            change="Before anything is restarted, keep the evidence: the stack of every rank.",
            command="for p in $(pgrep -f 'VLLM::'); do py-spy dump --pid $p; done",
            effect="names the call that does not return: a collective, or a kernel",
            restart=False,
            why=judged("a capture that hangs in a collective is cured elsewhere than one in a kernel"),
        ),
        Fix(
            flag="--disable-custom-all-reduce",
            value="",
            change="With tensor parallelism on PCIe: let NCCL do the all-reduce.",
            effect="the capture ends within minutes",
            only_if=(
                ranks.above(1, judged("a single rank has no collective")),
                nvlinks.at_most(0, judged("the custom kernel is at home on NVLink")),
                switched_off("disable_custom_all_reduce"),
            ),
            risk="a few percent of latency at small batches",
            rollback="remove the flag and restart",
            why=reported("45 minutes and more became 3", CAT_430),
        ),
        Fix(
            flag="--compilation-config.cudagraph_mode",
            value="PIECEWISE",
            change="Capture the graphs without attention in them.",
            effect="the capture ends, if attention was what hung",
            versions=("0.10.1", ""),
            risk="a few percent of latency at small batches",
            rollback="remove the flag and restart",
            why=documented("the mode between full graphs and none", GRAPHS),
        ),
        Fix(
            flag="--enforce-eager",
            value="",
            change="To prove that it is the graphs: start without any.",
            effect="the server becomes ready",
            only_if=(switched_off("enforce_eager"),),
            risk="10 to 20 % of throughput, at small batches up to half",
            rollback="remove the flag and restart",
            why=documented("no graphs are captured", GRAPHS),
        ),
    ),
    mitigate=("Send the traffic to the replicas that serve; this one will not become ready by itself.",),
    hand_over=(
        "the stack of every rank (`py-spy dump --pid <pid>`), the log from its first line, `nvidia-smi topo -m`, and "
        "whether `--enforce-eager` starts",
    ),
    do_not=("Do not raise the startupProbe: what hangs in a collective does not end by itself.",),
)
