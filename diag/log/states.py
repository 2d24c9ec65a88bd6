"""States of a server by the lines of its log: starts, work, failures and ends, and the samples of them."""

from collections.abc import Callable, Sequence

from diag.core.log_events import ANSWERS, CUT_AT_SHUTDOWN, ENGINE_DEAD, ENGINE_START_FAILED, KILLED_BY_SIGNAL
from diag.core.metric_families import Sample
from diag.exposition.scrapes import Reading
from diag.log.corroboration import RESOLUTION
from diag.log.load import AnswerCounts, LoadLines
from diag.log.parse_line import AnsweredRequest, ParsedLine
from diag.log.patterns import Pattern
from diag.log.run import ServerRun, Writers
from diag.log.tracebacks import ErrorLine
from diag.log.trackers import READY_STAGE, CrashStreak, EventCounts, RootCauseTracker, StartupProgress
from diag.vllm.routes import asks_for_inference


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
        self.complaint: tuple[ParsedLine, float, str] | None = None
        """The last line that says what is wrong with a request, and is no exception, until a request was answered."""
        self.last_text = ""
        self.pending: list[ErrorLine] = []
        """Exceptions outside of a server's work after which nothing has moved: the first of them may have ended it."""
        self.last_failure: RootCauseTracker | None = None
        """The root cause of the last failed start."""
        self.crashes = CrashStreak()
        self._crashed = self.run.root_cause
        self.next_start: list[tuple[Pattern, ParsedLine, float]] = []
        """Banners behind which the server still worked: a client may have imitated them."""

    @property
    def root_cause(self) -> RootCauseTracker:
        """The root cause of the last failure."""
        return self.run.root_cause if self.run.root_cause.reason else self._crashed

    @property
    def load_at(self) -> Callable[[float], list[Reading]]:
        """The load by the lines so far, as a function of time that yields series of vLLM's page."""
        return self.load.frozen(self.answers.succeeded)

    @property
    def runs_script(self) -> bool:
        """True if an engine has started, and no line of an API server is in the log."""
        return self.run.has_engine and not self.writers.has_api_server and self.run.phase == "starting"

    def server_answers(self, at: float) -> None:
        """Note that the server's page came: the start that the log shows has ended, also if no line says so."""
        if self.run.phase == "starting" and self.run.startup.exists:
            self.serve(at)

    def take_request(self, request: AnsweredRequest, at: float, is_doubted: bool = False) -> None:
        """Take a line of uvicorn's access log; one that may be a client's text shows no server at work."""
        was_failing = bool(self.answers.not_done)
        self.answers.count(request, at, is_doubted)
        if was_failing and not self.answers.not_done:
            self.lines.pop(ANSWERS, None)
        if request.status.startswith("5"):
            self.cut_off("answers", at)
            if self.complaint is not None:
                self.lines[ANSWERS] = self.complaint
        elif request.status.startswith("4") and self.complaint is not None:
            self.lines.setdefault(ANSWERS, self.complaint)  # an exception of the same request says more
        self.complaint = None
        if is_doubted:
            return
        self.writers.note_route(request.route)
        if request.route == "/health":
            self.run.is_unhealthy = request.status == "503"
            if self.run.is_unhealthy and self.run.serves:
                return
        is_answer = request.status.startswith("2") and asks_for_inference(request.method, request.route)
        if is_answer and not self.load.engines:  # a stream is answered before its first token: stats lines tell more
            self.run.rank_waits = ""
        self.serve(at)

    def process_ended(self, at: float, by_signal: bool) -> None:
        """Note that the server's process ended, as its supervisor reports: a crash may leave no line."""
        if self.run.startup.has_ended:
            return
        if by_signal:
            self.events.count(KILLED_BY_SIGNAL, at)
        if self.run.startup.is_ready:
            self.run.startup.end(at)
            self.crashes.crash(at)
        else:
            self.run.is_interrupted = False  # the supervisor knows better
            self.fail(at)

    def begin(self, at: float) -> None:
        """Begin a new start."""
        if self.run.is_of_script and not self.writers.has_api_server:  # it makes one engine after the other
            self.crashes.stop()
        self.crashes.begin(at)
        self.answers.begin()
        self.load.begin()
        if self.crashes.last > (self.run.begun or 0.0):  # the run that ends here crashed
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
            self.crashes.ready(at)

    def cut_off(self, kind: str, at: float, requests: int = 1) -> None:
        """Note requests that failed after the server was told to stop."""
        if self.run.was_stopped and self.run.shutdown.was_told and not self.run.is_dead:
            self.events.count(CUT_AT_SHUTDOWN, at, **self.run.shutdown.cut_off(kind, requests))

    def serve(self, at: float) -> None:
        self.run.signs += self.run.startup.has_ended
        self.reach(READY_STAGE, at)
        self.run.worker_error = None
        self.next_start.clear()
        self.served += 1

    def give_reason(self, errors: Sequence[ErrorLine]) -> None:
        """Let one of these lines explain the failure."""
        for error in errors:
            self.run.root_cause.consider(error)
        self.run.root_cause.end()

    def die(self, at: float) -> None:
        """Note that an engine at work died; one that works without an API server never logs that it is ready."""
        self.reach(READY_STAGE, at - RESOLUTION)
        self.events.count(ENGINE_DEAD, at)
        self.crashes.crash(at)
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
            self.crashes.begin(at)
        run.startup.end(at)
        self.crashes.crash(at)

    def samples(self, now: float) -> list[Sample]:
        samples = [*self.run.startup.samples(now), ("diag_vllm_log_consecutive_crashes", (), self.crashes.count(now))]
        samples += self.events.samples()
        samples += self.run.root_cause.samples()
        samples += self.answers.samples()
        if crash := self.crashes.last:
            cause = self.run.root_cause if crash > (self.run.begun or 0.0) else self._crashed
            samples += cause.samples(crash)
        return samples
