"""Bits of a number in a model's matrices, by the quantization that its files or the launch name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from diag.vllm.memory.model import Model
from diag.vllm.memory.parts import WeightPart

_HALF = 16.0


@dataclass(frozen=True)
class Precision:
    """Bits of a number in matrices of each kind; `exact` is False if scales are estimated.

    `padded` is True if vLLM may enlarge the experts for its kernels.
    """

    linear: float = _HALF
    expert: float = _HALF
    plain: float = _HALF
    exact: bool = True
    named: str = ""
    padded: bool = False

    def of(self, part: WeightPart) -> float:
        """Return the bits of one number of a part."""
        return {"linear": self.linear, "expert": self.expert}.get(part.kind, self.plain)


def precision(model: Model, wanted: str = "", float32: bool = False) -> Precision | None:
    """Return the bits by kind of matrix; None for an unknown method.

    `wanted` is --quantization, with which vLLM quantizes files that are not quantized as it loads them.
    """
    plain = 2 * _HALF if float32 else _HALF
    settings = model.quantization or {}
    method = str(settings.get("quant_method", settings.get("quant_algo", wanted))).lower()
    algorithm = str(settings.get("quant_algo", "")).lower()
    if not method:
        return Precision(plain, plain, plain)
    if method == "mxfp4":
        return Precision(plain, 4 + 8 / 32, plain, False, "mxfp4 experts, 8-bit scales of 32", True)

    bits = _bits(method, algorithm, settings)
    if bits is None:
        return None
    linear = plain if method in _EXPERTS_ONLY else bits
    expert = _expert_bits(settings) or bits if method == "compressed-tensors" else bits
    return Precision(linear, expert, plain, False, f"{method}, {bits:.3g} bits with its scales")


_EXPERTS_ONLY = ("experts_int8", "moe_wna16")
_GROUPED = ("awq", "awq_marlin", "gptq", "gptq_marlin", "auto-round", "auto_round", "inc", "moe_wna16")


def _bits(method: str, algorithm: str, settings: Mapping[str, Any]) -> float | None:
    """Return the bits of a number with its share of scales and zero points; None if they are unknown."""
    if "nvfp4" in algorithm or method in ("modelopt_fp4", "petit_nvfp4"):
        return 4 + 8 / 16
    if "mxfp8" in algorithm or method in ("mxfp8", "modelopt_mxfp8"):
        return 8 + 8 / 32
    if method.startswith("fp8") or method in ("fbgemm_fp8", "ptpc_fp8", "experts_int8") or "fp8" in algorithm:
        return 8.0
    if method == "bitsandbytes":
        return 8.0 if settings.get("load_in_8bit") else 4 + 32 / 64
    if method == "compressed-tensors":
        return _packed_bits(compressed_weights(settings), symmetric="symmetric")
    return _packed_bits(settings, symmetric="sym") if method in _GROUPED else None


def _packed_bits(settings: Mapping[str, Any], symmetric: str) -> float | None:
    width = settings.get("bits", settings.get("w_bit", settings.get("num_bits")))
    if width not in (2, 3, 4, 8):
        return None
    group = _group(settings)
    if width == 8 or not isinstance(group, int) or group <= 0:
        return float(width)
    if settings.get("type") == "float":  # NVFP4
        return width + 8 / group
    zero_point = 0 if settings.get(symmetric) is True else width
    return width + (_HALF + zero_point) / group


def _expert_bits(settings: Mapping[str, Any]) -> float | None:
    """Return the bits of experts that a group of layers of their own names; None without one."""
    for group in _groups(settings):
        targets, weights = group.get("targets"), group.get("weights")
        named = [str(target) for target in targets] if isinstance(targets, list) else []
        if isinstance(weights, dict) and any("expert" in target for target in named):
            return _packed_bits(weights, symmetric="symmetric")
    return None


def _groups(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    yield from (group for group in groups.values() if isinstance(group, dict)) if isinstance(groups, dict) else ()


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
    weights = next(_groups(settings), {}).get("weights")
    return weights if isinstance(weights, dict) else {}
