"""Size of a model's weights, matrix by matrix, from its shape.

A matrix is divided among the GPUs of tensor parallelism as vLLM's layers divide it; norms and routers are copied.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, chain

from diag.vllm.memory.architectures import encoder_numbers, gives_vectors
from diag.vllm.memory.model import Model
from diag.vllm.memory.parts import MOST_WAYS, PartKind, WeightPart, linear
from diag.vllm.memory.quantization import HALF, Modules, Precision, tables

VOCABULARY_PADDING = 64
"""vLLM's vocab_parallel_embedding.py."""
EVERY_QUANTIZED = Modules()
"""The unquantized modules of most models: none."""


def layer(model: Model, at: int) -> list[WeightPart]:
    """Return the matrices of a layer; those that the files leave unquantized are plain."""
    parts = [*chain.from_iterable(mixer.parts for mixer in model.stack[at].mixers), *model.stack[at].parts]
    if not model.mixed and model.unquantized == EVERY_QUANTIZED:
        return parts
    by_bits = [(model.unquantized, HALF), *model.mixed]  # 0 for the bits of the model's quantization
    split = []
    for part in parts:
        modules = [f"model.layers.{at}.{module}" for module in part.modules]
        counts = Counter(next((bits for names, bits in by_bits if names.has(module)), 0.0) for module in modules)
        if not counts or set(counts) == {0}:
            split.append(part)
            continue
        for bits, count in counts.items():
            kind: PartKind = "plain" if bits == HALF else part.kind
            elements = part.elements * count // len(modules)
            split.append(replace(part, elements=elements, kind=kind, modules=(), bits=bits % HALF))
    return split


def absorbed(model: Model) -> WeightPart:
    """Return the copy of kv_b_proj that vLLM's MLA makes after loading, in the model's own type; empty without MLA."""
    latent = (mixer for mixer in model.mixers if mixer.kind == "latent")
    copied = (part for mixer in latent for part in mixer.parts if part.modules == ("self_attn.kv_b_proj",))
    return WeightPart(sum(part.elements for part in copied), MOST_WAYS)


def embedding(model: Model) -> WeightPart:
    """Return the matrix of the embedding, or of the head, which has the same shape."""
    rows = -(-model.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING
    return WeightPart(rows * model.hidden, MOST_WAYS, "vocabulary")


def has_head(model: Model) -> bool:
    """Return False for a model that gives vectors instead of tokens: MistralModel of E5."""
    return not (model.traits.encoder_only or gives_vectors(model.architecture))


def rotary(model: Model) -> WeightPart:
    """Return the sines and cosines of every position, which vLLM keeps beside the weights: 32 MiB for Llama 3.1."""
    share = model.config.fields.get("partial_rotary_factor")
    part = share if isinstance(share, int | float) and 0 < share <= 1 else 1
    width = model.config.count("qk_rope_head_dim") if model.latent else int(model.head_dim * part)
    return WeightPart(model.positions * width)


def beside(model: Model) -> list[WeightPart]:
    """Return the matrices of the language part that are in no layer: positions, embeddings by layer, shared blocks."""
    config, traits = model.config, model.traits
    parts = []
    if traits.positions is not None and config.get("position_embedding_type") in (None, "absolute"):
        parts.append(WeightPart((config.size("positions") + traits.positions) * model.hidden))
    if traits.per_layer and (size := config.count("hidden_size_per_layer_input")):
        rows = config.size("vocab_size_per_layer_input", model.vocabulary)
        parts.append(WeightPart(rows * model.layers * size, MOST_WAYS, "vocabulary"))
        parts.append(WeightPart(model.hidden * model.layers * size + size))
    if streams := config.count("altup_num_inputs"):
        parts.append(WeightPart(2 * (streams - 1) * model.hidden**2))
    if traits.encoder_only:
        norm = model.hidden * (2 if traits.norm_bias else 1)
        parts.append(WeightPart(config.count("type_vocab_size") * model.hidden + norm))
    if traits.head_bias:
        parts.append(WeightPart(model.vocabulary, MOST_WAYS))
    mixed = any({"state", "full"} <= {mixer.kind for mixer in layer.mixers} for layer in model.stack)
    if mixed and not traits.parallel:
        parts += shared_blocks(model)
    return parts


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
        linear(users * config.switch("use_shared_attention_adapter") * 3 * rank * (2 * hidden + inner), "linear_q"),
        WeightPart(blocks * 3 * hidden),
    ]


