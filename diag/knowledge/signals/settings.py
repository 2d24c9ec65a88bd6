"""Signals of the running configuration and of the memory that it leaves free, from which fixes are computed."""

from diag.core.incident import Signal
from diag.knowledge.signals.expressions import ANY_MEMBER, FULLEST_MEMBER, RUNNING, parts, setting_value
from diag.knowledge.signals.kv_cache import cache_config_has

RESERVE = 0.05
"""Share of a GPU's memory that fixes leave free."""
PARTS = parts(f"""
    gpu_memory_free_share: share ({FULLEST_MEMBER}) =
        min by (instance) (min by (instance, gpu) (min_over_time(diag_gpu_memory_free_bytes[$window]))
          / on (instance, gpu) min by (instance, gpu) (min_over_time(diag_gpu_memory_total_bytes[$window]))
          unless on (instance, gpu) $gpus_not_serving)
""")

most_sequences = Signal(
    "--max-num-batched-tokens",
    # vLLM refuses more sequences than tokens in a step; no release since 0.8 has a default below 2,048
    "$config_max_num_batched_tokens or 2048 + 0 * $config_max_num_seqs or 2048 + 0 * $running_highest by (instance)",
    "a step processes up to {value} tokens, at least one per request",
    "tokens",
)


def running_value(flag: str) -> Signal:
    name = f"--{flag.replace('_', '-')}"
    return Signal(name, setting_value(flag), f"{name} is {{value}}")


def unless_unset(setting: str) -> Signal:
    """Return the value of a KV cache setting, 0 if vLLM exports that it is not set."""
    unset = f'0 * max by (instance) (last_over_time(vllm:cache_config_info{{{setting}="None"}}[$window]))'
    return running_value(setting)._replace(promql=f"{setting_value(setting)} or {unset}")


kv_cache_is_fp8 = Signal(
    "KV cache is quantized",
    cache_config_has("cache_dtype", ".*(fp8|int8|int4|nvfp4|turboquant|octave|ultraquant).*"),
    "the KV cache is quantized already: {value}",
    "bool",
)
runs_on_cpu = Signal(
    "vLLM runs on the CPU",
    'max by (instance) (last_over_time(diag_vllm_info{device="cpu"}[$window]))',
    "vLLM runs on the CPU: {value}",
    "bool",
)
runs_on_rocm = Signal(
    "vLLM runs on ROCm",
    'max by (instance) (last_over_time(diag_vllm_info{device="rocm"}[$window])'
    ' or on (instance) last_over_time(diag_gpu_info{name=~"(AMD|Radeon) .+"}[$window]))',
    "vLLM runs on ROCm: {value}",
    "bool",
)
gpu_memory_total = Signal(
    "GPU memory (smallest GPU)",
    "min by (instance) (last_over_time(diag_gpu_memory_total_bytes[$window]))",
    "the smallest GPU has {value} of memory",
    "bytes",
    group=FULLEST_MEMBER,
)
gpu_memory_free_share = Signal(
    "GPU memory free", "$gpu_memory_free_share", "{value} of the fullest GPU's memory is free", "share"
)
utilization_that_uses_free_memory = Signal(
    "GPU memory share for vLLM with the free memory",
    f"$config_gpu_memory_utilization + $gpu_memory_free_share - {RESERVE}",
    f"vLLM would use {{value}} of the GPU's memory and leave a {100 * RESERVE:g} % reserve",
    "share",
)
kv_bytes_with_free_memory = Signal(
    "KV cache size that uses the free memory",
    f"$config_kv_cache_memory_bytes + ($gpu_memory_free_share - {RESERVE})"
    " * min by (instance) (last_over_time(diag_gpu_memory_total_bytes[$window]))",
    f"the KV cache would be {{value}}, with {100 * RESERVE:g} % of the GPU's memory left as a reserve",
    "bytes",
    group=FULLEST_MEMBER,
)
gpu_compute_capability_has_fp8 = Signal(
    "GPUs with FP8 (compute capability 8.9 or later, MI300 or later)",
    'count by (instance) (last_over_time(diag_gpu_info{compute_capability=~"8[.]9|9[.].*|1[0-9][.].*"}[$window])'
    ' or last_over_time(diag_gpu_info{name=~"AMD Instinct MI3.+"}[$window]))'
    ' or 0 * count by (instance) (last_over_time(diag_gpu_info{compute_capability!=""}[$window])'
    ' or last_over_time(diag_gpu_info{name=~"AMD Instinct MI[12].+|AMD Radeon .+"}[$window]))',
    "GPUs that support FP8: {value}",
    "GPUs",
)
chunked_prefill_is_off = Signal(
    "chunked prefill is off",
    f"(1 - $config_enable_chunked_prefill) or 0 * max by (instance) (last_over_time({RUNNING}[$window]))",
    "chunked prefill is off: {value}",
    "bool",
    group=ANY_MEMBER,
)
sequences_in_a_step = Signal(
    "--max-num-seqs",
    "clamp_min($config_max_num_seqs, 256)",
    "a step processes at least {value} tokens: one per request, and enough for a prompt to make progress",
    "tokens",
)
twice_the_token_budget = Signal(
    "2 x --max-num-batched-tokens",
    "2 * $config_max_num_batched_tokens",
    "twice the token budget is {value} tokens",
    "tokens",
)
longest_that_is_admitted = Signal(
    "tokens that the KV cache holds at most",
    # vLLM keeps one block empty, for blocks that sliding windows no longer need
    "$config_kv_cache_size_tokens - ($config_block_size or 0 * $config_kv_cache_size_tokens)",
    "an empty KV cache holds {value} tokens of one request",
    "tokens",
)
