"""The engine's program failed on its device: a CUDA error, or a collective of the ranks that timed out."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, reported
from diag.knowledge import shared_fixes

CASE = "https://github.com/vllm-project/vllm/issues/40756"
SAID = judged("the line in the log decides which of these cases it is")
CUDA = (signals.logged("cuda_error").at_least(1, SAID),)
COLLECTIVE = (signals.logged("nccl_timeout").at_least(1, SAID),)
ALL_TO_ALL = (signals.logged("all_to_all_timeout").at_least(1, SAID),)
DEEPEP = "https://github.com/vllm-project/vllm/issues/46509"

incident = Incident(
    id="engine_device_fault",
    title="Engine failed on its device",
    severity="critical",
    outage=True,
    per=("instance",),
    window="1m",
    live_window="15s",
    hold="0s",
    immediate="the line in the log is the failure itself, written once, and the engine ends with it",
    cause="""
        A kernel read memory that is not its own, a library of CUDA refused a call, or a rank did not reach a collective
        in time. After such an error nothing works on this device until the process has ended: the engine dies, or hangs
        until a time-out ends it. The same request often brings it about again.
    """,
    impact="all requests of this engine fail",
    symptoms=(
        signals.device_fault.at_least(1, reported("an illegal memory access ended the engine", CASE)),
        signals.tokens_or_shutdown.at_most(
            0, judged("an engine that generates tokens is alive; a requested shutdown is no fault")
        ),
    ),
    looks_like=(
        LookAlike(
            "gpu_fault",
            distinguish="The hardware fails: the GPU is lost, Xid errors other than 13, 31, 43 and 45, memory errors.",
        ),
        LookAlike("gpu_out_of_memory", distinguish="An allocation failed: the log line reports that memory ran out."),
        LookAlike("startup_failed", distinguish="The error ended a start, not a server at work."),
    ),
    explains=("engine_dead", "engine_stalled", "crash_loop", "contract_breached"),
    quotes=signals.quoted_error,
    fixes=(
        *shared_fixes.READ_LOG,
        shared_fixes.READ_DUMPS,
        Fix(
            change="Restart the server; if it fails again, look for the request that it was working on.",
            effect="/metrics answers again and tokens are generated",
            why=judged("a device that failed so works again for a new process"),
        ),
        Fix.without_restart(
            change="If it happens again, start a spare server with CUDA_LAUNCH_BLOCKING=1 and --enforce-eager, and "
            "send it the same requests.",
            effect="the traceback names the operation that fails, not a later one",
            only_if=CUDA,
            why=documented("it makes every kernel launch wait", shared_fixes.TROUBLESHOOTING),
        ),
        Fix.without_restart(
            change="If it happens again, start a spare server with NCCL_DEBUG=TRACE, and send it the same load.",
            effect="the log names the rank that did not arrive, and its link",
            only_if=COLLECTIVE,
            why=documented("the vendor's and vLLM's guide ask for it", shared_fixes.TROUBLESHOOTING),
        ),
        Fix.without_restart(
            change="Find the rank that the all-to-all of the experts waited for: in vLLM's `Mask: [...]` it is the one "
            "that differs, in DeepEP's lines the rank that does not print `timeout` while its peers do. Compare its "
            "log and its host with the others: a kernel that compiles for minutes, a slow disk, a dead process.",
            effect="the rank that lagged, and what it did meanwhile, is known",
            only_if=ALL_TO_ALL,
            why=reported("every rank but the cause times out in the barrier of DeepEP", DEEPEP),
        ),
        Fix(
            change="If no rank lagged, test the network of the experts alone: NVSHMEM's perftest and ib_write_bw "
            "between the nodes, NVSHMEM_IB_GID_INDEX and NVSHMEM_HCA_LIST, and IBGDA in the driver. Until it works, "
            "serve with --all2all-backend allgather_reducescatter.",
            effect="dispatch and combine end in time",
            only_if=ALL_TO_ALL,
            risk="the other backend needs more bandwidth between the nodes",
            rollback="the former --all2all-backend",
            why=reported("RDMA between nodes failed, and each dispatch timed out", DEEPEP),
        ),
        Fix.without_restart(
            change="Run the vendor's diagnostics (dcgmi diag -r 3) if other models or requests fail on this GPU too.",
            effect="the result distinguishes a hardware fault from a software error",
            why=judged("the same error on the same GPU with different programs is a hardware error"),
        ),
    ),
    operations=("log", "drain", "cordon", "restart"),
    mitigate=(
        "Take the server out of rotation until it has started again.",
        "If it dies again at once, stop the client whose request it was working on.",
    ),
    hand_over=(
        "the log from the first CUDA or NCCL error on, `dmesg -T | grep -i xid`, the releases of vLLM and the driver, "
        "the GPU model, and the launch command",
    ),
    do_not=("Do not trust the last operation in the traceback: kernels run later than they are launched.",),
)
