"""Rules for every target and input: no exception except diag's errors, bounded time and memory, no secret shown."""

import resource
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fuzz.targets import ANSWERS, MARKER, Target

LATE = "s of CPU time"
MOST_GROWTH = 200 * 10**6
"""Bytes by which one input may raise the peak of the process' memory."""


class Find(AssertionError):
    """An input that a target did not take as it has to; `trace` says where, shortened."""

    def __init__(self, what: str, trace: str = "") -> None:
        super().__init__(f"{what}\n{trace}".strip())
        self.what = what


class TooSlow(BaseException):
    """More CPU time than any input may take; no handler of diag's catches it."""


def examine(target: Target, text: bytes) -> None:
    """Show one input; Find where that raises what is no answer, takes too long or much memory, or shows the secret."""
    before = peak()
    try:
        with _limited(target.seconds):
            shown = target.shows(text)
    except ANSWERS as error:
        shown = str(error)
    except TooSlow as error:
        raise Find(f"took more than {target.seconds:g} {LATE} in {_place(error)}", _trace(error)) from None
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever it is: that is what is looked for
        raise Find(f"{type(error).__name__} in {_place(error)}", _trace(error)) from None
    if MARKER in shown:
        raise Find(f"shows the secret: {_before(shown)}")
    if peak() - before > MOST_GROWTH:
        raise Find(f"took more than {MOST_GROWTH // 10**6} MB of memory")


def shrunk(target: Target, text: bytes, what: str, seconds: float = 10.0) -> bytes:
    """A shorter input of which the same is found: without half, a quarter, ... of its lines, then of its bytes."""
    end = time.monotonic() + seconds
    for apart in (b"\n", b""):
        parts = text.split(apart) if apart else [text[at : at + 1] for at in range(len(text))]
        size = len(parts) // 2
        while size:
            shorter = (parts[:at] + parts[at + size :] for at in range(0, len(parts), size) if time.monotonic() < end)
            found = next((rest for rest in shorter if _found(target, apart.join(rest)) == what), None)
            parts, size = (parts, size // 2) if found is None else (found, size)
        text = apart.join(parts)
    return text


def peak() -> int:
    """Bytes of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _found(target: Target, text: bytes) -> str:
    try:
        examine(target, text)
    except Find as find:
        return find.what
    return ""


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error, limit=-8, chain=False))


def _place(error: BaseException) -> str:
    """The function of diag's that it was raised in, or that called what raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/diag/" in frame.filename]
    return f"{frames[-1].filename.rpartition('/diag/')[2]}:{frames[-1].name}" if frames else "the target itself"


def _before(shown: str) -> str:
    at = shown.index(MARKER)
    return shown[max(0, at - 60) : at].rpartition("\n")[2]


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """CPU time, for other programs may have the machine: the timer also counts ticks that are another program's."""
    end = time.process_time() + seconds

    def late(_: int, __: FrameType | None) -> None:
        if (left := end - time.process_time()) <= 0:
            raise TooSlow
        signal.setitimer(signal.ITIMER_PROF, left)

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
