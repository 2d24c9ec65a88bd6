"""The small files in which the kernel shows its numbers: in /proc and in /sys/fs/cgroup."""

import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from diag.core.metric_families import Sample


def read(path: str) -> str:
    """What is in it, without white space around it; "" where there is none, or it must not be read."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123  a scrape reads fifty; Path takes twice as long
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


NO_LIMIT = 2.0**62
"""Version 1 writes the largest number of pages for no limit."""
PERIODS = {"diag_host_cpu_periods_total": "nr_periods", "diag_host_cpu_throttled_periods_total": "nr_throttled"}
EVENTS = ("high", "max", "oom", "oom_kill")
RESOURCES = ("cpu", "memory", "io")
RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""Page cache and caches of the kernel, which are given up before anything is killed."""


@dataclass(frozen=True)
class ControlGroup:
    """The folders of one process: those of a controller from its own group up to the top that can be seen here."""

    memory: tuple[Path, ...] = ()
    cpu: tuple[Path, ...] = ()
    unified: tuple[Path, ...] = ()
    """Of version 2; its first one has the pressure of the group."""
    proc: Path = Path("/proc")

    def samples(self) -> Iterator[Sample]:
        """All that can be read now."""
        yield from self._memory()
        yield from self._events()
        yield from self._cpu()
        for resource in RESOURCES:
            own = [f"{self.unified[0]}/{resource}.pressure"] if self.unified else []
            lines = next(filter(None, map(read, [*own, f"{self.proc}/pressure/{resource}"])), "")
            if "avg10=" in lines:
                yield "diag_host_pressure_ratio", (resource,), float(lines.split("avg10=")[1].split()[0]) / 100

    def _memory(self) -> Iterator[Sample]:
        """Of the host or the group that has the least room left."""
        rooms = [room for folder in self.memory if (room := _group_memory(folder))]
        host = _pairs(read(f"{self.proc}/meminfo").replace(":", ""))
        if {"MemTotal", "MemAvailable"} <= host.keys():
            rooms.append((host["MemTotal"] * 1024, (host["MemTotal"] - host["MemAvailable"]) * 1024))
        if rooms:
            limit, used = min(rooms, key=lambda room: room[0] - room[1])
            yield "diag_host_memory_limit_bytes", (), limit
            yield "diag_host_memory_used_bytes", (), used

    def _events(self) -> Iterator[Sample]:
        for folder in self.memory[:1]:
            counts = _pairs(read(f"{folder}/memory.events") or read(f"{folder}/memory.oom_control"))
            if hits := read(f"{folder}/memory.failcnt"):
                counts["max"] = float(hits)
            for event in filter(counts.__contains__, EVENTS):
                yield "diag_host_memory_events_total", (event,), counts[event]

    def _cpu(self) -> Iterator[Sample]:
        """A group is throttled by the quota of each group that it is in."""
        quotas = [cores for folder in self.cpu if (cores := _quota(folder)) is not None]
        if quotas:
            yield "diag_host_cpu_limit_cores", (), min(quotas)
        stats = [_pairs(read(f"{folder}/cpu.stat")) for folder in self.cpu]
        throttled = [_throttled(stat) for stat in stats if stat.keys() & {"throttled_usec", "throttled_time"}]
        if throttled:
            yield "diag_host_cpu_throttled_seconds_total", (), sum(throttled)
        for stat in stats[:1]:
            for metric, key in PERIODS.items():
                if key in stat:
                    yield metric, (), stat[key]


