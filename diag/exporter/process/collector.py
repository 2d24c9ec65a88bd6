"""Processes of vLLM on this host: their roles, their CPU time, and which of them are halted.

A look reads the processes that are new since the last one, and one small file for each process of vLLM.
"""

import socket
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from diag.core.metric_families import Collected, Sample
from diag.exporter.process.kernel import ControlGroup, control_group, last_vllm_kill
from diag.exporter.process.server import (
    Owner,
    ServerProcess,
    assign_owners,
    axis_sizes,
    find_server,
    newest_dump,
    orphaned_engines,
    proven,
    stray_engines,
)
from diag.exporter.process.table import (
    HALTED,
    ProcessEntry,
    ProcessTable,
    ancestry,
    listeners,
    oom_kills,
    proc,
    read_from,
    read_table,
)
from diag.log.corroboration import RESOLUTION, Measurement

STOPPED = "diag_vllm_process_stopped"
ANOTHER = (
    "the vLLM process {} names this port in its command line, and was not started when the server of the page was: it "
    "is another server's; in a container share the PID namespace (shareProcessNamespace, --pid=host)"
)
SEARCH_SECONDS = 10.0
SEARCH_SHARE = 0.002
"""Share of a core for searching all processes and sockets: with many, the search is rarer than `SEARCH_SECONDS`."""


@dataclass(frozen=True)
class ProcessView:
    """Result of a look; replaced as a whole, so that no thread waits for another thread's look."""

    table: ProcessTable = field(default_factory=dict)
    """All processes of this host."""
    members: ProcessTable = field(default_factory=dict)
    """The server and its descendants, and processes that have outlived an earlier server."""
    owners: Mapping[int, Owner] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    strays: ProcessTable = field(default_factory=dict)
    """Engines without an API server that are not proven to be of this server, while it has no visible API server."""
    server: ServerProcess | None = None
    roles: frozenset[str] = frozenset()
    """Roles in which processes have run since this server, or the last one, was found."""
    problem: str = ""
    search_at: float = 0.0


