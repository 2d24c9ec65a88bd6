"""Checks of the host on which the launch starts: memory, CPUs, limits, disks, the port and the user."""

import resource
from collections.abc import Iterator
from pathlib import Path

from diag.core.files import expanded
from diag.core.formatting import GIB, MIB, gibibytes, plural, quantity
from diag.lint.host import offloaded
from diag.lint.rule import LintTarget, is_open, number
from diag.preflight import machine
from diag.preflight.check import NotChecked, Outcome, PreflightFacts, failed, need, passed, warned
from diag.vllm.flags.registry import release
from diag.vllm.memory.ledger import WEIGHTS
from diag.vllm.memory.usage import ByteRange

_CHUNK, _QUEUE = 24 * MIB, 240 * MIB
"""A message queue of vLLM and its first chunk (shm_broadcast.py); each executor has a queue, and each worker."""
_FILES = 65_535
"""The number of open files to which vLLM raises its own limit (utils/system_utils.py)."""
_LEAST_MEMLOCK = 64 * MIB
_PER_PROCESS = 2 * GIB
"""Host memory of one process of vLLM with PyTorch and CUDA."""
_PER_COMPILER = 8 * GIB
"""The peak of one nvcc of FlashInfer's largest kernels, which its own build assumes."""
_LEAST_CACHE = 2 * GIB
_SLOW_LOAD = 600.0
_NO_MEMORY = "the kernel does not show the memory of this host"


