"""Checks of the GPU memory: the estimate of every part, and the share of the GPU that this server may take."""

from collections.abc import Iterator

from diag.core.formatting import gibibytes, quantity
from diag.preflight.check import NotChecked, Outcome, PreflightFacts, check, failed, passed, warned
from diag.vllm.memory.ledger import KV_CACHE


@check(
    "memory",
    "Weights, activations and KV cache fit the GPU",
    reads="the launch, the model's config.json and the GPU: the estimate of diag budget",
    why="vLLM exits if one request of the longest context does not fit",
    source="docs/budget.md",
)
def memory_estimate(facts: PreflightFacts) -> Iterator[Outcome]:
    if facts.running:
        return
    found = facts.ledger
    if found is None:
        raise NotChecked(facts.no_ledger)
    if found.verdict == "does not fit":
        yield failed(found.reasons[0], " or ".join(facts.fitting[:2]) or "Use a larger GPU")
        return
    if found.verdict == "cannot tell" or found.tokens is None or found.concurrency is None:
        raise NotChecked(found.reasons[0] if found.reasons else "the size of the KV cache is not known")
    rows = {row.name: row.size for row in found.rows}
    size, requests = rows[KV_CACHE], found.concurrency[0]
    room = f"{gibibytes(size.low, 1)} of KV cache: " if size else ""
    message = f"{room}{found.tokens.low:,} tokens, {requests:.1f} requests of {found.setup.length:,}"
    if requests < 1.5:
        message += ": a second long request waits for the first"
        yield warned(message, "--max-model-len with the longest request that you serve")
    else:
        yield passed(message)


@check(
    "memory",
    "The share of the GPU that this server may take",
    reads="[preflight] gpu_memory_share in diag.toml, and --gpu-memory-utilization",
    why="on a shared GPU a server that takes more than its share ends the others, or itself",
    source="docs/preflight.md",
)
def memory_share(facts: PreflightFacts) -> Iterator[Outcome]:
    share = facts.contract.preflight.gpu_memory_share
    if facts.command is None or share is None:
        return
    if facts.ledger is None:
        raise NotChecked(facts.no_ledger)
    setup = facts.ledger.setup
    fixed = setup.kv_cache_bytes is not None
    if fixed:
        raise NotChecked("--kv-cache-memory-bytes sets the KV cache, whatever the share")
    message = (
        f"--gpu-memory-utilization {setup.utilization:g}, and diag.toml gives this server {quantity(share, 'share')}"
    )
    if setup.utilization > share:
        yield failed(message, f"--gpu-memory-utilization {share:g}")
    else:
        yield passed(message)


CHECKS = (memory_estimate, memory_share)
