"""The vLLM server among the processes of this host, the role and rank of each of its processes, and stray engines.

A process belongs to the server on a port if it listens there, or is the only one whose command line names the port; a
page that answers must then come from a process of that start time. Descendants belong to their server.
"""

import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

from diag.core.errors import BadUsage
from diag.exporter.process.kernel import whole
from diag.exporter.process.table import SETTLED, ProcessEntry, ProcessTable, ancestry, proc, read_table
from diag.vllm.command.parse import parse
from diag.vllm.command.redaction import VARIABLES
from diag.vllm.command.shell import placeholder
from diag.vllm.command.shown import shown
from diag.vllm.gpus import visible_gpus

_SETTINGS = re.compile(
    r"(?:VLLM|NCCL|TORCH_NCCL|RCCL)_\w+|CUDA_(?:VISIBLE_DEVICES|DEVICE_ORDER|LAUNCH_BLOCKING|MODULE_LOADING)"
    r"|(?:HIP|ROCR)_VISIBLE_DEVICES|HSA_OVERRIDE_GFX_VERSION|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE|OMP_NUM_THREADS|PYTORCH_(?:CUDA_)?ALLOC_CONF|GLOO_SOCKET_IFNAME"
)
"""Harmless variables that configure a server, not its host."""
_MASTER_PORT = "29501"
"""vLLM's default of --master-port."""
_ADDRESS = re.compile(r"[\w.:-]{1,80}", re.ASCII)
_SECRETS = ("VLLM_API_KEY", "HF_TOKEN")
"""Secrets that a relaunch needs, or the server is open to every client; only the fact that they are set is kept."""
MOST_FILES = 4096
"""Entries of a folder that are looked at: a dump may be in /tmp."""
_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_RANK = re.compile(r"\d{1,6}", re.ASCII)


class NodeOfServer(NamedTuple):
    """One of the nodes of a server that spans several: the address of the first one, and the number of this one."""

    leader: str
    number: str


@dataclass(frozen=True)
class ServerProcess:
    """The topmost process of a vLLM server; unless it `listens`, only its command line names the port.

    `node` is None for a server of one node; `dumps` are beginnings of paths of its flight recorder's dumps.
    """

    pid: int
    listens: bool
    started: float
    launch: str
    visible: str | None
    node: NodeOfServer | None
    dumps: Sequence[str]


def find_server(
    table: ProcessTable, port: int | None, outlived: Collection[int], listening: Collection[int]
) -> tuple[ServerProcess | None, str]:
    """Return the server, or a sentence why there is none; `outlived` are processes of an earlier server."""
    for listener in listening:  # children inherit sockets, and psutil names any one of their owners
        chain = ancestry(table, listener)
        replicas = [pid for pid in chain if table[pid].role == "api_server" and "DP" in table[pid].index]
        # a program that listens may run an engine itself; a gateway may be the parent of whole servers
        engines = (ancestry(table, pid)[1:] for pid, entry in table.items() if entry.role == "engine")
        between = (above[: above.index(listener)] for above in engines if listener in above)
        embeds = any(not any(table[p].serves or table[p].role == "api_server" for p in pids) for pids in between)
        tops = [*replicas, *(pid for pid in reversed(chain) if table[pid].serves), *([listener] if embeds else [])]
        if tops:
            return _server(table, tops[0], True), ""

    serving = {pid for pid, entry in table.items() if entry.serves and pid not in outlived}
    on_port = [pid for pid in serving if port is None or parse_port(table[pid].argv) == str(port)]
    tops = [pid for pid in on_port if serving.isdisjoint(ancestry(table, pid)[1:])]
    if len(tops) == 1:
        return _server(table, tops[0], False), ""
    which = f"serves port {port}" if port else "serves"
    if tops:
        return None, f"more than one vLLM process {which}, and none is seen to listen: run one exporter beside each"
    share = "in a container share the PID namespace (shareProcessNamespace, --pid=host)"
    return None, f"no vLLM process is visible that {which}: {share}"


def parse_port(argv: tuple[str, ...]) -> str:
    """Return the port in a vLLM server's command line; "" if a config file may set it or the value is missing."""
    return _last_given(argv, "--port", "" if any(_named(word, "--config") for word in argv) else "8000")


def _last_given(argv: tuple[str, ...], flag: str, default: str = "") -> str:
    """Return the last value of a flag, the default if it is not given."""
    values = ((word, word.partition("=")[2], after) for word, after in pairwise((*argv, "")) if _named(word, flag))
    return next(reversed([value if "=" in word else after for word, value, after in values]), default)


def _named(word: str, flag: str) -> bool:
    return word.partition("=")[0] == flag


