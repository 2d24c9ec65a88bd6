"""The ledger in print: plain text of at most 100 columns, and JSON of schema "diag.budget/1"."""

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from diag import __version__
from diag.core.formatting import gibibytes
from diag.core.sizes import GIB
from diag.vllm.memory.ledger import Ledger, Row
from diag.vllm.memory.parts import ByteRange

SCHEMA = "diag.budget/1"
WIDTH = 100


@dataclass(frozen=True)
class Budget:
    """Everything that is printed: the ledger `known`, and what follows from it.

    `changes` are flags with the value that makes it fit, `longest` and `sequences` what is safe, None where that is not
    known. `logged` has tokens, length, concurrency, longest and needed (GiB) as far as the log says them.
    """

    name: str
    gpu: str
    known: Ledger
    notes: tuple[str, ...] = ()
    logged: Mapping[str, float] = field(default_factory=dict)
    changes: tuple[tuple[str, str], ...] = ()
    longest: int | None = None
    sequences: int | None = None


def text(told: Budget) -> str:
    """The ledger for a terminal."""
    lines = chain(_head(told), _rows(told), _cache(told), _fixes(told))
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _head(told: Budget) -> Iterator[str]:
    setup = told.known.setup
    where = f"{setup.gpus * setup.data} x {told.gpu}" if not setup.cpu else told.gpu
    size = f" ({gibibytes(setup.total)})" if setup.total else ""
    length = "the longest that fits" if setup.fitted else f"{setup.length:,} tokens"
    line = f"{told.known.verdict.upper()}: {told.name} on {where}{size}, vLLM {setup.version}, context {length}"
    yield from textwrap.wrap(line, WIDTH, subsequent_indent="  ")
    for each in (*told.known.why, *told.notes):
        yield from textwrap.wrap(each, WIDTH - 2, initial_indent="  - ", subsequent_indent="    ")


def _rows(told: Budget) -> Iterator[str]:
    logged = bool(told.logged) or any(row.logged for row in told.known.rows)
    log_head = f"{'log':>9}{'differs':>9}" if logged else ""
    yield ""
    yield f"  {'GiB' if told.known.setup.cpu else 'GiB on one GPU':<16}{'computed':>15}{log_head}   from"
    for row in told.known.rows:
        columns = f"{_middle(row.logged):>9}{_difference(row):>9}" if logged else ""
        start = f"  {row.name:<16}{_gib(row.computed):>15}{columns}   "
        yield from textwrap.wrap(_how(row), WIDTH, initial_indent=start, subsequent_indent=" " * len(start))


def _how(row: Row) -> str:
    return f"{row.how} ({row.basis})" if row.basis != "exact" else row.how


def _difference(row: Row) -> str:
    """How far the log is from what was computed, "none" where it is within that."""
    if row.differs is None:
        return ""
    return f"{row.differs / GIB:+.2f}" if abs(row.differs) >= 0.005 * GIB else "none"


def _cache(told: Budget) -> Iterator[str]:
    known, setup = told.known, told.known.setup
    if known.cache is None or known.needed is None or known.token_bytes is None:
        return
    said = {name: f"   log: {value:,.10g}" for name, value in told.logged.items()}
    yield ""
    window = f", {known.cache.windows} of {known.cache.windows + known.cache.groups} groups of layers keep a window"
    yield _line("KV cache of a token", f"{known.token_bytes:,.0f} bytes{window if known.cache.windows else ''}")
    blocks = f"{known.cache.blocks(setup.length):,} blocks"
    yield _line(f"of {setup.length:,} tokens", f"{gibibytes(known.needed)}, {blocks}{said.get('needed', '')}")
    if known.tokens and known.blocks and known.concurrency:
        yield _line("the pool holds", f"{_span(known.tokens)} tokens{said.get('tokens', '')}")
        yield _line("in blocks", f"{_span(known.blocks)} of {setup.block} tokens")
        low, high = known.concurrency
        at_once = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} - {high:.2f}"
        yield _line("concurrency", f"{at_once} requests of {setup.length:,} tokens{said.get('concurrency', '')}")
    if told.longest is not None:
        shown = f"--max-model-len {told.longest}" if told.longest else "none"
        yield _line("safe context", f"{shown}{said.get('longest', '')}")
    if told.sequences is not None and told.longest:
        shown = f"--max-num-seqs {told.sequences}" if told.sequences else "none"
        yield _line("safe sequences", f"{shown} of {setup.length:,} tokens each, without an eviction")


def _line(name: str, value: str) -> str:
    return f"  {name:<24}{value}"


def _fixes(told: Budget) -> Iterator[str]:
    if told.known.verdict == "fits" or not (told.known.pool and told.known.cache):
        return
    yield ""
    if not told.changes:
        yield "  No single flag that diag can compute makes it fit for certain."
    else:
        yield "  Each of these makes it fit:" if len(told.changes) > 1 else "  This makes it fit:"
    for flag, value in told.changes:
        yield f"    {flag} {value}"


def document(told: Budget) -> str:
    """The same as JSON: bytes as whole numbers, ranges as [least, most], null where nothing is known."""
    known, setup = told.known, told.known.setup
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "diag": __version__,
        "model": told.name,
        "gpu": {"name": told.gpu, "total_bytes": setup.total, "count": setup.gpus * setup.data},
        "vllm": setup.version,
        "verdict": known.verdict,
        "why": list(known.why),
        "notes": list(told.notes),
        "rows": [_entry(row) for row in known.rows],
        "kv_cache": {
            "token_bytes": known.token_bytes,
            "block_bytes": known.block_bytes or None,
            "needed_bytes": known.needed,
            "blocks": _pair(known.blocks),
            "tokens": _pair(known.tokens),
            "concurrency": [round(each, 4) for each in known.concurrency] if known.concurrency else None,
            "logged": dict(told.logged),
        },
        "max_model_len": {"asked": setup.length, "safe": told.longest},
        "max_num_seqs": {"asked": setup.sequences, "safe": told.sequences},
        "changes": [{"flag": flag, "value": value} for flag, value in told.changes],
    }
    return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _entry(row: Row) -> dict[str, Any]:
    both = {"bytes": _pair(row.computed), "log_bytes": _pair(row.logged)}
    return {"name": row.name, "basis": row.basis, "how": row.how, **both}


def _pair(size: ByteRange | None) -> list[int] | None:
    return [size.low, size.high] if size else None


def _gib(size: ByteRange | None) -> str:
    if size is None:
        return "not known"
    low, high = f"{size.low / GIB:.2f}", f"{size.high / GIB:.2f}"
    return low if low == high else f"{low} - {high}"


def _middle(size: ByteRange | None) -> str:
    return f"{(size.low + size.high) / 2 / GIB:.2f}" if size else ""


def _span(size: ByteRange) -> str:
    return f"{size.low:,}" if size.low == size.high else f"{size.low:,} - {size.high:,}"
