"""Interpret the lines of a vLLM server's log in their order: place each in time, doubt it, pass it on to the states.

No files, no clock. A line without a time (uvicorn's, a traceback, a bar) gets the moment at which it was read while the
log is followed live, and the last time seen while an old log is read from its beginning. No line is newer than the
moment at which it was read.
"""

from copy import deepcopy

from diag.core.log_events import ENGINE_START_FAILED
from diag.core.metric_families import Sample
from diag.log.corroboration import MeasuredServer
from diag.log.ending import EndJudge
from diag.log.marks import MARKS
from diag.log.meanings import LineMeanings, PlacedLine
from diag.log.origin import LineOrigin, Phase, RecordTracker
from diag.log.parse_line import AnsweredRequest, ParsedLine
from diag.log.patterns import FAILED, RAW, Pattern
from diag.log.states import ServerStates
from diag.log.tracebacks import TRACEBACK, ErrorLine, TracebackTracker, is_of_request

_BEGINNINGS = ("banner", "hint", "stage", "setting", "progress")
FARTHEST = 3_600.0
"""Seconds that lines in doubt may lead on in time: what stands in them may be a client's."""
_LIBRARY_WARNS = "NCCL WARN ", "CCL_ERROR|"
"""Marks of a line in which NCCL, RCCL or oneCCL says which call failed, above the exception that says that one did."""


def shows_request(line: ParsedLine) -> bool:
    """Return True if a line is one that a server writes while it handles a client's request."""
    is_logged = line.level == "ERROR" and MARKS.logs_request.match(line.source)
    return is_of_request(line.text) or bool(is_logged or MARKS.names_request.match(line.text))


class LogClock:
    """Places lines in unix time by their own times, which may be missing, forged, or those of another host."""

    def __init__(self) -> None:
        self.ahead = 0.0
        """Seconds by which the last line read live that has a time is ahead of the clock: a wrong time zone."""
        self.latest: float | None = None
        """Time of the last line of any kind."""
        self.reached = 0.0
        """Time of the last line that may be the continuation of a text, at most `FARTHEST` behind `latest`."""
        self.before: float | None = None
        """Time of the last line that has one."""
        self.newest = 0.0

    @property
    def end(self) -> float:
        """Time of the last line, also of one that may be the continuation of a client's text; 0 for none."""
        return max(self.latest or 0.0, self.reached)

    def resolve(self, own: float | None, read_at: float, live: bool) -> float:
        """Return the time of a line, whose own one is None if it has none or that is not believed."""
        if own is not None:
            self.ahead = own - read_at if live else 0.0
            at, before = min(own, read_at), self.before
            if not live and before is not None and before - FARTHEST < at < before:  # of another host
                at = before
            self.before = at
            self.newest = max(self.newest, at)
        else:
            at = read_at if live or self.before is None else self.before
        self.latest = max(at, self.latest or at)
        return at


class LineDoubts:
    """Decides which lines only claim what they say: those that end the server `measured`, or start it anew.

    None is measured: all lines are believed.
    """

    def __init__(self, states: ServerStates, clock: LogClock, records: RecordTracker) -> None:
        self.measured: MeasuredServer | None = None
        self._states = states
        self._clock = clock
        self._records = records

    def phase_of(self, line: ParsedLine, live: bool) -> Phase:
        """Return the phase; a log whose beginning is lost is that of a server at work if the server has answered."""
        phase = self._states.run.phase
        return "serving" if phase == "unknown" and self._is_of_measured(line, live) else phase

    def _is_of_measured(self, line: ParsedLine, live: bool) -> bool:
        """Return True if a line was written since the measured server was started; its own time may be forged."""
        if self.measured is None or self.measured.began is None:
            return False
        if self._states.run.startup.stage is None and self.measured.answered_at is None:
            return False
        return live or self.measured.wrote_at(max(line.at or 0.0, self._clock.newest))

    def is_claim(self, placed: PlacedLine, live: bool) -> bool:
        """Return True if a line ends the server that is measured, or starts it anew, and is not of its own start."""
        pattern, measured, run = placed.pattern, self.measured, self._states.run
        if placed.origin is not LineOrigin.VLLM or measured is None or not self._is_of_measured(placed.line, live):
            return False
        if pattern is None or pattern.kind not in _BEGINNINGS:  # it ends the server, or its start: then none answers
            has_answered = measured.answered_at is not None
            return placed.ends_or_starts and (has_answered or self.phase_of(placed.line, live) == "serving")
        if run.phase == "starting" or (run.phase == "serving" and not placed.ends_or_starts):
            return False
        is_seen = run.begun is not None and measured.wrote_at(run.begun)
        was_at_work = run.phase == "unknown" and self._records.has_foreign
        if is_seen or was_at_work or (live and measured.answered_at is not None):
            return True
        return not measured.starts_at(max(placed.line.at or 0.0, self._clock.newest))


