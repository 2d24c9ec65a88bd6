"""Follow the tracebacks of all processes side by side, since their lines alternate; one that ended a process counts."""

import re
from dataclasses import dataclass

from diag.log.parse_line import ParsedLine
from diag.log.patterns import FAILED, RAW

MOST_OPEN = 64
"""Tracebacks of different processes that are followed at a time."""
TRACEBACK = "Traceback (most recent call last):"
_ENDS_PROCESS = re.compile(
    r"core\.py:\d+: EngineCore (?:failed to start|encountered a fatal error|hit an exception)"
    r"|(?:multiproc_executor|ray_executor\w*)\.py:\d+: (?:Ray)?WorkerProc (?:failed to start|hit an exception)"
    r"|multiproc_worker_utils\.py:\d+: Exception in worker |worker_base\.py:\d+: Error executing method "
    r"|async_llm_engine\.py:\d+: Engine background task failed|engine\.py:\d+: "
)
"""vLLM's line above a traceback that ends an engine or a worker, behind the file that logs it."""
_HEADLINE = re.compile(r"(?:failed to start|encountered a fatal error|hit an exception)\b")
"""The announcement, not a further line of the traceback that it announces."""
_ENDS_CHILD = re.compile(r"Process [\w-]{1,80}:$")
"""Python's line above the traceback that ends a child process."""
_ENTRY = re.compile(
    r' +File "(?:<frozen runpy>|.{0,300}/runpy\.py|.{0,300}/bin/vllm|.{0,300}/api_server\.py", line \d+, in <module>)'
)
"""The first frame of a traceback that ends the server's own process."""
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w{0,80}\.(?:[\w.]{0,120}\.)?[A-Z]\w{0,80}|socket\.\w{1,40}"
    r"|\w{0,80}(?:Error|Exception|Exit|Interrupt|Iteration|Expired))(?:\(\w{1,80}\))?(?:: |:?$)"
)
_LONE = re.compile(
    r"(?:\[\w{1,60}\.py:\d{1,6}\] )?(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Za-z_]\w{0,80}(?:Error|Exception)(?:: |$)"
)
"""An exception whose traceback is not logged above it."""
_FRAME = re.compile(
    r'File "(?P<path>[^"]{1,300})", line \d+, in (?P<function>[\w<>]{1,80})'
    r"|(?:File )?(?P<notebook>[~/][^\s:]{1,300}\.py)(?::\d+)?,? in (?P<called>[\w<>.]{1,120})"
)
"""A frame of a traceback, also as a notebook prints it; a paste may have lost the blanks before it."""
_STEP = frozenset({"run_busy_loop", "_process_engine_step", "step_fn", "step", "execute_model", "output_handler"})
"""Functions of an engine at work; none of them is called by a start."""
_MODULE = re.compile(
    r".*/(?P<plugin>tpu_inference/[^/]+/.+)|.*/(?:(?:site|dist)-packages|huggingface/modules)/(?P<installed>.+)"
    r"|.*/(?P<checkout>vllm(?:_\w{1,30})?/.+)|.*/lib/python3\.\d+/(?P<stdlib>.+)"
)
"""A file of an installed package, of a checkout of vLLM or of a plugin, or of Python, without the folders above it."""
_FEATURE = re.compile(
    r"(?:vllm_\w{1,30}|tpu_inference)/|vllm/(?:v1/(?:worker/gpu/)?spec_decode|lora|distributed/(?:kv_transfer|eplb)|v1/kv_offload|v1/structured_output"
    r"|model_executor/models/\S{0,40}(?:eagle|mtp|dflash|dspark|medusa))"
)
"""Plugins, and parts of vLLM that an option turns on: what fails below them is mended there."""
_OF_VLLM = re.compile(r"vllm(?:_\w{1,30})?/")
_CUT_SHORT = re.compile(r"(?P<assertion>assert )|raise (?P<name>[A-Za-z_][\w.]{0,80}(?:Error|Exception))\(")
"""The code of a last frame that names its exception, whose own line is missing."""
_START = frozenset(
    {"load_model", "profile_run", "determine_available_memory", "determine_num_available_blocks", "capture_model"}
    | {"_initialize_kv_caches", "compile_or_warm_up_model", "init_device", "from_engine_args", "from_vllm_config"}
)
"""Functions of a start, which also calls some of a step: to measure its memory it runs the model once."""
_REQUEST = frozenset(
    {"run_asgi", "create_chat_completion", "create_completion", "create_responses", "create_messages"}
    | {"create_embedding", "create_pooling", "create_score", "do_rerank", "create_transcription", "create_classify"}
    | {"chat_completion_stream_generator", "chat_completion_full_generator", "completion_stream_generator"}
    | {"render_chat_request", "extract_tool_calls", "extract_tool_calls_streaming", "extract_reasoning_streaming"}
)
"""Functions of the API server that handle a request."""
_BARE_NAME = re.compile(r"[\w.]+:? ?")
_STOPPED = re.compile(r"KeyboardInterrupt|SystemExit|asyncio\.exceptions\.CancelledError")
_CHAINS = re.compile(r"During handling of the above exception|The above exception was the direct cause")
_HEADING = re.compile(r".*(?::|\d validation errors? for \S{1,100})$", re.DOTALL)
"""An exception's first line if the reason follows in the next one."""
_WRAPPER = re.compile(
    r"RuntimeError: The following operation failed in the TorchScript interpreter\."
    r"|\w{1,40}Error: Traceback \(most recent call last\):"
    r"|(?:ray\.exceptions\.)?RayTaskError\(|.{0,400} raised:$"
)
"""An exception whose reason is another one, in its message."""
_DETAIL = re.compile(
    r"ptxas (?:fatal|error)\b|Search for `hipError\w{1,60}'|Last error:$|\[\s?(?:ERROR|FATAL)\].{0,80}ERR\d{5}"
    r"|.{0,100}\(E[A-Z]\d{4}\): "
)
"""Lines below an exception that say what failed: ptxas, the runtime's name of an error, NCCL's, CANN's."""
_VALIDATION = re.compile(r".*\d validation errors? for \S{1,100}$", re.DOTALL)
_FIELD = re.compile(r"[\w.]{1,80}")
MOST_FRAME = 600
"""Characters of a line that are searched for a frame."""
MOST_PLACE = 90
"""Characters of a file's path in the place of an exception."""
MOST_READ = 4_000
"""Characters of an exception: its further lines may make it longer, and each time it is read again."""
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

    @classmethod
    def of(cls, line: ParsedLine, at: float, event: str = "") -> "ErrorLine":
        """Return a line that gives a reason by itself."""
        return cls(line.text, line.number, at, line.process, event=event)


