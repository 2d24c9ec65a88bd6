"""Which lines of a log are vLLM's own, and which may be what a client sent.

Prompts, request ids, names of models and texts of exceptions are logged, with their line breaks and imitated heads.
vLLM repeats a record's head on each of its lines, so a line with the head of an earlier one continues that record, and
a line is believed as far as its file logs that text. What the web server writes of an exception has no head and no end:
what follows within seconds may be a part of it. No client is heard before the server listens.
"""

from enum import Enum
from typing import Literal, NamedTuple

from diag.exporter.log.line import Line
from diag.exporter.log.pattern import FAILED, RAW, Pattern
from diag.exporter.log.traceback import TRACEBACK, announces

Phase = Literal["unknown", "starting", "serving"]
MOST_RECORDS, MOST_PIDS = 32, 4096
"""Records that may go on at a time, and processes of one server."""
QUIET = 2.0
"""Seconds behind a text without an end after which a line is no part of it."""
_UNENDING = ("Task exception was never retrieved", "Exception in ", "Exception ignored ", "Unhandled exception")
"""How Python begins to print an exception that ended nothing."""
_OF_A_START = frozenset({"banner", "hint", "stage", "progress", "setting"})
_LEVELS = ("DEBUG ", "INFO ", "WARNING ", "ERROR ", "CRITICAL ")
_OUTPUT = "AsyncLLM output_handler failed"


class Belief(Enum):
    """OWN is vLLM's; HEARSAY looks so, without proof; TEXT is a part of something else."""

    OWN = 1
    HEARSAY = 2
    TEXT = 3


class _Record(NamedTuple):
    """What its first line tells; whether that says that an engine or a worker ends, or nothing at all; and whether a
    traceback follows.
    """

    pattern: Pattern | None
    ends: bool
    is_blank: bool
    is_traced: bool = False


class Records:
    """Fed with lines in their order."""

    def __init__(self) -> None:
        self._open: dict[str, _Record] = {}
        self._pids: set[str] = set()
        self._unending: tuple[float | None, float] | None = None

    def belief(
        self, line: Line, pattern: Pattern | None, phase: Phase, read_at: float | None, latest: float | None
    ) -> Belief:
        """`read_at` is unix time where a line is read as it is written; `latest` is that of the line before."""
        if phase == "serving":
            clock = line.at if line.stamped else read_at
            is_part = line.form == "inside" or self._is_part(line, clock)
            if line.form == "line" and _is_unending(line, pattern):
                self._unending = clock, latest or 0.0
            if is_part:
                return Belief.TEXT
        if line.source and line.form != "foreign":
            return self._headed(line, pattern, phase)
        is_engines = (
            line.form == "line"
            and line.pid
            and line.pid in self._pids
            and not line.process.lower().startswith("apiserver")
        )
        return Belief.OWN if phase != "serving" or is_engines else _headless(line, pattern)

    def knows(self, pid: str) -> bool:
        """Whether the start showed that process, "" for one of a release that names none."""
        return pid in self._pids

    def _is_part(self, line: Line, clock: float | None) -> bool:
        """Whether a line may be a part of a text without an end; its own time may be, too, so it ends that at most."""
        if self._unending is None:
            return False
        began, latest = self._unending
        if clock is not None and (began is None or clock - began >= QUIET):
            self._unending = None
            return False
        if clock is None and line.source and line.at is not None and line.at - latest >= QUIET:
            self._unending = None
        return True

    def _headed(self, line: Line, pattern: Pattern | None, phase: Phase) -> Belief:
        record = self._open.get(line.head)
        if record is None:
            self._begin(line, pattern, phase)
        if phase == "starting":
            return Belief.OWN
        if record is not None:
            if line.text.startswith(TRACEBACK):
                self._open[line.head] = record._replace(is_traced=True)
            return Belief.OWN if _continues(record, line, pattern) else Belief.TEXT
        if pattern is None or (phase == "unknown" and pattern.kind in _OF_A_START):
            return Belief.OWN
        if not (_is_logged_by(pattern, line) if pattern.logger else _needs_no_file(pattern, line)):
            return Belief.TEXT
        is_known = not self._pids or line.pid in self._pids or pattern.kind != "event" or not _has_vllms_head(line)
        return Belief.OWN if is_known else Belief.HEARSAY

    def _begin(self, line: Line, pattern: Pattern | None, phase: Phase) -> None:
        if len(self._open) >= MOST_RECORDS:
            del self._open[next(iter(self._open))]
        self._open[line.head] = _Record(pattern, _says_that_it_ends(line), not line.text or line.text.isspace())
        if phase == "starting" and _has_vllms_head(line) and len(self._pids) < MOST_PIDS:
            self._pids.add(line.pid)


def _has_vllms_head(line: Line) -> bool:
    """Not that of torch or NCCL, which name no process."""
    return bool(line.pid) or line.head.startswith(_LEVELS)


def _headless(line: Line, pattern: Pattern | None) -> Belief:
    """What uvicorn, a library or the shell writes while the server serves."""
    if pattern is None:
        return Belief.OWN
    if pattern.kind in ("event", "fatal"):
        return Belief.HEARSAY
    is_uvicorns = not pattern.logger and line.form != "foreign" and (pattern.kind != "stage" or line.level != RAW)
    return Belief.OWN if pattern.kind == "serves" or is_uvicorns else Belief.TEXT


def _continues(record: _Record, line: Line, pattern: Pattern | None) -> bool:
    """Whether a further line of a record is more than a text in it."""
    if record.ends:
        return pattern is None or not pattern.logger or _is_logged_by(pattern, line)
    if record.is_blank:  # of the logo
        return pattern is None or pattern.name in ("logo", "model")
    if pattern is None or record.pattern is None:
        return False
    return pattern == record.pattern or (record.is_traced and pattern.of == record.pattern.name != "")


def _is_logged_by(pattern: Pattern, line: Line) -> bool:
    return line.source.partition(":")[0] in pattern.logger.split()


def _needs_no_file(pattern: Pattern, line: Line) -> bool:
    """A part of a start, which counts in a start only; an exception as the headline of an engine's record."""
    return pattern.kind in _OF_A_START or _says_that_it_ends(line)


def _says_that_it_ends(line: Line) -> bool:
    return line.level in FAILED and (announces(line) or line.text.startswith(_OUTPUT))


def _is_unending(line: Line, pattern: Pattern | None) -> bool:
    """What uvicorn or Python prints of an exception: its text follows, without a head."""
    if line.source or line.level not in (RAW, "ERROR", "CRITICAL"):
        return False
    return line.level != RAW or (pattern is None and line.text.startswith(_UNENDING))
