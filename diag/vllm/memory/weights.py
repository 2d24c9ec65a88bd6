"""Size of a model's weights, matrix by matrix, from its shape.

A matrix is divided among the GPUs of tensor parallelism as vLLM's layers divide it; norms and routers are copied.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from diag.vllm.memory.encoders import encoder_numbers
from diag.vllm.memory.model import Model
from diag.vllm.memory.parts import MOST_WAYS, WeightPart, linear

VOCABULARY_PADDING = 64
"""vLLM's vocab_parallel_embedding.py."""
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


def layer(model: Model, at: int) -> list[WeightPart]:
    """Return the matrices of a layer; those that the files leave unquantized are plain."""
    found = []
    parts = [*(part for mixer in model.stack[at].mixers for part in mixer.parts), *model.stack[at].parts]
    for part in parts:
        every = len(part.modules)
        plain = sum(model.unquantized.has(f"model.layers.{at}.{module}") for module in part.modules)
        if not plain:
            found.append(part)
            continue
        if plain < every:
            found.append(replace(part, elements=part.elements * (every - plain) // every, modules=()))
        found.append(WeightPart(part.elements * plain // every, part.ways, "plain"))
    return found


def absorbed(model: Model) -> WeightPart:
    """Return the copy of kv_b_proj that vLLM's MLA makes after loading, in the model's own type; empty without MLA."""
    names = ("self_attn.kv_b_proj",)
    copied = (part for layer in model.stack for mixer in layer.mixers for part in mixer.parts if part.modules == names)
    return WeightPart(sum(part.elements for part in copied), MOST_WAYS)


def embedding(model: Model) -> WeightPart:
    """Return the matrix of the embedding, or of the head, which has the same shape."""
    rows = -(-model.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING
    return WeightPart(rows * model.hidden, MOST_WAYS, "vocabulary")


def rotary(model: Model) -> WeightPart:
    """Return the sines and cosines of every position, which vLLM keeps beside the weights: 32 MiB for Llama 3.1."""
    share = model.config.fields.get("partial_rotary_factor")
    part = share if isinstance(share, int | float) and 0 < share <= 1 else 1
    width = model.config.size("qk_rope_head_dim") if model.latent else int(model.head_dim * part)
    return WeightPart(model.positions * width)


def beside(model: Model) -> list[WeightPart]:
    """Return the matrices of the language part that are in no layer: positions, embeddings by layer, shared blocks."""
    config, traits = model.config, model.traits
    found = []
    if traits.positions is not None:
        found.append(WeightPart((config.size("positions") + traits.positions) * model.hidden))
    if traits.per_layer and (size := config.count("hidden_size_per_layer_input")):
        rows = config.size("vocab_size_per_layer_input", model.vocabulary)
        found.append(WeightPart(rows * model.layers * size, MOST_WAYS, "vocabulary"))
        found.append(WeightPart(model.hidden * model.layers * size + size))
    if traits.head_bias:
        found.append(WeightPart(model.vocabulary, MOST_WAYS))
    if any(len({mixer.kind for mixer in layer.mixers}) > 1 for layer in model.stack) and not traits.parallel:
        found += shared_blocks(model)
    return found


def shared_blocks(model: Model) -> list[WeightPart]:
    """Return Zamba 2's blocks of attention and feed-forward, which several layers share, with an adapter each."""
    config, hidden = model.config, model.hidden
    blocks, rank = config.size("num_mem_blocks", 1), config.count("adapter_rank", 128)
    width, inner = config.size("intermediate_size", 4 * hidden), model.heads * model.head_dim
    users = sum(len(layer.mixers) > 1 for layer in model.stack)
    return [
        linear(blocks * (3 * 2 * hidden * inner + inner * hidden), "shared_transformer.self_attn"),
        linear(blocks * 3 * hidden * width, "shared_transformer.feed_forward"),
        linear(users * (rank * (hidden + 2 * width) + hidden * hidden), "linear"),
        WeightPart(blocks * 3 * hidden),
    ]


def encoders(model: Model) -> WeightPart:
    """Return the vision and audio encoders."""
    counts = (encoder_numbers(fields, model.config, model.hidden) for fields in model.encoders.values())
    return WeightPart(sum(counts), MOST_WAYS)


def stages(model: Model, count: int) -> list[range]:
    """Return the layers of each pipeline stage; vLLM adds the remainder to the stages before the last one."""
    share, rest = divmod(model.layers, count)
    sizes = [share + (1 if count - 1 - rest <= at < count - 1 else 0) for at in range(count)]
    starts = [sum(sizes[:at]) for at in range(count)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def of_stage(model: Model, layers: range) -> list[WeightPart]:
    """Return the parts of a stage; if the head is the embedding, a model on one stage has it once."""
    parts = list(chain.from_iterable(layer(model, at) for at in layers))
    first, last = layers.start == 0, layers.stop == model.layers
    if first:
        parts += [embedding(model), encoders(model), *beside(model)]
    if last:
        norm = model.hidden * model.traits.final_norm * (2 if model.traits.norm_bias else 1)
        parts += [WeightPart(norm)] + [embedding(model)] * (not (model.tied and first))
    return parts


def feed_forward_width(model: Model) -> int:
    """Return the feed-forward width of a layer without experts; 0 if there is none."""
    return max((layer.dense for layer in model.stack), default=0)


def parameters(model: Model) -> int:
    """Return the count of numbers in the language part of a model."""
    return sum(part.elements for part in of_stage(model, range(model.layers))) - encoders(model).elements


def weigh(parts: list[WeightPart], precision: Precision, tensor: int, experts: int) -> int:
    """Return the bytes on one GPU: matrices divided `tensor` ways, experts `experts` ways."""
    return round(
        sum(
            part.elements * precision.of(part) / 8 / min(part.ways, experts if part.kind == "expert" else tensor)
            for part in parts
        )
    )


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

    # bits of a number with its share of the scales and zero points
    if "nvfp4" in algorithm or method == "modelopt_fp4":
        bits = 4 + 8 / 16
    elif method in ("fp8", "fbgemm_fp8", "ptpc_fp8", "experts_int8") or "fp8" in algorithm:
        bits = 8.0
    elif method == "bitsandbytes":
        bits = 8.0 if settings.get("load_in_8bit") else 4 + 32 / 64
    elif method in ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors"):
        settings = compressed_weights(settings) if method == "compressed-tensors" else settings
        width = settings.get("bits", settings.get("w_bit", settings.get("num_bits")))
        if width not in (2, 3, 4, 8):
            return None
        group = _group(settings)
        scale = 8 if settings.get("type") == "float" else _HALF + width  # NVFP4; the others have a zero point
        bits = width + (scale / group if width < 8 and isinstance(group, int) and group > 0 else 0.0)
    else:
        return None
    return Precision(bits, bits, plain, False, f"{method}, {bits:.3g} bits with its scales")


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
