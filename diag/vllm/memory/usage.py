"""GPU memory of weights, activations and KV-cache blocks: from files or shape, as exact numbers or bounds."""

import json
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from diag.core.files import opened, read_bytes
from diag.core.formatting import GIB
from diag.vllm.command import redaction
from diag.vllm.memory.model import Architecture, Model
from diag.vllm.memory.setup import Setup
from diag.vllm.memory.weights import (
    Precision,
    absorbed,
    of_stage,
    precision,
    rotary,
    stages,
    weigh,
)


@dataclass(frozen=True)
class ByteRange:
    """Bytes, at least and at most; `likely` is the central estimate, None for the middle."""

    low: int
    high: int
    likely: int | None = field(default=None, compare=False)

    @property
    def central(self) -> int:
        return (self.low + self.high) // 2 if self.likely is None else self.likely

    @classmethod
    def gib(cls, bounds: tuple[float, float]) -> Self:
        return cls(round(bounds[0] * GIB), round(bounds[1] * GIB))

    @classmethod
    def of(cls, size: int) -> Self:
        return cls(size, size)

    def plus(self, *others: "ByteRange") -> "ByteRange":
        low, high = self.low + sum(other.low for other in others), self.high + sum(other.high for other in others)
        return ByteRange(low, high, self.central + sum(other.central for other in others))

    def less(self, *others: "ByteRange") -> "ByteRange":
        low, high = self.low - sum(other.high for other in others), self.high - sum(other.low for other in others)
        return ByteRange(low, high, self.central - sum(other.central for other in others))


