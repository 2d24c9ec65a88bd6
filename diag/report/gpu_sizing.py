"""`diag budget` in print: the GPU memory estimate of one server, or several GPUs beside each other.

Each has plain text of at most 100 columns and JSON: schemas "diag.budget/2" and "diag.sizing/2" (diag.*.schema.json).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from diag.core.formatting import GIB, gibibytes, plural, quantity
from diag.report.documents import Document
from diag.report.layout import paragraph, table
from diag.vllm.deployments import Deployment, Sizing
from diag.vllm.memory.ledger import Ledger, uncounted
from diag.vllm.work import REACHED

EXACT = 0.002
"""Bounds that are closer than this share are those of a log, whose figures are rounded."""
MOST_COLUMNS = 94
"""Columns of a line of a command, without its margin."""
WIDE = 0.2
"""A range that is wider than this share of the estimate is explained: the estimate is off by 10 % at its ends."""
_UNKNOWN = "unknown"
_FITS = {"fits": "yes", "cannot tell": "perhaps", "does not fit": "no"}


@dataclass(frozen=True)
class Budget:
    """The memory ledger of a server and what follows from it.

    `suggestions` are flags with the value that makes it fit, `offers` larger changes; `longest` and `sequences` are the
    safe values, None if unknown. `logged` has tokens, length, concurrency, longest and needed (GiB) as far as the log
    prints them.
    """

    model: str
    gpu: str
    ledger: Ledger
    notes: tuple[str, ...] = ()
    logged: Mapping[str, float] = field(default_factory=dict)
    suggestions: tuple[tuple[str, str], ...] = ()
    longest: int | None = None
    sequences: int | None = None
    offers: tuple[Deployment, ...] = ()


# -- the memory of one server -----------------------------------------------------------------------------------------


def render_budget(budget: Budget) -> str:
    """Render the estimate as plain text: verdict, ledger, KV cache, and flags that make the server fit."""
    ledger, setup = budget.ledger, budget.ledger.setup
    hardware = f"{setup.gpus * setup.data} x {budget.gpu}" if not setup.cpu else budget.gpu
    size = f" ({gibibytes(setup.total)})" if setup.total else ""
    length = "the longest that fits" if setup.auto_length else f"{setup.length:,} tokens"
    lines = paragraph(
        f"{ledger.verdict.upper()}: {budget.model} on {hardware}{size}, vLLM {setup.version}, context {length}"
    )
    for sentence in (*ledger.reasons, *budget.notes):
        lines += paragraph(sentence, "  - ", "    ")

    rows = [("GiB" if setup.cpu else "GiB on one GPU", "computed", "log", "difference", "source")]
    for row in ledger.rows:
        computed = "unknown"
        if row.computed:  # the central estimate with its bounds; one number if it is exact as printed
            edges = (row.computed.low, row.computed.central, row.computed.high)
            low, central, high = (f"{edge / GIB:.2f}" for edge in edges)
            computed = low if low == high else f"{central} ({low} to {high})"
        logged = f"{(row.logged.low + row.logged.high) / 2 / GIB:.2f}" if row.logged else ""
        difference = "" if row.difference is None else f"{row.difference / GIB:+.2f}"
        if row.difference is not None and abs(row.difference) < 0.005 * GIB:
            difference = "none"
        source = row.source if row.basis == "exact" else f"{row.source} ({row.basis})"
        rows.append((row.name, computed, logged, difference, source))
    if budget.logged or any(row.logged for row in ledger.rows):
        lines += ["", *table(rows, right=(1, 2, 3))]
    else:
        lines += ["", *table([(name, computed, source) for name, computed, _, _, source in rows], right=(1,))]

    cache = list(_cache_rows(budget))
    lines += ["", *table(cache)] if cache else []
    if ledger.doubt and ledger.tokens and ledger.tokens.high - ledger.tokens.low > WIDE * ledger.tokens.central:
        lines += paragraph(f"The range of the KV cache is wide: {ledger.doubt}.", "  - ", "    ")

    if ledger.verdict != "fits" and ledger.kv_cache and ledger.layout:
        heading = "  Any one of these makes it fit:" if len(budget.suggestions) > 1 else "  This makes it fit:"
        if uncounted(ledger):
            heading = heading.replace("make", "may make").replace("makes", "make")
        if not budget.suggestions:
            heading = "  No single change that diag can compute makes it fit for certain."
        lines += ["", heading, *(f"    {flag} {value}" for flag, value in budget.suggestions)]
    offers = []  # the larger changes, those with the most KV cache for a GPU first
    for offer in budget.offers:
        tokens = offer.ledger.tokens
        cells = [
            offer.change,
            str(offer.gpus),
            f"{_rounded(tokens.central * offer.replicas):,}" if tokens else "",
            f"{offer.requests:,}",
            f"{offer.output_rate:,.0f}" if offer.output_rate else "",
        ]
        offers.append((*cells, _how(offer)))
    if offers:
        head = ("change", "GPUs", "KV tokens", "requests", "output/s", "how")
        lines += ["", "  What changes most:", *table([head, *offers], right=(1, 2, 3, 4))]
    return "\n".join(lines) + "\n"


def _cache_rows(budget: Budget) -> Iterator[tuple[str, str, str]]:
    """Yield name, computed value and logged value: KV cache per token and request, its size, the safe settings."""
    ledger, setup = budget.ledger, budget.ledger.setup
    layout = ledger.layout
    if layout is None or ledger.needed is None or ledger.token_bytes is None:
        return

    def logged(name: str, unit: str = "") -> str:
        value = budget.logged.get(name)
        return "" if value is None else f"log: {value:,.10g}{unit}"

    kinds = ((layout.number("window", "chunk"), "have a sliding window"), (layout.number("state"), "keep a state"))
    shares = "".join(f", {count} of {len(layout.groups)} layer groups {what}" for count, what in kinds if count)
    blocks, decoding = layout.blocks(setup.length), layout.blocks(setup.length, decoding=True)
    then = f" while its prompt is read, {decoding:,} while it decodes" if decoding < blocks else ""
    inside = sum(ledger.block_bytes / group.block for group in layout.groups if group.kind in ("window", "chunk"))
    within = " within the window" if inside and not ledger.token_bytes else ""
    yield "KV cache per token", f"{ledger.token_bytes or inside:,.0f} bytes{within}{shares}", ""
    needed = f"{gibibytes(ledger.needed)}, {blocks:,} blocks{then}"
    yield f"for {setup.length:,} tokens", needed, logged("needed", " GiB")

    if ledger.tokens and ledger.blocks and ledger.concurrency:
        tokens = ledger.tokens
        size = f"{_range(f'{tokens.low:,}', f'{tokens.high:,}')} tokens"
        if tokens.high - tokens.low > EXACT * tokens.high:
            central, low, high = (f"{_rounded(edge):,}" for edge in (tokens.central, tokens.low, tokens.high))
            size = f"about {central} tokens, {low} to {high}"
        yield "KV cache size", size, logged("tokens")
        yield "KV blocks", f"{_range(f'{ledger.blocks.low:,}', f'{ledger.blocks.high:,}')} of {layout.block} tokens", ""
        requests = _range(*(f"{bound:.2f}" for bound in ledger.concurrency))
        yield "logged concurrency", f"{requests} requests of {setup.length:,} tokens", logged("concurrency")

    if budget.longest is not None:
        flag = f"--max-model-len {budget.longest}" if budget.longest else "none"
        yield "safe context", flag, logged("longest")
    if budget.sequences is not None and budget.longest:
        flag = f"--max-num-seqs {budget.sequences}" if budget.sequences else "none"
        yield "safe concurrency", f"{flag} without preemption", ""


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _rounded(size: int) -> int:
    """Round to three digits."""
    unit: int = 10 ** max(len(str(abs(size))) - 3, 0)
    return round(size / unit) * unit


def _how(one: Deployment) -> str:
    return " ".join(filter(None, ("another checkpoint" if one.checkpoint else "", one.flags)))


_PAIR = {"ByteRange": {"pair": lambda size: [size.low, size.high]}}
BUDGET_DOCUMENT = Document(
    "budget",
    {
        **_PAIR,
        "Budget": {
            "gpus": lambda budget: budget.ledger.setup.gpus * budget.ledger.setup.data,
            "concurrency": lambda budget: [round(bound, 4) for bound in budget.ledger.concurrency or ()],
        },
        "Deployment": {"dollars": lambda _: None},
    },
)
"""Bytes as integers, ranges as [least, most], null if unknown."""


# -- several GPUs beside each other -----------------------------------------------------------------------------------


def render_sizing(sizing: Sizing) -> str:
    """Render the answer, the launch to copy, one table for one load, and the sentences about the choice."""
    lines, line = paragraph(f"{sizing.answer}."), ""
    for word in sizing.launch.split():  # each line but the last one with a backslash at its end
        if line and len(line) + len(word) > MOST_COLUMNS and word.startswith("-"):
            lines, line = [*lines, f"  {line} \\"], "   "
        line = f"{line} {word}" if line else word
    lines += [f"  {line}"] if line else []
    requests = plural(sizing.concurrency, "request") if sizing.concurrency else "as many requests as each holds"
    lines += [
        "",
        *paragraph(f"{sizing.model}, vLLM {sizing.version}: {requests} of {plural(sizing.context, 'token')}", "  "),
    ]
    # a row for each deployment: what it holds, and its ceilings for the load
    at = f"at {quantity(sizing.utilisation, 'share')}" if sizing.utilisation else "at load" if sizing.measured else ""
    head = ["GPUs", "layout", "fits", "requests", "output/s", "prompt/s", "bound by"]
    head += ["load"] * bool(sizing.measured) + ([column for column in ("$/M", at) if column] if sizing.prices else [])
    has_changes = any(one.flags or one.checkpoint for one in sizing.rows)
    rows = []
    for one in sizing.rows:
        cells = [
            f"> {one.name}" if one is sizing.best else one.name,
            one.layout,
            _FITS[one.ledger.verdict],
            f"{one.requests:,}" if one.ledger.model.keeps_tokens else "any",
            f"{one.decode.tokens_per_second:,.0f}" if one.decode else _UNKNOWN * one.is_spread,
            f"{one.prefill.tokens_per_second:,.0f}" if one.prefill else _UNKNOWN * one.is_spread,
            one.decode.binds if one.decode else "",
        ]
        if sizing.measured:
            load = sizing.load(one)
            cells.append(quantity(load, "share") if load else "")
        if sizing.prices:
            cells += ["" if cost is None else f"{cost:.2f}" for cost in sizing.costs(one, one.decode)]
        rows.append([*cells[: len(head)], *([_how(one)] if has_changes else [])])
    lines += table([[*head, *["how"] * has_changes], *rows], right=(3, 4, 5, 7, 8, 9)) if rows else []
    lines.append("")

    low, high = (quantity(bound, "share") for bound in REACHED)
    legend = [*sizing.notes]
    if any(one.prefill for one in sizing.rows):
        legend.append(
            "output/s and prompt/s are ceilings in tokens that follow from data sheets; servers in public figures reach"
            f" {low} to {high} of them"
        )
    if any(one.is_spread and one.requests for one in sizing.rows):
        legend.append(
            "unknown: the traffic of PP, and of experts over DP, between GPUs is not modelled: memory alone is"
        )
    if sizing.measured:
        legend.append(f"load: the {sizing.measured:,.0f} output tokens/s that were measured as a share of the ceiling")
    if sizing.prices:
        legend.append("$/M: dollars for a million output tokens at the ceiling; prompts are not in it")
    for sentence in (*sizing.choices, *legend):
        lines += paragraph(sentence, "  - ", "    ")
    return "\n".join(lines) + "\n"


SIZING_DOCUMENT = Document(
    "sizing",
    {
        **_PAIR,
        "Sizing": {
            "reached": lambda _: REACHED,
            "configurations": lambda sizing: [
                (one, *(reached and (reached, sizing.costs(one, reached)) for reached in (one.decode, one.prefill)))
                for one in sizing.rows
            ],
        },
        "Deployment": {"gpu_name": lambda one: one.gpu.name if one.gpu else ""},
    },
)
