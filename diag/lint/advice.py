"""Rules about settings that vLLM accepts and that cost performance, memory or visibility."""

import re
from collections.abc import Iterator

from diag.lint.host import longest_request
from diag.lint.removed import V1
from diag.lint.rule import LintTarget, Match, is_open, number, rule
from diag.vllm.flags.registry import default
from diag.vllm.gpus import capability

LARGEST_GRAPH, LARGEST_ON_BLACKWELL = 512, 1024
"""vLLM captures batches of up to 2 x max_num_seqs tokens by default, and at most these; the latter since 0.28.0."""
_BLACKWELL = 10
"""Compute capability of Blackwell in data centres, without its minor number."""


@rule()
def little_memory_left(target: LintTarget) -> Iterator[Match]:
    share = number(target.command.get("--gpu-memory-utilization"))
    if share is not None and 0.95 < share <= 1 and target.command.get("--kv-cache-memory-bytes") is None:
        usual = default("--gpu-memory-utilization", target.version)
        graphs = "" if target.since("0.20.0") else f"; in {target.version} CUDA graphs come on top of the share"
        yield Match(
            f"--gpu-memory-utilization {share:g} leaves {100 * (1 - share):.0f} % of the GPU memory for all else",
            f"NCCL, fragmentation and other processes need memory too{graphs}",
            "Set --gpu-memory-utilization to 0.95 or less" + (f" (the default is {usual:g})" if usual else ""),
        )


@rule(largest=LARGEST_GRAPH, blackwell=f"{LARGEST_ON_BLACKWELL:,}")
def sequences_above_graphs(target: LintTarget) -> Iterator[Match]:
    sequences, largest, flag = _batch_and_graphs(target)
    if sequences is not None and sequences > largest:
        yield Match(
            f"--max-num-seqs {sequences:.15g} is above the largest batch with a CUDA graph, {largest:.15g}",
            f"A step that decodes more than {largest:.15g} sequences runs without a CUDA graph",
            f"Set --max-num-seqs to {largest:.15g}"
            + (f", or --max-cudagraph-capture-size to {sequences:.15g}" if target.since("0.11.1") else ""),
            severity="warning" if flag else None,
        )


@rule()
def graphs_above_sequences(target: LintTarget) -> Iterator[Match]:
    sequences, largest, flag = _batch_and_graphs(target)
    if sequences is not None and flag and largest > max(sequences, 2 * sequences):
        yield Match(
            f"CUDA graphs are captured for batches of up to {largest:.15g}, and --max-num-seqs is {sequences:.15g}",
            fix=f"Give {flag} no sizes above {sequences:.15g}",
        )


def _batch_and_graphs(target: LintTarget) -> tuple[float | None, float, str]:
    """Return --max-num-seqs (None: unknown, or no graphs), the largest captured batch and its flag ("": default)."""
    compilation = target.keys("--compilation-config")
    sequences = number(target.command.get("--max-num-seqs"))
    has_graphs = not target.is_on("--enforce-eager") and compilation.get("cudagraph_mode") != "NONE"
    counted = sequences if has_graphs and target.since(V1) else None
    for flag in ("--cudagraph-capture-sizes", "--max-cudagraph-capture-size", "--cuda-graph-sizes"):
        key = flag[2:].replace("-", "_")
        numbers = [number(value) for option in target.command.all(flag)[-1:] for value in option.values]
        numbers += [number(digits) for digits in re.findall(r"\d+", str(compilation.get(key, "")))]
        sizes = [size for size in numbers if size is not None]
        if sizes:
            return counted, max(sizes), f"--compilation-config.{key}" if key in compilation else flag
    on_blackwell = target.since("0.28.0") and any(int(capability(gpu.name)) == _BLACKWELL for gpu in target.used_gpus())
    return counted, LARGEST_ON_BLACKWELL if on_blackwell else LARGEST_GRAPH, ""


@rule()
def context_at_the_maximum(target: LintTarget) -> Iterator[Match]:
    """Report nothing if vLLM itself takes a shorter context than the model's maximum (LongRoPE)."""
    command, shape = target.command, target.shape
    if any(is_open(command.words[at]) for at in command.strays):
        return
    if command.model and command.get("--max-model-len") is None and (not shape or shape.usual == shape.longest):
        length = f", {shape.longest:,} tokens" if shape else ""
        auto = ", or to auto to let the memory decide" if target.since("0.14.0") else ""
        yield Match(
            f"The context length is left at the model's maximum{length}{longest_request(target)}",
            fix=f"Set --max-model-len to the longest request that you serve{auto}",
        )


@rule()
def prefix_caching_off(target: LintTarget) -> Iterator[Match]:
    on = target.command.switched("--enable-prefix-caching")
    if on is False or (on is None and not target.since(V1) and target.command.model):  # V1 has it on by default
        yield Match(fix="Remove --no-enable-prefix-caching" if on is False else "Add --enable-prefix-caching")


@rule()
def eager(target: LintTarget) -> Iterator[Match]:
    if target.is_on("--enforce-eager") and not target.is_on("--mm-encoder-only"):  # an encoder decodes nothing
        less = "; --max-cudagraph-capture-size saves memory at less cost" if target.since("0.11.1") else ""
        yield Match(fix=f"Remove it unless the server fails to start without it{less}")
