"""Ceilings of a replica by the roofline of its GPUs: the most tokens a second that data sheets allow."""

from typing import Literal, NamedTuple

from diag.vllm import work
from diag.vllm.gpus import GpuModel
from diag.vllm.memory.model import Model
from diag.vllm.memory.setup import Setup
from diag.vllm.work import Work, matrix_rate, matrix_type

REACHED = 0.2, 0.85
"""Lowest and highest share of the ceiling that servers in public figures reach (bench/capacity.md)."""
Binder = Literal["weights", "KV cache", "compute", "NVLink", "PCIe"]


class Ceiling(NamedTuple):
    """The most tokens a second of one replica, and the seconds of a step: to read, to compute, to send over `link`.

    `binds` names the longest part: reading weights, reading KV cache, computing, or the link between GPUs.
    """

    tokens_per_second: float
    read: float
    compute: float
    send: float
    binds: Binder

    @property
    def step(self) -> float:
        return max(self.read, self.compute) + self.send

    @property
    def link_share(self) -> float:
        """Return the share of a step that is spent in all-reduces."""
        return self.send / self.step


class Replica(NamedTuple):
    """A server on GPUs of one kind; `pcie` leaves NVLink unused."""

    model: Model
    setup: Setup
    gpu: GpuModel
    pcie: bool = False


def decode(replica: Replica, batch: int, context: int) -> Ceiling:
    """Return the ceiling of output tokens a second of `batch` requests of `context` tokens each."""
    return _ceiling(replica, work.decode(replica.model, replica.setup, batch, context), batch)


def prefill(replica: Replica, length: int) -> Ceiling:
    """Return the ceiling of prompt tokens a second of prompts of `length`, in steps of --max-num-batched-tokens."""
    tokens = replica.setup.batched_tokens
    return _ceiling(replica, work.prefill(replica.model, replica.setup, tokens, length), tokens)


def link(gpu: GpuModel, tensor: int, pcie: bool = False) -> tuple[Literal["NVLink", "PCIe"], float]:
    """Return the link between `tensor` GPUs, and its bytes a second in one direction."""
    joined = gpu.nvlink and tensor <= gpu.nvlink_gpus and not pcie
    return ("NVLink", gpu.nvlink / 2) if joined else ("PCIe", gpu.pcie / 2)


def _ceiling(replica: Replica, done: Work, tokens: float) -> Ceiling:
    gpu = replica.gpu
    name, speed = link(gpu, replica.setup.tensor, replica.pcie)
    matrices = matrix_rate(gpu, matrix_type(replica.model, replica.setup))
    attention = matrix_rate(gpu, "fp8" if replica.setup.kv_dtype.startswith("fp8") else "bf16")
    read = (done.weight_bytes + done.cache_bytes) / gpu.bandwidth
    compute = done.matrix_flops / matrices + done.attention_flops / attention
    send = done.sent_bytes / speed
    reading: Binder = "weights" if done.weight_bytes >= done.cache_bytes else "KV cache"
    binds: Binder = name if send > max(read, compute) else "compute" if compute > read else reading
    return Ceiling(tokens / (max(read, compute) + send), read, compute, send, binds)


def cost_per_million(price: float, gpus: int, tokens_per_second: float, utilisation: float = 1.0) -> float:
    """Return the cost of a million tokens at a price per GPU-hour, at a share `utilisation` of the ceiling."""
    return price * gpus / 3600 / (tokens_per_second * utilisation) * 1e6
