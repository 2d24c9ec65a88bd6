"""Interpret the lines of a vLLM server's log in their order: starts, work, failures and ends. No files, no clock.

Time: a line without one (uvicorn's, a traceback, a bar) gets the moment at which it was read while the log is followed
live, and the last time seen while an old log is read from its beginning. No line is newer than the moment at which it
was read.

The end: a process ends with an announced exception, with one of its own entry point, or with a line that says so. Of a
log that is read alone, the last exception after which nothing moves is its end too (`finish`).
"""

import re
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple

from diag.core.log_events import (
    ANSWERS,
    COMPILED_WHILE_SERVING,
    CUT_AT_SHUTDOWN,
    DRAIN_ENDED,
    DRAIN_STARTED,
    ENGINE_DEAD,
    ENGINE_START_FAILED,
    KILLED_BY_SIGNAL,
    ON_DEVICE,
    QUOTED,
    SHM_BROADCAST_WAIT,
    SHUT_DOWN,
    WORKER_DIED,
    EventLine,
    LogContext,
    LogEnding,
    LogState,
)
from diag.core.metric_families import Sample
from diag.log.answers import AnswerCounts
from diag.log.corroboration import LINGERS, RESOLUTION, SURVIVED, MeasuredServer
from diag.log.load_lines import LoadLines, reports_tokens
from diag.log.parse_line import PROGRESS_BAR, AnsweredRequest, ParsedLine
from diag.log.patterns import FAILED, RAW, STAGES, Pattern
from diag.log.recognise import (
    TRACEBACK,
    ErrorLine,
    LineOrigin,
    Phase,
    RecordTracker,
    TracebackTracker,
    frame_of,
    is_exception,
    is_of_request,
    is_of_vllm,
    is_raised,
    read_values,
    recognise,
)
from diag.log.trackers import (
    MOST_NAME,
    MOST_TEXT,
    READY_STAGE,
    SIGNALLED,
    CrashStreak,
    EventCounts,
    LoggedConfig,
    RootCauseTracker,
    StartupProgress,
    informativeness,
    quote,
)
from diag.vllm.routes import asks_for_inference

DEATHS = (ENGINE_DEAD, WORKER_DIED)
_BEGINNINGS = ("banner", "hint", "stage", "setting", "progress")
_UVICORN_STARTS = "Started server process ["
LISTENS = "Starting vLLM "
"""The beginning of the line after which clients can connect."""
_HIT = "EngineCore hit an exception"
"""vLLM up to 0.8.4 logs it of an engine that fails, whether it starts or works."""
_AT_WORK = "EngineCore encountered a fatal error"
FARTHEST = 3_600.0
"""Seconds that lines in doubt may lead on in time: what stands in them may be a client's."""
MOST_PENDING = 64
LONGEST_DRAIN = 3_600.0
"""Seconds: a longer drain is not believed."""
_ENDED_FROM_OUTSIDE = re.compile(
    r"(?:\S{1,200}: line \d{1,9}: +\d{1,10} )?(?:Killed|Terminated)(?:\s+\S.{0,400})?$"
    r"|slurmstepd: error: .{0,80}(?:CANCELLED|oom_kill|DUE TO)"
    r"|.{0,200}resource_tracker: There appear to be \d{1,9} leaked "
    r"|.{0,200}exited with code (?:137|143)$"
)
"""Lines of a shell, of Slurm, of Docker, and of Python's helper process, which outlives the server."""
_WAITS = re.compile(r"Waiting for creating a placement group of specs for ")
"""The start waits until GPUs are added to the Ray cluster."""
_WAITS_FOR_LOCK = re.compile(r"(?:\[aiter\] )?waiting for baton release at ")
"""A rank waits for the compiler of another one, which may have died; the others then wait for the rank."""
_LIBRARY_WARNS = "NCCL WARN ", "CCL_ERROR|"
"""Marks of a line in which NCCL, RCCL or oneCCL says which call failed, above the exception that says that one did."""
_ENGINE_STARTED = "init engine (profile, create kv cache, warmup model) took "
_OF_SCRIPT = re.compile(r"(?:Processed prompts|Adding requests|Rendering (?:prompts|conversations)): +\d{1,3}%")
"""Bars of the class LLM, which scripts use without a server; its own lines are logged by llm.py."""
_OF_SERVER = frozenset({"api_server.py", "api_utils.py", "launcher.py", "run_batch.py"})
_COMPILES = re.compile(r"(?:\[\w+\] )?Compiling a graph for ")
"""torch.compile compiles a graph that no cache has."""


