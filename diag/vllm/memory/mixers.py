"""The parts of a layer in which tokens see each other: attention of each kind, and states of fixed size instead of it.

Read off vLLM's models and mamba_utils.py (states); compressed attention is that of DeepSeek V4 (models/deepseek_v4). A
number that config.json leaves out has Transformers' default.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from diag.vllm.memory.architectures import Architecture
from diag.vllm.memory.config import Config, quote
from diag.vllm.memory.parts import MOST_WAYS, Mixer, State, UnknownLayers, WeightPart, linear

LayerKind = Literal["full", "window", "chunk", "linear", "conv", "both", "parallel", "compressed", "none"]
INDEX_SCALE = 128
"""Numbers of an indexer's key that share a scale of 4 bytes (deepseek_v2.py, quant_block_size)."""
INDEXED, OVERLAP = 4, 2
"""The ratio of compressed attention at which there is an indexer; entries of that ratio overlap by one."""
STATE_BLOCKS = {INDEXED: 4, 128: 8}
"""Tokens of a block of compressor states, by the ratios that vLLM has."""


def window(config: Config, kind: LayerKind) -> int:
    """Return the tokens that a layer of a kind attends to, 0 for all."""
    if kind == "chunk":
        return config.count("attention_chunk_size")
    is_off = kind != "window" or config.fields.get("use_sliding_window") is False
    config.asked.update(("sliding_window_size", "sliding_window"))
    value = config.fields.get("sliding_window_size", config.fields.get("sliding_window"))
    if isinstance(value, list):  # one for each layer
        value = next((size for size in value if size), 0)
    return 0 if is_off or not value else Config({"sliding_window": value}, config.place).count("sliding_window")


def attention(config: Config, family: Architecture, kind: LayerKind) -> Mixer:
    """Return a layer's attention with keys and values for each head."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = 1 if config.any_switch("multi_query") else config.size("num_key_value_heads", heads)
    size = config.size("head_dim", max(hidden // heads, 1))
    value = config.size("v_head_dim", size)
    queries, keys, values = heads * size, kv_heads * size, kv_heads * value
    if kind == "full" and config.fields.get("attention_k_eq_v"):
        values = 0  # keys are the values too
    gate = family.gate  # of the output: a number for each number, or for each head
    if config.has("attn_output_gate"):
        gate = "full" if config.switch("attn_output_gate") else ""
    elif config.any_switch("use_head_wise_attn_gate", "gating"):
        gate = "head"
    wide = {"": 0, "full": queries, "head": heads}[gate]
    parts = [
        linear(hidden * (queries + wide), "self_attn.q_proj"),
        linear(hidden * heads * value, "self_attn.o_proj"),
        linear(hidden * keys, "self_attn.k_proj", ways=kv_heads),
        linear(hidden * values, "self_attn.v_proj", ways=kv_heads),
    ]
    has_bias = config.any_switch("attention_bias", "use_bias", "qkv_bias", "bias", "add_qkv_bias", "use_qkv_bias")
    if has_bias if family.qkv_bias is None else family.qkv_bias:
        parts += [WeightPart(queries, MOST_WAYS), WeightPart(keys + values, kv_heads)]
    if family.out_bias or (family.out_bias is None and has_bias):
        parts.append(WeightPart(hidden))
    norm = family.qk_norm or ("head" if config.any_switch("use_qk_norm", "qk_layernorm", "add_qk_norm") else "")
    if norm:
        parts.append(WeightPart(queries + keys if norm == "full" else 2 * size))
    if family.sinks:
        parts.append(WeightPart(heads, MOST_WAYS))
    name: Literal["full", "window", "chunk"] = kind if kind in ("window", "chunk") else "full"
    return Mixer(name, tuple(parts), heads, kv_heads, size, value, window(config, kind))


def latent_attention(config: Config, has_indexer: bool) -> Mixer:
    """Return DeepSeek's multi-head latent attention; down copied to every GPU, up divided by heads."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    rank, rope = config.size("kv_lora_rank"), config.count("qk_rope_head_dim", 64)
    nope, value = config.size("qk_nope_head_dim", 128), config.size("v_head_dim", 128)
    down = config.count("q_lora_rank")
    first = "self_attn.q_a_proj" if down else "self_attn.q_proj"
    parts = [
        linear((down or heads * (nope + rope)) * hidden, first, ways=1 if down else MOST_WAYS),
        linear(hidden * (rank + rope), "self_attn.kv_a_proj_with_mqa", ways=1),
        linear(rank * heads * (nope + value), "self_attn.kv_b_proj"),
        linear(heads * value * hidden, "self_attn.o_proj"),
        WeightPart(down + rank),
    ]
    if down:
        parts.append(linear(down * heads * (nope + rope), "self_attn.q_b_proj"))
    if config.switch("mla_use_output_gate"):
        parts.append(linear(hidden * heads * value, "self_attn.g_proj"))
    index, sparse = 0, config.count("index_topk")
    if has_indexer:
        count, size = config.size("index_n_heads", 64), config.size("index_head_dim", 128)
        parts.append(linear(down * count * size, "self_attn.indexer.wq_b", ways=1))
        parts.append(WeightPart(hidden * (size + count) + 2 * size))
        index = size + size // INDEX_SCALE * 4
    return Mixer(
        "latent", tuple(parts), heads, 1, rank + rope, value, index=index, sparse=sparse, rank=rank, key_dim=nope + rope
    )


