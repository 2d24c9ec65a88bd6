"""Turn the lines of a server's log, once their author and time are known, into states of the server.

An end: a process ends with an announced exception, with one of its own entry point, or with a line that says so.
"""

from typing import NamedTuple

from diag.core.log_events import (
    ANSWERS,
    COMPILED_WHILE_SERVING,
    CUT_AT_SHUTDOWN,
    DRAIN_ENDED,
    DRAIN_STARTED,
    ENGINE_DEAD,
    ENGINE_START_FAILED,
    FATAL,
    ON_DEVICE,
    QUOTED,
    SHM_BROADCAST_WAIT,
    SHUT_DOWN,
    STACK_DUMPED,
    WORKER_DIED,
)
from diag.log.corroboration import LINGERS, RESOLUTION, SURVIVED
from diag.log.load import reports_tokens
from diag.log.marks import MARKS
from diag.log.origin import LineOrigin
from diag.log.parse_line import PROGRESS_BAR, ParsedLine
from diag.log.patterns import RAW, STAGES, Pattern, read_values, recognise
from diag.log.states import ServerStates
from diag.log.tracebacks import TRACEBACK, ErrorLine, TracebackTracker, frame_of
from diag.log.trackers import (
    MOST_TEXT,
    READY_STAGE,
    SIGNALLED,
    quote,
)

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


