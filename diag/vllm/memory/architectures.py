"""Architectures: the properties that are in vLLM's code and not in config.json, one line for each kind of model.

A model is found by the name of its architecture, Qwen3MoeForCausalLM, or by the `model_type` of its language part,
"qwen3_moe": both are written as `qwen3moe` here. A model that is not in the table is read as `LLAMA` is.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True)
class Architecture:
    """Properties of an architecture that are in vLLM's code and not in config.json."""

    qkv_bias: bool | None = None
    """None: as config.json says."""
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: Literal["", "head", "full"] = ""
    """Norms of queries and keys: of one head's size, or over all heads."""
    norms: int = 2
    """The number of norms of a layer, each of the hidden size."""
    norm_bias: bool = False
    final_norm: bool = True
    gated: bool = True
    """True for a feed-forward part of three matrices, False for two."""
    gate: Literal["", "full", "head"] = ""
    """The gate on the output of attention: a number for each number, or for each head."""
    sinks: bool = False
    tied: bool = False
    """True if the head is the embedding's matrix, unless the file has the field."""
    shared: bool = False
    """True if one expert sees every token, although the file does not say so."""
    shared_gate: bool = False
    both: bool = False
    """True if a layer with routed experts has a dense feed-forward part too."""
    every: int = 0
    """One layer in so many attends to everything, the others to a window; 0 if the file has the field."""
    linear: str = ""
    """The kind of all layers that keep a state; "" if it is seen by the fields."""
    parallel: bool = False
    """True if every layer has attention and Mamba side by side (Falcon H1)."""
    bare: bool = False
    """True if layers that keep a state have no feed-forward part."""
    encoder_only: bool = False
    """True if tokens see those that follow too, so that nothing is cached; the embeddings have a norm (BERT)."""
    copies: int = 1
    """Attention and feed-forward parts of a layer (LongCat Flash: 2)."""
    positions: int | None = None
    """Rows beside the longest context in a learned embedding of positions; None for rotary positions."""
    crossed: bool = False
    """True if every layer attends to an encoder's output too (Whisper)."""
    adjusted: bool = False
    """True if `block_auto_adjust_ff_dim` changes the width of the feed-forward part (LFM2)."""
    per_layer: bool = False
    """True if tokens have an embedding for each layer (Gemma 3n, Gemma 4)."""
    head_bias: bool = False
    state_type: str = ""
    """The type of recurrent states with --mamba-ssm-cache-dtype auto; "" for that of the model."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Defaults of Transformers for fields that the official files leave out."""


LLAMA = Architecture()
_GEMMA3_SIZES = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
_LLAMA_SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}
_QWEN2, _QWEN3 = Architecture(qkv_bias=True, out_bias=False), Architecture(qk_norm="head")
_GEMMA = Architecture(tied=True)
_GEMMA2 = Architecture(norms=4, tied=True, every=2, defaults={"head_dim": 256})
_GEMMA3 = Architecture(norms=4, tied=True, qk_norm="head", every=6, defaults=_GEMMA3_SIZES)
_GEMMA4 = Architecture(norms=4, tied=True, qk_norm="head", per_layer=True, both=True, defaults={"vocab_size": 262_144})
_QWEN3_NEXT = Architecture(qk_norm="head", gate="full", shared_gate=True)
_QWEN3_5 = replace(_QWEN3_NEXT, defaults={"vocab_size": 248_320, "head_dim": 256})
_GLM4 = Architecture(norms=4, out_bias=False)
_GLM4_MOE = Architecture(out_bias=False)
_GPT = Architecture(qkv_bias=True, out_bias=True, mlp_bias=True, gated=False, norm_bias=True, tied=True, positions=0)
_OLMO2 = Architecture(qk_norm="full")
_COHERE = Architecture(norms=1, tied=True)
_BERT = replace(_GPT, encoder_only=True, final_norm=False)
_BERT_WITH_ROPE = replace(_BERT, gated=True, positions=None)
_MAMBA_ONLY = Architecture(bare=True, norms=1, tied=True)

