"""Processes of others hold memory on a GPU that serves."""

from diag.incident import Fix, Incident, LookAlike, documented, judged
from diag.signals import serving, share_left_by_others, strangers_memory, switched_off

CONSERVING_MEMORY = "https://docs.vllm.ai/en/latest/configuration/conserving_memory.html"

STRANGERS = strangers_memory.above(0.05, judged("a desktop or a monitoring agent holds less"))
incident = Incident(
    id="gpu_memory_contended",
    title="Others hold memory on a GPU that serves",
    severity="warning",
    per=("instance", "gpu"),
    hold="5m",
    cause="""
        vLLM takes its share of the whole GPU at start and never asks again. What another process allocates comes out of
        the rest; when both grow, one of them runs out of memory, and vLLM does not start again where it was.
    """,
    impact="out of memory under load or at the next restart, and compute that is shared with a stranger",
    symptoms=(
        STRANGERS,
        serving.at_least(1, documented("a GPU that this vLLM does not use is not its concern", CONSERVING_MEMORY)),
    ),
    looks_like=(
        LookAlike("a monitoring agent", distinguish="It holds some hundred MB.", refuted_by=STRANGERS),
        LookAlike(
            "a process of this vLLM that is left over",
            distinguish="It has vLLM's title and the start time of an earlier server.",
        ),
    ),
    fixes=(
        Fix(
            command="nvidia-smi -i {gpu} --query-compute-apps=pid,process_name,used_memory --format=csv",
            change="See whose they are; end what was left over, and move the rest to another GPU.",
            effect="the share of memory that others hold falls",
            restart=False,
            why=judged("two programs that both plan with the whole GPU do not fit on it"),
        ),
        Fix(
            flag="--gpu-memory-utilization",
            change="Where they have to share: leave out of vLLM's share what the others hold at their most.",
            effect="both fit; the KV pool shrinks by as much",
            risk="fewer requests at once",
            rollback="the old share again, and restart",
            value=share_left_by_others,
            rounding="hundredth_below",
            least=0.05,
            direction="lower",
            only_if=(switched_off("kv_cache_memory_bytes"),),
            why=documented("the share is of the whole GPU, whoever else uses it", CONSERVING_MEMORY),
        ),
    ),
    mitigate=("Ask the owner of the process to move it; do not kill what you do not own.",),
    hand_over=(
        "the process list of the GPU with owners (`nvidia-smi --query-compute-apps=pid,process_name,used_memory "
        "--format=csv`)",
    ),
)
