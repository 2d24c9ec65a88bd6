"""The process table of this host, as far as it may be read (the only importer of psutil).

Reading a command line can hang if its process hangs in a driver, so the title of a vLLM process is read only while the
process is young.
"""

import re
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import psutil

from diag.exporter.process.kernel import read_file, whole

VMSTAT = "vmstat"
YOUNG = 600.0
"""Age in seconds up to which a process may still get its title: a worker has it once it has found its peers."""
SETTLED = 2.0
"""Age in seconds from which on a child that has its parent's command line is not just about to run something else; one
of them is the error of the age, since Linux rounds its boot time."""

HALTED = {
    psutil.STATUS_STOPPED: "stopped",
    psutil.STATUS_TRACING_STOP: "traced",
    psutil.STATUS_DISK_SLEEP: "uninterruptible",
    psutil.STATUS_ZOMBIE: "zombie",
}
"""States of a process that does not run and that no event can wake, and our names for them."""
_ROLES = {"APIServer": "api_server", "EngineCore": "engine", "Worker": "worker"}
_TITLE = re.compile(r"[^:\s]+::(APIServer|EngineCore|Worker)(?:_[A-Z]*\d+)*")
_INDEX = re.compile(r"_([A-Z]*)(\d{1,6})(?!\d)", re.ASCII)
_SERVER = re.compile(
    r"(?:\S{0,300}python\S{0,300}(?: -[XW] ?\S+| -[^\s\-mcXW]\S*)* (?:-m )?)?"
    r"(?:(?:\S{0,300}/)?vllm serve\b"
    r"|(?:\S{0,300}/)?vllm[./]entrypoints[./]\S{0,300}(?:api_server|cli[./]main(?:\.py)? serve)\b)"
)


@dataclass(frozen=True)
class ProcessEntry:
    """A process as it was when it was read; `created` in unix time, `settled` once it runs what it was made for."""

    process: psutil.Process
    parent: int
    created: float
    argv: tuple[str, ...]
    settled: bool = True

    @cached_property
    def serves(self) -> bool:
        return bool(_SERVER.match(" ".join(self.argv)))

    @cached_property
    def role(self) -> str:
        title = _TITLE.fullmatch(self.argv[0]) if self.argv else None
        return _ROLES[title[1]] if title else ""

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The numbers in the title, such as {"PP": 0, "TP": 1}; in APIServer_1 the axis is ""."""
        return {axis: int(number) for axis, number in _INDEX.findall(self.argv[0])} if self.role else {}

    @property
    def age(self) -> float:
        return time.time() - self.created

    def exists(self) -> bool:
        return self.process.is_running()

    def runs(self) -> bool:
        """Return True unless it is a zombie, which another server may have replaced."""
        try:
            return self.process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def with_current_title(self) -> "ProcessEntry":
        """Read the title again; one with numbers is final."""
        if self.index or self.age > YOUNG:
            return self
        argv = _argv(self.process)
        return replace(self, argv=argv) if argv and argv != self.argv else self

    def program(self) -> str:
        """Return the path of its executable; "" if it must not be read."""
        try:
            return self.process.exe()
        except (psutil.Error, OSError):
            return ""

    def usage(self) -> "ProcessUsage | None":
        """Return what it has used so far and its state; None once it is gone."""
        try:
            with self.process.oneshot():
                times, status = self.process.cpu_times(), self.process.status()
                resident = self.process.memory_info().rss
        except psutil.Error:
            return None
        stat = self._words(f"task/{self.process.pid}/stat", after=")")
        minor, major = whole(stat, 7), whole(stat, 9)
        waited, storage = whole(self._words("schedstat"), 1), self._words("io")
        return ProcessUsage(
            cpu=times.user + times.system,
            ended=times.children_user + times.children_system,
            halted=HALTED.get(status, ""),
            resident=resident,
            faults=None if minor is None or major is None else minor + major,
            waited=None if waited is None else waited / 1e9,
            read=whole(storage, storage.index("read_bytes:") + 1) if "read_bytes:" in storage else None,
        )

    def _words(self, file: str, after: str = "") -> list[str]:
        """Return the words of one of its files in /proc, behind the last `after`; none if it must not be read."""
        text = read_file(f"{psutil.PROCFS_PATH}/{self.process.pid}/{file}")
        return (text.rpartition(after)[2] if after else text).split()

    def environment(self) -> Mapping[str, str]:
        """Return its environment; {} if it must not be read."""
        try:
            return self.process.environ()
        except (psutil.Error, OSError):
            return {}


@dataclass(frozen=True)
class ProcessUsage:
    """Resources that a process has used; None if they must not be read or the kernel does not count them.

    `cpu` and `ended` are CPU seconds of its own and of its children that have ended; `halted` the state in which the
    kernel has halted it, or ""; `resident` bytes in memory; `faults` page faults of its main thread; `waited` seconds
    in which its main thread was ready to run and had no CPU; `read` bytes that were read from storage.
    """

    cpu: float
    ended: float
    halted: str
    resident: int
    faults: int | None
    waited: float | None
    read: int | None


ProcessTable = Mapping[int, ProcessEntry]
"""Processes by PID."""


def read_table(known: ProcessTable, alive: ProcessTable) -> ProcessTable:
    """Return all processes: `alive` ones as given, `known` ones that have settled, and all others read anew."""
    pids = set(psutil.pids())
    kept = {pid: entry for pid, entry in known.items() if pid in pids and pid not in alive and entry.settled}
    table = {**kept, **alive}
    for pid in pids - table.keys():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            with process.oneshot():
                created = process.create_time()
                settled = time.time() - created > SETTLED
                table[pid] = ProcessEntry(process, process.ppid(), created, _argv(process), settled)
    return table


def listeners(port: int | None) -> Collection[int]:
    """Return the PIDs that listen on a port, as far as they are visible."""
    if port is None:
        return ()
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return ()
    listening = (connection for connection in connections if connection.status == psutil.CONN_LISTEN)
    return {socket.pid for socket in listening if socket.pid and socket.laddr and socket.laddr.port == port}


def oom_kills() -> int | None:
    """Return how many processes the kernel has killed for lack of memory since boot; None if it does not count."""
    lines = read_file(f"{psutil.PROCFS_PATH}/{VMSTAT}").splitlines()
    return next((whole(line.split(), 1) for line in lines if line.startswith("oom_kill ")), None)


def ancestry(table: ProcessTable, pid: int) -> list[int]:
    chain: list[int] = []
    while pid in table and pid not in chain:
        chain.append(pid)
        pid = table[pid].parent
    return chain


def proc() -> Path:
    return Path(psutil.PROCFS_PATH)


def read_from(folder: str) -> None:
    psutil.PROCFS_PATH = folder


def halted_state(pid: int) -> str:
    """Return in which way a process is halted, as HALTED names it; "" if it is not, or its state cannot be read."""
    try:
        return HALTED.get(psutil.Process(pid).status(), "")
    except psutil.Error:
        return ""


def _argv(process: psutil.Process) -> tuple[str, ...]:
    """Return the command line; its first word is the title if there is one, and a zombie has no words."""
    try:
        return tuple(process.cmdline())
    except psutil.Error:
        return ()