def find_local_servers() -> list[str]:
    """Return the URLs of the vLLM servers on this host whose command lines show the port."""
    table = read_table({}, {})
    serving = {pid for pid, entry in table.items() if entry.serves}
    urls = []
    for pid in sorted(serving):
        argv = table[pid].argv
        if serving.isdisjoint(ancestry(table, pid)[1:]) and (port := parse_port(argv)):
            scheme = "https" if _last_given(argv, "--ssl-certfile") else "http"
            host = _last_given(argv, "--host")
            host = "127.0.0.1" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
            urls.append(f"{scheme}://{host}:{port}")
    return list(dict.fromkeys(urls))


def _server(table: ProcessTable, pid: int, listens: bool) -> ServerProcess:
    """Return the server with the command of its topmost process: a title overwrites that of the processes below."""
    chain = ancestry(table, pid)
    top = table[[above for above in chain if table[above].serves or above == pid][-1]]
    environment = top.environment()
    settings = [
        f"{name}={shlex.quote(value)}"
        for name, value in environment.items()
        if name in VARIABLES and _SETTINGS.fullmatch(name)
    ]
    secrets = [f'{name}="{placeholder(name)}"' for name in _SECRETS if environment.get(name)]
    launch = "" if top.role else shown(" ".join([*secrets, *settings, shlex.join(top.argv)]))
    visible, dumps = visible_gpus(environment), dump_prefixes(environment)
    return ServerProcess(pid, listens, table[pid].created, launch, visible, parse_node(launch), dumps)


def parse_node(launch: str) -> NodeOfServer | None:
    """Return the node that a launch starts, by --nnodes with --node-rank and --master-addr, which all nodes share."""
    try:
        command = parse(launch)
    except BadUsage:
        return None
    nodes, number, address = (command.get(flag) for flag in ("--nnodes", "--node-rank", "--master-addr"))
    port = command.get("--master-port") or _MASTER_PORT
    if not (address and _ADDRESS.fullmatch(f"{address}:{port}")) or whole([nodes or ""]) in (None, 0, 1):
        return None
    place = whole([number or "0"])
    return None if place is None else NodeOfServer(f"{address}:{port}", str(place))


# -- roles and ranks ---------------------------------------------------------------------------------------------------


_CHILD = {"api_server": "engine", "engine": "worker"}
_SPAWNED = "from multiprocessing.spawn import spawn_main"
_AXES = ("PP", "PCP", "TP")
"""Axes by which vLLM numbers the workers of an engine, the last one fastest; other axes divide these workers again."""


@dataclass(frozen=True)
class Owner:
    """Role and rank of a process of vLLM; `rank` is "" if unknown.

    A worker's rank is its number in its engine, under data parallelism "1.0" for worker 0 of engine 1; an engine's is
    its data-parallel rank, an API server's its number.
    """

    role: str
    rank: str


def axis_sizes(members: ProcessTable, last: Mapping[str, int]) -> Mapping[str, int]:
    """Return the size of every axis: the largest number seen, also before: a worker that ends changes no other rank."""
    sizes = dict(last)
    for entry in members.values():
        for axis, number in entry.index.items():
            sizes[axis] = max(sizes.get(axis, 0), number + 1)
    return sizes


def assign_owners(
    members: ProcessTable, server: int, sizes: Mapping[str, int], last: Mapping[int, Owner]
) -> Mapping[int, Owner]:
    """Return role and rank of the members that have a role; `last` has those of the look before."""
    roles: dict[int, str] = {}
    parents_first = sorted(members.items(), key=lambda member: (member[1].created, member[0]))
    for pid, entry in parents_first:
        if pid == server:
            roles[pid] = "api_server"
        elif entry.parent in members:
            roles[pid] = infer_role(entry, members[entry.parent], roles[entry.parent])
        else:
            roles[pid] = last[pid].role if pid in last else entry.role
    roles = {pid: role for pid, role in roles.items() if role}
    parents = {pid: members[pid].parent for pid in roles}
    groups = {pid: (role, parents[pid] if parents[pid] in members else pid) for pid, role in roles.items()}
    count = Counter(groups.values())
    owners = {}
    for pid, role in roles.items():
        only = count[groups[pid]] == 1 and last.get(pid) != Owner(role, "")  # one that is left over is not the only one
        parent = members.get(parents[pid])
        index = members[pid].index
        if role != "worker":
            rank = str(index.get("DP", index.get("", "0" if only else "")))
        elif not only and index.keys().isdisjoint(_AXES):
            rank = ""
        else:
            number = 0
            for axis in _AXES:
                number = number * sizes.get(axis, 1) + index.get(axis, 0)
            replica = index.get("DP", parent.index.get("DP") if parent else None)
            rank = str(number) if replica is None else f"{replica}.{number}"
        owners[pid] = Owner(role, rank)
    return owners


