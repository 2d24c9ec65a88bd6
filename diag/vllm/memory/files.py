"""What a model's *.safetensors files weigh, by their heads: no tensor is read."""

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

from diag.core.files import opened, read_bytes
from diag.vllm.memory.model import Model

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
    """Whether a tensor lies in the file, which may have been cut off."""
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
