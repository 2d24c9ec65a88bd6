"""KV blocks are not written to, or not read from, where they are offloaded: a tier or a store fails."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, measured

TIERS = "https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/kv_offload/tiering/manager.py"
THREADS = "https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/kv_offload/tiering/fs/thread_pool.py"
DROPS = "https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/kv_offload/tiering/backpressure.py"
LEFT_OUT = signals.dropped_stores.above(0.05, judged("more than single requests; hit rates fall with it"))

incident = Incident(
    id="kv_offload_failing",
    title="KV cache offloading fails",
    severity="warning",
    per=("instance", "engine"),
    cause="""
        With tiers, KV blocks cascade from host memory to a disk, an object store or a peer, and are promoted back when
        a prompt needs them. HF3FS, Mooncake's store and UMBP save and load them alike. A job fails if the disk is full
        or read-only, the mount or the store does not answer, or a file is shorter than its block.
    """,
    impact="no wrong answer: a prefix that cannot be brought back is prefilled again, and TTFT rises",
    symptoms=(
        signals.failed_offloads.above(
            0.05,
            measured("50 % on a full disk, 0 % with room on it; single ones are chance", "kv_offload_failing"),
        ),
    ),
    supports=(
        LEFT_OUT,
        signals.external_hit_rate.below(0.01, judged("what is not written cannot be found")),
    ),
    looks_like=(
        LookAlike(
            "kv_offload_ineffective",
            distinguish="No job fails: the prompts do not come back, or the store is too small for them.",
        ),
        LookAlike(
            "kv_transfer_failing",
            distinguish="Transfers between prefill and decode instances have counters of their own.",
        ),
    ),
    explains=("kv_offload_ineffective",),
    fixes=(
        Fix.without_restart(
            change="Read the reason in the log, and look at the disk or the store that the tier is: space, inodes, "
            "permissions, whether it is mounted and answers.",
            command="grep -E 'block I/O failed|transfer failed job=|batch_lookup failed|tier-poll' {log}; df -h; df -i",
            effect="the counters of failed jobs stand still, and the hit rate of the offloaded KV cache rises",
            why=documented("each failed block is logged with its error", THREADS),
        ),
        Fix(
            change="If stores are left out for lack of room, give the host memory tier more (cpu_bytes_to_use, "
            "--kv-offloading-size); if a tier is too slow, put it on a faster disk.",
            effect="fewer stores are left out",
            risk="more host memory is pinned, which other programs of the host then lack",
            rollback="set the old size again",
            only_if=(LEFT_OUT,),
            why=documented("stores to a tier whose latency exceeds the high water mark are dropped", DROPS),
        ),
        Fix(
            change="Until it is repaired, remove the tier from kv_connector_extra_config: each prompt waits for the "
            "lookup and for the promotion that fails.",
            effect="prompts are prefilled at once",
            risk="what only the tier holds is prefilled again",
            rollback="add the tier again",
            why=documented("a failed promotion leaves the blocks to be computed", TIERS),
        ),
    ),
    operations=("log",),
    mitigate=("Look at the tier's disk or store: space, mount, permissions. Responses stay correct meanwhile.",),
    hand_over=("--kv-transfer-config with its tiers, `df -h`, `df -i` and mounts of the host, and the failing lines",),
    do_not=("Do not delete the files of a tier while the server runs: reads of half-deleted blocks fail one by one.",),
)
