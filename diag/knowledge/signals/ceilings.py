"""Shares of the GPUs' ceilings (the roofline): memory bandwidth (MBU), FLOPs (MFU), and tensor parallelism's links.

The ceilings are from data sheets; the work is vLLM's own estimate (--enable-mfu-metrics), otherwise the minimum for the
model's shape (diag/vllm/work.py). If GPU or model are unknown, there is no sample. Iterations without output
are not counted; KV blocks count as a whole.
"""

from diag.core.incident import reported
from diag.knowledge.signals.expressions import (
    ANY_MEMBER,
    KV_USAGE,
    PREFIX_CACHE_HITS,
    SLOWEST_MEMBER,
    any_of,
    parts,
    renamed,
    signal,
)

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


def _known(metric: str, part: str = "") -> str:
    """Return a number of the server, or of a part of its weights, one for each instance."""
    matchers = f'{{part="{part}"}}' if part else ""
    return f"max by (instance) (last_over_time({metric}{matchers}[$window]))"


PARTS = parts(f"""
    decode_rate: tokens/s = $output_tokens_rate {ENGINE}
    # each API server counts an iteration in which it has requests
    api_servers: processes = $config_api_server_count or 0 * $vllm_up by (instance) + 1
    iterations_rate: 1/s =
        sum by (instance, engine) (rate(vllm:iteration_tokens_total_count[$window]))
        / on (instance) group_left () $api_servers
    batch_size: tokens = $decode_rate / ($iterations_rate > 0)
    # the experts that the tokens of a step reach, if routing is even
    expert_bytes_per_step: bytes =
        (1 - (1 - {_known("diag_vllm_experts_per_token_ratio")}) ^ on (instance) group_right () $batch_size)
        * on (instance) group_left () {_known("diag_vllm_weight_bytes", "experts")}
    mean_kv_cache_usage_of_the_engine: share =
        max by (instance, engine) ({renamed("avg_over_time({}[$window])", KV_USAGE)})
    cache_bytes_per_step: bytes =
        ($mean_kv_cache_usage_of_the_engine * on (instance) group_left () $config_kv_cache_size_tokens)
        * on (instance) group_left () {_known("diag_vllm_kv_cache_bytes_per_token")}
    bytes_read_rate: bytes/s =
        $iterations_rate
        * (($cache_bytes_per_step + $expert_bytes_per_step)
          + on (instance) group_left () {_known("diag_vllm_weight_bytes", "every_step")})
    # 0 without --enable-mfu-metrics
    bytes_moved_by_vllms_estimate: bytes/s =
        sum by (instance, engine) (rate(vllm:estimated_read_bytes_per_gpu_total[$window]))
        + sum by (instance, engine) (rate(vllm:estimated_write_bytes_per_gpu_total[$window]))
    memory_bandwidth: bytes/s ({SLOWEST_MEMBER}) =
        min by (instance) (last_over_time(diag_gpu_memory_bandwidth_max_bytes_per_second[$window])
          unless on (instance, gpu) $gpus_not_serving)
    prefix_cache_hits_rate: tokens/s =
        {renamed("sum by (instance, engine) (rate({}[$window]))", PREFIX_CACHE_HITS)}
    tokens_computed_rate: tokens/s =
        ($decode_rate
          + clamp_min(sum by (instance, engine) (rate(vllm:prompt_tokens_total[$window])) - $prefix_cache_hits_rate, 0))
        or $decode_rate
    flops_per_token_by_dtype: FLOPs = max by (instance, dtype) (last_over_time(diag_vllm_flops_per_token[$window]))
    flops_peak: FLOPs/s ({SLOWEST_MEMBER}) =
        max by (instance) (min by (instance, dtype) (last_over_time(diag_gpu_flops_max[$window])
            unless on (instance, gpu) $gpus_not_serving) and on (instance, dtype) $flops_per_token_by_dtype)
    flops_rate: FLOPs/s =
        sum by (instance, engine) (rate(vllm:estimated_flops_per_gpu_total[$window])) > 0
        or ($tokens_computed_rate * on (instance) group_left () {_known("diag_vllm_flops_per_token")})
    all_reduce_bytes_rate: bytes/s =
        $tokens_computed_rate * on (instance) group_left () ({_known("diag_vllm_all_reduce_bytes_per_token")} > 0)
    nvlink_bandwidth: bytes/s ({SLOWEST_MEMBER}) =
        min by (instance) ((last_over_time(diag_gpu_nvlink_max_bytes_per_second[$window])
            and on (instance, gpu) last_over_time(diag_gpu_nvlink_active_links[$window]) > 0)
          unless on (instance, gpu) $gpus_not_serving)
    # an idle link lowers its generation
    gpus_idle: share = avg_over_time(diag_gpu_utilization_ratio[$window]) < {IDLE}
    pcie_bandwidth: bytes/s ({SLOWEST_MEMBER}) =
        min by (instance) ($pcie_link_bytes_per_second unless on (instance, gpu) $gpus_not_serving
          unless on (instance, gpu) $gpus_idle)
""")

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
