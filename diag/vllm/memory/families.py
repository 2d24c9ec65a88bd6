"""The architectures that diag knows: what their code has and their config.json does not say."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Architecture:
    """What an architecture's code has and its config.json does not say."""

    qkv_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    """Of a layer, each one of the hidden size."""
    tied: bool = False
    """Whether the head is the embedding's matrix where the file does not say."""
    experts: str = ""
    """The field with the number of experts, "" for a dense model."""
    width: str = "intermediate_size"
    """The field with the width of one expert."""
    dense: str = "intermediate_size"
    """The field with the width of a layer without experts."""
    every: int = 0
    """A layer in so many attends to everything, the others to a window; 0 where the file says so itself."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Of Transformers, for fields that the official files leave out."""


_GEMMA3 = Architecture(
    norms=4,
    tied=True,
    qk_norm=True,
    every=6,
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
)


FAMILIES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(),
    "Phi3ForCausalLM": Architecture(),
    "GraniteForCausalLM": Architecture(tied=True),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(qk_norm=True),
    "Gemma2ForCausalLM": Architecture(norms=4, tied=True, every=2),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "MixtralForCausalLM": Architecture(experts="num_local_experts"),
    "Qwen2MoeForCausalLM": Architecture(qkv_bias=True, experts="num_experts", width="moe_intermediate_size"),
    "Qwen3MoeForCausalLM": Architecture(qk_norm=True, experts="num_experts", width="moe_intermediate_size"),
    "DeepseekV2ForCausalLM": Architecture(experts="n_routed_experts", width="moe_intermediate_size"),
    "DeepseekV3ForCausalLM": Architecture(experts="n_routed_experts", width="moe_intermediate_size"),
    "GptOssForCausalLM": Architecture(qkv_bias=True, experts="num_local_experts", every=2),
    "Llama4ForConditionalGeneration": Architecture(experts="num_local_experts", dense="intermediate_size_mlp"),
}
"""The architectures whose weights and KV cache can be computed; of any other one only its files can be weighed."""
