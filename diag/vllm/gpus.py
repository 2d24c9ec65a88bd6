"""GPUs by name: their memory, bandwidth, arithmetic, links and power, each from its vendor's data sheet (gpus.toml)."""

import difflib
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from diag.core.errors import BadUsage
from diag.core.formatting import GIB

_ALIASES = {"a100": "a100-80", "v100": "v100-16", "3090": "rtx3090", "4090": "rtx4090", "5090": "rtx5090"}
_WITHOUT_SHEET = {"h20": 9.0, "h800": 9.0}
"""CUDA's compute capability of GPUs that have no public data sheet."""
_BRANDS = ("nvidia", "amd", "tesla", "instinct", "geforce")


class GpuModel(NamedTuple):
    """One GPU: `memory` in bytes as CUDA counts it, bandwidths in bytes/s, `flops` dense in 1/s by type of number.

    `nvlink` (0 without) and `pcie` are both directions together; NVLink joins at most `nvlink_gpus`. `flops` has bf16,
    which is also float16, and fp8, int8 and fp4 where the tensor cores have them. `watts` is the power limit.
    """

    name: str
    memory: int
    bandwidth: float
    flops: Mapping[str, float]
    nvlink: float
    nvlink_gpus: int
    pcie: float
    watts: float
    capability: float
    source: str


@cache
def gpus() -> Mapping[str, GpuModel]:
    """All of them by the name that --gpu takes."""
    return {name: _gpu(name, row) for name, row in _rows().items()}


@cache
def _rows() -> dict[str, dict[str, object]]:
    return tomllib.loads((files("diag.vllm") / "gpus.toml").read_text(encoding="utf-8"))


def _gpu(name: str, row: Mapping[str, object]) -> GpuModel:
    fields = {field: row[field] for field in ("watts", "capability", "source")}
    giga = {field: float(row[field]) * 1e9 for field in ("bandwidth", "nvlink", "pcie")}  # type: ignore[arg-type]
    flops = {kind: tera * 1e12 for kind, tera in row["tflops"].items()}  # type: ignore[attr-defined]
    joined = int(row.get("nvlink_gpus", 0))  # type: ignore[call-overload]
    memory = round(float(row["memory"]) * GIB)  # type: ignore[arg-type]
    return GpuModel(name=name, memory=memory, flops=flops, nvlink_gpus=joined, **giga, **fields)  # type: ignore[arg-type]


@cache
def _by_product() -> Mapping[str, str]:
    """The name of a GPU by what NVML or ROCm call the product."""
    return {_normalized(str(product)): name for name, row in _rows().items() for product in row["nvml"]}  # type: ignore[attr-defined]


def find(name: str) -> GpuModel | None:
    """A GPU by its name, h100 or "NVIDIA H100 80GB HBM3"; None where it is not known, or a part of one (MIG)."""
    key = _normalized(name)
    return gpus().get(_by_product().get(key) or _ALIASES.get(key, key))


def named(name: str) -> GpuModel:
    """Find a GPU by its name; BadUsage with the known names if there is none."""
    found = find(name)
    if found:
        return found
    near = difflib.get_close_matches(_normalized(name), gpus(), n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(gpus())}"
    raise BadUsage(f"unknown GPU {name[:60]!r} ({hint})")


def memory(name: str) -> int:
    """Bytes of a GPU by its name; BadUsage with the names that are known."""
    try:
        return named(name).memory
    except BadUsage as error:
        raise BadUsage(f"{error}: give its memory with --gpu-memory 79.1GiB") from error


def capability(name: str) -> float:
    """CUDA's compute capability of a GPU, or of a part of one, by its name; 0 where it is not known."""
    found, family = find(name), _normalized(name).partition("-")[0]
    if found:
        return found.capability
    kin = (gpu.capability for gpu in gpus().values() if gpu.name.partition("-")[0] == family)
    return next(kin, _WITHOUT_SHEET.get(family, 0.0))


def _normalized(name: str) -> str:
    words = [word for word in name.lower().split() if word not in _BRANDS]
    return "-".join(words).replace("rtx-", "rtx").replace("pro-6000", "pro6000")
