"""Ceilings of a replica by the roofline of its GPUs, and configurations compared by these ceilings."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal, NamedTuple

from diag.core.errors import BadUsage
from diag.core.formatting import gibibytes, number, plural, quantity
from diag.vllm import work
from diag.vllm.gpus import GpuModel
from diag.vllm.memory.fitting import supports_fp8_cache
from diag.vllm.memory.kv_layout import NUMBER_BYTES
from diag.vllm.memory.ledger import Ledger, ledger
from diag.vllm.memory.model import Model
from diag.vllm.memory.setup import Setup, check
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


SetupOfGpu = Callable[[GpuModel], Setup]
"""The setup of a command on one kind of GPU."""


class SizedReplica(NamedTuple):
    """A replica: `requests` of the longest context that its KV cache holds, `batch` of them that decode together.

    If nothing fits, both are 0 and the ceilings None. `requests` is for the smallest KV cache of its range.
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
        """Return the name in reports: "2 x h100"."""
        return f"{self.setup.tensor} x {self.gpu.name}"

    @property
    def output_rate(self) -> float:
        """Return output tokens a second at the ceiling; 0 if nothing fits."""
        return self.decode.tokens_per_second if self.decode else 0.0


def configurations(
    model: Model, of_gpu: SetupOfGpu, kinds: Iterable[GpuModel], tensors: Iterable[int], concurrency: int | None
) -> Iterator[SizedReplica]:
    """Yield every kind of GPU with every tensor parallelism that divides the model; BadUsage if the first does not."""
    kinds, tensors = tuple(kinds), tuple(tensors)
    first = replace(of_gpu(kinds[0]), tensor=tensors[0])
    check(model, first)
    work.check(model, first)
    for gpu in kinds:
        for tensor in tensors:
            with suppress(BadUsage):
                yield configuration(model, replace(of_gpu(gpu), tensor=tensor), gpu, concurrency)


def configuration(model: Model, setup: Setup, gpu: GpuModel, concurrency: int | None) -> SizedReplica:
    """Return one configuration; `concurrency` None: as many requests as it holds. BadUsage if vLLM refuses it."""
    found = ledger(model, setup)
    requests = 0
    if found.verdict != "does not fit" and found.layout and found.blocks:
        requests = max(found.blocks.low - 1, 0) // found.layout.blocks(setup.length)
    batch = min(requests, setup.sequences, concurrency or requests)
    if not batch:
        return SizedReplica(gpu, setup, found, requests, 0, None, None)
    replica = Replica(model, setup, gpu)
    ceilings = decode(replica, batch, setup.length), prefill(replica, setup.length)
    return SizedReplica(gpu, setup, found, requests, batch, *ceilings)


def cost_per_million(price: float, gpus: int, tokens_per_second: float, utilisation: float = 1.0) -> float:
    """Return the cost of a million tokens at a price per GPU-hour, at a share `utilisation` of the ceiling."""
    return price * gpus / 3600 / (tokens_per_second * utilisation) * 1e6


MATTERS = 1.1
"""A smaller change of a ceiling is within the error of data sheets."""
_SHARE = 0.05
_SHORT = 8
"""Requests of an eighth of the context are short."""
_HOST = 8
"""GPUs of one host; between hosts all-reduces go over the network."""
_FP8 = 8.9
"""Compute capability since which tensor cores compute in 8-bit floats."""


def chosen(sized: Sequence[SizedReplica], concurrency: int | None, prices: Mapping[str, float]) -> SizedReplica | None:
    """Choose the configuration that holds all requests with the cheapest output token, without prices the least memory.

    One that may not fit is chosen only if none fits for certain.
    """
    able = [one for one in sized if one.batch and one.requests >= (concurrency or 1)]
    certain = [one for one in able if one.ledger.verdict == "fits"] or able
    priced = [one for one in certain if one.gpu.name in prices]
    if priced:
        return min(priced, key=lambda one: prices[one.gpu.name] * one.setup.tensor / one.output_rate)
    return min(certain, key=lambda one: one.gpu.memory * one.setup.tensor, default=None)