MOST_HEADER = 100 * 2**20
"""The format's own limit."""
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def indexed(folder: Path) -> frozenset[str]:
    """Return the names of the weight files that the model's index lists; none without an index that can be read."""
    listed = folder / "model.safetensors.index.json"
    try:
        index = json.loads(read_bytes(listed, MOST_HEADER)) if listed.is_file() else {}
        return frozenset(map(str, index["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return frozenset()


def on_disk(model: Model, float32: bool = False) -> int | None:
    """Return the bytes of the tensors that vLLM loads from *.safetensors; None if files are missing or unreadable.

    Numbers that are not quantized are loaded as two bytes (four in float32), whatever the file holds.
    """
    files = sorted(model.folder / name for name in indexed(model.folder))
    if not files:
        found = sorted(model.folder.glob("*.safetensors"))
        # "consolidated" is a second copy in Mistral's own format
        files = [file for file in found if not file.name.startswith("consolidated")] or found

    total = 0
    for file in files:
        header = _header(file)
        if header is None:
            return None
        for name, entry in header.items():
            number = _LAYER.search(name)
            if number and 0 < model.layers <= int(number[1]) and "vision" not in name:
                continue  # the layers of a multi-token predictor, which only speculation loads
            if model.tied and name.endswith("lm_head.weight"):
                continue
            start, end = entry["data_offsets"]
            width = 0 if model.quantization else _FLOAT_BYTES.get(str(entry.get("dtype")), 0)
            total += (end - start) // width * (4 if float32 else 2) if width else end - start
    return total or None


def _header(file: Path) -> dict[str, Any] | None:
    """Read the tensors of a file; None if it is damaged or truncated."""
    try:
        with opened(file) as stream:
            room = os.fstat(stream.fileno()).st_size - 8
            length = struct.unpack("<Q", stream.read(8))[0]
            found = json.loads(stream.read(length)) if length <= min(MOST_HEADER, room) else None
        if not isinstance(found, dict):
            return None
        found.pop("__metadata__", None)
        for entry in found.values():
            start, end = entry["data_offsets"]
            if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end <= room - length):
                return None
    except (OSError, ValueError, KeyError, TypeError, struct.error, RecursionError):
        return None
    return found


NUMBER_BYTES: Mapping[str, float] = {
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float32": 4,
    "float": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "nvfp4": 1 / 2 + 1 / 16,
}
"""Bytes of a number in the cache by --kv-cache-dtype; other types have scales of their own."""
RESERVED = 1
"""The null block, which no request gets. 0.32 counts it when it checks that one request fits."""


class NotCovered(Exception):
    """The KV cache of this model or with these flags cannot be computed; the message is the reason."""


@dataclass(frozen=True)
class CacheLayout:
    """The blocks that a request takes, and the bytes of a block on one GPU.

    `layers` is the number of layers of a group; `groups` groups keep all tokens, `windows` groups keep the last
    `window` tokens and the tokens `in_flight`.
    """

    block: int
    layer_bytes: float
    layers: int
    groups: int
    windows: int = 0
    window: int = 0
    in_flight: int = 0

    def block_bytes(self, layers: int | None = None) -> int:
        """Return the bytes of a block on a GPU that has `layers` of a group's layers."""
        return round(self.layer_bytes * self.block * (self.layers if layers is None else layers))

    def blocks(self, length: int) -> int:
        """Return the blocks that a request of `length` tokens takes."""
        held = min(self.window - 1 + self.in_flight, length)
        return self.groups * -(-length // self.block) + self.windows * (-(-held // self.block) + 1)

    def longest(self, blocks: int, most: int) -> int:
        """Return the longest request, up to `most`, that so many blocks hold; 0 if they hold none."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks(middle) + RESERVED <= blocks else (low, middle - 1)
        return low


def cache_layout(model: Model, setup: Setup) -> CacheLayout:
    """Return the KV cache layout of a model on one GPU; NotCovered if it is unknown."""
    if model.unknown:
        raise NotCovered(model.unknown)
    in_layer = layer_bytes(model, setup)
    windows = {window for window in model.windows if window}
    full_layers = model.windows.count(0)
    if not windows or (full_layers and not setup.hybrid) or (not full_layers and min(windows) >= setup.length):
        return CacheLayout(setup.block, in_layer, model.layers, 1)
    if not full_layers:
        window = f"a sliding window of {min(windows):,} tokens"
        raise NotCovered(f"all layers have {window}, which releases treat differently")
    if setup.pipeline > 1:
        raise NotCovered("sliding windows with pipeline parallelism are not covered")
    # layers with full attention and layers with a sliding window, in groups of one size
    windowed = model.layers - full_layers
    fewer, more = sorted((full_layers, windowed))
    group = more if more < fewer * 1.5 else fewer
    return CacheLayout(
        setup.block, in_layer, group, -(-full_layers // group), -(-windowed // group), min(windows), setup.in_flight
    )


def layer_bytes(model: Model, setup: Setup) -> float:
    """Return the bytes of a token in one layer on one GPU; NotCovered if they are unknown."""
    number: float = 4 if setup.float32 else 2
    settings = model.quantization or {}
    if setup.kv_dtype != "auto":
        if setup.kv_dtype not in NUMBER_BYTES:
            raise NotCovered(
                f"how many bytes --kv-cache-dtype {redaction.name(setup.kv_dtype)[:40]!r} takes is unknown to diag"
            )
        number = NUMBER_BYTES[setup.kv_dtype]
    elif settings.get("kv_cache_scheme") or settings.get("kv_cache_quant_algo"):
        raise NotCovered(
            "the model's files ask for a quantized KV cache, which not every release follows: give"
            " --kv-cache-dtype fp8 or bfloat16"
        )
    if model.latent:
        return model.latent * number  # one vector for keys and values, on every GPU
    return 2 * max(1, model.kv_heads // setup.tensor) * model.head_dim * number


Basis = Literal["exact", "estimated", "unknown"]
BY_FILES, QUANTIZED, VISION = 0.01, 0.03, 0.1
"""Error of the weights: divided by shape, quantized except a few layers, with a vision part by shape."""


@dataclass(frozen=True)
class Stage:
    """One stage of pipeline parallelism: its layers, and the bytes of its weights on one of its GPUs."""

    layers: int
    weights: ByteRange | None
    basis: Basis
    source: str


def weights(model: Model, setup: Setup) -> list[Stage]:
    """Return the weights of each stage, from the files if they are there, else from the shape.

    The weights of an unknown architecture or quantization are divided evenly at best, not at all at worst.
    """
    model = replace(model, vision=None) if setup.text_only else model
    bits = precision(model, setup.quantization, setup.float32)
    quantized_while_loading = bool(setup.quantization) and not model.quantization
    files = None if quantized_while_loading or setup.text_only else on_disk(model, setup.float32)
    if model.family and bits:
        return _by_shape(model, model.family, setup, bits, files)
    layers = -(-model.layers // setup.pipeline)
    if not files:
        source = "neither the model's shape nor its files are known: give --log"
        return [Stage(layers, None, "unknown", source)] * setup.pipeline
    bounds = ByteRange(max(files // setup.gpus - setup.offload, 0), files)
    exact = setup.gpus == 1 and not setup.offload
    return [Stage(layers, bounds, "exact" if exact else "estimated", "the *.safetensors files")] * setup.pipeline


def _by_shape(model: Model, family: Architecture, setup: Setup, bits: Precision, files: int | None) -> list[Stage]:
    """Return every stage by the shape; the bytes of the files are divided among the stages as the shape's are."""
    gpus = setup.gpus * setup.data
    known = gpus == 1 if files else bits.exact and not model.vision
    exact = bool(known) and not model.latent and not setup.offload and not bits.padded
    slack = BY_FILES if files else VISION if model.vision else BY_FILES if bits.exact else QUANTIZED
    slack = 0 if exact else slack
    shape = ", ".join(filter(None, ("the shape in config.json", bits.named)))
    source = ("the *.safetensors files" if files else shape) + (f", divided among {gpus} GPUs" if gpus > 1 else "")

    padded, ways = bits, setup.tensor * setup.data
    if bits.padded:
        # Marlin and TRT-LLM pad MXFP4 experts to a hidden size in steps of 256 and a width in steps of 128
        # (fused_moe/oracle/mxfp4.py)
        width = -(-model.config.size(family.width) // ways)
        factor = -(-model.hidden // 256) * 256 / model.hidden * (-(-width // 128) * 128 / width)
        padded = replace(bits, expert=bits.expert * factor)

    spans = stages(model, setup.pipeline)
    parts = [of_stage(model, span) for span in spans]
    total = sum(weigh(stage, bits, 1, 1) for stage in parts)
    copies = weigh([absorbed(model)], bits, setup.tensor, 1) // setup.pipeline + weigh([rotary(model)], bits, 1, 1)
    found = []
    for span, stage in zip(spans, parts, strict=True):
        low, high = (weigh(stage, width, setup.tensor, ways) for width in (bits, padded))
        if files:
            low, high = round(files * low / total), round(files * high / total)
        low, high = (max(size + copies - setup.offload, 0) for size in (low, high))
        bounds = ByteRange(round(low * (1 - slack)), round(high * (1 + slack)))
        found.append(Stage(len(span), bounds, "exact" if exact else "estimated", source))
    return found