def infer_role(entry: ProcessEntry, parent: ProcessEntry, parent_role: str) -> str:
    """Return the role in the title; a child without one, or with its parent's, has the role that its parent starts."""
    forked = parent.argv == entry.argv
    if entry.role and not forked:
        return entry.role
    spawned = any(word.startswith(_SPAWNED) for word in entry.argv)
    return _CHILD.get(parent_role, "") if (forked or spawned) and entry.age > SETTLED else ""


# -- dumps of PyTorch's flight recorder: the last collectives of a rank, which its watchdog writes if one times out ----


def dump_prefixes(environment: Mapping[str, str]) -> Sequence[str]:
    """Return the beginnings of the dumps' paths, to which PyTorch adds the rank; a variable replaces the defaults."""
    named = next(filter(None, map(environment.get, _VARIABLES)), "")
    cache = environment.get("XDG_CACHE_HOME") or f"{environment.get('HOME', '/tmp')}/.cache"  # as PyTorch falls back
    prefixes = [named] if named else [f"{cache}/torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_"]
    return [prefix for prefix in prefixes if prefix.startswith("/") and "\0" not in prefix]


def newest_dump(prefixes: Sequence[str], since: float) -> float:
    """Return the unix time at which the newest dump after `since` was written; 0 if there is none.

    A dump is a pickle, which runs code of its author when it is read: only names and times of files are read.
    """
    times: list[float] = []
    for prefix in prefixes:
        folder, _, name = prefix.rpartition("/")
        try:
            with os.scandir(folder or "/") as entries:
                times += [
                    entry.stat(follow_symlinks=False).st_mtime
                    for entry in islice(entries, MOST_FILES)
                    if entry.name.startswith(name)
                    and _RANK.fullmatch(entry.name[len(name) :])
                    and entry.is_file(follow_symlinks=False)
                ]
        except OSError:
            continue
    return max((at for at in times if at >= since), default=0.0)


# -- engines whose API server has ended --------------------------------------------------------------------------------
#
# The engines of other servers on this host look the same once their API server is gone. An engine belongs to a server
# if it was seen as a descendant of it, if it holds the socket of the server's port, if it writes to the server's log,
# or if its session was opened for a command that names the port. Without such a proof it belongs to no server.

_PORT = re.compile(r"--port[= ](\d{1,5})\b", re.ASCII)
_SERVES = re.compile(r"\bvllm serve\b|\bvllm[./]entrypoints[./]")


def stray_engines(table: ProcessTable) -> ProcessTable:
    """Return the engines on this host whose API server has ended, as far as that can be told from the processes.

    vLLM starts an engine with its own interpreter. The kernel gives an orphan to init or to another reaper, which runs
    another program, or runs for another user. A script that runs an engine without a server is a parent that lives.
    """
    engines = ((pid, entry, table.get(entry.parent)) for pid, entry in table.items() if entry.role == "engine")
    return {
        pid: entry
        for pid, entry, parent in engines
        if parent and not (parent.serves or parent.role) and entry.program() not in ("", parent.program())
    }


def proven(
    strays: ProcessTable, table: ProcessTable, port: int | None, listening: Collection[int], log: str
) -> set[int]:
    """Return the PIDs of the stray engines that are proven to be of the server on a port, with this log or ""."""
    holding = {pid for listener in listening for pid in ancestry(table, listener)}

    def output(pid: int) -> tuple[int, int] | None:
        """Return the file to which a process writes its standard output."""
        return _file_of(f"{proc()}/{pid}/fd/1")

    others = {output(pid) for pid, entry in table.items() if entry.serves}  # servers that live
    file = _file_of(log)

    def is_opened_for_port(entry: ProcessEntry) -> bool:
        """Return True if the leader of a process's session serves this port alone by its command line."""
        try:
            leader = table.get(os.getsid(entry.process.pid))
        except OSError:
            return False
        command = " ".join(leader.argv) if leader else ""
        return bool(_SERVES.search(command)) and set(_PORT.findall(command)) == {str(port)}

    return {
        pid
        for pid, entry in strays.items()
        if pid in holding
        or (file is not None and file not in others and output(pid) == file)
        or (port is not None and is_opened_for_port(entry))
    }


def _file_of(log: str) -> tuple[int, int] | None:
    """Return device and inode of a regular file; None for anything else."""
    try:
        status = Path(log).stat() if log not in ("", "-") else None
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if status and stat.S_ISREG(status.st_mode) else None


def orphaned_engines(members: ProcessTable, owners: Mapping[int, Owner]) -> Mapping[int, bool]:
    """Return the engines of this server that run, and of each whether the API server that started it has ended."""
    serving = {pid for pid, owner in owners.items() if owner.role == "api_server" and members[pid].runs()}
    engines = (pid for pid, entry in members.items() if entry.role == "engine" and pid in owners and entry.runs())
    return {pid: serving.isdisjoint(ancestry(members, pid)) for pid in engines}
