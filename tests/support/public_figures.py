"""Public figures of tests/data/public_figures.toml, each with the ceiling that diag computes for it."""

import tomllib
from collections.abc import Iterator
from typing import Any, NamedTuple

from support.paths import MODELS

from diag.vllm import gpus
from diag.vllm.command import parse as command
from diag.vllm.flags.registry import versions
from diag.vllm.memory.ledger import ledger
from diag.vllm.memory.model import read
from diag.vllm.memory.setup import GpuSpec, setup
from diag.vllm.memory.usage import ByteRange
from diag.vllm.work import Replica, cost_per_million

_DATA: dict[str, Any] = tomllib.loads((MODELS.parent / "public_figures.toml").read_text(encoding="utf-8"))


SOURCES: dict[str, str] = _DATA["sources"]
"""Addresses, by the name that a figure gives as its source."""


class Figure(NamedTuple):
    """One rate or cost: what was measured, and the ceiling (of a cost the floor); `what` says of what."""

    kind: str
    what: str
    measured: float
    bound: float
    source: str

    @property
    def reached(self) -> float:
        """The share of the ceiling that was measured."""
        return self.bound / self.measured if self.kind == "cost" else self.measured / self.bound


class CacheFigure(NamedTuple):
    """A logged KV cache in tokens, and the estimate."""

    what: str
    measured: int
    estimated: ByteRange
    source: str


def figures() -> Iterator[Figure]:
    """All rates and costs."""
    for kind in ("run", "decode", "prefill", "cost"):
        for row in _DATA[kind]:
            for batch, prompt, answer, measured in row["figures"]:
                what = f"{_named(row)}: {batch} x {prompt} + {answer} tokens"
                bound = _bound(kind, row, batch, prompt, answer)
                yield Figure(kind, what, measured, bound, row["source"])


def cache_figures() -> Iterator[CacheFigure]:
    """All sizes of KV caches."""
    for row in _DATA["kv"]:
        replica = _replica(row, row["version"])
        tokens = ledger(replica.model, replica.setup).tokens
        assert tokens
        what = f"{_named(row)}, vLLM {row['version']}"
        yield CacheFigure(what, row["tokens"], tokens, row["source"])


def _named(row: dict[str, Any]) -> str:
    return ", ".join(filter(None, (f"{row['model']} on {row['gpu']}", row["flags"])))


def _replica(row: dict[str, Any], version: str) -> Replica:
    folder, gpu = MODELS / row["model"], gpus.named(row["gpu"])
    model, found = read(folder), command.read(f"vllm serve {folder} {row['flags']}", version=version)
    return Replica(model, setup(found, model, GpuSpec(gpu.memory, gpu.name), version), gpu)


def _bound(kind: str, row: dict[str, Any], batch: int, prompt: int, answer: int) -> float:
    """The whole answer takes `answer` steps with the context that it has in the middle."""
    replica = _replica(row, versions()[-1])
    prefill, decode = replica.prefill(prompt), replica.decode(batch, prompt + answer // 2)
    if kind == "prefill":
        return prefill.tokens_per_second
    if kind == "decode":
        return decode.tokens_per_second
    seconds = batch * prompt / prefill.tokens_per_second + answer * decode.step
    rate = batch * answer / seconds
    return cost_per_million(row["price"], replica.setup.tensor, rate) if kind == "cost" else rate
