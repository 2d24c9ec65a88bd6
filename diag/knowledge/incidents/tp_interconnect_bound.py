"""Tokens are generated, but the tensor-parallel ranks wait for the links between them."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged
from diag.knowledge import shared_fixes

INFINIBAND = "https://docs.kernel.org/infiniband/sysfs.html"
PARALLELISM = "https://docs.vllm.ai/en/latest/serving/parallelism_scaling.html"

LANES_LOST = signals.pcie_lanes_lost.above(0, judged("a link under load should use all of its lanes"))

incident = Incident(
    id="tp_interconnect_bound",
    title="Tensor parallelism limited by the interconnect",
    severity="warning",
    per=("instance",),
    hold="10m",
    cause="""
        Every layer needs two all-reduces: about 10 us each over NVLink, 100 to 1000 us over PCIe. Without NVLink
        between the ranks, or with a link that lost lanes, the ranks wait for transfers instead of computing.
    """,
    impact="inter-token latency is higher than the GPUs need",
    symptoms=(
        signals.ranks.above(1, documented("ranks exchange activations in every layer", PARALLELISM)),
        signals.progress.above(0, judged("without any progress it is a stall")),
        signals.requests_in_flight_peak.at_least(1, judged("the links of an idle server prove nothing")),
        signals.nvlinks.at_most(0, judged("NVLink has many times the bandwidth that a layer needs")),
        signals.links_saturated.at_least(
            1,
            judged(
                "a link is saturated at about 80 to 90 % of its rate; all-reduces overlap with no computation, so a "
                "mean of 40 % is that of a link which is full for half of the time"
            ),
        ),
    ),
    supports=(
        signals.pcie_share.above(0.7, judged("the mean over steps, in which the link is idle while the ranks compute")),
        LANES_LOST,
        signals.infiniband_link_errors.above(0, documented("a link with errors sends packets again", INFINIBAND)),
        signals.slowest_clock.below(0.85, judged("all ranks wait for the slowest one")),
    ),
    looks_like=(
        LookAlike("tp_communication_stall", distinguish="No request makes any progress."),
        LookAlike(
            "gpu_thermal_throttling",
            distinguish="One GPU has lowered its clock because of heat, and its peers wait for it.",
        ),
        LookAlike(
            "prefill_decode_contention", distinguish="A few inter-token latencies are very long; the others are normal."
        ),
    ),
    explains=("contract_breached",),
    may_explain=shared_fixes.SLOW_SERVER,
    ended_by=signals.links_saturated,
    fixes=(
        Fix(
            change="Repair the PCIe link that runs with fewer lanes than it has: reseat the card and its riser, or "
            "move the server to another host. All ranks wait for the slowest link.",
            command="nvidia-smi --query-gpu=index,pcie.link.width.current,pcie.link.width.max,pcie.link.gen.current "
            "--format=csv",
            effect="all links run with all of their lanes, and inter-token latency falls",
            only_if=(LANES_LOST,),
            why=judged("a link with a quarter of its lanes takes four times as long for each all-reduce"),
        ),
        Fix(
            change="Place the ranks on GPUs that are connected by NVLink or by the same PCIe switch: see nvidia-smi "
            "topo -m.",
            command="nvidia-smi topo -m",
            effect="PCIe traffic and inter-token latency fall",
            why=documented("tensor parallelism needs the fastest links", PARALLELISM),
        ),
        Fix(
            flag="--pipeline-parallel-size",
            value=signals.twice_the_stages,
            also=(("--tensor-parallel-size", signals.half_of_the_ranks),),
            direction="raise",
            only_if=(
                signals.odd_ranks.at_most(0, documented("the ranks are divided evenly among the stages", PARALLELISM)),
                signals.running_value("decode_context_parallel_size").at_most(
                    1, documented("it has to divide the remaining number of ranks", PARALLELISM)
                ),
            ),
            change="If the model has to be sharded without NVLink, replace half of the tensor parallelism by pipeline "
            "parallelism, which communicates once per stage instead of twice per layer.",
            effect="PCIe traffic falls; throughput rises; latency at low load may rise too",
            risk="a single request gets slower",
            rollback="set the old sizes again",
            why=documented("pipeline parallelism is recommended for GPUs without NVLink", PARALLELISM),
        ),
    ),
    mitigate=("Send new load to hosts whose GPUs are connected by NVLink.",),
    hand_over=(
        "`nvidia-smi topo -m`, the link generation and width under load (`nvidia-smi -q -d PCI`), and whether all "
        "ranks use the same GPU model",
    ),
)
