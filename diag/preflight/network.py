"""Checks of the network between the nodes of one server, and the measurement of its all-reduce."""

from collections.abc import Iterator

from diag.core.formatting import listed, plural, quantity
from diag.lint.rule import is_open
from diag.preflight import machine
from diag.preflight.all_reduce import measure
from diag.preflight.check import NotChecked, Outcome, PreflightFacts, check, failed, passed, warned

_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_GLOO = "GLOO_SOCKET_IFNAME"
_VARIABLES = ("NCCL_SOCKET_IFNAME", _GLOO)
_LOCAL = ("lo", "docker", "br-", "veth", "virbr")
"""Beginnings of the names of interfaces that no other node reaches."""
_LEAST_SHARE = 0.5


@check(
    "network",
    "The network interfaces of NCCL and Gloo",
    reads="NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME of the launch, and /sys/class/net",
    why="over the wrong interface the ranks wait for each other until a timeout, or talk through the loopback of each"
    " node",
    source=_NCCL,
)
def socket_interfaces(facts: PreflightFacts) -> Iterator[Outcome]:
    if facts.running or facts.command is None:
        return
    environment = facts.command.environment
    named = {name: text for name in _VARIABLES if (text := environment.get(name)) and not is_open(text)}
    if facts.nodes < 2 and not named:
        return
    found = facts.on_host().interfaces()
    outside = [name for name, state in found.items() if not name.startswith(_LOCAL) and state != "down"]
    bad = False
    for variable, listed_names in named.items():
        names, excluded, exact = machine.prefixes(listed_names)
        exact = exact or variable == _GLOO  # it takes whole names only
        chosen = [
            each for each in found if any(each == name or (not exact and each.startswith(name)) for name in names)
        ]
        chosen = [each for each in found if each not in chosen] if excluded else chosen
        advice = f"{variable}={outside[0]}" if outside else f"Remove {variable}"
        if not chosen:
            bad = True
            yield failed(f"{variable} names {listed_names[:60]}, and this host has {listed(list(found))}", advice)
        elif facts.nodes > 1 and all(each.startswith(_LOCAL) for each in chosen):
            bad = True
            yield failed(f"{variable} names {listed(chosen)}, which no other node reaches", advice)
        elif all(found[each] == "down" for each in chosen):
            bad = True
            yield failed(f"{variable} names {listed(chosen)}, which is down", advice)
    if not named and len(outside) > 1:
        message = f"{plural(len(outside), 'interface')} may be chosen ({listed(outside)}), and neither variable is set"
        yield warned(message, f"NCCL_SOCKET_IFNAME={outside[0]} GLOO_SOCKET_IFNAME={outside[0]} on every node")
    elif not bad:
        yield passed(f"interface {listed(list(named.values()) or outside)}")


@check(
    "network",
    "InfiniBand ports",
    reads="state, rate and error counters in /sys/class/infiniband",
    why="NCCL leaves out a port that is not active and runs at the rate of the others; errors are sent again",
    source="https://docs.kernel.org/infiniband/sysfs.html",
)
def infiniband_ports(facts: PreflightFacts) -> Iterator[Outcome]:
    if facts.running or facts.nodes < 2:
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


@check(
    "network",
    "The measured all-reduce",
    reads="with --bench: nccl-tests' all_reduce_perf if it is installed, else torch.distributed of --vllm-python",
    why="every layer ends in an all-reduce: at half of the nominal bandwidth the server is as slow as its network",
    source="https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md",
)
def all_reduce(facts: PreflightFacts) -> Iterator[Outcome]:
    ranks = facts.ranks("tensor", "pipeline") // facts.nodes
    if facts.running or ranks < 2:
        return
    facts.on_host()
    if not facts.bench:
        raise NotChecked("it puts load on this host: --bench measures it")
    found = measure(ranks, facts.python, on_cpu=facts.on_cpu, gpu=facts.gpu_name)
    rate = f"{quantity(found.bytes_per_second, 'bytes')}/s"
    message = f"{rate} bus bandwidth of {plural(ranks, 'rank')} ({found.tool})"
    if found.nominal is None:
        yield passed(f"{message}; the nominal bandwidth is not known")
    elif found.bytes_per_second < _LEAST_SHARE * found.nominal:
        share = quantity(found.bytes_per_second / found.nominal, "share")
        yield failed(
            f"{message}: {share} of {quantity(found.nominal, 'bytes')}/s", "NCCL_DEBUG=INFO shows the transport"
        )
    else:
        yield passed(f"{message}, {quantity(found.bytes_per_second / found.nominal, 'share')} of nominal")


CHECKS = (socket_interfaces, infiniband_ports, all_reduce)
