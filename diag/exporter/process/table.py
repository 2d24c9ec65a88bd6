"""The process table of this host, as far as it may be read (the only importer of psutil).

To read a command line can hang where its process hangs in a driver, so a process of vLLM is asked for its title only
while it is young.
"""

import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import psutil

from diag.exporter.process.kernel import read

VMSTAT = "vmstat"
YOUNG = 600.0
"""Seconds in which a process may still get its title: a worker has its own when it has found its peers."""
SETTLED = 2.0
"""Seconds after which a child that has its parent's command line is not just about to run something else; one of them
is the error of its age, for Linux rounds the time of its boot."""

HALTED = {
    psutil.STATUS_STOPPED: "stopped",
    psutil.STATUS_TRACING_STOP: "traced",
    psutil.STATUS_DISK_SLEEP: "uninterruptible",
    psutil.STATUS_ZOMBIE: "zombie",
}
"""The states of a process that does not run and waits for nothing that it could be woken by, and our names for them."""
_ROLES = {"APIServer": "api_server", "EngineCore": "engine", "Worker": "worker"}
_TITLE = re.compile(r"[^:\s]+::(APIServer|EngineCore|Worker)(?:_[A-Z]*\d+)*")
_INDEX = re.compile(r"_([A-Z]*)(\d+)")
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
        """Whether this is the command line of a vLLM server."""
        return bool(_SERVER.match(" ".join(self.argv)))

    @cached_property
    def role(self) -> str:
        """The role in the process title, "" without one."""
        title = _TITLE.fullmatch(self.argv[0]) if self.argv else None
        return _ROLES[title[1]] if title else ""

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The numbers in the title, such as {"PP": 0, "TP": 1}; in APIServer_1 the axis is ""."""
        return {axis: int(number) for axis, number in _INDEX.findall(self.argv[0])} if self.role else {}

    @property
    def age(self) -> float:
        """Seconds since it was created."""
        return time.time() - self.created

    def exists(self) -> bool:
        """Whether there is still this process under its PID."""
        return self.process.is_running()

    def runs(self) -> bool:
        """Whether it is no zombie: another server may be in the place of one."""
        try:
            return self.process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def with_current_title(self) -> "ProcessEntry":
        """What it is called now; a title with numbers is its last one."""
        if self.index or self.age > YOUNG:
            return self
        argv = _argv(self.process)
        return replace(self, argv=argv) if argv and argv != self.argv else self

    def usage(self) -> "ProcessUsage | None":
        """What it has used so far and its state; None once it is gone."""
        try:
            with self.process.oneshot():
                times, status = self.process.cpu_times(), self.process.status()
                resident = self.process.memory_info().rss
        except psutil.Error:
            return None
        return ProcessUsage(
            cpu=times.user + times.system,
            ended=times.children_user + times.children_system,
            halted=HALTED.get(status, ""),
            resident=resident,
            faults=self._faults(),
            waited=self._waited(),
            read=self._read(),
        )

    def _faults(self) -> int | None:
        """Page faults of its main thread; None where they cannot be read."""
        words = self._words(f"task/{self.process.pid}/stat", after=")")
        return int(words[7]) + int(words[9]) if len(words) > 9 else None

    def _read(self) -> int | None:
        """Bytes that were read from storage for it; None where that must not be known."""
        words = self._words("io")
        return int(words[words.index("read_bytes:") + 1]) if "read_bytes:" in words else None

    def _waited(self) -> float | None:
        """Seconds for which its main thread was ready to run and got no CPU; None where the kernel does not count."""
        words = self._words("schedstat")
        return int(words[1]) / 1e9 if len(words) > 1 else None

    def _words(self, file: str, after: str = "") -> list[str]:
        """Those of one of its files in /proc, behind the last of these characters; none where it must not be read."""
        text = read(f"{psutil.PROCFS_PATH}/{self.process.pid}/{file}")
        return (text.rpartition(after)[2] if after else text).split()

    def environment(self) -> Mapping[str, str]:
        """Its environment, empty where it must not be read."""
        try:
            return self.process.environ()
        except (psutil.Error, OSError):
            return {}


@dataclass(frozen=True)
class ProcessUsage:
    """CPU seconds of its own and of its children that have ended, the state in which the kernel has halted it or "",
    bytes in memory, page faults of its main thread, seconds without a CPU, bytes read.
    """

    cpu: float
    ended: float
    halted: str
    resident: int
    faults: int | None
    waited: float | None
    read: int | None


ProcessTable = Mapping[int, ProcessEntry]
"""By PID."""


def read_table(known: ProcessTable, alive: ProcessTable) -> ProcessTable:
    """All processes: those that are `alive` as they are given, the `known` ones that settled, and all others anew."""
    pids = set(psutil.pids())
    kept = {pid: entry for pid, entry in known.items() if pid in pids and pid not in alive and entry.settled}
    table = {**kept, **alive}
    return table | {pid: entry for pid in pids - table.keys() if (entry := _read(pid))}


def listeners(port: int | None) -> Collection[int]:
    """The PIDs that listen on that port, as far as they may be seen."""
    if port is None:
        return ()
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return ()
    listening = (connection for connection in connections if connection.status == psutil.CONN_LISTEN)
    return {socket.pid for socket in listening if socket.pid and socket.laddr and socket.laddr.port == port}


def oom_kills() -> int | None:
    """How many processes the kernel has killed for lack of memory since it booted; None where it does not count."""
    lines = read(f"{psutil.PROCFS_PATH}/{VMSTAT}").splitlines()
    return next((int(line.removeprefix("oom_kill ")) for line in lines if line.startswith("oom_kill ")), None)


def ancestry(table: ProcessTable, pid: int) -> list[int]:
    """A process, its parent, and so on."""
    chain: list[int] = []
    while pid in table and pid not in chain:
        chain.append(pid)
        pid = table[pid].parent
    return chain


def proc() -> Path:
    """Where the process table is read from."""
    return Path(psutil.PROCFS_PATH)


def read_from(folder: str) -> None:
    """Read the process table from there instead of /proc."""
    psutil.PROCFS_PATH = folder


def _read(pid: int) -> ProcessEntry | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            created = process.create_time()
            argv = _argv(process)
            return ProcessEntry(process, process.ppid(), created, argv, time.time() - created > SETTLED)
    except psutil.Error:
        return None


def _argv(process: psutil.Process) -> tuple[str, ...]:
    """The command line; a title stands in its first word, and a zombie has none."""
    try:
        return tuple(process.cmdline())
    except psutil.Error:
        return ()
