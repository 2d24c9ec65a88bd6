"""A choice of GPUs in print: one table of at most 100 columns, and JSON of schema "diag.sizing/1"."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from diag import __version__
from diag.core.formatting import plural, quantity
from diag.report.layout import paragraph, table
from diag.vllm.capacity.roofline import REACHED, Ceiling, SizedReplica, cost_per_million

SCHEMA = "diag.sizing/1"
_RIGHT = (1, 3, 4, 5, 6, 8, 9)
_FITS = {"fits": "yes", "cannot tell": "perhaps", "does not fit": "no"}


@dataclass(frozen=True)
class Sizing:
    """Everything that is printed; `concurrency` None stands for as many requests as each holds.

    `prices` are dollars for a GPU and an hour by its name, `utilisation` the share of a ceiling that is served;
    `measured` are the output tokens/s of the server that was observed.
    """

    model: str
    version: str
    context: int
    concurrency: int | None
    configurations: tuple[SizedReplica, ...]
    prices: Mapping[str, float]
    utilisation: float | None
    choices: tuple[str, ...]
    measured: float | None = None

    def load(self, one: SizedReplica) -> float | None:
        """The share of its decode ceiling that is served; above 1 it cannot serve what was measured."""
        measured = self.measured / one.output_rate if self.measured and one.decode else None
        return self.utilisation or measured

    def costs(self, one: SizedReplica, ceiling: Ceiling | None) -> list[float | None]:
        """Dollars for a million tokens at this ceiling, and at that share of it; None where that is not known."""
        price, load = self.prices.get(one.gpu.name), self.load(one)
        shares = (1.0, load if load and load <= 1 else None)
        return [
            cost_per_million(price, one.setup.tensor, ceiling.tokens_per_second, share)
            if price and ceiling and share
            else None
            for share in shares
        ]


# -- for a terminal ---------------------------------------------------------------------------------------------------


def render(sizing: Sizing) -> str:
    """The table for a terminal, and what it says of the choices of a deployment."""
    lines = [*_head(sizing), "", *_table(sizing), ""]
    for sentence in (*_legend(sizing), *sizing.choices):
        lines += paragraph(sentence, "  - ", "    ")
    return "\n".join(lines) + "\n"


def _head(sizing: Sizing) -> list[str]:
    held = plural(sizing.concurrency, "request") if sizing.concurrency else "as many requests as each holds"
    return paragraph(f"{sizing.model}, vLLM {sizing.version}: ceilings for {held} of {sizing.context:,} tokens")


def _table(sizing: Sizing) -> list[str]:
    head = ["GPU", "TP", "fits", "KV tokens", "requests", "output/s", "prompt/s", "bound by"]
    at = f"at {quantity(sizing.utilisation, 'share')}" if sizing.utilisation else "at load" if sizing.measured else ""
    head += ["load"] * bool(sizing.measured) + ([column for column in ("$/M", at) if column] if sizing.prices else [])
    rows = [_row(sizing, one, len(head)) for one in _shown(sizing)]
    return table([head, *rows], right=_RIGHT) if rows else []


def _row(sizing: Sizing, one: SizedReplica, width: int) -> list[str]:
    tokens = one.ledger.tokens
    cells = [one.gpu.name, str(one.setup.tensor), _FITS[one.ledger.verdict], f"{tokens.low:,}" if tokens else ""]
    cells += [f"{one.requests:,}", _rate(one.decode), _rate(one.prefill), one.decode.binds if one.decode else ""]
    load, (full, loaded) = sizing.load(one), sizing.costs(one, one.decode)
    cells += [quantity(load, "share") if load else ""] if sizing.measured else []
    cells += [_dollars(full), _dollars(loaded)] if sizing.prices else []
    return cells[:width]


def _dollars(cost: float | None) -> str:
    return "" if cost is None else f"{cost:.2f}"


def _rate(ceiling: Ceiling | None) -> str:
    return f"{ceiling.tokens_per_second:,.0f}" if ceiling else ""


def _shown(sizing: Sizing) -> Iterator[SizedReplica]:
    """Of each GPU the sizes up to the first that holds all requests for certain."""
    for _, kind in groupby(sizing.configurations, lambda one: one.gpu.name):
        for one in kind:
            yield one
            if one.ledger.verdict == "fits" and sizing.concurrency and one.requests >= sizing.concurrency:
                break


def _legend(sizing: Sizing) -> Iterator[str]:
    low, high = (quantity(bound, "share") for bound in REACHED)
    yield (
        "output/s and prompt/s are ceilings in tokens that follow from data sheets; servers in public figures reach"
        f" {low} to {high} of them"
    )
    if sizing.measured:
        yield f"load: the {sizing.measured:,.0f} output tokens/s that were measured as a share of the ceiling"
    if sizing.prices:
        yield "$/M: dollars for a million output tokens at the ceiling; prompts are not in it"
    if sizing.concurrency:
        yield "sizes above the first that holds all requests are in --json only"


# -- for a machine ----------------------------------------------------------------------------------------------------


def render_json(sizing: Sizing) -> str:
    """The same as JSON, with every size."""
    return json.dumps(document(sizing), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def document(sizing: Sizing) -> dict[str, Any]:
    """The sizing as plain values, in the schema's order."""
    return {
        "schema": SCHEMA,
        "diag": __version__,
        "model": sizing.model,
        "vllm": sizing.version,
        "context": sizing.context,
        "concurrency": sizing.concurrency,
        "utilisation": sizing.utilisation,
        "measured_output_tokens_per_second": sizing.measured,
        "reached": list(REACHED),
        "configurations": [_configuration(sizing, one) for one in sizing.configurations],
        "choices": list(sizing.choices),
    }


def _configuration(sizing: Sizing, one: SizedReplica) -> dict[str, Any]:
    tokens = one.ledger.tokens
    return {
        "gpu": one.gpu.name,
        "tensor_parallel_size": one.setup.tensor,
        "verdict": one.ledger.verdict,
        "reasons": list(one.ledger.reasons),
        "kv_cache_tokens": [tokens.low, tokens.high] if tokens else None,
        "requests": one.requests,
        "batch": one.batch,
        "decode": _ceiling(one.decode, sizing.costs(one, one.decode)),
        "prefill": _ceiling(one.prefill, sizing.costs(one, one.prefill)),
    }


def _ceiling(ceiling: Ceiling | None, costs: list[float | None]) -> dict[str, Any] | None:
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
