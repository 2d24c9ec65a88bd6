"""GPUs by name: their memory, bandwidth, arithmetic, links and power, each from its vendor's data sheet (gpus.toml)."""

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Annotated, NamedTuple

from diag.core.declarations import PACKAGE, did_you_mean, read
from diag.core.errors import BadUsage
from diag.core.formatting import GIB

_BRANDS = ("nvidia", "amd", "tesla", "instinct", "geforce", "radeon")


class GpuModel(NamedTuple):
    """One GPU: `memory` in bytes as CUDA counts it, bandwidths in bytes/s, `flops` dense in 1/s by type of number.

    The numbers of the file are multiplied by the factors of the annotations. `nvml` are the names of the product.
    `nvlink` (0 without) and `pcie` are both directions together; NVLink joins at most `nvlink_gpus`, tensor
    parallelism `joined`, those of one host unless `host` says how many it has. `flops` has bf16, also for float16, and
    fp8, int8 and fp4 if the tensor cores have them. `watts` is the power limit. `machines` are the beginnings of the
    names of machines with it.
    """

    name: str
    nvml: tuple[str, ...]
    memory: Annotated[int, GIB]
    bandwidth: Annotated[float, 1e9]
    flops: Mapping[str, Annotated[float, 1e12]]
    nvlink: Annotated[float, 1e9]
    pcie: Annotated[float, 1e9]
    watts: float
    capability: float
    source: str
    nvlink_gpus: int = 0
    joined: int = 8
    host: int = 0
    aliases: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()


class BareGpu(NamedTuple):
    """A GPU without a data sheet here: CUDA's compute capability, and its memory in bytes."""

    name: str
    capability: float
    memory: Annotated[int, GIB]


@cache
def gpus() -> Mapping[str, GpuModel]:
    """Return all GPUs by the name that --gpu takes."""
    return read(PACKAGE / "vllm" / "gpus.toml", dict[str, GpuModel])


@cache
def bare_gpus() -> Mapping[str, BareGpu]:
    """Return the GPUs whose ceilings are not computed."""
    return read(PACKAGE / "vllm" / "gpus_without_sheet.toml", dict[str, BareGpu])


@cache
def _aliases() -> Mapping[str, str]:
    return {alias: gpu.name for gpu in gpus().values() for alias in gpu.aliases}


@lru_cache(maxsize=256)
def find(name: str) -> GpuModel | None:
    """Find a GPU by its name, h100 or "NVIDIA H100 80GB HBM3"; None if it is unknown or a part of a GPU (MIG)."""
    key = _normalized(name)
    product = next((gpu.name for gpu in gpus().values() if key in map(_normalized, gpu.nvml)), None)
    if gpu := gpus().get(product or _aliases().get(key, key)):
        return gpu
    words = key.split("-")  # more than its own, "A100 80GB", if the memory in them is that of the GPU
    size = next((int(word[:-2]) for word in words if re.fullmatch(r"\d{2,3}gb", word)), 0)
    if "mig" in words or "(" in key or (not size and not {"blackwell"} & set(words)):
        return None
    kin = [gpu for gpu in gpus().values() if gpu.name.split("-")[0] == words[0]]
    return next((gpu for gpu in kin if not size or 0.85 * size * GIB < gpu.memory < size * GIB), None)


def of_machine(words: str) -> GpuModel | None:
    """Find the GPU that words such as g5.12xlarge or nvidia-tesla-t4 name, the largest of its name; None if unclear."""
    found = set[str]()
    for word in words.lower().split():
        by_machine = (gpu for gpu in gpus().values() if re.match(rf"(?:{'|'.join(gpu.machines or '-')})[.-]", word))
        gpu = next(by_machine, None) or find(word)
        if gpu:
            sizes = [gpu, *(gpus()[name] for name in other_sizes(word))]
            found.add(max(sizes, key=lambda one: one.memory).name)
    return gpus()[found.pop()] if len(found) == 1 else None


def named(name: str) -> GpuModel:
    """Find a GPU by its name, one without a sheet with speeds of 0; BadUsage with the known names if there is none."""
    if gpu := find(name):
        return gpu
    if bare := _without_sheet(name):
        joined = 1 if is_part(name) else 8
        return GpuModel(bare.name, (), bare.memory, 0, {}, 0, 0, 0, bare.capability, "", joined=joined)
    hint = did_you_mean(_normalized(name), gpus()) or f" (known: {', '.join(gpus())})"
    raise BadUsage(f"unknown GPU {name[:60]!r}{hint}")


def memory(name: str) -> int:
    """Return the bytes of a GPU by its name; BadUsage with the known names if there is none."""
    try:
        return named(name).memory
    except BadUsage as error:
        raise BadUsage(f"{error}: give its memory with --gpu-memory 79.1GiB") from error


def other_sizes(name: str) -> tuple[str, ...]:
    """Return the names of GPUs of other sizes that a name without a size, "a100", may mean too; () for a clear name."""
    key = _normalized(name)
    taken = gpus().get(_aliases().get(key, ""))
    kin = (gpu for gpu in gpus().values() if gpu.name.startswith(f"{key}-"))
    return tuple(gpu.name for gpu in kin if taken and gpu.memory != taken.memory)


def capability(name: str) -> float:
    """Return CUDA's compute capability of a GPU, or of a part of one, by its name; 0 if it is unknown."""
    family = _normalized(name).partition("-")[0]
    kin = next((gpu for gpu in gpus().values() if gpu.name.partition("-")[0] == family), None)
    gpu = find(name) or kin or _without_sheet(name)
    return gpu.capability if gpu else 0.0


def is_part(name: str) -> bool:
    """Return True for the name of a part of a GPU (MIG), which NCCL does not join with others."""
    return bool(re.search(r"\dg\.\d+gb", name.lower()))


def is_amd(name: str) -> bool:
    """Return True for a GPU of AMD by its name."""
    return bool(re.search(r"\bmi\d{2,3}|amd|radeon", name.lower()))


def _without_sheet(name: str) -> BareGpu | None:
    key, bare = _normalized(name).replace("-ti", "ti"), bare_gpus()
    if part := re.fullmatch(r"([a-z]+\d+)-(?:.*-)?(\dg\.\d+gb)(?:\+me)?", key):  # of a MIG name
        return bare.get("-".join(part.groups()))
    return bare.get(key) or bare.get(key.removeprefix("rtx")) or bare.get(key.partition("-")[0])


def visible_gpus(environment: Mapping[str, str]) -> str | None:
    """Return the GPUs that the variables of a process leave visible, as indices or UUIDs; None if all are.

    HIP reads HIP_VISIBLE_DEVICES, else CUDA_VISIBLE_DEVICES, and counts among those that ROCR_VISIBLE_DEVICES leaves.
    """
    chosen = environment.get("HIP_VISIBLE_DEVICES", environment.get("CUDA_VISIBLE_DEVICES"))
    left = environment.get("ROCR_VISIBLE_DEVICES")
    if left is None or chosen is None:
        return left if chosen is None else chosen
    names = [name.strip() for name in left.split(",")]
    numbers = [name.strip() for name in chosen.split(",")]
    return ",".join(names[int(at)] if at.isdigit() and int(at) < len(names) else at for at in numbers)


def _normalized(name: str) -> str:
    words = [word for word in re.split(r"[\s_-]+", name.lower()) if word not in _BRANDS]
    return "-".join(words).replace("rtx-", "rtx").replace("pro-6000", "pro6000").replace("gtx-20", "rtx20")
