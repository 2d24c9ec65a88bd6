"""The command `diag budget`: a command line, a model, a GPU and perhaps a log become a ledger. Nothing is changed."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from diag.core.errors import BadUsage
from diag.core.formatting import gibibytes, printable
from diag.core.sizes import GIB
from diag.exporter.log.memory import SETTINGS, Memory
from diag.exporter.log.memory import read as read_log
from diag.report.budget import Budget, document, text
from diag.vllm.command import parse as command
from diag.vllm.command.secrets import hidden
from diag.vllm.flags.registry import versions
from diag.vllm.memory import gpus
from diag.vllm.memory.fitting import changes, safe_length, safe_sequences
from diag.vllm.memory.ledger import ACTIVATIONS, BUDGET, CAPTURED, OTHER, POOL, WEIGHTS, Ledger, Measured, ledger
from diag.vllm.memory.model import Model, find, is_folder
from diag.vllm.memory.model import read as read_model
from diag.vllm.memory.parts import ByteRange
from diag.vllm.memory.setup import SPACE, GpuSpec, Setup, setup, size

STATUS = {"fits": 0, "does not fit": 2, "cannot tell": 3}
ALIKE = 0.03
"""By how much the memory of cards of one name differs at most."""
_ROWS = {"budget": BUDGET, "weights": WEIGHTS, "activations": ACTIVATIONS, "other": OTHER, "pool": POOL}


@dataclass(frozen=True)
class BudgetOptions:
    """What the user gave; "" where they gave nothing."""

    target: str
    gpu: str = ""
    gpu_memory: str = ""
    log: str = ""
    version: str = ""


def run(asked: BudgetOptions, as_json: bool = False) -> tuple[str, int]:
    """What is printed, and the exit status."""
    told = reckon(asked)
    return document(told) if as_json else text(told), STATUS[told.known.verdict]


def reckon(asked: BudgetOptions) -> Budget:
    """The ledger; BadUsage where there is none."""
    logged = read_log(asked.log) if asked.log else Memory()
    told = _reckoned(asked, logged)
    other = next(_another(asked, logged, told.known), "")
    if not other:
        return told
    again = _reckoned(replace(asked, log="", version=asked.version or logged.version), Memory())
    return replace(again, notes=(f"the log is of another server, whose sizes do not count: {other}", *again.notes))


def _reckoned(asked: BudgetOptions, logged: Memory) -> Budget:
    version = asked.version or logged.version
    started = _command(asked.target, version)
    model = _model(started, version)
    gpu = _gpu(asked, logged, SPACE in started.environment)
    planned = _with_log(setup(started, model, gpu, version), logged)
    measured = _measured(logged, planned)
    known = ledger(model, planned, measured)
    return Budget(
        name=printable(hidden(model.folder.resolve().name if is_folder(model.name) else model.name), 60),
        gpu="a CPU" if planned.cpu else printable(gpu.name or "a GPU", 40),
        known=known,
        notes=tuple(_notes(asked, logged, planned, gpu, version)),
        logged=logged.numbers | {name: sum(logged.sizes[name]) / 2**31 for name in ("needed",) if name in logged.sizes},
        changes=tuple((each.flag, each.value) for each in changes(known, measured))
        if known.verdict != "fits" and known.pool
        else (),
        longest=safe_length(known),
        sequences=safe_sequences(known),
    )


def _command(target: str, version: str) -> command.Command:
    """A command, or a folder, or the id of a model alone."""
    words = target.strip()
    is_model = is_folder(words) or (len(words.split()) == 1 and not _is_file(words))
    found = command.read(f"vllm serve {shlex.quote(words)}" if is_model else words, version=version)
    if not found.model:
        raise BadUsage("the command names no model: expected `vllm serve MODEL --flag value ...`")
    return found


def _model(started: command.Command, version: str) -> Model:
    """Its model, as the release reads it."""
    folder = find(started.model, started.environment, started.get("--revision") or "")
    return read_model(folder, started.model, version or versions()[-1])


def _is_file(name: str) -> bool:
    """Whether it may hold a command."""
    try:
        return Path(name).is_file()
    except OSError:
        return False


def _gpu(asked: BudgetOptions, logged: Memory, cpu: bool) -> GpuSpec:
    """The GPU that was named, that the log is of, or of this host."""
    name = asked.gpu
    if cpu or name.lower() == "cpu":
        return GpuSpec(name="cpu")
    if asked.gpu_memory:
        return GpuSpec(size(asked.gpu_memory, "--gpu-memory", least=GIB), name)
    if "total" in logged.sizes:
        return GpuSpec(sum(logged.sizes["total"]) // 2, name)
    return GpuSpec(gpus.memory(name), name) if name else _here()


def _here() -> GpuSpec:
    """The smallest GPU of this host, without what driver and firmware keep for themselves."""
    from diag.exporter.gpu import nvml
    from diag.exporter.gpu.readings import MEMORY

    try:
        nvml.start()
    except nvml.NvmlUnavailable:
        return GpuSpec()
    found = []
    try:
        for device in filter(None, nvml.devices()):
            memory = device.ask(MEMORY[0], *MEMORY[1])
            if memory is not None:
                found.append(GpuSpec(memory.total - memory.reserved, str(device.ask("nvmlDeviceGetName") or "")))
    except (nvml.NvmlUnavailable, nvml.GpuLost):
        return GpuSpec()
    finally:
        nvml.stop()
    return min(found, key=lambda each: each.total or 0, default=GpuSpec())


def _another(asked: BudgetOptions, logged: Memory, found: Ledger) -> Iterator[str]:
    """What shows that the log is not of the server that was asked for."""
    plan = found.setup
    here: Mapping[str, float] = dict(zip(SETTINGS, (plan.utilization, plan.tensor, plan.pipeline), strict=True))
    for name, its in logged.settings.items():
        if its != here[name] and not (plan.cpu and name == "gpu_memory_utilization"):
            yield f"--{name.replace('_', '-')} {its:g}, not {here[name]:g}"
    total, named = sum(logged.sizes.get("total", ())) // 2, _named(asked)
    if total and named and abs(total - named) > ALIKE * named:
        yield f"a GPU of {gibibytes(total)}, not {named / GIB:.2f}"
    taken, budget = _taken(found)
    if taken > (1 + ALIKE) * budget > 0:
        yield f"weights and KV cache of {gibibytes(taken)}, the budget here is {budget / GIB:.2f}"


def _taken(found: Ledger) -> tuple[int, int]:
    """Bytes of weights and of the KV cache that the log says, and the budget for both; 0 where one is not known."""
    rows = {row.name: row for row in found.rows}
    pool, budget = rows[POOL].logged, rows[BUDGET].computed if BUDGET in rows else None
    if not pool or not budget or found.setup.pool is not None or found.setup.blocks is not None:
        return 0, 0
    weights = rows[WEIGHTS].logged or rows[WEIGHTS].computed
    return pool.low + (weights.low if weights else 0), budget.high


def _named(asked: BudgetOptions) -> int:
    """Bytes of the GPU that was asked for; 0 where none was, or one that only its log knows."""
    with suppress(BadUsage):
        return size(asked.gpu_memory, "--gpu-memory") if asked.gpu_memory else gpus.memory(asked.gpu)
    return 0


def _with_log(planned: Setup, logged: Memory) -> Setup:
    free = logged.sizes.get("free")
    return replace(planned, free=free[1]) if free else planned


def _measured(logged: Memory, planned: Setup) -> Measured:
    """The log's sizes by the row they belong to.

    Where graphs count, vLLM takes what it estimated of them, and its peak of activations may hold that.
    """
    sizes: Mapping[str, tuple[int, int]] = logged.sizes
    found = {row: ByteRange(*sizes[name]) for name, row in _ROWS.items() if name in sizes}
    if planned.graphs_inside and not planned.eager:
        found.pop(ACTIVATIONS, None)
    graphs = sizes.get("estimated graphs" if planned.graphs_inside else "graphs", sizes.get("graphs"))
    return found | ({CAPTURED: ByteRange(*graphs)} if graphs else {})


def _notes(asked: BudgetOptions, logged: Memory, planned: Setup, gpu: GpuSpec, version: str) -> list[str]:
    """What was assumed, and where the log is of another server."""
    found = [] if version else [f"vLLM {planned.version} is assumed: name another release with --vllm-version"]
    if gpu.name and not asked.gpu and not planned.cpu:
        found.append(f"the GPU is this host's {printable(gpu.name, 40)}")
    length = logged.numbers.get("length")
    if length and length != planned.length and not planned.fitted:
        found.append(f"the log is of a server with --max-model-len {length:.0f}, not {planned.length}")
    if asked.log and not (logged.sizes or logged.numbers):
        found.append("the log says nothing of memory: it is cut off before the start ended, or not vLLM's")
    return found
