"""How much memory a GPU has for a process: what CUDA calls the total, as vLLM and torch print it.

It is less than advertised: an "80 GB" card has 79.1 GiB, since the driver and error correction take some. Of several
reports the lowest one counts; cards differ by a few tens of MiB.
"""

import difflib
from collections.abc import Mapping

from diag.core.errors import BadUsage
from diag.core.sizes import GIB

SIZES: Mapping[str, float] = {
    "a10g": 22.03,
    "a100-40": 39.38,
    "a100-80": 79.14,
    "b200": 178.35,
    "h100": 79.10,
    "h200": 139.72,
    "l4": 22.03,
    "l40s": 44.42,
    "mi300x": 191.69,
    "rtx3090": 23.56,
    "rtx4090": 23.53,
    "rtx5090": 31.36,
    "rtx6000-ada": 47.40,
    "rtxpro6000": 94.96,
    "t4": 14.56,
    "v100-16": 15.77,
}
"""Gibibytes by name: "GPU 0 has a total capacity of 79.10 GiB", "total_gpu_memory (15.77GiB)" in public reports."""
CAPABILITIES: Mapping[str, float] = {
    **{"v100": 7.0, "t4": 7.5, "a100": 8.0},
    **dict.fromkeys(("a10", "a10g", "a40", "a6000", "rtx3090"), 8.6),
    **dict.fromkeys(("l4", "l40", "l40s", "rtx4090"), 8.9),
    **dict.fromkeys(("h100", "h200", "h20", "h800", "gh200"), 9.0),
    **dict.fromkeys(("b200", "gb200"), 10.0),
    **dict.fromkeys(("rtx5090", "rtxpro6000"), 12.0),
}
"""CUDA's compute capability by name (https://developer.nvidia.com/cuda-gpus)."""
_ALIASES = {"a100": "a100-80", "a10": "a10g", "4090": "rtx4090", "3090": "rtx3090", "5090": "rtx5090"}


def memory(name: str) -> int:
    """Bytes of a GPU by its name, h100 or "NVIDIA L40S"; BadUsage with the names that are known."""
    key = _normalized(name)
    found = SIZES.get(_ALIASES.get(key, key))
    if found is not None:
        return round(found * GIB)
    near = difflib.get_close_matches(key, SIZES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(SIZES)}"
    raise BadUsage(f"unknown GPU {name[:60]!r} ({hint}): give its memory with --gpu-memory 79.1GiB")


def capability(name: str) -> float:
    """CUDA's compute capability of a GPU by its name, h100 or "NVIDIA H100 80GB HBM3"; 0 where it is not known."""
    key = _normalized(name).removeprefix("tesla-")
    known = CAPABILITIES.get(_ALIASES.get(key, key)) or CAPABILITIES.get(key.partition("-")[0])
    return known or 0


def _normalized(name: str) -> str:
    plain = name.lower().removeprefix("nvidia").strip().replace(" ", "-").removeprefix("geforce-")
    return plain.replace("rtx-", "rtx").replace("pro-6000", "pro6000")
