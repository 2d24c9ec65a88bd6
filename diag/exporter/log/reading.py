"""One way to read a log: what its lines say of the server, one by one. Pure: neither files nor a clock.

A line without a time of its own (uvicorn's, a traceback, a bar) takes the moment at which it was read while the log is
followed live, and the last time seen while an old log is read from its beginning. No line is newer than the moment at
which it was read.
"""

from copy import deepcopy

from diag.core.lazy_regex import lazy
from diag.core.log_events import (
    COMPILED_WHILE_SERVING,
    ENGINE_DEAD,
    ENGINE_START_FAILED,
    KILLED_BY_SIGNAL,
    ON_DEVICE,
    QUOTED,
    READY,
    SHUT_DOWN,
    WORKER_DIED,
)
from diag.core.metric_families import Sample
from diag.exporter.log.crashes import CrashStreak
from diag.exporter.log.error import SIGNALLED, LogError
from diag.exporter.log.events import LogEvents
from diag.exporter.log.facts import LogFacts
from diag.exporter.log.line import BAR, Line
from diag.exporter.log.pattern import RAW, STAGES, Pattern
from diag.exporter.log.records import Belief, Phase, Records
from diag.exporter.log.startup import Startup
from diag.exporter.log.traceback import TRACEBACK, Raised, Tracebacks

DEATHS = (ENGINE_DEAD, WORKER_DIED)
LISTENS = "Starting vLLM "
"""With which the line begins after which clients may be heard."""
_READY = STAGES.index(READY)
_COMPILES = lazy(r"(?:\[\w+\] )?Compiling a graph for ")
"""What torch.compile says of a graph that no cache has."""


