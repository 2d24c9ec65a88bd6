"""The layers of a model by kind, read from the fields by which config.json names them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from diag.core.declarations import PACKAGE, read
from diag.vllm.memory.architectures import Architecture
from diag.vllm.memory.config import Config, quote
from diag.vllm.memory.mixers import (
    STATES,
    LayerKind,
    attention,
    compressed_attention,
    indexed,
    latent_attention,
    linear_kind,
    window,
)
from diag.vllm.memory.parts import MOST_WAYS, Experts, Layer, Mixer, UnknownLayers, WeightPart, linear

_TABLE = read(PACKAGE / "vllm" / "memory" / "layers.toml", dict[LayerKind, tuple[str, ...]])
_NAMES: Mapping[str, LayerKind] = {name: kind for kind, names in _TABLE.items() for name in names}
_LETTERS: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of hybrid_override_pattern (Nemotron-H)."""
_BY_NUMBER = ("attn_layer_indices", "hybrid_layer_ids", "attn_layer_period", "full_attn_idxs")
_ROPE_EVERY = 4
"""One of four layers of Llama 4 attends to everything, unless no_rope_layers says otherwise."""


def kind_names(config: Config) -> list[str]:
    """Return the names that a file gives its layers, one each; [] if it gives none."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [_LETTERS.get(letter, letter) for letter in pattern]
    for field in ("layers_block_type", "layer_types", "block_types", "layer_type_list"):
        if names := config.list(field):
            return [str(name) for name in names]
    return []


def kinds(config: Config, family: Architecture, count: int) -> list[LayerKind]:
    """Return the kind of each of `count` layers; UnknownLayers if a name is new."""
    if config.has("compress_ratios", "compress_rates"):
        return ["compressed"] * count
    if names := kind_names(config):
        other = sorted(set(names) - _NAMES.keys())
        if other or len(names) < count:
            why = f"layers of the kind {quote(other[0])}" if other else f"{len(names)} layer_types for {count} layers"
            raise UnknownLayers(f"{why} are not covered")
        by_layer = [_NAMES[name] for name in names[:count]]
    elif chosen := _chosen(config, family, count):
        by_layer = [chosen(at) for at in range(count)]
    else:
        every = config.count("sliding_window_pattern", family.every) if window(config, "window") else 0
        by_layer = ["full" if every and (at + 1) % every == 0 else "window" for at in range(count)]
    if family.parallel:
        return ["parallel"] * count
    return by_layer if window(config, "window") else ["full" if kind == "window" else kind for kind in by_layer]


def _chosen(config: Config, family: Architecture, count: int) -> Callable[[int], LayerKind] | None:
    """Return the kind by layer from the fields that name some layers by number; None without such fields."""
    other: LayerKind = "linear"
    if config.has("layer_group_size"):  # Ling; layers beyond the last whole group attend to everything
        group = config.size("layer_group_size", 1)
        return lambda at: "full" if (at + 1) % group == 0 or at >= count // group * group else "linear"
    if family.linear and not config.has(*_BY_NUMBER, "attn_type_list"):
        return lambda at: "linear"
    for field, full in (("attn_type_list", 1), ("hybrid_layer_pattern", 0)):
        if flags := config.list(field):
            other = "linear" if field == "attn_type_list" else "window"
            return lambda at: "full" if at < len(flags) and flags[at] == full else other
    if config.has("attention_chunk_size"):
        rope = config.list("no_rope_layers")
        return lambda at: "chunk" if (rope[at] if at < len(rope) else (at + 1) % _ROPE_EVERY) else "full"
    for field in ("attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids"):
        if config.has(field):
            chosen, other = set(config.list(field)), "conv" if field == "full_attn_idxs" else "linear"
            return lambda at: ("both" if field == "hybrid_layer_ids" else "full") if at in chosen else other
    if nested := config.part("linear_attn_config"):
        full_layers = nested.get("full_attn_layers")
        numbers = set(full_layers) if isinstance(full_layers, list) else set()
        return lambda at: "full" if at + 1 in numbers else "linear"  # counted from 1
    if config.has("attn_layer_period"):
        period, offset = config.size("attn_layer_period"), config.count("attn_layer_offset")
        return lambda at: "full" if at % period == offset else "linear"
    if config.has("full_attention_interval", "linear_num_value_heads"):
        interval = config.size("full_attention_interval", 4)
        return lambda at: "linear" if (at + 1) % interval else "full"
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:
        return lambda at: "full" if pattern[at % len(pattern)] == "G" or at == count - 1 else "window"
    if config.has("max_window_layers") and config.fields.get("use_sliding_window"):
        first = config.count("max_window_layers")
        return lambda at: "full" if at < first else "window"
    return None


def of_layer(config: Config, kind: LayerKind, at: int) -> Config:
    """Return the fields of one layer: those of the model with what the file changes for the layer or for its kind."""
    changed: dict[str, Any] = {}
    if kind == "window":
        config.asked.update(name for name in config.fields if name.startswith("swa_"))
        changed = {name[4:]: value for name, value in config.fields.items() if name.startswith("swa_")}
        nested = config.part("attention_other_setting")  # Step 3.5
        changed |= {name: value for name, value in nested.items() if name.startswith("num_") or name == "head_dim"}
        if config.has("num_sliding_attention_heads"):
            changed["num_attention_heads"] = config.get("num_sliding_attention_heads")
    elif config.has("global_head_dim"):  # Gemma 4
        changed = {"head_dim": config.get("global_head_dim")}
        if config.fields.get("attention_k_eq_v") and config.has("num_global_key_value_heads"):
            changed["num_key_value_heads"] = config.get("num_global_key_value_heads")
    heads = config.list("num_attention_heads_per_layer")
    if at < len(heads):
        changed["num_attention_heads"] = heads[at]
    by_layer = config.part("per_layer_config")
    changed |= next((by_layer[name] for name in (str(at), f"{at:02d}", f"{at:03d}") if name in by_layer), {})
    return config.changed(changed) if changed else config


def of_block(config: Config, block: Mapping[str, Any]) -> tuple[Config, bool, int]:
    """Return the fields of a layer of `block_configs`, if it has attention, and its feed-forward width, 0 for none."""
    mixer, forward = (Config(part, config.place) for part in (block.get("attention") or {}, block.get("ffn") or {}))
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    own = config.changed({"num_key_value_heads": heads // mixer.size("n_heads_in_group", 1)})
    factor = forward.get("ffn_mult")
    width = -(-int(2 * factor * hidden / 3) // _BLOCK_WIDTH) * _BLOCK_WIDTH if isinstance(factor, int | float) else 0
    is_off = mixer.switch("no_op") or mixer.switch("replace_with_linear")
    return own, not is_off, 0 if forward.switch("no_op") else width


_BLOCK_WIDTH = 256
"""Nemotron's NAS models round a feed-forward width up to a multiple of this (nemotron_nas.py)."""


