"""Deployments of a model: a launch and its changes, or the layouts on GPUs that hold a load, by one computation."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from diag.core.errors import BadUsage
from diag.core.formatting import gibibytes, number, plural, quantity
from diag.vllm.gpus import GpuModel
from diag.vllm.memory.fitting import LEAST_LENGTH, halves_cache, rounded, safe_length
from diag.vllm.memory.ledger import ACTIVATIONS, WEIGHTS, Ledger, ledger, state_blocks_needed, with_kv_cache
from diag.vllm.memory.model import Model
from diag.vllm.memory.quantization import tables
from diag.vllm.memory.setup import Setup, check
from diag.vllm.memory.usage import ByteRange
from diag.vllm.work import Ceiling, Replica, cost_per_million, link

TENSORS = (1, 2, 4, 8)
NOW = "as it is"
_STAGES = (2, 3, 4)
"""Hosts, each with a stage of the layers, of a model that one host does not hold."""
_SHORTER = 2
"""A shorter context is the half of the present one."""
_LEAST = 4096
"""Contexts shorter than this are not offered."""
_FP8 = 8.0
"""CUDA's compute capability from which vLLM runs FP8 weights (with Marlin, weights alone)."""
FP8_CACHE, FP8_WEIGHTS = "--kv-cache-dtype fp8", "--quantization fp8"


@dataclass(frozen=True)
class Deployment:
    """Replicas of a launch on GPUs of a kind, None if only their memory is known.

    `requests` of the context certainly run at a time over all replicas, for the smallest KV cache of its range; `batch`
    of them decode together at the ceilings, which are None if nothing fits or if they are unknown. `change` and `flags`
    are what differs from the launch, `checkpoint` is True if other files are needed.
    """

    gpu: GpuModel | None
    setup: Setup
    ledger: Ledger
    requests: int
    batch: int = 0
    decode: Ceiling | None = None
    prefill: Ceiling | None = None
    replicas: int = 1
    change: str = NOW
    flags: str = ""
    checkpoint: bool = False

    @property
    def gpus(self) -> int:
        return self.replicas * self.setup.gpus * self.setup.data

    @property
    def is_spread(self) -> bool:
        """Return True if GPUs exchange tokens in a way that is not modelled: between stages, or all to all."""
        return self.setup.pipeline > 1 or (bool(self.ledger.model.experts) and self.setup.data > 1)

    @property
    def name(self) -> str:
        """Return the name in reports: "2 x h100"."""
        return f"{self.gpus} x {self.gpu.name if self.gpu else 'GPU'}"

    @property
    def layout(self) -> str:
        """Return the division of the GPUs: "TP 4", or "2 x TP 2" for two replicas."""
        setup = self.setup
        sizes = ((setup.pipeline, f" PP {setup.pipeline}"), (setup.data, f" DP {setup.data}"))
        parts = "".join(text for size, text in sizes if size > 1) + " EP" * setup.expert_parallel
        return f"{f'{self.replicas} x ' if self.replicas > 1 else ''}TP {setup.tensor}{parts}"

    @property
    def output_rate(self) -> float:
        """Return output tokens a second at the ceiling; 0 if it is unknown or nothing fits."""
        return self.decode.tokens_per_second if self.decode else 0.0

    @property
    def tokens_per_gpu(self) -> float:
        tokens = self.ledger.tokens
        return tokens.central * self.replicas * self.setup.data / self.gpus if tokens else 0.0

    def holds(self, concurrency: int | None) -> bool:
        return self.requests >= (concurrency or 1)

    def cost(self, price: float | None) -> float | None:
        """Return dollars per million output tokens at the ceiling; None if the price or the ceiling is unknown."""
        return cost_per_million(price, self.gpus, self.output_rate) if price and self.decode else None


