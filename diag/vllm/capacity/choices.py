"""What the numbers say about the choices of a deployment, in sentences: each where it makes a difference."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from diag.core.formatting import gibibytes, number, plural, quantity
from diag.vllm.capacity import roofline
from diag.vllm.capacity.roofline import Replica
from diag.vllm.capacity.sizing import SizedReplica, configuration, cost_per_million
from diag.vllm.memory.cache import NUMBER_BYTES
from diag.vllm.memory.model import Model
from diag.vllm.memory.suggestions import supports_fp8_cache

MATTERS = 1.1
"""A ceiling that changes by less is within what a data sheet promises too much."""
_SHARE = 0.05
_SHORT = 8
"""Requests of an eighth of the context are short ones."""
_HOST = 8
"""GPUs of one host; between hosts all-reduces take another way."""
_FP8 = 8.9
"""Compute capability since which tensor cores compute in 8-bit floats."""


def chosen(sized: Sequence[SizedReplica], concurrency: int | None, prices: Mapping[str, float]) -> SizedReplica | None:
    """The cheapest output token, where prices are known, else the least memory, of what holds all requests.

    What may not fit comes in only where nothing fits for certain.
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
    """The sentences, about the configuration that is chosen first."""
    first = chosen(sized, concurrency, prices)
    if first is None:
        return [_none_holds(sized, concurrency)]
    wanted = concurrency or first.batch
    found = [
        _first(first, prices.get(first.gpu.name), wanted),
        _replicas(model, first, wanted),
        _kv_dtype(model, first, wanted),
        _quantization(model, first, wanted),
        _link(model, first),
        _prefix(first),
        _lengths(model, first),
    ]
    return [sentence for sentence in found if sentence]


def _none_holds(sized: Sequence[SizedReplica], concurrency: int | None) -> str:
    most = max(sized, key=lambda one: one.requests, default=None)
    if most is None or not most.requests:
        return f"None holds one request for certain{_why(sized)}."
    wanted = f"{plural(concurrency or 1, 'request')} of {most.setup.length:,} tokens"
    return f"None holds {wanted}; the most is {most.requests:,} on {most.name}."


def _why(sized: Sequence[SizedReplica]) -> str:
    """What stands against the one with the most memory."""
    largest = max(sized, key=lambda one: one.gpu.memory * one.setup.tensor, default=None)
    return f"; on {largest.name}: {largest.ledger.reasons[0]}" if largest and largest.ledger.reasons else ""


def _first(first: SizedReplica, price: float | None, wanted: int) -> str:
    held = f"{plural(wanted, 'request')} of {first.setup.length:,} tokens"
    doubt = "" if first.ledger.verdict == "fits" else f" (it may not fit: {first.ledger.reasons[0]})"
    rate = f"at most {number(first.output_rate)} output tokens/s"
    if price is None:
        memory = gibibytes(first.gpu.memory * first.setup.tensor, 0)
        return f"Least GPU memory that holds {held}: {first.name} with {memory}, {rate}{doubt}."
    cost = cost_per_million(price, first.setup.tensor, first.output_rate)
    return f"Cheapest that holds {held}: {first.name}, {rate}, at least ${cost:.2f} per million of them{doubt}."


def _replicas(model: Model, first: SizedReplica, wanted: int) -> str:
    """Twice the GPUs: as another replica, or in one."""
    doubled = _changed(model, first, wanted, tensor=2 * first.setup.tensor)
    half = _changed(model, first, -(-wanted // 2))
    if not (doubled and half) or wanted < 2 or doubled.setup.tensor > _HOST:
        return ""
    return (
        f"Twice the GPUs: 2 replicas decode at most {number(2 * half.output_rate)} tokens/s at {_step(half)} a token,"
        f" one with --tensor-parallel-size {doubled.setup.tensor} {number(doubled.output_rate)} at {_step(doubled)}."
    )


def _kv_dtype(model: Model, first: SizedReplica, wanted: int) -> str:
    if NUMBER_BYTES.get(first.setup.kv_dtype, 2) < 2 or not supports_fp8_cache(model, first.setup):
        return ""
    return _gain(model, first, wanted, "--kv-cache-dtype fp8", kv_dtype="fp8")


def _quantization(model: Model, first: SizedReplica, wanted: int) -> str:
    if model.quantization or first.setup.quantization or first.setup.capability < _FP8:
        return ""
    return _gain(model, first, wanted, "--quantization fp8", quantization="fp8")


def _gain(model: Model, first: SizedReplica, wanted: int, flag: str, **changes: object) -> str:
    """What a flag changes; "" where that is not known, or too little."""
    after = _changed(model, first, wanted, **changes)
    if not after or max(after.requests / first.requests, after.output_rate / first.output_rate) < MATTERS:
        return ""
    return (
        f"With {flag} {first.name} holds {after.requests:,} requests instead of {first.requests:,}, and decodes"
        f" at most {number(after.output_rate)} tokens/s instead of {number(first.output_rate)}."
    )


def _link(model: Model, first: SizedReplica) -> str:
    """What all-reduces take over NVLink and over PCIe, on two GPUs where one is enough."""
    setup = replace(first.setup, tensor=max(first.setup.tensor, 2))
    name, _ = roofline.link(first.gpu, setup.tensor)
    replicas = [Replica(model, setup, first.gpu, pcie) for pcie in (False, True)]
    shares = [roofline.prefill(replica, setup.length).link_share for replica in replicas]
    if max(shares) < _SHARE or model.heads % setup.tensor:
        return ""
    instead = f", {quantity(shares[1], 'share')} over PCIe" if name == "NVLink" else ""
    on = f"--tensor-parallel-size {setup.tensor} on {first.gpu.name}"
    return f"With {on} all-reduces take {quantity(shares[0], 'share')} of prefill over {name}{instead}."


def _prefix(first: SizedReplica) -> str:
    if not first.prefill:
        return ""
    seconds = first.setup.length / first.prefill.tokens_per_second
    return (
        f"A prompt of {first.setup.length:,} tokens takes at least {quantity(seconds, 'seconds')} of prefill on"
        f" {first.name}; a prefix cache hit saves its share of that."
    )


def _lengths(model: Model, first: SizedReplica) -> str:
    """How much longer a step is beside long requests."""
    short = max(first.setup.length // _SHORT, 1)
    quick = roofline.decode(Replica(model, first.setup, first.gpu), first.batch, short)
    if not first.decode or first.decode.step < 2 * quick.step:
        return ""
    times = number(first.decode.step / quick.step)
    return f"A token takes {times} times as long as with {short:,} tokens each: route long requests apart."


def _changed(model: Model, first: SizedReplica, wanted: int, **changes: object) -> SizedReplica | None:
    """The configuration with another setup; None where that holds less than is wanted."""
    setup = replace(first.setup, **changes)  # type: ignore[arg-type]
    if model.heads % setup.tensor:
        return None
    after = configuration(model, setup, first.gpu, wanted)
    return after if after.decode and after.batch == min(wanted, setup.sequences) else None


def _step(one: SizedReplica) -> str:
    return quantity(one.decode.step, "seconds") if one.decode else "?"
