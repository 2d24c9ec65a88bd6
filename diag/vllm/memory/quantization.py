"""Bits of a weight by the quantization that a model's files or the command ask for.

Bits are with a number's share of the scales and zero points.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from diag.vllm.memory.config import Modules, modules
from diag.vllm.memory.parts import WeightPart

HALF = 16.0
_BITS: Mapping[str, float] = {
    **dict.fromkeys(("mxfp4", "w4a8_mxfp4_fp8", "fp4_mx"), 4 + 8 / 32),
    **dict.fromkeys(("nvfp4", "w4a16_nvfp4", "nvfp4_awq", "modelopt_fp4", "petit_nvfp4"), 4 + 8 / 16),
    **dict.fromkeys(("w4a8_awq", "int4_awq"), 4 + 16 / 128),
    **dict.fromkeys(("mxfp8", "fp8_mx"), 8 + 8 / 32),
    **dict.fromkeys(
        (
            "fp8",
            "fp8_per_channel_per_token",
            "fp8_pb_wo",
            "fbgemm_fp8",
            "ptpc_fp8",
            "experts_int8",
            "fp8_per_tensor",
            "fp8_per_block",
        ),
        8.0,
    ),
    **dict.fromkeys(("int8", "int8_sq", "w8a8", "fp8_e4m3", "fp8_e5m2"), 8.0),
    **dict.fromkeys(("fp4", "fp4_e2m1"), 4 + 8 / 32),
}
"""Bits by the names of algorithms in files of ModelOpt and Quark, and of --quantization."""
_GROUPED = ("awq", "awq_marlin", "gptq", "gptq_marlin", "auto-round", "auto_round", "autoround", "inc", "moe_wna16")
"""Methods whose files state bits and a group of inputs that share a scale."""


@dataclass(frozen=True)
class Precision:
    """Bits of a number in matrices of each kind; `exact` is False if scales are estimated.

    `padded` is True if vLLM may enlarge the experts for its kernels.
    """

    linear: float = HALF
    expert: float = HALF
    plain: float = HALF
    exact: bool = True
    named: str = ""
    padded: bool = False

    def of(self, part: WeightPart) -> float:
        """Return the bits of one number of a part."""
        if part.bits:
            return part.bits
        if part.kind == "linear":
            return self.linear
        return self.expert if part.kind == "expert" else self.plain


def with_experts(settings: Mapping[str, Any] | None, expert_dtype: object) -> Mapping[str, Any] | None:
    """Return a quantization_config with the type of the routed experts, which DeepSeek V4 names beside it.

    With `moe_quant_algo` the lists of modules are those of the experts alone: all others follow the method.
    """
    if not settings or not isinstance(expert_dtype, str):
        return settings
    kept = settings
    if settings.get("moe_quant_algo"):
        kept = {name: value for name, value in settings.items() if name not in _OF_EXPERTS}
    return {**kept, "expert_dtype": expert_dtype}


_OF_EXPERTS = ("ignore", "quantized_layers", "config_groups", "quant_algo", "group_size")


def precision(settings: Mapping[str, Any], wanted: str = "", float32: bool = False) -> Precision | None:
    """Return the bits by kind of matrix of a quantization_config; None for an unknown method.

    `wanted` is --quantization, with which vLLM quantizes files that are not quantized as it loads them.
    """
    plain = 2 * HALF if float32 else HALF
    method = str(settings.get("quant_method", settings.get("quant_algo", wanted))).lower()
    if not method:
        return Precision(plain, plain, plain)
    if method == "mxfp4":
        return Precision(plain, 4 + 8 / 32, plain, False, "mxfp4 experts, 8-bit scales of 32", True)
    if mixed_precision(settings):
        return Precision(plain, plain, plain, False, f"{method}, matrix by matrix")
    bits = _bits(settings, method)
    of_experts = str(settings.get("moe_quant_algo") or settings.get("expert_dtype") or "").lower()
    if bits and of_experts in _BITS:
        return Precision(bits, _BITS[of_experts], plain, False, f"{method}, experts in {of_experts}", True)
    linear = plain if method == "experts_int8" else bits
    return (
        Precision(linear, bits, plain, False, f"{method}, {bits:.3g} bits with its scales") if bits and linear else None
    )


def _bits(settings: Mapping[str, Any], method: str) -> float | None:
    """Return the bits of a method with its settings; None if they are unknown."""
    algorithm = str(settings.get("quant_algo", "")).lower()
    if algorithm in _BITS or method in _BITS:
        return _BITS.get(algorithm) or _BITS[method]
    if "fp4" in algorithm or "fp8" in algorithm:
        return _BITS["nvfp4" if "fp4" in algorithm else "fp8"]
    if method == "bitsandbytes":
        return 8.0 if settings.get("load_in_8bit") else 4 + 32 / 64
    if method == "quark":
        weight = settings.get("global_quant_config")
        weight = weight.get("weight") if isinstance(weight, dict) else None
        kind = str(weight.get("dtype", "")).lower() if isinstance(weight, dict) else ""
        return _BITS.get(kind)
    if method == "compressed-tensors":
        return _packed(compressed_weights(settings))
    return _packed(settings) if method in _GROUPED else None


def _packed(settings: Mapping[str, Any]) -> float | None:
    """Return the bits of packed integers, or of floats of 4 or 8 bits; None if the settings name no such width."""
    width = settings.get("bits", settings.get("w_bit", settings.get("num_bits")))
    if width not in (2, 3, 4, 5, 6, 8):
        return None
    group = _group(settings)
    # NVFP4 and MXFP4 have scales of 8 bits; integers have one of 16 bits, and a zero point unless they are symmetric
    zero_point = 0 if True in (settings.get("symmetric"), settings.get("sym")) else width
    scale = 8 if settings.get("type") == "float" else HALF + zero_point
    return float(width + (scale / group if width < 8 and isinstance(group, int) and group > 0 else 0.0))


def mixed_precision(settings: Mapping[str, Any]) -> tuple[tuple[Modules, float], ...]:
    """Return the modules with bits of their own, of files that are quantized matrix by matrix; () of others."""
    named = defaultdict[float, list[str]](list)
    for bits, names in _named_bits(settings):
        named[bits] += names
    return tuple((modules(names), bits) for bits, names in named.items())


def _named_bits(settings: Mapping[str, Any]) -> Iterator[tuple[float, list[str]]]:
    layers, groups = settings.get("quantized_layers"), settings.get("config_groups")
    if isinstance(layers, dict):
        for name, own in layers.items():
            algorithm = str(own.get("quant_algo", "")).lower() if isinstance(own, dict) else ""
            yield _BITS.get(algorithm, HALF), [str(name)]
    elif isinstance(groups, dict) and len(groups) > 1:
        for own in groups.values():
            weights = own.get("weights") if isinstance(own, dict) else None
            targets = own.get("targets") if isinstance(own, dict) else None
            if isinstance(targets, list) and isinstance(weights, dict):
                yield _packed(weights) or HALF, ["*" if name == "Linear" else str(name) for name in targets]


def _group(settings: Mapping[str, Any]) -> Any:
    return settings.get("group_size", settings.get("q_group_size", 128))


def group_size(settings: Mapping[str, Any]) -> int:
    """Return the inputs of a matrix that share a scale; 0 if a quantization_config has no groups."""
    method = str(settings.get("quant_method", "")).lower()
    if method == "compressed-tensors":
        packed = compressed_weights(settings)
        group = 0 if packed.get("type") == "float" else packed.get("group_size")
    else:
        group = _group(settings) if method in ("awq", "awq_marlin", "gptq", "gptq_marlin") else 0
    return group if isinstance(group, int) and group > 0 else 0


def block_size(settings: Mapping[str, Any]) -> int:
    """Return the columns of an fp8 matrix that share a scale; 0 if there are no blocks."""
    blocks = settings.get("weight_block_size")
    size = blocks[0] if isinstance(blocks, list) and blocks else 0
    return size if isinstance(size, int) and size > 0 else 0


def compressed_weights(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings for the weights of the first group of layers."""
    groups = settings.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    return weights if isinstance(weights, dict) else {}
