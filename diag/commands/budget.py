"""`diag budget`: estimate GPU memory from a launch command or a model, a GPU and, if given, a log; or compare GPUs.

Several GPUs are compared by fit, ceilings, and the cost of a million tokens, for the requests of the options, or of the
traffic of a running or recorded server.
"""

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from diag import promql
from diag.commands.observe import ObserveOptions, observe
from diag.commands.options import BudgetOptions
from diag.core.contract import Contract
from diag.core.declarations import did_you_mean
from diag.core.errors import BadUsage
from diag.core.files import exists, expanded, is_folder
from diag.core.formatting import GIB, gibibytes, printable
from diag.core.metric_prefix import GENERATED, RUNNING, metric
from diag.http.address import parse
from diag.log.memory_sizes import SETTINGS, LoggedMemory, read_memory_log
from diag.report.gpu_sizing import BUDGET_DOCUMENT, SIZING_DOCUMENT, Budget, render_budget, render_sizing
from diag.sources.observation import Observation
from diag.vllm import gpus, work
from diag.vllm.command import parse as command
from diag.vllm.command import redaction
from diag.vllm.command.command import Command
from diag.vllm.command.shown import masked
from diag.vllm.deployments import (
    TENSORS,
    Deployment,
    Sizing,
    answer,
    changed,
    choices,
    chosen,
    hosts,
    layouts,
    least,
    offers,
)
from diag.vllm.flags.registry import understood, versions
from diag.vllm.gpus import GpuModel
from diag.vllm.memory.fitting import safe_length, suggestions
from diag.vllm.memory.ledger import (
    ACTIVATIONS,
    BUDGET,
    GRAPHS,
    KV_CACHE,
    NON_TORCH,
    TURNS,
    WEIGHTS,
    Ledger,
    differences,
    over_releases,
    uncounted,
)
from diag.vllm.memory.ledger import ledger as compute
from diag.vllm.memory.model import Model, load, read
from diag.vllm.memory.setup import CPU_SPACE, GpuSpec, Setup, check, invalid, lacks_half, setup, size
from diag.vllm.memory.shapes import find_shape, launch_flags, served_name, unsized
from diag.vllm.memory.usage import ByteRange
from diag.vllm.memory.weights import encoders, parameters

STATUS = {"fits": 0, "does not fit": 2, "cannot tell": 3}
IN_FLOAT32 = "float32, twice the bytes: vLLM refuses float16 for this model, and there is no bfloat16 on GPUs"
WIDENED = "vLLM widens the weights to 16 bits as this GPU multiplies (Marlin): memory is saved, not time in prefill"
ALIKE = 0.03
"""Largest relative difference in memory between cards of one name."""
_ROWS = {"budget": BUDGET, "weights": WEIGHTS, "activations": ACTIVATIONS, "other": NON_TORCH, "kv_cache": KV_CACHE}
"""Rows of the estimate by the names of sizes in the log."""
_TOKENS = metric("request_{0}_tokens")
_MEAN_TOKENS = f"sum(increase({_TOKENS}_sum[{{1}}s])) / sum(increase({_TOKENS}_count[{{1}}s]))"
_RUNNING = f"sum(max_over_time({RUNNING}[{{0}}s]))"
_OUTPUT = f"sum(rate({GENERATED}[{{0}}s]))"
_MOST_CHANGED = 6  # kinds of GPUs of which each is tried with the changes; of more, the best without them
_PRICE = re.compile(r"([^=]+)=\$?(\d{1,6}(?:\.\d{1,6})?)")
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,3})?) ?%")


def run(options: BudgetOptions, as_json: bool = False) -> tuple[str, int]:
    """Return the text to print, and the exit status; of several GPUs 0 if one fits, 2 if none, 3 if that is unknown."""
    if not options.compares:
        budget = estimate(options)
        return (BUDGET_DOCUMENT.text if as_json else render_budget)(budget), STATUS[budget.ledger.verdict]
    has_url, had = options.target.startswith(("http://", "https://")), None
    if has_url or exists(Path(options.target) / "recording.toml"):
        is_here = has_url and parse(options.target).is_loopback
        had, options = traffic(options.target), options._replace(foreign=options.foreign or not is_here)
    sizing = size_up(options, had)
    verdicts = {deployment.ledger.verdict for deployment in sizing.rows}
    status = 0 if sizing.best and "fits" in verdicts else 3 if "cannot tell" in verdicts else 2
    return (SIZING_DOCUMENT.text if as_json else render_sizing)(sizing), status


