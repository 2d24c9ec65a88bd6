"""GPU memory of weights, activations and KV-cache blocks: from files or shape, as exact numbers or bounds."""

import json
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from diag.core.files import opened, read_bytes
from diag.core.formatting import GIB
from diag.vllm.command import redaction
from diag.vllm.memory.model import Model
from diag.vllm.memory.setup import Setup
from diag.vllm.memory.weights import (
    Precision,
    WeightPart,
    absorbed,
    feed_forward_width,
    of_stage,
    precision,
    rotary,
    stages,
    weigh,
)


@dataclass(frozen=True)
class ByteRange:
    """Bytes, at least and at most."""

    low: int
    high: int

    @classmethod
    def gib(cls, bounds: tuple[float, float]) -> Self:
        """Convert bounds in GiB."""
        return cls(round(bounds[0] * GIB), round(bounds[1] * GIB))

    @classmethod
    def of(cls, size: int) -> Self:
        """A size that is known."""
        return cls(size, size)

    def plus(self, *others: "ByteRange") -> "ByteRange":
        """Together with others."""
        return ByteRange(self.low + sum(other.low for other in others), self.high + sum(other.high for other in others))

    def less(self, *others: "ByteRange") -> "ByteRange":
        """Subtract other amounts."""
        return ByteRange(self.low - sum(other.high for other in others), self.high - sum(other.low for other in others))


MOST_HEADER = 100 * 2**20
"""The format's own limit."""
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def on_disk(model: Model, float32: bool = False) -> int | None:
    """Bytes of the tensors that vLLM loads from *.safetensors; None where files are missing or cannot be read.

    What was not quantized is loaded as two bytes a number (four in float32), whatever the file holds.
    """
    total = 0
    for file in _files(model.folder):
        header = _header(file)
        if header is None:
            return None
        total += sum(_loaded_bytes(model, name, entry, float32) for name, entry in header.items())
    return total or None


