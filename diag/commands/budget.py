"""`diag budget`: an estimate of GPU memory from a command line, a model, a GPU and perhaps a log."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from diag.commands import sizing
from diag.commands.sizing import SizingOptions, is_server, named, traffic
from diag.core.errors import BadUsage
from diag.core.formatting import GIB, gibibytes, printable
from diag.exporter.log.memory_sizes import SETTINGS, LoggedMemory, read_memory_log
from diag.report.gpu_sizing import Budget, render_budget, render_budget_json
from diag.vllm import gpus
from diag.vllm.command import parse as command
from diag.vllm.command.command import Command
from diag.vllm.flags.registry import versions
from diag.vllm.memory.ledger import (
    ACTIVATIONS,
    BUDGET,
    GRAPHS,
    KV_CACHE,
    NON_TORCH,
    WEIGHTS,
    Ledger,
    Measured,
    ledger,
    safe_length,
    safe_sequences,
    suggestions,
)
from diag.vllm.memory.model import Model, find, is_folder
from diag.vllm.memory.model import read as read_model
from diag.vllm.memory.setup import CPU_SPACE, GpuSpec, Setup, setup, size
from diag.vllm.memory.usage import ByteRange

STATUS = {"fits": 0, "does not fit": 2, "cannot tell": 3}
ALIKE = 0.03
"""By how much the memory of cards of one name differs at most."""
_ROWS = {"budget": BUDGET, "weights": WEIGHTS, "activations": ACTIVATIONS, "other": NON_TORCH, "kv_cache": KV_CACHE}
"""The row that a size of the log belongs to."""


@dataclass(frozen=True)
class BudgetOptions:
    """What the user gave; "" where they gave nothing."""

    target: str
    gpu: str = ""
    gpu_memory: str = ""
    log: str = ""
    version: str = ""
    sizing: SizingOptions | None = None


def run(options: BudgetOptions, as_json: bool = False) -> tuple[str, int]:
    """What is printed, and the exit status."""
    if options.sizing and options.sizing.wanted:
        return _compare(options, options.sizing, as_json)
    budget = estimate(options)
    return (render_budget_json if as_json else render_budget)(budget), STATUS[budget.ledger.verdict]


def _compare(options: BudgetOptions, compared: SizingOptions, as_json: bool) -> tuple[str, int]:
    """Several GPUs beside each other."""
    if options.log or options.gpu_memory:
        raise BadUsage("--log and --gpu-memory are of one server: leave them out to compare GPUs")
    had = traffic(options.target) if is_server(options.target) else None
    version = options.version or (had.version.partition("+")[0] if had else "")
    started = _command(had.launch if had else options.target, version)
    compared = replace(compared, version=version, traffic=had)
    return sizing.run(_model(started, version), started, compared, as_json)


def estimate(options: BudgetOptions) -> Budget:
    """The estimate; BadUsage where there is none. A log of a different server is set aside, with a note."""
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
    started = _command(options.target, version)
    model = _model(started, version)
    gpu = _gpu(options, logged, CPU_SPACE in started.environment)
    planned = _with_log(setup(started, model, gpu, version), logged)
    measured = _measured(logged, planned)
    found = ledger(model, planned, measured)
    changes = suggestions(found, measured) if found.verdict != "fits" and found.kv_cache else []
    return Budget(
        model=named(model),
        gpu="a CPU" if planned.cpu else printable(gpu.name or "a GPU", 40),
        ledger=found,
        notes=tuple(_notes(options, logged, planned, gpu, version)),
        logged=_logged(logged),
        suggestions=tuple((change.flag, change.value) for change in changes),
        longest=safe_length(found),
        sequences=safe_sequences(found),
    )


def _logged(logged: LoggedMemory) -> Mapping[str, float]:
    """What the log says of the KV cache; the size that it needed in GiB."""
    needed = logged.sizes.get("needed")
    return logged.numbers | ({"needed": sum(needed) / 2 / GIB} if needed else {})


def _command(target: str, version: str) -> Command:
    """A command, or a folder, or the id of a model alone."""
    words = target.strip()
    is_model = is_folder(words) or (len(words.split()) == 1 and not _is_file(words))
    started = command.read(f"vllm serve {shlex.quote(words)}" if is_model else words, version=version)
    if not started.model:
        raise BadUsage("the command names no model: expected `vllm serve MODEL --flag value ...`")
    return started


def _model(started: Command, version: str) -> Model:
    """Its model, as the release reads it; BadUsage for a folder of another host, which is not this one's."""
    if started.elsewhere and is_folder(started.model):
        raise BadUsage(f"the model's folder is {started.elsewhere}: give the command that runs in there")
    folder = find(started.model, started.environment, started.get("--revision") or "")
    return read_model(folder, started.model, version or versions()[-1])


