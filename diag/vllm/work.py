"""The work of a server by the model's shape, and the ceilings of its GPUs: the most tokens a second by data sheets.

Work is the bytes read, the operations, and the bytes sent to other GPUs in one step.

Only unavoidable work is counted. Every weight is read once a step, of a mixture of experts only the experts that the
tokens of the step reach if routing is even; each request's KV cache is read once, a state of fixed size is read and
written once, and a sparse indexer reads its keys of all tokens. Left out are activations, sampling,
the logits that tensor parallelism gathers, and speculation. They make the real step longer, never shorter, except for
routing: if the tokens of a step prefer the same experts, fewer are read.
"""

import math
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Literal, NamedTuple

from diag.core.errors import BadUsage
from diag.core.metric_families import Sample
from diag.vllm import gpus
from diag.vllm.command.parse import parse
from diag.vllm.gpus import GpuModel
from diag.vllm.memory.kv_layout import NotCovered, bytes_read, cache_type, entries, state_bytes, token_bytes
from diag.vllm.memory.model import Model, find, read
from diag.vllm.memory.parts import Mixer, WeightPart
from diag.vllm.memory.quantization import compressed_weights, precision
from diag.vllm.memory.setup import GpuSpec, Setup
from diag.vllm.memory.setup import setup as planned_setup
from diag.vllm.memory.weights import embedding, layer
from diag.vllm.running_config import SET, RunningConfig, ServerFacts


class Work(NamedTuple):
    """Work of one step on one GPU: bytes of weights and KV cache read, operations, and bytes sent in all-reduces.

    `matrix_flops` may run in the type of the weights, `attention_flops` in that of the KV cache.
    """

    weight_bytes: float
    cache_bytes: float
    matrix_flops: float
    attention_flops: float
    sent_bytes: float


def check(model: Model, setup: Setup) -> None:
    """Refuse a model whose work cannot be counted, unless it gives vectors and has none to count: BadUsage."""
    if model.keeps_tokens:
        _bytes(model, setup, _layers(model)[:1], 1)


def decode(model: Model, setup: Setup, batch: float, context: float) -> Work:
    """Return the work of a step in which each of `batch` requests of `context` tokens gets one more."""
    matrices, head = _layers(model), [embedding(model)]
    return Work(
        _bytes(model, setup, [*matrices, *head], batch),
        batch * sum(_cache_bytes(model, setup, mixer, context) for mixer in model.mixers),
        2 * batch * _operands(model, setup, [*matrices, *head]),
        batch * sum(reach(mixer, context) * _flops(mixer, True) for mixer in model.mixers) / setup.tensor,
        _all_reduce_bytes(model, setup, batch),
    )


def prefill(model: Model, setup: Setup, tokens: float, length: float) -> Work:
    """Return the work of a step of `tokens` prompt tokens, of prompts of `length` tokens."""
    matrices = _layers(model)
    flops = 0.0
    for mixer in model.mixers:
        most = reach(mixer, length)
        flops += (most - most**2 / (2 * length)) * _flops(mixer, False)  # the first tokens have few before them
    written = sum(token_bytes(model, mixer, setup) for mixer in model.mixers if mixer.kind != "state" and mixer.cached)
    return Work(
        _bytes(model, setup, matrices, tokens),
        tokens * written,
        2 * tokens * _operands(model, setup, matrices),
        tokens * flops / setup.tensor,
        _all_reduce_bytes(model, setup, tokens),
    )


def weights(model: Model, setup: Setup) -> tuple[float, float]:
    """Return the bytes on one GPU that each decode step reads, and those of all routed experts; BadUsage as `check`."""
    parts = [*_layers(model), embedding(model)]
    every = _bytes(model, setup, parts, 0)
    return every, _bytes(model, setup, parts, math.inf) - every


def reach(mixer: Mixer, context: float) -> float:
    """Return the tokens of a context that a layer attends to."""
    if mixer.kind == "state":
        return 0
    if mixer.kind == "compressed":
        return min(context, mixer.window) + entries(mixer, context)
    return min(context, mixer.window or context, mixer.sparse or context)


def _cache_bytes(model: Model, setup: Setup, mixer: Mixer, context: float) -> float:
    """Return the bytes of a request's cache that a layer reads in a step, and those of a state that it writes."""
    if mixer.kind == "state":
        return 2 * state_bytes(model, mixer, setup)
    if mixer.kind == "compressed":
        return bytes_read(mixer, context)
    return reach(mixer, context) * token_bytes(model, mixer, setup) + mixer.index * context


