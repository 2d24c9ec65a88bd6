"""Rules about the model's folder, this host's GPUs and the installed vLLM, if diag can see them."""

import math
from collections.abc import Iterator
from pathlib import Path

from diag.core.formatting import GIB, gibibytes, plural
from diag.lint.rule import LINKS, Example, LintTarget, Match, number, removal, rule
from diag.vllm.flags.registry import default

_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_OTHER_FILES = ("params.json", "*.gguf")
"""Files of a model in Mistral's or llama.cpp's own format, which needs no config.json."""


def is_without_config(folder: Path) -> bool:
    """Return True for a folder that vLLM cannot serve a model from."""
    files = ("config.json", *_OTHER_FILES)
    return folder.is_dir() and not any(True for pattern in files for _ in folder.glob(pattern))


@rule(
    "error",
    "The model's folder has no config.json",
    "A model that is a folder on this host, without config.json, params.json and *.gguf.",
    "vLLM reads the model's architecture from config.json and does not start without it",
    "Name the folder that holds config.json, or a model's id",
    Example("vllm serve ./models", requires="./models is a folder without config.json", leaves="vllm serve ./model"),
)
def no_config(target: LintTarget) -> Iterator[Match]:
    if target.folder_without_config:
        yield Match(f"The folder {target.folder_without_config} has no config.json")


@rule(
    "error",
    "--tensor-parallel-size does not divide the attention heads",
    "A tensor-parallel size that does not divide the number of attention heads in the model's config.json.",
    "vLLM refuses it: every GPU holds the same number of heads",
    "Set --tensor-parallel-size to a divisor of the number of heads",
    Example(
        "vllm serve ./model -tp 3",
        requires="./model/config.json has 32 attention heads",
        leaves="vllm serve ./model -tp 4",
    ),
)
def heads_do_not_divide(target: LintTarget) -> Iterator[Match]:
    shape, tensor = target.shape, target.ranks("--tensor-parallel-size")
    if shape and shape.heads % tensor:
        divisors = [size for size in range(1, min(tensor, shape.heads + 1)) if shape.heads % size == 0]
        yield Match(
            f"--tensor-parallel-size {tensor} does not divide the model's {shape.heads} attention heads",
            fix=f"Set --tensor-parallel-size to {divisors[-1]}",
        )


@rule(
    "error",
    "--enable-expert-parallel, and the model has no experts",
    "--enable-expert-parallel with a model whose config.json has no experts.",
    "vLLM refuses it: there are no experts to distribute",
    "Remove it",
    Example(
        "vllm serve ./model --enable-expert-parallel",
        requires="./model is a dense model",
        leaves="vllm serve ./mixture --enable-expert-parallel -tp 2",
    ),
)
def experts_of_a_dense_model(target: LintTarget) -> Iterator[Match]:
    shape = target.shape
    if target.is_on("--enable-expert-parallel") and shape and shape.family and not shape.experts:
        yield Match(edits=removal(target.command.all("--enable-expert-parallel")))


@rule(
    "error",
    "--max-model-len is above the model's maximum",
    f"A context length above that of the model's config.json, without {_LONG}=1 and without --hf-overrides."
    " A warning for an architecture that diag does not support.",
    f"vLLM refuses it unless {_LONG}=1; beyond the maximum the answers become nonsense",
    "Lower --max-model-len to the model's maximum",
    Example(
        "vllm serve ./model --max-model-len 200k",
        requires="./model supports 131,072 tokens",
        leaves="vllm serve ./model --max-model-len 128k",
    ),
)
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


@rule(
    "warning",
    "This host has fewer GPUs than the server needs",
    "More ranks than GPUs on this host, without --nnodes and without Ray. CUDA_VISIBLE_DEVICES counts.",
    "vLLM refuses more ranks on one node than it has GPUs",
    "Use smaller parallel sizes, or --nnodes",
    Example("vllm serve m -tp 2", requires="this host has one GPU", leaves="vllm serve m -tp 2 --nnodes 2"),
)
def fewer_gpus_than_ranks(target: LintTarget) -> Iterator[Match]:
    command, needed = target.command, target.local_ranks()
    elsewhere = (number(command.get("--nnodes")) or 1) > 1 or "ray" in (
        command.get("--distributed-executor-backend"),
        command.get("--data-parallel-backend"),
    )
    if target.gpus and needed > len(target.gpus.gpus) and not elsewhere:
        yield Match(f"The server needs {plural(needed, 'GPU')}, and this host has {len(target.gpus.gpus)}")


@rule(
    "warning",
    "The GPUs differ",
    "GPUs of this host that the server would use, with different names or memory sizes.",
    "Every rank waits for the slowest one, and the smallest one limits the KV cache",
    "Set CUDA_VISIBLE_DEVICES to GPUs of one kind",
    Example("vllm serve m -tp 2", requires="this host has an H100 and a T4", leaves="vllm serve m -tp 1"),
)
def unequal_gpus(target: LintTarget) -> Iterator[Match]:
    kinds = sorted({(gpu.name, round(gpu.total / GIB)) for gpu in target.used_gpus()})
    if len(kinds) > 1:
        yield Match("The GPUs differ: " + ", ".join(f"{name} with {total} GiB" for name, total in kinds))


@rule(
    "warning",
    "Tensor parallelism runs over PCIe",
    "Two GPUs of one tensor-parallel group that no NVLink connects.",
    "Every layer ends in an all-reduce between all ranks; above two GPUs vLLM's own all-reduce needs NVLink",
    "Use pipeline parallelism in its place, or GPUs that NVLink connects",
    Example(
        "vllm serve m -tp 2",
        requires="this host has two GPUs without NVLink",
        leaves="vllm serve m --pipeline-parallel-size 2",
    ),
)
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


@rule(
    "warning",
    "The GPU has less free memory than --gpu-memory-utilization takes",
    "A GPU of this host with less free memory than the share of it that the server takes.",
    "vLLM refuses to start; before 0.9.1 it runs out of memory or has no KV cache left",
    "Lower --gpu-memory-utilization, or free the GPU first",
    Example(
        "vllm serve m",
        requires="another process uses most of the GPU's memory",
        leaves="vllm serve m --gpu-memory-utilization 0.09",
    ),
)
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


@rule(
    "error",
    "vLLM's own parser refuses the command",
    "The parser of the vLLM that is installed beside diag, or that --vllm-python names, refuses the command and no"
    " other rule found an error.",
    "vLLM exits with the same message",
    "Correct what the message names",
    Example(
        "vllm serve m --enable-lora --lora-modules adapter",
        requires="vLLM of this release is installed beside diag",
        leaves="vllm serve m --enable-lora --lora-modules adapter=./adapter",
    ),
)
def refused_by_the_parser(target: LintTarget) -> Iterator[Match]:
    if target.parser_error:
        yield Match(target.parser_error, f"The parser of the installed vLLM {target.version} refuses the command")


RULES = (
    no_config,
    heads_do_not_divide,
    experts_of_a_dense_model,
    context_above_the_model,
    fewer_gpus_than_ranks,
    unequal_gpus,
    tensor_parallel_over_pcie,
    gpu_is_shared,
    refused_by_the_parser,
)
