"""Models whose config.json or weight files a test changes."""

import json
import os
import struct
from pathlib import Path

from support.paths import MODELS

from diag.vllm.memory.model import Model, read


def changed(folder: Path, name: str = "llama-3-8b", **fields: object) -> Model:
    """A model of the data with other fields; ... takes one out."""
    found = json.loads((MODELS / name / "config.json").read_text()) | fields
    kept = {field: value for field, value in found.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return read(folder)


def tensors(file: Path, **sizes: tuple[str, int]) -> None:
    """A safetensors file with tensors of these types and bytes; all behind its head is a hole."""
    at, header = 0, {}
    for name, (kind, size) in sizes.items():
        header[name.replace("__", ".")] = {"dtype": kind, "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(file, 8 + len(text) + at)
