"""What vLLM refuses at its start for a model and a setup, in the words of a user."""

from math import gcd

from diag.core.errors import BadUsage
from diag.vllm.flags.registry import release
from diag.vllm.memory.model import Model
from diag.vllm.memory.setup import Setup
from diag.vllm.memory.weights import block_size, feed_forward_width, group_size

_FINER_BLOCKS, _LEAST_BLOCK = (0, 29, 0), 32
"""Since when blocks of fp8 experts may be cut, and the smallest block then."""


def check(model: Model, setup: Setup) -> None:
    """Refuse what vLLM refuses: BadUsage, with a value that works."""
    _check_division(model, setup)
    _check_scales(model, setup)
    if setup.pipeline > model.layers > 0:
        raise BadUsage(f"--pipeline-parallel-size {setup.pipeline} is more than the model's {model.layers} layers")
    if setup.length > model.longest and not setup.allows_overlong:
        raise BadUsage(
            f"vLLM refuses --max-model-len {setup.length}: the model supports at most {model.longest} tokens"
        )


def _check_division(model: Model, setup: Setup) -> None:
    """Refuse a tensor parallelism that does not divide the model's heads and feed-forward layers."""
    refused = f"vLLM refuses --tensor-parallel-size {setup.tensor}: it does not divide the model's"
    if model.heads % setup.tensor:
        sizes = [size for size in range(1, 65) if not model.heads % size and _divides_kv_heads(model, size)]
        raise BadUsage(f"{refused} {model.heads} attention heads; possible sizes: {', '.join(map(str, sizes))}")
    dense = 0 if model.family and model.family.experts else feed_forward_width(model)
    if not _divides_kv_heads(model, setup.tensor):
        raise BadUsage(f"{refused} {model.kv_heads} key-value heads")
    if dense % setup.tensor:
        raise BadUsage(f"{refused} {dense:,} feed-forward columns")


def _divides_kv_heads(model: Model, tensor: int) -> bool:
    """Whether key-value heads are divided, or each copied to as many GPUs as every other."""
    return bool(model.latent) or not (model.kv_heads % tensor and tensor % model.kv_heads)


def _check_scales(model: Model, setup: Setup) -> None:
    """Refuse a share of a quantized matrix that ends within the numbers of one scale."""
    if model.family and setup.tensor * setup.data > 1:
        _check_groups(model, setup)
        _check_blocks(model, setup)


def _check_groups(model: Model, setup: Setup) -> None:
    """Groups of inputs: awq, gptq and compressed-tensors."""
    group = group_size(model.quantization or {})
    attention = model.heads * (model.config.size("v_head_dim") if model.latent else model.head_dim)
    has_experts = bool(model.family and model.family.experts)
    for inputs in (attention,) if has_experts else (attention, feed_forward_width(model)):
        share = inputs // setup.tensor
        if group and group < inputs and share % group:
            raise BadUsage(_splits_scale(setup, f"{share:,} inputs of a matrix", f"groups of {group}"))


def _check_blocks(model: Model, setup: Setup) -> None:
    """Blocks of fp8 experts, up to 0.28; newer releases cut the blocks down to 32 (fused_moe/oracle/fp8.py)."""
    family, block = model.family, block_size(model.quantization or {})
    if not (family and family.experts and block) or setup.expert_parallel:
        return
    share = model.config.size(family.width) // (setup.tensor * setup.data)
    is_cut = release(setup.version) >= _FINER_BLOCKS and gcd(block, share, model.hidden) >= _LEAST_BLOCK
    if share % block and not is_cut:
        raise BadUsage(_splits_scale(setup, f"{share:,} columns of an expert", f"blocks of {block}"))


def _splits_scale(setup: Setup, share: str, unit: str) -> str:
    flags = f"--tensor-parallel-size {setup.tensor}"
    flags += f" and --data-parallel-size {setup.data}" if setup.data > 1 else ""
    return f"{flags} cannot work with vLLM {setup.version}: {share} per GPU are no whole {unit}, which share a scale"