def _files(folder: Path) -> list[Path]:
    """The files of the index; without one all of them, but not a second copy in Mistral's own format."""
    listed = folder / "model.safetensors.index.json"
    try:
        index = json.loads(read_bytes(listed, MOST_HEADER)) if listed.is_file() else {}
        return sorted({folder / str(name) for name in index["weight_map"].values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        found = sorted(folder.glob("*.safetensors"))
    return [file for file in found if not file.name.startswith("consolidated")] or found


def _header(file: Path) -> dict[str, Any] | None:
    try:
        with opened(file) as stream:
            room = os.fstat(stream.fileno()).st_size - 8
            length = struct.unpack("<Q", stream.read(8))[0]
            found = json.loads(stream.read(length)) if length <= min(MOST_HEADER, room) else None
    except (OSError, ValueError, struct.error, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    found.pop("__metadata__", None)
    return found if all(_within(entry, room - length) for entry in found.values()) else None


def _within(entry: Any, room: int) -> bool:
    """Return True if a tensor lies within the file, which may be truncated."""
    try:
        start, end = entry["data_offsets"]
        return isinstance(start, int) and isinstance(end, int) and 0 <= start <= end <= room
    except (KeyError, TypeError, ValueError):
        return False


def _loaded_bytes(model: Model, name: str, entry: Any, float32: bool) -> int:
    number = _LAYER.search(name)
    if number and 0 < model.layers <= int(number[1]) and "vision" not in name:
        return 0  # the layers of a multi-token predictor, which only speculation loads
    if model.tied and name.endswith("lm_head.weight"):
        return 0
    start, end = map(int, entry["data_offsets"])
    kind = entry.get("dtype")
    kept = {"F64": 8, "F32": 4}.get(str(kind), 2 if kind in _FLOAT_TYPES else 0)
    return end - start if not kept or model.quantization else (end - start) // kept * (4 if float32 else 2)


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
"""Of one number in the cache, by --kv-cache-dtype; other types keep scales of their own."""
RESERVED = 1
"""The null block, which vLLM never gives to a request. 0.32 counts it when it checks that one request fits."""


class NotCovered(Exception):
    """The KV cache of this model or with these flags cannot be computed; the message says why."""


@dataclass(frozen=True)
class CacheLayout:
    """How many blocks a request takes, and how many bytes a block is on one GPU.

    `layers` is the number of layers of a group; `groups` keep all tokens, `windows` the last `window` ones and those
    `in_flight`.
    """

    block: int
    layer_bytes: float
    layers: int
    groups: int
    windows: int = 0
    window: int = 0
    in_flight: int = 0

    def block_bytes(self, layers: int | None = None) -> int:
        """Bytes of a block on a GPU that has `layers` of a group's layers."""
        return round(self.layer_bytes * self.block * (self.layers if layers is None else layers))

    def blocks(self, length: int) -> int:
        """How many a request of that many tokens takes."""
        held = min(self.window - 1 + self.in_flight, length)
        return self.groups * -(-length // self.block) + self.windows * (-(-held // self.block) + 1)

    def longest(self, blocks: int, most: int) -> int:
        """The longest request, up to `most`, that so many blocks hold; 0 where they hold none."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks(middle) + RESERVED <= blocks else (low, middle - 1)
        return low


def cache_layout(model: Model, setup: Setup) -> CacheLayout:
    """The KV cache of a model on one GPU; NotCovered where it is not known."""
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
    return _hybrid_layout(setup, in_layer, full_layers, model.layers - full_layers, min(windows))


def layer_bytes(model: Model, setup: Setup) -> float:
    """Bytes of a token in one layer on one GPU."""
    number = _number_bytes(model, setup)
    if model.latent:
        return model.latent * number  # one vector for keys and values, on every GPU
    return 2 * max(1, model.kv_heads // setup.tensor) * model.head_dim * number


def _hybrid_layout(setup: Setup, layer_bytes: float, full: int, windowed: int, window: int) -> CacheLayout:
    """Layers with full attention and layers with a sliding window, in groups of one size."""
    fewer, more = sorted((full, windowed))
    group = more if more < fewer * 1.5 else fewer
    return CacheLayout(
        setup.block, layer_bytes, group, -(-full // group), -(-windowed // group), window, setup.in_flight
    )


def _number_bytes(model: Model, setup: Setup) -> float:
    """Bytes of one number in the cache."""
    if setup.kv_dtype != "auto":
        if setup.kv_dtype not in NUMBER_BYTES:
            raise NotCovered(
                f"how many bytes --kv-cache-dtype {redaction.name(setup.kv_dtype)[:40]!r} takes is unknown to diag"
            )
        return NUMBER_BYTES[setup.kv_dtype]
    settings = model.quantization or {}
    if settings.get("kv_cache_scheme") or settings.get("kv_cache_quant_algo"):
        raise NotCovered(
            "the model's files ask for a quantized KV cache, which not every release follows: give"
            " --kv-cache-dtype fp8 or bfloat16"
        )
    return 4 if setup.float32 else 2


Basis = Literal["exact", "estimated", "unknown"]
BY_FILES, QUANTIZED, VISION = 0.01, 0.03, 0.1
"""By how much weights may be off: divided by shape, quantized but for a few layers, with a vision part by shape."""


@dataclass(frozen=True)
class Stage:
    """One stage of pipeline parallelism: its layers, and what its weights take of one of its GPUs."""

    layers: int
    weights: ByteRange | None
    basis: Basis
    source: str


def weights(model: Model, setup: Setup) -> list[Stage]:
    """Stage by stage; from the files where they are there, from the shape otherwise."""
    model = replace(model, vision=None) if setup.text_only else model
    bits = precision(model, setup.quantization, setup.float32)
    quantized_while_loading = bool(setup.quantization) and not model.quantization
    files = None if quantized_while_loading or setup.text_only else on_disk(model, setup.float32)
    if not (model.family and bits):
        return [_by_files_alone(model, setup, files)] * setup.pipeline
    return _by_shape(model, setup, bits, files)


def _by_shape(model: Model, setup: Setup, bits: Precision, files: int | None) -> list[Stage]:
    """Every stage as the shape says; what the files weigh is divided among them."""
    spans = stages(model, setup.pipeline)
    parts = [of_stage(model, span) for span in spans]
    total = sum(weigh(stage, bits, 1, 1) for stage in parts)
    copies = weigh([absorbed(model)], bits, setup.tensor, 1) // setup.pipeline + weigh([rotary(model)], bits, 1, 1)

    known = setup.gpus * setup.data == 1 if files else bits.exact and not model.vision
    exact = bool(known) and not model.latent and not setup.offload and not bits.padded
    slack = BY_FILES if files else VISION if model.vision else BY_FILES if bits.exact else QUANTIZED
    slack = 0 if exact else slack
    shape = ", ".join(filter(None, ("the shape in config.json", bits.named)))
    gpus = setup.gpus * setup.data
    source = ("the *.safetensors files" if files else shape) + (f", divided among {gpus} GPUs" if gpus > 1 else "")

    padded = replace(bits, expert=bits.expert * _padding(model, setup.tensor * setup.data)) if bits.padded else bits
    found = []
    for span, stage in zip(spans, parts, strict=True):
        low, high = (
            max(_share(stage, width, setup, files, total) + copies - setup.offload, 0) for width in (bits, padded)
        )
        bounds = ByteRange(round(low * (1 - slack)), round(high * (1 + slack)))
        found.append(Stage(len(span), bounds, "exact" if exact else "estimated", source))
    return found


def _padding(model: Model, ways: int) -> float:
    """Return the largest factor by which kernels pad MXFP4 experts that are divided `ways` ways.

    Marlin and TRT-LLM want a hidden size in steps of 256 and a width in steps of 128 (fused_moe/oracle/mxfp4.py).
    """
    share = -(-model.config.size(model.family.width) // ways) if model.family else 1
    return -(-model.hidden // 256) * 256 / model.hidden * (-(-share // 128) * 128 / share)


def _share(parts: Sequence[WeightPart], bits: Precision, setup: Setup, files: int | None, total: int) -> int:
    """Bytes on one GPU of a stage; what the files weigh is divided as the shape says."""
    own = weigh(list(parts), bits, setup.tensor, setup.tensor * setup.data)
    return round(files * own / total) if files else own


def _by_files_alone(model: Model, setup: Setup, files: int | None) -> Stage:
    """Bound the weights of an unknown architecture or quantization: divided evenly at best, not at all at worst."""
    layers = -(-model.layers // setup.pipeline)
    if not files:
        return Stage(layers, None, "unknown", "neither the model's shape nor its files are known: give --log")
    least = max(files // setup.gpus - setup.offload, 0)
    exact = setup.gpus == 1 and not setup.offload
    return Stage(layers, ByteRange(least, files), "exact" if exact else "estimated", "the *.safetensors files")


def activations(model: Model, setup: Setup) -> ByteRange:
    """Peak memory of the profiling run: a step of --max-num-batched-tokens, or sampling for all sequences.

    At least the residual stream with the inner products of one dense feed-forward layer, or one float32 logit each. At
    most twice that, a mixture of experts' copies, and the logits eight times over: to cut off by top-p and top-k the
    sampler keeps them beside a copy, sorted, with 64-bit indices, as probabilities and as their sums.
    """
    number = 4 if setup.float32 else 2
    inner = 3 * feed_forward_width(model) // setup.tensor
    sure = setup.batched_tokens * number * (2 * model.hidden + (0 if model.family and model.family.experts else inner))
    logits = 4 * min(setup.sequences, setup.batched_tokens) * model.vocabulary
    copies, family = 0, model.family  # a stream for each expert that processes the token
    if family and family.experts:
        active = model.config.size("num_experts_per_tok", 1)
        copies = active * (model.hidden + 3 * model.config.size(family.width) // setup.tensor)
    most = setup.batched_tokens * number * (2 * (2 * model.hidden + inner) + copies)
    return ByteRange(max(sure, logits), most + 8 * logits)
