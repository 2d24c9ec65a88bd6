"""vLLM's processes are ready to run and get no CPU: steps take many times as long as they need."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, measured
from diag.knowledge import shared_fixes

CPU_RESOURCES = "https://docs.vllm.ai/en/latest/configuration/optimization/#cpu-resources-for-gpu-deployments"
CGROUP = "https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu"

STARVED = signals.cpu_starvation.above(
    0.5,
    measured("the engine waited for a CPU for 94 % of the time; for at most 20 % on busy hosts", "host_cpu_starved"),
)
incident = Incident(
    id="host_cpu_starved",
    title="Host CPU starved",
    severity="warning",
    per=("instance",),
    cause="""
        Each step of the engine needs the CPU: to schedule, to launch kernels, to pass tokens on. A CPU limit of the
        container stops all its processes for the rest of each period of 100 ms, and a crowded host makes them queue.
        The GPU then waits for the CPU.
    """,
    impact="every token is late, whatever the load, while the GPU idles",
    symptoms=(
        STARVED,
        signals.requests_running.above(
            0.5, judged("a server without work misses no CPU: its workers spin, and can wait")
        ),
    ),
    supports=(
        signals.cpu_wait_share.above(0.5, documented("/proc/PID/schedstat: time on the run queue", CGROUP)),
        signals.cpu_throttled.above(
            0.1, documented("throttled_usec: time for which the quota stopped the group", CGROUP)
        ),
        signals.cpu_pressure.above(0.5, documented("cpu.pressure: some task waited", CGROUP)),
    ),
    looks_like=(
        LookAlike(
            "a busy host",
            distinguish="Something always waits for a CPU on a busy host (PSI of 95 % was measured), and vLLM's "
            "processes still get theirs.",
            refuted_by=STARVED,
        ),
        LookAlike("api_server_bound", distinguish="The API server has a whole core and needs more."),
        LookAlike("prefill_decode_contention", distinguish="Only some inter-token latencies are long."),
        LookAlike("gpu_thermal_throttling", distinguish="The GPU's own clock is what is low."),
    ),
    explains=("contract_breached", "engine_underfed"),
    may_explain=shared_fixes.SLOW_SERVER,
    fixes=(
        Fix(
            change="Remove the CPU limit of the container (keep the request), or raise it to at least one core for "
            "each of vLLM's processes: the API server, each engine and each worker.",
            effect="the container is no longer throttled; inter-token latency falls to its usual value",
            only_if=(signals.cpu_throttled.above(0, judged("without throttling, the CPU limit is not the cause")),),
            why=documented("2 + N cores for N GPUs at least", CPU_RESOURCES),
        ),
        Fix.without_restart(
            change="Move other programs away from these cores, or reserve cores for vLLM (cpuset, static CPU manager).",
            effect="the time that vLLM's processes wait for a CPU falls to a few percent",
            only_if=(signals.cpu_throttled.at_most(0.1, judged("a quota stops it, not other programs")),),
            why=documented("2 + N cores for N GPUs at least", CPU_RESOURCES),
        ),
    ),
    operations=("scale", "cordon"),
    mitigate=("Send part of the traffic to another replica.",),
    hand_over=("`cat /proc/pressure/cpu`, the container's cpu.max and cpu.stat, and `top -H` for 10 s",),
    do_not=("Do not add GPUs and do not tune the scheduler: the GPU has time to spare.",),
)
