"""Memory and CPU of a server as the kernel shows them: its control group (cgroup) and kills for lack of memory.

Control groups have limits, use and pressure, in version 2 and version 1. A look reads about a dozen small files of
/proc and /sys/fs/cgroup; numbers that a kernel or a container hides have no sample.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diag.core.files import exists
from diag.core.metric_families import Sample

MOST_BYTES = 2**20
_WHOLE = re.compile(r"\d{1,20}", re.ASCII)


def read_file(path: str) -> str:
    """Return the text of a small file, stripped; "" if it does not exist or must not be read.

    A container that brings a folder of its own in the place of the kernel's may have anything there, such as a pipe.
    """
    try:
        flags = os.O_NONBLOCK | os.O_NOCTTY
        with open(path, "rb", buffering=0, opener=lambda name, mode: os.open(name, mode | flags)) as file:
            parts = [file.read(MOST_BYTES)]
            while parts[-1] and sum(map(len, parts)) < MOST_BYTES:
                parts.append(file.read(MOST_BYTES))
            return b"".join(filter(None, parts)).decode(errors="replace").strip()
    except OSError:
        return ""


def whole(words: Sequence[str], at: int = 0) -> int | None:
    """Return a whole number of at most 64 bits among words; None if there is none."""
    return int(words[at]) if at < len(words) and _WHOLE.fullmatch(words[at]) else None


_PRESSURE = re.compile(r"\bavg10=(\d{1,3}(?:\.\d{1,6})?)(?!\S)", re.ASCII)
NO_LIMIT = 2.0**62
"""Bytes from which on a limit is none: version 1 then writes the largest number of pages."""
PERIODS = {"diag_host_cpu_periods_total": "nr_periods", "diag_host_cpu_throttled_periods_total": "nr_throttled"}
EVENTS = ("high", "max", "oom", "oom_kill")
RESOURCES = ("cpu", "memory", "io")
RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""Page cache and caches of the kernel, which the kernel frees before it kills a process."""


@dataclass(frozen=True)
class ControlGroup:
    """The folders of one process: for each controller, from its own group up to the top that is visible here."""

    memory: tuple[Path, ...] = ()
    cpu: tuple[Path, ...] = ()
    unified: tuple[Path, ...] = ()
    """Folders of version 2; the first one has the pressure of the group."""
    proc: Path = Path("/proc")

    def samples(self) -> Iterator[Sample]:
        rooms = []
        for folder in self.memory:
            second = read_file(f"{folder}/memory.max")  # a file of version 2
            limit = whole([second or read_file(f"{folder}/memory.limit_in_bytes")])
            used = whole([read_file(f"{folder}/memory.{'current' if second else 'usage_in_bytes'}")])
            if limit is not None and limit < NO_LIMIT and used is not None:
                stat, prefix = _pairs(read_file(f"{folder}/memory.stat")), "" if second else "total_"
                reclaimable = sum(stat.get(prefix + name, 0.0) for name in RECLAIMABLE)
                rooms.append((float(limit), max(used - reclaimable, 0.0)))
        host = _pairs(read_file(f"{self.proc}/meminfo").replace(":", ""))
        if {"MemTotal", "MemAvailable"} <= host.keys():
            rooms.append((host["MemTotal"] * 1024, (host["MemTotal"] - host["MemAvailable"]) * 1024))
        if rooms:  # of the host or the group that has the least room left
            least = min(rooms, key=lambda room: room[0] - room[1])
            yield "diag_host_memory_limit_bytes", (), least[0]
            yield "diag_host_memory_used_bytes", (), least[1]
        for folder in self.memory[:1]:
            counts = _pairs(read_file(f"{folder}/memory.events") or read_file(f"{folder}/memory.oom_control"))
            if (hits := whole([read_file(f"{folder}/memory.failcnt")])) is not None:
                counts["max"] = float(hits)
            for event in filter(counts.__contains__, EVENTS):
                yield "diag_host_memory_events_total", (event,), counts[event]
        quotas = []  # that of each group above throttles a group, too
        for folder in self.cpu:
            words = read_file(f"{folder}/cpu.max").split()
            words = words or [read_file(f"{folder}/cpu.cfs_quota_us"), read_file(f"{folder}/cpu.cfs_period_us")]
            quota, period = whole(words), whole(words, 1)
            if quota is not None and period:
                quotas.append(quota / period)
        if quotas:
            yield "diag_host_cpu_limit_cores", (), min(quotas)
        stats = [_pairs(read_file(f"{folder}/cpu.stat")) for folder in self.cpu]
        throttled = [stat for stat in stats if stat.keys() & {"throttled_usec", "throttled_time"}]
        if throttled:  # version 2 counts microseconds, version 1 nanoseconds
            microseconds = (stat.get("throttled_usec", stat.get("throttled_time", 0.0) / 1e3) for stat in throttled)
            yield "diag_host_cpu_throttled_seconds_total", (), sum(spell / 1e6 for spell in microseconds)
        for metric, key in PERIODS.items() if stats else ():
            if key in stats[0]:
                yield metric, (), stats[0][key]
        for resource in RESOURCES:
            own = [f"{self.unified[0]}/{resource}.pressure"] if self.unified else []
            lines = next(filter(None, map(read_file, [*own, f"{self.proc}/pressure/{resource}"])), "")
            if pressure := _PRESSURE.search(lines):
                yield "diag_host_pressure_ratio", (resource,), float(pressure[1]) / 100


