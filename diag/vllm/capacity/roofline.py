"""Ceilings: the work of a step against the data sheet of the GPU.

A step takes at least the longer of reading and computing, and what is sent comes on top: vLLM does not overlap
all-reduces with computation by default. NVLink and PCIe are used at half of what both directions carry together.
"""

from typing import Literal, NamedTuple

from diag.vllm.capacity import work
from diag.vllm.capacity.work import Work
from diag.vllm.hardware.gpus import GpuModel
from diag.vllm.memory.model import Model
from diag.vllm.memory.setup import Setup
from diag.vllm.memory.weights import compressed_weights

REACHED = 0.2, 0.85
"""The shares of their ceilings that servers in public figures reach (bench/capacity.md)."""
Binder = Literal["weights", "KV cache", "compute", "NVLink", "PCIe"]


class Ceiling(NamedTuple):
    """The most tokens a second of one replica, and the seconds of a step: to read, to compute, to send over `link`.

    `binds` is what takes longest: reading weights, reading KV cache, computing, or the link between GPUs.
    """

    tokens_per_second: float
    read: float
    compute: float
    send: float
    binds: Binder

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return max(self.read, self.compute) + self.send

    @property
    def link_share(self) -> float:
        """The share of a step that is spent in all-reduces."""
        return self.send / self.step


class Replica(NamedTuple):
    """A server on GPUs of one kind; `pcie` leaves NVLink unused."""

    model: Model
    setup: Setup
    gpu: GpuModel
    pcie: bool = False


def decode(replica: Replica, batch: int, context: int) -> Ceiling:
    """Output tokens a second of `batch` requests of `context` tokens each."""
    return _ceiling(replica, work.decode(replica.model, replica.setup, batch, context), batch)


def prefill(replica: Replica, length: int) -> Ceiling:
    """Prompt tokens a second of prompts of `length`, in steps of --max-num-batched-tokens."""
    tokens = replica.setup.batched_tokens
    return _ceiling(replica, work.prefill(replica.model, replica.setup, tokens, length), tokens)


def link(gpu: GpuModel, tensor: int, pcie: bool = False) -> tuple[Literal["NVLink", "PCIe"], float]:
    """What joins so many GPUs, and its bytes a second in one direction."""
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


def matrix_rate(gpu: GpuModel, kind: str) -> float:
    """Operations a second with weights of that type (`matrix_type`): integers of 4 bits are widened to 16 first."""
    if kind == "mxfp4":  # only Blackwell multiplies it, with activations of 8 bits
        kind = "fp8" if "fp4" in gpu.flops else "bf16"
    return gpu.flops.get(kind, gpu.flops["bf16"])


def matrix_type(model: Model, setup: Setup) -> str:
    """The type of the weights, in which kernels compute where the GPU can."""
    settings = model.quantization or {}
    method = str(settings.get("quant_method", settings.get("quant_algo", setup.quantization))).lower()
    if method == "compressed-tensors":
        weights = compressed_weights(settings)
        return f"{'fp' if weights.get('type') == 'float' else 'int'}{weights.get('num_bits')}"
    if method == "mxfp4":
        return method
    written = f"{method} {settings.get('quant_algo', '')}".lower()
    return next((kind for kind in ("fp8", "fp4", "int8") if kind in written), "bf16")
