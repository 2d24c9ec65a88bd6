"""Shares of the GPUs' ceilings (the roofline): memory bandwidth (MBU), FLOPs (MFU), and tensor parallelism's links.

The ceilings are of data sheets, the work is vLLM's own estimate (--enable-mfu-metrics), else the least that the model's
shape needs (diag/vllm/capacity/work.py). Where GPU or model are not known there is no sample. Iterations without
output are not counted; KV blocks are, as a whole.
"""

from diag.core.incident import Signal, reported
from diag.knowledge.signals.expressions import KV_USAGE, configured
from diag.knowledge.signals.gpu import LINK, SERVING

_PUBLIC = (
    "https://github.com/NVIDIA/TensorRT-LLM/blob/138f96d45f90b9667426f7c47297d8c06bafac73/docs/source/performance.md"
)
REACHED = reported("servers in public figures reach 21 % to 80 % of their ceilings (bench/capacity.md)", _PUBLIC)
FULL, EMPTY = 0.6, 0.2
"""From this share on little more is to be had of a GPU; below the other one there is no public figure."""


def _per_engine(metric: str) -> str:
    """The rate of a counter, one for each engine."""
    return f"sum by (instance, engine) (rate({metric}[$window]))"


def _known(metric: str, matchers: str = "") -> str:
    """A number of the server, one for each instance."""
    selected = f"{metric}{{{matchers}}}" if matchers else metric
    return f"max by (instance) (last_over_time({selected}[$window]))"


def _times(engine: str, instance: str, operator: str = "*") -> str:
    """An expression for each engine, with one for each instance."""
    return f"({engine} {operator} on (instance) group_left () {instance})"


GENERATED = _per_engine("vllm:generation_tokens_total")
API_SERVERS = f"({configured('api_server_count')} or 0 * {_known('diag_vllm_up')} + 1)"
"""Each of them counts an iteration in which it has requests."""
ITERATIONS = _times(_per_engine("vllm:iteration_tokens_total_count"), API_SERVERS, "/")
BATCH = f"({GENERATED} / ({ITERATIONS} > 0))"
EXPERTS = _times(
    # those that the tokens of a step reach, if routing is even
    f"(1 - (1 - {_known('diag_vllm_experts_per_token_ratio')}) ^ on (instance) group_right () {BATCH})",
    _known("diag_vllm_weight_bytes", 'part="experts"'),
)
IN_CACHE = " or ".join(f"max by (instance, engine) (avg_over_time({usage}[$window]))" for usage in KV_USAGE)
CONTEXT = _times(f"({IN_CACHE})", configured("kv_cache_size_tokens"))
CACHE = _times(CONTEXT, _known("diag_vllm_kv_cache_bytes_per_token"))
EVERY_STEP = _known("diag_vllm_weight_bytes", 'part="every_step"')
READ = f"{ITERATIONS} * {_times(f'({CACHE} + {EXPERTS})', EVERY_STEP, '+')}"
ESTIMATED = " + ".join(_per_engine(f"vllm:estimated_{way}_bytes_per_gpu_total") for way in ("read", "write"))
"""0 without --enable-mfu-metrics."""
BANDWIDTH = f"max by (instance) (last_over_time(diag_gpu_memory_bandwidth_max_bytes_per_second[$window]) {SERVING})"
bandwidth_share = Signal(
    "memory bandwidth / peak (MBU)",
    f"max by ($by) {_times(f'(({ESTIMATED}) > 0 or {READ})', BANDWIDTH, '/')}",
    "weights and KV cache are read at {value} of the GPU's memory bandwidth",
    "share",
)

HITS = f"({_per_engine('vllm:prefix_cache_hits_total')} or {_per_engine('vllm:gpu_prefix_cache_hits_total')})"
COMPUTED = f"(({GENERATED} + clamp_min({_per_engine('vllm:prompt_tokens_total')} - {HITS}, 0)) or {GENERATED})"
FLOPS = "max by (instance, dtype) (last_over_time(diag_vllm_flops_per_token[$window]))"
PEAK = (
    f"max by (instance) (max by (instance, dtype) (last_over_time(diag_gpu_flops_max[$window]) {SERVING})"
    f" and on (instance, dtype) {FLOPS})"
)
NEEDED = _times(COMPUTED, _known("diag_vllm_flops_per_token"))
DONE = f"({_per_engine('vllm:estimated_flops_per_gpu_total')} > 0 or {NEEDED})"
compute_share = Signal(
    "FLOPs / peak (MFU)",
    f"max by ($by) {_times(DONE, PEAK, '/')}",
    "the GPU computes {value} of the FLOPs of its data sheet",
    "share",
)

SENT = _times(COMPUTED, f"({_known('diag_vllm_all_reduce_bytes_per_token')} > 0)")
NVLINK = (
    f"max by (instance) ((last_over_time(diag_gpu_nvlink_max_bytes_per_second[$window])"
    f" and on (instance, gpu) last_over_time(diag_gpu_nvlink_active_links[$window]) > 0) {SERVING})"
)
PCIE_LINK = f"max by (instance) ({LINK} {SERVING})"
nvlink_share = Signal(
    "all-reduces / NVLink bandwidth",
    f"max by ($by) {_times(SENT, NVLINK, '/')}",
    "the all-reduces of tensor parallelism need {value} of the NVLink bandwidth",
    "share",
)
all_reduce_share = Signal(
    "all-reduces / PCIe bandwidth",
    f"max by ($by) {_times(SENT, PCIE_LINK, '/')}",
    "the all-reduces of tensor parallelism alone need {value} of the PCIe bandwidth",
    "share",
)
batch = Signal("tokens decoded in a step", f"max by ($by) ({BATCH})", "tokens decoded in a step: {value}", "tokens")

NEAR_BANDWIDTH, NEAR_COMPUTE = (share.at_least(FULL, REACHED) for share in (bandwidth_share, compute_share))
