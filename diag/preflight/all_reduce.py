"""The bandwidth of an all-reduce between ranks on this host, measured by nccl-tests or by torch.distributed."""

import os
import re
import shutil
import socket
import subprocess
from contextlib import closing
from typing import NamedTuple

from diag.core.formatting import MIB, printable
from diag.preflight.check import NotChecked
from diag.vllm import gpus

_BYTES = 64 * MIB
_SECONDS = 60.0
_ROUNDS = 5
_SCRIPT = """
import sys, time, torch, torch.distributed as dist
rank, ranks, size, rounds, backend = (int(word) if word.isdigit() else word for word in sys.argv[1:])
dist.init_process_group(backend, rank=rank, world_size=ranks)
device = f"cuda:{rank}" if backend == "nccl" else "cpu"
data = torch.ones(size // 4, device=device)
wait = torch.cuda.synchronize if backend == "nccl" else (lambda: None)
dist.all_reduce(data); wait(); dist.barrier()
begun = time.monotonic()
for _ in range(rounds):
    dist.all_reduce(data)
wait(); dist.barrier()
if rank == 0:
    print((time.monotonic() - begun) / rounds)
dist.destroy_process_group()
"""
_ROW = re.compile(r"^\s*\d+\s+\d+\s+float.*$", re.MULTILINE)


class MeasuredBandwidth(NamedTuple):
    """The bus bandwidth as nccl-tests defines it, and the nominal one of a link in one direction, None if unknown."""

    bytes_per_second: float
    nominal: float | None
    tool: str


def measure(ranks: int, python: str, *, on_cpu: bool, gpu: str) -> MeasuredBandwidth:
    """Measure for a few seconds; NotChecked if nothing that can measure is installed, or it fails."""
    model = gpus.find(gpu) if gpu and not on_cpu else None
    nominal = (model.nvlink or model.pcie) / 2 if model else None
    perf = shutil.which("all_reduce_perf")
    if perf and not on_cpu:
        size = str(_BYTES)
        found = _ROW.search(_output([perf, "-b", size, "-e", size, "-g", str(ranks)]))
        if not found:
            raise NotChecked("all_reduce_perf printed no result")
        return MeasuredBandwidth(float(found[0].split()[7]) * 1e9, nominal, "nccl-tests")
    if not python:
        raise NotChecked("neither all_reduce_perf nor a Python with PyTorch is named (--vllm-python)")
    backend = "gloo" if on_cpu else "nccl"
    seconds = _by_torch(ranks, python, backend)
    return MeasuredBandwidth(2 * (ranks - 1) / ranks * _BYTES / seconds, nominal, f"torch.distributed, {backend}")


def _by_torch(ranks: int, python: str, backend: str) -> float:
    """Return the seconds of one all-reduce of 64 MiB."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = [python, "-c", _SCRIPT]
    peers = [
        subprocess.Popen(
            [*words, str(rank), *_arguments(ranks, backend)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(1, ranks)
    ]
    try:
        return float(_output([*words, "0", *_arguments(ranks, backend)], environment))
    except ValueError as error:
        raise NotChecked("torch.distributed printed no result") from error
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()


def _arguments(ranks: int, backend: str) -> list[str]:
    return [str(ranks), str(_BYTES), str(_ROUNDS), backend]


def _output(words: list[str], environment: dict[str, str] | None = None) -> str:
    try:
        found = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except subprocess.TimeoutExpired as error:
        raise NotChecked(f"the measurement did not end within {_SECONDS:g} s") from error
    except (OSError, subprocess.CalledProcessError) as error:
        output = getattr(error, "stderr", "") or str(error)
        last = (output.strip().splitlines() or [""])[-1]
        raise NotChecked(f"the measurement failed: {printable(last, 120)}") from error
    return found.stdout