def control_group(pid: int, proc: Path, mount: Path = Path("/sys/fs/cgroup")) -> ControlGroup:
    """The group of that process, as far as it can be seen from here; that of the host alone where it cannot."""
    own, ours = (_paths(read(f"{proc}/{each}/cgroup")) for each in (pid, "self"))

    def folders(controller: str) -> tuple[Path, ...]:
        version_1 = controller != "" and controller in own
        path = own.get(controller, own.get("", ""))
        top = mount / (controller if version_1 else _unified(mount))
        if path.startswith("/.."):  # in a container beside ours, which sees its own part of the tree there
            top, path = proc / str(pid) / "root" / top.relative_to("/"), "/"
        folder = top / path.lstrip("/")
        if not folder.is_dir() and path == ours.get(controller, ours.get("", "")):
            folder = top  # a container's own group, under the name that it has on its host
        if not path or not folder.is_dir():
            return ()
        return (folder, *(above for above in folder.parents if above.is_relative_to(top)))

    return ControlGroup(folders("memory"), folders("cpu"), folders(""), proc)


def _unified(mount: Path) -> str:
    return "" if (mount / "cgroup.controllers").exists() else "unified"


def _paths(lines: str) -> Mapping[str, str]:
    """/proc/<pid>/cgroup: the path of the group by controller, "" for version 2."""
    parts = (line.split(":", 2) for line in lines.splitlines() if line.count(":") > 1)
    return {controller: path for _, controllers, path in parts for controller in controllers.split(",")}


def _group_memory(folder: Path) -> tuple[float, float] | None:
    """Limit and use in bytes, without what can be reclaimed; None for a group without a limit."""
    second = read(f"{folder}/memory.max")
    limit = second or read(f"{folder}/memory.limit_in_bytes")
    if not limit.isdigit() or float(limit) >= NO_LIMIT:
        return None
    used = float(read(f"{folder}/memory.{'current' if second else 'usage_in_bytes'}") or 0)
    stat, prefix = _pairs(read(f"{folder}/memory.stat")), "" if second else "total_"
    return float(limit), max(used - sum(stat.get(prefix + name, 0.0) for name in RECLAIMABLE), 0.0)


def _quota(folder: Path) -> float | None:
    """In cores; None without one."""
    words = read(f"{folder}/cpu.max").split() or [
        read(f"{folder}/cpu.cfs_quota_us"),
        read(f"{folder}/cpu.cfs_period_us"),
    ]
    return float(words[0]) / float(words[1]) if all(word.isdigit() for word in words) else None


def _throttled(stat: Mapping[str, float]) -> float:
    """Seconds: version 2 counts microseconds, version 1 nanoseconds."""
    return stat.get("throttled_usec", stat.get("throttled_time", 0.0) / 1e3) / 1e6


def _pairs(text: str) -> dict[str, float]:
    """Lines of a name and a number."""
    words = (line.split() for line in text.splitlines())
    return {word[0]: float(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}


KMSG = Path("/dev/kmsg")
MOST_RECORDS = 100_000
_RECORD_SIZE = 8192
"""Bytes of the longest record; the kernel hands out one at a time."""
_KERNEL = 8
"""The first number of a record is facility times 8 and level; below 8 it is the kernel's own, not a program's."""
_KILLED = re.compile(
    r"^(\d+),\d+,(\d+),[^;]*;(?:Memory cgroup out|Out) of memory(?: \([^)]*\))?: Kill(?:ed)? process \d+ \(VLLM::",
    re.MULTILINE,
)


def last_vllm_kill(kmsg: Path = KMSG) -> float:
    """Unix time of the last one, to some seconds; 0 where there is none or the log may not be read."""
    at = 0.0
    try:
        log = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return at
    try:
        for _ in range(MOST_RECORDS):
            for facility, microseconds in _KILLED.findall(_record(log)):
                if int(facility) < _KERNEL:
                    at = time.time() - time.monotonic() + int(microseconds) / 1e6
    except (BlockingIOError, EOFError):
        pass
    finally:
        os.close(log)
    return at


def _record(log: int) -> str:
    """The next one; "" for one that was overwritten meanwhile."""
    try:
        read = os.read(log, _RECORD_SIZE)
    except BlockingIOError:
        raise
    except OSError:
        return ""
    if not read:
        raise EOFError
    return read.decode(errors="replace")