def _place(frame: re.Match[str]) -> str:
    """Return the file, without the folders above its package, and the function of a frame; "" for other files."""
    module = _MODULE.match(frame["path"] or frame["notebook"])
    if module is None:
        return ""
    function = frame["function"] or frame["called"].rpartition(".")[2]
    return f"{module[module.lastgroup or 0][-MOST_PLACE:]}:{function}"


def is_of_request(text: str) -> bool:
    """Return True if a line is a frame of a function that handles a client's request."""
    frame = _FRAME.search(text[:MOST_FRAME])
    return frame is not None and frame["function"] in _REQUEST


def frame_of(text: str) -> str:
    """Return the place of a line that is a frame of a traceback, "" for any other line."""
    frame = _FRAME.search(text[:MOST_FRAME])
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
        return self.error

    def read(self, line: ErrorLine) -> bool:
        """Read a line; return False if it does not belong to the traceback."""
        if not self.in_frames:
            return self._read_message(line)
        frame = _FRAME.search(line.text[:MOST_FRAME])
        if frame:
            self._note_place(frame)
        is_code = self.has_head and bool(self.frame) and not _EXCEPTION.match(line.text)
        if not line.text or line.text.startswith((" ", "\t", "-->")) or frame or is_code:
            self.is_entry = self.is_entry or bool(not self.frame and _ENTRY.match(line.text))
            self.ends = self.ends or self.is_entry
            self.frame = line.text.strip() if line.text.strip(" ^~") else self.frame
            return True
        if not self.frame or not _EXCEPTION.match(line.text):
            return False

        self.in_frames = False
        if _STOPPED.match(line.text):
            self.stopped = line if line.text.startswith("KeyboardInterrupt") else None
            return True
        if _BARE_NAME.fullmatch(line.text):  # a bare AssertionError: add the code
            line.text = f"{line.text.rstrip(':')} ({self.frame})"
        if self.error is None:
            self.error = line
        elif self.is_chained:
            cause = self.error.cause or self.error.text
            self.error.text, self.error.number, self.error.cause = line.text, line.number, cause
        if not (self.error.frames and self.is_caused):
            self.error.frames = self.frames
        self.is_chained, self.is_caused, self.error.in_step = False, False, self.in_step and not self.in_start
        self.inner = self.inner_of_vllm = self.feature = ""
        return True

    @property
    def frames(self) -> str:
        """Return the innermost frame so far, vLLM's innermost one, and that of an optional part, without repetition."""
        return " < ".join(dict.fromkeys(filter(None, (self.inner, self.inner_of_vllm, self.feature))))

    def _note_place(self, frame: re.Match[str]) -> None:
        function = frame["function"] or frame["called"].rpartition(".")[2]
        self.in_step, self.in_start = self.in_step or function in _STEP, self.in_start or function in _START
        place = _place(frame)
        if not place:
            return
        self.inner = place
        self.inner_of_vllm = place if _OF_VLLM.match(place) else self.inner_of_vllm
        self.feature = place if _FEATURE.match(place) else self.feature

    def cut_short(self, line: ErrorLine) -> ErrorLine | None:
        """Return the exception that the last frame's code names, if the log ends before the exception's own line."""
        named = _CUT_SHORT.match(self.frame) if self.in_frames else None
        if named is None or not (self.in_start or self.in_step or self.ends):  # a request's may have ended nothing
            return None
        name = "AssertionError" if named["assertion"] else named["name"]
        line.text, line.frames, line.in_step = f"{name} ({self.frame})", self.frames, self.in_step and not self.in_start
        return line

    def _read_message(self, line: ErrorLine) -> bool:
        """Read a line below the exception's own, which may complete its text."""
        text = line.text
        is_indented = text.startswith((" ", "\t"))
        if _CHAINS.match(text):
            self.is_chained, self.is_caused = True, "direct cause" in text
        elif self.error is not None and _WRAPPER.match(self.error.text):
            if frame := _FRAME.search(text[:MOST_FRAME]):
                self._note_place(frame)
            elif _LONE.match(text):
                self.error.text, self.error.number, self.error.frames = text, line.number, self.frames
                self.error.in_step = self.in_step and not self.in_start
            return self.has_head or is_indented or not text or bool(_LONE.match(text))
        elif self.error is not None and _HEADING.match(self.error.text) and is_indented:
            self.error.text = f"{self.error.text} {text.strip()}"[:MOST_READ]
        elif self.error is not None and (_DETAIL.match(text) or self.error.text.endswith("Last error:")):
            self.error.text = f"{self.error.text} {text}"[:MOST_READ]
        elif self.error is not None and _VALIDATION.match(self.error.text) and _FIELD.fullmatch(text):
            self.error.text = f"{self.error.text} {text}:"[:MOST_READ]
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
        self._open: dict[_Key, _Traceback] = {}
        self._announced: dict[_Key, str] = {}

    def read(self, line: ParsedLine, at: float) -> ErrorLine | None:
        """Return the exception that ended a process, at its own line; the lines below it may still add to its text."""
        self.unannounced = self.stopped = None
        if line.level not in FAILED:
            return None
        key = (line.process, line.pid, line.source, line.level)
        traceback, is_announced = self._open.get(key), announces_end(line)
        if is_announced and line.level != RAW and traceback and not traceback.in_frames and _HEADLINE.search(line.text):
            del self._open[key]  # of a process with the same PID, before a restart
            traceback = None

        if line.text.startswith(TRACEBACK) or (is_announced and line.text.rstrip().endswith(TRACEBACK)):
            if traceback and not traceback.in_frames and (traceback.is_chained or traceback.has_head):
                traceback.in_frames, traceback.frame = True, ""  # the next one of a chain, or the record's own again
            else:
                if len(self._open) >= MOST_OPEN:
                    self._open.clear()
                announced = line.text if is_announced else self._announced.get(key, "")
                self._open[key] = _Traceback(announced, bool(announced), has_head=line.level != RAW)
            return None

        if traceback is None and _FRAME.match(line.text[:MOST_FRAME].lstrip()):  # the log begins within a traceback
            traceback = self._open[key] = _Traceback("", False, has_head=line.level != RAW, is_torn=True)
        error, was_in_frames = (
            ErrorLine(line.text.rstrip(), line.number, at, line.process),
            traceback and traceback.in_frames,
        )
        if traceback is not None and traceback.read(error):
            self.stopped = error if traceback.stopped is error else None
            if was_in_frames and not traceback.in_frames and not traceback.ends:
                self.unannounced = traceback.error
                if self.unannounced is not None and traceback.is_torn and not (traceback.in_start or traceback.in_step):
                    self.unannounced.is_lone = True
            return traceback.take_error()
        error.is_lone = is_exception(line.text)
        self.unannounced = error if error.is_lone else None
        self._open.pop(key, None)
        if len(self._announced) >= MOST_OPEN:
            self._announced.clear()
        self._announced.pop(key, None)
        if is_announced:
            self._announced[key] = line.text
        return None

    def cut_short(self, latest: ParsedLine, at: float) -> ErrorLine | None:
        """Return the exception that the last open traceback names in its code, of a log that ends within it."""
        for traceback in reversed(self._open.values()):
            error = traceback.cut_short(ErrorLine("", latest.number, at, latest.process))
            if error is not None:
                return error
        return None


def is_exception(text: str) -> bool:
    """Return True if a line is that of an exception, whether or not a traceback stands above it."""
    return bool(_LONE.match(text))


def is_raised(text: str) -> bool:
    """Return True if a line below the frames of a traceback is that of its exception, of a class of any name."""
    return bool(_EXCEPTION.match(text))


def announces_end(line: ParsedLine) -> bool:
    """Return True if a line announces the exception that ends an engine, a worker, or the process that prints it."""
    if line.level == RAW:
        return bool(_ENDS_CHILD.match(line.text))
    return bool(_ENDS_PROCESS.match(f"{line.source}: {line.text}"))
