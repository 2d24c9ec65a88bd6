"""Rules about the model's folder and this host's GPUs, where they are there to be looked at."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from diag.core.sizes import GIB
from diag.lint.finding import LintFinding, at_least, number, ranks, removal
from diag.vllm.command.parse import Command
from diag.vllm.flags.defaults import default
from diag.vllm.memory.model import Model

Sample = tuple[str, tuple[str, ...], float]
"""As the exporter has it: family, the values of its labels, value."""
_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_OTHER_FILES = ("params.json", "*.gguf")
"""A model in Mistral's or llama.cpp's own format needs no config.json."""


@dataclass(frozen=True)
class HostGpu:
    """One GPU: memory in bytes, and how many processes are on it."""

    index: str
    name: str
    total: float
    free: float
    users: int = 0


@dataclass(frozen=True)
class HostGpus:
    """The GPUs that the server would see, in their order; `paths` has "nvlink", "sys" ... by pairs of indices."""

    gpus: tuple[HostGpu, ...]
    paths: Mapping[tuple[str, str], str]


def host(samples: Iterable[Sample]) -> HostGpus:
    """The GPUs in what the exporter's collector found."""
    by = [(family.removeprefix("diag_gpu_"), labels, value) for family, labels, value in samples]
    names = {labels[0]: labels[2] for family, labels, _ in by if family == "info"}
    bytes_ = {(family, labels[0]): value for family, labels, value in by if family.startswith("memory_")}
    users = [labels[0] for family, labels, _ in by if family == "process_memory_bytes"]
    gpus = tuple(
        HostGpu(at, name, bytes_["memory_total_bytes", at], bytes_["memory_free_bytes", at], users.count(at))
        for at, name in names.items()
        if {("memory_total_bytes", at), ("memory_free_bytes", at)} <= bytes_.keys()
    )
    return HostGpus(gpus, {(labels[0], labels[1]): labels[2] for family, labels, _ in by if family == "peer_info"})


def is_without_config(folder: Path) -> bool:
    """Whether it is a folder that vLLM cannot serve a model from."""
    files = ("config.json", *_OTHER_FILES)
    return folder.is_dir() and not any(True for pattern in files for _ in folder.glob(pattern))


def without_config(folder: str) -> LintFinding:
    """The finding for such a folder."""
    return LintFinding(
        "no_config",
        "error",
        f"the folder {folder} has no config.json",
        "vLLM reads the model's architecture from it and does not start without",
        "name the folder that holds config.json, or a model's id",
    )


def of_model(command: Command, version: str, model: Model) -> Iterator[LintFinding]:
    """What the model's own numbers refuse."""
    tensor = ranks(command, "--tensor-parallel-size")
    if model.heads % tensor:
        able = [each for each in range(1, min(tensor, model.heads + 1)) if model.heads % each == 0]
        yield LintFinding(
            "heads_do_not_divide",
            "error",
            f"--tensor-parallel-size {tensor} does not divide the model's {model.heads} attention heads",
            "vLLM refuses it: every GPU holds as many heads as the others",
            f"--tensor-parallel-size {able[-1]}",
        )
    if command.switched("--enable-expert-parallel") and model.family and not model.family.experts:
        yield LintFinding(
            "experts_of_a_dense_model",
            "error",
            "--enable-expert-parallel, and the model has no experts",
            "vLLM refuses it",
            "remove it",
            removal(command.all("--enable-expert-parallel")),
        )
    length = number(command.get("--max-model-len")) or 0
    changed = command.get("--hf-overrides") or command.get("--rope-scaling") or command.environment.get(_LONG) == "1"
    if length > model.longest and not changed:
        yield LintFinding(
            "context_above_the_model",
            "error" if model.family else "warning",
            f"--max-model-len {length:g} is above the model's maximum, {model.longest:,} tokens",
            f"vLLM refuses it unless {_LONG}=1; beyond it answers lose their sense",
            f"--max-model-len {model.longest}",
        )