class LogInterpreter:
    """Interprets a log's lines in their order; `file` is the name of the log file, "" if there is none."""

    def __init__(self, file: str) -> None:
        self.clock = LogClock()
        self.states = ServerStates(file)
        self._meanings = LineMeanings(self.states)
        self._records = RecordTracker()
        self._doubts = LineDoubts(self.states, self.clock, self._records)
        self._tracebacks = TracebackTracker()
        self._latest_line: ParsedLine | None = None

    def believing(self) -> "LogInterpreter":
        """Return a copy that believes every line, also those behind client input."""
        measured, self._doubts.measured = self._doubts.measured, None
        other, self._doubts.measured = deepcopy(self), measured
        other._records.doubts = False
        return other

    def doubting(self, measured: MeasuredServer) -> "LogInterpreter":
        """Doubt the lines that end the server measured, or start it anew; return self."""
        self._doubts.measured, self._records.doubts = measured, True
        return self

    def with_server_ended(self, read_at: float, live: bool) -> "LogInterpreter":
        """Return a copy that goes on as if the server had ended and another had been started."""
        other = self.believing()
        other.states.failed = 0
        other.states.begin(other.clock.resolve(None, read_at, live))
        return other

    @property
    def phase(self) -> Phase:
        return self.states.run.phase

    @property
    def judge(self) -> EndJudge:
        """The judge of the log's end as far as it was read."""
        return EndJudge(self.states, self.clock.latest or 0.0)

    def shows_failed_start(self, line: ParsedLine, pattern: Pattern | None) -> bool:
        """Return True if a line is of another start, which failed; or of a client that imitates one."""
        if line.form != "line":
            return False
        is_traceback = line.level == RAW and line.text.startswith(TRACEBACK)
        is_failure = pattern is not None and pattern.name == ENGINE_START_FAILED
        return is_failure or (is_traceback and not self._records.has_process(line.pid))

    def take_request(self, request: AnsweredRequest, line: ParsedLine, read_at: float, live: bool) -> bool:
        """Interpret a line of uvicorn's access log; return True if uvicorn is certain to have written it.

        It has no head, so one behind a text without an end may be a part of that: a client's.
        """
        clock = line.at if line.stamped else read_at if live else None
        is_doubted = self.phase == "serving" and self._records.is_within_text(clock)
        self.states.take_request(request, self.clock.resolve(line.at, read_at, live), is_doubted)
        return not is_doubted

    def take(self, line: ParsedLine, pattern: Pattern | None, read_at: float, live: bool) -> PlacedLine | None:
        """Interpret a line that shows `pattern`; if `live`, a line without a time gets `read_at`.

        Return a line that only claims what it says, and was not interpreted.
        """
        states, clock, writers = self.states, self.clock, self.states.writers
        if writers.is_script and not writers.has_api_server:  # without clients, what stands behind its bar is vLLM's
            line = line._replace(form="line") if line.form == "inside" else line
        self._latest_line = line
        self._meanings.note_line(line, pattern)
        phase = states.run.phase
        known_phase = self._doubts.phase_of(line, live)
        origin = self._records.origin(line, pattern, known_phase, read_at if live else None, clock.before)
        if origin is LineOrigin.DOUBTED and line.at is not None and clock.latest is not None:
            clock.reached = max(clock.reached, min(line.at, clock.latest + FARTHEST))
        is_first = phase == "unknown" and not live and clock.before is None  # no other line has told a time
        own = line.at if line.stamped or is_first or origin not in (LineOrigin.QUOTED, LineOrigin.DOUBTED) else None
        at, is_known = clock.resolve(own, read_at, live), self._records.has_process(line.pid)
        if line.level == "ERROR" and line.source:
            states.answers.read_error(line.text, at)
        placed = PlacedLine(line, pattern, origin, at, None, is_known)
        writers.handles_request = writers.handles_request or (phase == "unknown" and shows_request(line))
        is_at_work = phase == "serving" or (phase == "unknown" and writers.handles_request)
        if is_at_work and (line.level in FAILED or origin is LineOrigin.DOUBTED):
            self._meanings.note_request_error(line, at, is_known=is_known)
        if line.level in FAILED and phase != "starting":
            self._meanings.note_complaint(line, at)
        is_of_process = is_known and bool(line.pid)  # which no client is certain to know
        if any(mark in line.text for mark in _LIBRARY_WARNS) and (phase != "serving" or is_of_process):
            states.run.root_cause.warn(ErrorLine.of(line, at))
        if origin is LineOrigin.DOUBTED:
            return placed if placed.ends_or_starts else None
        is_of_shutdown = states.run.was_stopped and is_known
        if not is_of_shutdown and (origin is not LineOrigin.QUOTED or phase == "unknown"):
            error = self._tracebacks.read(line, at)
            placed = placed._replace(error=None if origin is LineOrigin.QUOTED else error)
            self._meanings.note_exception(placed, error, self._tracebacks)
        if self._doubts.is_claim(placed, live):
            return placed
        self.interpret(placed)
        return None

    def interpret(self, placed: PlacedLine) -> None:
        """Interpret a line whatever it claims."""
        self._meanings.interpret(placed)

    def finish(self) -> None:
        """Take the end of the log for that of the server if its last word is an exception, a death, or a long wait."""
        line, at = self._latest_line, self.clock.latest or 0.0
        self.judge.finish(self._tracebacks.cut_short(line, at) if line else None)

    def samples(self, now: float) -> list[Sample]:
        samples = self.states.samples(now)
        if self.clock.latest is not None:
            samples.append(("diag_vllm_log_last_line_timestamp_seconds", (), self.clock.latest))
        return samples
