"""`diag budget`: estimate GPU memory from a launch command or a model, a GPU and, if given, a log."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from diag.commands import sizing
from diag.commands.sizing import SizingOptions, is_server, model_label, traffic
from diag.core.errors import BadUsage
from diag.core.files import exists, expanded
from diag.core.formatting import GIB, gibibytes, printable
from diag.log.memory_sizes import SETTINGS, LoggedMemory, read_memory_log
from diag.report.gpu_sizing import Budget, render_budget, render_budget_json
from diag.vllm import gpus
from diag.vllm.command import parse as command
from diag.vllm.command.command import Command
from diag.vllm.deployments import offers
from diag.vllm.flags.registry import versions
from diag.vllm.memory.fitting import safe_length, safe_sequences, suggestions
from diag.vllm.memory.ledger import ACTIVATIONS, BUDGET, GRAPHS, KV_CACHE, NON_TORCH, WEIGHTS, Ledger, Measured, judge
from diag.vllm.memory.model import Model, is_folder, load, read
from diag.vllm.memory.setup import CPU_SPACE, GpuSpec, Setup, setup, size
from diag.vllm.memory.usage import ByteRange

STATUS = {"fits": 0, "does not fit": 2, "cannot tell": 3}
ALIKE = 0.03
"""Largest relative difference in memory between cards of one name."""
_ROWS = {"budget": BUDGET, "weights": WEIGHTS, "activations": ACTIVATIONS, "other": NON_TORCH, "kv_cache": KV_CACHE}
"""Rows of the estimate by the names of sizes in the log."""


@dataclass(frozen=True)
class BudgetOptions:
    """Options of the command line; "" if not given. For a `foreign` text, such as an agent's, no file is opened."""

    target: str
    gpu: str = ""
    gpu_memory: str = ""
    log: str = ""
    version: str = ""
    sizing: SizingOptions | None = None
    config: str = ""
    foreign: bool = False


def run(options: BudgetOptions, as_json: bool = False) -> tuple[str, int]:
    """Return the text to print, and the exit status."""
    compared = options.sizing
    if not (compared and compared.wanted):
        budget = estimate(options)
        return (render_budget_json if as_json else render_budget)(budget), STATUS[budget.ledger.verdict]
    if options.log or options.gpu_memory:
        raise BadUsage("--log and --gpu-memory are of one server: leave them out to compare GPUs")
    had = traffic(options.target) if is_server(options.target) else None
    version = options.version or (had.version.partition("+")[0] if had else "")
    started = _read_command(had.launch if had else options.target, version, options.foreign)
    compared = replace(compared, version=version, traffic=had)
    return sizing.run(_read_model(started, version, options.config), started, compared, as_json)


def estimate(options: BudgetOptions) -> Budget:
    """Return the estimate; BadUsage if there is none. The log of a different server is ignored, with a note."""
    logged = read_memory_log(options.log) if options.log else LoggedMemory()
    budget = _estimate(options, logged)
    mismatch = next(_mismatches(options, logged, budget.ledger), "")
    if not mismatch:
        return replace(budget, notes=(logged.skipped, *budget.notes)) if logged.skipped else budget
    again = _estimate(replace(options, log="", version=options.version or logged.version), LoggedMemory())
    note = f"the log is from a different server, so its sizes are ignored: {mismatch}"
    return replace(again, notes=(note, *again.notes))


def _estimate(options: BudgetOptions, logged: LoggedMemory) -> Budget:
    version = options.version or logged.version
    started = _read_command(options.target, version, options.foreign)
    model = _read_model(started, version, options.config)
    gpu = _choose_gpu(options, logged, CPU_SPACE in started.environment)
    planned = setup(started, model, gpu, version)
    if "free" in logged.sizes:
        planned = replace(planned, free=logged.sizes["free"][1])
    measured = _measured(logged, planned)
    judged = judge(started, gpu, version)
    found = judged(model, planned, measured)
    changes = suggestions(found, measured, judged) if found.verdict != "fits" and found.kv_cache else []

    notes = [model.facts] if model.facts else []
    notes += [] if version else [f"vLLM {planned.version} is assumed; set the release with --vllm-version"]
    if others := gpus.other_sizes(options.gpu) if not options.gpu_memory else ():
        notes.append(
            f"{printable(options.gpu, 40)} is taken for {gibibytes(gpu.total or 0)}; others: {', '.join(others)}"
        )
    if gpu.name and not options.gpu and not planned.cpu:
        notes.append(f"the GPU is {printable(gpu.name, 40)}, found on this host")
    length = logged.numbers.get("length")
    if length and length != planned.length and not planned.auto_length:
        notes.append(f"the log is from a server with --max-model-len {length:.0f}, not {planned.length}")
    if options.log and not (logged.sizes or logged.numbers):
        notes.append("the log has no memory sizes: it ends before start-up completed, or is not vLLM's")

    needed = logged.sizes.get("needed")
    return Budget(
        model=model_label(model),
        gpu="a CPU" if planned.cpu else printable(gpu.name or "a GPU", 40),
        ledger=found,
        notes=tuple(notes),
        logged=logged.numbers | ({"needed": sum(needed) / 2 / GIB} if needed else {}),
        suggestions=tuple((change.flag, change.value) for change in changes),
        longest=safe_length(found),
        sequences=safe_sequences(found),
        offers=tuple(offers(model, found, gpus.find(gpu.name))),
    )


