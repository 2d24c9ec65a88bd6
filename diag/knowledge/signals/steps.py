"""Signals of an engine's steps: prefill and decode in the same step, and how near a step is to the GPUs' ceilings.

Inter-token latencies, stream pauses and long prompts show what a step holds. Shares of the GPUs' ceilings (the
roofline) are those of memory bandwidth (MBU), of FLOPs (MFU), and of tensor parallelism's links. The ceilings are from
data sheets; the work is vLLM's own estimate (--enable-mfu-metrics), otherwise the minimum for the model's shape
(diag/vllm/work.py). If GPU or model are unknown, there is no sample. Iterations without output are not counted; KV
blocks count as a whole.
"""

from diag.core.contract import STALL_BUCKETS
from diag.core.incident import reported
from diag.knowledge.signals.expressions import (
    ANY_MEMBER,
    ITL,
    any_of,
    parts,
    signal,
    within,
)

PAUSE_EDGES = (*STALL_BUCKETS, 80)
"""Edges of the histogram of inter-token latencies, in seconds."""
MEDIAN = "histogram_quantile(0.5, sum by ($by, le) (increase({}_bucket[$window])))"
_PUBLIC = (
    "https://github.com/NVIDIA/TensorRT-LLM/blob/138f96d45f90b9667426f7c47297d8c06bafac73/docs/source/performance.md"
)
REACHED = reported("servers in public figures reach 21 % to 80 % of their ceilings (bench/capacity.md)", _PUBLIC)
FULL, EMPTY = 0.6, 0.2
"""Shares of a ceiling: above FULL a GPU has little reserve; below EMPTY there is no public figure."""
FULL_LINK, HALF_FULL_LINK = 0.7, 0.4
"""Mean shares of a link's rate, of which it reaches 80 to 90 % (judged): nearly full all the time, or half of it."""
IDLE = 0.1
"""Utilisation below which a GPU takes no part in the work of the server."""
MUCH_WAITING = 0.2
"""Share of the link's rate that the all-reduces need: they overlap with no computation, so they take it as time."""
ENGINE = "by (instance, engine)"


def _name(seconds: float) -> str:
    """Return an edge as part of a name: 2_5_s."""
    return f"{seconds:g}_s".replace(".", "_")


def _known(metric: str, part: str = "") -> str:
    """Return a number of the server, or of a part of its weights, one for each instance."""
    matchers = f'{{part="{part}"}}' if part else ""
    return f"max by (instance) (last_over_time({metric}{matchers}[$window]))"


PARTS = parts(
    vars(),
    f"""
    prefills_within_freeze_seconds: requests = {within("$freeze_seconds", ("vllm:request_prefill_time_seconds",))}
    prompts_within_500_tokens: requests = {within("500", ("vllm:request_prompt_tokens",))}
    """,
    *(
        f"""
    itl_within_{_name(above)}: tokens = {within(f"{above:g}", ITL)}
    # 0 if the server lacks the edge
    pauses_over_{_name(above)}: pauses = $itl_count - ($itl_within_{_name(above)} or $itl_count)
    """
        for above in PAUSE_EDGES
    ),
    # Each pause lasted freeze_seconds, each further bucket below it, and half of its own: without that half, two pauses
    # of 2.4 s count as 2 s. Half of the buckets on both sides of an edge are thus counted for the pauses over it.
    # Weighted by time, not by finished requests: in the worst case none finishes.
    *(
        f"pause_time_at_{_name(edge)}: seconds ="
        f" ({(edge - below) / 2:g} * ($freeze_seconds <= bool {below:g})"
        f" + {(above - edge) / 2:g} * ($freeze_seconds <= bool {edge:g})) * $pauses_over_{_name(edge)}"
        for below, edge, above in zip(PAUSE_EDGES, PAUSE_EDGES[1:], (*PAUSE_EDGES[2:], PAUSE_EDGES[-1]), strict=False)
    ),
    " + ".join(
        [
            f"paused_time: seconds = ($freeze_seconds + {(PAUSE_EDGES[1] - PAUSE_EDGES[0]) / 2:g}"
            f" * ($freeze_seconds <= bool {PAUSE_EDGES[0]:g})) * $stream_pauses"
        ]
        + [f"$pause_time_at_{_name(edge)}" for edge in PAUSE_EDGES[1:]]
    ),
)

