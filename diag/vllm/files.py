"""What a model's *.safetensors files weigh, by their heads: no tensor is read."""

import json
import re
import struct
from pathlib import Path
from typing import Any

from diag.vllm.model import Model

MOST_HEADER = 100 * 2**20
"""The format's own limit."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def on_disk(model: Model, whole: bool = False) -> int | None:
    """Bytes of the tensors that vLLM loads from *.safetensors; None where files are missing or cannot be read.

    What was not quantised is loaded as two bytes a number (four in float32), whatever the file holds.
    """
    total = 0
    for file in _files(model.folder):
        header = _header(file)
        if header is None:
            return None
        total += sum(_loaded(model, name, entry, whole) for name, entry in header.items() if name != "__metadata__")
    return total or None


def _files(folder: Path) -> list[Path]:
    """Those of the index; without one all, but not a second copy in Mistral's own format."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return sorted({folder / str(name) for name in index["weight_map"].values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        found = sorted(folder.glob("*.safetensors"))
    return [each for each in found if not each.name.startswith("consolidated")] or found


def _header(file: Path) -> dict[str, Any] | None:
    try:
        with file.open("rb") as opened:
            length = struct.unpack("<Q", opened.read(8))[0]
            found = json.loads(opened.read(length)) if length <= MOST_HEADER else None
    except (OSError, ValueError, struct.error, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _loaded(model: Model, name: str, entry: Any, whole: bool) -> int:
    number = _LAYER.search(name)
    if number and int(number[1]) >= model.layers and "vision" not in name:
        return 0  # the layers of a multi-token predictor, which only speculation loads
    if model.tied and name.endswith("lm_head.weight"):
        return 0
    try:
        start, end = entry["data_offsets"]
        size = int(end) - int(start)
        kept = {"F64": 8, "F32": 4}.get(str(entry["dtype"]), 2 if entry["dtype"] in _FLOATS else 0)
    except (KeyError, TypeError, ValueError):
        return 0
    return size if not kept or model.quantization else size // kept * (4 if whole else 2)
