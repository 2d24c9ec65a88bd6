"""One rank does not reach a collective, and all others wait in it."""

from diag.incident import Fix, Incident, LookAlike, documented, judged, measured, reported
from diag.signals import log_waits, nvlinks, progress, rank_missing, ranks, ranks_apart, switched_off

TROUBLESHOOTING = "https://docs.vllm.ai/en/latest/usage/troubleshooting.html"

SPIN = reported(
    "96 % busy at about 20 W; with processes: one at 0 and its peer at a full core",
    "https://github.com/vllm-project/vllm/issues/42354",
)
APART = ranks_apart.at_least(1, SPIN)
ON_PCIE = nvlinks.at_most(0, documented("peer access over PCIe is what breaks", TROUBLESHOOTING))

incident = Incident(
    id="tp_communication_stall",
    title="One rank hangs and its peers wait for it",
    severity="critical",
    per=("instance",),
    window="1m",
    cause="""
        Tensor-parallel ranks meet in a collective twice a layer. One that does not come (a hung kernel, a stopped
        process, a broken link) leaves all others spinning in it: busy by every counter, and nothing moves. /health goes
        on answering 200; some 300 s later (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS) the engine gives up and dies.
    """,
    impact="every stream hangs, and no new request gets a token",
    symptoms=(
        progress.at_most(0, measured("0 for 73 s", "tp2_long_stall")),
        ranks.above(1, documented("a rank that has no peers waits for nobody", TROUBLESHOOTING)),
        rank_missing.at_least(1, SPIN),
    ),
    supports=(
        APART,
        log_waits.at_least(1, measured("after 60 s the log says that a rank waits", "tp2_long_stall")),
    ),
    looks_like=(
        LookAlike("a scheduler that is stuck", distinguish="It leaves all ranks idle: none spins.", refuted_by=APART),
        LookAlike(
            "a compile or warm-up while serving",
            distinguish="The same line stands in the log, and the rank that compiles uses a full core: none stands "
            "still.",
            refuted_by=APART,
        ),
        LookAlike("gpu_fault", distinguish="There, the driver reports an Xid or the GPU does not answer."),
    ),
    explains=("engine_stalled", "queue_saturation", "kv_pool_saturated", "replicas_unbalanced", "contract_breached"),
    fixes=(
        Fix(
            change="Before anything is restarted, keep the evidence: the stack of every rank.",
            command="for p in $(pgrep -f 'VLLM::'); do py-spy dump --pid $p; done",
            effect="names the call that does not return, and the rank that is not in it",
            restart=False,
            why=documented("stack traces of the hanging processes come first", TROUBLESHOOTING),
        ),
        Fix(
            change="Take the server out of rotation and restart it: requests in flight are lost either way.",
            effect="tokens move again",
            why=judged("a rank that left a collective does not come back by itself, unless it was merely stopped"),
        ),
        Fix(
            flag="--disable-custom-all-reduce",
            value="",
            change="Where it happens again on PCIe: let NCCL do the all-reduce.",
            effect="the stall does not come back",
            only_if=(ON_PCIE, switched_off("disable_custom_all_reduce")),
            risk="a few percent of latency at small batches",
            rollback="remove the flag and restart",
            why=reported("cured", "https://github.com/vllm-project/vllm/issues/33041"),
        ),
        Fix(
            environment="NCCL_P2P_DISABLE",
            value="1",
            only_if=(ON_PCIE,),
            change="Where ACS or an IOMMU breaks peer access: keep NCCL off it.",
            effect="the stall does not come back",
            risk="traffic between ranks goes through host memory, which is slower",
            rollback="unset it and restart",
            why=reported("hangs with P2P behind ACS", "https://github.com/NVIDIA/nccl/issues/2079"),
        ),
        Fix(
            environment="VLLM_SKIP_P2P_CHECK",
            value="0",
            only_if=(ON_PCIE,),
            change="Have vLLM test peer access at start instead of trusting the driver.",
            effect="a broken link is found at start, and custom all-reduce switched off",
            versions=("0.10.1", ""),
            rollback="unset it and restart",
            why=documented("skipping the test is the default since 0.10.1", TROUBLESHOOTING),
        ),
    ),
    mitigate=(
        "Take the server out of rotation, keep the evidence, then restart it: it has not been seen to recover by "
        "itself.",
    ),
    hand_over=(
        "the stack of every rank, `NCCL_DEBUG=INFO` of the next start, `nvidia-smi topo -m`, and `ethtool -S` of each "
        "NIC where ranks span hosts",
    ),
    do_not=(
        "Do not add replicas or load: the server is not busy, it is stuck.",
        "Do not trust utilisation: a rank that waits in a collective shows 100 %.",
    ),
)
