"""A memory estimate in print: plain text of at most 100 columns, and JSON of schema "diag.budget/2"."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from diag import __version__
from diag.core.formatting import GIB, gibibytes
from diag.report.layout import paragraph, table
from diag.vllm.memory.byte_range import ByteRange
from diag.vllm.memory.ledger import Ledger, Row

SCHEMA = "diag.budget/2"


@dataclass(frozen=True)
class Budget:
    """Everything that is printed: the ledger, and what follows from it.

    `suggestions` are flags with the value that makes it fit; `longest` and `sequences` are what is safe, None where
    that is not known. `logged` has tokens, length, concurrency, longest and needed (GiB) as far as the log says them.
    """

    model: str
    gpu: str
    ledger: Ledger
    notes: tuple[str, ...] = ()
    logged: Mapping[str, float] = field(default_factory=dict)
    suggestions: tuple[tuple[str, str], ...] = ()
    longest: int | None = None
    sequences: int | None = None


# -- for a terminal ---------------------------------------------------------------------------------------------------


def render(budget: Budget) -> str:
    """The estimate for a terminal."""
    lines = [*_head(budget), "", *_rows(budget)]
    cache = list(_cache(budget))
    lines += ["", *table(cache)] if cache else []
    return "\n".join([*lines, *_suggestions(budget)]) + "\n"


def _head(budget: Budget) -> list[str]:
    setup = budget.ledger.setup
    where = f"{setup.gpus * setup.data} x {budget.gpu}" if not setup.cpu else budget.gpu
    size = f" ({gibibytes(setup.total)})" if setup.total else ""
    length = "the longest that fits" if setup.auto_length else f"{setup.length:,} tokens"
    verdict = budget.ledger.verdict.upper()
    lines = paragraph(f"{verdict}: {budget.model} on {where}{size}, vLLM {setup.version}, context {length}")
    for text in (*budget.ledger.reasons, *budget.notes):
        lines += paragraph(text, "  - ", "    ")
    return lines


def _rows(budget: Budget) -> list[str]:
    """The ledger as a table; with columns for the log where it says anything."""
    rows = budget.ledger.rows
    head = ("GiB" if budget.ledger.setup.cpu else "GiB on one GPU", "computed", "log", "difference", "source")
    lines = [(row.name, _gib(row.computed), _middle(row.logged), _difference(row), _source(row)) for row in rows]
    if budget.logged or any(row.logged for row in rows):
        return table([head, *lines], right=(1, 2, 3))
    return table([(name, computed, source) for name, computed, _, _, source in (head, *lines)], right=(1,))


def _source(row: Row) -> str:
    return f"{row.source} ({row.basis})" if row.basis != "exact" else row.source


def _difference(row: Row) -> str:
    """How far the log is from what was computed, "none" where it is within that."""
    if row.difference is None:
        return ""
    return f"{row.difference / GIB:+.2f}" if abs(row.difference) >= 0.005 * GIB else "none"


def _cache(budget: Budget) -> Iterator[tuple[str, str, str]]:
    """The KV cache: what a token and a request take, what it holds, and what is safe; each with what the log says."""
    found, setup = budget.ledger, budget.ledger.setup
    layout = found.layout
    if layout is None or found.needed is None or found.token_bytes is None:
        return
    total = layout.windows + layout.groups
    windows = f", {layout.windows} of {total} layer groups have a sliding window" if layout.windows else ""
    blocks = f"{layout.blocks(setup.length):,} blocks"
    yield "KV cache per token", f"{found.token_bytes:,.0f} bytes{windows}", ""
    yield f"for {setup.length:,} tokens", f"{gibibytes(found.needed)}, {blocks}", _logged(budget, "needed", " GiB")
    if found.tokens and found.blocks and found.concurrency:
        requests = f"{_concurrency(found.concurrency)} requests of {setup.length:,} tokens"
        yield "KV cache size", f"{_span(found.tokens)} tokens", _logged(budget, "tokens")
        yield "KV blocks", f"{_span(found.blocks)} of {setup.block} tokens", ""
        yield "concurrency", requests, _logged(budget, "concurrency")
    yield from _safe(budget)


def _safe(budget: Budget) -> Iterator[tuple[str, str, str]]:
    """The context and the concurrency that fit for certain."""
    if budget.longest is not None:
        flag = f"--max-model-len {budget.longest}" if budget.longest else "none"
        yield "safe context", flag, _logged(budget, "longest")
    if budget.sequences is not None and budget.longest:
        flag = f"--max-num-seqs {budget.sequences}" if budget.sequences else "none"
        yield "safe concurrency", f"{flag} without preemption", ""


def _logged(budget: Budget, name: str, unit: str = "") -> str:
    value = budget.logged.get(name)
    return "" if value is None else f"log: {value:,.10g}{unit}"


def _suggestions(budget: Budget) -> list[str]:
    found = budget.ledger
    if found.verdict == "fits" or not (found.kv_cache and found.layout):
        return []
    if not budget.suggestions:
        return ["", "  No single change that diag can compute makes it fit for certain."]
    head = "  Any one of these makes it fit:" if len(budget.suggestions) > 1 else "  This makes it fit:"
    return ["", head, *(f"    {flag} {value}" for flag, value in budget.suggestions)]


def _gib(size: ByteRange | None) -> str:
    if size is None:
        return "unknown"
    low, high = f"{size.low / GIB:.2f}", f"{size.high / GIB:.2f}"
    return low if low == high else f"{low} to {high}"


def _middle(size: ByteRange | None) -> str:
    return f"{(size.low + size.high) / 2 / GIB:.2f}" if size else ""


def _span(size: ByteRange) -> str:
    return f"{size.low:,}" if size.low == size.high else f"{size.low:,} to {size.high:,}"


def _concurrency(bounds: tuple[float, float]) -> str:
    low, high = (f"{bound:.2f}" for bound in bounds)
    return low if low == high else f"{low} to {high}"


# -- for a machine ----------------------------------------------------------------------------------------------------


def render_json(budget: Budget) -> str:
    """The same as JSON: bytes as whole numbers, ranges as [least, most], null where nothing is known."""
    return json.dumps(document(budget), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def document(budget: Budget) -> dict[str, Any]:
    """The estimate as plain values, in the schema's order."""
    found, setup = budget.ledger, budget.ledger.setup
    return {
        "schema": SCHEMA,
        "diag": __version__,
        "model": budget.model,
        "gpu": {"name": budget.gpu, "total_bytes": setup.total, "count": setup.gpus * setup.data},
        "vllm": setup.version,
        "verdict": found.verdict,
        "reasons": list(found.reasons),
        "notes": list(budget.notes),
        "rows": [_row_document(row) for row in found.rows],
        "kv_cache": _cache_document(budget),
        "max_model_len": {"requested": setup.length, "safe": budget.longest},
        "max_num_seqs": {"requested": setup.sequences, "safe": budget.sequences},
        "suggestions": [{"flag": flag, "value": value} for flag, value in budget.suggestions],
    }


def _row_document(row: Row) -> dict[str, Any]:
    sizes = {"bytes": _pair(row.computed), "log_bytes": _pair(row.logged)}
    return {"name": row.name, "basis": row.basis, "source": row.source, **sizes}


def _cache_document(budget: Budget) -> dict[str, Any]:
    found = budget.ledger
    return {
        "token_bytes": found.token_bytes,
        "block_bytes": found.block_bytes or None,
        "needed_bytes": found.needed,
        "blocks": _pair(found.blocks),
        "tokens": _pair(found.tokens),
        "concurrency": [round(bound, 4) for bound in found.concurrency] if found.concurrency else None,
        "logged": dict(budget.logged),
    }


def _pair(size: ByteRange | None) -> list[int] | None:
    return [size.low, size.high] if size else None