def experts(config: Config) -> Experts | None:
    """Return the routed experts of a model; None for a dense model."""
    total = config.count("num_experts")
    if not total:
        return None
    names = ("moe_intermediate_size", "intermediate_size")
    width = next(filter(None, map(config.first, names)), 0) or config.size("intermediate_size")
    return Experts(total, config.first("num_experts_per_tok") or 1, width)


def has_experts(config: Config, count: int) -> list[bool]:
    """Return for each layer if it has routed experts, of a model that has some."""
    names = kind_names(config)
    if {"moe", "mlp"} & set(names):
        return [name == "moe" for name in names[:count]]
    if types := config.list("mlp_layer_types"):
        return [name in ("sparse", "moe", "hash_moe") for name in types[:count]]
    for field in ("moe_layers", "moe_layers_enum"):
        if (chosen := config.get(field)) is not None:
            numbers = {int(number) for number in (chosen.split(",") if isinstance(chosen, str) else chosen)}
            return [at in numbers for at in range(count)]
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list):
        return [bool(flag) for flag in frequency[:count]]
    if config.has("expert_layer_period"):
        period, offset = config.size("expert_layer_period"), config.count("expert_layer_offset")
        return [at % period == offset for at in range(count)]
    if config.has("moe_layer_start_index"):
        start, end = config.count("moe_layer_start_index"), config.get("moe_layer_end_index")
        end = end if isinstance(end, int) and end >= 0 else count - 1
        step = config.size("moe_layer_interval", 1)
        return [start <= at <= end and (at + 1) % step == 0 for at in range(count)]
    first = config.count("first_k_dense_replace")
    if first or isinstance(frequency, int):
        step = config.size("moe_layer_freq", 1)
        return [at >= first and at % step == 0 for at in range(count)]
    step = config.size("decoder_sparse_step", config.size("interleave_moe_layer_step", 1))
    dense = config.list("mlp_only_layers")
    return [at not in dense and (at + 1) % step == 0 for at in range(count)]


