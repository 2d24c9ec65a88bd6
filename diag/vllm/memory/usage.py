"""GPU memory of weights, activations and KV-cache blocks: from files or shape, as exact numbers or bounds."""

import os
import re
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from diag.core.files import opened, parse_json, read_json
from diag.core.formatting import GIB
from diag.vllm.command import redaction
from diag.vllm.memory.model import Model
from diag.vllm.memory.quantization import Precision, precision
from diag.vllm.memory.setup import Setup
from diag.vllm.memory.weights import absorbed, encoders, of_stage, rotary, stages, unused, weigh


@dataclass(frozen=True)
class ByteRange:
    """Bytes, at least and at most; `likely` is the central estimate, None for the middle; `why` explains the bounds."""

    low: int
    high: int
    likely: int | None = field(default=None, compare=False)
    why: str = field(default="", compare=False, kw_only=True)

    @property
    def central(self) -> int:
        return (self.low + self.high) // 2 if self.likely is None else self.likely

    @classmethod
    def gib(cls, bounds: tuple[float, ...], why: str = "") -> Self:
        """Return a range of GiB: least, most and perhaps likely."""
        return cls(*(round(bound * GIB) for bound in bounds), why=why)

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
_PREDICTOR = re.compile(r"(?:^|\.)mtp\.")
_ENCODER = re.compile(r"vision|visual|audio|encoder")


