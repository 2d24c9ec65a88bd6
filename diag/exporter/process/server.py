"""Finds the vLLM server among the processes of this host."""

import re
import shlex
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

from diag.exporter.process.table import SETTLED, ProcessEntry, ProcessTable, ancestry, read_table
from diag.vllm.command.redaction import VARIABLES
from diag.vllm.command.shell import placeholder
from diag.vllm.command.shown import shown

_SETTINGS = re.compile(
    r"(?:VLLM|NCCL|TORCH_NCCL)_\w+|CUDA_(?:VISIBLE_DEVICES|DEVICE_ORDER|LAUNCH_BLOCKING|MODULE_LOADING)"
    r"|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE|OMP_NUM_THREADS|PYTORCH_(?:CUDA_)?ALLOC_CONF|GLOO_SOCKET_IFNAME"
)
"""Of the harmless variables those that set something of a server, and not of its host."""
_SECRETS = ("VLLM_API_KEY", "HF_TOKEN")
"""What a relaunch must not lose: without its key a server is open to everybody. Only that they are set is kept."""


@dataclass(frozen=True)
class ServerProcess:
    """The topmost process of a vLLM server; `listens` when it was seen to, else its command line names the port."""

    pid: int
    listens: bool
    started: float
    launch: str
    visible: str | None


def find_server(
    table: ProcessTable, port: int | None, outlived: Collection[int], listening: Collection[int]
) -> tuple[ServerProcess | None, str]:
    """The server, or a sentence that says why there is none; `outlived` are processes of an earlier one."""
    tops = [top for pid in listening if (top := _top(table, pid))]
    if tops:
        return _server(table, tops[0], True), ""
    serving = {pid for pid, entry in table.items() if entry.serves and pid not in outlived}
    on_port = [pid for pid in serving if port is None or port_of(table[pid].argv) == str(port)]
    tops = [pid for pid in on_port if serving.isdisjoint(ancestry(table, pid)[1:])]
    if len(tops) == 1:
        return _server(table, tops[0], False), ""
    which = f"serves port {port}" if port else "serves"
    if tops:
        return None, f"more than one vLLM process {which}, and none is seen to listen: run one exporter beside each"
    share = "in a container share the PID namespace (shareProcessNamespace, --pid=host)"
    return None, f"no vLLM process is visible that {which}: {share}"


def _top(table: ProcessTable, listener: int) -> int:
    """The server that a socket is of, or 0: children inherit sockets, and psutil names any one of their owners."""
    chain = ancestry(table, listener)
    replicas = [pid for pid in chain if table[pid].role == "api_server" and "DP" in table[pid].index]
    serving = [pid for pid in reversed(chain) if table[pid].serves]
    embedding = [
        listener for pid, entry in table.items() if entry.role == "engine" and listener in ancestry(table, pid)
    ]
    return next(iter([*replicas, *serving, *embedding]), 0)


def port_of(argv: tuple[str, ...]) -> str:
    """The port that a vLLM server's command line names; "" where a file may name it, or its value is missing."""
    return _last_given(argv, "--port", "" if any(_named(word, "--config") for word in argv) else "8000")


def _last_given(argv: tuple[str, ...], flag: str, default: str = "") -> str:
    """The value of a flag that counts, the default where it is not given."""
    values = ((word, word.partition("=")[2], after) for word, after in pairwise((*argv, "")) if _named(word, flag))
    return next(reversed([value if "=" in word else after for word, value, after in values]), default)


def _named(word: str, flag: str) -> bool:
    return word.partition("=")[0] == flag


def servers_here() -> list[str]:
    """The URLs of the vLLM servers that run on this host, by their command lines, those with a known port."""
    table = read_table({}, {})
    serving = {pid for pid, entry in table.items() if entry.serves}
    tops = (table[pid].argv for pid in sorted(serving) if serving.isdisjoint(ancestry(table, pid)[1:]))
    return list(dict.fromkeys(_url(argv) for argv in tops if port_of(argv)))


def _url(argv: tuple[str, ...]) -> str:
    scheme = "https" if _last_given(argv, "--ssl-certfile") else "http"
    host = _last_given(argv, "--host")
    host = "127.0.0.1" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}:{port_of(argv)}"


