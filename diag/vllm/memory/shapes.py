"""Models by name: the config facts of models that people serve (models.json), for a name without a config.json here.

A row has the repository as its key, its `source`, and the `config` fields that describe its shape, or `like` and the
repository whose shape it has. `bench/models.py` refreshes rows.
"""

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple

from diag.core.declarations import PACKAGE

_NOISE = frozenset(
    ("instruct", "it", "chat", "hf", "base", "meta", "thinking", "reasoning", "bf16", "inst", "pt", "preview", "think")
)
"""Words of a name that do not change the shape."""
_GROUPED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
_FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


def _compressed(weights: Mapping[str, object]) -> Mapping[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": groups}


_GPTQ = {"quant_method": "gptq", "group_size": 128, "sym": True, "desc_act": False}
_FORMATS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    (r"nvfp4|fp4", "NVFP4", {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}),
    (r"mxfp4", "MXFP4", {"quant_method": "mxfp4"}),
    (r"awq\b.*(int8|8bit)", "8-bit integers", _compressed(_INT8)),
    (r"awq", "AWQ, 4 bits in groups of 128", {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}),
    (r"gptq\b.*(int8|8bit)", "GPTQ, 8 bits", {**_GPTQ, "bits": 8}),
    (r"gptq", "GPTQ, 4 bits in groups of 128", {**_GPTQ, "bits": 4}),
    (r"autoround|auto-round", "AutoRound, 4 bits", {**_GPTQ, "quant_method": "auto-round", "bits": 4}),
    (r"bnb", "bitsandbytes, 4 bits", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    (r"w4a16|int4", "4-bit integers in groups of 128", _compressed(_GROUPED)),
    (r"w8a8|w8a16|int8", "8-bit integers", _compressed(_INT8)),
    (r"fp8", "FP8", _compressed(_FLOAT8)),
)
"""Quantized formats by the words of a name: as published checkpoints of that name usually are."""
_FORMAT_WORDS = re.compile(
    r"(nvfp4|fp4|mxfp4|awq|gptq|auto|round|autoround|bnb|4bit|8bit|w4a16|w8a8|w8a16|int4|int8|fp8|dynamic|block|"
    r"quantized|marlin|static|pertensor|sym)"
)
_UNREADABLE = re.compile(r"\b(gguf|exl2|exl3|mlx|onnx)\b")
_IRREGULAR = ("NVFP4", "MXFP4", "AutoRound, 4 bits")
"""Formats whose checkpoints differ in the modules that they leave in 16 bits."""


class NamedShape(NamedTuple):
    """Config facts found by a name: the row's repository, its source, the fields, and what the name adds to them.

    `format` is the quantization that only the name states; `irregular` is True if such checkpoints differ in the
    modules that stay in 16 bits.
    """

    repository: str
    source: str
    config: Mapping[str, Any]
    format: str = ""
    irregular: bool = False

    @property
    def note(self) -> str:
        """Return the sentence about the origin of the facts."""
        added = f"; its weights are taken for {self.format}, as the name says" if self.format else ""
        return f"no config.json is here: the shape is that of {self.repository} (source: {self.source}){added}"


@cache
def _rows() -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = json.loads(
        (PACKAGE / "vllm" / "memory" / "models.json").read_text(encoding="utf-8")
    )
    return found


def repositories() -> tuple[str, ...]:
    """Return the repositories whose shapes are known."""
    return tuple(_rows())


def _fields(repository: str) -> Mapping[str, Any]:
    row = _rows()[repository]
    inherited = _fields(row["like"]) if "like" in row else {}
    fields = {**inherited, **row.get("config", {})}
    return {name: value for name, value in fields.items() if value is not None}


def _key(name: str) -> str:
    """Return what is left of a name without its owner, separators and the words that do not change the shape."""
    words = re.split(r"[-_:\s]+", name.rpartition("/")[2].lower())
    return "".join(word for word in words if word not in _NOISE).replace(".", "")


@cache
def _index() -> Mapping[str, str]:
    """Return the repositories by their whole names, their last parts, and their keys; the first of a kind counts."""
    found: dict[str, str] = {}
    for spelled in (str.lower, lambda name: name.rpartition("/")[2].lower(), _key):
        for repository in _rows():
            found.setdefault(spelled(repository), repository)
    return found


def find_shape(name: str) -> NamedShape | None:
    """Find a model by its repository, by its name under another owner, or by a near spelling; None if it is unknown."""
    if re.match(r"[./~]|\w+://", name) or name.count("/") > 1 or _UNREADABLE.search(name.lower()):
        return None
    for spelling in (name.lower(), name.rpartition("/")[2].lower(), _key(name)):
        if repository := _index().get(spelling):
            return NamedShape(repository, _rows()[repository]["source"], _fields(repository))
    plain = _without_format(name)
    if plain == name or not (found := find_shape(plain)):
        return None
    words, own = name.rpartition("/")[2].lower().replace("_", "-"), found.config.get("quantization_config", {})
    label, settings = next((label, own) for pattern, label, own in _FORMATS if re.search(pattern, words))
    if "fp8" in str(own.get("quant_method")) and label == "FP8":
        return found
    if label == "MXFP4" and own.get("quant_method") == "mxfp4":
        return found
    config = {**found.config, "quantization_config": settings}
    return found._replace(config=config, format=label, irregular=label in _IRREGULAR)


def _without_format(name: str) -> str:
    """Return a name without the words of its quantization; the name itself if it has none."""
    owner, slash, last = name.rpartition("/")
    words = re.split(r"[-_]", last)
    kept = [word for word in words if not re.fullmatch(_FORMAT_WORDS.pattern + r"(\.\w+)?", word.lower())]
    has_format = any(re.search(pattern, last.lower().replace("_", "-")) for pattern, _, _ in _FORMATS)
    return f"{owner}{slash}{'-'.join(kept)}" if has_format and len(kept) < len(words) and kept else name


def closest(name: str) -> str:
    """Return the repository with the closest name, "" if none is close."""
    keys, wanted = (
        {_key(repository): repository for repository in reversed(repositories())},
        _key(_without_format(name)),
    )
    near = [key for key in sorted(keys) if wanted and key.startswith(wanted)] or get_close_matches(wanted, keys, n=1)
    return keys[near[0]] if near else ""
