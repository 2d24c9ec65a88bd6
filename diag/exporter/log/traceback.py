"""Tracebacks in a log of several processes, as far as they end a process: which exception, and what it came from."""

import re
from dataclasses import dataclass

from diag.core.lazy_regex import lazy
from diag.exporter.log.line import Line
from diag.exporter.log.pattern import FAILED, RAW

MOST_OPEN = 64
"""Tracebacks of different processes that are followed at a time."""
TRACEBACK = "Traceback (most recent call last):"
_OPENS = lazy(
    r"core\.py:\d+: EngineCore (?:failed to start|encountered a fatal error|hit an exception)"
    r"|(?:multiproc_executor|ray_executor\w*)\.py:\d+: (?:Ray)?WorkerProc (?:failed to start|hit an exception)"
    r"|multiproc_worker_utils\.py:\d+: Exception in worker |worker_base\.py:\d+: Error executing method "
    r"|async_llm_engine\.py:\d+: Engine background task failed|engine\.py:\d+: "
)
"""What vLLM writes above a traceback that ends an engine or a worker, behind the file that writes it."""
_CHILD = lazy(r"Process [\w-]{1,80}:$")
"""What Python writes above the traceback that ends a child process."""
_ENTRY = lazy(
    r' +File "(?:<frozen runpy>|.{0,300}/runpy\.py|.{0,300}/bin/vllm|.{0,300}/api_server\.py", line \d+, in <module>)'
)
"""The first frame of a traceback that ends the server's own process."""
_EXCEPTION = lazy(
    r"(?:[A-Za-z_]\w{0,80}\.[\w.]{1,120}|\w{0,80}(?:Error|Exception|Exit|Interrupt|Iteration|Expired))(?:: |:?$)"
)
_SAYS_NAME = lazy(r"[\w.]+:? ?")
_STOPPED = lazy(r"KeyboardInterrupt|SystemExit|asyncio\.exceptions\.CancelledError")
_CHAINS = lazy(r"During handling of the above exception|The above exception was the direct cause")
_HEADING = lazy(r".*(?::|\d validation errors? for \S{1,100})$", re.DOTALL)
"""An exception's first line that leaves what matters to the next."""
_VALIDATION = lazy(r".*\d validation errors? for \S{1,100}$", re.DOTALL)
_FIELD = lazy(r"[\w.]{1,80}")
MOST_READ = 4_000
"""Characters of an exception: what a traceback leaves to its further lines makes it longer, and it is read again."""
_Key = tuple[str, str, str, str]
"""Process, its PID, the place in vLLM's code that logs it, and the level: lines of one traceback have the same."""


@dataclass
class Raised:
    """An exception's own line, or another line that stands for itself.

    `number` is that of the line in its file, 0 where it is not known; `at` is unix time; `cause` is the first exception
    of its chain; `event` the event of the table that the line shows; `is_entry` says that the server's own process
    ended with it.
    """

    text: str
    number: int
    at: float
    process: str = ""
    cause: str = ""
    event: str = ""
    is_entry: bool = False

    def __post_init__(self) -> None:
        self.text = self.text[:MOST_READ]


@dataclass
class _Traceback:
    """One that is being written; `ends` says that it ends a process, `raised` is what it came to so far."""

    ends: bool
    has_head: bool
    in_frames: bool = True
    frame: str = ""
    is_entry: bool = False
    is_chained: bool = False
    raised: Raised | None = None
    is_told: bool = False

    def told(self) -> Raised | None:
        """The exception, once, when it is known that it ended a process."""
        if self.is_told or not self.ends or self.raised is None:
            return None
        self.is_told, self.raised.is_entry = True, self.is_entry
        return self.raised

    def read(self, line: Raised) -> bool:
        """Take a line; whether it belongs to it."""
        return self._in_frames(line) if self.in_frames else self._in_message(line.text)

    def _in_frames(self, line: Raised) -> bool:
        text = line.text
        if text.startswith((" ", "\t")):
            self.is_entry = self.is_entry or bool(not self.frame and _ENTRY.match(text))
            self.ends = self.ends or self.is_entry
            self.frame = text.strip() if text.strip(" ^~") else self.frame
            return True
        if not self.frame or not _EXCEPTION.match(text):
            return False
        self.in_frames = False
        if not _STOPPED.match(text):
            self._raise(line)
        return True

    def _raise(self, line: Raised) -> None:
        if _SAYS_NAME.fullmatch(line.text):  # a bare AssertionError: the code says more
            line.text = f"{line.text.rstrip(':')} ({self.frame})"
        if self.raised is None:
            self.raised = line
        elif self.is_chained:
            cause = self.raised.cause or self.raised.text
            self.raised.text, self.raised.number, self.raised.cause = line.text, line.number, cause
        self.is_chained = False

    def _in_message(self, text: str) -> bool:
        """Of the lines below an exception's own, those that say what it leaves to them."""
        if _CHAINS.match(text):
            self.is_chained = True
        elif self.raised is not None and _HEADING.match(self.raised.text) and text.startswith((" ", "\t")):
            self.raised.text = f"{self.raised.text} {text.strip()}"[:MOST_READ]
        elif self.raised is not None and _VALIDATION.match(self.raised.text) and _FIELD.fullmatch(text):
            self.raised.text = f"{self.raised.text} {text}:"[:MOST_READ]
        elif text and not text.startswith((" ", "\t")):
            return self.has_head
        return True


class Tracebacks:
    """Follows the tracebacks of all processes side by side."""

    def __init__(self) -> None:
        self._open: dict[_Key, _Traceback] = {}
        self._announced: set[_Key] = set()

    def feed(self, line: Line, at: float) -> Raised | None:
        """What ended a process, at its own line; the lines below it may add to its text."""
        if line.level not in FAILED:
            return None
        key = (line.process, line.pid, line.source, line.level)
        is_told_of = announces(line)
        if line.text.startswith(TRACEBACK) or (is_told_of and line.text.endswith(TRACEBACK)):
            self._begin(key, is_told_of or key in self._announced)
            return None
        trace = self._open.get(key)
        if trace is None or not trace.read(Raised(line.text, line.number, at, line.process)):
            self._open.pop(key, None)
            self._announce(key, is_told_of)
            return None
        return trace.told()

    def _begin(self, key: _Key, ends: bool) -> None:
        trace = self._open.get(key)
        if trace is not None and not trace.in_frames and (trace.is_chained or trace.has_head):  # or the same one again
            trace.in_frames, trace.frame = True, ""
            return
        if len(self._open) >= MOST_OPEN:
            self._open.clear()
        self._open[key] = _Traceback(ends, has_head=key[-1] != RAW)

    def _announce(self, key: _Key, announces: bool) -> None:
        """Whether the next line of that kind may begin a traceback that ends a process."""
        if len(self._announced) >= MOST_OPEN:
            self._announced.clear()
        (self._announced.add if announces else self._announced.discard)(key)


def announces(line: Line) -> bool:
    """Whether a line says that an engine or a worker, or the process that prints it, ends with an exception."""
    if line.level == RAW:
        return bool(_CHILD.match(line.text))
    return bool(_OPENS.match(f"{line.source}: {line.text}"))
