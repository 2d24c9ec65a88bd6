"""What the kernel's log says of vLLM: when it killed one of its processes for lack of memory."""

import os
import re
import time
from pathlib import Path

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
