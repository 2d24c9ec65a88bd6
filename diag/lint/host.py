"""Rules about the model's folder, this host's GPUs and the installed vLLM, if diag can see them."""

import math
from collections.abc import Iterator
from pathlib import Path

from diag.core.formatting import GIB, gibibytes, plural
from diag.lint.rule import LINKS, LintTarget, Match, number, removal, rule
from diag.vllm.flags.registry import default

_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_OTHER_FILES = ("params.json", "*.gguf")
"""Files of a model in Mistral's or llama.cpp's own format, which needs no config.json."""


def is_without_config(folder: Path) -> bool:
    """Return True for a folder that vLLM cannot serve a model from."""
    files = ("config.json", *_OTHER_FILES)
    return folder.is_dir() and not any(True for pattern in files for _ in folder.glob(pattern))


@rule()
def no_config(target: LintTarget) -> Iterator[Match]:
    if target.folder_without_config:
        yield Match(f"The folder {target.folder_without_config} has no config.json")


@rule()
def heads_do_not_divide(target: LintTarget) -> Iterator[Match]:
    shape, tensor = target.shape, target.ranks("--tensor-parallel-size")
    if shape and shape.heads % tensor:
        divisors = [size for size in range(1, min(tensor, shape.heads + 1)) if shape.heads % size == 0]
        yield Match(
            f"--tensor-parallel-size {tensor} does not divide the model's {shape.heads} attention heads",
            fix=f"Set --tensor-parallel-size to {divisors[-1]}",
        )


@rule()
def experts_of_a_dense_model(target: LintTarget) -> Iterator[Match]:
    shape = target.shape
    if target.is_on("--enable-expert-parallel") and shape and shape.family and not shape.experts:
        yield Match(edits=removal(target.command.all("--enable-expert-parallel")))


@rule()
def context_above_the_model(target: LintTarget) -> Iterator[Match]:
    command, shape = target.command, target.shape
    length = number(command.get("--max-model-len")) or 0
    extended = command.get("--hf-overrides") or command.get("--rope-scaling") or command.environment.get(_LONG) == "1"
    if shape and length > shape.longest and not extended:
        yield Match(
            f"--max-model-len {length:.15g} is above the model's maximum, {shape.longest:,} tokens",
            fix=f"Set --max-model-len to {shape.longest}",
            severity=None if shape.family else "warning",
        )


@rule()
def fewer_gpus_than_ranks(target: LintTarget) -> Iterator[Match]:
    command, needed = target.command, target.local_ranks()
    elsewhere = (number(command.get("--nnodes")) or 1) > 1 or "ray" in (
        command.get("--distributed-executor-backend"),
        command.get("--data-parallel-backend"),
    )
    if target.gpus and needed > len(target.gpus.gpus) and not elsewhere:
        yield Match(f"The server needs {plural(needed, 'GPU')}, and this host has {len(target.gpus.gpus)}")


@rule()
def unequal_gpus(target: LintTarget) -> Iterator[Match]:
    kinds = sorted({(gpu.name, round(gpu.total / GIB)) for gpu in target.used_gpus()})
    if len(kinds) > 1:
        yield Match("The GPUs differ: " + ", ".join(f"{name} with {total} GiB" for name, total in kinds))


@rule()
def tensor_parallel_over_pcie(target: LintTarget) -> Iterator[Match]:
    tensor = target.ranks("--tensor-parallel-size")
    paths = target.gpus.paths if target.gpus else {}
    used = target.used_gpus()[:tensor]
    pairs = [(gpu.index, peer.index) for gpu in used for peer in used if gpu.index < peer.index]
    slow = [(pair, paths[pair]) for pair in pairs if paths.get(pair, "nvlink") not in LINKS]
    if slow:
        (first, second), path = slow[0]
        more = f", and {plural(len(slow) - 1, 'more pair')}" if len(slow) > 1 else ""
        yield Match(
            f"--tensor-parallel-size {tensor} without NVLink:"
            f" GPU {first} and GPU {second} communicate over PCIe ({path}){more}",
            fix=f"Use --pipeline-parallel-size {tensor} in its place, or GPUs that NVLink connects",
        )


@rule()
def gpu_is_shared(target: LintTarget) -> Iterator[Match]:
    """Check like vLLM at startup, which logs `Free memory on device ... is less than desired` since 0.9.1."""
    if target.command.get("--kv-cache-memory-bytes") is not None:
        return
    given = number(target.command.get("--gpu-memory-utilization"))
    share = given if given is not None else default("--gpu-memory-utilization", target.version)
    tight = min(target.used_gpus(), key=lambda gpu: gpu.free / gpu.total, default=None)
    if not share or not tight or share * tight.total <= tight.free:
        return
    fitting = math.floor(tight.free / tight.total * 100) / 100
    others = f"{tight.users} other process{'es' * (tight.users != 1)}" if tight.users else "Something else"
    yield Match(
        f"GPU {tight.index} has {gibibytes(tight.free, 1)} of {gibibytes(tight.total, 1)} free,"
        f" and a share of {share:g} is {gibibytes(share * tight.total, 1)}",
        f"{others} uses the rest; vLLM "
        + ("refuses to start" if target.since("0.9.1") else "runs out of memory or has no KV cache left"),
        f"Set --gpu-memory-utilization to {fitting:g}, or free the GPU first" if fitting > 0 else "Free the GPU first",
    )


@rule()
def refused_by_the_parser(target: LintTarget) -> Iterator[Match]:
    if target.parser_error:
        yield Match(target.parser_error, f"The parser of the installed vLLM {target.version} refuses the command")
