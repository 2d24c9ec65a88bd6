"""Checks of the network between the nodes of one server, and the measurement of its all-reduce."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing

from diag.core.formatting import MIB, listed, plural, printable, quantity
from diag.lint.rule import is_open
from diag.preflight import machine
from diag.preflight.check import NotChecked, Outcome, PreflightFacts, failed, need, passed, warned
from diag.vllm import gpus

_GLOO = "GLOO_SOCKET_IFNAME"
_VARIABLES = ("NCCL_SOCKET_IFNAME", _GLOO)
_LOCAL = ("lo", "docker", "br-", "veth", "virbr")
"""Beginnings of the names of interfaces that no other node reaches."""
_LEAST_SHARE = 0.5
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


def socket_interfaces(facts: PreflightFacts) -> Iterator[Outcome]:
    if facts.command is None:
        return
    environment = facts.command.environment
    named = {name: text for name in _VARIABLES if (text := environment.get(name)) and not is_open(text)}
    if facts.nodes < 2 and not named:
        return
    states = facts.on_host().interfaces()
    outside = [name for name, state in states.items() if not name.startswith(_LOCAL) and state != "down"]
    bad = False
    for variable, listed_names in named.items():
        names, excluded, exact = machine.prefixes(listed_names)
        exact = exact or variable == _GLOO  # it takes whole names only
        matching = {one for one in states for name in names if one == name or (not exact and one.startswith(name))}
        chosen = [one for one in states if (one in matching) != excluded]
        advice = f"{variable}={outside[0]}" if outside else f"Remove {variable}"
        if not chosen:
            bad = True
            yield failed(f"{variable} names {listed_names[:60]}, and this host has {listed(list(states))}", advice)
        elif facts.nodes > 1 and all(name.startswith(_LOCAL) for name in chosen):
            bad = True
            yield failed(f"{variable} names {listed(chosen)}, which no other node reaches", advice)
        elif all(states[name] == "down" for name in chosen):
            bad = True
            yield failed(f"{variable} names {listed(chosen)}, which is down", advice)
    if not named and len(outside) > 1:
        message = f"{plural(len(outside), 'interface')} may be chosen ({listed(outside)}), and neither variable is set"
        yield warned(message, f"NCCL_SOCKET_IFNAME={outside[0]} GLOO_SOCKET_IFNAME={outside[0]} on every node")
    elif not bad:
        yield passed(f"interface {listed(list(named.values()) or outside)}")


def infiniband_ports(facts: PreflightFacts) -> Iterator[Outcome]:
    if facts.nodes < 2:
        return
    ports = facts.on_host().infiniband()
    if not ports:
        raise NotChecked("this host has no InfiniBand: NCCL uses TCP sockets between the nodes")
    inactive = [port for port in ports if "ACTIVE" not in port.state]
    rates = {port.rate for port in ports if port not in inactive}
    for port in inactive:
        yield failed(
            f"{port.name} is in state {port.state[:40]}", "Check cable, switch port and subnet manager (ibstat)"
        )
    for port in ports:
        if port.errors:
            counts = ", ".join(f"{count:,} {name}" for name, count in port.errors.items())
            yield warned(
                f"{port.name} counted {counts}", "Clean or replace the cable; perfquery -R resets the counters"
            )
    if len(rates) > 1:
        yield warned(f"the ports run at different rates: {listed(sorted(rates))}", "Check cables and switch ports")
    if not inactive and len(rates) <= 1 and not any(port.errors for port in ports):
        yield passed(f"{plural(len(ports), 'port')} at {listed(sorted(rates))}")


def all_reduce(facts: PreflightFacts) -> Iterator[Outcome]:
    ranks = facts.ranks("tensor", "pipeline") // facts.nodes
    if ranks < 2:
        return
    facts.on_host()
    if not facts.bench:
        raise NotChecked("it puts load on this host: --bench measures it")
    speed, tool = measure(ranks, facts.python, on_cpu=facts.on_cpu)
    message = f"{quantity(speed, 'bytes')}/s bus bandwidth of {plural(ranks, 'rank')} ({tool})"
    model = gpus.find(facts.gpu_name) if facts.gpu_name and not facts.on_cpu else None
    if model is None:
        yield passed(f"{message}; the nominal bandwidth is not known")
        return
    nominal = (model.nvlink or model.pcie) / 2  # of a link in one direction
    share = quantity(speed / nominal, "share")
    if speed < _LEAST_SHARE * nominal:
        yield failed(f"{message}: {share} of {quantity(nominal, 'bytes')}/s", "NCCL_DEBUG=INFO shows the transport")
    else:
        yield passed(f"{message}, {share} of nominal")


def measure(ranks: int, python: str, *, on_cpu: bool) -> tuple[float, str]:
    """Measure the bus bandwidth, as nccl-tests defines it, for a few seconds; also return the tool that did.

    NotChecked if nothing that can measure is installed, or it fails.
    """
    perf = shutil.which("all_reduce_perf")
    if perf and not on_cpu:
        size = str(_BYTES)
        row = _ROW.search(_output([perf, "-b", size, "-e", size, "-g", str(ranks)]))
        return float(need(row, "all_reduce_perf printed no result")[0].split()[7]) * 1e9, "nccl-tests"
    if not python:
        raise NotChecked("neither all_reduce_perf nor a Python with PyTorch is named (--vllm-python)")
    backend = "gloo" if on_cpu else "nccl"
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arguments = [str(ranks), str(_BYTES), str(_ROUNDS), backend]
    first, *others = ([python, "-c", _SCRIPT, str(rank), *arguments] for rank in range(ranks))
    nowhere = subprocess.DEVNULL
    peers = [subprocess.Popen(words, env=environment, stdout=nowhere, stderr=nowhere) for words in others]
    try:
        seconds = float(_output(first, environment))  # of one all-reduce
    except ValueError as error:
        raise NotChecked("torch.distributed printed no result") from error
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()
    return 2 * (ranks - 1) / ranks * _BYTES / seconds, f"torch.distributed, {backend}"


def _output(words: list[str], environment: dict[str, str] | None = None) -> str:
    try:
        run = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except subprocess.TimeoutExpired as error:
        raise NotChecked(f"the measurement did not end within {_SECONDS:g} s") from error
    except (OSError, subprocess.CalledProcessError) as error:
        output = getattr(error, "stderr", "") or str(error)
        last = (output.strip().splitlines() or [""])[-1]
        raise NotChecked(f"the measurement failed: {printable(last, 120)}") from error
    return run.stdout
