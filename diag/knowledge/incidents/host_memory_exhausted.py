"""Host memory runs out: the kernel is about to kill the server, or has killed it."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, reported

CGROUP = "https://docs.kernel.org/admin-guide/cgroup-v2.html#memory"
TWICE_THE_BUFFER = "https://github.com/vllm-project/vllm/issues/53042"
CONSERVING_MEMORY = "https://docs.vllm.ai/en/latest/configuration/conserving_memory.html"
FULL = signals.host_memory_share.above(signals.NEARLY_FULL, judged("a server that has room is not about to be killed"))
SOON = signals.host_memory_time_left.below(
    signals.SECONDS_TO_DRAIN, judged("time to drain a server and to start another one")
)
LARGE_BUFFER = signals.kv_offload_share.at_least(
    0.25, reported("a buffer took 1.92 times its size as shared memory, and the pod was killed", TWICE_THE_BUFFER)
)
RESERVED = documented("vLLM reserves it in host memory", CONSERVING_MEMORY)

incident = Incident(
    id="host_memory_exhausted",
    title="Host memory exhausted",
    severity="critical",
    per=("instance",),
    hold="0s",
    immediate="the kernel kills within the minutes that are left, and a kill that happened is one event",
    window="1m",
    cause="""
        The memory in use nears the limit of the server's cgroup (a container's memory limit), or all that the host has.
        At the limit the kernel kills the largest process, which is usually vLLM's API server or EngineCore. Page cache
        does not count: the kernel gives it up first.
    """,
    impact="the server is killed without a line in its log, and all its requests fail",
    symptoms=(
        signals.host_memory_ends.at_least(
            1,
            judged(
                f"above {FULL.limit_with_unit}, growing steadily, with less than {signals.SECONDS_TO_DRAIN / 60:g} "
                "minutes left; or the cgroup met its limit while the memory in use grows towards it within 5 minutes; "
                "or a process was killed already"
            ),
        ),
    ),
    supports=(
        FULL,
        SOON,
        signals.memory_killed.at_least(
            1, documented("oom_kill counts the processes that the kernel has killed", CGROUP)
        ),
    ),
    looks_like=(
        LookAlike(
            "page cache",
            distinguish="Reading weights and writing logs fill the page cache up to any limit. It is not counted here: "
            "memory.current of the cgroup grows, and its memory without page cache does not.",
        ),
        LookAlike(
            "a large but steady use",
            distinguish="A pool in host memory (KV cache offloading, pinned buffers) is allocated once and then stays "
            "as it is.",
            refuted_by=SOON,
        ),
        LookAlike("gpu_out_of_memory", distinguish="The log reports a failed allocation on a GPU."),
    ),
    explains=("engine_dead", "engine_stalled", "startup_failed", "crash_loop", "contract_breached"),
    fixes=(
        Fix(
            change="Drain this server and restart it at a moment of your choice, before the kernel kills it.",
            effect="the memory that it has gathered is free again",
            only_if=(
                signals.memory_killed.at_most(0, judged("after a kill, a restart in advance is too late")),
                signals.share_of_growth.above(0.5, judged("a restart of vLLM frees only what vLLM holds")),
            ),
            while_it_lasts=True,
            why=judged("a process that leaks gives its memory back when it ends"),
        ),
        Fix.without_restart(
            change="Find the process of this host that grows, and give it a memory limit of its own.",
            command="ps -eo pid,rss,comm --sort=-rss | head",
            effect="host memory in use no longer grows",
            only_if=(signals.share_of_growth.below(0.5, judged("vLLM's processes are not what grows")),),
            why=judged("vLLM's processes are not what grows"),
        ),
        Fix(
            flag="--kv-offloading-size",
            value=signals.kv_offload_with_room,
            direction="lower",
            change="Keep a smaller buffer for offloaded KV blocks: the kernel cannot give up its memory.",
            effect=f"host memory in use stays below {FULL.limit_with_unit} of the limit",
            only_if=(LARGE_BUFFER,),
            risk="fewer evicted prefixes are found again",
            rollback="set the old size again",
            why=LARGE_BUFFER.why,
        ),
        Fix(
            flag="--mm-processor-cache-gb",
            value=1,
            direction="lower",
            change="Keep a smaller cache of processed images and audio: each API server and each engine may hold one.",
            effect="the memory of the API server stays smaller",
            only_if=(signals.running_value("mm_processor_cache_gb").above(1, RESERVED),),
            risk="repeated images and audio are processed again",
            rollback="set the old size again",
            why=RESERVED,
        ),
        Fix(
            change="Raise the memory limit of the container, or move other programs away from this host: the server "
            "needs the resident memory of all its processes (`ps -eo pid,rss,comm`), and some room above that.",
            effect=f"host memory in use stays below {FULL.limit_with_unit} of the limit",
            why=documented("memory.max is the limit at which the kernel kills", CGROUP),
        ),
    ),
    operations=("log", "drain", "scale"),
    mitigate=(
        "Take the server out of rotation and start a replica elsewhere while there is time.",
        "Send it fewer long prompts, images and streams at a time: requests in flight are held in host memory.",
    ),
    hand_over=(
        "the resident memory of each role over the last hours (dashboard), `dmesg -T | grep -i oom`, and a heap "
        "profile of the role that grows",
    ),
    do_not=("Do not lower --gpu-memory-utilization: it is about the memory of the GPU.",),
)