def indexed(folder: Path) -> frozenset[str]:
    """Return the names of the weight files that the model's index lists; none without an index that can be read."""
    listed = folder / "model.safetensors.index.json"
    try:
        index = read_json(listed, MOST_HEADER) if listed.is_file() else {}
        return frozenset(map(str, index["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return frozenset()


def on_disk(model: Model, float32: bool = False) -> int | None:
    """Return the bytes of the tensors that vLLM loads from *.safetensors; None if files are missing or unreadable.

    Numbers that are not quantized are loaded as two bytes (four in float32), whatever the file holds.
    """
    files = sorted(model.folder / name for name in indexed(model.folder))
    if not files:
        every = sorted(model.folder.glob("*.safetensors"))
        # "consolidated" is a second copy in Mistral's own format
        files = [file for file in every if not file.name.startswith("consolidated")] or every

    total = 0
    for file in files:
        header = _header(file)
        if header is None:
            return None
        for name, entry in header.items():
            number = _LAYER.search(name)
            is_later = number and 0 < model.layers <= int(number[1]) and not _ENCODER.search(name)
            if is_later or _PREDICTOR.search(name):
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
            tensors = parse_json(stream.read(length)) if length <= min(MOST_HEADER, room) else None
        if not isinstance(tensors, dict):
            return None
        tensors.pop("__metadata__", None)
        for entry in tensors.values():
            start, end = entry["data_offsets"]
            if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end <= room - length):
                return None
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None
    return tensors


Basis = Literal["exact", "estimated", "unknown"]
BY_FILES, QUANTIZED, DOUBT, ENCODER = 0.01, 0.02, 0.1, 0.3
LOADED = 0.004, 0.01, 96 * 2**20
"""Weights are logged with so much less, so much more, and bytes beside: the most that torch had while loading them."""
"""Error of the weights: divided by shape, quantized except a few layers, of an unknown architecture; of encoders."""


_HOPPER, _HOPPER_PADS = 9.0, 0.7
"""Share of MXFP4's padding on Hopper, whose kernels pad one side: 64.38 GiB for gpt-oss 120B, 60.8 without, 65.9 with
both."""


@dataclass(frozen=True)
class Stage:
    """One stage of pipeline parallelism: its layers, and the bytes of its weights on one of its GPUs."""

    layers: range
    weights: ByteRange | None
    basis: Basis
    source: str


def weights(model: Model, setup: Setup) -> list[Stage]:
    """Return the weights of each stage, from the files if they are there, else from the shape.

    The weights of an unknown architecture or quantization are divided evenly at best, not at all at worst.
    """
    model = replace(model, encoders={}) if setup.text_only else model
    bits = precision(model.quantization or {}, setup.quantization, setup.float32)
    quantized_while_loading = bool(setup.quantization) and not model.quantization
    files = None if quantized_while_loading or setup.text_only else on_disk(model, setup.float32)
    if model.stack and bits:
        return _by_shape(model, setup, bits, files)
    spans = stages(model, setup.pipeline)
    if not files:
        named = (model.quantization or {}).get("quant_method") or setup.quantization
        method = f"diag does not know the bits of the quantization {redaction.name(str(named))[:40]!r}"
        why = method if model.stack and not bits else "neither the model's shape nor its files are known"
        return [Stage(span, None, "unknown", f"{why}: give --log") for span in spans]
    bounds = ByteRange(max(files // setup.gpus - setup.offload, 0), files)
    basis: Basis = "exact" if setup.gpus == 1 and not setup.offload else "estimated"
    return [Stage(span, bounds, basis, "the *.safetensors files") for span in spans]


def _by_shape(model: Model, setup: Setup, bits: Precision, files: int | None) -> list[Stage]:
    """Return every stage by the shape; the bytes of the files are divided among the stages as the shape's are."""
    gpus = setup.gpus * setup.data
    is_known = gpus == 1 if files else bits.exact and not model.encoders and not model.doubt
    slack = BY_FILES if files or (bits.exact and not model.doubt) else DOUBT if model.doubt else QUANTIZED
    slack = 0 if is_known and not (model.latent or setup.offload or bits.padded) else slack
    doubtful = 0 if files else round(encoders(model).elements * 2 * ENCODER / setup.tensor)
    origin = "the shape of that name" if model.facts else "the shape in config.json"
    shape = ", ".join(filter(None, (origin, bits.named)))
    source = ("the *.safetensors files" if files else shape) + (f", divided among {gpus} GPUs" if gpus > 1 else "")

    padded, ways = bits, setup.tensor * setup.data
    if bits.padded and model.experts:
        # Marlin and TRT-LLM pad MXFP4 experts to a hidden size in steps of 256 and a width in steps of 128
        # (fused_moe/oracle/mxfp4.py)
        width = -(-model.experts.width // ways)
        factor = -(-model.hidden // 256) * 256 / model.hidden * (-(-width // 128) * 128 / width)
        padded = replace(bits, expert=bits.expert * factor)

    spans = stages(model, setup.pipeline)
    parts = [of_stage(model, span) for span in spans]
    other = replace(model, unquantized=model.loose) if model.loose.patterns else model
    most_of = [of_stage(other, span) for span in spans]
    total = sum(weigh(stage, bits, 1, 1) for stage in parts)
    copies = weigh([absorbed(model)], bits, setup.tensor, 1) // setup.pipeline + weigh([rotary(model)], bits, 1, 1)
    rows = []
    for span, stage, loosest in zip(spans, parts, most_of, strict=True):
        low, high = (weigh(stage, width, setup.tensor, ways) for width in (bits, padded))
        if files:
            low, high = round(files * low / total), round(files * high / total)
        ends = unused(model, span, bits, setup.tensor, ways) if bits.exact else 0
        low, high = (max(size + copies + ends - setup.offload, 0) for size in (low, high))
        beside = doubtful if span.start == 0 else 0
        loose = weigh(loosest, padded, setup.tensor, ways) - weigh(stage, padded, setup.tensor, ways)
        likely = round(low + (high - low) * (_HOPPER_PADS if setup.capability == _HOPPER else 1))
        least, most, more = (slack, slack, 0) if files else (max(slack, LOADED[0]), max(slack, LOADED[1]), LOADED[2])
        bounds = ByteRange(round(low * (1 - least)) - beside, round(high * (1 + most)) + beside + more + loose, likely)
        rows.append(Stage(span, bounds, "exact" if bounds.low == bounds.high else "estimated", source))
    return rows
