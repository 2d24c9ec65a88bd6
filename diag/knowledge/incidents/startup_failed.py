"""The log reports that the engine did not start, and why."""

from diag.incident import Fix, Incident, LookAlike, documented, judged, measured, reported
from diag.knowledge.shared_fixes import READ_LOG
from diag.signals import logged, quoted_error, startup_failed

COMPATIBILITY = "https://docs.nvidia.com/deploy/cuda-compatibility/"
SAID = judged("the line in the log decides which of these cases it is")
DRIVER = (
    Fix(
        change="Update the NVIDIA driver of the host, or run a vLLM image that was built for the CUDA release that "
        "this driver supports; the header of `nvidia-smi` names both.",
        effect="CUDA starts",
        only_if=(logged("driver_too_old").at_least(1, SAID),),
        why=documented("a driver that is older than the CUDA runtime is not supported", COMPATIBILITY),
    ),
    Fix(
        change="Take the CUDA compatibility libraries (cuda/compat) out of the container's LD_LIBRARY_PATH, or install "
        "a driver that they support; after an update of the driver, reboot the host.",
        effect="CUDA starts with the libraries of the driver that is loaded",
        only_if=(logged("driver_mismatch").at_least(1, SAID),),
        why=documented("compatibility libraries work with some drivers and with data center GPUs only", COMPATIBILITY),
    ),
    Fix(
        change="Start the NVIDIA fabric manager, whose release has to be that of the driver.",
        command="systemctl restart nvidia-fabricmanager",
        effect="`nvidia-smi -q -i 0 | grep -A2 Fabric` reports Completed, and CUDA starts",
        only_if=(logged("fabric_not_ready").at_least(1, SAID),),
        why=reported(
            "the fabric manager was not running, or of another release than the driver",
            "https://github.com/nanoporetech/dorado/issues/1214",
        ),
    ),
)

incident = Incident(
    id="startup_failed",
    title="Engine start-up failed",
    severity="critical",
    per=("instance",),
    window="1m",
    hold="0s",
    cause="""
        A worker or the engine raised an error before the server was ready: an unsupported setting on this hardware, too
        little memory, a missing model, or a flag that this release does not have. The root cause is logged above the
        last traceback.
    """,
    impact="the server never becomes ready; under a supervisor it restarts and fails in a loop",
    symptoms=(startup_failed.at_least(1, measured("the engine logs that it failed", "startup_crash_blocksize16")),),
    looks_like=(
        LookAlike("startup_slow", distinguish="The start continues, and no error has ended it."),
        LookAlike("engine_dead", distinguish="The server had answered before."),
        LookAlike("crash_loop", distinguish="It was started again, and failed again."),
    ),
    explains=(
        "server_crashed",
        "engine_dead",
    ),
    quotes=quoted_error,
    lints=True,
    fixes=(
        *READ_LOG,
        *DRIVER,
        Fix(
            change="Correct what the error names and start again; `diag doctor --log` follows the start.",
            effect="the start-up phases complete and /metrics answers",
            why=judged("a start that failed because of its settings fails again with them"),
        ),
    ),
    mitigate=("Roll back to the last configuration or image that started.",),
    hand_over=("the log from its first line to the error, the image digest and the launch command",),
    do_not=("Do not let the supervisor restart it endlessly: every attempt loads the weights again.",),
)
