"""Follow the tracebacks of all processes side by side, since their lines alternate; one that ended a process counts."""

import re
from dataclasses import dataclass

from diag.log.marks import FUNCTIONS, MARKS
from diag.log.parse_line import ParsedLine
from diag.log.patterns import FAILED, RAW

MOST_OPEN = 64
"""Tracebacks of different processes that are followed at a time."""
TRACEBACK = "Traceback (most recent call last):"
MOST_FRAME = 600
"""Characters of a line that are searched for a frame."""
MOST_PLACE = 90
"""Characters of a file's path in the place of an exception."""
MOST_READ = 4_000
"""Characters of an exception: its further lines may make it longer, and each time it is read again."""
_FOLDERS = re.compile(r"^\S{1,400}/(?=[^/\s]{1,120}[:(]\d)")
"""The folders of a source file, before the place in it at which a compiler failed."""
_Key = tuple[str, str, str, str]
"""Process, its PID, the place in vLLM's code that logs it, and the level: equal for all lines of a traceback."""


@dataclass
class ErrorLine:
    """The line of an exception, or another line that gives a reason by itself.

    `number` is its line number in the file, 0 if unknown; `at` is unix time; `cause` is the first exception of its
    chain; `event` is the event that the line shows; `is_entry` is true if the server's own process ended with it;
    `in_step` is true if it was raised in a step of an engine, False also if no frame was logged; `announced` is the
    line above the traceback that announced the end of a process, "" for none; `is_lone` is true without a traceback;
    `frames` is the innermost frame, the innermost one of vLLM, and that of the optional part of vLLM through which it
    was reached: "torch/nn.py:f < vllm/x.py:g < vllm/lora/y.py:h".
    """

    text: str
    number: int
    at: float
    process: str = ""
    cause: str = ""
    event: str = ""
    is_entry: bool = False
    in_step: bool = False
    announced: str = ""
    is_lone: bool = False
    frames: str = ""

    def __post_init__(self) -> None:
        self.text = self.text[:MOST_READ]

    def goes_on(self, text: str) -> bool:
        """Return True if a line below belongs to the message: the rest of its sentence, or the next one."""
        if MARKS.goes_on.match(text) or (
            MARKS.heading.match(self.text)
            and (text.startswith((" ", "\t")) or text[:1].islower() or " " not in text.strip())
        ):
            return True
        return bool(MARKS.unfinished.match(self.text) and MARKS.wrapped.match(text))

    def add(self, text: str) -> None:
        """Add a further line of the message."""
        self.text = f"{self.text} {text}"[:MOST_READ]

    @classmethod
    def of(cls, line: ParsedLine, at: float, event: str = "") -> "ErrorLine":
        """Return a line that gives a reason by itself."""
        return cls(line.text, line.number, at, line.process, event=event)


def _place(frame: re.Match[str]) -> str:
    """Return the file, without the folders above its package, and the function of a frame; "" for other files."""
    module = MARKS.module.match(frame["path"] or frame["notebook"])
    if module is None:
        return ""
    function = frame["function"] or frame["called"].rpartition(".")[2]
    return f"{module[module.lastgroup or 0][-MOST_PLACE:]}:{function}"


def is_of_request(text: str) -> bool:
    """Return True if a line is a frame of a function that handles a client's request."""
    frame = MARKS.frame.search(text[:MOST_FRAME])
    return frame is not None and _handles_request(frame)


def _handles_request(frame: re.Match[str]) -> bool:
    return frame["function"] in FUNCTIONS.request or bool(MARKS.of_request.match(_place(frame)))


def frame_of(text: str) -> str:
    """Return the place of a line that is a frame of a traceback, "" for any other line."""
    frame = MARKS.frame.search(text[:MOST_FRAME])
    return _place(frame) if frame else ""