def _read_command(target: str, version: str, foreign: bool) -> Command:
    """Read a launch command, or the folder or id of a model alone."""
    words = target.strip()
    is_model = is_folder(words) or (len(words.split()) == 1 and not exists(words))
    text = f"vllm serve {shlex.quote(words)}" if is_model else words
    started = command.read_foreign(text, version) if foreign else command.read(text, version=version)
    if not started.model:
        raise BadUsage("the command names no model: expected `vllm serve MODEL --flag value ...`")
    return started


def _read_model(started: Command, version: str, config: str) -> Model:
    """Read the model of a command, of --config if it is given; BadUsage if another host has the model's folder."""
    if config:
        return read(expanded(config), started.model, version)
    if started.elsewhere and is_folder(started.model):
        raise BadUsage(f"the model's folder is {started.elsewhere}: give the command that runs in there")
    return load(started.model, started, started.get("--revision") or "", version or versions()[-1])


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

    found: dict[str, dict[str, float]] = {}
    names: dict[str, str] = {}
    for family, labels, value in GpuCollector((), dict, lambda: None).collect().samples:
        if family == "diag_gpu_info":
            names[labels[0]] = labels[2]
        elif family in ("diag_gpu_memory_total_bytes", "diag_gpu_memory_reserved_bytes"):
            found.setdefault(labels[0], {})[family] = value
    sizes = [
        GpuSpec(
            int(memory["diag_gpu_memory_total_bytes"] - memory.get("diag_gpu_memory_reserved_bytes", 0)), names[gpu]
        )
        for gpu, memory in found.items()
    ]
    return min(sizes, key=lambda gpu: gpu.total or 0, default=GpuSpec())


def _mismatches(options: BudgetOptions, logged: LoggedMemory, found: Ledger) -> Iterator[str]:
    """Yield the differences that show that the log is of another server than the estimated one."""
    plan = found.setup
    planned: Mapping[str, float] = dict(zip(SETTINGS, (plan.utilization, plan.tensor, plan.pipeline), strict=True))
    for name, value in logged.settings.items():
        if value != planned[name] and not (plan.cpu and name == "gpu_memory_utilization"):
            yield f"--{name.replace('_', '-')} {value:g}, not {planned[name]:g}"

    total, given = sum(logged.sizes.get("total", ())) // 2, 0
    with suppress(BadUsage):  # a GPU whose memory only its log has
        given = size(options.gpu_memory, "--gpu-memory") if options.gpu_memory else gpus.memory(options.gpu)
    if total and given and abs(total - given) > ALIKE * given:
        yield f"a GPU of {gibibytes(total)}, not {gibibytes(given)}"

    rows = {row.name: row for row in found.rows}
    kv_cache, budget = rows[KV_CACHE].logged, rows[BUDGET].computed if BUDGET in rows else None
    if kv_cache and budget and plan.kv_cache_bytes is None and plan.blocks is None:
        weights = rows[WEIGHTS].logged or rows[WEIGHTS].computed
        taken = kv_cache.low + (weights.low if weights else 0)
        if taken > (1 + ALIKE) * budget.high > 0:
            yield f"weights and KV cache of {gibibytes(taken)}, more than the budget of {gibibytes(budget.high)}"


def _measured(logged: LoggedMemory, planned: Setup) -> Measured:
    """Return the log's sizes by row.

    If graphs count, vLLM subtracts its estimate of them, and its peak of activations may contain that.
    """
    sizes: Mapping[str, tuple[int, int]] = logged.sizes
    measured = {row: ByteRange(*sizes[name]) for name, row in _ROWS.items() if name in sizes}
    if planned.graphs_in_budget and not planned.eager:
        measured.pop(ACTIVATIONS, None)
    graphs = sizes.get("estimated graphs" if planned.graphs_in_budget else "graphs", sizes.get("graphs"))
    return measured | ({GRAPHS: ByteRange(*graphs)} if graphs else {})
