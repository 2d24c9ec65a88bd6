"""One expert-parallel rank gets far more tokens than the mean: all other ranks wait for it in every layer."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, reported

EPLB = "https://docs.vllm.ai/en/latest/serving/expert_parallel_deployment/"
MEASURED = "https://github.com/vllm-project/vllm/pull/50647"

incident = Incident(
    id="experts_unbalanced",
    title="MoE experts out of balance",
    severity="info",
    per=("instance",),
    cause="""
        With expert parallelism each rank holds some of the experts, and a MoE layer takes as long as its busiest rank.
        Some experts are chosen more often than others, and which depends on the traffic. EPLB moves experts between
        ranks and replicates popular ones, every step_interval steps, from the load of the last window_size steps.
    """,
    impact="the MoE layers of each step take longer than the mean rank needs, so throughput falls and ITL rises",
    symptoms=(
        signals.expert_balance.below(
            0.6, reported("0.94 without and 0.99 with rebalancing, of 16 ranks at the same load", MEASURED)
        ),
        signals.tokens_of_expert_ranks.at_least(
            8192,
            judged(
                "at 64 MoE layers, 128 tokens for each rank and layer: with fewer, chance alone makes one rank busier "
                "(the highest of 16 ranks has 1.2 times the mean of 128, and twice the mean of 4)"
            ),
        ),
    ),
    looks_like=(
        LookAlike(
            "small batches",
            distinguish="A few tokens in a step fall on few experts, whatever their placement: tokens per rank and "
            "step are low.",
        ),
        LookAlike("replicas_unbalanced", distinguish="The engines hold unequal numbers of requests."),
        LookAlike("tp_interconnect_bound", distinguish="All ranks wait for the link, not for one of them."),
        LookAlike("gpu_thermal_throttling", distinguish="The rank that all wait for has a lower clock, not more work."),
    ),
    fixes=(
        Fix(
            change="Give each rank a redundant expert, so that popular experts are replicated: --eplb-config "
            """'{"num_redundant_experts": {value}}' beside --enable-eplb, or a multiple of it.""",
            value=signals.ranks_of_the_server,
            least=2,
            effect="the busiest rank comes closer to the mean",
            risk="each redundant expert takes the memory of its weights in every MoE layer, which the KV cache loses",
            rollback="remove num_redundant_experts",
            why=documented("popular experts are replicated in the redundant slots", EPLB),
        ),
        Fix(
            change="Let EPLB follow the traffic: step_interval below its default of 3000 steps, with window_size "
            "(default 1000) at most as long, in --eplb-config. Rebalance asynchronously (use_async, the default).",
            effect="experts are placed by the load of the last minutes",
            risk="each rearrangement moves weights between ranks; without use_async, requests wait for it",
            rollback="the former values",
            why=documented("the load of the last window_size steps decides, every step_interval steps", EPLB),
        ),
        Fix(
            change="Turn log_balancedness off once it is measured, or log every 100th step with "
            "log_balancedness_interval: each line costs a collective of all ranks.",
            effect="steps without that collective",
            why=documented("it is off by default because of its communication", EPLB),
        ),
    ),
    mitigate=("Mix the traffic: replicas by topic or language meet the same experts again and again.",),
    hand_over=(
        "the lines `EPLB step` of a minute under load, --eplb-config, the all2all backend, and the ranks of each node",
    ),
)
