"""Turn the lines of a server's log, once their author and time are known, into states of the server and into samples.

An end: a process ends with an announced exception, with one of its own entry point, or with a line that says so.
"""

from collections.abc import Callable, Sequence
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
)
from diag.core.metric_families import Sample
from diag.exposition.scrapes import Reading
from diag.log.corroboration import LINGERS, RESOLUTION, SURVIVED
from diag.log.load import AnswerCounts, LoadLines, reports_tokens
from diag.log.marks import MARKS
from diag.log.origin import LineOrigin
from diag.log.parse_line import PROGRESS_BAR, AnsweredRequest, ParsedLine
from diag.log.patterns import RAW, STAGES, Pattern, read_values
from diag.log.run import ServerRun, Writers
from diag.log.tracebacks import ErrorLine, TracebackTracker, frame_of
from diag.log.trackers import (
    MOST_TEXT,
    READY_STAGE,
    SIGNALLED,
    CrashStreak,
    EventCounts,
    RootCauseTracker,
    StartupProgress,
    quote,
)
from diag.vllm.routes import asks_for_inference

DEATHS = (ENGINE_DEAD, WORKER_DIED)
LISTENS = "Starting vLLM "
"""The beginning of the line after which clients can connect."""
_HIT = "EngineCore hit an exception"
"""vLLM up to 0.8.4 logs it of an engine that fails, whether it starts or works."""
_AT_WORK = "EngineCore encountered a fatal error"
_ENGINE_STARTED = "init engine (profile, create kv cache, warmup model) took "
MOST_PENDING = 64
LONGEST_DRAIN = 3_600.0
"""Seconds: a longer drain is not believed."""


class PlacedLine(NamedTuple):
    """A line with its pattern, author and unix time, and the exception that ended a process if it completes one.

    `is_known` is true if the line has the PID of a process of the start, or if the release logs none.
    """

    line: ParsedLine
    pattern: Pattern | None
    origin: LineOrigin
    at: float
    error: ErrorLine | None
    is_known: bool

    @property
    def event(self) -> str:
        """The event that the line shows, "" for none."""
        return self.pattern.name if self.pattern and self.pattern.kind == "event" else ""

    @property
    def ends_or_starts(self) -> bool:
        """True if it says that the server, or a part of it, has ended, is about to, or was started anew."""
        if self.pattern is None or self.pattern.kind not in ("banner", "ends", "fatal", "event"):
            return self.error is not None
        return self.pattern.kind != "event" or self.pattern.name in QUOTED or self.error is not None


