"""The buffer for offloaded KV blocks is larger than the memory that the server may use."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, reported

OFFLOADING = "https://docs.vllm.ai/en/latest/api/vllm/v1/kv_offload/"
SHARED_MEMORY = "https://github.com/vllm-project/vllm/issues/53042"

OVERSIZED = signals.kv_offload_share.above(
    1, documented("the buffer is host memory, and there is no more of it", OFFLOADING)
)
incident = Incident(
    id="kv_offload_oversized",
    title="KV offloading buffer exceeds host memory",
    severity="warning",
    per=("instance",),
    cause="""
        --kv-offloading-size, or cpu_bytes_to_use of an offloading connector in --kv-transfer-config, is more than the
        memory limit of the server's cgroup (a container's memory limit), or more than the host has. The buffer is
        pinned or shared memory (/dev/shm), which the kernel cannot give up: once it is filled, the kernel kills a
        process of the server. The size counts for all ranks of an engine together; each data-parallel engine has a
        buffer of its own.
    """,
    impact="the server is killed without a line in its log while it starts, or hours later when the buffer has filled",
    symptoms=(OVERSIZED,),
    supports=(signals.host_memory_share.above(0.9, judged("the buffer has filled most of the memory")),),
    explains=("host_memory_exhausted",),
    looks_like=(
        LookAlike(
            "a large buffer that fits",
            distinguish="A buffer below the limit is allocated once and then stays as it is.",
            refuted_by=OVERSIZED,
        ),
        LookAlike(
            "an engine on several hosts",
            distinguish="Each host holds the part of its ranks. It is counted by the workers that the exporter sees "
            "and by --tensor-parallel-size and --pipeline-parallel-size.",
        ),
        LookAlike(
            "LMCache",
            distinguish="Its own server holds the blocks, whose memory is not that of vLLM: --kv-offloading-backend "
            "lmcache is not counted.",
            refuted_by=OVERSIZED,
        ),
    ),
    fixes=(
        Fix(
            flag="--kv-offloading-size",
            value=signals.kv_offload_that_fits,
            direction="lower",
            change="Use a buffer that fits even where vLLM takes twice its size (vllm#53042); with "
            "--kv-transfer-config, lower cpu_bytes_to_use instead. If the Shmem line of /proc/meminfo shows no more "
            "than the size after the start, it may be doubled.",
            effect="host memory in use stays below the limit",
            risk="fewer evicted prefixes are found again",
            rollback="set the old size again",
            why=reported("a buffer took 1.92 times its size as shared memory, and the pod was killed", SHARED_MEMORY),
        ),
        Fix(
            change="Or raise the memory limit of the container above the buffer, with 2 GiB for each process of vLLM.",
            effect="the buffer fits",
            why=documented("the buffer is allocated in host memory", OFFLOADING),
        ),
    ),
    operations=("scale", "drain"),
    mitigate=(
        "Start a replica with a smaller buffer and drain this server before the kernel kills it: the buffer fills with "
        "each KV block that is stored.",
    ),
    hand_over=("the launch command, `grep -i shmem /proc/meminfo`, `df -h /dev/shm` and the container's memory limit",),
    do_not=("Do not enlarge /dev/shm to silence its error: its pages count towards the same memory limit.",),
)
