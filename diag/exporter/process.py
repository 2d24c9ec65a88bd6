"""vLLM's processes on this host: which they are, their CPU time, who is stopped (the only importer of psutil).

A look reads the processes that are new since the last one, and one small file for each of vLLM's own. To read a command
line can hang where its process hangs in a driver, so a process of vLLM is asked for its title only while it is young.
"""

import re
import shlex
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import psutil

from diag.core.metric_families import Collected, Sample
from diag.vllm.command.secrets import redact

YOUNG = 600.0
"""Seconds in which a process may still get its title: a worker has its own when it has found its peers."""
SETTLED = 2.0
"""Seconds after which a child that has its parent's command line is not just about to run something else; one of them
is the error of its age, for Linux rounds the time of its boot."""
SEARCH_SECONDS = 10.0
SEARCH_SHARE = 0.002
"""Of a core, for searching all processes and sockets: on a host with many, less often than `SEARCH_SECONDS`."""

_STOPPED = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DISK_SLEEP}
_ROLES = {"APIServer": "api_server", "EngineCore": "engine", "Worker": "worker"}
_CHILD = {"api_server": "engine", "engine": "worker"}
_SPAWNED = "from multiprocessing.spawn import spawn_main"
_TITLE = re.compile(r"[^:\s]+::(APIServer|EngineCore|Worker)(?:_[A-Z]*\d+)*")
_INDEX = re.compile(r"_([A-Z]*)(\d+)")
_AXES = ("PP", "PCP", "TP")
"""How vLLM numbers the workers of an engine, the last axis fastest; the others divide these workers once more."""
_SERVER = re.compile(
    r"(?:\S*python\S*(?: -[XW] ?\S+| -[^\s\-mcXW]\S*)* (?:-m )?)?"
    r"(?:(?:\S*/)?vllm serve\b|(?:\S*/)?vllm[./]entrypoints[./]\S*(?:api_server|cli[./]main(?:\.py)? serve)\b)"
)
_SHOWN = re.compile(
    r"(?!.*(?:KEY|TOKEN|SECRET|PASS|AUTH|_SERVICE_|_PORT_\d))"  # the last two come from a Kubernetes service
    r"(?:(?:VLLM|NCCL|TORCH_NCCL)_\w+|CUDA_(?:VISIBLE_DEVICES|DEVICE_ORDER|LAUNCH_BLOCKING|MODULE_LOADING)"
    r"|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE|OMP_NUM_THREADS|PYTORCH_(?:CUDA_)?ALLOC_CONF|GLOO_SOCKET_IFNAME)"
)


@dataclass(frozen=True)
class Owner:
    """What a process does for vLLM; `rank` is "" where that cannot be told.

    A worker's is its number in its engine, under data parallelism "1.0" for worker 0 of engine 1; an engine's is its
    data-parallel rank, an API server's its number.
    """

    role: str
    rank: str