class ProcessCollector:
    """Collects the processes of the vLLM server on a port, or of the only server if no port is given.

    The server is the process that listens on the port, with its descendants; until one listens, the process whose
    command line names the port. Workers that Ray has started are not among its descendants. `log` is the path of the
    server's log, "" if unknown.
    """

    name = "process"

    def __init__(self, port: int | None, proc: str = "/proc", log: str = "") -> None:
        self._port = port
        self._log = log
        self._page: Measurement | None = None
        """The latest scrape of the server's page."""
        self._page_started: tuple[float, float] | None = None
        """Unix times at which the process that answers was started, by its page, and at which that page came."""
        self._view: ProcessView | None = None
        self._server: ServerProcess | None = None
        self._group_of = 0
        self._group: ControlGroup | None = None
        self._oom_kills: int | None = None
        self._last_oom_kill = last_vllm_kill() if proc == "/proc" else 0.0
        if proc != "/proc":
            read_from(proc)

    def page(self, seen: Measurement) -> None:
        """Take what a scrape of the page has measured: its process was there, started when the page says."""
        self._page = seen
        if seen.page:
            started = max(seen.started.values(), default=None)
            self._page_started = None if started is None else (started, seen.at)

    def collect(self) -> Collected:
        """Collect CPU time and state of every process, how many run in each role, and when the server was started."""
        view = self._view = self._look(self._view or ProcessView())
        helped: dict[int, float] = defaultdict(float)  # by processes without a role, such as a compiler
        for pid in view.members.keys() - view.owners.keys():
            helper, owner = view.members[pid], next((p for p in ancestry(view.members, pid) if p in view.owners), None)
            if owner and (usage := helper.usage()):
                helped[owner] += usage.cpu + usage.ended
        samples = [
            sample
            for pid, owner in view.owners.items()
            for sample in _samples(pid, view.members[pid], owner, helped[pid])
        ]
        problem = "" if samples else view.problem
        # zombies do not run, and an engine counts once it has its title: without one, any process that an API server
        # starts may be taken for it
        stopped = [(int(labels[0]), labels[1], value) for name, labels, value in samples if name == STOPPED]
        engines, host = orphaned_engines(view.members, view.owners), socket.gethostname()
        for pid, orphaned in engines.items():
            labels = (str(pid), "engine", view.owners[pid].rank, host)
            samples.append(("diag_vllm_process_orphaned", labels, float(orphaned)))
        there = (
            (role, view.members[pid])
            for pid, role, halted in stopped
            if not engines.get(pid) and (not halted or view.members[pid].runs())
        )
        running = Counter(role for role, entry in there if role != "engine" or entry.role == role)
        ended = {"engine"} if "api_server" in view.roles and not running["api_server"] else set()
        ended |= {"api_server", "engine"} if any(engines.values()) else set()  # an orphan serves nobody
        self._view = replace(view, roles=view.roles | running.keys() | ended)
        if view.server or not (self._page and self._page.page):  # else the server that answers is not visible
            samples += [("diag_vllm_processes", (role,), float(running[role])) for role in sorted(self._view.roles)]
        samples += [("diag_vllm_stray_engine", (str(pid), host), 1.0) for pid in view.strays]
        self._server = view.server or self._server  # a watchdog writes its dump and then ends the server
        if self._server:
            dumped = newest_dump(self._server.dumps, self._server.started)
            samples.append(("diag_nccl_dump_timestamp_seconds", (), dumped))
        if view.server:
            samples.append(("diag_vllm_process_start_time_seconds", (), view.server.started))
            if view.server.node:
                samples.append(("diag_vllm_node_info", (*view.server.node, host), 1.0))
            if self._group_of != view.server.pid:  # the group stays after the server's end
                self._group_of, self._group = view.server.pid, control_group(view.server.pid, proc())
        samples += self._group.samples() if self._group else ()
        if (kills := oom_kills()) is not None:
            if self._oom_kills is not None and kills > self._oom_kills:
                self._last_oom_kill = time.time()
            self._oom_kills = kills
            samples.append(("diag_host_oom_kills_total", (), kills))
            samples.append(("diag_host_last_oom_kill_timestamp_seconds", (), self._last_oom_kill))
        return Collected(samples, problem)

    def owners(self) -> Mapping[int, Owner]:
        """Return the PIDs of this vLLM in the host's PID namespace, at the last look."""
        return self._last().owners

    def launch(self) -> str:
        """Return the server's launch command, with settings of its environment, without secrets; "" if unknown."""
        server = self._last().server
        return server.launch if server else ""

    def visible(self) -> str | None:
        """Return the GPUs that the server's environment leaves visible; None if it is not set or must not be read."""
        server = self._last().server
        return server.visible if server else None

    def started(self) -> float | None:
        """Return the unix time at which the server was started."""
        server = self._last().server
        return server.started if server else None

    def identities(self) -> frozenset[tuple[int, float]]:
        """Return PID and unix start time of each process of this vLLM that runs, at the last look.

        An engine counts once it has its title: without one, any process that an API server starts may be taken for it.
        """
        return frozenset((entry.process.pid, entry.created) for entry, _ in self._running())

    def lacks_engine(self) -> bool:
        """Return True if the API server runs and no engine process of it does, at the last look."""
        roles = {role for _, role in self._running()}
        return "api_server" in roles and "engine" not in roles

    def serves_nobody(self) -> bool:
        """Return True if engines of the server run, and the API server of each has ended, at the last look."""
        orphans = orphaned_engines(self._last().members, self._last().owners)
        return bool(orphans) and all(orphans.values()) and "api_server" not in {role for _, role in self._running()}

    def _running(self) -> Iterator[tuple[ProcessEntry, str]]:
        view = self._last()
        for pid, owner in view.owners.items():
            entry = view.members[pid]
            if (owner.role != "engine" or entry.role) and entry.runs():
                yield entry, owner.role

    def strays(self) -> Collection[int]:
        """Return the PIDs of engines without an API server that are not proven to be of this server."""
        return self._last().strays.keys()

    def server_pid(self) -> int | None:
        """Return the PID of the server's topmost process."""
        server = self._last().server
        return server.pid if server else None

    def _last(self) -> ProcessView:
        if self._view is None:
            self._view = self._look(ProcessView())
        return self._view

    def _look(self, last: ProcessView) -> ProcessView:
        begun = time.monotonic()
        if last.server and not last.server.listens and self._is_of_another_page(last.table, last.server.pid):
            last = ProcessView(search_at=last.search_at)
        alive = {pid: entry for pid, entry in last.members.items() if entry.exists()}
        server = last.server if last.server and last.server.pid in alive and alive[last.server.pid].runs() else None
        search = begun >= last.search_at and not (server and server.listens)
        listening = listeners(self._port) if search else ()  # before the titles: these are there when a port opens
        alive = {pid: entry.with_current_title() for pid, entry in alive.items()}
        others = {pid: entry for pid, entry in last.table.items() if pid not in last.members}
        table = read_table({} if search else others, alive)
        present, problem = server, ""
        if listening or not server:
            present, problem = find_server(table, self._port, alive, listening)
        if present and not present.listens and self._is_of_another_page(table, present.pid):
            problem, present = ANOTHER.format(present.pid), None
        if server and present and present.pid != server.pid:
            alive = {}
        server = present or server

        strays = {} if server else dict(stray_engines(table))
        if strays and not last.owners:  # the server may have ended before it was seen
            pids = proven(strays, table, self._port, listening, self._log)
            alive = {**{pid: strays[pid] for pid in pids}, **alive}
        members = {**alive, **({server.pid: table[server.pid]} if server else {})}
        while added := children(table, members):
            members |= added
        same = server is not None and last.server is not None and server.pid == last.server.pid
        sizes = axis_sizes(members, last.sizes if same else {})
        owners = assign_owners(members, server.pid if server else 0, sizes, last.owners)
        roles = last.roles if same or server is None else frozenset()
        ended = time.monotonic()
        search_at = ended + max(SEARCH_SECONDS, (ended - begun) / SEARCH_SHARE) if search else last.search_at
        strays = {pid: entry for pid, entry in strays.items() if pid not in members}
        return ProcessView(table, members, owners, sizes, strays, server, roles, problem, search_at)

    def _is_of_another_page(self, table: ProcessTable, server: int) -> bool:
        """Return True if the page comes from a process that was started at another time, while this one ran already."""
        if self._page_started is None:
            return False
        started, at = self._page_started
        ours = [entry for pid, entry in table.items() if server in ancestry(table, pid)]
        return table[server].created < at - RESOLUTION and all(
            abs(entry.created - started) > 2 * RESOLUTION for entry in ours
        )