def launch(words: Sequence[str]) -> str:
    """Return the target that the words of a command line are; BadUsage for an option of neither diag nor vLLM."""
    if len(words) == 1:
        return words[0]
    if unknown := next(
        (word for word in words if re.match("--?[A-Za-z]", word) and not understood(word.partition("=")[0])), ""
    ):
        hint = did_you_mean(unknown, (f"--{name.replace('_', '-')}" for name in BudgetOptions._fields))
        raise BadUsage(f"no such option of diag budget, nor of vLLM: {printable(unknown, 60)}{hint}")
    program = next((word for word in words if "=" not in word), "").rpartition("/")[2]
    if re.fullmatch(r"vllm|python[\d.]*|docker|podman|uvx?|srun", program):
        return shlex.join(words)
    if not words[1].startswith("-"):
        raise BadUsage(f"{printable(words[1], 60)} is one argument too many: a target is a model or a launch command")
    return f"vllm serve {shlex.join(words)}"


# -- one GPU -----------------------------------------------------------------------------------------------------------


def estimate(options: BudgetOptions) -> Budget:
    """Return the estimate; BadUsage if there is none. The log of a different server is ignored, with a note."""
    logged = read_memory_log(options.log) if options.log else LoggedMemory()
    budget = _estimate(options, logged)
    mismatch = next(_mismatches(options, logged, budget.ledger), "")
    if not mismatch:
        return replace(budget, notes=(logged.skipped, *budget.notes)) if logged.skipped else budget
    again = _estimate(options._replace(log="", version=options.version or logged.version), LoggedMemory())
    note = f"the log is from a different server, so its sizes are ignored: {mismatch}"
    return replace(again, notes=(note, *again.notes))


def _estimate(options: BudgetOptions, logged: LoggedMemory) -> Budget:
    version = options.version or logged.version
    started = _read_command(options.target, version, options.foreign)
    model = _read_model(started, version, options)
    gpu = _choose_gpu(options, logged, CPU_SPACE in started.environment)
    planned = setup(started, model, gpu, version)
    if "free" in logged.sizes:
        planned = replace(planned, free=logged.sizes["free"][1])
    sizes: Mapping[str, tuple[int, int]] = logged.sizes
    measured = {row: ByteRange(*sizes[name]) for name, row in _ROWS.items() if name in sizes}
    if planned.graphs_in_budget and not planned.eager:  # vLLM's peak of activations may contain its estimate of graphs
        measured.pop(ACTIVATIONS, None)
    graphs = sizes.get("estimated graphs" if planned.graphs_in_budget else "graphs", sizes.get("graphs"))
    measured |= {GRAPHS: ByteRange(*graphs)} if graphs else {}
    ledger = compute(model, planned, measured)
    wanted = suggestions(ledger, measured) if ledger.verdict != "fits" and ledger.kv_cache else []

    notes = _facts(model)
    notes += [IN_FLOAT32] if planned.float32 and lacks_half(model, planned.capability) else []
    card, kind = gpus.find(gpu.name), work.matrix_type(model, planned).removeprefix("mx")
    notes += [WIDENED] if card and card.capability and kind in ("fp8", "fp4") and kind not in card.flops else []
    notes += [] if version else [_assumed(ledger, started, gpu)]
    if others := ", ".join(gpus.other_sizes(options.gpu)) if not options.gpu_memory else "":
        notes.append(f"{printable(options.gpu, 40)} is taken for {gibibytes(gpu.total or 0)}; others: {others}")
    if gpu.name and not options.gpu and not planned.cpu:
        notes.append(f"the GPU is {printable(gpu.name, 40)}, found on this host")
    length = logged.numbers.get("length")
    if length and length != planned.length and not planned.auto_length:
        notes.append(f"the log is from a server with --max-model-len {length:.0f}, not {planned.length}")
    if options.log and not (logged.sizes or logged.numbers):
        notes.append("the log has no memory sizes: it ends before start-up completed, or is not vLLM's")

    if lost := logged.lost_to_compiling():
        cold, warm = (gibibytes(size) for size in lost)
        which = "this start" if logged.compiled else "an earlier start"
        then = ": restart once, with a VLLM_CACHE_ROOT that is kept" if logged.compiled else ""
        notes.append(
            f"{which} compiled the model, which counts as activations (vllm#54122): it got {cold} of KV cache, an "
            f"equal start with the compile cache {warm}{then}"
        )

    needed = logged.sizes.get("needed")
    return Budget(
        model=model_label(model),
        gpu="a CPU" if planned.cpu else printable(gpu.name or "a GPU", 40),
        ledger=ledger,
        notes=tuple(notes),
        logged=logged.numbers | ({"needed": sum(needed) / 2 / GIB} if needed else {}),
        suggestions=tuple((change.flag, change.value) for change in wanted),
        longest=safe_length(ledger),
        sequences=None if uncounted(ledger) else ledger.requests,
        offers=tuple(offers(model, ledger, card)),
    )