def _server(table: ProcessTable, pid: int, listens: bool) -> ServerProcess:
    """Its command is that of the process on top: those below have a title in its place, and over their environment."""
    chain = ancestry(table, pid)
    top = table[[above for above in chain if table[above].serves or above == pid][-1]]
    environment = top.environment()
    settings = [f"{name}={shlex.quote(value)}" for name, value in environment.items() if _is_setting(name)]
    secrets = [f'{name}="{placeholder(name)}"' for name in _SECRETS if environment.get(name)]
    launch = "" if top.role else shown(" ".join([*secrets, *settings, shlex.join(top.argv)]))
    return ServerProcess(pid, listens, table[pid].created, launch, environment.get("CUDA_VISIBLE_DEVICES"))


def _is_setting(name: str) -> bool:
    return name in VARIABLES and bool(_SETTINGS.fullmatch(name))


_CHILD = {"api_server": "engine", "engine": "worker"}
_SPAWNED = "from multiprocessing.spawn import spawn_main"
_AXES = ("PP", "PCP", "TP")
"""How vLLM numbers the workers of an engine, the last axis fastest; the others divide these workers once more."""


@dataclass(frozen=True)
class Owner:
    """What a process does for vLLM; `rank` is "" where that is not known.

    A worker's is its number in its engine, under data parallelism "1.0" for worker 0 of engine 1; an engine's is its
    data-parallel rank, an API server's its number.
    """

    role: str
    rank: str


def axis_sizes(members: ProcessTable, last: Mapping[str, int]) -> Mapping[str, int]:
    """The size of every axis: the largest number seen; kept, for a worker that ends must not change other ranks."""
    sizes = dict(last)
    for entry in members.values():
        for axis, number in entry.index.items():
            sizes[axis] = max(sizes.get(axis, 0), number + 1)
    return sizes


def owners_of(
    members: ProcessTable, server: int, sizes: Mapping[str, int], last: Mapping[int, Owner]
) -> Mapping[int, Owner]:
    """Role and rank of the members that have a role; `last` is what they were at the look before."""
    roles = _roles(members, server, last)
    parents = {pid: members[pid].parent for pid in roles}
    groups = {pid: (role, parents[pid] if parents[pid] in members else pid) for pid, role in roles.items()}
    count = Counter(groups.values())
    owners = {}
    for pid, role in roles.items():
        only = count[groups[pid]] == 1 and last.get(pid) != Owner(role, "")  # one that is left over is not the only one
        parent = members.get(parents[pid])
        rank = _worker_rank(members[pid], parent, only, sizes) if role == "worker" else _rank(members[pid], only)
        owners[pid] = Owner(role, rank)
    return owners


def _roles(members: ProcessTable, server: int, last: Mapping[int, Owner]) -> Mapping[int, str]:
    roles: dict[int, str] = {}
    parents_first = sorted(members.items(), key=lambda member: (member[1].created, member[0]))
    for pid, entry in parents_first:
        if pid == server:
            roles[pid] = "api_server"
        elif entry.parent in members:
            roles[pid] = role_of(entry, members[entry.parent], roles[entry.parent])
        else:
            roles[pid] = last[pid].role if pid in last else entry.role
    return {pid: role for pid, role in roles.items() if role}


def role_of(entry: ProcessEntry, parent: ProcessEntry, parent_role: str) -> str:
    """By the title; a child that has none, or that of the parent it was forked from, is what its parent starts."""
    forked = parent.argv == entry.argv
    if entry.role and not forked:
        return entry.role
    spawned = any(word.startswith(_SPAWNED) for word in entry.argv)
    return _CHILD.get(parent_role, "") if (forked or spawned) and entry.age > SETTLED else ""


def _rank(entry: ProcessEntry, only: bool) -> str:
    return str(entry.index.get("DP", entry.index.get("", "0" if only else "")))


def _worker_rank(entry: ProcessEntry, engine: ProcessEntry | None, only: bool, sizes: Mapping[str, int]) -> str:
    if not only and entry.index.keys().isdisjoint(_AXES):
        return ""
    rank = 0
    for axis in _AXES:
        rank = rank * sizes.get(axis, 1) + entry.index.get(axis, 0)
    of_engine = engine.index if engine else {}
    replica = entry.index.get("DP", of_engine.get("DP"))
    return str(rank) if replica is None else f"{replica}.{rank}"