class LineMeanings:
    """Says what each line means for the states of the server."""

    def __init__(self, server: ServerStates) -> None:
        self._server = server
        self._frame_printed = ""
        self._pid = ""

    def note_line(self, line: ParsedLine, pattern: Pattern | None) -> None:
        """Note who writes, and what the last line says."""
        says_failure = pattern is not None and pattern.kind in ("event", "fatal")
        self._server.run.is_of_script |= self._server.writers.note(line, says_failure)
        if line.level == RAW and line.form == "line" and MARKS.ended_from_outside.match(line.text):
            self._server.run.ended_from_outside = True
            self._server.last_text = self._server.last_text if self._server.run.is_interrupted else line.text
        elif line.source:
            self._server.run.ended_from_outside = False
        if self._server.run.abort is not None and (said := MARKS.uncaught.match(line.text)):
            aborted, _ = self._server.run.abort
            aborted.text, aborted.number, aborted.cause = said["what"], line.number, aborted.text
            why, aborting = recognise(said["what"], "ERROR"), self._server.run.aborting
            if aborting and why and why.kind == "event":  # what was thrown, not that something was
                self._server.run.aborting = why, line._replace(text=said["what"]), aborting[2]
        if line.source or (pattern is not None and pattern.kind == "stage"):
            self._server.last_text = f"{line.text} ({line.source})" if line.source else line.text
        if self._server.run.phase == "starting" and MARKS.waits_for_lock.match(line.text):
            self._server.run.waits_for = line.text

    def note_request_error(self, line: ParsedLine, at: float, *, is_known: bool) -> None:
        """Keep the exception of a request that the web server prints, with the frame above it, or of a worker.

        If the log has the server's start, a process that is not `is_known` may be an earlier server's.
        """
        is_of_server = is_known or not line.pid or not self._server.starts
        if is_of_server and MARKS.logs_ends.match(line.source) and MARKS.lone.match(line.text):
            self._server.run.worker_error = ErrorLine.of(line, at)
        if line.process and not line.is_of_api_server:
            return
        if frame := frame_of(line.text):
            self._frame_printed = frame
        elif MARKS.lone.match(line.text) or (self._frame_printed and MARKS.exception.match(line.text)):
            call, last = MARKS.call_failed.match(line.text), self._server.lines.get(ANSWERS)
            if call and last and self._server.answers.not_done and last[0].text.startswith(call[0]):
                return  # the first failure of a call leaves what the later ones fail at
            self._server.lines[ANSWERS], self._frame_printed = (
                (line, at, " < ".join(filter(None, (self._frame_printed, line.source)))),
                "",
            )
            self._server.complaint = None

    def note_complaint(self, line: ParsedLine, at: float) -> None:
        """Keep a line that may say why the next request is answered with HTTP 500, if no exception does."""
        is_of_library = line.level == RAW and MARKS.says_of_request.match(line.text)
        is_headline = line.level == "ERROR" and MARKS.logs_request.match(line.source)
        is_part = line.text.startswith((" ", TRACEBACK)) or MARKS.exception.match(line.text)
        if is_of_library or (is_headline and not is_part):
            self._server.complaint = line, at, ""

    def note_exception(self, placed: PlacedLine, error: ErrorLine | None, tracebacks: TracebackTracker) -> None:
        """Keep an exception that may have ended the start, and a line that says what a start waits for.

        A lone one, behind which vLLM goes on to log, was only printed by a library.
        """
        line, run = placed.line, self._server.run
        if line.source and line.level in ("INFO", "WARNING"):
            self._server.pending = [exception for exception in self._server.pending if not exception.is_lone]
        if tracebacks.stopped is not None and not run.raised:  # else vLLM interrupts the others because one has failed
            run.is_interrupted, self._server.last_text = True, tracebacks.stopped.text
        pending = tracebacks.unannounced
        waits = MARKS.waits_for_gpus
        if pending is None and waits.match(line.text):  # each such line names a longer time than the last one
            self._server.pending = [last for last in self._server.pending if not waits.match(last.text)]
            pending = ErrorLine.of(line, placed.at)
        is_of_start = run.phase != "serving" and not (run.phase == "unknown" and self._server.writers.handles_request)
        if pending is not None and is_of_start and len(self._server.pending) < MOST_PENDING:
            pending.event = placed.event
            self._server.pending.append(pending)
        if pending is not None and pending.in_step and run.is_dead and not run.root_cause.has_reason:
            run.root_cause.consider(pending)  # below the line that announced it, and without its head
        run.errors += line.level in ("ERROR", "CRITICAL")
        if error is not None or tracebacks.unannounced is not None:
            run.raised.add(line.process)

    def interpret(self, placed: PlacedLine) -> None:
        """Interpret a line whatever it claims."""
        line, pattern, origin, at, error, _ = placed
        if origin is LineOrigin.QUOTED:
            return
        if error is not None:
            error.event = placed.event
            if error.is_entry and self._server.runs_script:
                self._server.pending.append(error)
                return
            self._on_exception(error, at, placed.is_known)
        if not self._server.run.was_stopped and line.text.startswith(SIGNALLED) and line.source.startswith("core.py:"):
            self._server.run.root_cause.consider(ErrorLine.of(line, at))
        if pattern is None:
            return
        is_at_work = line.process.lower().startswith("enginecore") or self._server.load.requests > 0
        is_cut, serves = self._server.run.phase == "unknown", self._server.run.serves
        if pattern.name == SHM_BROADCAST_WAIT and (serves or is_cut) and is_at_work:  # else it waits for a command
            self._server.run.rank_waits = quote(line.text.partition(". ")[0], MOST_TEXT)
            if origin is LineOrigin.VLLM and serves:
                self._server.load.wait_for_a_rank(at)
        aborts = bool(placed.event) and pattern.aborts and not self._server.run.was_stopped
        first = self._server.run.abort
        if aborts and (first is None or first[1] != self._server.served):
            self._server.run.abort = ErrorLine.of(line, at, pattern.name), self._server.served
        if origin is LineOrigin.VLLM:
            banners = self._server.next_start
            is_of_start = pattern.kind in ("hint", "stage", "setting", "progress") and line.source
            if banners and is_of_start and line.file != banners[0][1].file:
                # the banners did announce a start: its lines are from several files of vLLM's
                self._server.next_start = []
                self._server.begin(banners[0][2])
                for banner in banners:
                    self._on_banner(*banner)
            getattr(self, f"_on_{pattern.kind}")(pattern, line, at)
        elif placed.event and not self._server.run.was_stopped:
            self._server.events.note_unproven(pattern.name, at)
            aborting = self._server.run.aborting
            if not aborts or line.level not in (RAW, "WARNING"):
                return
            if self._server.run.is_dead and not self._server.run.root_cause.has_reason:
                self._on_event(pattern, line, at)  # the kernel's line comes behind that of the death
            elif aborting is None or at - aborting[2] > SURVIVED:
                self._server.run.aborting = pattern, line, at

    def _on_exception(self, error: ErrorLine, at: float, is_known: bool) -> None:
        ends_server = error.is_entry and error.event != ENGINE_START_FAILED
        if ends_server and self._server.run.startup.has_ended and not is_known:
            self._server.begin(at)
        # a worker that raises has its place: what its start had waited for before has come
        waited = MARKS.waits_for_gpus if error.announced else None
        pending = [last for last in self._server.pending if not (waited and waited.match(last.text))]
        if not MARKS.of_platform.search(error.text):  # vLLM goes on without a plugin, unless it is the device's
            pending = [last for last in pending if not MARKS.of_plugin.search(last.frames)]
        for reason in (*pending, error):
            self._server.run.root_cause.consider(reason)
        if ends_server:  # and its start
            self._server.run.root_cause.end()
            self._server.fail(at)
        elif error.announced:
            self._server.run.announced = error, self._server.served
            if error.announced.startswith(_HIT) and not self._server.run.startup.is_ready:
                self._server.run.root_cause.end()
                (self._server.die if error.in_step else self._server.fail)(at)

    def _on_banner(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        run = self._server.run
        if run.serves and not run.is_dead:  # a client may have imitated a banner alone
            self._server.next_start = [*self._server.next_start[-9:], (pattern, line, at)]
            return
        again = pattern.name in run.banners or (run.banners and line.pid != self._pid)
        if not run.startup.exists or run.startup.stage or again:
            self._server.begin(at)
        self._server.run.banners.add(pattern.name)
        self._pid = line.pid
        self._on_setting(pattern, line, at)

    def _on_hint(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        if not self._server.run.startup.exists:
            self._server.begin(at)
        self._on_setting(pattern, line, at)

    def _on_stage(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        run = self._server.run
        if run.serves:
            if line.source.startswith("backends.py:") and MARKS.compiles.match(line.text):
                self._server.events.count(COMPILED_WHILE_SERVING, at)
            return
        run.listens = run.listens or line.text.startswith(LISTENS)
        run.has_engine = run.has_engine or line.text.startswith(_ENGINE_STARTED)
        name = "profile_memory" if pattern.name == "compile" and not run.config.compiles else pattern.name
        stage, bar = STAGES.index(name), PROGRESS_BAR.match(line.text) if line.level == RAW else None
        if bar:
            done, total = (bar["done"], bar["total"]) if bar["done"] else (bar["percent"], 100)
            run.startup.draw_bar(stage, bar["what"], int(done), int(total), at)
        else:
            self._server.reach(stage, at)
        run.config.read(pattern, line.text)

    def _on_setting(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        if not self._server.run.serves:
            self._server.run.config.read(pattern, line.text)
            self._server.run.startup.move(at)

    def _on_progress(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        self._server.pending.clear()
        self._server.run.waits_for = ""
        self._server.run.startup.move(at)

    def _on_serves(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        self._server.load.read(line.text, at, self._server.answers.succeeded)
        if reports_tokens(line.text):
            self._server.run.rank_waits = ""
        shutdown, left = self._server.run.shutdown, self._server.load.requests
        if left and shutdown.engine_ended and not shutdown.cut:  # killed before it logged them; their streams never end
            self._server.cut_off("streams", at, left)
        self._server.serve(at)

    def _on_ends(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        """The API server of a dead engine logs a shutdown too; uvicorn shuts down with more than one line."""
        run = self._server.run
        run.shutdown.lines.add(line.text)
        if run.serves and not run.is_dead and not line.source and len(run.shutdown.lines) < 2:
            return
        if run.startup.stage is None:  # a log that begins with the end of a server, such as a rotated one
            self._server.reach(READY_STAGE, at - RESOLUTION)
        if not run.startup.has_ended and not run.is_dead:
            self._server.events.count(SHUT_DOWN, at)
        run.startup.end(at)
        run.shutdown.was_told = True
        self._server.crashes.stop()

    def _on_fatal(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        if self._server.run.startup.stage or not self._server.run.startup.exists:
            self._server.begin(at)
        self._server.give_reason((*self._server.pending, ErrorLine.of(line, at, pattern.name)))
        self._server.fail(at)

    def _on_event(self, pattern: Pattern, line: ParsedLine, at: float) -> None:
        run, is_death = self._server.run, pattern.name in DEATHS
        is_of_startup = pattern.name == COMPILED_WHILE_SERVING and not run.serves
        is_of_no_drain = pattern.name == DRAIN_ENDED and not run.shutdown.drains_until
        is_told_again = line.level != RAW and line.is_of_api_server and pattern.name in ON_DEVICE
        if is_of_startup or (is_death and run.was_stopped) or is_of_no_drain or is_told_again:
            return
        if pattern.name == DRAIN_STARTED:
            seconds = float(read_values(pattern, line.text).get("seconds", 0.0))
            run.shutdown.drains_until = at + min(seconds, LONGEST_DRAIN) + LINGERS
        if pattern.name == STACK_DUMPED:
            self._server.load.read(line.text, at, self._server.answers.succeeded)
        if pattern.name == CUT_AT_SHUTDOWN and not pattern.numbers:
            self._server.cut_off("streams", at)
            return
        if pattern.name == CUT_AT_SHUTDOWN:  # the engine counts them itself
            run.shutdown.cut["told by the engine"] += 1
        if line.text.startswith(_HIT) and not run.startup.is_ready:
            return  # the frames of its traceback tell whether it was at work
        if is_death and run.aborting is not None:
            aborted, run.aborting = run.aborting, None
            if at - aborted[2] <= SURVIVED:
                self._on_event(*aborted)
        if pattern.name in QUOTED:
            self._server.give_reason((*self._server.pending, ErrorLine.of(line, at, pattern.name)))
        if pattern.name == ENGINE_START_FAILED:
            self._server.fail(at)
            return
        if pattern.name == ENGINE_DEAD:
            if run.startup.stage is None or line.text.startswith(_AT_WORK):
                self._server.reach(READY_STAGE, at - RESOLUTION)
            self._server.crashes.crash(at)
        if is_death:
            run.is_dead, run.announced = True, None
        elif pattern.name in ON_DEVICE and pattern.name in FATAL:
            run.worker_error = run.worker_error or ErrorLine.of(line, at)
        self._server.events.read(pattern, line.text, at)
        self._server.lines[pattern.name] = line, at, ""
