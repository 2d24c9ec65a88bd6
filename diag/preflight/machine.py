"""This host as a launch will find it: limits, shared memory, disks, ports and network devices. Nothing is changed."""

import os
import pwd
import re
import resource
import socket
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from diag.exporter.infiniband import InfiniBandPort, read_ports
from diag.exporter.process.kernel import control_group, read_file, whole

_PROBE_BYTES, _PROBE_SECONDS, _CHUNK = 2**28, 1.0, 2**22
"""Most bytes and seconds for which a weight file is read to measure the disk, and the bytes of one read."""
_USERS = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""Variables from which getpass.getuser takes the user's name before it looks into the passwd database."""
_BRIDGE, _EXTENDED, _ACS, _REDIRECTS = "0x0604", 0x100, 0x0D, 0x1C
"""PCI class of a bridge; place of the extended capabilities; access control's number, and its bits that send
peer-to-peer traffic through the root complex (PCIe 6, section 7.7.11)."""
_MOST_CAPABILITIES = 64
_CAP_IPC_LOCK = 14
"""Bit of the capability (linux/capability.h); with it the kernel does not apply RLIMIT_MEMLOCK."""
_ASSIGNED = re.compile(r"^(\w+)(?:: \S+)? = '([^']*)'$", re.MULTILINE)
_DISTRIBUTION = re.compile(r"vllm(?:_cpu)?-")
_PACKAGES = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "local/lib/python3*/dist-packages")


class Wheel(NamedTuple):
    """An installed vLLM: its release, that of its PyTorch, and the CUDA toolkit of that; "" if there is none."""

    vllm: str = ""
    torch: str = ""
    cuda: str = ""


def wheel(python: str) -> Wheel:
    """Find the vLLM beside a Python by the files there; nothing of it is run."""
    prefix = Path(python).parent.parent
    for packages in sorted(folder for place in _PACKAGES for folder in prefix.glob(place)):
        if releases := sorted(packages.glob("vllm*.dist-info")):
            written = dict(_ASSIGNED.findall(read_file(f"{packages}/torch/version.py")))
            release = _DISTRIBUTION.sub("", releases[0].name).removesuffix(".dist-info")
            return Wheel(release, written.get("__version__", ""), written.get("cuda", ""))
    return Wheel()


@dataclass(frozen=True)
class Machine:
    """This host; the folders are those of the kernel unless a test names others."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    shm: Path = Path("/dev/shm")  # not a temporary file: its size is what is asked

    @cached_property
    def group(self) -> dict[str, float]:
        """The memory limit and use in bytes, and the CPU quota, of this process's control group or of the host."""
        samples = control_group(os.getpid(), self.proc).samples()
        return {family: value for family, labels, value in samples if not labels}

    @property
    def memory_free(self) -> float | None:
        """Bytes of host memory that a launch may use; None if the kernel does not show it."""
        limit, used = (self.group.get(f"diag_host_memory_{name}_bytes") for name in ("limit", "used"))
        return None if limit is None or used is None else max(limit - used, 0.0)

    @property
    def memory_total(self) -> float | None:
        return self.group.get("diag_host_memory_limit_bytes")

    @property
    def cores(self) -> float:
        """CPU cores that a launch may use: its CPU affinity, and the quota of its control group."""
        return min(float(len(os.sched_getaffinity(0))), self.group.get("diag_host_cpu_limit_cores", float("inf")))

    def shared_memory_free(self) -> float | None:
        """Return the free bytes of /dev/shm; None if there is none."""
        with suppress(OSError):
            status = os.statvfs(self.shm)
            return float(status.f_bavail * status.f_frsize)
        return None

    def local_cpus(self, pci_bus_id: str) -> frozenset[int]:
        """Return the CPUs of the NUMA node of a PCI device; none if the kernel does not show them."""
        cpus = set[int]()
        for part in filter(None, self._of_device(pci_bus_id, "local_cpulist").split(",")):  # of a list such as 0-3,8
            first, _, last = part.partition("-")
            start, end = whole([first]), whole([last or first])
            if start is not None and end is not None:
                cpus.update(range(start, min(end, start + 2**13) + 1))
        return frozenset(cpus)

    def is_translated(self, pci_bus_id: str) -> bool:
        """Return True if an IOMMU translates the addresses of a PCI device; in pass-through mode it does not."""
        return self._of_device(pci_bus_id, "iommu_group/type").startswith("DMA")

    def _of_device(self, pci_bus_id: str, file: str) -> str:
        domain, _, rest = pci_bus_id.lower().partition(":")  # NVML has eight digits of the domain, the kernel four
        return read_file(f"{self.sys}/bus/pci/devices/{domain[-4:]}:{rest}/{file}")

    def process_name(self, pid: str) -> str:
        """Return the name of a process as the kernel shows it, "" if it is not visible here."""
        return read_file(f"{self.proc}/{pid}/comm")

    def redirecting_bridges(self) -> tuple[str, ...] | None:
        """Return PCI bridges whose access control (ACS) redirects peer-to-peer traffic; None if it cannot be read."""
        redirecting, readable = [], False
        for device in sorted((self.sys / "bus/pci/devices").glob("*")):
            if not read_file(f"{device}/class").startswith(_BRIDGE):
                continue
            with suppress(OSError):
                space = (device / "config").read_bytes()  # a file of the kernel, of at most 4 KiB; beyond 64 B for root
                readable |= len(space) > _EXTENDED
                if _acs_control(space) & _REDIRECTS:
                    redirecting.append(device.name)
        return tuple(redirecting) if readable else None

    def interfaces(self) -> dict[str, str]:
        """Return the network interfaces with their state, such as "up"."""
        return {link.name: read_file(f"{link}/operstate") for link in sorted((self.sys / "class/net").glob("*"))}

    def infiniband(self) -> tuple[InfiniBandPort, ...]:
        return tuple(read_ports(self.sys))


