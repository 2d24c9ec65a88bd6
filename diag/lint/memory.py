"""Rules about the memory of the GPUs and of the host, computed from the command by the memory ledger."""

from collections.abc import Iterator
from contextlib import suppress

from diag.core.errors import BadUsage
from diag.core.formatting import GIB, gibibytes
from diag.core.formatting import number as formatted
from diag.lint.removed import V1
from diag.lint.rule import Example, HostGpu, LintTarget, Match, number, rule
from diag.vllm.flags.registry import default
from diag.vllm.gpus import find
from diag.vllm.memory.ledger import Ledger, judge, state_blocks_needed
from diag.vllm.memory.setup import GpuSpec, Setup, setup
from diag.vllm.running_config import connector_bytes

_SHARE = "--gpu-memory-utilization"
_FAR = 0.2
"""Share of a GPU by which a setting is well below what is free; less is a usual margin for other processes."""


def memory_setup(target: LintTarget) -> Setup | None:
    """Return the settings that determine the memory on the GPU with the least; None if something is unknown."""
    if target.shape is None or not target.used_gpus():
        return None
    gpu = min(target.used_gpus(), key=lambda gpu: gpu.total)
    known = find(gpu.name)
    total = min(gpu.total, known.memory) if known else gpu.total  # NVML counts more than CUDA
    with suppress(BadUsage):
        return setup(target.command, target.shape, GpuSpec(int(total), gpu.name), target.version)
    return None


def memory_ledger(target: LintTarget) -> Ledger | None:
    """Return the ledger of one GPU, of an unknown GPU if the host has none; None if vLLM refuses the settings."""
    if target.shape is None or not target.shape.family:
        return None
    with suppress(BadUsage):
        planned = memory_setup(target) or setup(target.command, target.shape, GpuSpec(), target.version)
        gpu = GpuSpec(planned.total, target.used_gpus()[0].name if planned.total else "")
        return judge(target.command, gpu, "" if target.is_assumed else target.version)(target.shape, planned, {})
    return None


def longest_request(target: LintTarget) -> str:
    """Return the KV cache on each GPU that a request of the longest context takes, as the end of a sentence, or ""."""
    found = memory_ledger(target)
    if not found or not found.needed:
        return ""
    room = found.kv_cache.low if found.kv_cache else 0
    return f"; one such request takes {gibibytes(found.needed, 1)} of KV cache" + (
        f" of about {gibibytes(room, 1)}" if room > 0 else ""
    )


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
    given = {flag: times * (target.number(flag) or 0) * GIB for flag, times in parts.items() if target.has(flag)}
    if not given.get("--kv-offloading-size"):  # it replaces the connector and its bytes
        given["--kv-transfer-config"] = replicas * connector_bytes(target.command, engine)
    return sum(given.values()), " and ".join(flag for flag, size in given.items() if size)


@rule(
    "info",
    "--gpu-memory-utilization leaves free GPU memory unused",
    f"A --gpu-memory-utilization that is {100 * _FAR:.0f} percentage points or more below both the release's default"
    " and the free share of every GPU, which are this host's or those of --gpu.",
    "vLLM gives to the KV cache only what the share leaves after weights and activations; the rest of the GPU stays"
    " empty, unless another process takes it later",
    "Raise --gpu-memory-utilization, unless another process is to share the GPU",
    Example(
        "vllm serve ./model --max-model-len 8k --gpu-memory-utilization 0.5",
        requires="./model is Llama 3 8B and this host has a free H100",
        leaves="vllm serve ./model --max-model-len 8k --gpu-memory-utilization 0.85",
    ),
)
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
    found = memory_ledger(target)
    tokens = f", {formatted(unused / found.token_bytes)} tokens of KV cache" if found and found.token_bytes else ""
    yield Match(
        f"--gpu-memory-utilization {share:g} leaves {gibibytes(unused, 1)} of each GPU unused{tokens}",
        fix=f"Set --gpu-memory-utilization to {usable:.2f}, unless another process is to share the GPU",
    )


@rule(
    "warning",
    "Offloading takes more memory than this host has",
    "--cpu-offload-gb of every rank on this host, --kv-offloading-size or the cpu_bytes_to_use of an offloading"
    " connector in --kv-transfer-config, and before 0.8.0 --swap-space of every rank,"
    " together above the memory of this host or of its control group.",
    "Offloaded memory is pinned: vLLM fails while it starts, or the kernel kills it",
    "Lower the sizes until they fit the host's memory with room to spare",
    Example(
        "vllm serve m --tensor-parallel-size 2 --cpu-offload-gb 48",
        requires="this host has 64 GiB of memory",
        leaves="vllm serve m --tensor-parallel-size 2 --cpu-offload-gb 16",
    ),
)
def offloading_above_the_host(target: LintTarget) -> Iterator[Match]:
    (wanted, named), ranks = offloaded(target), target.local_ranks()
    if target.host_memory and target.ranks("--nnodes") == 1 and wanted > target.host_memory:
        yield Match(
            f"{named} of {ranks} rank{'s' * (ranks != 1)} take {gibibytes(wanted, 1)}, and this host has"
            f" {gibibytes(target.host_memory, 1)}"
        )


@rule(
    "error",
    "--max-num-seqs above the blocks for the states of a hybrid model",
    "A model with Mamba or linear-attention layers, CUDA graphs of whole decoding steps, and a --max-num-seqs (given or"
    " the release's default) above the KV blocks that the GPU certainly has at most, since vLLM 0.19.0.",
    "vLLM refuses to start after it has loaded the weights: each running request needs a block for its state",
    "Set --max-num-seqs to the blocks that the KV cache certainly has",
    Example(
        "vllm serve ./hybrid --max-model-len 8k --max-num-seqs 1024",
        requires="./hybrid is Qwen3.5 27B and the GPU is an H100",
        leaves="vllm serve ./hybrid --max-model-len 8k --max-num-seqs 128",
    ),
)
def state_blocks_below_max_num_seqs(target: LintTarget) -> Iterator[Match]:
    found = memory_ledger(target)
    if not found or not found.blocks or found.blocks.high >= state_blocks_needed(found.model, found.setup):
        return
    low, high, wanted = found.blocks.low, found.blocks.high, found.setup.sequences
    given = "" if target.has("--max-num-seqs") else ", the default,"
    yield Match(
        f"--max-num-seqs {wanted}{given} is above the {f'{low:,} to {high:,}' if low < high else f'{low:,}'} KV blocks,"
        " and each running request needs one for its state",
        fix=f"Set --max-num-seqs to {low}" if low > 0 else "Use a larger GPU, or more of them",
    )


RULES = (
    gpu_memory_given_away,
    state_blocks_below_max_num_seqs,
    offloading_above_the_host,
)
