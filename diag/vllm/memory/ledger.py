"""The memory ledger of one GPU, its verdict, and flags that make a server fit."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from diag.core.errors import BadUsage
from diag.core.formatting import GIB, gibibytes, quantity
from diag.vllm.command.command import Command
from diag.vllm.memory import profiling
from diag.vllm.memory.additions import adapter_bytes, draft_bytes
from diag.vllm.memory.architectures import removed
from diag.vllm.memory.kv_layout import RESERVED, CacheLayout, NotCovered, cache_layout
from diag.vllm.memory.model import Model
from diag.vllm.memory.setup import CPU_SPACE, GpuSpec, Setup, check
from diag.vllm.memory.setup import setup as setup_of
from diag.vllm.memory.usage import Basis, ByteRange, Stage, weights
from diag.vllm.memory.weights import unnamed_encoders

Verdict = Literal["fits", "does not fit", "cannot tell"]
BUDGET, WEIGHTS, ACTIVATIONS = "budget", "weights", "activations"
DRAFT, ADAPTERS = "draft model", "LoRA adapters"
GRAPHS, NON_TORCH, KV_CACHE = "CUDA graphs", "non-torch", "KV cache"
CONTEXT_GIB = 0.3, 0.6
"""A CUDA context, outside the budget: 78.84 of 79.25 and 22.93 of 23.56 free when vLLM starts."""
USUAL_GRAPHS_GIB = 0.5
"""Graphs are outside the budget too up to 0.19.1, where vLLM did not count them."""

Measured = Mapping[str, ByteRange]
"""Bytes from the log by the name of the row, as a range since the log rounds."""


@dataclass(frozen=True)
class Row:
    """A line of the ledger: bytes on one GPU as computed, None if they cannot be, and as logged."""

    name: str
    computed: ByteRange | None
    basis: Basis
    source: str
    logged: ByteRange | None = None
    why: str = ""
    """The reason why the bounds of an estimate are apart."""

    @property
    def size(self) -> ByteRange | None:
        """Return the size to use: the logged one, unless it only rounds an exact one."""
        if self.logged is None or (self.basis == "exact" and self.difference == 0):
            return self.computed
        return self.logged

    @property
    def difference(self) -> int | None:
        """Return the bytes by which the log is outside the computed range; 0 inside, None if one is unknown."""
        if self.logged is None or self.computed is None:
            return None
        above, below = self.logged.low - self.computed.high, self.logged.high - self.computed.low
        return max(above, 0) or min(below, 0)


@dataclass(frozen=True)
class Ledger:
    """The memory of one GPU; `layout` is None if the KV cache cannot be computed, `reasons` explain the verdict."""

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
        return next(row.size for row in self.rows if row.name == KV_CACHE)

    @property
    def needed(self) -> int | None:
        """Return the bytes of KV cache that a request of the longest context takes."""
        return self.layout.blocks(self.setup.length) * self.block_bytes if self.layout else None

    @property
    def token_bytes(self) -> float | None:
        """Return the bytes of a token beyond every sliding window."""
        return self.layout.token_bytes(self.block_bytes) if self.layout else None

    @property
    def requests(self) -> int | None:
        """Return the requests of the longest context that certainly run at a time without preemption."""
        if not (self.layout and self.blocks):
            return None
        return self.layout.requests(self.blocks.low, self.setup.length)

    @property
    def concurrency(self) -> tuple[float, float] | None:
        """Return the requests of the longest context that vLLM logs, all of them while their prompts are read."""
        if not (self.layout and self.blocks):
            return None
        request = self.layout.blocks(self.setup.length)
        return self.blocks.low / request, self.blocks.high / request

    @property
    def tokens(self) -> ByteRange | None:
        """Return the tokens that the KV cache holds, as vLLM's log counts them."""
        if not (self.layout and self.blocks):
            return None
        sizes = (self.blocks.low, self.blocks.high, self.blocks.central)
        return ByteRange(*(self.layout.logged_tokens(blocks, self.setup.length) for blocks in sizes))

    def is_certain(self, name: str) -> bool:
        """Return True if a row is exact or logged."""
        return any(row.name == name and (row.logged or row.basis == "exact") for row in self.rows)

    @property
    def doubt(self) -> str:
        """Return the reason why the KV cache has a range: that of the widest estimate; "" for an exact size."""
        if self.is_certain(KV_CACHE):
            return ""
        counted = [row for row in self.rows if row.size and not row.logged and row.basis == "estimated" and row.why]
        widest = max(counted, key=lambda row: row.size.high - row.size.low if row.size else 0, default=None)
        if widest is None or widest.name == KV_CACHE:
            return widest.why if widest else ""
        return f"{widest.name}: {widest.why}"

    @property
    def longest(self) -> ByteRange | None:
        """Return the longest context that the KV cache holds, up to the model's own."""
        if not (self.layout and self.blocks):
            return None
        bounds = (self.layout.longest(blocks, self.model.longest) for blocks in (self.blocks.low, self.blocks.high))
        return ByteRange(*bounds)


