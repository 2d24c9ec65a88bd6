"""Rules about the model's folder, the GPUs and the memory of the host, and the installed vLLM, if diag can see them.

The memory ledger computes the memory from the command.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from diag.core.errors import BadUsage
from diag.core.formatting import GIB, gibibytes, plural
from diag.core.formatting import number as formatted
from diag.lint.removed import V1
from diag.lint.rule import LINKS, HostGpu, LintTarget, Match, number, rule
from diag.vllm.flags.registry import default
from diag.vllm.gpus import find
from diag.vllm.memory.ledger import Ledger, ledger, over_releases, state_blocks_needed
from diag.vllm.memory.setup import GpuSpec, Setup, setup
from diag.vllm.running_config import connector_bytes

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
def context_above_the_model(target: LintTarget) -> Iterator[Match]:
    command, shape = target.command, target.shape
    length = number(command.get("--max-model-len")) or 0
    extended = command.get("--hf-overrides") or command.get("--rope-scaling") or command.environment.get(_LONG) == "1"
    if shape and not shape.partial and length > shape.longest and not extended:
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
    share = utilization(target)
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


# -- the memory of the GPUs and of the host

_SHARE = "--gpu-memory-utilization"
_FAR = 0.2
"""Share of a GPU by which a setting is well below what is free; less is a usual margin for other processes."""


def memory_setup(target: LintTarget) -> Setup | None:
    """Return the settings that determine the memory on the GPU with the least; None if something is unknown."""
    if target.shape is None or not target.used_gpus():
        return None
    gpu = min(target.used_gpus(), key=lambda gpu: gpu.total)
    kind = find(gpu.name)
    total = min(gpu.total, kind.memory) if kind else gpu.total  # NVML counts more than CUDA
    with suppress(BadUsage):
        return setup(target.command, target.shape, GpuSpec(int(total), gpu.name), target.version)
    return None


@lru_cache(maxsize=2)  # several rules ask in turn, one of them with GPUs that are not named
def memory_ledger(target: LintTarget) -> Ledger | None:
    """Return the ledger of one GPU, of an unknown GPU if the host has none; None if vLLM refuses the settings."""
    if target.shape is None or not target.shape.family:
        return None
    with suppress(BadUsage):
        planned = memory_setup(target) or setup(target.command, target.shape, GpuSpec(), target.version)
        gpu = GpuSpec(planned.total, target.used_gpus()[0].name if planned.total else "")
        page = ledger(target.shape, planned)
        return over_releases(page, target.command, gpu) if target.is_assumed else page
    return None


def longest_request(target: LintTarget) -> str:
    """Return the KV cache on each GPU that a request of the longest context takes, as the end of a sentence, or ""."""
    judged = memory_ledger(target)
    if not judged or not judged.needed:
        return ""
    room = judged.kv_cache.low if judged.kv_cache else 0
    return f"; one such request takes {gibibytes(judged.needed, 1)} of KV cache" + (
        f" of about {gibibytes(room, 1)}" if room > 0 else ""
    )


def utilization(target: LintTarget) -> float | None:
    """Return --gpu-memory-utilization, as it is given or by default; None if the default is unknown."""
    wanted = number(target.command.get(_SHARE))
    return wanted if wanted is not None else default(_SHARE, target.version)


def usable_share(target: LintTarget, gpu: HostGpu) -> float:
    """Return the share of a GPU that a server may take: that of diag.toml or the release's default, or what is free."""
    return min(target.tenant_share or default(_SHARE, target.version) or 0.9, gpu.free / gpu.total)


def offloaded(target: LintTarget) -> tuple[float, str]:
    """Return the bytes of host memory that the ranks on this host pin, and the flags that set them.

    They count as in vllm/config: cpu_offload_gb per GPU, kv_offloading_size and the bytes of a connector over all ranks
    of an engine, swap_space per GPU.
    """
    ranks, buffer = target.local_ranks(), target.command.get("--kv-offloading-backend")
    engine = target.ranks("--tensor-parallel-size") * target.ranks("--pipeline-parallel-size")
    replicas = ranks // engine
    parts = {
        "--cpu-offload-gb": ranks,
        "--kv-offloading-size": 0 if buffer == "lmcache" else replicas,
        "--swap-space": 0 if target.since(V1) else ranks,
    }
    sizes = {flag: times * (target.number(flag) or 0) * GIB for flag, times in parts.items() if target.has(flag)}
    if not sizes.get("--kv-offloading-size"):  # it replaces the connector and its bytes
        sizes["--kv-transfer-config"] = replicas * connector_bytes(target.command, engine)
    return sum(sizes.values()), " and ".join(flag for flag, size in sizes.items() if size)


@rule(topic="memory", far=f"{100 * _FAR:.0f}")
def gpu_memory_given_away(target: LintTarget) -> Iterator[Match]:
    share = number(target.command.get(_SHARE))
    fixed = ("--kv-cache-memory-bytes", "--num-gpu-blocks-override")
    gpu = min(target.used_gpus(), key=lambda gpu: gpu.free / gpu.total, default=None)
    if share is None or gpu is None or any(target.command.get(flag) is not None for flag in fixed):
        return
    usable = usable_share(target, gpu)
    if not 0 < share <= usable - _FAR:
        return
    unused = (usable - share) * gpu.total
    judged = memory_ledger(target)
    tokens = f", {formatted(unused / judged.token_bytes)} tokens of KV cache" if judged and judged.token_bytes else ""
    yield Match(
        f"--gpu-memory-utilization {share:g} leaves {gibibytes(unused, 1)} of each GPU unused{tokens}",
        fix=f"Set --gpu-memory-utilization to {usable:.2f}, unless another process is to share the GPU",
    )


@rule(topic="memory")
def offloading_above_the_host(target: LintTarget) -> Iterator[Match]:
    (wanted, named), ranks = offloaded(target), target.local_ranks()
    if target.host_memory and target.ranks("--nnodes") == 1 and wanted > target.host_memory:
        yield Match(
            f"{named} of {ranks} rank{'s' * (ranks != 1)} take {gibibytes(wanted, 1)}, and this host has"
            f" {gibibytes(target.host_memory, 1)}"
        )


@rule(topic="memory")
def state_blocks_below_max_num_seqs(target: LintTarget) -> Iterator[Match]:
    judged = memory_ledger(target)
    if not judged or not judged.blocks or judged.blocks.high >= state_blocks_needed(judged.model, judged.setup):
        return
    low, high, wanted = judged.blocks.low, judged.blocks.high, judged.setup.sequences
    unset = "" if target.has("--max-num-seqs") else ", the default,"
    yield Match(
        f"--max-num-seqs {wanted}{unset} is above the {f'{low:,} to {high:,}' if low < high else f'{low:,}'} KV blocks,"
        " and each running request needs one for its state",
        fix=f"Set --max-num-seqs to {low}" if low > 0 else "Use a larger GPU, or more of them",
    )
