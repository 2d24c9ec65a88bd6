"""Rules about what starts and hurts, or is worth a thought."""

import re
from collections.abc import Iterator, Mapping

from diag.lint.conflicts import CommandFacts
from diag.lint.finding import LintFinding, at_least, is_open, number, ranks, removal
from diag.lint.replaced import V1, V1_ONLY
from diag.vllm.command.parse import Command
from diag.vllm.flags.defaults import default

LARGEST_GRAPH = 512
"""vLLM captures decode batches of up to min(2 x max_num_seqs, 512) sequences by default (1,024 on some Blackwell)."""


def engine(command: Command, version: str) -> Iterator[LintFinding]:
    """VLLM_USE_V1=0 while it is read: 0.8.0 - 0.10.2 it chooses V0, 0.11.0 has none any more."""
    if command.environment.get("VLLM_USE_V1") != "0" or not at_least(version, V1) or at_least(version, "0.11.1"):
        return
    gone = at_least(version, V1_ONLY)
    yield LintFinding(
        "old_engine",
        "error" if gone else "warning",
        "VLLM_USE_V1=0 asks for the V0 engine",
        f"vLLM {version} has none any more" if gone else "it was slower, and 0.11.0 removed it",
        "remove VLLM_USE_V1",
    )


def context(command: Command, version: str) -> Iterator[LintFinding]:
    """The context left at what the model was made for."""
    if command.model and command.get("--max-model-len") is None:
        fit = ", or --max-model-len auto to let the memory decide" if at_least(version, "0.14.0") else ""
        yield LintFinding(
            "context_at_the_maximum",
            "info",
            "the context is left at the model's maximum",
            "the KV cache must hold one request of it or the start fails, and one such request may take it all",
            f"--max-model-len with the longest request that you serve{fit}",
        )


def caching(command: Command, version: str) -> Iterator[LintFinding]:
    """Prefix caching off; on by default since V1."""
    off = command.switched("--enable-prefix-caching")
    if off is False or (off is None and not at_least(version, V1) and command.model):
        yield LintFinding(
            "prefix_caching_off",
            "info",
            "prefix caching is off",
            "prompts that begin alike are computed again for every request",
            "remove --no-enable-prefix-caching" if off is False else "--enable-prefix-caching",
        )


def eager(command: Command, version: str) -> Iterator[LintFinding]:
    """No CUDA graphs, no compilation."""
    if command.switched("--enforce-eager"):
        yield LintFinding(
            "eager",
            "info",
            "--enforce-eager runs without CUDA graphs and without compilation",
            "every decode step launches its kernels one by one: short steps get much slower on a GPU",
            "remove it unless the start fails without; --max-cudagraph-capture-size saves memory at less cost"
            if at_least(version, "0.11.1")
            else "remove it unless the start fails without",
        )


def pool(command: Command, version: str) -> Iterator[LintFinding]:
    """A KV pool of a size by order."""
    blocks = command.get("--num-gpu-blocks-override")
    if blocks is not None and not is_open(blocks):
        yield LintFinding(
            "pool_by_order",
            "warning",
            f"--num-gpu-blocks-override {blocks}: the KV pool is as large as ordered",
            "it is for tests: vLLM's own number is what the memory holds",
            "remove it",
            removal(command.all("--num-gpu-blocks-override")),
        )


def blind(command: Command, version: str) -> Iterator[LintFinding]:
    """A server without metrics."""
    if command.switched("--disable-log-stats"):
        yield LintFinding(
            "no_metrics",
            "warning",
            "--disable-log-stats takes every vllm:... metric off the page",
            "neither Prometheus nor diag can tell how the server does",
            "remove it",
            removal(command.all("--disable-log-stats")),
        )


def full(command: Command, version: str) -> Iterator[LintFinding]:
    """Nearly all of the GPU's memory."""
    share = number(command.get("--gpu-memory-utilization"))
    if share is not None and 0.95 < share <= 1 and command.get("--kv-cache-memory-bytes") is None:
        inside = at_least(version, "0.20.0")
        usual = default("--gpu-memory-utilization", version)
        yield LintFinding(
            "hardly_any_memory_left",
            "warning",
            f"--gpu-memory-utilization {share:g} leaves {1 - share:.0%} of the GPU for everything else",
            "NCCL, fragmentation and other processes need room too"
            + ("" if inside else f"; in {version} CUDA graphs come on top of the share"),
            f"--gpu-memory-utilization 0.95 or less (the default is {usual:g})" if usual else "0.95 or less",
        )


def graphs(command: Command, version: str) -> Iterator[LintFinding]:
    """Sequences above or below the sizes that CUDA graphs are captured for."""
    sequences = number(command.get("--max-num-seqs"))
    compiled = CommandFacts(command, version).keys("--compilation-config")
    largest, where = _largest(command, compiled)
    none = command.switched("--enforce-eager") or compiled.get("cudagraph_mode") == "NONE"
    if sequences is None or none or not at_least(version, V1):
        return
    if sequences > largest:
        yield LintFinding(
            "sequences_above_graphs",
            "warning" if where else "info",
            f"--max-num-seqs {sequences:g} is above the largest batch with a CUDA graph, {largest:g}",
            f"more than {largest:g} running sequences are decoded without a graph, step after step",
            f"--max-num-seqs {largest:g}"
            + (f", or --max-cudagraph-capture-size {sequences:g}" if at_least(version, "0.11.1") else ""),
        )
    elif where and largest > 2 * sequences:
        yield LintFinding(
            "graphs_above_sequences",
            "info",
            f"CUDA graphs are captured for batches of up to {largest:g}, and --max-num-seqs is {sequences:g}",
            "sizes that no decode batch reaches cost memory, and time at the start",
            f"{where} up to {sequences:g}",
        )


def _largest(command: Command, compiled: Mapping[str, object]) -> tuple[float, str]:
    """The largest captured batch, and the flag that says so ("" by default)."""
    for flag in ("--cudagraph-capture-sizes", "--max-cudagraph-capture-size", "--cuda-graph-sizes"):
        key = flag[2:].replace("-", "_")
        said = [number(each) for given in command.all(flag)[-1:] for each in given.values]
        said += [number(each) for each in re.findall(r"\d+", str(compiled.get(key, "")))]
        sizes = [each for each in said if each is not None]
        if sizes:
            return max(sizes), f"--compilation-config.{key}" if key in compiled else flag
    return LARGEST_GRAPH, ""


def parallel(command: Command, version: str) -> Iterator[LintFinding]:
    """What data parallelism does to the metrics: api_server_count is data_parallel_size since 0.10.2 or so."""
    size = ranks(command, "--data-parallel-size")
    external = command.switched("--data-parallel-external-lb") or command.get("--data-parallel-rank") is not None
    if size > 1 and not external and command.get("--api-server-count") is None and at_least(version, "0.10.2"):
        yield LintFinding(
            "several_api_servers",
            "info",
            f"--data-parallel-size {size} starts as many API servers",
            "their page has no process_... metrics, and the log no line of statistics",
            "--api-server-count 1 where one API server is enough",
        )
