"""Another process computes on a GPU that this vLLM uses."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, measured

TIME_SLICING = "https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-sharing.html"

incident = Incident(
    id="gpu_compute_contended",
    title="Another process computes on this GPU",
    severity="warning",
    per=("instance", "gpu"),
    window="2m",
    hold="2m",
    cause="""
        The driver gives each process that has work a slice of the GPU's time. While another process has work, every
        step of vLLM waits for its slice, and clocks fall sooner at the power limit.
    """,
    impact="inter-token latency and TTFT rise several times, without a queue and without a fault",
    symptoms=(
        signals.gpu_time_of_other_processes.above(
            0.2, measured("66 % by a matrix product beside copies; it tripled a server's ITL", "gpu_compute_contended")
        ),
    ),
    looks_like=(
        LookAlike("gpu_thermal_throttling", distinguish="The clock falls, and no other process uses the GPU."),
        LookAlike("prefill_decode_contention", distinguish="Only some tokens are late, and long prompts arrive."),
    ),
    explains=("contract_breached",),
    fixes=(
        Fix.without_restart(
            command="nvidia-smi pmon -i {gpu} -c 1",
            change="Find out who owns the process, and move it to another GPU.",
            effect="inter-token latency falls to what this server has alone",
            why=measured("ITL p50 5.3 ms alone, 17.5 ms beside a matrix product", "gpu_compute_contended"),
        ),
        Fix(
            change="If the GPU is shared on purpose (time-slicing, MPS), give each server its own GPU or MIG instance.",
            effect="no process can take the time of another one",
            why=documented(
                "time-slicing has no memory or fault isolation, and replicas share the compute", TIME_SLICING
            ),
        ),
    ),
    operations=("cordon",),
    mitigate=("Stop the other process if it is yours, or ask its owner to move it.",),
    hand_over=("the output of `nvidia-smi pmon -c 5`, with the owners of the processes",),
)