def with_length(findings: Iterable[LintFinding], model: Model) -> Iterator[LintFinding]:
    """The finding about a context at the maximum with that; without it where vLLM takes a shorter one (LongRoPE)."""
    for each in findings:
        at = each.rule == "context_at_the_maximum"
        if not at:
            yield each
        elif model.usual == model.longest:
            yield replace(each, what=f"{each.what}, {model.longest:,} tokens")


def of_host(command: Command, version: str, found: HostGpus) -> Iterator[LintFinding]:
    """What the GPUs of this host make of it: warnings, since the server may be meant for another one."""
    tensor, pipeline, data = (ranks(command, f"--{each}-parallel-size") for each in ("tensor", "pipeline", "data"))
    local = number(command.get("--data-parallel-size-local"))
    needed = tensor * pipeline * (data if local is None else int(local))
    elsewhere = (number(command.get("--nnodes")) or 1) > 1 or "ray" in (
        command.get("--distributed-executor-backend"),
        command.get("--data-parallel-backend"),
    )
    if needed > len(found.gpus) and not elsewhere:
        yield LintFinding(
            "fewer_gpus_than_ranks",
            "warning",
            f"it needs {needed} GPUs, and this host shows {len(found.gpus)}",
            "vLLM refuses more ranks on one node than it has GPUs",
            "smaller parallel sizes, or --nnodes",
        )
    used = found.gpus[: max(1, needed)]
    yield from _unequal(used)
    yield from _links(used[:tensor], found, tensor)
    yield from _shared(command, version, used)


def _unequal(used: tuple[HostGpu, ...]) -> Iterator[LintFinding]:
    kinds = sorted({(each.name, round(each.total / GIB)) for each in used})
    if len(kinds) > 1:
        yield LintFinding(
            "unequal_gpus",
            "warning",
            "the GPUs are not alike: " + ", ".join(f"{name} with {total} GiB" for name, total in kinds),
            "every rank waits for the slowest one, and the smallest one decides how large the KV pool is",
            "CUDA_VISIBLE_DEVICES with GPUs of one kind",
        )


def _links(used: tuple[HostGpu, ...], found: HostGpus, tensor: int) -> Iterator[LintFinding]:
    pairs = [(one.index, other.index) for one in used for other in used if one.index < other.index]
    slow = [(pair, found.paths[pair]) for pair in pairs if found.paths.get(pair, "nvlink") != "nvlink"]
    if slow:
        (one, other), path = slow[0]
        more = f", and {len(slow) - 1} more pairs" if len(slow) > 1 else ""
        yield LintFinding(
            "tensor_parallel_over_pcie",
            "warning",
            f"--tensor-parallel-size {tensor} without NVLink: GPU {one} and GPU {other} meet over PCIe ({path}){more}",
            "every layer ends in an all-reduce between all ranks; above two GPUs vLLM's own one needs NVLink",
            f"--pipeline-parallel-size {tensor} in its place, or GPUs that NVLink joins",
        )


def _shared(command: Command, version: str, used: tuple[HostGpu, ...]) -> Iterator[LintFinding]:
    """VLLM measures what is free at the start: `Free memory on device ... is less than desired` since 0.9.1."""
    if command.get("--kv-cache-memory-bytes") is not None:
        return
    given = number(command.get("--gpu-memory-utilization"))
    share = given if given is not None else default("--gpu-memory-utilization", version)
    tight = min(used, key=lambda each: each.free / each.total, default=None)
    if not share or not tight or share * tight.total <= tight.free:
        return
    able = math.floor(tight.free / tight.total * 100) / 100
    others = f"{tight.users} other process{'es' * (tight.users != 1)}" if tight.users else "something else"
    yield LintFinding(
        "gpu_is_shared",
        "warning",
        f"GPU {tight.index} has {tight.free / GIB:.1f} of {tight.total / GIB:.1f} GiB free,"
        f" and a share of {share:g} is {share * tight.total / GIB:.1f} GiB",
        f"{others} holds the rest; vLLM "
        + ("refuses to start" if at_least(version, "0.9.1") else "runs out of memory or has no KV cache left"),
        f"--gpu-memory-utilization {able:g}, or free the GPU first" if able > 0 else "free the GPU first",
    )