@dataclass
class _Traceback:
    """A traceback while it is written; `ends` is true if it ends a process, `error` is its exception so far.

    `in_start` is true if a function of a start was seen, `is_torn` if the log begins within the traceback; `feature` is
    the innermost frame of a plugin or an optional part of vLLM.
    """

    announced: str
    ends: bool
    has_head: bool
    in_frames: bool = True
    frame: str = ""
    is_entry: bool = False
    in_step: bool = False
    in_start: bool = False
    in_request: bool = False
    in_script: bool = False
    is_torn: bool = False
    is_chained: bool = False
    is_caused: bool = False
    inner: str = ""
    inner_of_vllm: str = ""
    feature: str = ""
    stopped: ErrorLine | None = None
    error: ErrorLine | None = None
    is_taken: bool = False

    def take_error(self) -> ErrorLine | None:
        """Return the exception, once, when it is known that it ended a process."""
        if self.is_taken or not self.ends or self.error is None:
            return None
        self.is_taken, self.error.is_entry, self.error.announced = True, self.is_entry, self.announced
        self.error.in_step = self.error.in_step or self.announced.startswith("Exception in thread")  # no request enters
        return self.error

    def read(self, line: ErrorLine) -> bool:
        """Read a line; return False if it does not belong to the traceback."""
        if not self.in_frames:
            return self._read_message(line)
        frame = MARKS.frame.search(line.text[:MOST_FRAME])
        if frame:
            self._note_place(frame)
        is_code = self.has_head and bool(self.frame) and not MARKS.exception.match(line.text)
        if not line.text or line.text.startswith((" ", "\t", "-->", "│")) or frame or is_code:
            self.is_entry = self.is_entry or bool(not self.frame and MARKS.entry.match(line.text))
            self.ends = self.ends or self.is_entry
            self.frame = line.text.strip() if line.text.strip(" ^~") else self.frame
            return True
        if not self.frame or not MARKS.exception.match(line.text):
            return False

        self.in_frames = False
        if MARKS.stopped.match(line.text):
            self.stopped = line if line.text.startswith("KeyboardInterrupt") else None
            return True
        if MARKS.bare_name.fullmatch(line.text):  # a bare AssertionError: add the code
            line.text = f"{line.text.rstrip(':')} ({self.frame})"
        if self.error is None:
            self.error = line
        elif self.is_chained:
            cause = self.error.cause or self.error.text
            self.error.text, self.error.number, self.error.cause = line.text, line.number, cause
        if not (self.error.frames and self.is_caused):
            self.error.frames = self.frames
        self.is_chained, self.is_caused, self.error.in_step = False, False, self.at_work
        self.inner = self.inner_of_vllm = self.feature = ""
        return True

    @property
    def at_work(self) -> bool:
        return self.in_step and not self.in_start

    @property
    def frames(self) -> str:
        """The innermost frame so far, vLLM's innermost one, and that of an optional part, without repetition."""
        return " < ".join(dict.fromkeys(filter(None, (self.inner, self.inner_of_vllm, self.feature))))

    def _note_place(self, frame: re.Match[str]) -> None:
        function = frame["function"] or frame["called"].rpartition(".")[2]
        self.in_step = self.in_step or function in FUNCTIONS.step
        self.in_start = self.in_start or function in FUNCTIONS.start
        self.in_script = self.in_script or _place(frame).startswith("vllm/entrypoints/llm.py:")  # no server has it
        self.in_request = not self.in_script and (self.in_request or _handles_request(frame))
        if place := _place(frame):
            self.inner = place
            self.inner_of_vllm = place if MARKS.of_vllm.match(place) else self.inner_of_vllm
            self.feature = place if MARKS.feature.match(place) else self.feature

    def cut_short(self, line: ErrorLine, *, of_engine: bool) -> ErrorLine | None:
        """Return the exception that the last frame's code or V0's line above names, if the log ends before its own.

        `of_engine` is true if a file of vLLM logs it that logs only exceptions of an engine or a worker.
        """
        if self.in_frames and self.announced and not MARKS.says_end.match(self.announced):
            line.text, line.number, line.frames, line.announced = self.announced, 0, self.frames, self.announced
            return line
        named = MARKS.cut_short.match(self.frame) if self.in_frames else None
        ends = self.in_start or self.in_step or self.ends or of_engine  # a request's may have ended nothing
        if named is None or not ends:
            return None
        name = "AssertionError" if named["assertion"] else named["name"]
        line.text, line.frames, line.in_step = f"{name} ({self.frame})", self.frames, self.at_work
        return line

    def _read_message(self, line: ErrorLine) -> bool:
        """Read a line below the exception's own, which may complete its text; False if it is of another record."""
        text, error, is_indented = line.text, self.error, line.text.startswith((" ", "\t"))
        if MARKS.chains.match(text):
            self.is_chained, self.is_caused = True, "direct cause" in text
        elif self.is_chained and error is not None and MARKS.lone.match(text):  # the paste lost its frames
            error.text, error.number, error.cause, self.is_chained = text, line.number, error.cause or error.text, False
        elif error is not None and MARKS.wrapper.match(error.text):
            if frame := MARKS.frame.search(text[:MOST_FRAME]):
                self._note_place(frame)
            elif MARKS.lone.match(text):
                error.text, error.number, error.frames, error.in_step = text, line.number, self.frames, self.at_work
            return self.has_head or is_indented or not text or bool(MARKS.lone.match(text))
        elif error is not None and MARKS.validation.match(error.text) and MARKS.field.fullmatch(text):
            error.add(f"{text}:")
        elif error is not None and not MARKS.exception.match(text) and error.goes_on(text):
            error.add(text.strip())
        elif error is not None and (MARKS.detail.match(text) or error.text.endswith("Last error:")):
            error.add(_FOLDERS.sub("", text))
        elif text and not is_indented:
            return self.has_head
        return True


