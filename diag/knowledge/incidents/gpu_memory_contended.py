"""Other processes hold memory on a GPU that this vLLM uses."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged

CONSERVING_MEMORY = "https://docs.vllm.ai/en/latest/configuration/conserving_memory.html"

OTHER_PROCESSES = signals.memory_of_other_processes.above(
    signals.MUCH_MEMORY, judged("a desktop or a monitoring agent holds less than that")
)
OVERBOOKED = signals.gpu_memory_overbooked.at_least(
    1, documented("vLLM does not start where less than its share of the GPU is free", CONSERVING_MEMORY)
)
incident = Incident(
    id="gpu_memory_contended",
    title="GPU memory shared with other processes",
    severity="warning",
    per=("instance", "gpu"),
    hold="5m",
    cause="""
        vLLM allocates its share of the whole GPU at start-up and keeps it. Other processes allocate from the rest. When
        both grow, one of them runs out of memory, and vLLM can no longer start with its old settings.
    """,
    impact="out of memory under load or at the next restart; the GPU's compute is shared as well",
    symptoms=(
        OTHER_PROCESSES,
        OVERBOOKED,
        signals.serving.at_least(
            1, documented("a GPU that this vLLM does not use cannot affect it", CONSERVING_MEMORY)
        ),
    ),
    looks_like=(
        LookAlike("a monitoring agent", distinguish="It holds a few hundred MB.", refuted_by=OTHER_PROCESSES),
        LookAlike(
            "programs that share the GPU by design",
            distinguish="Their shares add up to less than the GPU (--gpu-memory-utilization of each).",
            refuted_by=OVERBOOKED,
        ),
        LookAlike(
            "a leftover process of this vLLM",
            distinguish="It has vLLM's process title and the start time of an earlier server.",
        ),
    ),
    fixes=(
        Fix.without_restart(
            command="nvidia-smi -i {gpu} --query-compute-apps=pid,process_name,used_memory --format=csv",
            change="Find out who owns the processes; end leftover ones and move the others to another GPU.",
            effect="the memory held by other processes falls",
            why=judged("two programs that each plan with the whole GPU do not fit on it"),
        ),
        Fix(
            flag="--gpu-memory-utilization",
            change="If they have to share the GPU, reduce vLLM's share by the most that the others hold.",
            effect="both fit; the KV cache shrinks by the same amount",
            risk="fewer requests run concurrently",
            rollback="set the old value again",
            value=signals.share_left_by_others,
            rounding="hundredth_below",
            least=0.05,
            direction="lower",
            only_if=(signals.not_set("kv_cache_memory_bytes"),),
            why=documented("the value is a share of the whole GPU, also if other processes use it", CONSERVING_MEMORY),
        ),
    ),
    operations=("cordon",),
    mitigate=("Ask the owner of the process to move it; do not kill processes that you do not own.",),
    hand_over=(
        "the process list of the GPU with owners (`nvidia-smi --query-compute-apps=pid,process_name,used_memory "
        "--format=csv`)",
    ),
)