@dataclass(frozen=True)
class Seen:
    """A process as it was when it was read; `born` in unix time, `settled` once it runs what it was made for."""

    process: psutil.Process
    parent: int
    born: float
    argv: tuple[str, ...]
    settled: bool = True

    @cached_property
    def serves(self) -> bool:
        """Whether this is the command line of a vLLM server."""
        return bool(_SERVER.match(" ".join(self.argv)))

    @cached_property
    def role(self) -> str:
        """What the title says, "" without one."""
        title = _TITLE.fullmatch(self.argv[0]) if self.argv else None
        return _ROLES[title[1]] if title else ""

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The numbers in the title, such as {"PP": 0, "TP": 1}; in APIServer_1 the axis is ""."""
        return {axis: int(number) for axis, number in _INDEX.findall(self.argv[0])} if self.role else {}


Table = Mapping[int, Seen]
"""By PID."""


@dataclass(frozen=True)
class ServerProcess:
    """The topmost process of a vLLM server; `listens` when it was seen to, else its command line names the port."""

    pid: int
    listens: bool
    started: float
    launch: str
    visible: str | None


@dataclass(frozen=True)
class View:
    """All that a look gave; replaced as a whole, so that no thread waits for another one's look."""

    table: Table = field(default_factory=dict)
    """All processes of this host."""
    members: Table = field(default_factory=dict)
    """The server and its descendants, and those that have outlived an earlier one."""
    owners: Mapping[int, Owner] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Of every axis; kept, for a worker that ends must not change the ranks of the others."""
    server: ServerProcess | None = None
    problem: str = ""
    search_at: float = 0.0


class Processes:
    """The processes of the vLLM server on that port, or of the only server there is when no port is given.

    The server is the process that listens there, or until one does the one that was told to, with its descendants.
    Workers that Ray has started are not among these.
    """

    name = "process"

    def __init__(self, port: int | None, proc: str = "/proc") -> None:
        self._port = port
        self._view: View | None = None
        if proc != "/proc":
            psutil.PROCFS_PATH = proc

    def collect(self) -> Collected:
        """CPU time of every process, and who is stopped."""
        view = self._view = self._look(self._view or View())
        samples = [each for pid, owner in view.owners.items() for each in _samples(view.members[pid].process, owner)]
        return Collected(samples, "" if samples else view.problem)

    def owners(self) -> Mapping[int, Owner]:
        """The PIDs of this vLLM as this host counts them, at the last look."""
        return self._last().owners

    def launch(self) -> str:
        """The command that started the server, with settings of its environment, without secrets; "" if unknown."""
        server = self._last().server
        return server.launch if server else ""

    def visible(self) -> str | None:
        """CUDA_VISIBLE_DEVICES of the server; None where it is not set or must not be read."""
        server = self._last().server
        return server.visible if server else None

    def started(self) -> float | None:
        """The unix time at which the server was started."""
        server = self._last().server
        return server.started if server else None

    def server_pid(self) -> int | None:
        """The topmost process of the server."""
        server = self._last().server
        return server.pid if server else None

    def _last(self) -> View:
        if self._view is None:
            self._view = self._look(View())
        return self._view

    def _look(self, last: View) -> View:
        begun = time.monotonic()
        alive = {pid: each for pid, each in last.members.items() if each.process.is_running()}
        server = last.server if last.server and last.server.pid in alive and _runs(alive[last.server.pid]) else None
        search = begun >= last.search_at and not (server and server.listens)
        listening = _listening(self._port) if search else ()  # before the titles: these are there when a port opens
        alive = {pid: _renewed(each) for pid, each in alive.items()}
        table = _table(View() if search else last, alive)
        found, problem = server, ""
        if listening or not server:
            found, problem = _find(table, self._port, alive, listening)
        if server and found and found.pid != server.pid:
            alive = {}
        view = _view(table, alive, found or server, last)
        ended = time.monotonic()
        wait = max(SEARCH_SECONDS, (ended - begun) / SEARCH_SHARE)
        return replace(view, problem=problem, search_at=ended + wait if search else last.search_at)


def _view(table: Table, alive: Table, server: ServerProcess | None, last: View) -> View:
    members = {**alive, **({server.pid: table[server.pid]} if server else {})}
    while born := _children(table, members):
        members |= born
    same = server is not None and last.server is not None and server.pid == last.server.pid
    sizes = _sizes(members, last.sizes if same else {})
    owners = _owners(members, server.pid if server else 0, sizes, last.owners)
    return View(table, members, owners, sizes, server)


def _children(table: Table, members: Table) -> Table:
    """Those that are no members yet; a parent is older than its child, or its PID came again."""
    children = ((pid, each) for pid, each in table.items() if each.parent in members and pid not in members)
    return {pid: each for pid, each in children if members[each.parent].born <= each.born}


# One process


def _read(pid: int) -> Seen | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            born = process.create_time()
            return Seen(process, process.ppid(), born, _argv(process), time.time() - born > SETTLED)
    except psutil.Error:
        return None


def _argv(process: psutil.Process) -> tuple[str, ...]:
    """A title stands in the first word; a zombie has none."""
    try:
        return tuple(process.cmdline())
    except psutil.Error:
        return ()


def _runs(each: Seen) -> bool:
    """A zombie does not, and another server may be in its place."""
    try:
        return each.process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _renewed(each: Seen) -> Seen:
    """What it is called now; a title with numbers is its last one."""
    if each.index or time.time() - each.born > YOUNG:
        return each
    argv = _argv(each.process)
    return replace(each, argv=argv) if argv and argv != each.argv else each


def _samples(process: psutil.Process, owner: Owner) -> Iterator[Sample]:
    labels = (str(process.pid), owner.role, owner.rank)
    try:
        with process.oneshot():
            times, status = process.cpu_times(), process.status()
    except psutil.Error:
        return
    yield "diag_vllm_process_cpu_seconds_total", labels, times.user + times.system
    yield "diag_vllm_process_stopped", labels, float(status in _STOPPED)


# All processes


def _table(last: View, alive: Table) -> Table:
    pids = set(psutil.pids())
    kept = {pid: each for pid, each in last.table.items() if pid in pids and pid not in last.members and each.settled}
    table = {**kept, **alive}
    return table | {pid: each for pid in pids - table.keys() if (each := _read(pid))}


def _chain(table: Table, pid: int) -> list[int]:
    """A process, its parent, and so on."""
    chain: list[int] = []
    while pid in table and pid not in chain:
        chain.append(pid)
        pid = table[pid].parent
    return chain


def _listening(port: int | None) -> Collection[int]:
    """Who listens on that port, as far as we may see."""
    if port is None:
        return ()
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return ()
    listeners = (each for each in connections if each.status == psutil.CONN_LISTEN)
    return {each.pid for each in listeners if each.pid and each.laddr and each.laddr.port == port}


def _find(
    table: Table, port: int | None, outlived: Table, listening: Collection[int]
) -> tuple[ServerProcess | None, str]:
    """The server, or what to say when there is none."""
    tops = [top for pid in listening if (top := _top(table, pid))]
    if tops:
        return _server(table, tops[0], True), ""
    serving = {pid for pid, each in table.items() if each.serves and pid not in outlived}
    told = [pid for pid in serving if port is None or _port(table[pid].argv) == str(port)]
    tops = [pid for pid in told if serving.isdisjoint(_chain(table, pid)[1:])]
    if len(tops) == 1:
        return _server(table, tops[0], False), ""
    which = f"serves port {port}" if port else "serves"
    if tops:
        return None, f"more than one vLLM process {which}, and none is seen to listen: run one exporter beside each"
    share = "in a container share the PID namespace (shareProcessNamespace, --pid=host)"
    return None, f"no vLLM process is visible that {which}: {share}"


def _top(table: Table, listener: int) -> int:
    """The server that a socket is of, or 0: children inherit sockets, and psutil names any one of their owners."""
    chain = _chain(table, listener)
    replicas = [pid for pid in chain if table[pid].role == "api_server" and "DP" in table[pid].index]
    serving = [pid for pid in reversed(chain) if table[pid].serves]
    embedding = [listener for pid, each in table.items() if each.role == "engine" and listener in _chain(table, pid)]
    return next(iter([*replicas, *serving, *embedding]), 0)


def _port(argv: tuple[str, ...]) -> str:
    """What a vLLM server was told; "" where a file may say it."""
    port = "" if any(word.partition("=")[0] == "--config" for word in argv) else "8000"
    for word, after in pairwise((*argv, "")):
        name, joined, value = word.partition("=")
        port = (value if joined else after) if name == "--port" else port
    return port


def _server(table: Table, pid: int, listens: bool) -> ServerProcess:
    """Its command is that of the process on top: those below have a title in its place, and over their environment."""
    chain = _chain(table, pid)
    top = table[[each for each in chain if table[each].serves or each == pid][-1]]
    environment = _environment(top.process)
    settings = [f"{name}={shlex.quote(value)}" for name, value in environment.items() if _SHOWN.fullmatch(name)]
    launch = "" if top.role else redact(" ".join([*settings, shlex.join(top.argv)]))
    return ServerProcess(pid, listens, table[pid].born, launch, environment.get("CUDA_VISIBLE_DEVICES"))


def _environment(process: psutil.Process) -> Mapping[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


# Roles and ranks


def _sizes(members: Table, last: Mapping[str, int]) -> Mapping[str, int]:
    sizes = dict(last)
    for each in members.values():
        for axis, number in each.index.items():
            sizes[axis] = max(sizes.get(axis, 0), number + 1)
    return sizes


def _owners(members: Table, server: int, sizes: Mapping[str, int], last: Mapping[int, Owner]) -> Mapping[int, Owner]:
    roles = _roles(members, server, last)
    parents = {pid: members[pid].parent for pid in roles}
    groups = {pid: (role, parents[pid] if parents[pid] in members else pid) for pid, role in roles.items()}
    count = Counter(groups.values())
    owners = {}
    for pid, role in roles.items():
        only = count[groups[pid]] == 1 and last.get(pid) != Owner(role, "")  # one that is left over is not the only one
        above = members.get(parents[pid])
        rank = _worker(members[pid], above, only, sizes) if role == "worker" else _rank(members[pid], only)
        owners[pid] = Owner(role, rank)
    return owners


def _roles(members: Table, server: int, last: Mapping[int, Owner]) -> Mapping[int, str]:
    roles: dict[int, str] = {}
    for pid, each in sorted(members.items(), key=lambda item: (item[1].born, item[0])):  # a parent before its child
        if pid == server:
            roles[pid] = "api_server"
        elif each.parent in members:
            roles[pid] = _role(each, members[each.parent], roles[each.parent])
        else:
            roles[pid] = last[pid].role if pid in last else each.role
    return {pid: role for pid, role in roles.items() if role}


def _role(each: Seen, parent: Seen, above: str) -> str:
    """By the title; a child that has none, or that of the parent it was forked from, is what its parent starts."""
    forked = parent.argv == each.argv
    if each.role and not forked:
        return each.role
    spawned = any(word.startswith(_SPAWNED) for word in each.argv)
    return _CHILD.get(above, "") if (forked or spawned) and time.time() - each.born > SETTLED else ""


def _rank(each: Seen, only: bool) -> str:
    return str(each.index.get("DP", each.index.get("", "0" if only else "")))


def _worker(each: Seen, engine: Seen | None, only: bool, sizes: Mapping[str, int]) -> str:
    if not only and each.index.keys().isdisjoint(_AXES):
        return ""
    rank = 0
    for axis in _AXES:
        rank = rank * sizes.get(axis, 1) + each.index.get(axis, 0)
    above = engine.index if engine else {}
    replica = each.index.get("DP", above.get("DP"))
    return str(rank) if replica is None else f"{replica}.{rank}"
