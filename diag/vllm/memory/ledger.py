"""The memory ledger of one GPU: what is taken of the budget, what is left for the KV cache, and what that holds.

Budget, weights and KV cache are arithmetic. What vLLM measures at its start is a range here, wide enough for what its
logs say in public reports, and a number where this server's log says it. A verdict holds at both ends of the ranges.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from diag.core.formatting import gibibytes
from diag.core.sizes import GIB
from diag.vllm.memory.cache import RESERVED, Cache, NotCovered, cache
from diag.vllm.memory.model import Model
from diag.vllm.memory.parts import ALONE, GRAPHS, TOGETHER, Basis, ByteRange, Stage, activations, check, weights
from diag.vllm.memory.setup import SPACE, Setup

Verdict = Literal["fits", "does not fit", "cannot tell"]
BUDGET, WEIGHTS, ACTIVATIONS = "budget", "weights", "activations"
CAPTURED, OTHER, POOL = "CUDA graphs", "not torch's", "KV cache"
CONTEXT = 0.3, 0.6
"""GiB of a CUDA context, outside of the budget: 78.84 of 79.25 and 22.93 of 23.56 free when vLLM starts."""
USUAL_GRAPHS = 0.5
"""GiB outside of the budget too up to 0.19.1, where vLLM did not count them."""

Measured = Mapping[str, ByteRange]
"""What the log says in bytes, as far as it is rounded, by the name of the row."""


@dataclass(frozen=True)
class Row:
    """A line of the ledger: bytes on one GPU as they are computed, None where they cannot be, and what the log says."""

    name: str
    computed: ByteRange | None
    basis: Basis
    how: str
    logged: ByteRange | None = None

    @property
    def size(self) -> ByteRange | None:
        """What counts: the log, unless it only rounds what is exact."""
        if self.logged is None or (self.basis == "exact" and self.differs == 0):
            return self.computed
        return self.logged

    @property
    def differs(self) -> int | None:
        """Bytes by which the log lies outside of what was computed; 0 within it, None where one is not known."""
        if self.logged is None or self.computed is None:
            return None
        above, below = self.logged.low - self.computed.high, self.logged.high - self.computed.low
        return max(above, 0) or min(below, 0)


@dataclass(frozen=True)
class Ledger:
    """All of it; `cache` is None where the KV cache cannot be computed, `why` are the reasons for the verdict."""

    setup: Setup
    model: Model
    rows: tuple[Row, ...]
    cache: Cache | None
    block_bytes: int
    blocks: ByteRange | None
    verdict: Verdict
    why: tuple[str, ...] = ()

    @property
    def pool(self) -> ByteRange | None:
        """Bytes for the KV cache."""
        return next(row.size for row in self.rows if row.name == POOL)

    @property
    def needed(self) -> int | None:
        """Bytes of KV cache that a request of the longest context takes."""
        return self.cache.blocks(self.setup.length) * self.block_bytes if self.cache else None

    @property
    def token_bytes(self) -> float | None:
        """Of a token beyond every window."""
        return self.cache.groups * self.block_bytes / self.cache.block if self.cache else None

    @property
    def concurrency(self) -> tuple[float, float] | None:
        """How many requests of the longest context the pool holds, as vLLM counts them."""
        if not (self.cache and self.blocks):
            return None
        each = self.cache.blocks(self.setup.length)
        return self.blocks.low / each, self.blocks.high / each

    @property
    def tokens(self) -> ByteRange | None:
        """What the pool holds, as vLLM's log counts it."""
        at_once = self.concurrency
        return ByteRange(*(int(each * self.setup.length) for each in at_once)) if at_once else None

    @property
    def longest(self) -> ByteRange | None:
        """The longest context that the pool holds, up to the model's own."""
        if not (self.cache and self.blocks):
            return None
        both = (self.cache.longest(each, self.model.longest) for each in (self.blocks.low, self.blocks.high))
        return ByteRange(*both)


