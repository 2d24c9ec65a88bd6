"""Engines whose API server has ended, and the proof that one of them is of this server, which may be ended.

The engines of other servers on this host look the same once their API server is gone. An engine belongs to a server if
it was seen as a descendant of it, if it holds the socket of the server's port, if it writes to the server's log, or if
its session was opened for a command that names the port. Without such a proof it belongs to no server.
"""

import os
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

from diag.exporter.process.server import Owner
from diag.exporter.process.table import ProcessEntry, ProcessTable, ancestry, proc

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
    others = {_written_file(pid) for pid, entry in table.items() if entry.serves}  # servers that live
    file = _file_of(log)
    return {
        pid
        for pid, entry in strays.items()
        if pid in holding
        or (file is not None and file not in others and _written_file(pid) == file)
        or (port is not None and _session_port(entry, table) == str(port))
    }


def _file_of(log: str) -> tuple[int, int] | None:
    """Return device and inode of a regular file; None for anything else."""
    try:
        status = Path(log).stat() if log not in ("", "-") else None
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if status and stat.S_ISREG(status.st_mode) else None


def _written_file(pid: int) -> tuple[int, int] | None:
    """Return the file to which a process writes its standard output."""
    return _file_of(f"{proc()}/{pid}/fd/1")


def _session_port(entry: ProcessEntry, table: ProcessTable) -> str:
    """Return the only port that the leader of a process's session serves by its command line; "" for none."""
    try:
        leader = table.get(os.getsid(entry.process.pid))
    except OSError:
        return ""
    command = " ".join(leader.argv) if leader else ""
    ports = set(_PORT.findall(command)) if _SERVES.search(command) else set()
    return ports.pop() if len(ports) == 1 else ""


def orphaned_engines(members: ProcessTable, owners: Mapping[int, Owner]) -> Mapping[int, bool]:
    """Return the engines of this server that run, and of each whether the API server that started it has ended."""
    serving = {pid for pid, owner in owners.items() if owner.role == "api_server" and members[pid].runs()}
    engines = (pid for pid, entry in members.items() if entry.role == "engine" and pid in owners and entry.runs())
    return {pid: serving.isdisjoint(ancestry(members, pid)) for pid in engines}