@dataclass
class _LedgerWriter:
    """The rows while they are written, each with its size in the log.

    If the log has the size of the KV cache, that row is computed from the shape alone, so that both can be compared.
    """

    measured: Measured
    rows: list[Row] = field(default_factory=list)

    def write(self, name: str, size: ByteRange | None, basis: Basis, source: str, why: str = "") -> ByteRange | None:
        self.rows.append(Row(name, size, basis, source, self.measured.get(name), why))
        row = self.rows[-1]
        return row.computed if KV_CACHE in self.measured and name != KV_CACHE else row.size

    def estimate(self, name: str, size: ByteRange, source: str) -> ByteRange | None:
        return self.write(name, size, "estimated", source, size.why)

    def write_part(self, name: str, size: ByteRange, source: str, why: str) -> ByteRange | None:
        """Write a row that the logged weights contain: it is taken out of them."""
        logged = next((row.logged for row in self.rows if row.name == WEIGHTS), None)
        basis: Basis = "exact" if size.low == size.high else "estimated"
        used = self.write(name, size, basis, source, why)
        return ByteRange.of(0) if logged and KV_CACHE not in self.measured else used


def _blocks(size: ByteRange, block_bytes: int) -> ByteRange:
    return ByteRange(*(max(bound, 0) // block_bytes for bound in (size.low, size.high, size.central)))


def ledger(model: Model, setup: Setup, measured: Measured | None = None) -> Ledger:
    """Return the ledger of one GPU, of the fullest pipeline stage; BadUsage if vLLM refuses the setup."""
    check(model, setup)
    layout, unknown = None, ""
    try:
        layout = cache_layout(model, setup) if model.keeps_tokens else None
    except NotCovered as error:
        unknown = str(error)
    stages = [_stage_ledger(model, setup, measured or {}, layout, stage) for stage in weights(model, setup)]
    # the least KV cache, in blocks if their size is known, else in bytes
    tightest = min(stages, key=lambda stage: (stage.blocks or stage.kv_cache or ByteRange.of(0)).low)
    blocks, kv_cache, least = tightest.blocks, tightest.kv_cache, 1 if setup.auto_length else setup.length
    needed = layout.blocks(least) + RESERVED if layout and blocks else 0
    outside = _outside_budget(tightest)

    certain = [f"vLLM refuses to start: {setup.refused}"] if setup.refused else []
    certain += [reason for reason, is_certain in outside if is_certain]
    if kv_cache and kv_cache.high <= 0 and model.keeps_tokens:
        certain.append(_nothing_left(kv_cache, setup))
    elif blocks and blocks.high < needed:
        takes, room = (gibibytes(count * tightest.block_bytes) for count in (needed - RESERVED, blocks.high))
        certain.append(
            f"one request of {least:,} tokens takes {takes} of KV cache plus one block that vLLM reserves;"
            f" the KV cache has {room}{'' if blocks.low == blocks.high else ' at best'}"
        )

    doubts = [unknown] if unknown else []
    if setup.removed:
        (doubts if removed().get(model.architecture, "").endswith("+") else certain).insert(0, setup.removed)
    if blocks and blocks.low < (wanted := state_blocks_needed(model, setup)):
        (certain if blocks.high < wanted else doubts).append(_few_state_blocks(wanted, blocks))
    if setup.cpu and kv_cache is None:
        doubts.append(f"the KV cache size is unknown: set {CPU_SPACE}=<GiB>")
    if blocks and blocks.low < needed:
        estimates = [row.name for row in tightest.rows if row.basis == "estimated" and not row.logged]
        names = ", ".join(name for name in estimates if name != KV_CACHE)
        doubts.append(f"whether the longest request fits depends on estimates: {names}")
    doubts += [reason for reason, is_certain in outside if not is_certain]
    doubts += uncounted(tightest)

    if setup.savings:
        savings = [f"not counted: {reason}" for reason in setup.savings]
        certain, doubts = [], list(dict.fromkeys((*certain, *savings, *doubts)))
    verdict: Verdict = "does not fit" if certain else "cannot tell" if doubts else "fits"
    first = [setup.removed] if setup.removed else []
    return replace(tightest, verdict=verdict, reasons=tuple(dict.fromkeys((*first, *(certain or doubts)))))


def state_blocks_needed(model: Model, setup: Setup) -> int:
    """Return the least blocks with which vLLM captures decoding steps of a model with states; 0 if it does not ask."""
    captures = setup.full_graphs and not setup.eager and setup.captured != 0
    keeps_states = any(mixer.kind == "state" and mixer.cached for mixer in model.mixers)
    return setup.sequences if captures and keeps_states and setup.since("state_blocks") else 0


def _nothing_left(kv_cache: ByteRange, setup: Setup) -> str:
    least = (
        f": at least {gibibytes(-kv_cache.high)} too little" if kv_cache.high <= 0 else f" with vLLM {setup.version}"
    )
    return f"nothing is left for the KV cache{least}"


def _few_state_blocks(wanted: int, blocks: ByteRange) -> str:
    there = f"{blocks.low:,}" if blocks.low == blocks.high else f"{blocks.low:,} to {blocks.high:,}"
    certain = f"; --max-num-seqs {blocks.low} certainly has enough" if blocks.low else ""
    return (
        f"vLLM refuses --max-num-seqs {wanted}: each request needs a block for its state, and the KV cache has {there}"
        f"{certain}"
    )


def with_kv_cache(page: Ledger, size: ByteRange, why: str = "") -> Ledger:
    """Return a ledger with another size of the KV cache; what fitted may then be unknown, or not fit at all."""
    rows = tuple(replace(row, computed=size, why=why or row.why) if row.name == KV_CACHE else row for row in page.rows)
    texts = {_nothing_left(page.kv_cache, page.setup): _nothing_left(size, page.setup)} if page.kv_cache else {}
    blocks = _blocks(size, page.block_bytes) if page.blocks else None
    wanted = state_blocks_needed(page.model, page.setup)
    if page.blocks and blocks:
        texts |= {_few_state_blocks(wanted, page.blocks): _few_state_blocks(wanted, blocks)}
    page = replace(page, rows=rows, blocks=blocks, reasons=tuple(texts.get(text, text) for text in page.reasons))
    if not blocks:
        return page
    least = 1 if page.setup.auto_length else page.setup.length
    needed = page.layout.blocks(least) + RESERVED if page.layout else 0
    if page.verdict == "fits" and blocks.low < max(needed, wanted):
        verdict: Verdict = "does not fit" if blocks.high < needed else "cannot tell"
        reason = why or "the KV cache is smaller than computed from the shape"
        return replace(page, verdict=verdict, reasons=(f"whether the longest request fits is unknown: {reason}",))
    return page


def _stage_ledger(model: Model, setup: Setup, measured: Measured, layout: CacheLayout | None, stage: Stage) -> Ledger:
    writer = _LedgerWriter(measured)
    span = stage.layers
    if setup.draft and span.stop == model.layers:  # the last stage drafts
        span = range(span.start, span.stop + len(setup.draft.layers))
    block_bytes = layout.block_bytes(span) if layout else 0
    usage: list[ByteRange | None] = []
    source = "the budget minus all of the above"
    if setup.cpu:
        writer.write(WEIGHTS, stage.weights, stage.basis, f"{stage.source}, in host memory beside the KV cache")
        source = f"set by {CPU_SPACE}"
    else:
        usage = _usage(writer, model, setup, stage)

    known = [size for size in usage if size]
    if not model.keeps_tokens:
        size = writer.write(KV_CACHE, ByteRange.of(0), "exact", "none: tokens see those that follow, nothing is kept")
    elif setup.blocks and block_bytes:
        fixed = ByteRange.of(setup.blocks * block_bytes)
        size = writer.write(KV_CACHE, fixed, "exact", "--num-gpu-blocks-override")
    elif setup.kv_cache_bytes is not None:
        source = CPU_SPACE if setup.cpu else "--kv-cache-memory-bytes, whatever the budget"
        size = writer.write(KV_CACHE, ByteRange.of(setup.kv_cache_bytes), "exact", source)
    elif usage and len(known) == len(usage):
        size = writer.write(KV_CACHE, known[0].less(*known[1:]), "estimated", source)
    else:
        size = writer.write(KV_CACHE, None, "unknown", source)

    blocks = _blocks(size, block_bytes) if size and block_bytes else None
    return Ledger(setup, model, tuple(writer.rows), layout, block_bytes, blocks, "cannot tell")


def _usage(writer: _LedgerWriter, model: Model, setup: Setup, stage: Stage) -> list[ByteRange | None]:
    """Write the budget and the rows that count against it, and return their sizes."""
    share = quantity(setup.utilization, "share")
    if setup.total is None:
        source = f"{share} of the GPU: give --gpu h100, --gpu-memory 79.1GiB or --log"
        usage = [writer.write(BUDGET, None, "unknown", source)]
    else:
        size = ByteRange.of(round(setup.total * setup.utilization))
        budget = writer.write(BUDGET, size, "exact", f"{share} of {gibibytes(setup.total)}")
        slack = 0 if BUDGET in writer.measured else round(size.low * _CARDS_DIFFER)
        usage = [budget and ByteRange(budget.low - slack, budget.high + slack, budget.central)]
    doubt = "what loading leaves in memory, and the bytes of scales and of layers in 16 bits, are estimated"
    usage.append(writer.write(WEIGHTS, stage.weights, stage.basis, stage.source, doubt))
    # the weights in a log contain a draft model and adapters
    if setup.draft:
        size = ByteRange(*draft_bytes(setup.draft, setup.float32))
        sources = {"model": "the draft model's shape", "eagle": "the head's layers", "mtp": "the model's MTP layers"}
        why = "a draft may share the embedding and the head"
        usage.append(writer.write_part(DRAFT, size, sources[setup.draft.kind], why))
    if setup.adapters:
        low, high = adapter_bytes(model, setup.adapters, setup.tensor, setup.version)
        slots, rank = setup.adapters
        source, why = f"--max-loras {slots}, --max-lora-rank {rank}", "not every release adapts every layer"
        usage.append(writer.write_part(ADAPTERS, ByteRange(low, high, low), source, why))

    logits = "" if setup.pooling else f", logits of {setup.sequences:,} requests"
    step = f"a step of {setup.batched_tokens:,} tokens{logits}"
    if model.stack:
        usage.append(writer.estimate(ACTIVATIONS, profiling.activations(model, setup), step))
    else:
        usage.append(writer.write(ACTIVATIONS, None, "unknown", step))

    where = "counted since vLLM 0.20.0" if setup.graphs_in_budget else "outside the budget up to vLLM 0.19.1"
    if setup.eager:
        captured = writer.write(GRAPHS, ByteRange.of(0), "exact", "none with --enforce-eager")
    else:
        captured = writer.estimate(GRAPHS, profiling.graphs(model, setup), where)
    usage += [captured] if setup.graphs_in_budget else []

    libraries = "NCCL and CUDA libraries" if setup.gpus * setup.data > 1 else "CUDA libraries"
    other = profiling.non_torch(setup, stage.weights.central if stage.weights else 0)
    return [*usage, writer.estimate(NON_TORCH, other, f"buffers of {libraries}")]


_CARDS_DIFFER = 0.002
"""Share by which the memory of cards of one name differs: 79.10 to 79.25 GiB of H100, 39.38 to 39.49 of A100."""


def uncounted(page: Ledger) -> list[str]:
    """List memory that is in no row; [] if the log has the size of the KV cache."""
    if any(row.name == KV_CACHE and row.logged for row in page.rows):
        return []
    missing = [f"{row.name} unknown: {row.source}" for row in page.rows if not row.size and row.name != KV_CACHE]
    setup, vision = page.setup, list[str]()
    if page.model.encoders and not setup.text_only:  # 17.91 GiB instead of 1.41 in one report of an old release
        is_known = profiling.encoder_peak(page.model, setup).high > 0 or setup.skips_encoder
        if not is_known or not setup.since("encoder_budget"):
            vision = ["activations of the vision encoder"]
    if not setup.text_only and not page.is_certain(WEIGHTS):
        vision += [f"the weights of {name}, which names no layers" for name in unnamed_encoders(page.model)]
    doubt = [page.model.doubt] if page.model.doubt else []
    reasons = (*setup.uncounted, *vision, *setup.savings)
    return [*missing, *doubt, *(f"not counted: {reason}" for reason in reasons)]


def _outside_budget(page: Ledger) -> list[tuple[str, bool]]:
    """Return problems with the memory outside the budget, each with True if it is certain."""
    setup = page.setup
    if setup.cpu or setup.total is None:
        return []
    sizes = {row.name: row.size for row in page.rows if row.size}
    budget, total = sizes.pop(BUDGET), ByteRange.of(setup.total)
    is_fixed = setup.kv_cache_bytes is not None or setup.blocks is not None or not page.model.keeps_tokens
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


# -- the KV cache of a server whose release is not known: that of the releases that count differently ------------------

TURNS = ("0.9.2", "0.16.0", "0.19.1", "0.24.0", "0.28.0")
"""Releases between which the sampler, CUDA graphs, compiling or the memory outside torch count differently."""


def differences(started: Command) -> str:
    """Return what makes the KV cache of a launch differ between releases."""
    differ = "sampling, CUDA graphs and compiling count differently since"
    if started.get("--gpu-memory-utilization") is None:
        differ = f"the default share is 0.9 or, since 0.20.0, 0.92, and {differ}"
    return f"{differ} {TURNS[0]}"


def over_releases(page: Ledger, started: Command, gpu: GpuSpec) -> Ledger:
    """Return the ledger with the KV cache that other releases would have too, since the release is not known.

    What its setup has otherwise than the command, such as a suggestion's value, it has with every release.
    """
    kv_cache = page.kv_cache
    if not kv_cache or page.is_certain(KV_CACHE):
        return page
    sizes, plain = [kv_cache], vars(setup_of(started, page.model, gpu, page.setup.version))
    changed = {name: value for name, value in vars(page.setup).items() if value != plain[name]}
    for version in TURNS:
        with suppress(BadUsage):  # a flag or value that the release refuses
            other = replace(setup_of(started, page.model, gpu, version), **changed)
            sizes.append(ledger(page.model, other).kv_cache or kv_cache)
    wide = ByteRange(min(size.low for size in sizes), max(size.high for size in sizes), kv_cache.central)
    return with_kv_cache(page, wide, f"it covers every release: {differences(started)}")