@dataclass
class _Book:
    """The rows while they are written, with what the log says beside them.

    Where it says what is left in the end, that is computed from the shape alone: two ways to the same number.
    """

    measured: Measured
    rows: list[Row] = field(default_factory=list)

    def write(self, name: str, size: ByteRange | None, basis: Basis, how: str) -> ByteRange | None:
        self.rows.append(Row(name, size, basis, how, self.measured.get(name)))
        row = self.rows[-1]
        return row.computed if POOL in self.measured and name != POOL else row.size


def ledger(model: Model, setup: Setup, measured: Measured | None = None) -> Ledger:
    """The ledger of one GPU, of the fullest stage of pipeline parallelism; BadUsage for what vLLM refuses."""
    check(model, setup)
    try:
        kept, unknown = cache(model, setup), ""
    except NotCovered as error:
        kept, unknown = None, str(error)
    found = [_of_stage(model, setup, measured or {}, kept, each) for each in weights(model, setup)]
    tightest = min(found, key=lambda each: each.blocks.low if each.blocks else each.pool.low if each.pool else 0)
    certain, doubts = _certain(tightest), _doubts(tightest, unknown)
    if setup.lowering:
        certain, doubts = [], list(dict.fromkeys((*certain, *_not_counted(setup.lowering), *doubts)))
    verdict: Verdict = "does not fit" if certain else "cannot tell" if doubts else "fits"
    return replace(tightest, verdict=verdict, why=tuple(certain or doubts))


