"""The memory ledger of one GPU: what is taken of the budget, what is left for the KV cache, and what that holds.

Budget, weights and KV cache are arithmetic. What vLLM measures at its start is a range here, wide enough for what its
logs say in public reports, and a number where this server's log says it. A verdict holds at both ends of the ranges.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from diag.core.formatting import GIB, gibibytes, quantity
from diag.vllm.memory.byte_range import ByteRange
from diag.vllm.memory.cache import RESERVED, CacheLayout, NotCovered, cache_layout
from diag.vllm.memory.model import Model
from diag.vllm.memory.refusals import check
from diag.vllm.memory.setup import CPU_SPACE, Setup
from diag.vllm.memory.usage import Basis, Stage, activations, weights

Verdict = Literal["fits", "does not fit", "cannot tell"]
BUDGET, WEIGHTS, ACTIVATIONS = "budget", "weights", "activations"
GRAPHS, NON_TORCH, KV_CACHE = "CUDA graphs", "non-torch", "KV cache"
GRAPHS_GIB = 0.1, 2.0
"""Captured CUDA graphs in public logs: 0.23 (8B), 0.37 (0.6B), 0.67 (7B), 1.62 estimated (35B MoE)."""
NON_TORCH_GIB, NON_TORCH_GIB_PARALLEL = (0.05, 0.4), (0.2, 1.2)
"""What torch did not allocate: 0.05 - 0.26 on one GPU; 0.20 - 0.33 with TP 2 and 4, 0.95 with expert parallelism."""
CONTEXT_GIB = 0.3, 0.6
"""A CUDA context, outside the budget: 78.84 of 79.25 and 22.93 of 23.56 free when vLLM starts."""
USUAL_GRAPHS_GIB = 0.5
"""Graphs are outside the budget too up to 0.19.1, where vLLM did not count them."""

Measured = Mapping[str, ByteRange]
"""What the log says in bytes, as far as it is rounded, by the name of the row."""


@dataclass(frozen=True)
class Row:
    """A line of the ledger: bytes on one GPU as computed, None where they cannot be, and as logged."""

    name: str
    computed: ByteRange | None
    basis: Basis
    source: str
    logged: ByteRange | None = None

    @property
    def size(self) -> ByteRange | None:
        """What counts: the log, unless it only rounds what is exact."""
        if self.logged is None or (self.basis == "exact" and self.difference == 0):
            return self.computed
        return self.logged

    @property
    def difference(self) -> int | None:
        """Bytes by which the log lies outside what was computed; 0 within it, None where one is unknown."""
        if self.logged is None or self.computed is None:
            return None
        above, below = self.logged.low - self.computed.high, self.logged.high - self.computed.low
        return max(above, 0) or min(below, 0)


@dataclass(frozen=True)
class Ledger:
    """All of it; `layout` is None where the KV cache cannot be computed, `reasons` are those for the verdict."""

    setup: Setup
    model: Model
    rows: tuple[Row, ...]
    layout: CacheLayout | None
    block_bytes: int
    blocks: ByteRange | None
    verdict: Verdict
    reasons: tuple[str, ...] = ()

    @property
    def kv_cache(self) -> ByteRange | None:
        """Bytes for the KV cache."""
        return next(row.size for row in self.rows if row.name == KV_CACHE)

    @property
    def needed(self) -> int | None:
        """Bytes of KV cache that a request of the longest context takes."""
        return self.layout.blocks(self.setup.length) * self.block_bytes if self.layout else None

    @property
    def token_bytes(self) -> float | None:
        """Of a token beyond every sliding window."""
        return self.layout.groups * self.block_bytes / self.layout.block if self.layout else None

    @property
    def concurrency(self) -> tuple[float, float] | None:
        """How many requests of the longest context the KV cache holds, as vLLM counts them."""
        if not (self.layout and self.blocks):
            return None
        request = self.layout.blocks(self.setup.length)
        return self.blocks.low / request, self.blocks.high / request

    @property
    def tokens(self) -> ByteRange | None:
        """How many tokens the KV cache holds, as vLLM's log counts them."""
        requests = self.concurrency
        return ByteRange(*(int(count * self.setup.length) for count in requests)) if requests else None

    @property
    def longest(self) -> ByteRange | None:
        """The longest context that the KV cache holds, up to the model's own."""
        if not (self.layout and self.blocks):
            return None
        bounds = (self.layout.longest(blocks, self.model.longest) for blocks in (self.blocks.low, self.blocks.high))
        return ByteRange(*bounds)


