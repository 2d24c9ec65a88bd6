"""Architectures: the properties that are in vLLM's code and not in config.json (architectures.toml).

A model is found by the name of its architecture, Qwen3MoeForCausalLM, or by the `model_type` of its language part,
"qwen3_moe": both are written as `qwen3moe` here. A model that is not in the table is read as `LLAMA` is.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Literal, NamedTuple

from diag.core.declarations import PACKAGE, read


class Architecture(NamedTuple):
    """Properties of an architecture that are in vLLM's code and not in config.json; `names` are stems."""

    names: tuple[str, ...] = ()
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
    defaults: Mapping[str, object] = {}
    """Defaults of Transformers for fields that the official files leave out."""

    def mistakes(self) -> Iterator[tuple[str, str]]:
        yield from (
            (f"has '{name}', which is written as '{stem(name)}'", "names") for name in self.names if stem(name) != name
        )


LLAMA = Architecture()
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


@cache
def families() -> Mapping[str, Architecture]:
    """Return the architectures by the stems of their names."""
    rows = read(PACKAGE / "vllm" / "memory" / "architectures.toml", tuple[Architecture, ...], "family")
    return {name: row for row in rows for name in row.names}
