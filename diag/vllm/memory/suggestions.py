"""What would make a server fit: one flag and its value at a time, each tried by computing the ledger again."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import floor

from diag.core.errors import BadUsage
from diag.core.formatting import GIB
from diag.vllm.flags.registry import release
from diag.vllm.memory.byte_range import ByteRange
from diag.vllm.memory.cache import NUMBER_BYTES
from diag.vllm.memory.ledger import BUDGET, CONTEXT_GIB, KV_CACHE, USUAL_GRAPHS_GIB, Ledger, Measured, ledger, uncounted
from diag.vllm.memory.model import Model
from diag.vllm.memory.refusals import check
from diag.vllm.memory.setup import Setup

MOST_GPUS = 64
LEAST_LENGTH = 2048
"""Shorter contexts are of no practical use: other changes are tried."""
_STEPS = ((65536, 4096), (8192, 1024), (0, 256))
"""From a length on, the multiple that people set."""


@dataclass(frozen=True)
class Suggestion:
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
    return length - length % next(step for start, step in _STEPS if length >= start)


def safe_length(found: Ledger) -> int | None:
    """The longest context that fits for certain; None where that is not known."""
    return rounded(found.longest.low, found.model.longest) if found.longest and not uncounted(found) else None


def safe_sequences(found: Ledger) -> int | None:
    """How many requests of the longest context run at a time without preemption, for certain."""
    if not (found.layout and found.blocks) or uncounted(found):
        return None
    return max(found.blocks.low - 1, 0) // found.layout.blocks(found.setup.length)


def suggestions(found: Ledger, measured: Measured) -> list[Suggestion]:
    """Flags that make it fit alone; where none does, an fp8 KV cache or more GPUs with a shorter context."""
    model, start = found.model, Suggestion("", "", found.setup, measured)
    kinds = (_larger_share(start), _fp8_cache(model, start), _shorter(model, start), _more_gpus(model, start))
    alone = [next((suggestion for suggestion in kind if _fits(model, suggestion)), None) for kind in kinds]
    if any(alone):
        return [suggestion for suggestion in alone if suggestion]
    first = chain(_fp8_cache(model, start), _more_gpus(model, start))
    pairs = (shorter for suggestion in first for shorter in _shorter(model, suggestion))
    return list(islice((pair for pair in pairs if _fits(model, pair)), 2))


def _fits(model: Model, suggestion: Suggestion) -> bool:
    return ledger(model, suggestion.setup, suggestion.measured).verdict == "fits"


def _shorter(model: Model, before: Suggestion) -> Iterator[Suggestion]:
    """The longest context that fits, after what was changed before."""
    length = safe_length(ledger(model, before.setup, before.measured)) or 0
    if LEAST_LENGTH <= length < before.setup.length:
        setup = replace(before.setup, length=length, auto_length=False)
        value = f"{before.value} --max-model-len {length}" if before.flag else str(length)
        yield Suggestion(before.flag or "--max-model-len", value, setup, before.measured)


def _larger_share(start: Suggestion) -> Iterator[Suggestion]:
    """Larger shares of the GPU, the smallest first; a smaller one where too little is left outside the present one."""
    setup, total = start.setup, start.setup.total
    if total is None or setup.cpu or setup.kv_cache_bytes is not None or setup.blocks is not None:
        return
    now = setup.utilization
    most = _most_hundredths(setup, total)
    for hundredth in range(floor(100 * now + 1e-6) + 1, most + 1) if most > 100 * now else (most,):
        share = hundredth / 100
        more = ByteRange.of(round((share - now) * total))
        grown = {name: size.plus(more) for name, size in start.measured.items() if name == KV_CACHE}
        measured = {name: size for name, size in start.measured.items() if name != BUDGET} | grown
        if share > 0:
            yield Suggestion("--gpu-memory-utilization", f"{share:.2f}", replace(setup, utilization=share), measured)


def _most_hundredths(setup: Setup, total: int) -> int:
    """The largest share of a GPU that leaves room for what is outside the budget, in hundredths."""
    outside = CONTEXT_GIB[1] + (0 if setup.eager or setup.graphs_in_budget else USUAL_GRAPHS_GIB)
    return floor(100 * min(1 - outside * GIB / total, 1 if setup.free is None else setup.free / total))


def _fp8_cache(model: Model, start: Suggestion) -> Iterator[Suggestion]:
    """Half the bytes for every token."""
    if NUMBER_BYTES.get(start.setup.kv_dtype, 2) >= 2 and supports_fp8_cache(model, start.setup):
        yield Suggestion("--kv-cache-dtype", "fp8", replace(start.setup, kv_dtype="fp8"), start.measured)


def supports_fp8_cache(model: Model, setup: Setup) -> bool:
    """Whether vLLM finds kernels by itself for an fp8 cache on this GPU; no where that is not known.

    Read off platforms/cuda.py and v1/attention/backends of 0.8.5, 0.11 - 0.16 and 0.32. Since 0.11.1 it takes the first
    backend that can, FlashInfer from compute capability 8.0 on; before, Hopper's or Blackwell's own, or none
    (https://github.com/vllm-project/vllm/issues/26431). MLA and attention sinks have kernels of their own, which do fp8
    on Hopper and datacentre Blackwell only.
    """
    version, is_datacentre = release(setup.version), setup.capability in (9.0, 10.0)
    if model.latent:
        return is_datacentre and version >= (0, 11, 0)
    if model.architecture == "GptOssForCausalLM":
        return is_datacentre and version >= (0, 16, 0)
    if setup.capability == 9.0:
        return version >= (0, 8, 5)
    return (is_datacentre and version >= (0, 11, 0)) or (setup.capability >= 8.0 and version >= (0, 11, 1))


def _more_gpus(model: Model, start: Suggestion) -> Iterator[Suggestion]:
    """More GPUs of the same kind, as many as vLLM can divide the model among; nothing was measured on those."""
    tensor = 2 * start.setup.tensor
    while not start.setup.cpu and tensor <= MOST_GPUS:
        setup = replace(start.setup, tensor=tensor)
        with suppress(BadUsage):
            check(model, setup)
            yield Suggestion("--tensor-parallel-size", str(tensor), setup, {})
        tensor *= 2