def _layers(model: Model) -> list[WeightPart]:
    if not model.keeps_tokens:
        raise BadUsage("the model gives vectors and decodes no tokens: it has no ceilings of decoding")
    if model.family is None or not model.stack:
        raise BadUsage(f"{model.unknown or model.doubt}: diag cannot compute its ceilings")
    return list(chain.from_iterable(layer(model, at) for at in range(model.layers)))


def _bytes(model: Model, setup: Setup, parts: list[WeightPart], tokens: float) -> float:
    """Return the bytes of the weights that a step of `tokens` tokens reads."""
    bits, hit = precision(model.quantization or {}, setup.quantization, setup.float32), experts_hit(model, tokens)
    if bits is None:
        raise BadUsage("the quantization of the model is unknown: diag cannot compute its ceilings")
    shares = ((part, hit if part.kind == "expert" else 1) for part in parts)
    return sum(part.elements * (bits.of(part) / 8 * share) / min(part.ways, setup.tensor) for part, share in shares)


def _operands(model: Model, setup: Setup, parts: list[WeightPart]) -> float:
    """Return the count of numbers that one token is multiplied with."""
    hit = experts_hit(model, 1)
    return sum(part.elements * (hit if part.kind == "expert" else 1) / min(part.ways, setup.tensor) for part in parts)


def experts_hit(model: Model, tokens: float) -> float:
    """Return the expected share of a layer's experts that at least one of `tokens` tokens reaches; 1 without any."""
    if not model.experts:
        return 1.0
    missed: float = (1 - min(model.experts.active / model.experts.total, 1.0)) ** tokens
    return 1 - missed


def _flops(mixer: Mixer, absorbed: bool) -> float:
    """Return the operations in one layer for a token and one that it attends to; MLA decodes in its latent space."""
    if mixer.kind != "latent":
        return 2.0 * mixer.heads * (mixer.head_dim + mixer.value_dim)
    return 2.0 * mixer.heads * (mixer.head_dim + mixer.rank if absorbed else mixer.key_dim + mixer.value_dim)


def _all_reduce_bytes(model: Model, setup: Setup, tokens: float) -> float:
    """Return the bytes that a GPU sends: an all-reduce after attention and one after the feed-forward."""
    ring = 2 * (setup.tensor - 1) / setup.tensor
    sums = sum(len(layer.mixers) + bool(layer.dense or layer.has_experts) for layer in model.stack)
    return tokens * sums * model.hidden * setup.number_bytes * ring


def matrix_rate(gpu: GpuModel, kind: str) -> float:
    """Return operations a second with weights of a type (`matrix_type`); 4-bit integers are widened to 16 bits."""
    if kind == "mxfp4":  # only Blackwell multiplies it, with activations of 8 bits
        kind = "fp8" if "fp4" in gpu.flops else "bf16"
    return gpu.flops.get(kind, gpu.flops["bf16"])


def matrix_type(model: Model, setup: Setup) -> str:
    """Return the type of the weights, in which kernels compute if the GPU can."""
    settings = model.quantization or {}
    method = str(settings.get("quant_method", settings.get("quant_algo", setup.quantization))).lower()
    if method == "compressed-tensors":
        weights = compressed_weights(settings)
        return f"{'fp' if weights.get('type') == 'float' else 'int'}{weights.get('num_bits')}"
    if method == "mxfp4":
        return method
    written = f"{method} {settings.get('quant_algo', '')}".lower()
    return next((kind for kind in ("fp8", "fp4", "int8") if kind in written), "bf16")


# -- ceilings of a replica, by the roofline of its GPUs

REACHED = 0.2, 0.85
"""Lowest and highest share of the ceiling that servers in public figures reach (bench/capacity.md)."""
Link = Literal["NVLink", "Infinity Fabric", "PCIe"]
Binder = Literal["weights", "KV cache", "compute"] | Link


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

    def decode(self, batch: int, context: int) -> Ceiling:
        """Return the ceiling of output tokens a second of `batch` requests of `context` tokens each."""
        return self._ceiling(decode(self.model, self.setup, batch, context), batch)

    def prefill(self, length: int) -> Ceiling:
        """Return the ceiling of prompt tokens a second of prompts of `length`, in steps of --max-num-batched-tokens."""
        tokens = self.setup.batched_tokens
        return self._ceiling(prefill(self.model, self.setup, tokens, length), tokens)

    def _ceiling(self, work: Work, tokens: float) -> Ceiling:
        gpu, setup = self.gpu, self.setup
        name, speed = link(gpu, setup.tensor, self.pcie)
        matrices = matrix_rate(gpu, matrix_type(self.model, setup))
        attention = matrix_rate(gpu, "fp8" if cache_type(self.model, setup).startswith("fp8") else "bf16")
        read = (work.weight_bytes + work.cache_bytes) / gpu.bandwidth
        compute = work.matrix_flops / matrices + work.attention_flops / attention
        send = work.sent_bytes / speed
        reading: Binder = "weights" if work.weight_bytes >= work.cache_bytes else "KV cache"
        binds: Binder = name if send > max(read, compute) else "compute" if compute > read else reading
        return Ceiling(tokens / (max(read, compute) + send), read, compute, send, binds)


