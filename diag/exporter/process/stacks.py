"""The stack of a process of vLLM: py-spy's dump of its Python frames (the only caller of py-spy), or the kernel's view.

The memory of a process is read while it runs (--nonblocking): to stop it would take seconds on a host whose CPUs are
busy, and fails in a process that is stopped already. A stack that changes meanwhile may be refused, and is read again.
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from diag.core.files import parse_json
from diag.exporter.process.kernel import read_file
from diag.exporter.process.server import Owner
from diag.exporter.process.table import halted_state

TIMEOUT = 10.0
"""Seconds that one dump may take."""
MOST_FRAMES, ATTEMPTS = 200, 3
INSTALL = "pip install 'diag[stacks]'"


class StackFrame(NamedTuple):
    """One call: "acquire_read", the file as Python names it, the line that is executed."""

    function: str
    file: str
    line: int

    @property
    def place(self) -> str:
        """The call as it is printed: "acquire_read (shm_broadcast.py:864)"."""
        return f"{self.function} ({self.file.rpartition('/')[2]}:{self.line})"


@dataclass(frozen=True)
class ProcessStack:
    """The stack of the main thread, the innermost frame first.

    `halted` is the kernel's state if the process does not run, "" if it does. `holder` names another thread that holds
    the lock of the Python interpreter. `kernel` is the kernel's function or system call, if it may be read; `problem`
    why there are no frames.
    """

    pid: int
    owner: Owner
    halted: str = ""
    frames: tuple[StackFrame, ...] = ()
    holder: str = ""
    kernel: str = ""
    problem: str = ""


def take(owners: Mapping[int, Owner]) -> list[ProcessStack]:
    """Return the stacks of these processes, one after the other; those that have ended meanwhile are left out."""
    beside = Path(sys.executable).parent / "py-spy"  # the virtual environment of diag may not be activated
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    return [_stack(pid, owner, program) for pid, owner in owners.items() if Path(f"/proc/{pid}").exists()]


def _stack(pid: int, owner: Owner, program: str | None) -> ProcessStack:
    halted = halted_state(pid)
    waits = read_file(f"/proc/{pid}/wchan")
    called = read_file(f"/proc/{pid}/syscall").split(" ")[0]
    stack = ProcessStack(pid, owner, halted, kernel=waits if waits not in ("", "0") else f"system call {called or '?'}")
    if program is None:
        return replace(stack, problem=f"py-spy is not installed: {INSTALL}")
    if halted == "zombie":
        return replace(stack, problem="the process has ended and waits for its parent")
    command = [program, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    try:
        for _ in range(ATTEMPTS):
            ran = subprocess.run(command, capture_output=True, timeout=TIMEOUT, check=False)
            if ran.returncode == 0:
                break
        threads = parse_json(ran.stdout) if ran.returncode == 0 else None
    except subprocess.TimeoutExpired:
        return replace(stack, problem=f"py-spy did not answer within {TIMEOUT:.0f} s")
    except (OSError, ValueError) as error:
        return replace(stack, problem=f"py-spy could not be used: {str(error).splitlines()[0]}")
    if not isinstance(threads, list):
        return replace(stack, problem=_reason(ran.stderr.decode(errors="replace")))
    with suppress(LookupError, TypeError, AttributeError, ValueError, OverflowError, StopIteration):
        main = next(run for run in threads if run.get("os_thread_id") == pid or run["thread_name"] == "MainThread")
        holders = [str(run["thread_name"]) for run in threads if run["owns_gil"] and run is not main]
        frames = tuple(
            StackFrame(
                str(call["name"]).rpartition(".")[2], str(call["short_filename"] or call["filename"]), int(call["line"])
            )
            for call in main["frames"][:MOST_FRAMES]
        )
        return replace(stack, frames=frames, holder=next(iter(holders), ""))
    return replace(stack, problem="py-spy's answer has no main thread")


def _reason(written: str) -> str:
    """Return why py-spy has no stack, from what it wrote."""
    if "ermission" in written or "EPERM" in written:
        return "this user may not read its memory: run diag as the server's user or as root (CAP_SYS_PTRACE)"
    lines = [line.strip() for line in written.splitlines() if line.strip()]
    causes = [line.partition(": ")[2] for line in lines if line[:2] in ("0:", "1:")]
    return f"py-spy: {[*causes[-1:], *lines[:1], 'no answer'][0]}"
