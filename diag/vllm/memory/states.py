"""Layers that keep a state of fixed size instead of keys and values: their matrices and their states.

Read off vLLM's mamba_utils.py (states) and models; a number that config.json leaves out has Transformers' default.
"""

from collections.abc import Callable, Mapping

from diag.vllm.memory.config import Config
from diag.vllm.memory.parts import MOST_WAYS, Mixer, State, WeightPart, linear


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
    hidden = config.size("hidden_size")
    heads = nested.size("num_heads", config.size("linear_num_heads", 32))
    size = nested.size("head_dim", config.size("linear_head_dim", 128))
    kernel = nested.size("short_conv_kernel_size", config.size("linear_conv_kernel_dim", 4))
    inner = heads * size
    parts = (
        linear(3 * hidden * inner, *(f"self_attn.{name}_proj" for name in "qkv")),
        linear(2 * hidden * size, "self_attn.f_a_proj", "self_attn.g_a_proj", ways=1),
        linear(2 * size * inner, "self_attn.f_b_proj", "self_attn.g_b_proj"),
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