class TracebackTracker:
    """Follows the tracebacks of all processes side by side.

    `unannounced` is the exception whose own line was read last, if nothing has shown that a process ended with it;
    `stopped` is that line if it says that a signal stopped the process.
    """

    def __init__(self) -> None:
        self.unannounced: ErrorLine | None = None
        self.stopped: ErrorLine | None = None
        self._wrapped: ErrorLine | None = None
        self._open: dict[_Key, _Traceback] = {}
        self._announced: dict[_Key, str] = {}

    def read(self, line: ParsedLine, at: float) -> ErrorLine | None:
        """Return the exception that ended a process, at its own line; the lines below it may still add to its text."""
        self.unannounced = self.stopped = None
        wrapped, self._wrapped = self._wrapped, None
        if wrapped and line.level == RAW and not line.process and wrapped.goes_on(line.text):
            wrapped.add(line.text.strip())
            self._wrapped = wrapped
            return None
        if line.level not in FAILED:
            return None
        key = (line.process, line.pid, line.source, line.level)
        traceback, is_announced = self._open.get(key), announces_end(line)
        is_headline = is_announced and line.level != RAW and bool(MARKS.headline.search(line.text))
        if is_headline and traceback and not traceback.in_frames:
            del self._open[key]  # of a process with the same PID, before a restart
            traceback = None

        if line.text.startswith(TRACEBACK) or (is_announced and line.text.rstrip().endswith(TRACEBACK)):
            if traceback and not traceback.in_frames and (traceback.is_chained or traceback.has_head):
                traceback.in_frames, traceback.frame = True, ""  # the next one of a chain, or the record's own again
            else:
                if len(self._open) >= MOST_OPEN:
                    self._open.clear()
                told = line.text if is_announced else ""
                announced = self._announced.get(key, told) if line.text.startswith(TRACEBACK) else told
                self._open[key] = _Traceback(announced, bool(announced), has_head=line.level != RAW)
            return None

        if traceback is None and MARKS.frame.match(line.text[:MOST_FRAME].lstrip(" \t│")):  # the log begins within it
            announced = self._announced.get(key, "")
            has_head = line.level != RAW
            traceback = self._open[key] = _Traceback(announced, bool(announced), has_head, is_torn=True)
        error = ErrorLine(line.text.rstrip(), line.number, at, line.process)
        was_in_frames = traceback is not None and traceback.in_frames
        if traceback is not None and traceback.read(error):
            self.stopped = error if traceback.stopped is error else None
            if was_in_frames and not traceback.in_frames and not traceback.ends:
                self.unannounced = traceback.error
                is_part = traceback.is_torn or traceback.in_request
                if self.unannounced is not None and is_part and not (traceback.in_start or traceback.in_step):
                    self.unannounced.is_lone = not MARKS.logs_ends.match(line.source)
            return traceback.take_error()
        error.is_lone = bool(MARKS.lone.match(line.text))
        self.unannounced = error if error.is_lone else None
        self._open.pop(key, None)
        if error.is_lone and line.level != RAW and not is_announced and key in self._announced:  # without its frames
            error.is_lone, error.announced = False, self._announced.pop(key)
            return error
        self._wrapped = self.unannounced  # its reason may follow
        if error.is_lone and MARKS.heading.match(error.text):
            self._open[key] = _Traceback("", False, has_head=False, in_frames=False, error=error)
        error.is_lone = error.is_lone and not MARKS.logs_ends.match(line.source)  # else it ended an engine or a worker
        if len(self._announced) >= MOST_OPEN:
            self._announced.clear()
        self._announced.pop(key, None)
        if is_announced:
            self._announced[key] = line.text
        return None

    def cut_short(self, latest: ParsedLine, at: float) -> ErrorLine | None:
        """Return the exception that the last open traceback names in its code, of a log that ends within it."""
        for (*_, source, _level), traceback in reversed(self._open.items()):
            of_engine = bool(MARKS.logs_ends.match(source))
            error = traceback.cut_short(ErrorLine("", latest.number, at, latest.process), of_engine=of_engine)
            if error is not None:
                return error
        return None


def announces_end(line: ParsedLine) -> bool:
    """Return True if a line announces the exception that ends an engine, a worker, or the process that prints it."""
    if line.level == RAW:
        return bool(MARKS.ends_child.match(line.text))
    return bool(MARKS.ends_process.match(f"{line.source}: {line.text}"))