def hard_limit(kind: int) -> float:
    """Return the hard limit of a resource of this process, infinite if there is none."""
    limit = resource.getrlimit(kind)[1]
    return float("inf") if limit == resource.RLIM_INFINITY else float(limit)


def lockable_bytes() -> float:
    """Return the bytes that this process may lock in memory; a process with CAP_IPC_LOCK has no limit."""
    status = read_file("/proc/self/status")
    held = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    return float("inf") if held >> _CAP_IPC_LOCK & 1 else hard_limit(resource.RLIMIT_MEMLOCK)


def has_user_name() -> bool:
    """Return True if getpass.getuser finds a name for this user, as PyTorch's compiler cache needs it."""
    with suppress(KeyError):
        return bool(pwd.getpwuid(os.getuid()))
    return any(map(os.environ.get, _USERS))


def port_problem(host: str, port: int) -> str:
    """Return why a server cannot listen on a port, "" if it can: the port is bound and given back at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM's own socket
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
        except ValueError:  # a name that no host can have
            return "invalid host name"
    return ""


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def disk_free(folder: Path) -> float:
    """Return the free bytes of the file system on which a folder is or would be."""
    status = os.statvfs(existing(folder))
    return float(status.f_bavail * status.f_frsize)


def read_speed(file: Path) -> float | None:
    """Return the bytes per second at which a file is read from its disk, measured for a second; None for a small file.

    The kernel is asked to drop its cached pages of the file first; what other processes keep mapped stays in memory.
    """
    if file.stat().st_size < _PROBE_BYTES:
        return None
    with file.open("rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, _PROBE_BYTES, os.POSIX_FADV_DONTNEED)
        begun, done = time.monotonic(), 0
        while done < _PROBE_BYTES and time.monotonic() - begun < _PROBE_SECONDS:
            done += len(opened.read(_CHUNK))
        return done / max(time.monotonic() - begun, 1e-9)


def _acs_control(space: bytes) -> int:
    """Return the control bits of a bridge's access control; 0 if it has none, or it must not be read."""
    at = _EXTENDED
    for _ in range(_MOST_CAPABILITIES):
        header = int.from_bytes(space[at : at + 4], "little")
        if header & 0xFFFF == _ACS:
            return int.from_bytes(space[at + 6 : at + 8], "little")
        at = header >> 20
        if at < _EXTENDED:
            break
    return 0


def prefixes(listed: str) -> tuple[Sequence[str], bool, bool]:
    """Read NCCL_SOCKET_IFNAME: the names, True if they are excluded (^), and True if they are whole names (=)."""
    excluded, text = listed.startswith("^"), listed.removeprefix("^")
    exact = text.startswith("=")
    return [name for name in text.removeprefix("=").split(",") if name], excluded, exact


def may_write(folder: Path) -> bool:
    takes_files = folder.stat().st_mode & 0o222 or os.statvfs(folder).f_blocks  # root may, but /proc has no room
    return bool(takes_files) and os.access(folder, os.W_OK | os.X_OK)
