"""State of a vLLM server by the lines since its latest start, and the programs that write into a log.

Times are unix seconds.
"""

from collections import Counter
from dataclasses import dataclass, field

from diag.log.marks import MARKS
from diag.log.origin import Phase, is_of_vllm
from diag.log.parse_line import ParsedLine
from diag.log.patterns import Pattern
from diag.log.tracebacks import ErrorLine
from diag.log.trackers import LoggedConfig, RootCauseTracker, StartupProgress

ENGINE_STOPPED = "[shutdown] API server: engine client stopped"
_UVICORN_STARTS = "Started server process ["
_OF_SERVER = frozenset({"api_server.py", "api_utils.py", "launcher.py", "run_batch.py"})


@dataclass
class Writers:
    """The programs whose lines a log has, also from before the latest start."""

    is_vllm: bool = False
    """True if a line was logged by a file of vLLM's, or about a route of its API."""
    is_other: bool = False
    """True if uvicorn started before that: other servers use it, and have these routes too."""
    has_api_server: bool = False
    is_script: bool = False
    """True if a line is of the class LLM."""
    handles_request: bool = False
    """True if a log whose beginning is lost shows a server that handles a request."""

    def note(self, line: ParsedLine, says_failure: bool) -> bool:
        """Take a line; return True if it is of the class LLM."""
        file, is_uvicorn = line.file, line.text.startswith(_UVICORN_STARTS)
        self.is_vllm = self.is_vllm or is_of_vllm(line) or says_failure
        self.is_other = not self.is_vllm and (self.is_other or is_uvicorn)
        self.has_api_server = self.has_api_server or is_uvicorn or file in _OF_SERVER or line.is_of_api_server
        is_of_script = file == "llm.py" or bool(MARKS.of_script.match(line.text))
        self.is_script = self.is_script or is_of_script
        return is_of_script

    def note_route(self, route: str) -> None:
        self.is_vllm = self.is_vllm or (not self.is_other and route.startswith("/v1/"))


@dataclass
class Shutdown:
    """A shutdown on purpose, and the requests that it cut off."""

    was_told: bool = False
    lines: set[str] = field(default_factory=set)
    drains_until: float = 0.0
    """Unix time until which the page of a server that drains may come; 0 if it was not told to stop, or at once."""
    cut: Counter[str] = field(default_factory=Counter)

    @property
    def engine_ended(self) -> bool:
        """True if the API server said that it has no engine any more."""
        return ENGINE_STOPPED in self.lines

    def cut_off(self, kind: str, requests: int = 1) -> dict[str, float]:
        """Count requests that failed, and return how many were cut off, and how many refused.

        A stream that fails before its first token logs both its exception and an answer: the larger number counts.
        While the engine drains, its API server still accepts requests, and answers them with HTTP 500.
        """
        self.cut[kind] += requests
        streams, answers = self.cut["streams"], self.cut["answers"]
        if self.drains_until:
            return {"requests": streams, "refused": answers}
        return {"requests": max(streams, answers), "refused": 0}


@dataclass
class ServerRun:
    """State of the server by the lines since its latest start; each start begins with a new one."""

    root_cause: RootCauseTracker
    startup: StartupProgress = field(default_factory=StartupProgress)
    config: LoggedConfig = field(default_factory=LoggedConfig)
    shutdown: Shutdown = field(default_factory=Shutdown)
    begun: float | None = None
    banners: set[str] = field(default_factory=set)
    listens: bool = False
    has_engine: bool = False
    is_dead: bool = False
    ended_from_outside: bool = False
    """True if the last line is that of a launcher, a shell or of Python, and says that the server was ended."""
    is_interrupted: bool = False
    """True if a signal interrupted the server before any of its processes had logged another exception."""
    signs: int = 0
    """Signs of a server at work since this one ended: several write into one log."""
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
    worker_error: ErrorLine | None = None
    """The last exception that an engine at work or one of its workers logged, until a line shows work again."""
    is_unhealthy: bool = False
    """True if vLLM's last answer at /health was 503: its engine is dead."""
    abort: tuple[ErrorLine, int] | None = None
    """The line of a device's runtime behind which it aborts the process, and the lines that showed work until then."""
    is_of_script: bool = False
    """True if a line since the start is of the class LLM: a script that is done with its engine may end without one."""
    script_error: ErrorLine | None = None
    """The exception with which a script ended whose engine had started."""

    @property
    def phase(self) -> Phase:
        """Return "serving" once clients can connect; "unknown" for a log whose beginning is lost."""
        if self.startup.stage is None:
            return "unknown"
        return "serving" if not self.startup.has_ended and (self.startup.is_ready or self.listens) else "starting"

    @property
    def serves(self) -> bool:
        return self.startup.is_ready and not self.startup.has_ended

    @property
    def was_stopped(self) -> bool:
        """True after the server was stopped on purpose: errors that its processes log then are no failure."""
        return self.startup.is_ready and self.startup.has_ended