def _of_stage(model: Model, setup: Setup, measured: Measured, kept: Cache | None, stage: Stage) -> Ledger:
    book = _Book(measured)
    if setup.cpu:
        book.write(WEIGHTS, stage.weights, stage.basis, f"{stage.how}, in the host's memory beside the KV cache")
    taken = [] if setup.cpu else _taken(book, model, setup, stage)
    alone = kept is not None and kept.groups == 1 and not kept.windows
    block_bytes = kept.block_bytes(stage.layers if alone else None) if kept else 0
    pool = book.write(POOL, *_pool(setup, taken, block_bytes))
    blocks = (
        ByteRange(*(max(each, 0) // block_bytes for each in (pool.low, pool.high))) if pool and block_bytes else None
    )
    return Ledger(setup, model, tuple(book.rows), kept, block_bytes, blocks, "cannot tell")


def _taken(book: _Book, model: Model, setup: Setup, stage: Stage) -> list[ByteRange | None]:
    """The budget, and what counts against it."""
    total = setup.total
    share = None if total is None else ByteRange.of(round(total * setup.utilization))
    of = "the GPU: give --gpu h100, --gpu-memory 79.1GiB or --log" if total is None else gibibytes(total)
    budget = book.write(BUDGET, share, "exact" if share else "unknown", f"{setup.utilization:g} of {of}")
    weighed = book.write(WEIGHTS, stage.weights, stage.basis, stage.how)
    how = f"a step of {setup.batched:,} tokens, logits of {setup.sequences:,} requests"
    peak = activations(model, setup) if model.family else None
    active = book.write(ACTIVATIONS, peak, "estimated" if peak else "unknown", how)
    captured = book.write(CAPTURED, *_graphs(setup))
    several = setup.gpus * setup.data > 1
    how = "NCCL's and the libraries' buffers" if several else "the libraries' buffers"
    other = book.write(OTHER, ByteRange.gib(TOGETHER if several else ALONE), "estimated", how)
    return [budget, weighed, active, other, *([captured] if setup.graphs_inside else [])]


def _graphs(setup: Setup) -> tuple[ByteRange, Basis, str]:
    if setup.eager:
        return ByteRange.of(0), "exact", "--enforce-eager captures none"
    where = "counted since 0.20.0" if setup.graphs_inside else "outside of the budget up to 0.19.1"
    return ByteRange.gib(GRAPHS), "estimated", where


def _pool(setup: Setup, taken: Sequence[ByteRange | None], block_bytes: int) -> tuple[ByteRange | None, Basis, str]:
    if setup.blocks and block_bytes:
        return ByteRange.of(setup.blocks * block_bytes), "exact", "--num-gpu-blocks-override"
    if setup.pool is not None:
        return ByteRange.of(setup.pool), "exact", SPACE if setup.cpu else "--kv-cache-memory-bytes, whatever the budget"
    known = [each for each in taken if each]
    if not taken or len(known) < len(taken):
        return None, "unknown", f"{SPACE} says it" if setup.cpu else "the budget less all of the above"
    return known[0].less(*known[1:]), "estimated", "the budget less all of the above"


# -- the verdict ------------------------------------------------------------------------------------------------------


def _certain(found: Ledger) -> list[str]:
    """Why it does not fit, at whichever end of the ranges."""
    setup, kept, blocks, pool = found.setup, found.cache, found.blocks, found.pool
    if pool and pool.high <= 0:
        return [f"nothing is left for the KV cache: {gibibytes(-pool.high)} are missing at best"]
    why = [each for each, sure in _outside(found) if sure]
    least = 1 if setup.fitted else setup.length
    if kept and blocks and blocks.high < kept.blocks(least) + RESERVED:
        needed = kept.blocks(least) * found.block_bytes
        why.append(
            f"one request of {least:,} tokens takes {gibibytes(needed)} of KV cache plus one block that vLLM reserves;"
            f" the KV cache has {gibibytes(blocks.high * found.block_bytes)}"
            f"{'' if blocks.low == blocks.high else ' at best'}"
        )
    return why


def _doubts(found: Ledger, unknown: str) -> list[str]:
    """Why nobody can tell before a start whether it fits."""
    setup, kept, blocks = found.setup, found.cache, found.blocks
    why = [unknown] if unknown else []
    if setup.cpu and found.pool is None:
        why.append(f"the size of the KV cache is not known: start it with {SPACE}=<GiB>")
    if kept and blocks and blocks.low < kept.blocks(1 if setup.fitted else setup.length) + RESERVED:
        names = [row.name for row in found.rows if row.basis == "estimated" and not row.logged and row.name != POOL]
        why.append(f"whether the longest request fits depends on what is estimated: {', '.join(names)}")
    return why + [each for each, sure in _outside(found) if not sure] + uncounted(found)


def uncounted(found: Ledger) -> list[str]:
    """What takes memory and stands in no row; nothing where the log says what is left for the KV cache."""
    if any(row.name == POOL and row.logged for row in found.rows):
        return []
    missing = [f"{row.name}: not known, {row.how}" for row in found.rows if not row.size and row.name != POOL]
    sees = found.model.vision and not found.setup.text_only  # 17.91 GiB instead of 1.41 in one report
    eyes = ["the activations of its vision part"] if sees else []
    return missing + _not_counted((*found.setup.uncounted, *eyes, *found.setup.lowering))


def _not_counted(reasons: Sequence[str]) -> list[str]:
    return [f"not counted: {each}" for each in reasons]


def _outside(found: Ledger) -> list[tuple[str, bool]]:
    """What is wrong with what is left beside the budget, and whether that is sure."""
    setup = found.setup
    if setup.cpu or setup.total is None:
        return []
    sizes = {row.name: row.size for row in found.rows if row.size}
    budget, whole = sizes.pop(BUDGET), ByteRange.of(setup.total)
    fixed = setup.pool is not None or setup.blocks is not None
    if setup.free is not None and not fixed and setup.free < budget.low:
        return [(f"{gibibytes(setup.free)} were free when vLLM started, and it wants {gibibytes(budget.low)}", True)]
    left = whole.less(*sizes.values()) if fixed else whole.less(budget)
    if left.high < 0:
        return [(f"together this takes {gibibytes(-left.high)} more than the GPU has", True)]
    captured = not fixed and not setup.eager and not setup.graphs_inside
    usual = CONTEXT[1] + (USUAL_GRAPHS if captured else 0)
    what = "a CUDA context and its graphs" if captured else "a CUDA context"
    why = f"{gibibytes(max(left.low, 0))} of the GPU are left beside this, and {what} may take {usual:.1f} GiB"
    return [(why, left.high < CONTEXT[0] * GIB)] if left.low < usual * GIB else []
