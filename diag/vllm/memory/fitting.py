"""Flags that make a server fit: fewer requests, a larger share, an fp8 cache, a shorter context, more GPUs."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import floor

from diag.core.errors import BadUsage
from diag.core.formatting import GIB
from diag.vllm.flags.registry import release
from diag.vllm.memory.kv_layout import NotCovered, cache_type
from diag.vllm.memory.ledger import (
    BUDGET,
    CONTEXT_GIB,
    KV_CACHE,
    USUAL_GRAPHS_GIB,
    Ledger,
    Measured,
    ledger,
    state_blocks_needed,
    uncounted,
)
from diag.vllm.memory.model import Model
from diag.vllm.memory.quantization import tables
from diag.vllm.memory.setup import Setup, check
from diag.vllm.memory.usage import ByteRange

MOST_GPUS, HOST = 64, 8
LEAST_LENGTH = 2048
"""Shorter contexts are of no practical use: other changes are tried."""
_STEPS = ((65536, 4096), (8192, 1024), (0, 256))
"""Lengths from which on a multiple is usual, and the multiple."""


@dataclass(frozen=True)
class Suggestion:
    """A flag with the value that makes it fit."""

    flag: str
    value: str
    setup: Setup
    measured: Measured
    """The rows of the log that are valid with this value too."""


def rounded(length: int, most: int) -> int:
    """Round down to a usual length: a multiple of 4,096 from 65,536 on, of 1,024 from 8,192 on, of 256; or `most`."""
    if length >= most:
        return most
    return length - length % next(step for start, step in _STEPS if length >= start)


def safe_length(page: Ledger) -> int | None:
    """Return the longest context that certainly fits; None if it is unknown."""
    return rounded(page.longest.low, page.model.longest) if page.longest and not uncounted(page) else None


def suggestions(page: Ledger, measured: Measured) -> list[Suggestion]:
    """Return flags that make the server fit; if none does alone, an fp8 cache or more GPUs with a shorter context."""
    model, start = page.model, Suggestion("", "", page.setup, measured)

    def fits(one: Suggestion) -> bool:
        after = ledger(model, one.setup, one.measured)
        may = after.verdict == "cannot tell" and bool(uncounted(page) and after.requests)  # all that is counted fits
        return may or after.verdict == "fits"

    other = (_fp8_cache(model, start), _shorter(model, start), _more_gpus(model, start))
    kinds = (_fewer_requests(page, start), _larger_share(start), *other)
    if alone := [one for kind in kinds if (one := next(filter(fits, kind), None))]:
        return alone
    first = chain(_fp8_cache(model, start), _more_gpus(model, start))
    pairs = (shorter for suggestion in first for shorter in _shorter(model, suggestion))
    return list(islice(filter(fits, pairs), 2))


def _shorter(model: Model, before: Suggestion) -> Iterator[Suggestion]:
    """Yield the longest context that fits after the changes of `before`."""
    length = safe_length(ledger(model, before.setup, before.measured)) or 0
    if LEAST_LENGTH <= length < before.setup.length:
        setup = replace(before.setup, length=length, auto_length=False)
        value = f"{before.value} --max-model-len {length}" if before.flag else str(length)
        yield Suggestion(before.flag or "--max-model-len", value, setup, before.measured)


def _fewer_requests(page: Ledger, start: Suggestion) -> Iterator[Suggestion]:
    """Yield as many requests as there are certainly blocks for their states."""
    if page.blocks and 0 < page.blocks.low < state_blocks_needed(page.model, page.setup):
        setup = replace(start.setup, sequences=page.blocks.low)
        yield Suggestion("--max-num-seqs", str(page.blocks.low), setup, start.measured)


def _larger_share(start: Suggestion) -> Iterator[Suggestion]:
    """Yield larger shares of the GPU, the smallest first; a smaller one if too little is left outside the budget."""
    setup, total = start.setup, start.setup.total
    if total is None or setup.cpu or setup.kv_cache_bytes is not None or setup.blocks is not None:
        return
    now = setup.utilization
    outside = CONTEXT_GIB[1] + (0 if setup.eager or setup.graphs_in_budget else USUAL_GRAPHS_GIB)
    most = floor(100 * min(1 - outside * GIB / total, 1 if setup.free is None else setup.free / total))
    for hundredth in range(floor(100 * now + 1e-6) + 1, most + 1) if most > 100 * now else (most,):
        share = hundredth / 100
        more = ByteRange.of(round((share - now) * total))
        grown = {name: size.plus(more) for name, size in start.measured.items() if name == KV_CACHE}
        measured = {name: size for name, size in start.measured.items() if name != BUDGET} | grown
        if share > 0:
            yield Suggestion("--gpu-memory-utilization", f"{share:.2f}", replace(setup, utilization=share), measured)


def _fp8_cache(model: Model, start: Suggestion) -> Iterator[Suggestion]:
    if halves_cache(model, start.setup):
        yield Suggestion("--kv-cache-dtype", "fp8", replace(start.setup, kv_dtype="fp8"), start.measured)


def halves_cache(model: Model, setup: Setup) -> bool:
    """Return True if an fp8 cache is smaller and vLLM finds kernels for it by itself; False if that is unknown.

    Read off platforms/cuda.py and v1/attention/backends of 0.8.5, 0.11 - 0.16 and 0.32. Since 0.11.1 it takes the first
    backend that can, FlashInfer from compute capability 8.0 on; before, Hopper's or Blackwell's own, or none
    (https://github.com/vllm-project/vllm/issues/26431). MLA and attention sinks have kernels of their own, which do fp8
    on Hopper and datacentre Blackwell only.
    """
    version, is_datacentre = release(setup.version), setup.capability in (9.0, 10.0, 10.3)
    with suppress(NotCovered):  # then naming the type is what helps
        if tables().number_bytes.get(cache_type(model, setup), 2) < 2:
            return False
    if model.latent:
        return is_datacentre and version >= (0, 11, 0)
    if model.architecture == "GptOssForCausalLM":
        return is_datacentre and version >= (0, 16, 0)
    if setup.capability == 9.0:
        return version >= (0, 8, 5)
    return (is_datacentre and version >= (0, 11, 0)) or (setup.capability >= 8.0 and version >= (0, 11, 1))


def _more_gpus(model: Model, start: Suggestion) -> Iterator[Suggestion]:
    """Yield more GPUs of one kind among which vLLM can divide the model; the log has no measurements of them."""
    count = 2 * start.setup.gpus
    while not (start.setup.cpu or start.setup.is_part) and count <= MOST_GPUS:
        tensor = max(min(count, HOST), start.setup.tensor)  # vLLM's docs: tensors in a host, stages over hosts
        setup = replace(start.setup, tensor=tensor, pipeline=-(-count // tensor))
        stages = f" --pipeline-parallel-size {setup.pipeline}" if setup.pipeline > 1 else ""
        with suppress(BadUsage):
            check(model, setup)
            yield Suggestion("--tensor-parallel-size", f"{tensor}{stages}", setup, {})
        count *= 2