class PlacedLine(NamedTuple):
    """A line with its pattern, author and unix time, and the exception that ended a process if it completes one."""

    line: ParsedLine
    pattern: Pattern | None
    origin: LineOrigin
    at: float
    error: ErrorLine | None


@dataclass
class ServerRun:
    """State of the server by the lines since its latest start; each start begins with a new one."""

    root_cause: RootCauseTracker
    startup: StartupProgress = field(default_factory=StartupProgress)
    config: LoggedConfig = field(default_factory=LoggedConfig)
    begun: float | None = None
    banners: set[str] = field(default_factory=set)
    listens: bool = False
    has_engine: bool = False
    is_dead: bool = False
    ending: set[str] = field(default_factory=set)
    was_told_to_stop: bool = False
    drains_until: float = 0.0
    """Unix time until which the page of a server that drains may come; 0 if it was not told to stop, or at once."""
    cut: Counter[str] = field(default_factory=Counter)
    ended_from_outside: bool = False
    """True if the last line is that of a launcher, a shell or of Python, and says that the server was ended."""
    is_interrupted: bool = False
    """True if a signal interrupted the server before any of its processes had logged another exception."""
    errors: int = 0
    raised: set[str] = field(default_factory=set)
    """Names of the processes that have logged an exception."""
    waits_for: str = ""
    """The line of a rank that waits for a lock, until the start moves."""
    rank_waits: str = ""
    """The line of an engine at work whose ranks wait for each other, until it has generated tokens."""
    aborting: tuple[Pattern, ParsedLine, float] | None = None
    """The first unproven line of a device's runtime that aborts a process."""
    announced: tuple[ErrorLine, int] | None = None
    """An exception announced as the end of a process, behind which no line says that the server ended, and the lines
    that showed work until then.
    """
    abort: tuple[ErrorLine, int] | None = None
    """The line of a device's runtime behind which it aborts the process, and the lines that showed work until then."""
    script_error: ErrorLine | None = None
    """The exception with which a script ended whose engine had started."""


