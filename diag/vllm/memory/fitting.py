"""What would make a server fit: one flag and its value at a time, each tried by doing the ledger again."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import floor

from diag.core.errors import BadUsage
from diag.core.sizes import GIB
from diag.vllm.flags.registry import release
from diag.vllm.memory.cache import BYTES
from diag.vllm.memory.ledger import BUDGET, CONTEXT, POOL, USUAL_GRAPHS, Ledger, Measured, ledger, uncounted
from diag.vllm.memory.model import Model
from diag.vllm.memory.parts import ByteRange, check
from diag.vllm.memory.setup import Setup

MOST_GPUS = 64
LEAST_LENGTH = 2048
"""Shorter contexts are of no use to anybody: other changes are looked for."""
_GRIDS = ((65536, 4096), (8192, 1024), (0, 256))


@dataclass(frozen=True)
class FittingChange:
    """A flag with the value that makes it fit."""

    flag: str
    value: str
    setup: Setup
    measured: Measured
    """What of the log still holds with it."""


def rounded(length: int, most: int) -> int:
    """Down to what people set: a multiple of 4,096 from 65,536 on, of 1,024 from 8,192 on, of 256; the most itself."""
    if length >= most:
        return most
    return length - length % next(grid for above, grid in _GRIDS if length >= above)


def safe_length(found: Ledger) -> int | None:
    """The longest context that fits for certain; None where that is not known."""
    return rounded(found.longest.low, found.model.longest) if found.longest and not uncounted(found) else None


def safe_sequences(found: Ledger) -> int | None:
    """How many requests of the longest context run at a time without an eviction, for certain."""
    if not (found.cache and found.blocks) or uncounted(found):
        return None
    return max(found.blocks.low - 1, 0) // found.cache.blocks(found.setup.length)


def changes(found: Ledger, measured: Measured) -> list[FittingChange]:
    """Those that make it fit alone; where none does, a cheaper cache or more GPUs with a shorter context."""
    model, start = found.model, FittingChange("", "", found.setup, measured)
    kinds = (_shares(start), _cheaper(model, start), _shorter(model, start), _wider(model, start))
    alone = [next((each for each in kind if _fits(model, each)), None) for kind in kinds]
    if any(alone):
        return [each for each in alone if each]
    both = (
        shorter for each in chain(_cheaper(model, start), _wider(model, start)) for shorter in _shorter(model, each)
    )
    return list(islice((each for each in both if _fits(model, each)), 2))


def _fits(model: Model, change: FittingChange) -> bool:
    return ledger(model, change.setup, change.measured).verdict == "fits"


def _shorter(model: Model, before: FittingChange) -> Iterator[FittingChange]:
    """The longest context that fits, after what was changed before."""
    length = safe_length(ledger(model, before.setup, before.measured)) or 0
    if LEAST_LENGTH <= length < before.setup.length:
        shorter = replace(before.setup, length=length, fitted=False)
        words = f"{before.value} --max-model-len {length}" if before.flag else str(length)
        yield FittingChange(before.flag or "--max-model-len", words, shorter, before.measured)


def _shares(start: FittingChange) -> Iterator[FittingChange]:
    """Larger shares of the GPU, the smallest first; a smaller one where too little is left beside the present one."""
    setup, total = start.setup, start.setup.total
    if total is None or setup.cpu or setup.pool is not None or setup.blocks is not None:
        return
    outside = CONTEXT[1] + (0 if setup.eager or setup.graphs_inside else USUAL_GRAPHS)
    most = floor(100 * min(1 - outside * GIB / total, 1 if setup.free is None else setup.free / total))
    now = setup.utilization
    for hundredth in range(floor(100 * now + 1e-6) + 1, most + 1) if most > 100 * now else (most,):
        share = hundredth / 100
        more = ByteRange.of(round((share - now) * total))
        moved = {name: size.plus(more) for name, size in start.measured.items() if name == POOL}
        told = {name: size for name, size in start.measured.items() if name != BUDGET} | moved
        if share > 0:
            yield FittingChange("--gpu-memory-utilization", f"{share:.2f}", replace(setup, utilization=share), told)


def _cheaper(model: Model, start: FittingChange) -> Iterator[FittingChange]:
    """Half the bytes for every token."""
    if BYTES.get(start.setup.kv_dtype, 2) >= 2 and _starts_with_fp8(model, start.setup):
        yield FittingChange("--kv-cache-dtype", "fp8", replace(start.setup, kv_dtype="fp8"), start.measured)


def _starts_with_fp8(model: Model, setup: Setup) -> bool:
    """Whether vLLM finds kernels by itself for an fp8 cache on this GPU; no where that is not known.

    Read off platforms/cuda.py and v1/attention/backends of 0.8.5, 0.11 - 0.16 and 0.32. Since 0.11.1 it takes the first
    backend that can, FlashInfer from compute capability 8.0 on; before, Hopper's or Blackwell's own, or none
    (https://github.com/vllm-project/vllm/issues/26431). MLA and attention sinks have kernels of their own, which do fp8
    on Hopper and datacentre Blackwell only.
    """
    at, newest = release(setup.version), setup.capability in (9.0, 10.0)
    if model.latent:
        return newest and at >= (0, 11, 0)
    if model.architecture == "GptOssForCausalLM":
        return newest and at >= (0, 16, 0)
    if setup.capability == 9.0:
        return at >= (0, 8, 5)
    return (newest and at >= (0, 11, 0)) or (setup.capability >= 8.0 and at >= (0, 11, 1))


def _wider(model: Model, start: FittingChange) -> Iterator[FittingChange]:
    """More GPUs of the same kind, as many as vLLM can divide the model among; nothing was measured on those."""
    tensor = 2 * start.setup.tensor
    while not start.setup.cpu and tensor <= MOST_GPUS:
        wider = replace(start.setup, tensor=tensor)
        with suppress(BadUsage):
            check(model, wider)
            yield FittingChange("--tensor-parallel-size", str(tensor), wider, {})
        tensor *= 2
