"""The roll call of a server that hangs: where each of its processes stands, and the one that the others wait for.

Each wait (diag/knowledge/waits.toml) names the awaited processes: a worker waits for the engine's next step, the engine
for its workers' answers, a rank in a collective for the ranks that have not reached it. A process that waits for no
other process of vLLM, and that has not moved between two dumps, is the one to look at.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple

from diag.core.declarations import PACKAGE, read
from diag.core.formatting import listed
from diag.exporter.process.stacks import ProcessStack, StackFrame, frames_of_dump

WaitedFor = Literal["ranks", "workers", "engine", "replicas", "clients", ""]
APART = 2.0
"""Seconds between two dumps: a step of an engine takes less than a second."""
POLLING = 3
"""Innermost frames, at most, that a polling loop calls to check its condition: Path.exists, os.stat."""
HALTED = {
    "stopped": ("is stopped by a signal (SIGSTOP)", "kill -CONT {pid} lets it go on; find out who stopped it."),
    "traced": ("is held by a debugger", "Detach the debugger: grep TracerPid /proc/{pid}/status names it."),
    "uninterruptible": (
        "waits in the kernel and cannot be interrupted",
        "Look at storage and drivers: cat /proc/{pid}/stack as root names the kernel's function.",
    ),
    "zombie": ("has ended", "Read the log for its last lines: it has died, and the others have not noticed."),
}
"""States of a halted process, by their names in `diag.exporter.process.table`: in words, and the next step."""
AWAITED: Mapping[WaitedFor, tuple[str, WaitedFor | None]] = {
    "ranks": ("worker", "ranks"),
    "workers": ("worker", "engine"),
    "engine": ("engine", None),
    "replicas": ("engine", "replicas"),
}
"""The role of the processes that are awaited, and what those of them wait for that are not."""


class Wait(NamedTuple):
    """A call in which a process stands still, as data."""

    id: str
    stack: tuple[re.Pattern[str], ...]
    waits: str
    waited_for: WaitedFor
    next: str = ""
    innermost: bool = False
    fallback: bool = False


class Standing(NamedTuple):
    """Place of one process: the call, and whether it stood elsewhere in the other dump; None if that is unknown."""

    pid: int
    role: str
    rank: str
    engine: str
    waits: str
    waited_for: WaitedFor
    place: str
    moved: bool | None
    next: str
    halted: str = ""
    problem: str = ""

    @property
    def title(self) -> str:
        return {"api_server": "API server"}.get(self.role, self.role)


class RollCall(NamedTuple):
    """The processes of one server, the suspects among them, and the conclusion in a sentence, with the next step.

    `command` reads the stacks if diag cannot.
    """

    server: str
    standing: tuple[Standing, ...] = ()
    suspects: tuple[int, ...] = ()
    conclusion: str = ""
    next: str = ""
    command: str = ""

    @property
    def unread(self) -> bool:
        """True if no stack could be read; `conclusion` has the reason."""
        return not any(process.place or process.halted for process in self.standing)


def roll_call(server: str, dumps: Sequence[Sequence[ProcessStack]], works: bool) -> RollCall:
    """Judge two dumps of one server; no process is a suspect if `works`: its own metrics show progress."""
    earlier = {stack.pid: stack for stack in dumps[0]}
    standing = tuple(_standing(stack, earlier.get(stack.pid)) for stack in dumps[-1])
    read_stacks = [process for process in standing if process.place or process.halted]
    if not read_stacks:
        problem = next((process.problem for process in standing), "no process was found")
        return RollCall(server, standing, (), f"No stack could be read: {problem}.")
    if works:
        return RollCall(server, standing, (), "The server makes progress: no process is suspect.")
    awaited: set[int] = set()
    for process in read_stacks:  # only replicas wait for another engine's
        role, other_wait = AWAITED.get(process.waited_for, ("", None))
        awaited |= {
            other.pid
            for other in standing
            if other.role == role
            and other.pid != process.pid
            and (other_wait is None or other.waited_for != other_wait)
            and (
                process.waited_for == "replicas"
                or "" in (process.engine, other.engine)
                or process.engine == other.engine
            )
        }
    still = [one for one in read_stacks if one.halted or (one.waited_for == "" and one.moved is False)]
    halted = [process for process in still if process.halted]
    if suspects := halted or [process for process in still if process.pid in awaited] or still:
        pids = tuple(suspect.pid for suspect in suspects)
        names = listed([f"{suspect.title} {suspect.rank}".strip() for suspect in suspects], most=4)
        who = "The others wait for" if awaited & set(pids) else "Look at"
        return RollCall(server, standing, pids, f"{who} {names}.", suspects[0].next)
    workers = [process for process in read_stacks if process.role == "worker"]
    waited_for = {worker.waited_for for worker in workers}
    next_step = ""
    if waited_for == {"ranks"}:
        conclusion, next_step = f"All {len(workers)} workers wait for each other.", workers[0].next
    elif waited_for == {"engine"} and any(one.waited_for == "workers" and one.moved is False for one in read_stacks):
        conclusion = (
            "The engine waits for its workers, and each worker waits for the engine: a message between them is lost."
        )
    elif all(process.waited_for in ("clients", "engine") for process in read_stacks):
        conclusion = "The processes wait for requests."
    elif any(process.moved for process in read_stacks):
        conclusion = "A process moves: the server is slow, or it works."
    else:
        conclusion = "The stacks name no process that the others wait for."
    return RollCall(server, standing, (), conclusion, next_step)


def _standing(stack: ProcessStack, before: ProcessStack | None) -> Standing:
    owner = stack.owner
    wait, frame = wait_of(stack.frames)
    waits, next_step = (wait.waits, wait.next) if wait else ("runs", "")
    if stack.halted:
        waits, next_step = HALTED[stack.halted]
    elif stack.holder and wait is None:
        waits = f"runs, while its thread {stack.holder} holds the interpreter's lock"
    if stack.dumped:
        waits = f"{waits}, as vLLM's watchdog dumped it at {stack.dumped}"
    moved = None
    if before is not None and before.frames and stack.frames:  # unless both are in one call, in which a loop may poll
        same = 0
        for one, other in zip(reversed(before.frames), reversed(stack.frames), strict=False):
            if one[:2] != other[:2]:
                break
            same += 1
            if one.line != other.line:
                break
        moved = max(len(before.frames), len(stack.frames)) - same > POLLING
    return Standing(
        pid=stack.pid,
        role=owner.role,
        rank=owner.rank,
        engine=owner.rank.partition(".")[0] if owner.role == "engine" or "." in owner.rank else "",
        waits=waits,
        waited_for=wait.waited_for if wait and not stack.halted else "",
        place=(frame.place if frame else "") or (stack.kernel if stack.halted else ""),
        moved=False if stack.halted else moved,
        next=next_step.format(pid=stack.pid) if stack.halted else next_step,
        halted=stack.halted,
        problem=stack.problem,
    )


def wait_of(frames: Sequence[StackFrame]) -> tuple[Wait | None, StackFrame | None]:
    """Return the wait of a stack, and the frame to print: where it waits for another process, else the innermost."""
    texts = [f"{frame.file}:{frame.function}" for frame in frames]
    best: tuple[int, Wait] | None = None
    for wait in waits():
        first = next((at for at, text in enumerate(texts) if wait.stack[0].search(text)), None)
        if first is None or (wait.innermost and first) or (best and (wait.fallback or first >= best[0])):
            continue
        if all(any(pattern.search(text) for text in texts[first:]) for pattern in wait.stack[1:]):
            best = first, wait
    if best is None:
        return None, frames[0] if frames else None
    at, wait = best
    return wait, frames[at if wait.waited_for else 0]


def stand_in_dump(text: str) -> str:
    """Return where the main thread stands in the last dump of Python's faulthandler, "" if the text has no thread.

    "waits for the workers' answers in acquire_read (shm_broadcast.py:864)".
    """
    wait, frame = wait_of(frames_of_dump(text))
    return f"{wait.waits if wait else 'runs'} in {frame.place}" if frame else ""


@cache
def waits() -> tuple[Wait, ...]:
    """Return the waits in the order of their file."""
    return read(PACKAGE / "knowledge" / "waits.toml", tuple[Wait, ...], "wait")
