"""Vision and audio encoders: the count of their numbers, by the fields of vision_config and audio_config."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

from diag.core.declarations import PACKAGE, read
from diag.vllm.memory.architectures import stem
from diag.vllm.memory.config import MOST, Config

Connector = Literal["merger", "projector", "merge and project", "linear", "none"]


class Encoder(NamedTuple):
    """Properties of an encoder that are not in config.json: a gated feed-forward part, and the way to the text.

    A merger joins neighbouring patches and maps them by two matrices, the first of them square; a projector has two
    matrices, the second one square. `names` are the stems of model_types.
    """

    names: tuple[str, ...] = ()
    gated: bool = False
    connector: Connector = "projector"
    merge: int = 1
    """Patches of a side that are joined, unless the file says so."""
    conformer: bool = False
    """True for blocks of two feed-forward parts, attention with relative positions and a convolution."""
    numbers: int = 0
    """The count of an encoder whose layers no field describes; 0 otherwise."""
    defaults: Mapping[str, int] = {}
    """Defaults of Transformers for fields that the official files leave out."""


_TIMM: Mapping[str, Mapping[str, int]] = {
    f"vit_{name}_patch16_224": {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 4 * hidden}
    for name, hidden, layers in (("small", 384, 12), ("base", 768, 12), ("large", 1024, 24), ("huge", 1280, 32))
}
"""Sizes by the timm model that an encoder's `args` name (vLLM's configs/radio.py)."""
_MOST_RATIO = 64
_CONFORMER = 24
"""Squares of the hidden size in a conformer's block: 16 feed-forward, 5 attention, 3 around the convolution."""
_SQUARE = ("init_pos_emb_height", "pos_emb_height")
"""Sides of a square of positions (Kimi)."""
_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("vt_hidden_size", "embed_dim", "hidden_size", "d_model"),
    "layers": ("conf_num_hidden_layers", "vt_num_hidden_layers", "depth", "encoder_layers", "num_hidden_layers"),
    "width": ("vt_intermediate_size", "encoder_ffn_dim", "intermediate_size"),
    "patch": ("patch_size",),
    "channels": ("num_channels", "in_channels", "in_chans"),
    "image": ("image_size",),
    "positions": ("num_position_embeddings", "max_source_positions", "num_patches", *_SQUARE),
    "out": ("out_hidden_size", "output_dim"),
    "projected": ("output_proj_dims",),
    "bins": ("num_mel_bins",),
}


@cache
def encoders() -> Mapping[str, Encoder]:
    """Return the encoders by the stem of their model_type, or else of the model's; others are read like Llava's."""
    rows = read(PACKAGE / "vllm" / "memory" / "encoders.toml", tuple[Encoder, ...], "encoder")
    return {name: row for row in rows for name in row.names}


def encoder_numbers(fields: Mapping[str, Any], outer: Config, hidden_of_text: int) -> int:
    """Return the count of an encoder's numbers, with its way to the language part; 0 if it names no layers."""
    kind = encoders().get(_stem(fields) or stem(str(outer.fields.get("model_type", ""))), Encoder())
    args = fields.get("args")
    named = _TIMM.get(str(args.get("model")), {}) if isinstance(args, dict) else {}
    config = Config({**kind.defaults, **named, **fields}, outer.place)

    def size(name: str, default: int = 0) -> int:
        found = next((value for other in _NAMES[name] if (value := config.get(other)) is not None), default)
        found = found[0] if isinstance(found, list) and found else found
        return found if isinstance(found, int) and 0 <= found <= MOST else default

    hidden, layers, out = size("hidden"), size("layers"), size("out") or hidden_of_text
    ratio = config.get("mlp_ratio")
    ratio = ratio if isinstance(ratio, int | float) and 0 < ratio < _MOST_RATIO else 4
    width = size("width") or round(hidden * ratio)
    if config.has("embed_dim") and not config.has("out_hidden_size"):
        out = config.count("hidden_size", out)  # Qwen 2 VL
    if kind.numbers:
        return kind.numbers + hidden * hidden_of_text
    if not (hidden and layers):
        return 0
    if kind.conformer:
        return layers * _CONFORMER * hidden**2 + (size("projected") or hidden) * (hidden + hidden_of_text)
    inner = config.count("out_hidden_size", width) if _stem(fields).startswith("glm4") else width
    blocks = layers * (4 * hidden**2 + (3 if kind.gated else 2) * hidden * inner + 9 * hidden + inner)
    patch, temporal = size("patch"), config.get("temporal_patch_size")
    temporal = temporal if isinstance(temporal, int) else 1
    first = size("channels", 3) * patch**2 * hidden * temporal
    positions = size("positions") or (size("image") // patch) ** 2 if patch and not kind.gated else 0
    if config.has(*_SQUARE):
        positions **= 2
    if size("bins"):  # two convolutions over the spectrum
        first, positions = 3 * hidden * (size("bins") + hidden), size("positions")
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
    connector = ways[kind.connector] * (1 + len(config.list("deepstack_visual_indexes")))
    if projector := outer.count("projector_hidden_size"):  # a projector with a width of its own
        connector = (hidden * _joined(outer) + hidden_of_text) * projector
    if _stem(fields).startswith(("glm4", "glmocr")):
        inner = width if _stem(fields).startswith("glm4") else out * size("channels", 3)
        connector = out**2 + 3 * out * inner + merged * out
    return blocks + first + positions * hidden + connector


def _joined(outer: Config) -> int:
    """Return the patches that are joined to one, by `downsample_ratio` of a side."""
    ratio = outer.get("downsample_ratio")
    return round(1 / ratio**2) if isinstance(ratio, int | float) and 1 / _MOST_RATIO < ratio <= 1 else 1


def _stem(fields: Mapping[str, Any]) -> str:
    named = str(fields.get("model_type", ""))
    return stem(named.removesuffix("_vision"))
