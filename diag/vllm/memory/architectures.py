"""Architectures and encoders: the properties that are in vLLM's code and not in config.json, and what encoders hold.

A model is found by the name of its architecture, Qwen3MoeForCausalLM, or by the `model_type` of its language part,
"qwen3_moe": both are written as `qwen3moe` here. A model that is not in the table is read as `LLAMA` is.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

from diag.core.declarations import PACKAGE, read
from diag.vllm.command.container import inner
from diag.vllm.memory.config import MOST, Config


class Architecture(NamedTuple):
    """Properties of an architecture, as architectures.toml describes them; None: as config.json says."""

    names: tuple[str, ...] = ()
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: Literal["", "head", "full"] = ""
    norms: int = 2
    norm_bias: bool = False
    final_norm: bool = True
    gated: bool = True
    gate: Literal["", "full", "head"] = ""
    sinks: bool = False
    tied: bool = False
    shared: bool = False
    shared_gate: bool = False
    both: bool = False
    every: int = 0
    linear: str = ""
    parallel: bool = False
    bare: bool = False
    encoder_only: bool = False
    copies: int = 1
    positions: int | None = None
    crossed: bool = False
    adjusted: bool = False
    per_layer: bool = False
    head_bias: bool = False
    multiplied: bool = False
    state_type: str = ""
    defaults: Mapping[str, object] = {}

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


@cache
def removed() -> Mapping[str, str]:
    """Return the last release with each architecture and method of quantization that vLLM no longer has.

    A + marks an architecture that Transformers has, too.
    """
    return read(PACKAGE / "vllm" / "memory" / "removed.toml", dict[str, str])


# -- vision and audio encoders

Connector = Literal["merger", "projector", "merge and project", "linear", "none"]


class Encoder(NamedTuple):
    """Properties of an encoder, as encoders.toml describes them."""

    names: tuple[str, ...] = ()
    gated: bool = False
    connector: Connector = "projector"
    merge: int = 1
    conformer: bool = False
    numbers: int = 0
    defaults: Mapping[str, int] = {}


_MOST_RATIO = 64
_CONFORMER = 24
"""Squares of the hidden size in a conformer's block: 16 feed-forward, 5 attention, 3 around the convolution."""
_SQUARE = ("init_pos_emb_height", "pos_emb_height")
"""Sides of a square of positions (Kimi)."""


class _EncoderTables(NamedTuple):
    """The tables of encoders.toml."""

    encoder: tuple[Encoder, ...]
    fields: Mapping[str, tuple[str, ...]]
    timm: Mapping[str, Mapping[str, int]]


@cache
def encoder_tables() -> _EncoderTables:
    """Return the encoders, the names of their fields, and sizes by timm model."""
    return read(PACKAGE / "vllm" / "memory" / "encoders.toml", _EncoderTables)


@cache
def encoders() -> Mapping[str, Encoder]:
    """Return the encoders by the stem of their model_type, or else of the model's; others are read like Llava's."""
    return {name: row for row in encoder_tables().encoder for name in row.names}


DEEP = "deepstack_visual_indexes"
"""Layers of an encoder whose output goes to layers of the language part, too."""


def is_gated(fields: Mapping[str, Any]) -> bool:
    """Return True if an encoder's feed-forward part is gated."""
    return encoders().get(_stem(fields), Encoder()).gated


def encoder_numbers(fields: Mapping[str, Any], outer: Config, hidden_of_text: int) -> int:
    """Return the count of an encoder's numbers, with its way to the language part; 0 if it names no layers."""
    kind = encoders().get(_stem(fields) or stem(str(outer.fields.get("model_type", ""))), Encoder())
    named = encoder_tables().timm.get(str(inner(fields, "args").get("model")), {})
    config = Config({**kind.defaults, **named, **fields}, outer.place)

    def size(name: str, default: int = 0) -> int:
        names = encoder_tables().fields.get(name, (name,))
        value = next((value for other in names if (value := config.get(other)) is not None), default)
        value = value[0] if isinstance(value, list) and value else value
        return value if isinstance(value, int) and 0 <= value <= MOST else default

    hidden, layers, out = size("hidden"), size("layers"), size("out") or hidden_of_text
    ratio = config.get("mlp_ratio")
    ratio = ratio if isinstance(ratio, int | float) and 0 < ratio < _MOST_RATIO else 4
    width = size("width") or round(hidden * ratio)
    if config.has("embed_dim") and not config.has("out_hidden_size"):
        out = config.count("hidden_size", out)  # Qwen 2 VL
    numbers = config.size("numbers", kind.numbers and kind.numbers + hidden * hidden_of_text, most=2**40, least=0)
    if numbers or not (hidden and layers):
        return numbers
    if kind.conformer:
        return layers * _CONFORMER * hidden**2 + (size("output_proj_dims") or hidden) * (hidden + hidden_of_text)
    middle = config.count("out_hidden_size", width) if _stem(fields).startswith("glm4") else width
    blocks = layers * (4 * hidden**2 + (3 if kind.gated else 2) * hidden * middle + 9 * hidden + middle)
    patch, temporal = size("patch_size"), config.get("temporal_patch_size")
    temporal = temporal if isinstance(temporal, int) else 1
    first = size("channels", 3) * patch**2 * hidden * temporal
    positions = size("positions") or (size("image_size") // patch) ** 2 if patch and not kind.gated else 0
    if config.has(*_SQUARE):
        positions **= 2
    if size("num_mel_bins"):  # two convolutions over the spectrum
        first, positions = 3 * hidden * (size("num_mel_bins") + hidden), size("positions")
    merge = config.get("spatial_merge_size") or outer.get("spatial_merge_size") or kind.merge
    merged = hidden * (merge if isinstance(merge, int) else 1) ** 2
    square = hidden_of_text**2
    ways: Mapping[Connector, int] = {
        "merger": merged**2 + merged * out,
        "projector": merged * hidden_of_text + square,
        "merge and project": (merged * hidden if merged > hidden else 0) + hidden * hidden_of_text + square,
        "linear": hidden * hidden_of_text,
        "none": 0,
    }
    connector = ways[kind.connector] * (1 + len(config.list(DEEP)))
    if projector := outer.count("projector_hidden_size"):  # a projector with a width of its own
        ratio = outer.get("downsample_ratio")  # of a side: so many patches are joined to one
        is_joined = isinstance(ratio, int | float) and 1 / _MOST_RATIO < ratio <= 1
        connector = (hidden * (round(1 / ratio**2) if is_joined else 1) + hidden_of_text) * projector
    if _stem(fields).startswith(("glm4", "glmocr")):
        middle = width if _stem(fields).startswith("glm4") else out * size("channels", 3)
        connector = out**2 + 3 * out * middle + merged * out
    return blocks + first + positions * hidden + connector


def _stem(fields: Mapping[str, Any]) -> str:
    return stem(str(fields.get("model_type", "")).removesuffix("_vision"))