class LogInterpreter:
    """Interprets a log's lines in their order: tracks starts, work, failures and ends of the server.

    Counts and times of events outlive a restart of the server, as do the numbers of the last line of each; phases,
    progress, configuration and root cause are those of the latest start; the last crash keeps its root cause. `file` is
    the name of the log file, "" if there is none.
    """

    def __init__(self, file: str) -> None:
        self.ahead = 0.0
        """Seconds by which the last line read live that has a time is ahead of the clock: a wrong time zone."""
        self.latest: float | None = None
        """Unix time of the last line of any kind."""
        self.reached = 0.0
        """Unix time of the last line that may be the continuation of a text, at most `FARTHEST` behind `latest`."""
        self.starts = 0
        """Starts that the log has shown."""
        self.served = 0
        """Lines that have shown the server at work."""
        self.failed = 0
        """Starts that have failed."""
        self.answers = AnswerCounts()
        self.load = LoadLines()
        self._crashes = CrashStreak()
        self._pid = ""
        self._last_time: float | None = None
        self._newest_time = 0.0
        self._events = EventCounts()
        self._records = RecordTracker()
        self._last_text = ""
        self._is_vllm = self._is_other = False
        """True if a line was logged by a file of vLLM's, or about a route of its API; if uvicorn started before that:
        other servers use it, and have these routes too.
        """
        self._lines: dict[str, tuple[ParsedLine, float]] = {}
        """The last line of each event, and under `ANSWERS` the last exception that ended a request."""
        self._request_frames = self._frames_printed = ""
        self._next_start: list[tuple[Pattern, ParsedLine, float]] = []
        self._tracebacks = TracebackTracker()
        self._file = file
        self._run = ServerRun(RootCauseTracker(file))
        self._crashed = self._run.root_cause
        self._has_api_server = self._is_script = False
        """True if a line is of an API server, and if one is of the class LLM."""
        self._latest_line: ParsedLine | None = None
        self._handles_request = False
        """True if a log whose beginning is lost shows a server that handles a request."""
        self._last_failure: RootCauseTracker | None = None
        """The root cause of the last failed start."""
        self._pending: list[ErrorLine] = []
        """Exceptions outside of a server's work after which nothing has moved: the first of them may have ended it."""
        self.measured: MeasuredServer | None = None
        """The server whose end or new start a line may only claim; None: such lines are believed."""

    def believing(self) -> "LogInterpreter":
        """Return a copy that believes every line, also those behind client input."""
        measured, self.measured = self.measured, None
        other, self.measured = deepcopy(self), measured
        other._records.doubts = False
        return other

    def doubting(self, measured: MeasuredServer) -> "LogInterpreter":
        """Doubt the lines that end the server measured, or start it anew; return self."""
        self.measured, self._records.doubts = measured, True
        return self

    @property
    def config(self) -> LoggedConfig:
        return self._run.config

    @property
    def drains_until(self) -> float:
        """Return the unix time until which the page of a server that drains may come; 0 if it does not drain."""
        return self._run.drains_until

    def stop_draining(self) -> None:
        self._run.drains_until = 0.0

    @property
    def phase(self) -> Phase:
        """Return "serving" once clients can connect; "unknown" for a log whose beginning is lost."""
        if self._run.startup.stage is None:
            return "unknown"
        return (
            "serving"
            if not self._run.startup.has_ended and (self._run.startup.is_ready or self._run.listens)
            else "starting"
        )

    def shows_failed_start(self, line: ParsedLine, pattern: Pattern | None) -> bool:
        """Return True if a line is of another start, which failed; or of a client that imitates one."""
        if line.form != "line":
            return False
        is_traceback = line.level == RAW and line.text.startswith(TRACEBACK)
        is_failure = pattern is not None and pattern.name == ENGINE_START_FAILED
        return is_failure or (is_traceback and not self._records.has_process(line.pid))

    def with_server_ended(self, read_at: float, live: bool) -> "LogInterpreter":
        """Return a copy that goes on as if the server had ended and another had been started."""
        other = self.believing()
        other.failed = 0
        other._begin(other._resolve_time(None, read_at, live))
        return other

    def server_answers(self, at: float) -> None:
        """Note that the server's page came: the start that the log shows has ended, also if no line says so."""
        if self.phase == "starting" and self._run.startup.exists:
            self._serve(at)

    def take_request(self, request: AnsweredRequest, own: float | None, read_at: float, live: bool) -> None:
        """Interpret a line of uvicorn's access log; `own` is its own time."""
        at = self._resolve_time(own, read_at, live)
        self.answers.count(request, at)
        if request.status.startswith("5"):
            self._cut_off("answers", at)
        self._is_vllm = self._is_vllm or (not self._is_other and request.route.startswith("/v1/"))
        is_answer = request.status.startswith("2") and asks_for_inference(request.method, request.route)
        if is_answer and not self.load.engines:  # a stream is answered before its first token: stats lines tell more
            self._run.rank_waits = ""
        self._serve(at)

    def process_ended(self, at: float, by_signal: bool) -> None:
        """Note that the server's process ended, as its supervisor reports: a crash may leave no line."""
        if self._run.startup.has_ended:
            return
        if by_signal:
            self._events.count(KILLED_BY_SIGNAL, at)
        if self._run.startup.is_ready:
            self._run.startup.end(at)
            self._crashes.crash(at)
        else:
            self._run.is_interrupted = False  # the supervisor knows better
            self._fail(at)

    def take(self, line: ParsedLine, pattern: Pattern | None, read_at: float, live: bool) -> PlacedLine | None:
        """Interpret a line that shows `pattern`; if `live`, a line without a time gets `read_at`.

        Return a line that only claims what it says, and was not interpreted.
        """
        self._latest_line = line
        says_failure = pattern is not None and pattern.kind in ("event", "fatal")
        self._is_vllm = self._is_vllm or is_of_vllm(line) or says_failure
        self._note_user(line)
        self._is_other = not self._is_vllm and (self._is_other or line.text.startswith(_UVICORN_STARTS))
        if line.level == RAW and line.form == "line" and _ENDED_FROM_OUTSIDE.match(line.text):
            self._run.ended_from_outside, self._last_text = True, line.text
        elif line.source:
            self._run.ended_from_outside = False
        if line.source or (pattern is not None and pattern.kind == "stage"):
            self._last_text = f"{line.text} ({line.source})" if line.source else line.text
        if self.phase == "starting" and _WAITS_FOR_LOCK.match(line.text):
            self._run.waits_for = line.text
        origin = self._records.origin(
            line, pattern, self._phase_of(line, live), read_at if live else None, self._last_time
        )
        if origin is LineOrigin.DOUBTED and line.at is not None and self.latest is not None:
            self.reached = max(self.reached, min(line.at, self.latest + FARTHEST))
        own = line.at if line.stamped or origin not in (LineOrigin.QUOTED, LineOrigin.DOUBTED) else None
        at = self._resolve_time(own, read_at, live)
        if line.level == "ERROR" and line.source:
            self.answers.read_error(line.text, at)
        placed = PlacedLine(line, pattern, origin, at, None)
        self._handles_request = self._handles_request or (self.phase == "unknown" and is_of_request(line.text))
        is_at_work = self.phase == "serving" or (self.phase == "unknown" and self._handles_request)
        if is_at_work and (line.level in FAILED or origin is LineOrigin.DOUBTED):
            self._note_request_error(line, at)
        if any(mark in line.text for mark in _LIBRARY_WARNS) and (self.phase != "serving" or self._is_of_process(line)):
            self._run.root_cause.warn(ErrorLine(line.text, line.number, at, line.process))
        if origin is LineOrigin.DOUBTED:
            return placed if ends_or_starts(placed) else None
        is_of_shutdown = self._was_stopped and self._records.has_process(line.pid)
        if not is_of_shutdown and (origin is not LineOrigin.QUOTED or self.phase == "unknown"):
            error = self._tracebacks.read(line, at)
            placed = placed._replace(error=None if origin is LineOrigin.QUOTED else error)
            self._note_pending(placed)
            self._run.errors += line.level in ("ERROR", "CRITICAL")
            if error is not None or self._tracebacks.unannounced is not None:
                self._run.raised.add(line.process)
        if self._is_claim(placed, live):
            return placed
        self.interpret(placed)
        return None

    def _note_user(self, line: ParsedLine) -> None:
        """Note whether a server or a script uses the engine."""
        file = line.source.partition(":")[0]
        is_uvicorn = line.text.startswith(_UVICORN_STARTS)
        is_of_server = is_uvicorn or file in _OF_SERVER or line.process.lower().startswith("apiserver")
        self._has_api_server = self._has_api_server or is_of_server
        self._is_script = self._is_script or file == "llm.py" or bool(_OF_SCRIPT.match(line.text))

    @property
    def _runs_script(self) -> bool:
        """Return True if an engine has started, and no line of an API server is in the log."""
        return self._run.has_engine and not self._has_api_server and self.phase == "starting"

    def _is_of_process(self, line: ParsedLine) -> bool:
        """Return True if a line has the head of a process of the start, which no client is certain to know."""
        return bool(line.pid) and self._records.has_process(line.pid)

    def _note_request_error(self, line: ParsedLine, at: float) -> None:
        """Keep the exception of a request that the web server prints, with the frames above it."""
        frame = frame_of(line.text)
        if frame:
            self._frames_printed = frame
        elif is_exception(line.text) or (self._frames_printed and is_raised(line.text)):
            self._lines[ANSWERS], self._request_frames = (line, at), self._frames_printed
            self._frames_printed = ""

    def _note_pending(self, placed: PlacedLine) -> None:
        """Keep an exception that may have ended the start, and a line that says what a start waits for.

        A lone one, behind which vLLM goes on to log, was only printed by a library.
        """
        if placed.line.source and placed.line.level in ("INFO", "WARNING"):
            self._pending = [each for each in self._pending if not each.is_lone]
        stopped = self._tracebacks.stopped
        if (
            stopped is not None and not self._run.raised
        ):  # else vLLM interrupts the other processes because one has failed
            self._run.is_interrupted, self._last_text = True, stopped.text
        error = self._tracebacks.unannounced
        if error is None and _WAITS.match(placed.line.text):  # each such line names a longer time than the last one
            self._pending = [each for each in self._pending if not _WAITS.match(each.text)]
            error = ErrorLine(placed.line.text, placed.line.number, placed.at, placed.line.process)
        is_of_start = self.phase != "serving" and not (self.phase == "unknown" and self._handles_request)
        if error is not None and is_of_start and len(self._pending) < MOST_PENDING:
            error.event = placed.pattern.name if placed.pattern and placed.pattern.kind == "event" else ""
            self._pending.append(error)

    def finish(self) -> None:
        """Take the end of the log for that of the server if its last word is an exception, a death, or a long wait."""
        pending, self._pending = self._pending, []
        if self._runs_script and not any(error.in_step for error in pending) and self._run.announced is None:
            self._end_script(pending)
            return
        self._recall_last_failure()
        if self._run.abort is not None and self._run.abort[1] == self.served and not self._run.is_dead:
            pending = [self._run.abort[0], *pending]
            self._run.abort[0].in_step = self._run.startup.is_ready or self._run.startup.stage is None
        announced, served = self._run.announced or (None, 0)
        if announced is not None and (not self._run.startup.is_ready or (announced.in_step and served == self.served)):
            pending = [announced, *pending]
        elif self._run.startup.is_ready and not any(error.in_step for error in pending):
            return
        elif not pending and not self._run.root_cause.has_reason and self._latest_line is not None:
            error = self._tracebacks.cut_short(self._latest_line, self.latest or 0.0)
            pending = [error] if error else []
        self._is_vllm = self._is_vllm or bool(pending)
        if self._run.startup.has_ended or not (pending or self._run.is_dead):
            if pending and not self._run.root_cause.has_reason:  # the failure is known, and its reason was cut off
                self._give_reason(pending)
            return
        if pending:
            self._give_reason(pending)
            for error in pending:
                pattern = recognise(error.text, "ERROR")
                if pattern is not None and pattern.kind == "event" and pattern.name not in self._events.seen:
                    self._events.read(pattern, error.text, error.at)
        at = pending[0].at if pending else self.latest or 0.0
        if any(error.in_step for error in pending):
            self._die(at)
        else:
            self._fail(at)

    def _end_script(self, pending: Sequence[ErrorLine]) -> None:
        """Note how a script ended whose engine had started; if that ran out of memory, the engine may hold it."""
        if not (pending or self._is_script):
            return
        self._reach(READY_STAGE, self.latest or 0.0)
        if not pending:
            return
        error = self._run.script_error = max(pending, key=lambda each: informativeness(each.text))
        self._last_text = f"{error.text} (line {error.number})" if error.number else error.text
        pattern = recognise(error.text, "ERROR")
        if pattern is not None and pattern.kind == "event" and pattern.name in ON_DEVICE:
            self._give_reason([error])
            self._events.read(pattern, error.text, error.at)

    def _recall_last_failure(self) -> None:
        """Take the root cause of the last failed start if a later one, in which the log ends, has none."""
        if self._last_failure is not None and not self._run.startup.is_ready and not self._run.root_cause.has_reason:
            self._run.root_cause = self._last_failure

    def _die(self, at: float) -> None:
        """Note that an engine at work died; one that works without an API server never logs that it is ready."""
        self._reach(READY_STAGE, at - RESOLUTION)
        self._events.count(ENGINE_DEAD, at)
        self._crashes.crash(at)
        self._run.is_dead = True

    @property
    def reason(self) -> str:
        """Return the text of the line that explains the last failure, "" while none has one."""
        return self._run.root_cause.reason

    @property
    def reason_number(self) -> int:
        """Return the line number of that line, 0 if unknown."""
        return self._run.root_cause.number or self._crashed.number

    @property
    def state(self) -> LogState:
        """Return the state of the server at the last line."""
        startup, was_told = self._run.startup, self._run.was_told_to_stop
        if not self._is_vllm:
            return "lost"
        if startup.has_ended and not startup.is_ready:
            return "shut down" if was_told else "stopped" if self._run.is_interrupted else "failed"
        if self._run.is_dead or startup.has_ended:
            return "dead" if self._run.is_dead else "shut down"
        if (self._run.ended_from_outside or self._run.is_interrupted) and not was_told:
            return "stopped"
        if startup.stage is None:
            return "lost"
        if self._run.script_error is not None:
            return "script failed"
        if self._is_script and startup.is_ready and not self._has_api_server:
            return "run over"
        return "serving" if startup.is_ready else "starting"

    @property
    def ending(self) -> LogEnding:
        """Return the state of the server at the last line, with what is told of it."""
        state, last = self.state, quote(self._run.waits_for or self._last_text, MOST_TEXT)
        file = quote(self._file, MOST_NAME)
        lines = tuple(
            EventLine(
                event,
                quote(line.text, MOST_TEXT),
                file,
                line.number,
                line.process,
                at,
                quote(self._request_frames, MOST_NAME) if event == ANSWERS else "",
            )
            for event, (line, at) in self._lines.items()
        )
        reached, done = self._run.startup.position
        phase, done = (reached, done) if state == "starting" else ("", None)
        context = LogContext(
            platform=self._run.config.platform, phase="" if self._run.startup.stage is None else reached
        )
        latest = self.answers.latest
        return LogEnding(
            state,
            self.latest or 0.0,
            self._run.errors,
            len(self._run.raised),
            last,
            lines,
            phase,
            done,
            context,
            latest.count("5xx"),
            len(latest),
            self.load.words(self.latest or 0.0),
            state == "serving" and self.load.is_still,
            self._run.rank_waits if state == "serving" else "",
        )

    def _give_reason(self, errors: Sequence[ErrorLine]) -> None:
        for error in errors:
            self._run.root_cause.consider(error)
        self._run.root_cause.end()

    def _phase_of(self, line: ParsedLine, live: bool) -> Phase:
        """Return the phase; a log whose beginning is lost is that of a server at work if the server has answered."""
        return "serving" if self.phase == "unknown" and self._is_of_measured(line, live) else self.phase

    def _is_of_measured(self, line: ParsedLine, live: bool) -> bool:
        """Return True if a line was written since the measured server was started; its own time may be forged."""
        if self.measured is None or self.measured.began is None:
            return False
        if self._run.startup.stage is None and self.measured.answered_at is None:
            return False
        return live or self.measured.wrote_at(max(line.at or 0.0, self._newest_time))

    def _is_claim(self, placed: PlacedLine, live: bool) -> bool:
        """Return True if a line ends the server that is measured, or starts it anew, and is not of its own start."""
        pattern, origin, measured = placed.pattern, placed.origin, self.measured
        if origin is not LineOrigin.VLLM or measured is None or not self._is_of_measured(placed.line, live):
            return False
        if pattern is None or pattern.kind not in _BEGINNINGS:  # it ends the server, or its start: then none answers
            has_answered = measured.answered_at is not None
            return ends_or_starts(placed) and (has_answered or self._phase_of(placed.line, live) == "serving")
        if self.phase == "starting" or (self.phase == "serving" and not ends_or_starts(placed)):
            return False
        is_seen = self._run.begun is not None and measured.wrote_at(self._run.begun)
        was_at_work = self.phase == "unknown" and self._records.has_foreign
        if is_seen or was_at_work or (live and measured.answered_at is not None):
            return True
        return not measured.starts_at(max(placed.line.at or 0.0, self._newest_time))

    def _resolve_time(self, own: float | None, read_at: float, live: bool) -> float:
        if own is not None:
            self.ahead = own - read_at if live else 0.0
            at, before = min(own, read_at), self._last_time
            if not live and before is not None and before - FARTHEST < at < before:  # of another host
                at = before
            self._last_time = at
            self._newest_time = max(self._newest_time, at)
        else:
            at = read_at if live or self._last_time is None else self._last_time
        self.latest = max(at, self.latest or at)
        return at

    def interpret(self, placed: PlacedLine) -> None:
        """Interpret a line whatever it claims."""
        line, pattern, origin, at, error = placed
        if origin is LineOrigin.QUOTED:
            return
        if error is not None:
            error.event = pattern.name if pattern and pattern.kind == "event" else ""
            if error.is_entry and self._runs_script:
                self._pending.append(error)
                return
            ends_server = error.is_entry and error.event != ENGINE_START_FAILED
            if ends_server and self._run.startup.has_ended and not self._records.has_process(line.pid):
                self._begin(at)
            for each in (*self._pending, error):
                self._run.root_cause.consider(each)
            if ends_server:  # and its start
                self._run.root_cause.end()
                self._fail(at)
            elif error.announced:
                self._run.announced = error, self.served
            if not ends_server and error.announced.startswith(_HIT) and not self._run.startup.is_ready:
                self._run.root_cause.end()
                (self._die if error.in_step else self._fail)(at)

        if not self._was_stopped and line.text.startswith(SIGNALLED) and line.source.startswith("core.py:"):
            self._run.root_cause.consider(ErrorLine(line.text, line.number, at, line.process))
        if pattern is None:
            return
        if pattern.name == SHM_BROADCAST_WAIT and self._serves:  # a worker of an idle engine waits for its next command
            is_of_engine = line.process.lower().startswith("enginecore")
            if is_of_engine or self.load.has_requests:
                self._run.rank_waits = quote(line.text.partition(". ")[0], MOST_TEXT)
        if pattern.kind == "event" and pattern.aborts and not self._was_stopped:
            self._run.abort = ErrorLine(line.text, line.number, at, line.process, event=pattern.name), self.served
        if origin is LineOrigin.VLLM:
            banners = self._next_start
            if banners and pattern.kind in ("hint", "stage", "setting", "progress") and line.source:
                file, other = (each.source.partition(":")[0] for each in (line, banners[0][1]))
                if file != other:  # the banners did announce a start: its lines are from several files of vLLM's
                    self._next_start = []
                    self._begin(banners[0][2])
                    for banner in banners:
                        self._on_banner(*banner)
            getattr(self, f"_on_{pattern.kind}")(pattern, line, at)
        elif pattern.kind == "event" and not self._was_stopped:
            self._events.note_unproven(pattern.name, at)
            if (
                pattern.aborts
                and self._run.is_dead
                and line.level in (RAW, "WARNING")
                and not self._run.root_cause.has_reason
            ):
                self._on_event(pattern, line, at)  # the kernel's line comes behind that of the death
                return
            is_first = self._run.aborting is None or at - self._run.aborting[2] > SURVIVED
            if pattern.aborts and is_first and line.level in (RAW, "WARNING"):
                self._run.aborting = pattern, line, at

    @property
    def _was_stopped(self) -> bool:
        """True after the server was stopped on purpose: errors that its processes log then are no failure."""
        return self._run.startup.is_ready and self._run.startup.has_ended

    @property
    def _serves(self) -> bool:
        return self._run.startup.is_ready and not self._run.startup.has_ended

    def _on_banner(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        if self._serves and not self._run.is_dead:  # a client may have imitated a banner alone
            self._next_start = [*self._next_start[-9:], (pattern, line, at)]
            return
        again = pattern.name in self._run.banners or (self._run.banners and line.pid != self._pid)
        if not self._run.startup.exists or self._run.startup.stage or again:
            self._begin(at)
        self._run.banners.add(pattern.name)
        self._pid = line.pid
        self._on_setting(pattern, line, at)

    def _on_hint(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        if not self._run.startup.exists:
            self._begin(at)
        self._on_setting(pattern, line, at)

    def _begin(self, at: float) -> None:
        self._crashes.begin(at)
        self.answers.begin()
        self.load.begin()
        if self._crashes.last > (self._run.begun or 0.0):  # the run that ends here crashed
            self._crashed = self._run.root_cause
        if self._run.root_cause.has_reason:
            self._last_failure = self._run.root_cause
        self.starts += 1
        self._run = ServerRun(RootCauseTracker(self._file), StartupProgress(at), begun=at)

    def _reach(self, stage: int, at: float) -> None:
        self._pending.clear()
        self._run.waits_for = ""
        self._run.startup.reach(stage, at)
        if self._serves:
            self._crashes.ready(at)

    def _on_stage(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        if self._serves:
            if line.source.startswith("backends.py:") and _COMPILES.match(line.text):
                self._events.count(COMPILED_WHILE_SERVING, at)
            return
        self._run.listens = self._run.listens or line.text.startswith(LISTENS)
        self._run.has_engine = self._run.has_engine or line.text.startswith(_ENGINE_STARTED)
        name = "profile_memory" if pattern.name == "compile" and not self._run.config.compiles else pattern.name
        stage, bar = STAGES.index(name), PROGRESS_BAR.match(line.text) if line.level == RAW else None
        if bar:
            done, total = (bar["done"], bar["total"]) if bar["done"] else (bar["percent"], 100)
            self._run.startup.draw_bar(stage, bar["what"], int(done), int(total), at)
        else:
            self._reach(stage, at)
        self._run.config.read(pattern, line.text)

    def _on_setting(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        if self._serves:
            return
        self._run.config.read(pattern, line.text)
        self._run.startup.move(at)

    def _on_progress(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        self._pending.clear()
        self._run.waits_for = ""
        self._run.startup.move(at)

    def _on_serves(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        self.load.read(line.text, at, self.answers.succeeded)
        if reports_tokens(line.text):
            self._run.rank_waits = ""
        self._serve(at)

    def _cut_off(self, kind: str, at: float) -> None:
        """Note a request that failed after the server was told to stop.

        A stream that fails before its first token logs both its exception and an answer: the larger number counts.
        While the engine drains, its API server still accepts requests, and answers them with HTTP 500.
        """
        if self._was_stopped and self._run.was_told_to_stop and not self._run.is_dead:
            self._run.cut[kind] += 1
            streams, answers = self._run.cut["streams"], self._run.cut["answers"]
            cut, refused = (streams, answers) if self._run.drains_until else (max(streams, answers), 0)
            self._events.count(CUT_AT_SHUTDOWN, at, requests=cut, refused=refused)

    def _serve(self, at: float) -> None:
        self._reach(READY_STAGE, at)
        self._next_start.clear()
        self.served += 1

    def _on_ends(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        """The API server of a dead engine logs a shutdown too; uvicorn shuts down with more than one line."""
        self._run.ending.add(line.text)
        if self._serves and not self._run.is_dead and not line.source and len(self._run.ending) < 2:
            return
        self._assume_was_ready(at)
        if not self._run.startup.has_ended and not self._run.is_dead:
            self._events.count(SHUT_DOWN, at)
        self._run.startup.end(at)
        self._run.was_told_to_stop = True
        self._crashes.stop()

    def _on_fatal(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        if self._run.startup.stage or not self._run.startup.exists:
            self._begin(at)
        self._quote(pattern, line, at)
        self._fail(at)

    def _on_event(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        is_of_startup = pattern.name == COMPILED_WHILE_SERVING and not self._serves
        is_of_shutdown = pattern.name in DEATHS and self._was_stopped
        is_api_server = line.level != RAW and line.process.lower().startswith("apiserver")
        is_of_no_drain = pattern.name == DRAIN_ENDED and not self._run.drains_until
        if is_of_startup or is_of_shutdown or is_of_no_drain or (is_api_server and pattern.name in ON_DEVICE):
            return
        if pattern.name == DRAIN_STARTED:
            seconds = float(read_values(pattern, line.text).get("seconds", 0.0))
            self._run.drains_until = at + min(seconds, LONGEST_DRAIN) + LINGERS
        if pattern.name == CUT_AT_SHUTDOWN and not pattern.numbers:
            self._cut_off("streams", at)
            return
        if (
            line.text.startswith(_HIT) and not self._run.startup.is_ready
        ):  # the frames of its traceback tell whether it was at work
            return
        if pattern.name in DEATHS and self._run.aborting is not None:
            aborted, self._run.aborting = self._run.aborting, None
            if at - aborted[2] <= SURVIVED:
                self._on_event(*aborted)
        if pattern.name in QUOTED:
            self._quote(pattern, line, at)
        if pattern.name == ENGINE_START_FAILED:
            self._fail(at)
            return
        if pattern.name == ENGINE_DEAD:
            if self._run.startup.stage is None or line.text.startswith(_AT_WORK):
                self._reach(READY_STAGE, at - RESOLUTION)
            self._crashes.crash(at)
        if pattern.name in DEATHS:
            self._run.is_dead, self._run.announced = True, None
        self._events.read(pattern, line.text, at)
        self._lines[pattern.name] = line, at

    def _quote(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        self._give_reason((*self._pending, ErrorLine(line.text, line.number, at, line.process, event=pattern.name)))

    def _assume_was_ready(self, at: float) -> None:
        """If a log begins with the end of a server, such as a rotated log, the server was at work before."""
        if self._run.startup.stage is None:
            self._reach(READY_STAGE, at - RESOLUTION)

    def _fail(self, at: float) -> None:
        """Note a failed start; if the start has already succeeded, do nothing."""
        if self._run.startup.is_ready:
            return
        self._is_vllm, self._run.announced = True, None
        if self._run.is_interrupted:  # its errors are consequences
            self._run.startup.end(at)
            return
        self.failed += 1
        self._events.count(ENGINE_START_FAILED, at)
        if self._run.startup.stage is None:
            self._run.startup = StartupProgress(at)
            self._crashes.begin(at)
        self._run.startup.end(at)
        self._crashes.crash(at)

    def samples(self, now: float) -> list[Sample]:
        found = [*self._run.startup.samples(now), ("diag_vllm_log_consecutive_crashes", (), self._crashes.count(now))]
        found += self._events.samples()
        found += self._run.root_cause.samples()
        found += self.answers.samples()
        if crash := self._crashes.last:
            cause = self._run.root_cause if crash > (self._run.begun or 0.0) else self._crashed
            found += cause.samples(crash)
        if self.latest is not None:
            found.append(("diag_vllm_log_last_line_timestamp_seconds", (), self.latest))
        return found


def ends_or_starts(placed: PlacedLine) -> bool:
    """Return True if a line says that the server, or a part of it, has ended, is about to, or was started anew."""
    pattern = placed.pattern
    if pattern is None or pattern.kind not in ("banner", "ends", "fatal", "event"):
        return placed.error is not None
    return pattern.kind != "event" or pattern.name in QUOTED or placed.error is not None