def children(table: ProcessTable, members: ProcessTable) -> ProcessTable:
    """Return children that are no members yet; a parent is older than its child, or its PID was reused."""
    others = ((pid, entry) for pid, entry in table.items() if entry.parent in members and pid not in members)
    return {pid: entry for pid, entry in others if members[entry.parent].created <= entry.created}


def _samples(pid: int, entry: ProcessEntry, owner: Owner, helped: float) -> Iterator[Sample]:
    labels = (str(pid), owner.role, owner.rank)
    usage = entry.usage()
    if usage:
        yield "diag_vllm_process_cpu_seconds_total", labels, usage.cpu
        yield "diag_vllm_process_children_cpu_seconds_total", labels, usage.ended + helped
        if usage.faults is not None:
            yield "diag_vllm_process_page_faults_total", labels, usage.faults
        if usage.waited is not None:
            yield "diag_vllm_process_cpu_wait_seconds_total", labels, usage.waited
        if usage.read is not None:
            yield "diag_vllm_process_read_bytes_total", labels, usage.read
        if usage.halted != "zombie":
            yield "diag_vllm_process_resident_memory_bytes", labels, usage.resident
        yield STOPPED, labels, float(bool(usage.halted))
        for state in HALTED.values():
            yield "diag_vllm_process_state", (*labels, socket.gethostname(), state), float(state == usage.halted)
