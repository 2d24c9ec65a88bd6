"""Decide whether vLLM wrote a line.

Prompts, request ids, names of models and texts of exceptions are logged with their line breaks and imitated heads. vLLM
repeats a record's head on each of its lines, so a line with the head of an earlier one continues that record, and a
line counts if its file logs that text. An exception that the web server prints has no head and no end: lines within
seconds of it may be a part of it. Before the server listens, no client can have sent anything.
"""

from enum import Enum
from typing import Literal, NamedTuple

from diag.log.marks import MARKS
from diag.log.parse_line import ParsedLine
from diag.log.patterns import FAILED, RAW, Pattern
from diag.log.tracebacks import TRACEBACK, announces_end


def is_of_vllm(line: ParsedLine) -> bool:
    """Return True if a line has a head of vLLM's, or of a process that vLLM names: torch and NCCL name none."""
    return bool(line.source) and (line.form == "json" or bool(line.pid) or line.head.startswith(_LEVELS))


Phase = Literal["unknown", "starting", "serving"]
MOST_RECORDS, MOST_PIDS = 32, 4096
"""Records that may be open at a time, and processes of one server."""
QUIET = 2.0
"""Seconds behind a text without an end after which a line is no part of it."""
_STARTUP_KINDS = frozenset({"banner", "hint", "stage", "progress", "setting"})
_LEVELS = ("DEBUG ", "INFO ", "WARNING ", "ERROR ", "CRITICAL ")


class LineOrigin(Enum):
    """The author of a line: vLLM; unproven, though it looks like vLLM's; another text that quotes it; or doubted, since
    it may be the continuation of a text without an end.
    """

    VLLM = 1
    UNPROVEN = 2
    QUOTED = 3
    DOUBTED = 4


class _Record(NamedTuple):
    """An open log record: the pattern of its first line; `ends` is true if that line announces the end of a process."""

    pattern: Pattern | None
    ends: bool
    is_blank: bool
    has_traceback: bool = False


class RecordTracker:
    """Tracks the open records of a log, line by line, and decides whether vLLM wrote a line."""

    def __init__(self) -> None:
        self._open: dict[str, _Record] = {}
        self._pids: set[str] = set()
        self.doubts = True
        """False to take lines behind a text without an end for vLLM's."""
        self.has_foreign = False
        """True if a text without an end was seen outside of a start."""
        self._endless: tuple[float | None, float | None] | None = None
        """When a text without an end began by the clock, and the time of the line before it."""

    def origin(
        self, line: ParsedLine, pattern: Pattern | None, phase: Phase, read_at: float | None, latest: float | None
    ) -> LineOrigin:
        """Return the origin of a line; `read_at` is unix time if it is read live, `latest` the time of the line before.

        A line that stands inside another one, or within seconds of a text without an end, is quoted.
        """
        is_foreign = line.level != RAW or (pattern is None and bool(MARKS.foreign.match(line.text)))
        is_foreign = is_foreign and line.form == "line" and not line.source and line.level in FAILED
        self.has_foreign = self.has_foreign or (is_foreign and phase != "starting")
        if phase == "serving":
            clock = line.at if line.stamped else read_at
            is_quoted = line.form == "inside"
            is_doubted = not is_quoted and self.is_within_text(clock)
            if self._endless is not None and is_doubted:
                # a line's own time may be a part of the text too, so it ends the text for later lines at most
                began, before = self._endless
                before = line.at if before is None else before  # the first line of a log whose beginning is lost
                is_known = not self._pids or line.pid in self._pids
                is_later = is_known and line.source and line.at is not None and line.at - (before or 0.0) >= QUIET
                self._endless = None if clock is None and is_later else (began, before)
            if is_foreign:
                self._endless = clock, latest
            if is_quoted or is_doubted:
                return LineOrigin.QUOTED if is_quoted else LineOrigin.DOUBTED
        if line.source and line.form != "foreign":
            return self._origin_by_head(line, pattern, phase)

        if pattern is not None and pattern.kind == "serves" and pattern.logger:
            return LineOrigin.QUOTED  # statistics without the head of the file that logs them
        is_engine = line.form == "line" and line.pid and line.pid in self._pids and not line.is_of_api_server
        if phase != "serving" or is_engine or pattern is None or pattern.kind == "serves":
            return LineOrigin.VLLM
        if pattern.kind in ("event", "fatal"):
            return LineOrigin.UNPROVEN
        is_uvicorn = not pattern.logger and line.form != "foreign" and (pattern.kind != "stage" or line.level != RAW)
        return LineOrigin.VLLM if is_uvicorn else LineOrigin.QUOTED

    def is_within_text(self, clock: float | None) -> bool:
        """Return True if a line may continue a text without an end; `clock` is when it was written, None if unknown."""
        if self._endless is None or not self.doubts:
            return False
        began, _ = self._endless
        if clock is not None and (began is None or clock - began >= QUIET):
            self._endless = None
        return self._endless is not None

    def has_process(self, pid: str) -> bool:
        """Return True if a process of the start has that PID; "" in releases that log no PID."""
        return pid in self._pids

    def _origin_by_head(self, line: ParsedLine, pattern: Pattern | None, phase: Phase) -> LineOrigin:
        """Return the origin of a line with a head: by the record that it continues, else by the file that logs it."""
        is_vllm_head = is_of_vllm(line)
        says_end = line.level in FAILED and (
            announces_end(line) or line.text.startswith("AsyncLLM output_handler failed")
        )
        is_logged_by_file = pattern is not None and line.file in pattern.logger.split()

        record = self._open.get(line.head)
        if record is None:
            if len(self._open) >= MOST_RECORDS:
                del self._open[next(iter(self._open))]
            self._open[line.head] = _Record(pattern, says_end, not line.text or line.text.isspace())
            if phase == "starting" and is_vllm_head and len(self._pids) < MOST_PIDS:
                self._pids.add(line.pid)
        if phase == "starting":
            return LineOrigin.VLLM

        if record is not None:
            if line.text.startswith(TRACEBACK):
                self._open[line.head] = record._replace(has_traceback=True)
            if record.ends:
                continues = pattern is None or not pattern.logger or is_logged_by_file
            elif record.is_blank:  # of the logo
                continues = pattern is None or pattern.name in ("logo", "model")
            elif pattern is None or record.pattern is None:
                continues = False
            else:
                is_event = record.has_traceback and pattern.record_event == record.pattern.name != ""
                continues = pattern == record.pattern or is_event
            return LineOrigin.VLLM if continues else LineOrigin.QUOTED  # else the record quotes a text
        if pattern is None or (phase == "unknown" and pattern.kind in _STARTUP_KINDS):
            return LineOrigin.VLLM
        if pattern.aborts:
            return LineOrigin.UNPROVEN
        if not (is_logged_by_file if pattern.logger else pattern.kind in _STARTUP_KINDS or says_end):
            return LineOrigin.QUOTED
        is_known = not self._pids or line.pid in self._pids or pattern.kind != "event" or not is_vllm_head
        return LineOrigin.VLLM if is_known else LineOrigin.UNPROVEN