def indexed(mixer: Mixer, config: Config, at: int) -> Mixer:
    """Return attention with the indexer that `sparse_attention_config` gives a layer (MiniMax M3), keys in 16 bits."""
    nested = Config(config.part("sparse_attention_config"), config.place)
    layers = nested.list("sparse_attention_freq")
    if not nested.has("sparse_index_dim") or (at < len(layers) and not layers[at]):
        return mixer
    size, heads = nested.size("sparse_index_dim"), nested.size("sparse_num_index_heads", 1)
    part = linear(config.size("hidden_size") * (heads + 1) * size, "self_attn.index_q_proj", ways=heads)
    chosen = nested.count("sparse_topk_blocks") * nested.size("sparse_block_size", 128)
    parts = (*mixer.parts, part, WeightPart(2 * size))
    return replace(mixer, parts=parts, index=2 * size, sparse=chosen)


# -- compressed attention (DeepSeek V4)


def compressed_attention(config: Config, names: Sequence[str], at: int) -> Mixer:
    """Return a layer's compressed attention; the way down is copied to every GPU. `names` are those of the layers."""
    ratios, rates = config.list("compress_ratios"), config.part("compress_rates")
    ratio = ratios[at] if at < len(ratios) else rates.get(names[at], 0) if at < len(names) else 0  # 0: only a window
    if ratio not in (0, *STATE_BLOCKS):
        raise UnknownLayers(f"layers that compress {quote(ratio)} tokens to one are not covered")
    ratio = int(ratio)
    hidden, heads, size = config.size("hidden_size"), config.size("num_attention_heads"), config.size("head_dim")
    down, streams = config.size("q_lora_rank"), config.size("hc_mult", 4)
    out = config.size("o_groups", 8) * config.size("o_lora_rank", 1024)
    parts = [
        linear(down * hidden, "self_attn.q_a_proj", ways=1),
        linear(down * heads * size, "self_attn.q_b_proj"),
        linear(hidden * size, "self_attn.kv_proj", ways=1),
        linear(config.size("o_lora_rank", 1024) * heads * size, "self_attn.o_a_proj"),
        linear(out * hidden, "self_attn.o_b_proj"),
        WeightPart(down + size + heads),
        WeightPart(2 * ((2 + streams) * streams * (streams * hidden + 1) + 3)),  # hyper-connections
    ]
    index = 0
    if ratio:
        parts.append(_compressor(hidden, size, ratio))
    if ratio == INDEXED:
        count, index = config.size("index_n_heads", 64), config.size("index_head_dim", 128)
        parts += [linear(count * index * down, "self_attn.indexer.wq_b", ways=1), WeightPart(count * hidden)]
        parts.append(_compressor(hidden, index, ratio))
    return Mixer(
        kind="compressed",
        parts=tuple(parts),
        heads=heads,
        kv_heads=1,
        head_dim=size,
        value_dim=size,
        window=config.size("sliding_window", 128),
        index=index,
        sparse=config.count("index_topk") if index else 0,
        rank=size,
        ratio=ratio,
    )


def _compressor(hidden: int, size: int, ratio: int) -> WeightPart:
    wide = size * (OVERLAP if ratio == INDEXED else 1)
    return WeightPart(2 * wide * hidden + ratio * wide + size)


# -- states of a fixed size instead of keys and values


