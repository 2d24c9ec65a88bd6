"""The stack of a process of vLLM: by py-spy (here is its only caller), by vLLM's watchdog, or the kernel's view.

The memory of a process is read while it runs (--nonblocking): to stop it would take seconds on a host whose CPUs are
busy, and fails in a process that is stopped already. A stack that changes meanwhile may be refused, and is read again.
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from diag.core.files import parse_json
from diag.exporter.process.kernel import read_file
from diag.vllm.command.parse import parse

if TYPE_CHECKING:
    from diag.exporter.process.server import Owner

TIMEOUT = 10.0
"""Seconds that one dump may take."""
MOST_FRAMES, ATTEMPTS = 200, 3
INSTALL = "pip install 'diag[stacks]'"
MOST_DUMPED = 1_000_000
"""Bytes of a dump file of vLLM's watchdog that are read, from its end."""
DUMPED = re.compile(r"^>>> Call stack dump #\d+ at (?P<at>.{10,40}?) due to feed timeout$", re.MULTILINE)


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
    why there are no frames. If vLLM's watchdog dumped them, `dumped` is when: "Fri Nov 27 09:12:44 2026".
    """

    pid: int
    owner: "Owner"
    halted: str = ""
    frames: tuple[StackFrame, ...] = ()
    holder: str = ""
    kernel: str = ""
    problem: str = ""
    dumped: str = ""


def take(owners: Mapping[int, "Owner"]) -> list[ProcessStack]:
    """Return the stacks of these processes, one after the other; those that have ended meanwhile are left out.

    Of processes that py-spy does not read, the dumps count that vLLM's watchdog wrote, if its folder is known.
    """
    folder = ""  # dump_dir of --watchdog-config
    for pid in owners:
        words = read_file(f"/proc/{pid}/cmdline").rstrip("\0").split("\0")
        if not folder and any(word.startswith("--watchdog-config") for word in words):
            folder = str(parse(shlex.join(words)).keys("--watchdog-config").get("dump_dir", ""))
    beside = Path(sys.executable).parent / "py-spy"  # the virtual environment of diag may not be activated
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    stacks = [_stack(pid, owner, program) for pid, owner in owners.items() if Path(f"/proc/{pid}").exists()]
    return [_of_watchdog(stack, folder) if folder and not stack.frames else stack for stack in stacks]


def frames_of_dump(text: str) -> tuple[StackFrame, ...]:
    """Return the frames of the main thread in a dump of Python's faulthandler, which writes that thread last."""
    thread = re.split(r"^(?:Current thread|Thread) 0x\w+[^\n]*\n", text, flags=re.MULTILINE)[1:][-1:]
    calls = re.findall(r'^  File "([^"\n]+)", line (\d{1,7}) in (\S+)', "".join(thread), re.MULTILINE)
    return tuple(StackFrame(function, file, int(line)) for file, line, function in calls[:MOST_FRAMES])


def _of_watchdog(stack: ProcessStack, folder: str) -> ProcessStack:
    """Return the stack as vLLM's watchdog last dumped it, if it did, with the names that the server's container has."""
    inside = re.search(r"^NSpid:.*?(\d+)$", read_file(f"/proc/{stack.pid}/status"), re.MULTILINE)
    top = Path(f"/proc/{stack.pid}") / ("root" if folder.startswith("/") else "cwd") / folder.lstrip("/")
    with suppress(OSError):
        for file in top.glob(f"VLLM_STACK_DUMP_for_*_{inside[1] if inside else stack.pid}.log"):
            if file.is_symlink() or not file.is_file():  # a link leads out of the container, a pipe may never end
                continue
            with file.open("rb") as opened:
                opened.seek(max(file.stat().st_size - MOST_DUMPED, 0))
                text = opened.read(MOST_DUMPED).decode(errors="replace")
            for dump in list(DUMPED.finditer(text))[-1:]:
                return replace(stack, frames=frames_of_dump(text[dump.end() :]), problem="", dumped=dump["at"])
    return stack


def _stack(pid: int, owner: "Owner", program: str | None) -> ProcessStack:
    from diag.exporter.process.table import halted_state  # noqa: PLC0415 - who only reads a dump needs no psutil

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
        written = ran.stderr.decode(errors="replace")
        if "ermission" in written or "EPERM" in written:
            why = "this user may not read its memory: run diag as the server's user or as root (CAP_SYS_PTRACE)"
            return replace(stack, problem=why)
        lines = [line.strip() for line in written.splitlines() if line.strip()]
        causes = [line.partition(": ")[2] for line in lines if line[:2] in ("0:", "1:")]
        return replace(stack, problem=f"py-spy: {[*causes[-1:], *lines[:1], 'no answer'][0]}")
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