@dataclass
class _LedgerWriter:
    """The rows while they are written, with what the log says beside them.

    Where the log says what is left in the end, that is computed from the shape alone: two ways to the same number.
    """

    measured: Measured
    rows: list[Row] = field(default_factory=list)

    def write(self, name: str, size: ByteRange | None, basis: Basis, source: str) -> ByteRange | None:
        self.rows.append(Row(name, size, basis, source, self.measured.get(name)))
        row = self.rows[-1]
        return row.computed if KV_CACHE in self.measured and name != KV_CACHE else row.size


def ledger(model: Model, setup: Setup, measured: Measured | None = None) -> Ledger:
    """The ledger of one GPU, of the fullest stage of pipeline parallelism; BadUsage for what vLLM refuses."""
    check(model, setup)
    try:
        layout, unknown = cache_layout(model, setup), ""
    except NotCovered as error:
        layout, unknown = None, str(error)
    stages = [_of_stage(model, setup, measured or {}, layout, stage) for stage in weights(model, setup)]
    tightest = min(stages, key=_room)
    certain, doubts = _certain(tightest), _doubts(tightest, unknown)
    if setup.savings:
        certain, doubts = [], list(dict.fromkeys((*certain, *_not_counted(setup.savings), *doubts)))
    verdict: Verdict = "does not fit" if certain else "cannot tell" if doubts else "fits"
    return replace(tightest, verdict=verdict, reasons=tuple(certain or doubts))


def _room(found: Ledger) -> int:
    """What its KV cache has at the least, by which stages are compared."""
    if found.blocks:
        return found.blocks.low
    return found.kv_cache.low if found.kv_cache else 0


