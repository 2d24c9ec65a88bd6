"""`diag budget` in print: the GPU memory estimate of one server, or several GPUs beside each other.

Each has plain text of at most 100 columns and JSON: schemas "diag.budget/2" and "diag.sizing/2" (diag.*.schema.json).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diag import __version__
from diag.core.formatting import GIB, gibibytes, plural, quantity
from diag.report.layout import paragraph, table
from diag.vllm.deployments import Deployment, Sizing
from diag.vllm.memory.ledger import Ledger
from diag.vllm.memory.usage import ByteRange
from diag.vllm.work import REACHED, Ceiling

BUDGET_SCHEMA = "diag.budget/2"
SIZING_SCHEMA = "diag.sizing/2"
WIDE = 0.2
"""A range that is wider than this share of the estimate is explained: the estimate is off by 10 % at its ends."""
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
    found, setup = budget.ledger, budget.ledger.setup
    hardware = f"{setup.gpus * setup.data} x {budget.gpu}" if not setup.cpu else budget.gpu
    size = f" ({gibibytes(setup.total)})" if setup.total else ""
    length = "the longest that fits" if setup.auto_length else f"{setup.length:,} tokens"
    lines = paragraph(
        f"{found.verdict.upper()}: {budget.model} on {hardware}{size}, vLLM {setup.version}, context {length}"
    )
    for text in (*found.reasons, *budget.notes):
        lines += paragraph(text, "  - ", "    ")

    rows = [("GiB" if setup.cpu else "GiB on one GPU", "computed", "log", "difference", "source")]
    for row in found.rows:
        computed = _estimate_text(row.computed, lambda size: f"{size / GIB:.2f}") if row.computed else "unknown"
        logged = f"{(row.logged.low + row.logged.high) / 2 / GIB:.2f}" if row.logged else ""
        difference = "" if row.difference is None else f"{row.difference / GIB:+.2f}"
        if row.difference is not None and abs(row.difference) < 0.005 * GIB:
            difference = "none"
        source = row.source if row.basis == "exact" else f"{row.source} ({row.basis})"
        rows.append((row.name, computed, logged, difference, source))
    if budget.logged or any(row.logged for row in found.rows):
        lines += ["", *table(rows, right=(1, 2, 3))]
    else:
        lines += ["", *table([(name, computed, source) for name, computed, _, _, source in rows], right=(1,))]

    cache = list(_cache_rows(budget))
    lines += ["", *table(cache)] if cache else []
    if found.doubt and found.tokens and found.tokens.high - found.tokens.low > WIDE * found.tokens.central:
        lines += paragraph(f"The range of the KV cache is wide: {found.doubt}.", "  - ", "    ")

    if found.verdict != "fits" and found.kv_cache and found.layout:
        heading = "  Any one of these makes it fit:" if len(budget.suggestions) > 1 else "  This makes it fit:"
        if not budget.suggestions:
            heading = "  No single change that diag can compute makes it fit for certain."
        lines += ["", heading, *(f"    {flag} {value}" for flag, value in budget.suggestions)]
    lines += _offer_lines(budget.offers)
    return "\n".join(lines) + "\n"


def _cache_rows(budget: Budget) -> Iterator[tuple[str, str, str]]:
    """Yield name, computed value and logged value: KV cache per token and request, its size, the safe settings."""
    found, setup = budget.ledger, budget.ledger.setup
    layout = found.layout
    if layout is None or found.needed is None or found.token_bytes is None:
        return

    def logged(name: str, unit: str = "") -> str:
        value = budget.logged.get(name)
        return "" if value is None else f"log: {value:,.10g}{unit}"

    kinds = ((layout.windows, "have a sliding window"), (layout.states, "keep a state"))
    shares = "".join(f", {count} of {len(layout.groups)} layer groups {what}" for count, what in kinds if count)
    blocks = f"{layout.blocks(setup.length):,} blocks"
    yield "KV cache per token", f"{found.token_bytes:,.0f} bytes{shares}", ""
    yield f"for {setup.length:,} tokens", f"{gibibytes(found.needed)}, {blocks}", logged("needed", " GiB")

    if found.tokens and found.blocks and found.concurrency:
        low, high = (f"{bound:.2f}" for bound in found.concurrency)
        requests = f"{low if low == high else f'{low} to {high}'} requests of {setup.length:,} tokens"
        yield "KV cache size", _tokens_text(found.tokens), logged("tokens")
        yield "KV blocks", f"{_range_text(found.blocks, '{:,}'.format)} of {layout.block} tokens", ""
        yield "concurrency", requests, logged("concurrency")

    if budget.longest is not None:
        flag = f"--max-model-len {budget.longest}" if budget.longest else "none"
        yield "safe context", flag, logged("longest")
    if budget.sequences is not None and budget.longest:
        flag = f"--max-num-seqs {budget.sequences}" if budget.sequences else "none"
        yield "safe concurrency", f"{flag} without preemption", ""


def _range_text(size: ByteRange, written: Callable[[int], str]) -> str:
    low, high = written(size.low), written(size.high)
    return low if low == high else f"{low} to {high}"


def _estimate_text(size: ByteRange, written: Callable[[int], str]) -> str:
    """Return the central estimate with its bounds; one number if it is exact as printed."""
    bounds = _range_text(size, written)
    return bounds if written(size.low) == written(size.high) else f"{written(size.central)} ({bounds})"


_EXACT = 0.002
"""Bounds that are closer than this share are those of a log, whose figures are rounded."""


def _tokens_text(tokens: ByteRange) -> str:
    if tokens.high - tokens.low <= _EXACT * tokens.high:
        return f"{_range_text(tokens, '{:,}'.format)} tokens"
    central, low, high = (f"{_rounded(size):,}" for size in (tokens.central, tokens.low, tokens.high))
    return f"about {central} tokens, {low} to {high}"


def _rounded(size: int) -> int:
    """Round to three digits."""
    unit: int = 10 ** max(len(str(abs(size))) - 3, 0)
    return round(size / unit) * unit


def _offer_lines(offers: Sequence[Deployment]) -> list[str]:
    """Lay out the larger changes, those with the most KV cache for a GPU first."""
    if not offers:
        return []
    head = ["change", "GPUs", "KV tokens", "requests", "output/s"]
    rows = []
    for offer in offers:
        tokens = offer.ledger.tokens
        cells = [
            offer.change,
            str(offer.gpus),
            f"{_rounded(tokens.central * offer.replicas):,}" if tokens else "",
            f"{offer.requests:,}",
            f"{offer.output_rate:,.0f}" if offer.output_rate else "",
        ]
        rows.append((*cells, _how(offer)))
    return ["", "  What changes most:", *table([(*head, "how"), *rows], right=(1, 2, 3, 4))]


def _how(one: Deployment) -> str:
    return " ".join(filter(None, ("another checkpoint" if one.checkpoint else "", one.flags)))


def _offer_document(offer: Deployment) -> dict[str, Any]:
    return {
        "change": offer.change,
        "flags": offer.flags,
        "needs_checkpoint": offer.checkpoint,
        "gpus": offer.gpus,
        "max_model_len": offer.ledger.setup.length,
        "kv_cache_tokens": _pair(offer.ledger.tokens),
        "kv_cache_tokens_estimate": offer.ledger.tokens.central if offer.ledger.tokens else None,
        "requests": offer.requests,
        "output_tokens_per_second": offer.output_rate or None,
        "dollars_per_million_output_tokens": None,
    }


def render_budget_json(budget: Budget) -> str:
    """Render the estimate as JSON: bytes as integers, ranges as [least, most], null if unknown."""
    found, setup = budget.ledger, budget.ledger.setup
    document = {
        "schema": BUDGET_SCHEMA,
        "diag": __version__,
        "model": budget.model,
        "gpu": {"name": budget.gpu, "total_bytes": setup.total, "count": setup.gpus * setup.data},
        "vllm": setup.version,
        "verdict": found.verdict,
        "reasons": list(found.reasons),
        "notes": list(budget.notes),
        "rows": [
            {
                "name": row.name,
                "basis": row.basis,
                "source": row.source,
                "bytes": _pair(row.computed),
                "estimate_bytes": row.computed.central if row.computed else None,
                "log_bytes": _pair(row.logged),
            }
            for row in found.rows
        ],
        "kv_cache": {
            "token_bytes": found.token_bytes,
            "block_bytes": found.block_bytes or None,
            "needed_bytes": found.needed,
            "blocks": _pair(found.blocks),
            "tokens": _pair(found.tokens),
            "tokens_estimate": found.tokens.central if found.tokens else None,
            "range_because": found.doubt or None,
            "concurrency": [round(bound, 4) for bound in found.concurrency] if found.concurrency else None,
            "logged": dict(budget.logged),
        },
        "max_model_len": {"requested": setup.length, "safe": budget.longest},
        "max_num_seqs": {"requested": setup.sequences, "safe": budget.sequences},
        "suggestions": [{"flag": flag, "value": value} for flag, value in budget.suggestions],
        "offers": [_offer_document(offer) for offer in budget.offers],
    }
    return json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _pair(size: ByteRange | None) -> list[int] | None:
    return [size.low, size.high] if size else None


# -- several GPUs beside each other -----------------------------------------------------------------------------------


def render_sizing(sizing: Sizing) -> str:
    """Render the answer, the launch to copy, one table for one load, and the sentences about the choice."""
    lines = [*paragraph(f"{sizing.answer}."), *_command_lines(sizing.launch)]
    requests = plural(sizing.concurrency, "request") if sizing.concurrency else "as many requests as each holds"
    lines += [
        "",
        *paragraph(f"{sizing.model}, vLLM {sizing.version}: {requests} of {plural(sizing.context, 'token')}", "  "),
    ]
    lines += [*_sizing_table(sizing), ""]

    low, high = (quantity(bound, "share") for bound in REACHED)
    legend = [
        *sizing.notes,
        "output/s and prompt/s are ceilings in tokens that follow from data sheets; servers in public figures reach"
        f" {low} to {high} of them",
    ]
    if sizing.measured:
        legend.append(f"load: the {sizing.measured:,.0f} output tokens/s that were measured as a share of the ceiling")
    if sizing.prices:
        legend.append("$/M: dollars for a million output tokens at the ceiling; prompts are not in it")
    for sentence in (*sizing.choices, *legend):
        lines += paragraph(sentence, "  - ", "    ")
    return "\n".join(lines) + "\n"


_MOST_COLUMNS = 94


def _command_lines(command: str) -> list[str]:
    """Lay out a command as lines to paste, each but the last one with a backslash at its end."""
    lines, line = list[str](), ""
    for word in command.split():
        if line and len(line) + len(word) > _MOST_COLUMNS and word.startswith("-"):
            lines, line = [*lines, f"{line} \\"], "   "
        line = f"{line} {word}" if line else word
    return [f"  {text}" for text in ([*lines, line] if line else [])]


def _sizing_table(sizing: Sizing) -> list[str]:
    """Lay out a row for each deployment: what it holds, and its ceilings for the load."""
    at = f"at {quantity(sizing.utilisation, 'share')}" if sizing.utilisation else "at load" if sizing.measured else ""
    head = ["GPUs", "layout", "fits", "requests", "output/s", "prompt/s", "bound by"]
    head += ["load"] * bool(sizing.measured) + ([column for column in ("$/M", at) if column] if sizing.prices else [])
    has_changes = any(one.flags or one.checkpoint for one in sizing.rows)
    rows = []
    for one in sizing.rows:
        cells = [
            one.name,
            one.layout,
            _FITS[one.ledger.verdict],
            f"{one.requests:,}",
            f"{one.decode.tokens_per_second:,.0f}" if one.decode else "",
            f"{one.prefill.tokens_per_second:,.0f}" if one.prefill else "",
            one.decode.binds if one.decode else "",
        ]
        if sizing.measured:
            load = sizing.load(one)
            cells.append(quantity(load, "share") if load else "")
        if sizing.prices:
            cells += ["" if cost is None else f"{cost:.2f}" for cost in sizing.costs(one, one.decode)]
        rows.append([*cells[: len(head)], *([_how(one)] if has_changes else [])])
    return table([[*head, *["how"] * has_changes], *rows], right=(3, 4, 5, 7, 8, 9)) if rows else []


def render_sizing_json(sizing: Sizing) -> str:
    """Render the comparison as JSON: the rows of the page."""
    document = {
        "schema": SIZING_SCHEMA,
        "diag": __version__,
        "answer": sizing.answer,
        "launch": sizing.launch or None,
        "model": sizing.model,
        "notes": list(sizing.notes),
        "vllm": sizing.version,
        "context": sizing.context,
        "concurrency": sizing.concurrency,
        "utilisation": sizing.utilisation,
        "measured_output_tokens_per_second": sizing.measured,
        "reached": list(REACHED),
        "configurations": [
            {
                "gpu": one.gpu.name if one.gpu else "",
                "gpus": one.gpus,
                "replicas": one.replicas,
                "tensor_parallel_size": one.setup.tensor,
                "change": one.change,
                "flags": one.flags,
                "needs_checkpoint": one.checkpoint,
                "verdict": one.ledger.verdict,
                "reasons": list(one.ledger.reasons),
                "kv_cache_tokens": _pair(one.ledger.tokens),
                "kv_cache_tokens_estimate": one.ledger.tokens.central if one.ledger.tokens else None,
                "requests": one.requests,
                "batch": one.batch,
                "decode": _ceiling_document(one.decode, sizing.costs(one, one.decode)),
                "prefill": _ceiling_document(one.prefill, sizing.costs(one, one.prefill)),
            }
            for one in sizing.rows
        ],
        "choices": list(sizing.choices),
    }
    return json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _ceiling_document(ceiling: Ceiling | None, costs: list[float | None]) -> dict[str, Any] | None:
    if ceiling is None:
        return None
    return {
        "tokens_per_second": ceiling.tokens_per_second,
        "step_seconds": ceiling.step,
        "read_seconds": ceiling.read,
        "compute_seconds": ceiling.compute,
        "send_seconds": ceiling.send,
        "binds": ceiling.binds,
        "dollars_per_million_tokens": dict(zip(("at_ceiling", "at_utilisation"), costs, strict=True)),
    }