FAMILIES: Mapping[str, Architecture] = {
    **dict.fromkeys(
        (
            *("llama", "mistral", "mistral3", "ministral", "ministral3", "pixtral", "phi3", "phi3v", "solar"),
            *("aquila", "internlm3", "iquestcoder", "telechat3", "xverse", "internlm2", "seedoss", "smollm3"),
            *("mixtral", "exaone", "ernie45", "ernie45moe", "ernie45vlmoe", "idefics3", "smolvlm", "voxtral"),
            *("helium", "minicpm", "youtu", "deepseek", "deepseekv2", "deepseekv3", "deepseekv32", "glmmoedsa"),
            *("glm4moelite", "kimik25", "kimivl", "kimilinear", "axk1", "mistral4", "mistrallarge3"),
            *("solaropen", "minicpm3", "decilm"),
        ),
        LLAMA,
    ),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "granitemoehybrid"), Architecture(tied=True)),
    "bamba": Architecture(linear="mamba2"),
    **dict.fromkeys(("minimax", "minimaxtext01", "minimaxm1"), LLAMA),
    **dict.fromkeys(("qwen2", "qwen2vl", "qwen25vl", "qwen2audio", "dotsocr"), _QWEN2),
    **dict.fromkeys(("qwen25omni", "qwen25omnithinker"), _QWEN2),
    "qwen2moe": replace(_QWEN2, shared_gate=True),
    **dict.fromkeys(("qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "qwen3omnimoe", "qwen3omnimoethinker"), _QWEN3),
    **dict.fromkeys(("qwen3asr", "lightonocr", "mellum", "hyv3"), _QWEN3),
    "qwen3next": _QWEN3_NEXT,
    **dict.fromkeys(("qwen35", "qwen35moe"), _QWEN3_5),
    **dict.fromkeys(("llava", "llavanext"), Architecture(defaults=_LLAMA_SIZES)),
    "chatglm": Architecture(out_bias=False),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    **dict.fromkeys(("gemma3", "gemma3text"), _GEMMA3),
    "gemma3n": Architecture(norms=4, tied=True, qk_norm="head", every=5, per_layer=True),
    **dict.fromkeys(("gemma4", "gemma4unified"), _GEMMA4),
    "gptoss": Architecture(qkv_bias=True, out_bias=True, mlp_bias=True, sinks=True, every=2),
    "llama4": Architecture(shared=True),
    "glm": Architecture(out_bias=False),
    **dict.fromkeys(("glm4", "glm4v", "glm46v", "glmocr"), _GLM4),
    **dict.fromkeys(("glm4moe", "glm4vmoe"), _GLM4_MOE),
    **dict.fromkeys(("minimaxm2", "olmoe", "flexolmo"), _OLMO2),
    **dict.fromkeys(("olmo2", "olmo3"), _OLMO2),
    **dict.fromkeys(("minimaxm3", "minimaxm3sparse", "minimaxm3vl"), _QWEN3),
    "olmo": Architecture(norms=0, final_norm=False),
    "olmohybrid": _OLMO2,
    "nemotronh": Architecture(linear="mamba2", gated=False, state_type="float32"),
    "jamba": Architecture(linear="mamba1"),
    "falconh1": Architecture(linear="mamba2", parallel=True),
    **dict.fromkeys(("mamba", "falconmamba"), replace(_MAMBA_ONLY, linear="mamba1")),
    "mamba2": replace(_MAMBA_ONLY, linear="mamba2"),
    "zamba2": replace(_MAMBA_ONLY, linear="mamba2"),
    **dict.fromkeys(("lfm2", "lfm2vl"), Architecture(qk_norm="head", tied=True, adjusted=True)),
    "lfm2moe": Architecture(qk_norm="head", tied=True),
    "afmoe": Architecture(qk_norm="head", norms=4, gate="full", every=4),
    **dict.fromkeys(("exaone4", "exaonemoe"), Architecture(qk_norm="head")),
    "mimov2flash": Architecture(),
    "mimo": _QWEN2,
    **dict.fromkeys(("step3p5", "step3p7", "step3p7flash"), Architecture(qk_norm="head", gate="head")),
    "laguna": Architecture(qk_norm="head", gate="head"),
    "deepseekv4": Architecture(),
    "longcatflash": Architecture(copies=2, both=True),
    "opt": replace(_GPT, positions=2),
    "gpt2": _GPT,
    "whisper": replace(_GPT, norms=3, crossed=True),
    "gptbigcode": _GPT,
    "gptj": Architecture(
        qkv_bias=False, out_bias=False, mlp_bias=True, gated=False, norms=1, norm_bias=True, head_bias=True
    ),
    "gptneox": replace(_GPT, tied=False, positions=None),
    "starcoder2": Architecture(gated=False, norm_bias=True, tied=True),
    "falcon": Architecture(gated=False, norms=1, norm_bias=True, tied=True),
    "bloom": replace(_GPT, positions=None),
    "phi": Architecture(
        qkv_bias=True, out_bias=True, mlp_bias=True, gated=False, norms=1, norm_bias=True, head_bias=True
    ),
    "phimoe": Architecture(norm_bias=True, head_bias=True),
    "stablelm": Architecture(norm_bias=True),
    "nemotron": Architecture(gated=False, norm_bias=True),
    "arcee": Architecture(gated=False),
    "apertus": Architecture(gated=False, qk_norm="head"),
    "jais2": replace(_GPT, positions=None, tied=False),
    **dict.fromkeys(("bert", "roberta", "xlmroberta", "camembert"), _BERT),
    **dict.fromkeys(("gtenew", "gte"), _BERT_WITH_ROPE),
    "nomicbert": replace(_BERT_WITH_ROPE, qkv_bias=None, out_bias=None, mlp_bias=None),
    "modernbert": Architecture(encoder_only=True, tied=True),
    **dict.fromkeys(("llamabidirectional", "llamanemotronvl"), replace(LLAMA, encoder_only=True)),
    **dict.fromkeys(("cohere", "cohere2", "cohere2vision", "cohere2moe"), _COHERE),
    **dict.fromkeys(("hunyuanv1dense", "hunyuanv1moe"), _QWEN3),
}
"""Architectures by the stem of their name; those whose files name everything are in the first line."""

_SUFFIX = re.compile(r"(For[A-Z]\w*|LMHeadModel|(Embedding)?Model|_text|_?chat)$")
_VECTORS = re.compile(
    r"For(?!CausalLM|ConditionalGeneration|Generation|BlockDiffusion|ActionPrediction)[A-Z]\w*$"
    r"|(?<!LM)(?<!Chat)(?<!Head)(?<!Audio)(?<!Omni)(?<!Ultravox)Model$"
)


def stem(name: str) -> str:
    """Return the stem of an architecture or of a model_type: "qwen3moe"."""
    return _SUFFIX.sub("", name).lower().replace("_", "").replace("-", "").replace(".", "")


def gives_vectors(name: str) -> bool:
    """Return True for an architecture that vLLM runs without a head for tokens: MistralModel, BertForMaskedLM."""
    return _VECTORS.search(name) is not None
