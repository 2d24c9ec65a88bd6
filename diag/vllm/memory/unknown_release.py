"""The KV cache of a server whose release is not known: what it has with the releases that count differently."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from diag.core.errors import BadUsage
from diag.vllm.command.command import Command
from diag.vllm.memory.ledger import KV_CACHE, Ledger, Measured, ledger, with_kv_cache
from diag.vllm.memory.model import Model
from diag.vllm.memory.setup import GpuSpec, Setup, setup
from diag.vllm.memory.usage import ByteRange

TURNS = ("0.9.2", "0.16.0", "0.19.1", "0.24.0", "0.28.0")
"""Releases between which the sampler, CUDA graphs, compiling or the memory outside torch count differently."""

Judge = Callable[[Model, Setup, Measured], Ledger]
"""The ledger of a setup with its verdict: of one release, or over all of them."""


def judge(started: Command, gpu: GpuSpec, version: str) -> Judge:
    """Return the ledger's function: over all releases if `version` is "", so a setup has one verdict."""
    if version:
        return ledger
    return lambda model, setup, measured: over_releases(ledger(model, setup, measured), started, gpu)


def over_releases(found: Ledger, started: Command, gpu: GpuSpec) -> Ledger:
    """Return the ledger with the KV cache that other releases would have too, since the release is not known.

    What its setup has otherwise than the command, such as a suggestion's value, it has with every release.
    """
    kv_cache = found.kv_cache
    if not kv_cache or any(row.name == KV_CACHE and (row.logged or row.basis == "exact") for row in found.rows):
        return found
    sizes, plain = [kv_cache], vars(setup(started, found.model, gpu, found.setup.version))
    changed = {name: value for name, value in vars(found.setup).items() if value != plain[name]}
    for version in TURNS:
        with suppress(BadUsage):  # a flag or value that the release refuses
            other = replace(setup(started, found.model, gpu, version), **changed)
            sizes.append(ledger(found.model, other).kv_cache or kv_cache)
    wide = ByteRange(min(size.low for size in sizes), max(size.high for size in sizes), kv_cache.central)
    differ = "sampling, CUDA graphs and compiling count differently since"
    if started.get("--gpu-memory-utilization") is None:
        differ = f"the default share is 0.9 or, since 0.20.0, 0.92, and {differ}"
    why = f"the release is not named: {differ} {TURNS[0]}"
    return with_kv_cache(found, wide, why)