def encoders(model: Model) -> WeightPart:
    """Return the vision and audio encoders."""
    counts = (encoder_numbers(fields, model.config, model.hidden) for fields in model.encoders.values())
    return WeightPart(sum(counts), MOST_WAYS)


def unnamed_encoders(model: Model) -> list[str]:
    """Return the encoders whose fields name no layers, so that their weights are not counted."""
    return [name for name, fields in model.encoders.items() if not encoder_numbers(fields, model.config, model.hidden)]


def stages(model: Model, count: int) -> list[range]:
    """Return the layers of each pipeline stage; vLLM adds the remainder to the stages before the last one."""
    share, rest = divmod(model.layers, count)
    sizes = [share + (1 if count - 1 - rest <= at < count - 1 else 0) for at in range(count)]
    ends = accumulate(sizes)
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def of_stage(model: Model, layers: range) -> Counter[WeightPart]:
    """Return the parts of a stage and how many there are of each; a model on one stage has a tied head once."""
    if layers in model.counted:
        return model.counted[layers]
    parts = Counter(chain.from_iterable(layer(model, at) for at in layers))
    first, last = layers.start == 0, layers.stop == model.layers
    if first:
        parts.update([embedding(model), encoders(model), *beside(model)])
    if last:
        norm = model.hidden * model.traits.final_norm * (2 if model.traits.norm_bias else 1)
        quantized = (bits for names, bits in model.mixed if "lm_head" in names.names)
        head = replace(embedding(model), bits=next(quantized, 0) % HALF)
        parts.update([WeightPart(norm)] + [head] * (has_head(model) and not (model.tied and first)))
    model.counted[layers] = parts
    return parts


def feed_forward_width(model: Model) -> int:
    """Return the feed-forward width of a layer without experts; 0 if there is none."""
    return max((layer.dense for layer in model.stack), default=0)


def parameters(model: Model) -> int:
    """Return the count of numbers in the language part of a model."""
    counts = of_stage(model, range(model.layers)).items()
    return sum(part.elements * count for part, count in counts) - encoders(model).elements


def share(part: WeightPart, precision: Precision, tensor: int, experts: int) -> float:
    """Return the bytes of a part on one GPU: matrices divided `tensor` ways, experts `experts` ways."""
    return part.elements * precision.of(part) / 8 / min(part.ways, experts if part.kind == "expert" else tensor)


def weigh(parts: Iterable[WeightPart], precision: Precision, tensor: int, experts: int) -> int:
    """Return the bytes of parts on one GPU, which may be counted: most layers are alike."""
    return round(sum(share(part, precision, tensor, experts) * count for part, count in Counter(parts).items()))


_LARGE, _STEP, _KEPT = 10 * 2**20, 2 * 2**20, 2**20
"""torch gives a tensor from 10 MiB on whole steps of 2 MiB, and splits off what is left if that is more than 1 MiB."""


def unused(model: Model, span: range, precision: Precision, tensor: int, experts: int) -> int:
    """Return the bytes at the end of large tensors that torch's allocator counts: 54 MiB for Qwen3 4B."""
    is_head = span.stop == model.layers and has_head(model) and not model.tied
    ends = [embedding(model)] * ((span.start == 0) + is_head)
    fused, total = tables().modules.fused, 0
    for parts, count in [*Counter(tuple(layer(model, at)) for at in span).items(), (ends, 1)]:
        sizes: dict[str, float] = defaultdict(float)  # matrices that vLLM loads into one tensor are one
        for at, part in enumerate(parts):
            size = share(part, precision, tensor, experts)
            if part.kind == "expert":  # gate and up in one, down in the other
                sizes[f"{at} in"], sizes[f"{at} out"] = size * 2 / 3, size / 3
                continue
            for module in part.modules or (str(at),):
                before, _, last = module.rpartition(".")
                sizes[f"{before}.{fused.get(last, last)}"] += size / max(len(part.modules), 1)
        rests = [-round(size) % _STEP for size in sizes.values() if size >= _LARGE]
        total += count * sum(rest for rest in rests if rest <= _KEPT)
    return total
