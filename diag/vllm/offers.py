"""Changes of a launch: quantized weights on fewer GPUs, an fp8 cache, a shorter context, more GPUs."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from diag.core.errors import BadUsage
from diag.vllm.gpus import GpuModel
from diag.vllm.memory.fitting import rounded, supports_fp8_cache
from diag.vllm.memory.kv_layout import NUMBER_BYTES
from diag.vllm.memory.ledger import Ledger, ledger
from diag.vllm.memory.model import Model
from diag.vllm.memory.setup import Setup, check
from diag.vllm.roofline import Ceiling, SizedReplica, configuration, cost_per_million

TENSORS = (1, 2, 4, 8)
NOW = "as it is"
_SHORTER = 2
"""A shorter context is the half of the present one."""
_LEAST = 4096
"""Contexts shorter than this are not offered."""
_FP8, _FP4 = 8.0, 10.0
"""CUDA's compute capability from which vLLM runs FP8 weights (with Marlin, weights alone), and NVFP4 in hardware."""
CHECKPOINTS: Mapping[str, tuple[float, Mapping[str, Any]]] = {
    "AWQ or GPTQ weights, 4 bits": (7.5, {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}),
    "NVFP4 weights": (_FP4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}
"""Quantized checkpoints of a model: the least compute capability, and the quantization_config of such a file."""


@dataclass(frozen=True)
class LaunchChange:
    """A change with what it brings; `flags` are to be added, and `checkpoint` is True if other files are needed.

    `requests` of the longest context certainly run at a time. `output_rate` is the ceiling of output tokens a second,
    None if it is unknown; `cost` is in dollars per million of them.
    """

    change: str
    flags: str
    checkpoint: bool
    ledger: Ledger
    requests: int
    output_rate: float | None = None
    cost: float | None = None

    @property
    def gpus(self) -> int:
        return self.ledger.setup.gpus

    @property
    def tokens_per_gpu(self) -> float:
        return self.ledger.tokens.central / self.gpus if self.ledger.tokens else 0.0


def offers(
    model: Model, setup: Setup, gpu: GpuModel | None, concurrency: int | None = None, price: float | None = None
) -> list[LaunchChange]:
    """Return the launch as it is and the changes that fit: the most KV cache for a GPU first, more GPUs last.

    The first is left out if it does not fit.
    """
    if setup.cpu or setup.pipeline * setup.data > 1 or not setup.total or setup.kv_cache_bytes or setup.blocks:
        return []
    found = [
        offer
        for change in _changes(model, setup)
        if (offer := _smallest(setup.tensor, gpu, concurrency, price, *change)) is not None
    ]
    now = _smallest(setup.tensor, gpu, None, price, NOW, "", False, model, (setup,))
    found.sort(key=lambda offer: (offer.gpus > setup.tensor, -offer.tokens_per_gpu))
    return [*filter(None, (now,)), *found] if found else []


_Change = tuple[str, str, bool, Model, tuple[Setup, ...]]
"""What changes, the flags, if another checkpoint is needed, the model then, and the setups in the order of trial."""


def _changes(model: Model, setup: Setup) -> Iterator[_Change]:
    sizes = [tensor for tensor in TENSORS if tensor <= setup.tensor]
    if not model.quantization and not setup.quantization and not setup.float32:
        if setup.capability >= _FP8:
            eight = tuple(replace(setup, tensor=tensor, quantization="fp8") for tensor in sizes)
            yield "FP8 weights", "--quantization fp8", False, model, eight
        for change, (capability, settings) in CHECKPOINTS.items():
            if setup.capability >= capability:
                smaller = tuple(replace(setup, tensor=tensor) for tensor in sizes)
                yield change, "", True, replace(model, quantization=settings), smaller
    if NUMBER_BYTES.get(setup.kv_dtype, 2) >= 2 and supports_fp8_cache(model, setup):
        yield "FP8 KV cache", "--kv-cache-dtype fp8", False, model, (replace(setup, kv_dtype="fp8"),)
    shorter = rounded(setup.length // _SHORTER, setup.length)
    if shorter >= _LEAST:
        with_shorter = replace(setup, length=shorter, auto_length=False)
        yield "half the context", f"--max-model-len {shorter}", False, model, (with_shorter,)
    larger = tuple(replace(setup, tensor=tensor) for tensor in TENSORS if tensor > setup.tensor)
    if larger:
        yield "more GPUs", "", False, model, larger


def _smallest(
    tensor: int,
    gpu: GpuModel | None,
    concurrency: int | None,
    price: float | None,
    change: str,
    flags: str,
    checkpoint: bool,
    changed: Model,
    setups: tuple[Setup, ...],
) -> LaunchChange | None:
    """Return a change with the fewest GPUs that hold the requests; None if none fits."""
    for setup in setups:
        with suppress(BadUsage):
            check(changed, setup)
            found = ledger(changed, setup)
            if found.verdict != "fits" or not (found.layout and found.blocks):
                continue
            requests = max(found.blocks.low - 1, 0) // found.layout.blocks(setup.length)
            if requests < (concurrency or 1):
                continue
            words = "" if setup.tensor == tensor else f"-tp {setup.tensor}"
            rate = None
            if gpu:
                with suppress(BadUsage):
                    sized = configuration(changed, setup, gpu, concurrency)
                    rate = sized.output_rate or None
            cost = cost_per_million(price, setup.tensor, rate) if price and rate else None
            return LaunchChange(change, " ".join(filter(None, (flags, words))), checkpoint, found, requests, rate, cost)
    return None


@dataclass(frozen=True)
class Sizing:
    """Several GPUs for one model; `concurrency` None stands for as many requests as each replica holds.

    `prices` are dollars per GPU hour by GPU name, `utilisation` the share of a ceiling that is served; `measured` are
    the output tokens/s of the observed server.
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
    offers: tuple[LaunchChange, ...] = ()

    def load(self, replica: SizedReplica) -> float | None:
        """Return the served share of the decode ceiling; above 1 the replica cannot serve the measured load."""
        measured = self.measured / replica.output_rate if self.measured and replica.decode else None
        return self.utilisation or measured

    def costs(self, replica: SizedReplica, ceiling: Ceiling | None) -> list[float | None]:
        """Return dollars per million tokens at the ceiling, and at the served share of it; None if unknown."""
        price, load = self.prices.get(replica.gpu.name), self.load(replica)
        shares = (1.0, load if load and load <= 1 else None)
        return [
            cost_per_million(price, replica.setup.tensor, ceiling.tokens_per_second, share)
            if price and ceiling and share
            else None
            for share in shares
        ]