def choices(
    model: Model, sized: Sequence[SizedReplica], concurrency: int | None, prices: Mapping[str, float]
) -> list[str]:
    """Return the sentences about the choice, first about the chosen configuration."""
    first = chosen(sized, concurrency, prices)
    if first is None:
        most = max(sized, key=lambda one: one.requests, default=None)
        if most is None or not most.requests:
            largest = max(sized, key=lambda one: one.gpu.memory * one.setup.tensor, default=None)
            reasons = largest.ledger.reasons if largest else ()
            why = f"; on {largest.name}: {reasons[0]}" if largest and reasons else ""
            return [f"None holds one request for certain{why}."]
        asked = f"{plural(concurrency or 1, 'request')} of {most.setup.length:,} tokens"
        return [f"None holds {asked}; the most is {most.requests:,} on {most.name}."]

    wanted, setup = concurrency or first.batch, first.setup
    found = [_chosen_sentence(first, prices.get(first.gpu.name), wanted), _replica_sentence(model, first, wanted)]
    if NUMBER_BYTES.get(setup.kv_dtype, 2) >= 2 and supports_fp8_cache(model, setup):
        found.append(_gain_sentence(model, first, wanted, "--kv-cache-dtype fp8", kv_dtype="fp8"))
    if not model.quantization and not setup.quantization and setup.capability >= _FP8:
        found.append(_gain_sentence(model, first, wanted, "--quantization fp8", quantization="fp8"))
    found.append(_link_sentence(model, first))
    if first.prefill:
        seconds = quantity(setup.length / first.prefill.tokens_per_second, "seconds")
        found.append(
            f"A prompt of {setup.length:,} tokens takes at least {seconds} of prefill on {first.name};"
            " a prefix cache hit saves its share of that."
        )
    found.append(_length_sentence(model, first))
    return [sentence for sentence in found if sentence]


def _chosen_sentence(first: SizedReplica, price: float | None, wanted: int) -> str:
    held = f"{plural(wanted, 'request')} of {first.setup.length:,} tokens"
    doubt = "" if first.ledger.verdict == "fits" else f" (it may not fit: {first.ledger.reasons[0]})"
    rate = f"at most {number(first.output_rate)} output tokens/s"
    if price is None:
        memory = gibibytes(first.gpu.memory * first.setup.tensor, 0)
        return f"Least GPU memory that holds {held}: {first.name} with {memory}, {rate}{doubt}."
    cost = cost_per_million(price, first.setup.tensor, first.output_rate)
    return f"Cheapest that holds {held}: {first.name}, {rate}, at least ${cost:.2f} per million of them{doubt}."


def _replica_sentence(model: Model, first: SizedReplica, wanted: int) -> str:
    """Compare twice the GPUs in two replicas and in one."""
    doubled = _alternative(model, first, wanted, tensor=2 * first.setup.tensor)
    half = _alternative(model, first, -(-wanted // 2))
    if not (doubled and half) or wanted < 2 or doubled.setup.tensor > _HOST:
        return ""
    return (
        f"Twice the GPUs: 2 replicas decode at most {number(2 * half.output_rate)} tokens/s at {_step(half)} a token,"
        f" one with --tensor-parallel-size {doubled.setup.tensor} {number(doubled.output_rate)} at {_step(doubled)}."
    )


def _gain_sentence(model: Model, first: SizedReplica, wanted: int, flag: str, **changes: object) -> str:
    """Compare a configuration with and without a flag; "" if the gain is unknown or too small."""
    after = _alternative(model, first, wanted, **changes)
    if not after or max(after.requests / first.requests, after.output_rate / first.output_rate) < MATTERS:
        return ""
    return (
        f"With {flag} {first.name} holds {after.requests:,} requests instead of {first.requests:,}, and decodes"
        f" at most {number(after.output_rate)} tokens/s instead of {number(first.output_rate)}."
    )


def _link_sentence(model: Model, first: SizedReplica) -> str:
    """Compare the shares of prefill that all-reduces take over NVLink and over PCIe, on at least two GPUs."""
    setup = replace(first.setup, tensor=max(first.setup.tensor, 2))
    name, _ = link(first.gpu, setup.tensor)
    replicas = [Replica(model, setup, first.gpu, pcie) for pcie in (False, True)]
    shares = [prefill(replica, setup.length).link_share for replica in replicas]
    if max(shares) < _SHARE or model.heads % setup.tensor:
        return ""
    instead = f", {quantity(shares[1], 'share')} over PCIe" if name == "NVLink" else ""
    on = f"--tensor-parallel-size {setup.tensor} on {first.gpu.name}"
    return f"With {on} all-reduces take {quantity(shares[0], 'share')} of prefill over {name}{instead}."


def _length_sentence(model: Model, first: SizedReplica) -> str:
    """Compare a step of long requests with one of short requests."""
    short = max(first.setup.length // _SHORT, 1)
    quick = decode(Replica(model, first.setup, first.gpu), first.batch, short)
    if not first.decode or first.decode.step < 2 * quick.step:
        return ""
    times = number(first.decode.step / quick.step)
    return f"A token takes {times} times as long as with {short:,} tokens each: route long requests apart."


def _alternative(model: Model, first: SizedReplica, wanted: int, **changes: object) -> SizedReplica | None:
    """Return the configuration with another setup; None if it holds fewer requests than wanted."""
    setup = replace(first.setup, **changes)  # type: ignore[arg-type]
    if model.heads % setup.tensor:
        return None
    after = configuration(model, setup, first.gpu, wanted)
    return after if after.decode and after.batch == min(wanted, setup.sequences) else None


def _step(one: SizedReplica) -> str:
    return quantity(one.decode.step, "seconds") if one.decode else "?"