def _assumed(page: Ledger, started: Command, gpu: GpuSpec, held: Deployment | None = None) -> str:
    """Return the sentence that a release is assumed, and how the KV cache of older ones differs from its own."""
    older, now = over_releases(page, started, gpu), page.kv_cache
    note = f"vLLM {page.setup.version} is assumed; set the release with --vllm-version"
    if not now or not older.kv_cache or older.kv_cache.low > 0.98 * now.low or now.low <= 0:
        return note
    least = f"leave as little as {gibibytes(max(0, older.kv_cache.low))} for the KV cache"
    if held and (requests := (older.requests or 0) * held.replicas * held.setup.data) < held.requests:
        least = f"certainly hold {requests:,} requests of the {held.requests:,}"
    return f"{note}: older ones, since {TURNS[0]}, {least}: {differences(started)}"


def _choose_gpu(options: BudgetOptions, logged: LoggedMemory, cpu: bool) -> GpuSpec:
    """Return the GPU in the options, otherwise that in the log, otherwise the smallest one of this host.

    The memory of a GPU of this host is without the part that driver and firmware reserve.
    """
    name = options.gpu
    if cpu or name.lower() == "cpu":
        return GpuSpec(name="cpu")
    if options.gpu_memory:
        return GpuSpec(size(options.gpu_memory, "--gpu-memory", least=GIB), name)
    if "total" in logged.sizes:
        return GpuSpec(sum(logged.sizes["total"]) // 2, name)
    if name:
        return GpuSpec(gpus.memory(name), name)

    from diag.exporter.gpu.collector import GpuCollector

    memories: dict[str, dict[str, float]] = {}
    names: dict[str, str] = {}
    for family, labels, value in GpuCollector((), dict, lambda: None).collect().samples:
        if family == "diag_gpu_info":
            names[labels[0]] = labels[2]
        elif family in ("diag_gpu_memory_total_bytes", "diag_gpu_memory_reserved_bytes"):
            memories.setdefault(labels[0], {})[family] = value
    total, reserved = "diag_gpu_memory_total_bytes", "diag_gpu_memory_reserved_bytes"
    usable = {gpu: int(memory[total] - memory.get(reserved, 0)) for gpu, memory in memories.items()}
    sizes = [GpuSpec(size, names[gpu]) for gpu, size in usable.items()]
    return min(sizes, key=lambda gpu: gpu.total or 0, default=GpuSpec())


def _mismatches(options: BudgetOptions, logged: LoggedMemory, ledger: Ledger) -> Iterator[str]:
    """Yield the differences that show that the log is of another server than the estimated one."""
    plan = ledger.setup
    planned: Mapping[str, float] = dict(zip(SETTINGS, (plan.utilization, plan.tensor, plan.pipeline), strict=True))
    for name, value in logged.settings.items():
        if value != planned[name] and not (plan.cpu and name == "gpu_memory_utilization"):
            yield f"--{name.replace('_', '-')} {value:g}, not {planned[name]:g}"

    total, named = sum(logged.sizes.get("total", ())) // 2, 0
    with suppress(BadUsage):  # a GPU whose memory only its log has
        named = size(options.gpu_memory, "--gpu-memory") if options.gpu_memory else gpus.memory(options.gpu)
    if total and named and abs(total - named) > ALIKE * named:
        yield f"a GPU of {gibibytes(total)}, not {gibibytes(named)}"

    rows = {row.name: row for row in ledger.rows}
    kv_cache, budget = rows[KV_CACHE].logged, rows[BUDGET].computed if BUDGET in rows else None
    if kv_cache and budget and plan.kv_cache_bytes is None and plan.blocks is None:
        weights = rows[WEIGHTS].logged or rows[WEIGHTS].computed
        taken = kv_cache.low + (weights.low if weights else 0)
        if taken > (1 + ALIKE) * budget.high > 0:
            yield f"weights and KV cache of {gibibytes(taken)}, more than the budget of {gibibytes(budget.high)}"


# -- several GPUs ------------------------------------------------------------------------------------------------------


class Traffic(NamedTuple):
    """Traffic of one server: peak of running requests, mean tokens of a request with its answer, output tokens/s."""

    launch: str
    version: str
    running: int
    tokens: int
    output_rate: float


def traffic(target: str) -> Traffic:
    """Return the traffic of one server; BadUsage if it had none, or if its launch command is unknown."""
    observed = observe(ObserveOptions([target]), Contract())
    servers = observed.instances
    if len(servers) != 1:
        raise BadUsage(f"{printable(target)} has {len(servers)} servers: their traffic is compared one at a time")
    if servers[0] not in observed.launch:
        raise BadUsage(f"how {printable(target)} was started is not known: give its launch command instead")
    window = max(1, round((observed.instants[-1] - observed.instants[0]) / 1000 + observed.interval))
    lengths = [_last_value(observed, _MEAN_TOKENS.format(kind, window)) for kind in ("prompt", "generation")]
    running, rate = (_last_value(observed, expression.format(window)) for expression in (_RUNNING, _OUTPUT))
    if not (running and rate and all(lengths)):
        raise BadUsage(
            f"{printable(target)} finished no request while it was observed: there is no traffic to size for"
        )
    launch, version = observed.launch[servers[0]], observed.versions.get(servers[0], "")
    return Traffic(launch, version, round(running), math.ceil(sum(lengths)), rate)


def _last_value(observed: Observation, expression: str) -> float:
    """Return the value at the last instant; 0 if there is none."""
    vector = promql.evaluate(expression, observed.samples, observed.instants[-1:])
    value = float(vector.values[0][0]) if len(vector.labels) and vector.present[0][0] else 0.0
    return value if math.isfinite(value) else 0.0


def size_up(options: BudgetOptions, had: Traffic | None) -> Sizing:
    """Return all deployments on one page; BadUsage for a model or a GPU that is not in the data.

    Without --context and --concurrency, tokens of a request and concurrency are those of the traffic that a server had.
    """
    release = options.version or (had.version.partition("+")[0] if had else "")
    started = _read_command(had.launch if had else options.target, release, options.foreign)
    model = _read_model(started, release, options)
    version = release or versions()[-1]
    length = size(options.context, "--context", most=2**30) if options.context else had.tokens if had else None
    # a model that keeps nothing of a request serves any number, in turn
    concurrency = (options.concurrency or (had.running if had else None)) if model.keeps_tokens else None
    prices = _parse_prices(options.prices or ())
    kinds = tuple(gpus.gpus().values() if options.all_gpus else map(gpus.named, re.split(r" *, *", options.gpu)))
    if model.family is None or model.unknown:
        raise BadUsage(f"{model.unknown or model.doubt}: diag cannot compute its ceilings")
    started = started._replace(environment={k: v for k, v in started.environment.items() if k != CPU_SPACE})
    set_up = partial(_setups, started, model, version, length)
    first = set_up(kinds[0])[0]
    check(model, first)
    work.check(model, first)
    of_kind = {gpu.name: layouts(model, set_up(gpu), gpu, concurrency) for gpu in kinds}
    every = {gpu.name: changed(model, set_up(gpu), gpu, concurrency) for gpu in kinds[:_MOST_CHANGED]}
    best = chosen(chain(*of_kind.values(), *(every.values() if len(every) == len(kinds) else ())), concurrency, prices)
    kind = best.gpu if best and best.gpu else max(kinds, key=lambda gpu: gpu.memory)
    tried = every.get(kind.name) or changed(model, set_up(kind), kind, concurrency)
    others = (every[gpu.name] for gpu in kinds if gpu != kind and len(every) == len(kinds))
    tried += filter(None, (chosen(those, concurrency, prices) for those in others))
    plain = chain.from_iterable(
        deployments if len(kinds) == 1 else least(deployments, concurrency) for deployments in of_kind.values()
    )
    rows = (*plain, *tried)
    if best := chosen(rows, concurrency, prices):
        rows = tuple(row for row in rows if not row.requests or row.holds(concurrency))
    basis = best or next(iter(rows), None)
    of = basis.gpu if basis and basis.gpu else kind
    assumed = "" if release or not basis else _assumed(basis.ledger, started, GpuSpec(of.memory, of.name), basis)
    left_out = _left_out(model, chain.from_iterable(map(set_up, kinds)))
    priced = best and best.gpu and best.cost(prices.get(best.gpu.name))
    rule = f"chosen (>): what holds it {'with the cheapest output token' if priced else 'on the least GPU memory'}"
    bare = ", ".join(gpu.name for gpu in kinds if not gpu.bandwidth)
    left_out += [f"of {bare} only the memory is known, not the speed"] if bare else []
    notes = (rule if best else "", *_spread_notes(best, rows), *left_out, *_facts(model), assumed)
    return Sizing(
        model=model_label(model),
        version=version,
        context=first.length,
        concurrency=concurrency,
        rows=rows,
        best=best,
        answer=answer(rows, best, concurrency, prices),
        launch=_launch(model, started, best, length) if best else "",
        prices=prices,
        utilisation=_parse_utilisation(options.utilisation),
        measured=had.output_rate if had else None,
        choices=tuple(choices(model, best, concurrency)),
        notes=tuple(filter(None, notes)),
    )


def _setups(started: Command, model: Model, version: str, length: int | None, gpu: GpuModel) -> list[Setup]:
    """Return the launch on GPUs of this kind: as it says, or with each size of tensor parallelism that they allow."""
    planned = setup(started, model, GpuSpec(gpu.memory, gpu.name), version)
    planned = replace(planned, length=length or planned.length, auto_length=False)
    is_fixed = started.get("--tensor-parallel-size") or planned.pipeline * planned.data > 1
    joined = [tensor for tensor in TENSORS if tensor <= gpu.joined]
    return [planned] if is_fixed else [replace(planned, tensor=tensor) for tensor in joined]


def _spread_notes(best: Deployment | None, rows: Sequence[Deployment]) -> Iterator[str]:
    """Yield the sentences about replicas on several hosts, and what each host of the chosen one runs."""
    if spread := hosts(best) if best else None:
        others = "; ".join(spread.others[:3])
        more = f"; and so on for {len(spread.others)}" if len(spread.others) > 3 else ""
        yield f"a replica is on {spread.number} hosts: this is the first's command; the others' ends in {others}{more}"
    else:
        counts = {(row.gpus // row.replicas, row.gpu.name): at.number for row in rows if row.gpu and (at := hosts(row))}
        yield from (f"{gpus} x {name} are {count} hosts" for (gpus, name), count in counts.items())


def _left_out(model: Model, setups: Iterable[Setup]) -> list[str]:
    """Return why sizes of tensor parallelism are in no row, what GPUs lack, and if one runs the model in float32."""
    found = dict[str, None]()
    for planned in setups:
        try:
            check(model, planned)
        except BadUsage as error:
            found[f"left out: {error}"] = None
        if planned.refused:
            found[f"vLLM refuses to start: {planned.refused}"] = None
        elif planned.float32 and lacks_half(model, planned.capability):
            found[f"{IN_FLOAT32} of capability {planned.capability}"] = None
    return list(found)


def _launch(model: Model, started: Command, best: Deployment, length: int | None) -> str:
    """Return the command of one replica of a deployment, as a line to paste."""
    sizes = [(f"--{kind}-parallel-size", getattr(best.setup, kind)) for kind in ("tensor", "pipeline", "data")]
    divided = [word for flag, size in sizes if size > 1 and not started.get(flag) for word in (flag, str(size))]
    if best.setup.expert_parallel and not started.switched("--enable-expert-parallel"):
        divided.append("--enable-expert-parallel")
    context = ["--max-model-len", str(length)] if length and length <= model.longest else []
    flags = launch_flags(model.name).items()
    needed = [word for flag, value in flags if not started.get(flag) for word in (flag, value)]
    spread = hosts(best)
    added = [*divided, *context, *needed, *best.flags.split(), *(spread.first.split() if spread else ())]
    replaced = {at for option in started.given if option.name in added for at in option.words}
    printed = masked(started)  # it keeps its number of words
    name = served_name(started.model) if model.facts else started.model
    words = (name if word == started.model else word for at, word in enumerate(printed.words) if at not in replaced)
    return printed._replace(words=(*words, *added)).written()


def _parse_prices(texts: Sequence[str]) -> Mapping[str, float]:
    """Return dollars per GPU hour by the GPU's name."""
    prices = {}
    for text in texts:
        match = _PRICE.fullmatch(text)
        if not match or not float(match[2]):
            raise BadUsage(invalid("--price", text, "GPU=DOLLARS such as h100=2.5"))
        prices[gpus.named(match[1]).name] = float(match[2])
    return prices


def _parse_utilisation(text: str) -> float | None:
    match = _SHARE.fullmatch(text.strip())
    share = float(match[1]) / 100 if match else 0.0
    if text and not 0 < share <= 1:
        raise BadUsage(invalid("--utilisation", text, "a share such as 40%"))
    return share or None


# -- what both read ---------------------------------------------------------------------------------------------------


def _read_command(target: str, version: str, foreign: bool) -> Command:
    """Read a launch command, or the folder or id of a model alone."""
    words = re.sub(r"^(?:workers-ai/)?@[ch]f/", "", target.strip())  # a provider's mark before a repository
    is_local = not foreign and (is_folder(words) or exists(words))
    if not is_local and re.fullmatch(r"[A-Z][\w.:()+ -]{1,80}", words) and " -" not in words:  # programs begin small
        is_version = re.search(r"\d", words) and not re.search(r"(?i)vllm|serve|python|docker", words)
        if is_version or find_shape(words) or unsized(words):  # as leaderboards have names: Llama 3.1 8B Instruct
            words = re.sub(r"[\s()]+", "-", words).strip("-")
    is_model = is_folder(words) if is_local else len(words.split()) == 1
    text = f"vllm serve {shlex.quote(words)}" if is_model else words
    started = command.read_foreign(text, version) if foreign else command.read(text, version=version)
    if not started.model:
        raise BadUsage("the command names no model: expected `vllm serve MODEL --flag value ...`")
    return started


def _read_model(started: Command, version: str, options: BudgetOptions) -> Model:
    """Read the model of a command, of --config if it is given; BadUsage if another host has the model's folder."""
    if options.config:
        return read(expanded(options.config), started.model, version)
    if started.elsewhere and not options.foreign and is_folder(started.model):
        raise BadUsage(f"the model's folder is {started.elsewhere}: give the command that runs in there")
    return load(started.model, started, started.get("--revision") or "", version or versions()[-1])


def _facts(model: Model) -> list[str]:
    """Return the sentence about a shape that is known by its name, with the number of its parameters."""
    count = parameters(model) + encoders(model).elements if model.facts else 0
    return [f"{count / 1e9:,.2f} billion parameters; {model.facts}"] if model.facts else []


def model_label(model: Model) -> str:
    """Return the name of a model for printing: its folder or its id, and whose shape the name was taken for."""
    name = printable(redaction.name(model.folder.resolve().name if is_folder(model.name) else model.name), 60)
    return f"{name} (taken for {model.taken_for})" if model.taken_for else name
