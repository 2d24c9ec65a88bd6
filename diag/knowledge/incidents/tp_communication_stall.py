"""One tensor-parallel rank does not reach a collective, and all other ranks wait in it."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, measured, reported
from diag.knowledge import shared_fixes

SPIN = reported(
    "96 % utilisation at about 20 W; by processes: one rank uses no CPU while its peer uses a full core",
    "https://github.com/vllm-project/vllm/issues/42354",
)
OUT_OF_STEP = signals.ranks_out_of_step.at_least(1, SPIN)
STANDS_STILL = signals.progress._replace(throughout=True).at_most(
    0, measured("no token was processed for 73 s", "tp2_long_stall")
)
ON_PCIE = signals.nvlinks.at_most(
    0, documented("peer-to-peer access over PCIe is what breaks", shared_fixes.TROUBLESHOOTING)
)
INFINIBAND = "https://docs.kernel.org/infiniband/sysfs.html"
NVLINK = "https://docs.nvidia.com/deploy/nvml-api/group__NvLink.html"

incident = Incident(
    id="tp_communication_stall",
    title="Tensor-parallel rank stalled",
    severity="critical",
    outage=True,
    per=("instance",),
    window="1m",
    cause="""
        Tensor-parallel ranks meet in a collective twice per layer. If one rank does not arrive (a hung kernel, a
        stopped process, a broken link), all other ranks busy-wait in the collective: utilisation is high and no token
        is generated. /health keeps answering 200; after about 300 s (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS) the engine
        gives up and dies.
    """,
    impact="every stream hangs and no new request gets a token",
    symptoms=(
        STANDS_STILL,
        signals.ranks.above(1, documented("a single rank waits for no other rank", shared_fixes.TROUBLESHOOTING)),
        signals.ranks_missing_from_collective.at_least(1, SPIN),
    ),
    supports=(
        signals.infiniband_ports_down.at_least(1, documented("no collective passes a port that is down", INFINIBAND)),
        signals.infiniband_link_errors.above(0, documented("the counters of a sound link stand still", INFINIBAND)),
        signals.nvlinks_trained_again.above(0, documented("an NVLink was trained again after errors", NVLINK)),
        OUT_OF_STEP,
        signals.log_waits.at_least(1, measured("after 60 s the log reports a rank waiting", "tp2_long_stall")),
    ),
    looks_like=(
        LookAlike("a scheduler deadlock", distinguish="All ranks are idle: none busy-waits.", refuted_by=OUT_OF_STEP),
        LookAlike(
            "compilation or warm-up while serving",
            distinguish="The log has the same line, but the rank that compiles uses a full core: no rank stands still.",
            refuted_by=OUT_OF_STEP,
        ),
        shared_fixes.NOT_CHANGING,
        LookAlike("gpu_fault", distinguish="The driver reports an Xid error, or the GPU does not answer."),
    ),
    explains=(
        "data_parallel_lockstep",
        "engine_stalled",
        "queue_saturation",
        "kv_pool_saturated",
        "replicas_unbalanced",
        "requests_aborted",
        "contract_breached",
    ),
    fixes=(
        *shared_fixes.LET_GO_ON,
        shared_fixes.SAVE_STACKS,
        shared_fixes.READ_DUMPS,
        Fix(
            change="Take the server out of rotation and restart it: requests in flight are lost either way.",
            effect="tokens are generated again",
            only_if=shared_fixes.NOT_HALTED,
            while_it_lasts=True,
            why=judged("a rank that missed a collective does not recover by itself, unless it was merely stopped"),
        ),
        Fix(
            flag="--disable-custom-all-reduce",
            value="",
            change="If it happens again on PCIe, let NCCL do the all-reduce.",
            effect="the stall does not recur",
            only_if=(ON_PCIE, signals.not_set("disable_custom_all_reduce")),
            risk="latency at small batch sizes rises by a few percent",
            rollback="remove the flag",
            why=reported("the flag ended the stalls", "https://github.com/vllm-project/vllm/issues/33041"),
        ),
        Fix(
            environment="NCCL_P2P_DISABLE",
            value="1",
            only_if=(ON_PCIE,),
            change="If ACS or an IOMMU breaks peer-to-peer access, stop NCCL from using it.",
            effect="the stall does not recur",
            risk="traffic between ranks goes through host memory, which is slower",
            rollback="unset it",
            why=reported("NCCL hangs with P2P behind ACS", "https://github.com/NVIDIA/nccl/issues/2079"),
        ),
        Fix(
            environment="VLLM_SKIP_P2P_CHECK",
            value="0",
            only_if=(ON_PCIE,),
            change="Let vLLM test peer-to-peer access at start-up instead of trusting the driver.",
            effect="a broken link is found at start-up, and custom all-reduce is disabled",
            versions=("0.10.1", ""),
            rollback="unset it",
            why=documented("the test is skipped by default since 0.10.1", shared_fixes.TROUBLESHOOTING),
        ),
        shared_fixes.STACK_TRACES,
    ),
    operations=("drain", "restart"),
    mitigate=(
        "Take the server out of rotation, save the stack traces, then restart it: no such stall has been seen to "
        "recover by itself, unless a process was merely stopped.",
    ),
    hand_over=(
        "the stack trace of every rank, NCCL's own status (`ncclras -v`), the log of the next start with "
        "`NCCL_DEBUG=INFO`, `nvidia-smi topo -m`, and `ethtool -S` of each NIC where ranks span hosts",
    ),
    do_not=(
        "Do not add replicas or load: the server is not busy, it is stalled.",
        "Do not trust GPU utilisation: a rank that waits in a collective shows 100 %.",
    ),
)
