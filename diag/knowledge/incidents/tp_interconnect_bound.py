"""Tokens flow, but the ranks wait for the links between them."""

from diag.incident import Fix, Incident, LookAlike, documented, judged
from diag.signals import (
    half_of_the_ranks,
    link_lost,
    nvlinks,
    odd_ranks,
    pcie_share,
    progress,
    ranks,
    requests_in_flight_peak,
    running_value,
    slowest_clock,
    twice_the_stages,
)

PARALLELISM = "https://docs.vllm.ai/en/latest/serving/parallelism_scaling.html"

incident = Incident(
    id="tp_interconnect_bound",
    title="The links between the ranks are the bottleneck",
    severity="warning",
    per=("instance",),
    hold="10m",
    cause="""
        Every layer ends in two all-reduces: some 10 us each over NVLink, 100 to 1000 us over PCIe. Without NVLink
        between the ranks, or with a link that lost lanes, they wait for the traffic instead of computing.
    """,
    impact="every token takes longer than the GPUs need",
    symptoms=(
        ranks.above(1, documented("ranks exchange activations in every layer", PARALLELISM)),
        progress.above(0, judged("where nothing moves it is a stall")),
        requests_in_flight_peak.at_least(1, judged("links of an idle server say nothing")),
        nvlinks.at_most(0, judged("NVLink carries many times what a layer needs")),
        pcie_share.above(0.7, judged("a link is full at some 80 to 90 % of its rate")),
    ),
    supports=(
        link_lost.above(0, judged("a link under load runs at all of its lanes")),
        slowest_clock.below(0.85, judged("ranks wait for the slowest one")),
    ),
    looks_like=(
        LookAlike("tp_communication_stall", distinguish="There, nothing moves at all."),
        LookAlike(
            "gpu_thermal_throttling", distinguish="There, one GPU's clock is low for heat, and its peers wait for it."
        ),
        LookAlike("prefill_decode_contention", distinguish="There, a few gaps are long, not all of them longer."),
    ),
    fixes=(
        Fix(
            change="Put the ranks on GPUs that NVLink joins, or on the same PCIe switch: see nvidia-smi topo -m.",
            command="nvidia-smi topo -m",
            effect="PCIe traffic falls and inter-token latency with it",
            why=documented("tensor parallelism wants the fastest links", PARALLELISM),
        ),
        Fix(
            flag="--pipeline-parallel-size",
            value=twice_the_stages,
            also=(("--tensor-parallel-size", half_of_the_ranks),),
            direction="raise",
            only_if=(
                odd_ranks.at_most(0, documented("the ranks are divided evenly among the stages", PARALLELISM)),
                running_value("decode_context_parallel_size").at_most(
                    1, documented("it has to divide what is left of the ranks", PARALLELISM)
                ),
            ),
            change="Where the model has to be spread and NVLink is missing: pipeline over half of it, which exchanges "
            "once a stage instead of twice a layer.",
            effect="PCIe traffic falls; throughput rises, latency at low load may rise too",
            risk="a request alone gets slower",
            rollback="the old sizes again, and restart",
            why=documented("GPUs without NVLink: pipeline parallelism", PARALLELISM),
        ),
    ),
    mitigate=("Send new load to hosts whose GPUs share NVLink.",),
    hand_over=(
        "`nvidia-smi topo -m`, the link generation and width under load (`nvidia-smi -q -d PCI`), and whether the "
        "ranks' GPUs are of one kind",
    ),
)
