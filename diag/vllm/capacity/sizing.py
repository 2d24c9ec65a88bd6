"""One replica on so many GPUs of a kind: whether it fits, how many requests it holds, and its ceilings."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from diag.core.errors import BadUsage
from diag.vllm.capacity import roofline, work
from diag.vllm.capacity.roofline import Ceiling, Replica
from diag.vllm.hardware.gpus import GpuModel
from diag.vllm.memory.ledger import Ledger, ledger
from diag.vllm.memory.model import Model
from diag.vllm.memory.refusals import check
from diag.vllm.memory.setup import Setup

SetupOfGpu = Callable[[GpuModel], Setup]
"""The setup of a command on one kind of GPU."""


class SizedReplica(NamedTuple):
    """A replica: `requests` of the longest context that its KV cache holds, `batch` of them that decode together.

    Both are 0 where nothing fits, and the ceilings None. `requests` counts at the lower end of the KV cache's range.
    """

    gpu: GpuModel
    setup: Setup
    ledger: Ledger
    requests: int
    batch: int
    decode: Ceiling | None
    prefill: Ceiling | None

    @property
    def name(self) -> str:
        """How it is written: "2 x h100"."""
        return f"{self.setup.tensor} x {self.gpu.name}"

    @property
    def output_rate(self) -> float:
        """Output tokens a second at the ceiling; 0 where nothing fits."""
        return self.decode.tokens_per_second if self.decode else 0.0


def configurations(
    model: Model, of_gpu: SetupOfGpu, kinds: Iterable[GpuModel], tensors: Iterable[int], concurrency: int | None
) -> Iterator[SizedReplica]:
    """Every kind of GPU with every tensor parallelism that divides the model; BadUsage where none does."""
    kinds, tensors = tuple(kinds), tuple(tensors)
    first = replace(of_gpu(kinds[0]), tensor=tensors[0])
    check(model, first)
    work.check(model, first)
    for gpu in kinds:
        for tensor in tensors:
            with suppress(BadUsage):
                yield configuration(model, replace(of_gpu(gpu), tensor=tensor), gpu, concurrency)


def configuration(model: Model, setup: Setup, gpu: GpuModel, concurrency: int | None) -> SizedReplica:
    """One of them; `concurrency` None for as many requests as it holds. BadUsage for what vLLM refuses."""
    found = ledger(model, setup)
    requests = _requests(found)
    batch = min(requests, setup.sequences, concurrency or requests)
    if not batch:
        return SizedReplica(gpu, setup, found, requests, 0, None, None)
    replica = Replica(model, setup, gpu)
    decode, prefill = roofline.decode(replica, batch, setup.length), roofline.prefill(replica, setup.length)
    return SizedReplica(gpu, setup, found, requests, batch, decode, prefill)


def _requests(found: Ledger) -> int:
    """How many requests of the longest context run at a time without preemption."""
    if found.verdict == "does not fit" or not (found.layout and found.blocks):
        return 0
    return max(found.blocks.low - 1, 0) // found.layout.blocks(found.setup.length)


def cost_per_million(price: float, gpus: int, tokens_per_second: float, utilisation: float = 1.0) -> float:
    """What a million tokens cost at a price for a GPU and an hour, at that share of the ceiling."""
    return price * gpus / 3600 / (tokens_per_second * utilisation) * 1e6