def control_group(pid: int, proc: Path, mount: Path = Path("/sys/fs/cgroup")) -> ControlGroup:
    """Return the group of a process, as far as it is visible here; without it, the samples are those of the host."""

    def paths(process: object) -> Mapping[str, str]:
        """Return the path of a process's group by controller, "" for version 2."""
        parts = (line.split(":", 2) for line in read_file(f"{proc}/{process}/cgroup").splitlines())
        return {name: part[2] for part in parts if len(part) > 2 for name in part[1].split(",")}

    groups, ours = paths(pid), paths("self")
    unified = "" if (mount / "cgroup.controllers").exists() else "unified"

    def folders(controller: str) -> tuple[Path, ...]:
        version_1 = controller != "" and controller in groups
        path = groups.get(controller, groups.get("", ""))
        top = mount / (controller if version_1 else unified)
        if path.startswith("/.."):  # in a container beside ours, which sees its own part of the tree there
            top, path = proc / str(pid) / "root" / top.relative_to("/"), "/"
        folder = top / path.lstrip("/")
        if not exists(folder) and path == ours.get(controller, ours.get("", "")):
            folder = top  # a container's own group, under the name that it has on its host
        if not path or not exists(folder):
            return ()
        return (folder, *(above for above in folder.parents if above.is_relative_to(top)))

    return ControlGroup(folders("memory"), folders("cpu"), folders(""), proc)


def _pairs(text: str) -> dict[str, float]:
    """Parse lines of a name and a number."""
    words = (line.split() for line in text.splitlines())
    return {word[0]: float(value) for word in words if (value := whole(word, 1)) is not None}


# -- kills for lack of memory ------------------------------------------------------------------------------------------

KMSG = Path("/dev/kmsg")
MOST_RECORDS = 100_000
_RECORD_SIZE = 8192
"""Bytes of the longest record; the kernel hands out one at a time."""
_KERNEL = 8
"""The first number of a record is facility times 8 and level; below 8 it is the kernel's own, not a program's."""
_KILLED = re.compile(
    r"^(\d{1,9}),\d+,(\d{1,20}),[^;]*;"
    r"(?:Memory cgroup out|Out) of memory(?: \([^)]*\))?: Kill(?:ed)? process \d+ \(VLLM::",
    re.MULTILINE | re.ASCII,
)


def last_vllm_kill(kmsg: Path = KMSG) -> float:
    """Return the unix time, to some seconds, at which the kernel last killed a process of vLLM for lack of memory.

    0 if the kernel's log shows none or must not be read.
    """
    at = 0.0
    try:
        log = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return at
    try:
        for _ in range(MOST_RECORDS):
            try:
                record = os.read(log, _RECORD_SIZE)
            except BlockingIOError:
                break
            except OSError:  # a record that was overwritten meanwhile
                continue
            if not record:
                break
            for facility, microseconds in _KILLED.findall(record.decode(errors="replace")):
                if int(facility) < _KERNEL:
                    at = time.time() - time.monotonic() + int(microseconds) / 1e6
    finally:
        os.close(log)
    return at