def dense_width(config: Config, family: Architecture) -> int:
    """Return the width of a feed-forward part without experts."""
    width = config.first("intermediate_size_mlp") or config.first("intermediate_size", 4 * config.size("hidden_size"))
    if family.adjusted and config.switch("block_auto_adjust_ff_dim", True):  # LFM2
        multiple, factor = config.size("block_multiple_of", 256), config.get("block_ffn_dim_multiplier") or 1
        width = -(-int(factor * (2 * width // 3)) // multiple) * multiple
    return width


def feed_forward(config: Config, family: Architecture, width: int, block: str = "mlp") -> Iterator[WeightPart]:
    """Yield the matrices of a feed-forward part, with a gate or without."""
    hidden = config.size("hidden_size")
    names = ("gate", "up", "down") if family.gated else ("up", "down")
    yield linear(len(names) * hidden * width, *(f"{block}.{name}_proj" for name in names))
    if config.any_switch("mlp_bias", "use_bias", "bias") if family.mlp_bias is None else family.mlp_bias:
        yield WeightPart((len(names) - 1) * width, MOST_WAYS)
        yield WeightPart(hidden)


def routed(config: Config, family: Architecture, experts: Experts) -> Iterator[WeightPart]:
    """Yield the matrices of routed experts, of their router, and of the experts that see every token."""
    hidden, matrices = config.size("hidden_size"), 3 if family.gated else 2
    inside = config.count("moe_latent_size") or hidden  # Nemotron 3 routes in a smaller space
    module = "experts" if family.both and family.copies == 1 else "mlp.experts"  # Gemma 4: beside the dense part
    yield WeightPart(experts.total * matrices * inside * experts.width, MOST_WAYS, "expert", (module,))
    yield WeightPart((experts.total + config.count("zero_expert_num")) * hidden)
    widths = config.get("moe_intermediate_size")
    is_sets = isinstance(widths, list) and len(widths) < config.size("num_hidden_layers")
    for width in [width for width in widths[1:] if isinstance(width, int)] if is_sets else []:  # images of ERNIE 4.5 VL
        yield WeightPart(experts.total * (matrices * inside * width + hidden), MOST_WAYS, "expert", ("mlp.experts",))
    if inside != hidden:
        yield linear(2 * inside * hidden, "mlp.fc1_latent_proj", "mlp.fc2_latent_proj", ways=1)
    if family.sinks and family.mlp_bias:  # gpt-oss
        yield WeightPart(experts.total * (2 * experts.width + hidden + 1))
    shared = config.first("shared_expert_intermediate_size")
    shared = shared or experts.width * config.first("n_shared_experts", int(family.shared))
    if shared:
        names = ("gate", "up", "down")[-matrices:]
        yield linear(matrices * hidden * shared, *(f"mlp.shared_experts.{name}_proj" for name in names))
    if family.shared_gate and shared:
        yield WeightPart(hidden)


def stack(config: Config, family: Architecture, count: int) -> tuple[Layer, ...]:
    """Return all layers; UnknownLayers if the file has kinds of layers that are not known."""
    of_kind, expert_part = kinds(config, family, count), experts(config)
    sparse = has_experts(config, count) if expert_part else [False] * count
    names = kind_names(config)
    is_single = bool({"mlp", "moe"} & set(names))  # Nemotron-H: a layer is a mixer or a feed-forward part
    width, hidden = dense_width(config, family), config.size("hidden_size")
    shares, blocks = config.count("num_kv_shared_layers"), config.list("block_configs")
    # tokens see those that follow, so that vLLM keeps no KV cache (EncoderOnlyAttention)
    fields = config.fields
    sees_all = (
        family.encoder_only or fields.get("is_causal") is False or fields.get("use_bidirectional_attention") is True
    )
    layers = []
    for at, kind in enumerate(of_kind):
        mine, layer_width = of_layer(config, kind, at), width
        if at < len(blocks) and isinstance(blocks[at], dict):
            mine, has_attention, layer_width = of_block(config, blocks[at])
            kind = kind if has_attention else "none"  # noqa: PLW2901
        mixers = tuple(_mixers(mine, family, kind, at)) * family.copies
        if sees_all:
            mixers = tuple(replace(mixer, cached=False) for mixer in mixers)
        if at >= count - shares > 0:  # attention that reads the keys and values of an earlier layer (Gemma 4)
            shared = ("self_attn.k_proj",), ("self_attn.v_proj",)
            rests = [tuple(part for part in mixer.parts if part.modules not in shared) for mixer in mixers]
            pairs = zip(mixers, rests, strict=True)
            mixers = tuple(replace(mixer, cached=False, parts=rest) for mixer, rest in pairs)
        parts: list[WeightPart] = [WeightPart(family.norms * family.copies * hidden * (2 if family.norm_bias else 1))]
        has_dense = layer_width > 0 and (not sparse[at] or family.both) and (not is_single or names[at] == "mlp")
        if is_single:
            parts = [WeightPart(hidden)]
        if at >= count - shares > 0 and config.switch("use_double_wide_mlp"):
            layer_width *= 2
        if kind == "both" or (has_dense and kind == "linear" and family.bare):
            has_dense = False
        if has_dense:
            parts += [*feed_forward(mine, family, layer_width)] * family.copies
        if sparse[at] and expert_part:
            parts += routed(mine, family, expert_part)
        if family.per_layer and (size := config.count("hidden_size_per_layer_input")):
            parts.append(WeightPart(2 * hidden * size + hidden))
        if streams := config.count("altup_num_inputs"):  # Gemma 3n: predicted streams, and a low-rank path beside
            rank = config.count("laurel_rank")
            parts.append(WeightPart((streams + 3 + 2 * rank) * hidden + streams**2 * (streams + 1)))
        layers.append(Layer(mixers, tuple(parts), sparse[at], layer_width if has_dense else 0))
    return tuple(layers)


def _mixers(config: Config, family: Architecture, kind: LayerKind, at: int) -> Iterator[Mixer]:
    if kind == "none":
        return
    if kind in ("linear", "both", "parallel"):
        yield STATES[family.linear or linear_kind(config)](config)
    if kind == "conv":
        yield STATES["short convolution"](config)
    if kind == "both":
        yield replace(attention(config, family, "full"), parts=())  # the weights are shared: see `shared_blocks`
    if kind == "compressed":
        yield compressed_attention(config, kind_names(config), at)
    elif kind in ("full", "window", "chunk", "parallel"):
        if config.count("kv_lora_rank"):
            types = config.list("indexer_types")
            mixer = latent_attention(config, config.has("index_topk") and (at >= len(types) or types[at] == "full"))
            size = mixer.key_dim  # values are padded to it (vllm/model_executor/models/minicpm3.py)
            full = replace(mixer, kind="full", kv_heads=mixer.heads, head_dim=size, value_dim=size, rank=0, key_dim=0)
            yield full if family.multiplied else mixer
        else:
            yield indexed(attention(config, family, kind), config, at)
        if family.crossed:
            yield replace(
                attention(config, family, kind), kind="cross", window=config.size("max_source_positions", 1500)
            )
