"""The first line and the further sentences of a sizing: what holds the load, and what changes most."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from diag.core.formatting import gibibytes, number, plural, quantity
from diag.vllm.deployments import NOW, Deployment, deployment, sized
from diag.vllm.memory.model import Model
from diag.vllm.roofline import Replica, decode, link, prefill

_SHARE = 0.05
"""Share of a step from which all-reduces are worth a sentence."""
_SHORT = 8
"""Requests of an eighth of the context are short."""
_HOST = 8
"""GPUs of one host; between hosts all-reduces go over the network."""


def answer(
    rows: Sequence[Deployment], best: Deployment | None, concurrency: int | None, prices: Mapping[str, float]
) -> str:
    """Return the first line: the GPUs, their layout and flags, the requests that they hold, and the least cost."""
    if best is None:
        largest = max(rows, key=lambda one: (one.requests, (one.gpu.memory if one.gpu else 0) * one.gpus), default=None)
        if largest and largest.requests and concurrency:
            asked = f"{plural(concurrency, 'request')} of {plural(largest.setup.length, 'token')}"
            return (
                f"No configuration holds {asked}: the largest that diag tries, {largest.name} ({_how(largest)}), holds"
                f" {largest.requests:,}"
            )
        reasons = largest.ledger.reasons if largest else ()
        why = f"; on {largest.name}: {reasons[0]}" if largest and reasons else ""
        return f"None holds one request for certain{why}"
    context, how = plural(best.setup.length, "token"), _how(best)
    cost = best.cost(prices.get(best.gpu.name)) if best.gpu else None
    price = f", at least ${cost:.2f} per million output tokens" if cost else ""
    doubt = "" if best.ledger.verdict == "fits" else f"; it may not fit: {best.ledger.reasons[0]}"
    if not concurrency:
        memory = gibibytes(best.gpu.memory * best.gpus, 0) if best.gpu else ""
        return f"{best.name} ({how}), {memory}, holds {plural(best.requests, 'request')} of {context}{price}{doubt}"
    plain = [one for one in rows if one.change == NOW and one.gpu == best.gpu and one.holds(concurrency)]
    least = min(plain, key=lambda one: one.gpus, default=None)
    without = ""
    if best.change != NOW and (least is None or least.gpus > best.gpus):
        without = f"; without {best.flags.partition(' --max-num-seqs')[0]}: {least.name if least else 'no layout fits'}"
    asked = plural(concurrency, "request")
    return f"{best.name} ({how}) holds {asked} of {context}, with room for {best.requests:,}{price}{without}{doubt}"


def _how(one: Deployment) -> str:
    return ", ".join(filter(None, (one.layout, one.flags)))


def choices(model: Model, best: Deployment | None, concurrency: int | None) -> list[str]:
    """Return sentences with the numbers that decide, about the chosen deployment."""
    if best is None or not best.gpu or not best.decode:
        return []
    wanted = concurrency or best.batch
    found = [_replica_sentence(model, best, wanted), _link_sentence(model, best)]
    if best.prefill:
        one = best.prefill.tokens_per_second / (best.replicas * best.setup.data)
        seconds = quantity(best.setup.length / one, "seconds")
        found.append(
            f"A prompt of {plural(best.setup.length, 'token')} takes at least {seconds} of prefill on one replica;"
            " a prefix cache hit saves its share of that."
        )
    found.append(_length_sentence(model, best))
    return [sentence for sentence in found if sentence]


def _replica_sentence(model: Model, best: Deployment, wanted: int) -> str:
    """Compare twice the GPUs in two replicas and in one."""
    tensor = 2 * best.setup.tensor
    if wanted < 2 or tensor > _HOST or model.heads % tensor or best.replicas * best.setup.data > 1:
        return ""
    doubled = deployment(model, sized(model, replace(best.setup, tensor=tensor)), best.gpu, wanted)
    halves = deployment(model, best.ledger, best.gpu, wanted, 2)
    if not (doubled.decode and halves.decode and doubled.batch == halves.batch):
        return ""
    return (
        f"Twice the GPUs: 2 replicas decode at most {number(halves.output_rate)} tokens/s at {_step(halves)} a token,"
        f" one with --tensor-parallel-size {tensor} {number(doubled.output_rate)} at {_step(doubled)}."
    )


def _link_sentence(model: Model, best: Deployment) -> str:
    """Compare the shares of prefill that all-reduces take over NVLink and over PCIe, on at least two GPUs."""
    setup = replace(best.setup, tensor=max(best.setup.tensor, 2))
    if best.gpu is None or model.heads % setup.tensor:
        return ""
    name, _ = link(best.gpu, setup.tensor)
    replicas = [Replica(model, setup, best.gpu, pcie) for pcie in (False, True)]
    shares = [prefill(replica, setup.length).link_share for replica in replicas]
    if max(shares) < _SHARE:
        return ""
    instead = f", {quantity(shares[1], 'share')} over PCIe" if name == "NVLink" else ""
    on = f"--tensor-parallel-size {setup.tensor} on {best.gpu.name}"
    return f"With {on} all-reduces take {quantity(shares[0], 'share')} of prefill over {name}{instead}."


def _length_sentence(model: Model, best: Deployment) -> str:
    """Compare a step of long requests with one of short requests."""
    short, engines = max(best.setup.length // _SHORT, 1), best.replicas * best.setup.data
    if not best.gpu or not best.decode:
        return ""
    quick = decode(Replica(model, best.setup, best.gpu), -(-best.batch // engines), short)
    if best.decode.step < 2 * quick.step:
        return ""
    times = number(best.decode.step / quick.step)
    return f"A token takes {times} times as long as with {short:,} tokens each: route long requests apart."


def _step(one: Deployment) -> str:
    return quantity(one.decode.step, "seconds") if one.decode else "?"
