"""Size of a model's weights, matrix by matrix, from its shape.

A matrix is divided among the GPUs of tensor parallelism as vLLM's layers divide it; norms and routers are copied.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from diag.vllm.memory.model import Architecture, Config, Model

VOCABULARY_PADDING = 64
"""vLLM's vocab_parallel_embedding.py."""
MOST_WAYS = 2**16
"""More ways than a server has GPUs: the matrix is always divided."""
_HALF = 16.0

Kind = Literal["plain", "linear", "expert", "vocabulary"]


@dataclass(frozen=True)
class WeightPart:
    """Some matrices: the count of their numbers, and the most GPUs among which they can be divided.

    `modules` are their names in the layer; they all have one size.
    """

    elements: int
    ways: int = 1
    kind: Kind = "plain"
    modules: tuple[str, ...] = ()


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
    """Return the matrices of a layer of a model whose family is known."""
    family = model.family
    assert family is not None
    config = model.config
    if not family.experts:
        has_experts = False
    elif model.architecture.startswith("Deepseek"):
        step = config.size("moe_layer_freq", 1)
        has_experts = at >= config.size("first_k_dense_replace", 0, least=0) and at % step == 0
    else:
        step = config.size("decoder_sparse_step", config.size("interleave_moe_layer_step", 1))
        has_experts = at not in config.list("mlp_only_layers") and (at + 1) % step == 0

    parts = [*(_latent(model) if model.latent else _attention(model, family))]
    if has_experts:
        parts += _experts(model, family)
    else:
        width = config.size(family.dense)
        parts.append(WeightPart(3 * model.hidden * width, MOST_WAYS, "linear", _gate_up_down("mlp")))
        if config.switch("mlp_bias"):
            parts += [WeightPart(2 * width, MOST_WAYS), WeightPart(model.hidden)]
    parts.append(WeightPart(family.norms * model.hidden))

    found = []
    for part in parts:
        every = len(part.modules)
        plain = sum(model.unquantized.has(f"model.layers.{at}.{module}") for module in part.modules)
        if not plain:
            found.append(part)
            continue
        if plain < every:
            found.append(replace(part, elements=part.elements * (every - plain) // every, modules=()))
        found.append(WeightPart(part.elements * plain // every, part.ways, "plain"))  # not quantized by the files
    return found


def _attention(model: Model, family: Architecture) -> Iterator[WeightPart]:
    config, size = model.config, model.head_dim
    queries, keys = model.heads * size, model.kv_heads * size
    has_bias = config.switch("attention_bias")
    yield WeightPart(2 * model.hidden * queries, MOST_WAYS, "linear", ("self_attn.q_proj", "self_attn.o_proj"))
    yield WeightPart(2 * model.hidden * keys, model.kv_heads, "linear", ("self_attn.k_proj", "self_attn.v_proj"))
    if family.qkv_bias or has_bias:
        yield WeightPart(queries, MOST_WAYS)
        yield WeightPart(2 * keys, model.kv_heads)
    if has_bias:
        yield WeightPart(model.hidden)
    if family.qk_norm:
        yield WeightPart(2 * size)
    if model.architecture == "GptOssForCausalLM":
        yield WeightPart(model.heads, MOST_WAYS)  # attention sinks


def _latent(model: Model) -> Iterator[WeightPart]:
    """Yield DeepSeek's multi-head latent attention; down copied to every GPU, up divided by heads."""
    config, hidden, heads = model.config, model.hidden, model.heads
    rank, rope = config.size("kv_lora_rank"), config.size("qk_rope_head_dim")
    nope, value = config.size("qk_nope_head_dim"), config.size("v_head_dim")
    down = config.size("q_lora_rank", 0, least=0)
    first = "self_attn.q_a_proj" if down else "self_attn.q_proj"
    yield WeightPart((down or heads * (nope + rope)) * hidden, 1 if down else MOST_WAYS, "linear", (first,))
    if down:
        yield WeightPart(down * heads * (nope + rope), MOST_WAYS, "linear", ("self_attn.q_b_proj",))
    yield WeightPart(hidden * (rank + rope), 1, "linear", ("self_attn.kv_a_proj_with_mqa",))
    yield WeightPart(rank * heads * (nope + value), MOST_WAYS, "linear", ("self_attn.kv_b_proj",))
    yield WeightPart(heads * value * hidden, MOST_WAYS, "linear", ("self_attn.o_proj",))
    yield WeightPart(down + rank)


def absorbed(model: Model) -> WeightPart:
    """Return the copy of kv_b_proj that vLLM's MLA makes after loading, in the model's own type; empty without MLA."""
    if not model.latent:
        return WeightPart(0)
    config = model.config
    width = config.size("qk_nope_head_dim") + config.size("v_head_dim")
    return WeightPart(model.layers * config.size("kv_lora_rank") * model.heads * width, MOST_WAYS)


def _gate_up_down(block: str) -> tuple[str, ...]:
    return tuple(f"{block}.{matrix}_proj" for matrix in ("gate", "up", "down"))


def _experts(model: Model, family: Architecture) -> Iterator[WeightPart]:
    config, hidden = model.config, model.hidden
    count, width = config.size(family.experts, most=2**16), config.size(family.width)
    yield WeightPart(count * 3 * hidden * width, MOST_WAYS, "expert", ("mlp.experts",))
    yield WeightPart(count * hidden)  # the router
    if model.architecture == "GptOssForCausalLM":
        yield WeightPart(count * (2 * width + hidden + 1))  # biases
    shared = width  # the width of the experts that process every token
    if model.architecture != "Llama4ForConditionalGeneration":
        alone = config.size("shared_expert_intermediate_size", 0, least=0)
        shared = alone or width * config.size("n_shared_experts", 0, least=0)
    if shared:
        yield WeightPart(3 * hidden * shared, MOST_WAYS, "linear", _gate_up_down("mlp.shared_experts"))
    if model.architecture == "Qwen2MoeForCausalLM":
        yield WeightPart(hidden)


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


def vision(model: Model) -> WeightPart:
    """Estimate the vision encoder: four square matrices and two wide ones a layer."""
    if not model.vision:
        return WeightPart(0)
    config = Config(model.vision, str(model.folder / "config.json"))
    hidden = config.size("hidden_size", 1024)
    count = config.size("num_hidden_layers", 24, most=2048)
    return WeightPart(count * (4 * hidden**2 + 2 * hidden * config.size("intermediate_size", 4 * hidden)), MOST_WAYS)


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
        parts += [embedding(model), vision(model)]
    if last:
        parts += [WeightPart(model.hidden)] + [embedding(model)] * (not (model.tied and first))
    return parts


def feed_forward_width(model: Model) -> int:
    """Return the feed-forward width of a layer without experts."""
    return model.config.size(model.family.dense, 0, least=0) if model.family else 0


def parameters(model: Model) -> int:
    """Return the count of numbers in the language part of a model."""
    return sum(part.elements for part in of_stage(model, range(model.layers))) - vision(model).elements


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