class LogReading:
    """Fed with lines in their order, knows at any time what they told.

    Counts and times of events outlive a restart of the server, as do the numbers of the last line of each; phases,
    progress, facts and the error that ended it are those of the latest start. `file` is the name of the file that the
    lines are from, "" where they are from none.
    """

    def __init__(self, file: str) -> None:
        self.ahead = 0.0
        """By how many seconds the last line that was read live and has a time is ahead of the clock: a wrong zone."""
        self.latest: float | None = None
        """Unix time of the last line of any kind."""
        self.facts = LogFacts()
        self.starts = 0
        """How many starts it has shown."""
        self.served = 0
        """How many lines have shown the server at work."""
        self.failed = 0
        """How many starts have failed."""
        self._startup = Startup()
        self._crashes = CrashStreak()
        self._banners: set[str] = set()
        self._pid = ""
        self._own: float | None = None
        self._events = LogEvents()
        self._records = Records()
        self._listens = False
        self._ending: set[str] = set()
        self._next_start: list[tuple[Pattern, Line, float]] = []
        self._tracebacks = Tracebacks()
        self._error = LogError(file)
        self._dead = False

    @property
    def is_heard(self) -> bool:
        """Whether clients may be heard: what looks like another start may be what one of them sent."""
        return self._phase == "serving"

    def is_of_another(self, line: Line, pattern: Pattern | None) -> bool:
        """Whether a line is of a start that failed, unless somebody else wrote it; an exception, of its process."""
        if line.form != "line":
            return False
        is_traceback = line.level == RAW and line.text.startswith(TRACEBACK)
        is_failure = pattern is not None and pattern.name == ENGINE_START_FAILED
        return is_failure or (is_traceback and not self._records.knows(line.pid))

    def ended(self, read_at: float, live: bool) -> "LogReading":
        """A second one, that goes on as if the server had ended and another had been started."""
        other = deepcopy(self)
        other.failed = 0
        other._begin(other._at(None, read_at, live))
        return other

    def request(self, own: float | None, read_at: float, live: bool) -> None:
        """A line of the web server about a request; `own` is its own time."""
        self._serve(self._at(own, read_at, live))

    def process_ended(self, at: float, by_signal: bool) -> None:
        """Who runs the server knows that its process ended; what nobody asked for may leave no line."""
        if self._startup.over:
            return
        if by_signal:
            self._events.count(KILLED_BY_SIGNAL, at)
        if self._startup.ready:
            self._startup.end(at)
            self._crashes.crashed(at)
        else:
            self._fail(at)

    def take(self, line: Line, pattern: Pattern | None, read_at: float, live: bool) -> None:
        """A line, and what it is recognised as; `live` says what a line without a time takes."""
        belief = self._records.belief(line, pattern, self._phase, read_at if live else None, self._own)
        own = line.at if line.stamped or belief is not Belief.TEXT else None
        self._take(line, pattern, belief, self._at(own, read_at, live))

    def _at(self, own: float | None, read_at: float, live: bool) -> float:
        if own is not None:
            self.ahead = own - read_at if live else 0.0
            self._own = at = min(own, read_at)
        else:
            at = read_at if live or self._own is None else self._own
        self.latest = max(at, self.latest or at)
        return at

    @property
    def _phase(self) -> Phase:
        """Whether clients may be heard; what a log whose beginning is lost begins with is not known."""
        if self._startup.stage is None:
            return "unknown"
        return "serving" if not self._startup.over and (self._startup.ready or self._listens) else "starting"

    def _take(self, line: Line, pattern: Pattern | None, belief: Belief, at: float) -> None:
        if belief is Belief.TEXT:
            return
        if not self._was_stopped or not self._records.knows(line.pid):
            self._take_traceback(pattern, line, at)
        if not self._was_stopped and line.text.startswith(SIGNALLED) and line.source.startswith("core.py:"):
            self._error.add(Raised(line.text, line.number, at, line.process))
        if pattern is None:
            return
        if belief is Belief.OWN:
            if self._next_start and pattern.kind in ("hint", "stage", "setting", "progress"):
                self._start_again(line)
            getattr(self, f"_on_{pattern.kind}")(pattern, line, at)
        elif pattern.kind == "event" and not self._was_stopped:
            self._events.hear(pattern.name, at)

    def _take_traceback(self, pattern: Pattern | None, line: Line, at: float) -> None:
        """One that ended the server's own process ended its start, too."""
        raised = self._tracebacks.feed(line, at)
        if raised is None:
            return
        raised.event = pattern.name if pattern and pattern.kind == "event" else ""
        is_end = raised.is_entry and raised.event != ENGINE_START_FAILED
        if is_end and self._startup.over and not self._records.knows(line.pid):
            self._begin(at)
        self._error.add(raised)
        if is_end:
            self._error.end()
            self._fail(at)

    @property
    def _was_stopped(self) -> bool:
        """The server was told to stop: what its processes say of that is no failure."""
        return self._startup.ready and self._startup.over

    @property
    def _serves(self) -> bool:
        return self._startup.ready and not self._startup.over

    def _on_banner(self, pattern: Pattern, line: Line, at: float) -> None:
        if self._serves and not self._dead:  # a banner alone may have been made up
            self._next_start = [*self._next_start[-9:], (pattern, line, at)]
            return
        again = pattern.name in self._banners or (self._banners and line.pid != self._pid)
        if not self._startup.seen or self._startup.stage or again:
            self._begin(at)
        self._banners.add(pattern.name)
        self._pid = line.pid
        self._on_setting(pattern, line, at)

    def _on_hint(self, pattern: Pattern, line: Line, at: float) -> None:
        if not self._startup.seen:
            self._begin(at)
        self._on_setting(pattern, line, at)

    def _start_again(self, line: Line) -> None:
        """A banner, and now a line of a start from another file of vLLM's: the server has begun anew."""
        begun = self._next_start
        if not line.source or line.source.partition(":")[0] == begun[0][1].source.partition(":")[0]:
            return
        self._next_start = []
        self._begin(begun[0][2])
        for banner in begun:
            self._on_banner(*banner)

    def _begin(self, at: float) -> None:
        self._listens, self._ending = False, set()
        self._startup, self.facts, self._banners, self._dead = Startup(at), LogFacts(), set(), False
        self.starts += 1
        self._error.begin()
        self._crashes.began(at)

    def _reach(self, stage: int, at: float) -> None:
        self._startup.reach(stage, at)
        if self._serves:
            self._crashes.ready(at)

    def _on_stage(self, pattern: Pattern, line: Line, at: float) -> None:
        if self._serves:
            if line.source.startswith("backends.py:") and _COMPILES.match(line.text):
                self._events.count(COMPILED_WHILE_SERVING, at)
            return
        self._listens = self._listens or line.text.startswith(LISTENS)
        name = pattern.name
        if name == "compile" and not self.facts.compiles:
            name = "profile_memory"
        stage, bar = STAGES.index(name), BAR.match(line.text) if line.level == RAW else None
        if bar:
            done, total = (bar["done"], bar["total"]) if bar["done"] else (bar["percent"], 100)
            self._startup.bar(stage, bar["what"], int(done), int(total), at)
        else:
            self._reach(stage, at)
        self.facts.read(pattern, line.text)

    def _on_setting(self, pattern: Pattern, line: Line, at: float) -> None:
        if self._serves:
            return
        self.facts.read(pattern, line.text)
        self._startup.move(at)

    def _on_progress(self, pattern: Pattern, line: Line, at: float) -> None:
        self._startup.move(at)

    def _on_serves(self, pattern: Pattern, line: Line, at: float) -> None:
        self._serve(at)

    def _serve(self, at: float) -> None:
        self._reach(_READY, at)
        self._next_start.clear()
        self.served += 1

    def _on_ends(self, pattern: Pattern, line: Line, at: float) -> None:
        """The API server of an engine that died ends as if it had been told to; uvicorn, by more than one line."""
        self._ending.add(line.text)
        if self._serves and not self._dead and not line.source and len(self._ending) < 2:
            return
        self._was_at_work(at)
        if not self._startup.over and not self._dead:
            self._events.count(SHUT_DOWN, at)
        self._startup.end(at)
        self._crashes.stopped()

    def _on_fatal(self, pattern: Pattern, line: Line, at: float) -> None:
        if self._startup.stage or not self._startup.seen:
            self._begin(at)
        self._quote(pattern, line, at)
        self._fail(at)

    def _on_event(self, pattern: Pattern, line: Line, at: float) -> None:
        if self._doubtful(pattern, line):
            return
        if pattern.name in QUOTED:
            self._quote(pattern, line, at)
        if pattern.name == ENGINE_START_FAILED:
            self._fail(at)
            return
        if pattern.name == ENGINE_DEAD:
            self._was_at_work(at)
            self._crashes.crashed(at)
        self._dead = self._dead or pattern.name in DEATHS
        self._events.read(pattern, line.text, at)

    def _doubtful(self, pattern: Pattern, line: Line) -> bool:
        """What an API server says of a device; the death of an engine whose server was told to stop; a compilation of a
        start.
        """
        if pattern.name == COMPILED_WHILE_SERVING and not self._serves:
            return True
        if self._was_stopped and pattern.name in DEATHS:
            return True
        return line.level != RAW and line.process.lower().startswith("apiserver") and pattern.name in ON_DEVICE

    def _quote(self, pattern: Pattern, line: Line, at: float) -> None:
        self._error.add(Raised(line.text, line.number, at, line.process, event=pattern.name))
        self._error.end()

    def _was_at_work(self, at: float) -> None:
        """Of a log that begins with its end, such as a rotated one: what ends was at work."""
        if self._startup.stage is None:
            self._reach(_READY, at)

    def _fail(self, at: float) -> None:
        """What breaks after the start ended is no failure of it."""
        if self._startup.ready:
            return
        self.failed += 1
        self._events.count(ENGINE_START_FAILED, at)
        if self._startup.stage is None:
            self._startup = Startup(at)
            self._crashes.began(at)
        self._startup.end(at)
        self._crashes.crashed(at)

    def samples(self, now: float) -> list[Sample]:
        """Everything that is known, at that time."""
        found = [*self._startup.samples(now), ("diag_vllm_log_consecutive_crashes", (), self._crashes.count(now))]
        found += self._events.samples()
        found += self._error.samples()
        if self.latest is not None:
            found.append(("diag_vllm_log_last_line_timestamp_seconds", (), self.latest))
        return found