def link(gpu: GpuModel, tensor: int, pcie: bool = False) -> tuple[Link, float]:
    """Return the link between `tensor` GPUs, and its bytes a second in one direction."""
    joined = gpu.nvlink and tensor <= gpu.nvlink_gpus and not pcie
    name: Link = "NVLink" if gpu.capability else "Infinity Fabric"
    return (name, gpu.nvlink / 2) if joined else ("PCIe", gpu.pcie / 2)


def cost_per_million(price: float, gpus: int, tokens_per_second: float, utilisation: float = 1.0) -> float:
    """Return the cost of a million tokens at a price per GPU-hour, at a share `utilisation` of the ceiling."""
    return price * gpus / 3600 / (tokens_per_second * utilisation) * 1e6


# -- samples, from which PromQL computes shares of ceilings; all are of one GPU

DTYPES = ("bf16", "fp8", "fp4", "int8", "int4", "mxfp4")
"""The types that `matrix_type` returns."""
_WORDS = ("dtype", "kv_cache_dtype")
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
Known = tuple[tuple[str, float | str], ...]


def gpu_samples(name: str, labels: tuple[str, ...]) -> Iterator[Sample]:
    """Yield the data sheet of a GPU by its product name; nothing for an unknown name."""
    gpu = gpus.find(name)
    if gpu is None:
        return
    yield "diag_gpu_memory_bandwidth_max_bytes_per_second", labels, gpu.bandwidth
    for dtype in DTYPES:
        yield "diag_gpu_flops_max", (*labels, dtype), matrix_rate(gpu, dtype)
    if gpu.nvlink:
        yield "diag_gpu_nvlink_max_bytes_per_second", labels, gpu.nvlink / 2


def server_samples(config: RunningConfig, facts: ServerFacts) -> tuple[Sample, ...]:
    """Return the work of a server; () unless its command is known and its model's config.json is on this host."""
    command = facts.process or facts.launch or (f"vllm serve {shlex.quote(facts.root)}" if facts.root else "")
    settings = config.settings
    known = tuple((name, settings[name].value) for name in (*_SIZES, *_WORDS) if name in settings)
    if config.incomplete or not command or any(value == SET for _, value in known):
        return ()
    return _command_samples(command, facts.version.partition("+")[0], known)


@lru_cache(maxsize=64)  # an exporter asks at every scrape
def _command_samples(command: str, version: str, known: Known) -> tuple[Sample, ...]:
    """Return the work of a command; `known` are the settings of the running server, which count more."""
    try:
        started = parse(command, version)
        folder = find(started.model, started, started.get("--revision") or "")
        model = read(folder, started.model, version)
        planned = planned_setup(started, model, GpuSpec(), version)

        running = dict(known)
        tensor, pipeline, data = (int(running.get(name, 0)) for name in _SIZES)
        dtype, kv_dtype = (str(running.get(name, "auto")) for name in _WORDS)
        planned = replace(
            planned,
            tensor=tensor or planned.tensor,
            pipeline=pipeline or planned.pipeline,
            data=data or planned.data,
            float32=planned.float32 or dtype.removeprefix("torch.") in ("float32", "float"),
            kv_dtype=planned.kv_dtype if kv_dtype == "auto" else kv_dtype,
        )
        if started.elsewhere or planned.savings:
            return ()
        every, experts = weights(model, planned)
        token, kind, share = prefill(model, planned, 1, 1), matrix_type(model, planned), experts_hit(model, 1)
        growing = [mixer for mixer in model.mixers if mixer.kind in ("full", "latent") and mixer.cached]
        cached = sum(token_bytes(model, mixer, planned) + mixer.index for mixer in growing)
    except (BadUsage, NotCovered, ArithmeticError):
        return ()
    if experts and planned.data > 1:
        return ()  # they are spread over all engines, in one of several ways
    stages = planned.pipeline
    samples: tuple[Sample, ...] = (
        ("diag_vllm_weight_bytes", ("every_step",), every / stages),
        ("diag_vllm_weight_bytes", ("experts",), experts / stages),
        ("diag_vllm_experts_per_token_ratio", (), share),
        ("diag_vllm_flops_per_token", (kind,), token.matrix_flops / stages),
        ("diag_vllm_all_reduce_bytes_per_token", (), token.sent_bytes / stages),
    )
    return (*samples, ("diag_vllm_kv_cache_bytes_per_token", (), cached / stages)) if growing else samples
