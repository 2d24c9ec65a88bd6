"""The roll call of a server that hangs: where each of its processes stands, and the one that the others wait for.

Each wait (diag/knowledge/waits.toml) names the awaited processes: a worker waits for the engine's next step, the engine
for its workers' answers, a rank in a collective for the ranks that have not reached it. A process that waits for no
other process of vLLM, and that has not moved between two dumps, is the one to look at.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

from diag.core.declarations import PACKAGE, read
from diag.core.formatting import listed
from diag.exporter.process.stacks import ProcessStack, StackFrame

WaitedFor = Literal["ranks", "workers", "engine", "replicas", "clients", ""]
APART = 2.0
"""Seconds between two dumps: a step of an engine takes less than a second."""
POLLING = 3
"""Innermost frames, at most, that a polling loop calls to check its condition: Path.exists, os.stat."""
HALTED = {
    "stopped": "is stopped by a signal (SIGSTOP)",
    "traced": "is held by a debugger",
    "uninterruptible": "waits in the kernel and cannot be interrupted",
    "zombie": "has ended",
}
"""States of a process that the kernel has halted, in words."""
NEXT = {
    "stopped": "kill -CONT {pid} lets it go on; find out who stopped it.",
    "traced": "Detach the debugger: grep TracerPid /proc/{pid}/status names it.",
    "uninterruptible": "Look at storage and drivers: cat /proc/{pid}/stack as root names the kernel's function.",
    "zombie": "Read the log for its last lines: it has died, and the others have not noticed.",
}


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
        return not any(each.place or each.halted for each in self.standing)


def roll_call(server: str, dumps: Sequence[Sequence[ProcessStack]], works: bool) -> RollCall:
    """Judge two dumps of one server; no process is a suspect if `works`: its own metrics show progress."""
    earlier = {stack.pid: stack for stack in dumps[0]}
    standing = tuple(_standing(stack, earlier.get(stack.pid)) for stack in dumps[-1])
    known = [each for each in standing if each.place or each.halted]
    if not known:
        reasons = dict.fromkeys(each.problem for each in standing)
        return RollCall(server, standing, (), f"No stack could be read: {next(iter(reasons), 'no process was found')}.")
    if works:
        return RollCall(server, standing, (), "The server makes progress: no process is suspect.")
    awaited = {pid for each in known for pid in _awaited(each, standing)}
    still = [each for each in known if each.halted or (each.waited_for == "" and each.moved is False)]
    suspects = [each for each in still if each.halted] or [each for each in still if each.pid in awaited] or still
    pids = tuple(each.pid for each in suspects)
    if suspects:
        names = listed([f"{each.title} {each.rank}".strip() for each in suspects], most=4)
        who = "The others wait for" if awaited & set(pids) else "Look at"
        return RollCall(server, standing, pids, f"{who} {names}.", suspects[0].next)
    workers = [each for each in known if each.role == "worker"]
    waited_for = {each.waited_for for each in workers}
    if waited_for == {"ranks"}:
        return RollCall(server, standing, (), f"All {len(workers)} workers wait for each other.", workers[0].next)
    if waited_for == {"engine"} and any(each.waited_for == "workers" and each.moved is False for each in known):
        lost = "The engine waits for its workers, and each worker waits for the engine: a message between them is lost."
        return RollCall(server, standing, (), lost)
    if all(each.waited_for in ("clients", "engine") for each in known):
        return RollCall(server, standing, (), "The processes wait for requests.")
    moves = "A process moves: the server is slow, or it works." if any(each.moved for each in known) else ""
    return RollCall(server, standing, (), moves or "The stacks name no process that the others wait for.")


def _standing(stack: ProcessStack, before: ProcessStack | None) -> Standing:
    owner = stack.owner
    engine = owner.rank.partition(".")[0] if owner.role == "engine" or "." in owner.rank else ""
    wait, frame = _wait_of(stack.frames)
    place = frame.place if frame else ""
    waits = HALTED.get(stack.halted) or (wait.waits if wait else "runs")
    if stack.holder and not stack.halted and wait is None:
        waits = f"runs, while its thread {stack.holder} holds the interpreter's lock"
    moved = None if before is None or not (before.frames and stack.frames) else _moved(before.frames, stack.frames)
    return Standing(
        pid=stack.pid,
        role=owner.role,
        rank=owner.rank,
        engine=engine,
        waits=waits,
        waited_for=wait.waited_for if wait and not stack.halted else "",
        place=place or (stack.kernel if stack.halted else ""),
        moved=False if stack.halted else moved,
        next=NEXT[stack.halted].format(pid=stack.pid) if stack.halted else (wait.next if wait else ""),
        halted=stack.halted,
        problem=stack.problem,
    )


def _moved(before: Sequence[StackFrame], now: Sequence[StackFrame]) -> bool:
    """Return True unless both stacks are in the same call, in which a loop may poll."""
    same = 0
    for one, other in zip(reversed(before), reversed(now), strict=False):
        if one[:2] != other[:2]:
            break
        same += 1
        if one.line != other.line:
            break
    return max(len(before), len(now)) - same > POLLING


def _wait_of(frames: Sequence[StackFrame]) -> tuple[Wait | None, StackFrame | None]:
    """Return the wait of a stack, and the frame to print: where it waits for another process, else the innermost."""
    texts = [f"{frame.file}:{frame.function}" for frame in frames]
    found: tuple[int, Wait] | None = None
    for wait in waits():
        first = next((at for at, text in enumerate(texts) if wait.stack[0].search(text)), None)
        if first is None or (wait.innermost and first) or (found and (wait.fallback or first >= found[0])):
            continue
        if all(any(pattern.search(text) for text in texts[first:]) for pattern in wait.stack[1:]):
            found = first, wait
    if found is None:
        return None, frames[0] if frames else None
    at, wait = found
    return wait, frames[at if wait.waited_for else 0]


def _awaited(each: Standing, standing: Sequence[Standing]) -> set[int]:
    """Return the processes of the same server for which one waits."""
    workers = [other for other in standing if other.role == "worker" and _same_engine(each, other)]
    engines = [other for other in standing if other.role == "engine"]
    match each.waited_for:
        case "ranks":
            found = [other for other in workers if other.waited_for != "ranks"]
        case "workers":
            found = [other for other in workers if other.waited_for != "engine"]
        case "engine":
            found = [other for other in engines if _same_engine(each, other)]
        case "replicas":
            found = [other for other in engines if other.waited_for != "replicas"]
        case _:
            found = []
    return {other.pid for other in found if other.pid != each.pid}


def _same_engine(one: Standing, other: Standing) -> bool:
    return not one.engine or not other.engine or one.engine == other.engine


@cache
def waits() -> tuple[Wait, ...]:
    """Return the waits in the order of their file."""
    return read(PACKAGE / "knowledge" / "waits.toml", tuple[Wait, ...], "wait")