def _is_file(name: str) -> bool:
    """Whether it may hold a command."""
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def _gpu(options: BudgetOptions, logged: LoggedMemory, cpu: bool) -> GpuSpec:
    """The GPU that was named, that the log is of, or of this host."""
    name = options.gpu
    if cpu or name.lower() == "cpu":
        return GpuSpec(name="cpu")
    if options.gpu_memory:
        return GpuSpec(size(options.gpu_memory, "--gpu-memory", least=GIB), name)
    if "total" in logged.sizes:
        return GpuSpec(sum(logged.sizes["total"]) // 2, name)
    return GpuSpec(gpus.memory(name), name) if name else _smallest_of_this_host()


def _smallest_of_this_host() -> GpuSpec:
    """The smallest GPU of this host, without what driver and firmware reserve."""
    from diag.exporter.gpu import nvml

    try:
        nvml.start()
    except nvml.NvmlUnavailable:
        return GpuSpec()
    try:
        return min(_of_this_host(), key=lambda gpu: gpu.total or 0, default=GpuSpec())
    except (nvml.NvmlUnavailable, nvml.GpuLost):
        return GpuSpec()
    finally:
        nvml.stop()


def _of_this_host() -> Iterator[GpuSpec]:
    from diag.exporter.gpu import nvml
    from diag.exporter.gpu.readings import MEMORY

    for device in filter(None, nvml.devices()):
        memory = device.ask(MEMORY[0], *MEMORY[1])
        if memory is not None:
            yield GpuSpec(memory.total - memory.reserved, str(device.ask("nvmlDeviceGetName") or ""))


def _mismatches(options: BudgetOptions, logged: LoggedMemory, found: Ledger) -> Iterator[str]:
    """What shows that the log is not of the server that is estimated."""
    plan = found.setup
    planned: Mapping[str, float] = dict(zip(SETTINGS, (plan.utilization, plan.tensor, plan.pipeline), strict=True))
    for name, value in logged.settings.items():
        if value != planned[name] and not (plan.cpu and name == "gpu_memory_utilization"):
            yield f"--{name.replace('_', '-')} {value:g}, not {planned[name]:g}"
    total, named = sum(logged.sizes.get("total", ())) // 2, _named_size(options)
    if total and named and abs(total - named) > ALIKE * named:
        yield f"a GPU of {gibibytes(total)}, not {gibibytes(named)}"
    taken, budget = _taken(found)
    if taken > (1 + ALIKE) * budget > 0:
        yield f"weights and KV cache of {gibibytes(taken)}, more than the budget of {gibibytes(budget)}"


def _taken(found: Ledger) -> tuple[int, int]:
    """Bytes of weights and KV cache in the log, and the budget for both; 0 where one is not known."""
    rows = {row.name: row for row in found.rows}
    kv_cache, budget = rows[KV_CACHE].logged, rows[BUDGET].computed if BUDGET in rows else None
    is_fixed = found.setup.kv_cache_bytes is not None or found.setup.blocks is not None
    if not kv_cache or not budget or is_fixed:
        return 0, 0
    weights = rows[WEIGHTS].logged or rows[WEIGHTS].computed
    return kv_cache.low + (weights.low if weights else 0), budget.high


def _named_size(options: BudgetOptions) -> int:
    """Bytes of the GPU that the options name; 0 where they name none, or one that only its log knows."""
    with suppress(BadUsage):
        return size(options.gpu_memory, "--gpu-memory") if options.gpu_memory else gpus.memory(options.gpu)
    return 0


def _with_log(planned: Setup, logged: LoggedMemory) -> Setup:
    free = logged.sizes.get("free")
    return replace(planned, free=free[1]) if free else planned


def _measured(logged: LoggedMemory, planned: Setup) -> Measured:
    """The log's sizes by the row they belong to.

    Where graphs count, vLLM subtracts its estimate of them, and its peak of activations may contain that.
    """
    sizes: Mapping[str, tuple[int, int]] = logged.sizes
    measured = {row: ByteRange(*sizes[name]) for name, row in _ROWS.items() if name in sizes}
    if planned.graphs_in_budget and not planned.eager:
        measured.pop(ACTIVATIONS, None)
    graphs = sizes.get("estimated graphs" if planned.graphs_in_budget else "graphs", sizes.get("graphs"))
    return measured | ({GRAPHS: ByteRange(*graphs)} if graphs else {})


def _notes(options: BudgetOptions, logged: LoggedMemory, planned: Setup, gpu: GpuSpec, version: str) -> list[str]:
    """What was assumed, and where the log is of a different server."""
    notes = [] if version else [f"vLLM {planned.version} is assumed; set the release with --vllm-version"]
    if gpu.name and not options.gpu and not planned.cpu:
        notes.append(f"the GPU is {printable(gpu.name, 40)}, found on this host")
    length = logged.numbers.get("length")
    if length and length != planned.length and not planned.auto_length:
        notes.append(f"the log is from a server with --max-model-len {length:.0f}, not {planned.length}")
    if options.log and not (logged.sizes or logged.numbers):
        notes.append("the log has no memory sizes: it ends before start-up completed, or is not vLLM's")
    return notes