paused_share = signal(
    "decode time in stream pauses: share = clamp_max($paused_time / ($itl_sum > 0), 1)",
    "{value} of decode time is spent in inter-token latencies above the stream pause threshold",
)
stream_pauses_per_request = signal(
    "stream pauses / finished request: ratio = $stream_pauses / ($finished_requests >= 3)",
    "{value} stream pauses (inter-token latency above the stream pause threshold) per finished request",
)
typical_decode_share = signal(
    # if each step prefills many tokens, the typical latency is that of a prefill
    "decode time at typical ITL: share ="
    " $itl_median * $itl_count / ($itl_sum > 0) * ($tokens_prefilled_per_step < bool 500)",
    "{value} of decode time is spent at a typical inter-token latency that is not that of prefills",
)
prefilled_per_step = signal(
    "prompt tokens prefilled per step: tokens = $tokens_prefilled_per_step",
    "a step prefills {value} prompt tokens on average",
    context=True,
)
long_prefills = signal(
    "prefills over freeze_seconds: requests = $prefills - $prefills_within_freeze_seconds",
    "prefills that took longer than the stream pause threshold: {value}",
    window_scaling="peak",
)
long_prompts = signal(
    "prompts over 500 tokens: requests = $prompts - $prompts_within_500_tokens",
    "prefilled prompts of more than 500 tokens: {value}",
    window_scaling="peak",
)
prefills_in_pauses = signal(
    "long prefills, done or in progress: requests ="
    " ($long_prefills_done > 0) or ($long_prefills_begun > 0) or ($long_prefills_done + $long_prefill_in_progress)",
    "prefills that took longer than the stream pause threshold, or whose prompt still takes KV cache: {value}",
    window_scaling="peak",
    formerly=("prefills over freeze_seconds",),
)
stream_pauses_unexplained = signal(
    "stream pauses over 40 s without a prefill: pauses = $pauses_over_40_s * (1 - $prompts_account_for_pauses)",
    "inter-token latencies above 40 s for which no long prefill accounts: {value}",
    window_scaling="peak",
    formerly=("stream pauses over 40 s",),
)
prompt_lengths_spread = signal(
    "prompt length p95 / p50: ratio ="
    " histogram_quantile(0.95, sum by ($by, le) (increase(vllm:request_prompt_tokens_bucket[$window])))"
    " / (histogram_quantile(0.5, sum by ($by, le) (increase(vllm:request_prompt_tokens_bucket[$window]))) > 0)",
    "the 95th percentile of prompt lengths is {value} times the median",
)
tokens_prefilled_within_pause = signal(
    # a margin of 60 %: prefill slows down as the context grows
    "tokens prefilled in 60 % of the stream pause threshold: tokens = 0.6 * $freeze_seconds * $prefill_rate",
    "{value} prompt tokens are prefilled in 60 % of the stream pause threshold",
)
tokens_of_one_prompt_within_pause = signal(
    # concurrent prefills share the tokens of a step
    "tokens of one prompt in 60 % of the stream pause threshold: tokens ="
    f" ${tokens_prefilled_within_pause.id} / (1 + $prefills_at_a_time)",
    "{value} tokens of each concurrent prompt are prefilled in 60 % of the stream pause threshold",
)
threshold_share_of_step = signal(
    # 256 is the lowest proposed value; if the token budget is unknown, the fix is not ruled out
    "proposed threshold / --max-num-batched-tokens: share ="
    f" clamp_min(${tokens_of_one_prompt_within_pause.id}, 256) / on (instance) group_left ()"
    f" $config_max_num_batched_tokens or 0 * ${tokens_of_one_prompt_within_pause.id}",
    "the proposed threshold is {value} of a step's token budget",
)
bandwidth_share = signal(
    "memory bandwidth / peak (MBU): share = max by ($by) (($bytes_moved_by_vllms_estimate > 0 or $bytes_read_rate)"
    " / on (instance) group_left () $memory_bandwidth)",
    "weights and KV cache are read at {value} of the GPU's memory bandwidth",
    group=ANY_MEMBER,
)
compute_share = signal(
    "FLOPs / peak (MFU): share = max by ($by) ($flops_rate / on (instance) group_left () $flops_peak)",
    "the GPU computes {value} of the FLOPs of its data sheet",
    group=ANY_MEMBER,
)
nvlink_share = signal(
    "all-reduces / NVLink bandwidth: share ="
    " max by ($by) ($all_reduce_bytes_rate / on (instance) group_left () $nvlink_bandwidth)",
    "the all-reduces of tensor parallelism need {value} of the NVLink bandwidth",
    group=ANY_MEMBER,
)
all_reduce_share = signal(
    "all-reduces / PCIe bandwidth: share ="
    " max by ($by) ($all_reduce_bytes_rate / on (instance) group_left () $pcie_bandwidth)",
    "the all-reduces of tensor parallelism alone need {value} of the PCIe bandwidth",
    group=ANY_MEMBER,
)
links_saturated = signal(
    "PCIe links saturated: bool = "
    + any_of(
        traffic=f"($pcie_traffic_per_link_capacity > bool {FULL_LINK})",
        waits=f"($all_reduces_per_pcie_bandwidth > bool {MUCH_WAITING})"
        f" * ($pcie_traffic_per_link_capacity > bool {HALF_FULL_LINK})",
    ),
    "the PCIe links are full, or the ranks wait for them for much of each step: {value}",
)
batch = signal(
    "tokens decoded in a step: tokens = max by ($by) ($batch_size)",
    "tokens decoded in a step: {value}",
)

NEAR_BANDWIDTH, NEAR_COMPUTE = (share.at_least(FULL, REACHED) for share in (bandwidth_share, compute_share))