def held(page: Ledger) -> int:
    """Return the requests of the longest context that one engine certainly holds; 0 if it may hold none.

    A model of which nothing is cached has as many as a step takes: their prompts are not divided.
    """
    if page.verdict == "does not fit":
        return 0
    if not page.model.keeps_tokens:
        return max(1, min(page.setup.sequences, page.setup.batched_tokens // page.setup.length))
    return page.requests or 0


def sized(model: Model, setup: Setup, concurrency: int = 0) -> Ledger:
    """Return the ledger of a setup with the --max-num-seqs that its launch needs instead of the default.

    That is the largest that starts if vLLM refuses the default, and what an engine holds of the load if it is more.
    """
    page = ledger(model, setup)
    # a step has a token for each request (config/scheduler.py)
    least, share = page.blocks.low if page.blocks else 0, min(held(page), -(-concurrency // setup.data))
    share = min(share, setup.batched_tokens)
    if setup.default_sequences and 0 < least < state_blocks_needed(model, setup):
        return ledger(model, replace(setup, sequences=least))
    if setup.sequences >= share:
        return page
    more = ledger(model, replace(setup, sequences=share))  # whose steps leave less for the KV cache
    return more if held(more) >= share else ledger(model, replace(setup, sequences=max(held(more), setup.sequences)))


def deployment(
    model: Model, page: Ledger, gpu: GpuModel | None, concurrency: int | None, replicas: int = 1, **changed: Any
) -> Deployment:
    """Return a deployment with the ceilings of a load; `concurrency` None: as many requests as it holds."""
    setup = page.setup
    engines = replicas * setup.data
    # each request needs a block for its state, for which `sized` may have set another number than the default
    needs_blocks = "--max-num-seqs" in changed.get("flags", "") and state_blocks_needed(model, setup) > 0
    requests = min(held(page), setup.sequences if needs_blocks else held(page)) * engines
    batch = min(requests, setup.sequences * engines, concurrency or requests)
    plain = Deployment(gpu, setup, page, requests, batch, replicas=replicas, **changed)
    if not batch or gpu is None or not gpu.bandwidth or plain.is_spread:
        return plain
    with suppress(BadUsage):  # its ceilings are unknown
        one = Replica(model, setup, gpu)
        prefill = one.prefill(setup.length)
        prefill = prefill._replace(tokens_per_second=prefill.tokens_per_second * engines)
        if setup.pooling:
            return replace(plain, prefill=prefill)
        decode = one.decode(-(-batch // engines), setup.length)
        decode = decode._replace(tokens_per_second=batch / decode.step)
        return replace(plain, decode=decode, prefill=prefill)
    return plain


# -- changes of a launch ----------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """A change of a launch: its name, the flags to add, the settings, the model then, and what it needs."""

    name: str
    flags: str
    fields: Mapping[str, Any]
    model: Model
    checkpoint: bool = False
    needs_context: bool = False

    def labels(self, *flags: str) -> dict[str, Any]:
        """Return how a deployment with the change is called; `flags` are those beside its own."""
        joined = " ".join(filter(None, (self.flags, *flags)))
        return {"change": self.name, "flags": joined, "checkpoint": self.checkpoint}


def changes(model: Model, setup: Setup) -> Iterator[Change]:
    """Yield the changes of weights and KV cache that a GPU of the setup can run: flags first, other files last."""
    if setup.pooling:
        return
    level = setup.capability or (0.0 if setup.is_amd or setup.total is None else _FP8)  # of a GPU by its memory alone
    is_plain = not model.quantization and not setup.quantization and not setup.float32
    has_fp8_cache = halves_cache(model, setup)
    has_fp8_weights = is_plain and level >= _FP8
    if has_fp8_cache:
        yield Change("FP8 KV cache", FP8_CACHE, {"kv_dtype": "fp8"}, model)
    if has_fp8_weights:
        yield Change("FP8 weights", FP8_WEIGHTS, {"quantization": "fp8"}, model)
    if has_fp8_cache and has_fp8_weights:
        both = {"quantization": "fp8", "kv_dtype": "fp8"}
        yield Change("FP8 weights and KV cache", f"{FP8_WEIGHTS} {FP8_CACHE}", both, model)
    for checkpoint in tables().checkpoint:
        if is_plain and level >= checkpoint.capability:
            yield Change(checkpoint.name, "", {}, replace(model, quantization=checkpoint.config), True)


def offers(model: Model, page: Ledger, gpu: GpuModel | None) -> list[Deployment]:
    """Return the launch as it is and the changes that fit: the most KV cache for a GPU first, more GPUs last.

    Whatever a log or an unknown release changes in the KV cache of the page's ledger, it changes in all of them. The
    launch is left out if it does not fit.
    """
    setup = page.setup
    is_given = not setup.total or setup.kv_cache_bytes or setup.blocks
    if is_given or setup.cpu or setup.pooling or setup.pipeline * setup.data > 1:
        return []
    plain, now = ledger(model, setup).kv_cache, page.kv_cache
    shift = (now.low - plain.low, now.high - plain.high, now.central - plain.central) if plain and now else (0, 0, 0)
    shifted = partial(_shifted, shift=shift)

    def tried(change: Change, tensors: Iterable[int], stages: int = 1) -> Deployment | None:
        """Return the change with the first layout that fits: with the context of the launch, or else a shorter one."""
        pages: list[Ledger] = []
        for tensor in tensors:
            with suppress(BadUsage):
                pages.append(shifted(change.model, replace(setup, tensor=tensor, pipeline=stages, **change.fields)))
        if page.verdict != "fits" and not change.needs_context:
            shorter = [(one, safe_length(one) or 0) for one in pages if not (one.verdict == "fits" and held(one))]
            pages += [
                shifted(one.model, replace(one.setup, length=length, auto_length=False))
                for one, length in shorter
                if LEAST_LENGTH <= length < setup.length
            ]
        for fitting in pages:
            if fitting.verdict == "fits" and held(fitting):
                sizes = (("-tp", fitting.setup.tensor, setup.tensor), ("-pp", stages, 1))
                other = [f"{flag} {size}" for flag, size, usual in sizes if size != usual]
                if fitting.setup.length != setup.length and "length" not in change.fields:
                    other.append(f"--max-model-len {fitting.setup.length}")
                labels = change.labels(*other, _sequences(fitting, setup))
                return deployment(change.model, fitting, gpu, None, **labels)
        return None

    fewer = [tensor for tensor in TENSORS if tensor <= setup.tensor]
    made = [tried(kind, (setup.tensor,) if kind.flags == FP8_CACHE else fewer) for kind in changes(model, setup)]
    if page.verdict != "fits":
        eager = Change("no CUDA graphs", "--enforce-eager", {"eager": True}, model)
        made.append(None if setup.eager else tried(eager, (setup.tensor,)))
        made.append(tried(Change("a shorter context", "", {}, model), (setup.tensor,)))
    elif (shorter := rounded(setup.length // _SHORTER, setup.length)) >= _LEAST:
        fields = {"length": shorter, "auto_length": False}
        half = Change("half the context", f"--max-model-len {shorter}", fields, model)
        made.append(tried(half, (setup.tensor,)))
    fitting = sorted(filter(None, made), key=lambda one: -one.tokens_per_gpu)
    first = [deployment(model, page, gpu, None)] if page.verdict == "fits" and held(page) else []
    most = gpu.joined if gpu else 1 if setup.is_part else TENSORS[-1]
    larger = Change("more GPUs", "", {}, model, needs_context=True)
    more = tried(larger, [one for one in TENSORS if setup.tensor < one <= most])
    hosts_needed = (tried(larger, (most,), stages) for stages in _STAGES if not setup.is_part)
    more = more or (None if first else next(filter(None, hosts_needed), None))
    if first and (not more or more.requests * first[0].gpus < first[0].requests * more.gpus):
        more = deployment(model, page, gpu, None, 2, change="more GPUs", flags="a second replica")
    return [*first, *fitting, *filter(None, (more,))] if fitting or more else []


def _shifted(model: Model, setup: Setup, shift: tuple[int, int, int]) -> Ledger:
    """Return the ledger of a launch with what a log or an unknown release changes in the bounds of its KV cache."""
    check(model, setup)
    page = sized(model, setup)
    if (size := page.kv_cache) and shift != (0, 0, 0):
        bounds = (bound + by for bound, by in zip((size.low, size.high, size.central), shift, strict=True))
        page = with_kv_cache(page, ByteRange(*bounds))
    return page


def _sequences(page: Ledger, setup: Setup) -> str:
    return f"--max-num-seqs {page.setup.sequences}" if page.setup.sequences != setup.sequences else ""


# -- layouts for a load -----------------------------------------------------------------------------------------------

_USUAL = (1, 2, 4, 8)
"""Counts of engines without a load: each is one row."""
_MOST_REPLICAS = 4096
_ANY_NUMBER = 2**20
"""A load that no engine holds: each launch is for as many requests as it holds."""


def layouts(
    model: Model, setups: Sequence[Setup], gpu: GpuModel, concurrency: int | None, change: Change | None = None
) -> list[Deployment]:
    """Return deployments on GPUs of a kind, the fewest GPUs first: for each count the layout that holds most.

    With a load the counts are those at which a layout holds it, at most those of 4,096 replicas. More GPUs never hold
    fewer requests. Experts of a model with MLA, whose cache TP does not divide, may be divided among 16 or 32 engines.
    Without a layout that fits one host, the layers are divided among 2 to 4; without any, the setups are returned.
    """
    kind = change or Change(NOW, "", {}, model)
    engines = []
    wide = setups[:1] if len(setups) > 1 and model.latent and model.experts else []
    for setup in (*setups, *(replace(one, data=count, expert_parallel=True) for one in wide for count in (16, 32))):
        with suppress(BadUsage):
            check(kind.model, setup)
            page = sized(kind.model, replace(setup, **kind.fields), concurrency or _ANY_NUMBER)
            labels = kind.labels(_sequences(page, setup))
            engines.append(deployment(kind.model, page, gpu, concurrency, **labels))
    able = [one for one in engines if one.requests]
    if not able:
        largest = [setup for setup in setups[1:][-1:] if setup.pipeline == 1]
        spread = [replace(setup, pipeline=count) for setup in largest for count in _STAGES]
        over = layouts(model, spread, gpu, concurrency) if spread and change is None else []
        return [one for one in over if one.requests] or (engines if change is None else [])
    certain = [one for one in able if one.ledger.verdict == "fits"] or able
    if concurrency:
        counts = {one.gpus * min(-(-concurrency // one.requests), _MOST_REPLICAS) for one in certain}
    else:
        counts = {one.gpus * times for one in certain for times in _USUAL}
        counts = {count for count in counts if count <= max(_USUAL[-1], min(one.gpus for one in certain))}
    made = []
    for count in sorted(counts):
        best = max(certain, key=lambda one: (count // one.gpus * one.requests, one.gpus))
        replicas = count // best.gpus
        if best.gpus * replicas == count and replicas <= _MOST_REPLICAS:
            labels = {"change": best.change, "flags": best.flags, "checkpoint": best.checkpoint}
            made.append(deployment(kind.model, best.ledger, gpu, concurrency, replicas, **labels))
    return made


def chosen(rows: Iterable[Deployment], concurrency: int | None, prices: Mapping[str, float]) -> Deployment | None:
    """Choose what holds the load with the cheapest output token, without prices on the least GPU memory.

    One that may not fit is chosen only if none fits for certain; among equals the one with fewer changes.
    """
    able = [one for one in rows if one.gpu and one.requests and one.holds(concurrency) and not one.checkpoint]
    certain = [one for one in able if one.ledger.verdict == "fits"] or able
    costs = {id(one): one.cost(prices.get(one.gpu.name)) for one in certain if one.gpu}
    if priced := [one for one in certain if costs.get(id(one))]:
        return min(priced, key=lambda one: (costs[id(one)] or 0.0, len(one.flags)))
    return min(certain, key=lambda one: (one.gpu.memory * one.gpus if one.gpu else 0, len(one.flags)), default=None)


def least(deployments: list[Deployment], concurrency: int | None) -> list[Deployment]:
    """Return the fewest GPUs that hold the load; the most if none do."""
    return [one for one in deployments if one.holds(concurrency)][:1] or deployments[-1:]


def changed(model: Model, setups: Sequence[Setup], gpu: GpuModel, load: int | None) -> list[Deployment]:
    """Return the least GPUs of a kind that hold the load with each change."""
    tried = (layouts(model, setups, gpu, load, change) for change in changes(model, setups[0]))
    return [row for rows in tried for row in least([one for one in rows if one.requests], load)]


@dataclass(frozen=True)
class Sizing:
    """Deployments of one model for one load; `concurrency` None stands for as many requests as each holds.

    `rows` are on one page: every kind of GPU, and the changes on the chosen kind. `prices` are dollars per GPU hour by
    GPU name, `utilisation` the share of a ceiling that is served; `measured` are the output tokens/s of the observed
    server. `answer` is the first line, `launch` the command of the chosen deployment.
    """

    model: str
    version: str
    context: int
    concurrency: int | None
    rows: tuple[Deployment, ...]
    best: Deployment | None
    answer: str
    launch: str
    prices: Mapping[str, float]
    utilisation: float | None
    choices: tuple[str, ...]
    measured: float | None = None
    notes: tuple[str, ...] = ()

    def load(self, replica: Deployment) -> float | None:
        """Return the served share of the decode ceiling; above 1 the replica cannot serve the measured load."""
        measured = self.measured / replica.output_rate if self.measured and replica.decode else None
        return self.utilisation or measured

    def costs(self, replica: Deployment, ceiling: Ceiling | None) -> list[float | None]:
        """Return dollars per million tokens at the ceiling, and at the served share of it; None if unknown."""
        price, load = self.prices.get(replica.gpu.name if replica.gpu else ""), self.load(replica)
        shares = (1.0, load if load and load <= 1 else None)
        return [
            cost_per_million(price, replica.gpus, ceiling.tokens_per_second, share)
            if price and ceiling and share
            else None
            for share in shares
        ]


# -- the hosts of an engine -------------------------------------------------------------------------------------------


class Hosts(NamedTuple):
    """The hosts over which one replica is spread: the flags of the first, and what each other one has at its end."""

    number: int
    first: str
    others: tuple[str, ...]


def hosts(best: Deployment) -> Hosts | None:
    """Return the hosts of a replica that is larger than one; None if it fits one, or if diag cannot divide it."""
    setup, local = best.setup, (best.gpu.host or best.gpu.joined if best.gpu else 0)
    count, engines = -(-setup.gpus * setup.data // local) if local else 1, local // setup.gpus
    if count > 1 and setup.data == 1:  # the ranks of one engine
        others = tuple(f"--node-rank {at} --headless" for at in range(1, count))
        return Hosts(count, f"--nnodes {count} --master-addr {_FIRST} --node-rank 0", others)
    if count < 2 or not engines or setup.data % engines:
        return None
    others = tuple(f"--headless --data-parallel-start-rank {at}" for at in range(engines, setup.data, engines))
    address = f"--data-parallel-address {_FIRST} --data-parallel-rpc-port {_PORT}"
    return Hosts(count, f"--data-parallel-size-local {engines} {address}", others)


_FIRST, _PORT = "ADDRESS_OF_THE_FIRST_HOST", "13345"


# -- the sentences of a sizing: what holds the load, and what changes most ---------------------------------------------

_SHARE = 0.05
"""Share of a step from which all-reduces are worth a sentence."""
_SHORT = 8
"""Requests of an eighth of the context are short."""


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
    if not best.ledger.model.keeps_tokens:  # its memory is the same for any load
        sizes = {row.name: gibibytes(row.size.central) for row in best.ledger.rows if row.size}
        memory = ", ".join(f"{name} {sizes[name]}" for name in (WEIGHTS, ACTIVATIONS) if name in sizes)
        doubt = "fits" if best.ledger.verdict == "fits" else f"may not fit: {best.ledger.reasons[0]}"
        return f"{best.name} ({how}) {doubt}: {memory}; nothing of a request is kept"
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
    sentences = [_replica_sentence(model, best, concurrency or best.batch), _link_sentence(model, best, best.gpu)]
    length, engines = best.setup.length, best.replicas * best.setup.data
    if best.prefill:
        seconds = quantity(length / (best.prefill.tokens_per_second / engines), "seconds")
        sentences.append(
            f"A prompt of {plural(length, 'token')} takes at least {seconds} of prefill on one replica;"
            " a prefix cache hit saves its share of that."
        )
    short = max(length // _SHORT, 1)
    quick = Replica(model, best.setup, best.gpu).decode(-(-best.batch // engines), short)
    if best.decode.step >= 2 * quick.step:
        times = number(best.decode.step / quick.step)
        sentences.append(
            f"A token takes {times} times as long as with {short:,} tokens each: route long requests apart."
        )
    return [sentence for sentence in sentences if sentence]


def _replica_sentence(model: Model, best: Deployment, wanted: int) -> str:
    """Compare twice the GPUs in two replicas and in one."""
    tensor = 2 * best.setup.tensor
    is_one = best.replicas * best.setup.data == 1
    if not best.gpu or wanted < 2 or tensor > best.gpu.joined or model.heads % tensor or not is_one:
        return ""
    try:
        doubled = deployment(model, ledger(model, replace(best.setup, tensor=tensor)), best.gpu, wanted)
    except BadUsage:  # vLLM refuses to divide the model so
        return ""
    halves = deployment(model, best.ledger, best.gpu, wanted, 2)
    if not (doubled.decode and halves.decode and doubled.batch == halves.batch):
        return ""
    steps = [quantity(one.decode.step, "seconds") for one in (halves, doubled) if one.decode]
    return (
        f"Twice the GPUs: 2 replicas decode at most {number(halves.output_rate)} tokens/s at {steps[0]} a token,"
        f" one with --tensor-parallel-size {tensor} {number(doubled.output_rate)} at {steps[1]}."
    )


def _link_sentence(model: Model, best: Deployment, gpu: GpuModel) -> str:
    """Compare the shares of prefill that all-reduces take over NVLink and over PCIe, on at least two GPUs."""
    setup = replace(best.setup, tensor=max(best.setup.tensor, 2))
    if model.heads % setup.tensor:
        return ""
    name, _ = link(gpu, setup.tensor)
    shares = [Replica(model, setup, gpu, pcie).prefill(setup.length).link_share for pcie in (False, True)]
    if max(shares) < _SHARE:
        return ""
    instead = f", {quantity(shares[1], 'share')} over PCIe" if name != "PCIe" else ""
    on = f"--tensor-parallel-size {setup.tensor} on {gpu.name}"
    return f"With {on} all-reduces take {quantity(shares[0], 'share')} of prefill over {name}{instead}."