def _processes(facts: PreflightFacts) -> tuple[int, int, int]:
    """Return the API servers, engines and workers that a launch starts on this host."""
    facts.launch()
    engines = facts.count("--data-parallel-size-local", usual=facts.ranks("data"))
    servers = facts.count("--api-server-count", usual=engines if facts.since("0.15.0") else 1)
    return servers, engines, engines * max(1, facts.ranks("tensor", "pipeline") // facts.nodes)


def _weights(facts: PreflightFacts) -> ByteRange | None:
    """Return the weights on one GPU by the estimate; None if it does not have them."""
    return next((row.size for row in facts.ledger.rows if row.name == WEIGHTS), None) if facts.ledger else None


def port_free(facts: PreflightFacts) -> Iterator[Outcome]:
    command = facts.launch()
    if is_open(command.get("--port") or "") or command.get("--uds") is not None or command.switched("--headless"):
        return
    if not 0 < facts.port < 2**16:
        raise NotChecked(f"no port has the number {facts.port}")
    problem = machine.port_problem(command.get("--host") or "0.0.0.0", facts.port)  # as vLLM does
    if problem:
        yield failed(f"port {facts.port}: {problem.lower()}", f"ss -ltnp 'sport = :{facts.port}', or --port another")
    else:
        yield passed(f"port {facts.port} is free")


def shared_memory(facts: PreflightFacts) -> Iterator[Outcome]:
    _, engines, workers = _processes(facts)
    free = facts.on_host().shared_memory_free()
    if workers <= engines and not facts.on_cpu:
        return  # one process: nothing is shared
    queues = engines + workers
    do = f"docker run --ipc=host, or --shm-size={round(queues * _QUEUE / GIB) + 1}g"
    has = f"/dev/shm has {(free or 0) / MIB:,.0f} MiB free, and {plural(queues, 'queue')} of vLLM"
    if free is None:
        yield failed("this host has no /dev/shm", "Mount a tmpfs on /dev/shm, or docker run --ipc=host")
    elif free < queues * _CHUNK:
        yield failed(f"{has} need {queues * _CHUNK / MIB:,.0f} MiB at once", do)
    elif free < queues * _QUEUE:
        yield warned(f"{has} may use {queues * _QUEUE / MIB:,.0f} MiB", do)
    else:
        yield passed(f"/dev/shm has {gibibytes(free, 1)} free")


def locked_memory(facts: PreflightFacts) -> Iterator[Outcome]:
    transfers = facts.command is not None and facts.command.get("--kv-transfer-config") is not None
    if facts.nodes < 2 and not transfers:
        return
    if not facts.on_host().infiniband():
        return
    limit = machine.lockable_bytes()
    do = "ulimit -l unlimited, or docker run --ulimit memlock=-1"
    is_low = limit < _LEAST_MEMLOCK
    yield failed(f"{limit / 1024:,.0f} KiB may be locked", do) if is_low else passed("memory may be locked")


def open_files(facts: PreflightFacts) -> Iterator[Outcome]:
    limit = machine.hard_limit(resource.RLIMIT_NOFILE)
    if limit < _FILES:
        yield warned(f"at most {limit:,.0f} files may be open", f"ulimit -Hn {_FILES}, or LimitNOFILE= of the unit")
    else:
        yield passed(f"{limit:,.0f} files may be open" if limit < float("inf") else "any number of files may be open")


def host_memory(facts: PreflightFacts) -> Iterator[Outcome]:
    servers, engines, workers = _processes(facts)
    free = need(facts.on_host().memory_free, _NO_MEMORY)
    pinned, flags = offloaded(LintTarget(facts.launch(), facts.version))
    weights = _weights(facts) if facts.on_cpu else None
    parts = {
        "pinned offload": pinned,
        "weights": float(weights.low * workers) if weights else 0.0,
        "processes": float(_PER_PROCESS * (servers + engines + workers) if not facts.on_cpu else 0),
    }
    needed, do = sum(parts.values()), f"Lower {flags}, or raise the memory limit" if flags else "Raise the memory limit"
    named = ", ".join(f"{gibibytes(size, 1)} {name}" for name, size in parts.items() if size)
    if needed - parts["processes"] > free:
        yield failed(f"{gibibytes(free, 1)} of host memory are free, and the launch needs {named}", do)
    elif needed > free:
        yield warned(f"{gibibytes(free, 1)} of host memory are free, and the launch may need {named}", do)
    else:
        yield passed(f"{gibibytes(free, 1)} of host memory are free")


def cpu_memory_free(facts: PreflightFacts) -> Iterator[Outcome]:
    if not facts.on_cpu or facts.ledger is None or not facts.since("0.32.0"):
        return
    host, setup = facts.on_host(), facts.ledger.setup
    free, total = (need(size, _NO_MEMORY) for size in (host.memory_free, host.memory_total))
    wanted = setup.kv_cache_bytes if setup.kv_cache_bytes is not None else setup.utilization * total
    what = "the KV cache" if setup.kv_cache_bytes is not None else f"a share of {setup.utilization:g}"
    if wanted > free:
        share = int(100 * free / total) / 100
        message = f"{gibibytes(free, 1)} of {gibibytes(total, 1)} are free, and {what} takes {gibibytes(wanted, 1)}"
        fixed = f"--kv-cache-memory-bytes {int(free // GIB)}G" if setup.kv_cache_bytes is not None else ""
        yield failed(message, fixed or f"--gpu-memory-utilization {share:g}, or end what holds the rest")
    else:
        yield passed(f"{what} takes {gibibytes(wanted, 1)} of {gibibytes(free, 1)} that are free")


def cpu_cores(facts: PreflightFacts) -> Iterator[Outcome]:
    if facts.on_cpu:  # on a CPU the workers take all cores there are
        return
    cores, (servers, engines, workers) = facts.on_host().cores, _processes(facts)
    needed = servers + engines + workers
    named = f"{plural(servers, 'API server')}, {plural(engines, 'engine')}, {plural(workers, 'worker')}"
    message = f"{cores:g} CPU cores for {named}"
    yield warned(message, f"Give the server {needed} cores or more") if cores < needed else passed(message)


def compiler_jobs(facts: PreflightFacts) -> Iterator[Outcome]:
    capabilities = (labels.get("compute_capability", "") for labels, _ in facts.gpus.get("diag_gpu_info", ()))
    if not any(release(capability) >= (12,) for capability in capabilities):
        return
    host, command = facts.on_host(), facts.launch()
    free, jobs = need(host.memory_free, _NO_MEMORY), number(command.environment.get("MAX_JOBS")) or host.cores
    if jobs * _PER_COMPILER > free:
        message = (
            f"{jobs:g} compiler jobs may take {gibibytes(jobs * _PER_COMPILER, 0)}, and {gibibytes(free, 0)} are free"
        )
        yield warned(message, f"MAX_JOBS={max(1, int(free / _PER_COMPILER))}")
    else:
        yield passed(f"{jobs:g} compiler jobs fit")


def weight_files(facts: PreflightFacts) -> Iterator[Outcome]:
    if not (facts.weight_files or facts.missing_files or facts.no_folder):
        return
    if facts.no_folder:
        yield failed(f"the model's folder {facts.no_folder} does not exist", "Name the folder that holds config.json")
    elif facts.missing_files:
        more = f" and {len(facts.missing_files) - 1} more" if len(facts.missing_files) > 1 else ""
        message = f"{facts.missing_files[0]}{more} of the model {'are' if more else 'is'} missing"
        yield failed(message, "Download the model again (hf download MODEL)")
    else:
        yield passed(f"{plural(len(facts.weight_files), 'file')} of weights")


def disk_room(facts: PreflightFacts) -> Iterator[Outcome]:
    if facts.weight_files or facts.no_folder:
        return
    facts.on_host()
    command = facts.launch()
    home = command.environment.get("HF_HOME") or "~/.cache/huggingface"
    folder = expanded(command.get("--download-dir") or command.environment.get("HF_HUB_CACHE") or f"{home}/hub")
    free = machine.disk_free(folder)
    weights = need(_weights(facts), "the size of the weights is not known, and they are not on this host")
    size = weights.low * facts.ranks("tensor", "pipeline")
    if size > free:
        message = f"the weights take {gibibytes(size, 0)}, and {folder} has {gibibytes(free, 0)} free"
        yield failed(message, "HF_HOME=FOLDER on a larger disk, or --download-dir")
    else:
        yield passed(f"{gibibytes(free, 0)} free for weights of {gibibytes(size, 0)}")


def read_speed(facts: PreflightFacts) -> Iterator[Outcome]:
    if not facts.weight_files:
        return
    facts.on_host()
    files = [Path(name) for name in facts.weight_files]
    total, largest = sum(file.stat().st_size for file in files), max(files, key=lambda file: file.stat().st_size)
    speed = machine.read_speed(largest)
    if speed is None:
        yield passed(f"{gibibytes(total)} of weights load at once")
        return
    seconds = total / speed
    message = f"{quantity(speed, 'bytes')}/s: {gibibytes(total, 0)} of weights take {quantity(seconds, 'seconds')}"
    yield warned(message, "Keep the weights on a local SSD") if seconds > _SLOW_LOAD else passed(message)


def user_name(facts: PreflightFacts) -> Iterator[Outcome]:
    if machine.has_user_name() or "USER" in facts.launch().environment:
        yield passed("the user has a name")
    else:
        is_old = (0,) < release(facts.wheel.torch) < (2, 13)
        message = "this user id has no passwd entry, and USER is not set"
        yield (failed if is_old else warned)(message, "USER=vllm in the launch's environment")


def compile_cache(facts: PreflightFacts) -> Iterator[Outcome]:
    environment = facts.launch().environment
    folder = expanded(environment.get("VLLM_CACHE_ROOT") or "~/.cache/vllm")
    above, free = machine.existing(folder), machine.disk_free(folder)
    if not machine.may_write(above):
        yield failed(f"{folder} cannot be written", "VLLM_CACHE_ROOT=FOLDER that this user may write")
    elif free < _LEAST_CACHE:
        yield warned(f"{folder} has {gibibytes(free, 1)} free", "VLLM_CACHE_ROOT=FOLDER on a larger disk")
    else:
        yield passed(f"{folder} may be written")


def dump_folder(facts: PreflightFacts) -> Iterator[Outcome]:
    if folder := facts.launch().keys("--watchdog-config").get("dump_dir"):
        if machine.may_write(machine.existing(expanded(str(folder)))):
            yield passed(f"{folder} may be written")
        else:
            yield failed(f"{folder} cannot be written", "--watchdog-config with a folder that this user may write")