def mamba1(config: Config) -> Mixer:
    hidden = config.size("hidden_size")
    inner = config.size("mamba_expand", 2) * hidden
    state, kernel = config.size("mamba_state", 16), config.size("mamba_conv", 4)
    is_auto = not isinstance(config.get("mamba_rank"), int)
    rank = -(-hidden // 16) if is_auto else config.size("mamba_rank")
    parts = (
        linear(2 * hidden * inner, "mamba.in_proj"),
        linear(inner * (rank + 2 * state), "mamba.x_proj"),
        linear(rank * inner, "mamba.dt_proj"),
        linear(inner * hidden, "mamba.out_proj"),
        WeightPart(inner * (kernel + state + 3), MOST_WAYS),
        WeightPart(rank + 2 * state),
    )
    states = State(inner * (kernel - 1)), State(inner * state, recurrent=True)
    return Mixer("state", parts, states=states, is_mamba=True)


def mamba2(config: Config) -> Mixer:
    hidden = config.size("hidden_size")
    heads = config.size("mamba_heads", 128)
    inner = config.count("mamba_width") or config.count("mamba_expand", 2) * hidden
    if isinstance(config.get("mamba_head_dim"), int) and not config.has("mamba_width"):
        inner = heads * config.size("mamba_head_dim")
    groups, state = config.size("mamba_groups", 1), config.size("mamba_state", 128)
    kernel = config.size("mamba_conv", 4)
    convolved = inner + 2 * groups * state
    has_bias = config.any_switch("mamba_proj_bias", "use_bias", "add_bias_linear")
    parts = [
        linear(hidden * (inner + convolved + heads), "mixer.in_proj"),
        linear(inner * hidden, "mixer.out_proj"),
        WeightPart(convolved * (kernel + config.switch("use_conv_bias", config.switch("mamba_conv_bias", True)))),
        WeightPart(3 * heads + (inner if config.switch("mamba_rms_norm", True) else 0), MOST_WAYS),
        WeightPart((inner + convolved + heads + hidden) * has_bias, MOST_WAYS),
    ]
    convolution = State(inner * (kernel - 1), groups=groups, per_group=2 * state * (kernel - 1))
    states = convolution, State(inner * state, recurrent=True)
    return Mixer("state", tuple(parts), states=states, is_mamba=True, checkpoint="0.32.0")


def gated_delta_net(config: Config) -> Mixer:
    hidden = config.size("hidden_size")
    keys, values = config.size("linear_num_key_heads", 16), config.size("linear_num_value_heads", 32)
    key, value = config.size("linear_key_head_dim", 128), config.size("linear_value_head_dim", 128)
    kernel = config.size("linear_conv_kernel_dim", 4)
    convolved = 2 * keys * key + values * value
    parts = (
        linear(hidden * (convolved + values * value), "linear_attn.in_proj_qkvz"),
        linear(2 * hidden * values, "linear_attn.in_proj_ba"),
        linear(values * value * hidden, "linear_attn.out_proj"),
        WeightPart(convolved * kernel + 2 * values, MOST_WAYS),
        WeightPart(value),
    )
    states = State(convolved * (kernel - 1)), State(values * value * key, recurrent=True)
    return Mixer("state", parts, states=states)


def kimi_delta_attention(config: Config) -> Mixer:
    nested = Config(config.part("linear_attn_config"), config.place)
    hidden, whole = config.size("hidden_size"), config.switch("no_kda_lora")  # Ling 3.0
    heads = nested.size(
        "num_heads", config.size("linear_num_heads", config.size("num_attention_heads") if whole else 32)
    )
    size = nested.size("head_dim", config.size("linear_head_dim", config.size("head_dim", 128)))
    kernel = nested.size("short_conv_kernel_size", config.size("linear_conv_kernel_dim", 4))
    inner = heads * size
    lora = (
        linear(2 * hidden * size, "self_attn.f_a_proj", "self_attn.g_a_proj", ways=1),
        linear(2 * size * inner, "self_attn.f_b_proj", "self_attn.g_b_proj"),
    )
    parts = (
        linear(3 * hidden * inner, *(f"self_attn.{name}_proj" for name in "qkv")),
        *((linear(2 * hidden * inner, "self_attn.f_proj", "self_attn.g_proj"),) if whole else lora),
        linear(hidden * heads, "self_attn.b_proj"),
        linear(inner * hidden, "self_attn.o_proj"),
        WeightPart(inner * (3 * kernel + 1) + heads, MOST_WAYS),
        WeightPart(size),
    )
    states = State(3 * inner * (kernel - 1)), State(inner * size, recurrent=True)
    return Mixer("state", parts, states=states, float32_state=True, checkpoint="0.29.0")


def lightning_attention(config: Config) -> Mixer:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    size = config.size("head_dim", hidden // heads)
    inner = heads * size
    parts = (
        linear(3 * hidden * inner, "self_attn.qkv_proj"),
        linear(2 * hidden * inner, "self_attn.output_gate", "self_attn.out_proj"),
        WeightPart(inner, MOST_WAYS),
    )
    return Mixer("state", parts, states=(State(inner * size),), float32_state=True)


def short_convolution(config: Config) -> Mixer:
    hidden, kernel = config.size("conv_dim", config.size("hidden_size")), config.size("conv_L_cache", 3)
    outer = config.size("hidden_size")
    parts = (
        linear(3 * outer * hidden, "conv.in_proj"),
        linear(hidden * outer, "conv.out_proj"),
        WeightPart(hidden * kernel + config.switch("conv_bias") * (4 * hidden + outer), MOST_WAYS),
    )
    return Mixer("state", parts, states=(State(hidden * (kernel - 1)),))


STATES: Mapping[str, Callable[[Config], Mixer]] = {
    "mamba1": mamba1,
    "mamba2": mamba2,
    "gated delta net": gated_delta_net,
    "KDA": kimi_delta_attention,
    "lightning attention": lightning_attention,
    "short convolution": short_convolution,
}


def linear_kind(config: Config) -> str:
    """Return the kind of the layers that a file calls linear attention or mamba, by the fields that describe them."""
    if config.has("linear_num_value_heads", "linear_value_head_dim"):
        return "gated delta net"
    if config.has("linear_attn_config", "linear_num_heads"):
        return "KDA"
    if config.has("mamba_groups", "mamba_heads"):
        return "mamba2"
    return "mamba1" if config.has("mamba_state", "mamba_conv") else "lightning attention"
