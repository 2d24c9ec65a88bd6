"""Run by vLLM's own Python: what vLLM's KV cache planner makes of a model's layers, as JSON cases on standard input.

A case has the caches of all layers, length, in_flight, memory, hybrid, mode, and max_num_seqs; the answer has the
blocks that a request takes, those in the pool, the pool's tokens and its concurrency, and True if vLLM refuses so many
requests.
"""

import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from vllm.config.compilation import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport, KVCacheLayout
from vllm.v1.core import kv_cache_utils as planner
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

TYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}


def spec(cache: dict) -> KVCacheSpec:
    """The planner's description of a cache."""
    kind = cache["kind"]
    if kind == "state":
        return MambaSpec(
            block_size=cache["block"],
            shapes=((cache["bytes"],),),
            dtypes=(torch.uint8,),
            page_size_padded=cache["padded"] or None,
            mamba_cache_mode=cache["mode"],
            num_prefill_checkpoint_blocks=cache["checkpoints"],
        )
    shape = {"block_size": cache["block"], "dtype": TYPES[cache["bytes"]], "head_size": cache["size"]}
    if kind in ("latent", "index"):
        role = SparseCacheRole.INDEXER if kind == "index" else SparseCacheRole.SPARSE
        packed = cache["packed"] or None
        return MLAAttentionSpec(num_kv_heads=1, cache_role=role, state_content_bytes=packed, **shape)
    shape |= {"num_kv_heads": cache["heads"], "head_size_v": cache["value"]}
    if kind == "window":
        return SlidingWindowSpec(sliding_window=cache["window"], **shape)
    if kind == "chunk":
        return ChunkedLocalAttentionSpec(attention_chunk_size=cache["window"], **shape)
    return CrossAttentionSpec(**shape) if kind == "cross" else FullAttentionSpec(**shape)


def compressed(cache: dict) -> Iterator[KVCacheSpec]:
    """Yield the specs that the layers of DeepSeek V4 give for the type fp8_ds_mla."""
    ratio, size, index = cache["ratio"], cache["size"], cache["index"]
    common = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": 576}
    packed = common | {"head_size": size, "dtype": torch.uint8, "state_content_bytes": 584}
    yield SlidingWindowMLASpec(block_size=64, sliding_window=cache["window"], model_version="deepseek_v4", **packed)
    if ratio:
        yield MLAAttentionSpec(block_size=256, tokens_per_state=ratio, model_version="deepseek_v4", **packed)
        overlap = 2 if ratio == 4 else 1
        states = common | {"block_size": 4 if ratio == 4 else 8, "dtype": torch.float32}
        yield SlidingWindowMLASpec(head_size=2 * overlap * size, sliding_window=overlap * ratio, **states)
    if index:
        shape = common | {"block_size": 256, "head_size": index + 4, "dtype": torch.uint8}
        yield MLAAttentionSpec(tokens_per_state=ratio, **shape)
        yield SlidingWindowMLASpec(head_size=2 * overlap * index, sliding_window=overlap * ratio, **states)


def specs(caches: list[dict]) -> Iterator[KVCacheSpec]:
    """Yield the planner's descriptions of all caches."""
    for cache in caches:
        yield from compressed(cache) if cache["kind"] == "compressed" else [spec(cache)]


def settings(case: dict) -> SimpleNamespace:
    """Return the fields of a VllmConfig that the planner reads."""
    is_packed = any(cache["kind"] == "compressed" for cache in case["caches"])
    layout = next(each for each in KVCacheLayout if each.is_block_outermost == is_packed)
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=case["length"], original_max_model_len=case["length"]),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            mamba_cache_mode=case["mode"],
            get_resolved_kv_cache_layout=lambda: layout,
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=not case["hybrid"], max_num_encoder_input_tokens=1500
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        max_in_flight_tokens=case["in_flight"],
        num_prefill_lookahead_tokens=0,
    )


def refused(plan: KVCacheConfig, requests: int) -> bool:
    """Return True if vLLM refuses to capture whole decoding steps of so many requests."""
    graphs = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    try:
        graphs.resolve_cudagraph_mode_and_sizes(
            AttentionCGSupport.UNIFORM_BATCH, "", kv_cache_config=plan, max_num_reqs=requests
        )
    except ValueError as error:
        return "exceeds available Mamba cache blocks" in str(error)
    return False


def planned(case: dict) -> dict:
    """Return vLLM's own plan."""
    config = settings(case)
    groups = planner.get_kv_cache_groups(config, {f"{at}": each for at, each in enumerate(specs(case["caches"]))})
    plan = planner.get_kv_cache_config_from_groups(config, groups, case["memory"])
    tokens, concurrency = planner.get_kv_cache_capacity(config, plan)
    needed = planner._max_memory_usage_bytes_from_groups(config, groups)
    each = planner._pool_bytes_per_block(config, groups)
    usable = case["memory"] - each
    longest = planner._estimate_max_model_len_from_groups(config, groups, usable)
    return {
        "needed": needed,
        "block_bytes": each,
        "blocks": plan.num_blocks,
        "tokens": tokens,
        "concurrency": concurrency,
        "longest": longest,
        "refused": refused(plan, case["max_num_seqs"]),
    }


if __name__ == "__main__":
    print(json.dumps([planned(case) for case in json.load(sys.stdin)]))