class ServerStates:
    """Tracks starts, work, failures and ends of a server, line by line; `file` is the name of the log file, or "".

    Counts and times of events outlive a restart of the server, as do the numbers of the last line of each; phases,
    progress, configuration and root cause are those of the latest start; the last crash keeps its root cause.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.starts = self.served = self.failed = 0
        """Starts that the log has shown, lines that have shown the server at work, and starts that have failed."""
        self.run = ServerRun(RootCauseTracker(file))
        self.writers = Writers()
        self.answers = AnswerCounts()
        self.load = LoadLines()
        self.events = EventCounts()
        self.lines: dict[str, tuple[ParsedLine, float, str]] = {}
        """The last line of each event, and under `ANSWERS` the last exception that ended a request, with the frame
        above it.
        """
        self.last_text = ""
        self.pending: list[ErrorLine] = []
        """Exceptions outside of a server's work after which nothing has moved: the first of them may have ended it."""
        self.last_failure: RootCauseTracker | None = None
        """The root cause of the last failed start."""
        self._crashes = CrashStreak()
        self._crashed = self.run.root_cause
        self._frame_printed = ""
        self._pid = ""
        self._next_start: list[tuple[Pattern, ParsedLine, float]] = []

    @property
    def reason_number(self) -> int:
        """The number of the line that explains the last failure, 0 if unknown."""
        return self.run.root_cause.number or self._crashed.number

    @property
    def load_at(self) -> Callable[[float], list[Reading]]:
        """The load by the lines so far, as a function of time that yields series of vLLM's page."""
        return self.load.frozen(self.answers.succeeded)

    @property
    def runs_script(self) -> bool:
        """True if an engine has started, and no line of an API server is in the log."""
        return self.run.has_engine and not self.writers.has_api_server and self.run.phase == "starting"

    # -- what a line says whoever wrote it -----------------------------------------------------------------------------

    def note_line(self, line: ParsedLine, pattern: Pattern | None) -> None:
        """Note who writes, and what the last line says."""
        self.writers.note(line, says_failure=pattern is not None and pattern.kind in ("event", "fatal"))
        if line.level == RAW and line.form == "line" and MARKS.ended_from_outside.match(line.text):
            self.run.ended_from_outside, self.last_text = True, line.text
        elif line.source:
            self.run.ended_from_outside = False
        if line.source or (pattern is not None and pattern.kind == "stage"):
            self.last_text = f"{line.text} ({line.source})" if line.source else line.text
        if self.run.phase == "starting" and MARKS.waits_for_lock.match(line.text):
            self.run.waits_for = line.text

    def note_request_error(self, line: ParsedLine, at: float) -> None:
        """Keep the exception of a request that the web server prints, with the frame above it."""
        if frame := frame_of(line.text):
            self._frame_printed = frame
        elif MARKS.lone.match(line.text) or (self._frame_printed and MARKS.exception.match(line.text)):
            self.lines[ANSWERS], self._frame_printed = (line, at, self._frame_printed), ""

    def note_exception(self, placed: PlacedLine, error: ErrorLine | None, tracebacks: TracebackTracker) -> None:
        """Keep an exception that may have ended the start, and a line that says what a start waits for.

        A lone one, behind which vLLM goes on to log, was only printed by a library.
        """
        line, run = placed.line, self.run
        if line.source and line.level in ("INFO", "WARNING"):
            self.pending = [exception for exception in self.pending if not exception.is_lone]
        if tracebacks.stopped is not None and not run.raised:  # else vLLM interrupts the others because one has failed
            run.is_interrupted, self.last_text = True, tracebacks.stopped.text
        pending = tracebacks.unannounced
        if pending is None and MARKS.waits_for_gpus.match(
            line.text
        ):  # each such line names a longer time than the last one
            self.pending = [exception for exception in self.pending if not MARKS.waits_for_gpus.match(exception.text)]
            pending = ErrorLine.of(line, placed.at)
        is_of_start = run.phase != "serving" and not (run.phase == "unknown" and self.writers.handles_request)
        if pending is not None and is_of_start and len(self.pending) < MOST_PENDING:
            pending.event = placed.event
            self.pending.append(pending)
        run.errors += line.level in ("ERROR", "CRITICAL")
        if error is not None or tracebacks.unannounced is not None:
            run.raised.add(line.process)

    # -- what is known beside the lines --------------------------------------------------------------------------------

    def server_answers(self, at: float) -> None:
        """Note that the server's page came: the start that the log shows has ended, also if no line says so."""
        if self.run.phase == "starting" and self.run.startup.exists:
            self._serve(at)

    def take_request(self, request: AnsweredRequest, at: float) -> None:
        """Take a line of uvicorn's access log."""
        self.answers.count(request, at)
        if request.status.startswith("5"):
            self._cut_off("answers", at)
        self.writers.note_route(request.route)
        is_answer = request.status.startswith("2") and asks_for_inference(request.method, request.route)
        if is_answer and not self.load.engines:  # a stream is answered before its first token: stats lines tell more
            self.run.rank_waits = ""
        self._serve(at)

    def process_ended(self, at: float, by_signal: bool) -> None:
        """Note that the server's process ended, as its supervisor reports: a crash may leave no line."""
        if self.run.startup.has_ended:
            return
        if by_signal:
            self.events.count(KILLED_BY_SIGNAL, at)
        if self.run.startup.is_ready:
            self.run.startup.end(at)
            self._crashes.crash(at)
        else:
            self.run.is_interrupted = False  # the supervisor knows better
            self.fail(at)

    # -- what a line means ---------------------------------------------------------------------------------------------

    def interpret(self, placed: PlacedLine) -> None:
        """Interpret a line whatever it claims."""
        line, pattern, origin, at, error, _ = placed
        if origin is LineOrigin.QUOTED:
            return
        if error is not None:
            error.event = placed.event
            if error.is_entry and self.runs_script:
                self.pending.append(error)
                return
            self._on_exception(error, at, placed.is_known)
        if not self.run.was_stopped and line.text.startswith(SIGNALLED) and line.source.startswith("core.py:"):
            self.run.root_cause.consider(ErrorLine.of(line, at))
        if pattern is None:
            return
        is_at_work = line.process.lower().startswith("enginecore") or self.load.has_requests
        if pattern.name == SHM_BROADCAST_WAIT and self.run.serves and is_at_work:  # else it waits for a command
            self.run.rank_waits = quote(line.text.partition(". ")[0], MOST_TEXT)
        aborts = bool(placed.event) and pattern.aborts and not self.run.was_stopped
        if aborts:
            self.run.abort = ErrorLine.of(line, at, pattern.name), self.served
        if origin is LineOrigin.VLLM:
            banners = self._next_start
            is_of_start = pattern.kind in ("hint", "stage", "setting", "progress") and line.source
            if banners and is_of_start and line.file != banners[0][1].file:
                # the banners did announce a start: its lines are from several files of vLLM's
                self._next_start = []
                self.begin(banners[0][2])
                for banner in banners:
                    self._on_banner(*banner)
            getattr(self, f"_on_{pattern.kind}")(pattern, line, at)
        elif placed.event and not self.run.was_stopped:
            self.events.note_unproven(pattern.name, at)
            aborting = self.run.aborting
            if not aborts or line.level not in (RAW, "WARNING"):
                return
            if self.run.is_dead and not self.run.root_cause.has_reason:
                self._on_event(pattern, line, at)  # the kernel's line comes behind that of the death
            elif aborting is None or at - aborting[2] > SURVIVED:
                self.run.aborting = pattern, line, at

    def _on_exception(self, error: ErrorLine, at: float, is_known: bool) -> None:
        ends_server = error.is_entry and error.event != ENGINE_START_FAILED
        if ends_server and self.run.startup.has_ended and not is_known:
            self.begin(at)
        for reason in (*self.pending, error):
            self.run.root_cause.consider(reason)
        if ends_server:  # and its start
            self.run.root_cause.end()
            self.fail(at)
        elif error.announced:
            self.run.announced = error, self.served
            if error.announced.startswith(_HIT) and not self.run.startup.is_ready:
                self.run.root_cause.end()
                (self.die if error.in_step else self.fail)(at)

    def _on_banner(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        run = self.run
        if run.serves and not run.is_dead:  # a client may have imitated a banner alone
            self._next_start = [*self._next_start[-9:], (pattern, line, at)]
            return
        again = pattern.name in run.banners or (run.banners and line.pid != self._pid)
        if not run.startup.exists or run.startup.stage or again:
            self.begin(at)
        self.run.banners.add(pattern.name)
        self._pid = line.pid
        self._on_setting(pattern, line, at)

    def _on_hint(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        if not self.run.startup.exists:
            self.begin(at)
        self._on_setting(pattern, line, at)

    def begin(self, at: float) -> None:
        """Begin a new start."""
        self._crashes.begin(at)
        self.answers.begin()
        self.load.begin()
        if self._crashes.last > (self.run.begun or 0.0):  # the run that ends here crashed
            self._crashed = self.run.root_cause
        if self.run.root_cause.has_reason:
            self.last_failure = self.run.root_cause
        self.starts += 1
        self.run = ServerRun(RootCauseTracker(self.file), StartupProgress(at), begun=at)

    def reach(self, stage: int, at: float) -> None:
        """Note that a start has reached a stage."""
        self.pending.clear()
        self.run.waits_for = ""
        self.run.startup.reach(stage, at)
        if self.run.serves:
            self._crashes.ready(at)

    def _on_stage(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        run = self.run
        if run.serves:
            if line.source.startswith("backends.py:") and MARKS.compiles.match(line.text):
                self.events.count(COMPILED_WHILE_SERVING, at)
            return
        run.listens = run.listens or line.text.startswith(LISTENS)
        run.has_engine = run.has_engine or line.text.startswith(_ENGINE_STARTED)
        name = "profile_memory" if pattern.name == "compile" and not run.config.compiles else pattern.name
        stage, bar = STAGES.index(name), PROGRESS_BAR.match(line.text) if line.level == RAW else None
        if bar:
            done, total = (bar["done"], bar["total"]) if bar["done"] else (bar["percent"], 100)
            run.startup.draw_bar(stage, bar["what"], int(done), int(total), at)
        else:
            self.reach(stage, at)
        run.config.read(pattern, line.text)

    def _on_setting(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        if not self.run.serves:
            self.run.config.read(pattern, line.text)
            self.run.startup.move(at)

    def _on_progress(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        self.pending.clear()
        self.run.waits_for = ""
        self.run.startup.move(at)

    def _on_serves(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        self.load.read(line.text, at, self.answers.succeeded)
        if reports_tokens(line.text):
            self.run.rank_waits = ""
        self._serve(at)

    def _cut_off(self, kind: str, at: float) -> None:
        """Note a request that failed after the server was told to stop."""
        if self.run.was_stopped and self.run.shutdown.was_told and not self.run.is_dead:
            self.events.count(CUT_AT_SHUTDOWN, at, **self.run.shutdown.cut_off(kind))

    def _serve(self, at: float) -> None:
        self.reach(READY_STAGE, at)
        self._next_start.clear()
        self.served += 1

    def _on_ends(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        """The API server of a dead engine logs a shutdown too; uvicorn shuts down with more than one line."""
        run = self.run
        run.shutdown.lines.add(line.text)
        if run.serves and not run.is_dead and not line.source and len(run.shutdown.lines) < 2:
            return
        if run.startup.stage is None:  # a log that begins with the end of a server, such as a rotated one
            self.reach(READY_STAGE, at - RESOLUTION)
        if not run.startup.has_ended and not run.is_dead:
            self.events.count(SHUT_DOWN, at)
        run.startup.end(at)
        run.shutdown.was_told = True
        self._crashes.stop()

    def _on_fatal(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        if self.run.startup.stage or not self.run.startup.exists:
            self.begin(at)
        self.give_reason((*self.pending, ErrorLine.of(line, at, pattern.name)))
        self.fail(at)

    def _on_event(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        run, is_death = self.run, pattern.name in DEATHS
        is_of_startup = pattern.name == COMPILED_WHILE_SERVING and not run.serves
        is_of_no_drain = pattern.name == DRAIN_ENDED and not run.shutdown.drains_until
        is_told_again = line.level != RAW and line.is_of_api_server and pattern.name in ON_DEVICE
        if is_of_startup or (is_death and run.was_stopped) or is_of_no_drain or is_told_again:
            return
        if pattern.name == DRAIN_STARTED:
            seconds = float(read_values(pattern, line.text).get("seconds", 0.0))
            run.shutdown.drains_until = at + min(seconds, LONGEST_DRAIN) + LINGERS
        if pattern.name == CUT_AT_SHUTDOWN and not pattern.numbers:
            self._cut_off("streams", at)
            return
        if line.text.startswith(_HIT) and not run.startup.is_ready:
            return  # the frames of its traceback tell whether it was at work
        if is_death and run.aborting is not None:
            aborted, run.aborting = run.aborting, None
            if at - aborted[2] <= SURVIVED:
                self._on_event(*aborted)
        if pattern.name in QUOTED:
            self.give_reason((*self.pending, ErrorLine.of(line, at, pattern.name)))
        if pattern.name == ENGINE_START_FAILED:
            self.fail(at)
            return
        if pattern.name == ENGINE_DEAD:
            if run.startup.stage is None or line.text.startswith(_AT_WORK):
                self.reach(READY_STAGE, at - RESOLUTION)
            self._crashes.crash(at)
        if is_death:
            run.is_dead, run.announced = True, None
        self.events.read(pattern, line.text, at)
        self.lines[pattern.name] = line, at, ""

    # -- ends ----------------------------------------------------------------------------------------------------------

    def give_reason(self, errors: Sequence[ErrorLine]) -> None:
        """Let one of these lines explain the failure."""
        for error in errors:
            self.run.root_cause.consider(error)
        self.run.root_cause.end()

    def die(self, at: float) -> None:
        """Note that an engine at work died; one that works without an API server never logs that it is ready."""
        self.reach(READY_STAGE, at - RESOLUTION)
        self.events.count(ENGINE_DEAD, at)
        self._crashes.crash(at)
        self.run.is_dead = True

    def fail(self, at: float) -> None:
        """Note a failed start; if the start has already succeeded, do nothing."""
        run = self.run
        if run.startup.is_ready:
            return
        self.writers.is_vllm, run.announced = True, None
        if run.is_interrupted:  # its errors are consequences
            run.startup.end(at)
            return
        self.failed += 1
        self.events.count(ENGINE_START_FAILED, at)
        if run.startup.stage is None:
            run.startup = StartupProgress(at)
            self._crashes.begin(at)
        run.startup.end(at)
        self._crashes.crash(at)

    def samples(self, now: float) -> list[Sample]:
        samples = [*self.run.startup.samples(now), ("diag_vllm_log_consecutive_crashes", (), self._crashes.count(now))]
        samples += self.events.samples()
        samples += self.run.root_cause.samples()
        samples += self.answers.samples()
        if crash := self._crashes.last:
            cause = self.run.root_cause if crash > (self.run.begun or 0.0) else self._crashed
            samples += cause.samples(crash)
        return samples