def _of_stage(model: Model, setup: Setup, measured: Measured, layout: CacheLayout | None, stage: Stage) -> Ledger:
    writer = _LedgerWriter(measured)
    if setup.cpu:
        writer.write(WEIGHTS, stage.weights, stage.basis, f"{stage.source}, in host memory beside the KV cache")
    usage = [] if setup.cpu else _usage(writer, model, setup, stage)
    is_uniform = layout is not None and layout.groups == 1 and not layout.windows
    block_bytes = layout.block_bytes(stage.layers if is_uniform else None) if layout else 0
    size = writer.write(KV_CACHE, *_kv_cache(setup, usage, block_bytes))
    blocks = None
    if size and block_bytes:
        blocks = ByteRange(*(max(bound, 0) // block_bytes for bound in (size.low, size.high)))
    return Ledger(setup, model, tuple(writer.rows), layout, block_bytes, blocks, "cannot tell")


def _usage(writer: _LedgerWriter, model: Model, setup: Setup, stage: Stage) -> list[ByteRange | None]:
    """The budget, and what counts against it."""
    budget = writer.write(BUDGET, *_budget(setup))
    weighed = writer.write(WEIGHTS, stage.weights, stage.basis, stage.source)
    step = f"a step of {setup.batched_tokens:,} tokens, logits of {setup.sequences:,} requests"
    peak = activations(model, setup) if model.family else None
    active = writer.write(ACTIVATIONS, peak, "estimated" if peak else "unknown", step)
    captured = writer.write(GRAPHS, *_graphs(setup))
    is_parallel = setup.gpus * setup.data > 1
    buffers = "buffers of NCCL and CUDA libraries" if is_parallel else "buffers of CUDA libraries"
    bounds = NON_TORCH_GIB_PARALLEL if is_parallel else NON_TORCH_GIB
    other = writer.write(NON_TORCH, ByteRange.gib(bounds), "estimated", buffers)
    return [budget, weighed, active, other, *([captured] if setup.graphs_in_budget else [])]


def _budget(setup: Setup) -> tuple[ByteRange | None, Basis, str]:
    share = quantity(setup.utilization, "share")
    if setup.total is None:
        return None, "unknown", f"{share} of the GPU: give --gpu h100, --gpu-memory 79.1GiB or --log"
    return ByteRange.of(round(setup.total * setup.utilization)), "exact", f"{share} of {gibibytes(setup.total)}"


def _graphs(setup: Setup) -> tuple[ByteRange, Basis, str]:
    if setup.eager:
        return ByteRange.of(0), "exact", "none with --enforce-eager"
    where = "counted since vLLM 0.20.0" if setup.graphs_in_budget else "outside the budget up to vLLM 0.19.1"
    return ByteRange.gib(GRAPHS_GIB), "estimated", where


def _kv_cache(setup: Setup, usage: Sequence[ByteRange | None], block_bytes: int) -> tuple[ByteRange | None, Basis, str]:
    if setup.blocks and block_bytes:
        return ByteRange.of(setup.blocks * block_bytes), "exact", "--num-gpu-blocks-override"
    if setup.kv_cache_bytes is not None:
        flag = CPU_SPACE if setup.cpu else "--kv-cache-memory-bytes, whatever the budget"
        return ByteRange.of(setup.kv_cache_bytes), "exact", flag
    known = [size for size in usage if size]
    if not usage or len(known) < len(usage):
        return None, "unknown", f"set by {CPU_SPACE}" if setup.cpu else "the budget minus all of the above"
    return known[0].less(*known[1:]), "estimated", "the budget minus all of the above"


# -- the verdict ------------------------------------------------------------------------------------------------------


def _certain(found: Ledger) -> list[str]:
    """Why it does not fit, at whichever end of the ranges."""
    setup, layout, blocks, kv_cache = found.setup, found.layout, found.blocks, found.kv_cache
    if kv_cache and kv_cache.high <= 0:
        return [f"nothing is left for the KV cache: at least {gibibytes(-kv_cache.high)} too little"]
    reasons = [reason for reason, is_certain in _outside_budget(found) if is_certain]
    least = 1 if setup.auto_length else setup.length
    if layout and blocks and blocks.high < layout.blocks(least) + RESERVED:
        needed, room = (gibibytes(count * found.block_bytes) for count in (layout.blocks(least), blocks.high))
        reasons.append(
            f"one request of {least:,} tokens takes {needed} of KV cache plus one block that vLLM reserves;"
            f" the KV cache has {room}{'' if blocks.low == blocks.high else ' at best'}"
        )
    return reasons


def _doubts(found: Ledger, unknown: str) -> list[str]:
    """Why it is uncertain before a start whether it fits."""
    setup, layout, blocks = found.setup, found.layout, found.blocks
    reasons = [unknown] if unknown else []
    if setup.cpu and found.kv_cache is None:
        reasons.append(f"the KV cache size is unknown: set {CPU_SPACE}=<GiB>")
    if layout and blocks and blocks.low < layout.blocks(1 if setup.auto_length else setup.length) + RESERVED:
        estimates = [row.name for row in found.rows if row.basis == "estimated" and not row.logged]
        names = ", ".join(name for name in estimates if name != KV_CACHE)
        reasons.append(f"whether the longest request fits depends on estimates: {names}")
    doubtful = [reason for reason, is_certain in _outside_budget(found) if not is_certain]
    return reasons + doubtful + uncounted(found)


def uncounted(found: Ledger) -> list[str]:
    """What takes memory and stands in no row; nothing where the log says what is left for the KV cache."""
    if any(row.name == KV_CACHE and row.logged for row in found.rows):
        return []
    missing = [f"{row.name} unknown: {row.source}" for row in found.rows if not row.size and row.name != KV_CACHE]
    sees = found.model.vision and not found.setup.text_only  # 17.91 GiB instead of 1.41 in one report
    vision = ["activations of the vision encoder"] if sees else []
    return missing + _not_counted((*found.setup.uncounted, *vision, *found.setup.savings))


def _not_counted(reasons: Sequence[str]) -> list[str]:
    return [f"not counted: {reason}" for reason in reasons]


def _outside_budget(found: Ledger) -> list[tuple[str, bool]]:
    """What is wrong with the memory that is left outside the budget, and whether that is certain."""
    setup = found.setup
    if setup.cpu or setup.total is None:
        return []
    sizes = {row.name: row.size for row in found.rows if row.size}
    budget, total = sizes.pop(BUDGET), ByteRange.of(setup.total)
    is_fixed = setup.kv_cache_bytes is not None or setup.blocks is not None
    if setup.free is not None and not is_fixed and setup.free < budget.low:
        return [(f"only {gibibytes(setup.free)} were free when vLLM started; it wants {gibibytes(budget.low)}", True)]
    left = total.less(*sizes.values()) if is_fixed else total.less(budget)
    if left.high < 0:
        return [(f"together this takes {gibibytes(-left.high)} more than the GPU has", True)]
    captures = not is_fixed and not setup.eager and not setup.graphs_in_budget
    usual = CONTEXT_GIB[1] + (USUAL_GRAPHS_GIB if captures else 0)
    what = "a CUDA context and CUDA graphs" if captures else "a CUDA context"
    outside = gibibytes(max(left.low, 0))
    reason = f"{outside} of the GPU remain for {what}, which may take {usual:.1f} GiB"
    return [(reason, left.high < CONTEXT_GIB[0] * GIB)] if left.low < usual * GIB else []
