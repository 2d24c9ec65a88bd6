"""Track the state that a log's lines add up to: start-up phases, crashes in a row, event counts, configuration, and the
root cause of a failure.

Each tracker is fed by `LogInterpreter` and has neither files nor a clock; times are unix seconds.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf

from diag.core.formatting import printable
from diag.core.log_events import LOG_EVENTS, READY, WARM_UP, EventLine
from diag.core.metric_families import Sample
from diag.log.corroboration import RESOLUTION, SURVIVED
from diag.log.marks import MARKS
from diag.log.patterns import EVENTS, KERNEL_WARM_UP, PHASES, STAGES, Pattern, parse_amount, read_values
from diag.log.tracebacks import MOST_READ, ErrorLine
from diag.vllm.command.free_text import hidden
from diag.vllm.command.redaction import is_like_a_flag, is_plain_name
from diag.vllm.command.shell import HIDDEN
from diag.vllm.flags.registry import known
from diag.vllm.running_config import FLAGS, number, words

READY_STAGE = STAGES.index(READY)
MOST_BARS = 1_000


class StartupProgress:
    """Tracks one start through its stages and progress bars.

    Stages only go forward: a late rank does not move the start back. After a failure or a shutdown all phases are 0;
    the times spent stay. A server first seen at work is ready, and nothing is known of its start. Progress is a line of
    a stage, or a bar that moved; a bar redrawn where it stands, a warning, and the line that a rank waits are none.
    Progress ends when the server is ready.
    """

    def __init__(self, at: float | None = None) -> None:
        self.stage = None if at is None else 0
        self.has_ended = False
        self._entered = at or 0.0
        self._moved = at
        self._spent: dict[str, float] = {}
        self._bars: dict[tuple[str, int], int] = {}
        self._ratio: float | None = None

    @property
    def exists(self) -> bool:
        """True if a start or a server at work was seen that has neither failed nor shut down."""
        return self.stage is not None and not self.has_ended

    @property
    def is_ready(self) -> bool:
        """True if the start succeeded, whatever came after."""
        return self.stage == READY_STAGE

    @property
    def is_under_way(self) -> bool:
        """True while the present phase still takes time."""
        return self.exists and not self.is_ready

    @property
    def position(self) -> tuple[str, float | None]:
        """The phase of a start, and the share of it that is done, None if unknown."""
        return _phase_of_stage(self.stage or 0), self._ratio

    def reach(self, stage: int, at: float) -> None:
        if self.has_ended or self.is_ready:
            return
        if self.stage is None:
            self.stage, self._entered = stage, at
        self._moved = max(at, self._moved or at)
        if stage > self.stage:
            self._add_time_spent(at)
            self.stage, self._ratio = stage, None

    def move(self, at: float) -> None:
        if self.is_under_way:
            self.reach(0, at)

    def draw_bar(self, stage: int, what: str, done: int, total: int, at: float) -> None:
        """Note a progress bar; all ranks draw the same one, so the highest count is its position."""
        if done <= self._bars.get((what, total), -1) or len(self._bars) > MOST_BARS:
            return
        self._bars[what, total] = done
        self.reach(stage, at)
        if self.is_under_way and self.stage == stage and total:
            self._ratio = min(done / total, 1.0)

    def end(self, at: float) -> None:
        if self.is_under_way:
            self._add_time_spent(at)
        self.has_ended = True

    def _add_time_spent(self, at: float) -> None:
        phase = _phase_of_stage(self.stage or 0)
        self._spent[phase] = self._spent.get(phase, 0.0) + max(at - self._entered, 0.0)
        self._entered = at

    def samples(self, now: float) -> Iterator[Sample]:
        """Yield the phase, its times and the progress; nothing if neither a start nor a server at work was seen."""
        if self.stage is None:
            return
        present = "" if self.has_ended else _phase_of_stage(self.stage)
        for phase in PHASES:
            yield "diag_vllm_startup_phase", (phase,), float(phase == present)
        spent = dict(self._spent)
        if self.is_under_way:  # `ready` takes no time
            spent[present] = spent.get(present, 0.0) + max(now - self._entered, 0.0)
        for phase, seconds in spent.items():
            yield "diag_vllm_startup_phase_seconds", (phase,), seconds
        if self.is_under_way and self._ratio is not None:
            yield "diag_vllm_startup_progress_ratio", (), self._ratio
        if self._moved is not None:
            yield "diag_vllm_startup_last_progress_timestamp_seconds", (), self._moved


def _phase_of_stage(stage: int) -> str:
    return WARM_UP if STAGES[stage] == KERNEL_WARM_UP else STAGES[stage]


STEADY_SECONDS = 600.0
"""Kubernetes resets the back-off of a container once it has run for ten minutes."""


class CrashStreak:
    """Counts crashes in a row: a failed start, a dead engine, a start without a shutdown before it.

    The count is reset when the server has served for `STEADY_SECONDS`, was stopped on purpose, or is ready after a
    failed start. `last` is the time of the last crash of a server that had served; 0 for none.
    """

    def __init__(self) -> None:
        self.last = 0.0
        self._count = 0
        self._runs = False
        self._ready_at: float | None = None
        self._failed_to_start = False

    def begin(self, at: float) -> None:
        """Note a start; a server that still ran before it has crashed without a line, at the latest a moment ago."""
        self.crash(at - RESOLUTION)
        self._runs, self._ready_at = True, None

    def ready(self, at: float) -> None:
        """Note that the server serves; only the first such line of a run counts."""
        if self._ready_at is None:
            self._count = 0 if self._failed_to_start else self._count
            self._runs, self._ready_at = True, at

    def crash(self, at: float) -> None:
        """Note that the server ended by itself; further lines about the same end do not count."""
        if self._runs:
            self._count, self._failed_to_start = self.count(at) + 1, self._ready_at is None
            self.last = self.last if self._failed_to_start else at
            self._runs = False

    def stop(self) -> None:
        """Note that the server was stopped on purpose; after a crash that changes nothing."""
        if self._runs:
            self._count, self._runs = 0, False

    def count(self, now: float) -> int:
        is_steady = self._runs and self._ready_at is not None and now - self._ready_at >= STEADY_SECONDS
        return 0 if is_steady else self._count


FREE, RANKS_END = "free_gibibytes", 60.0
"""The number of which the least of all ranks counts, and the seconds in which they report it."""


class EventCounts:
    """Counts each event, with its last time and the numbers of its last line that has some.

    An event without proof that vLLM wrote its line is not counted; its last time alone is kept.
    """

    def __init__(self) -> None:
        self._counts = dict.fromkeys(EVENTS, 0)
        self._times = dict.fromkeys(EVENTS, 0.0)
        self._values: dict[str, dict[str, float]] = {}
        self._sums = {(event.name, field): 0.0 for event in LOG_EVENTS for field in event.summed}
        self._unproven: dict[str, float] = {}

    @property
    def seen(self) -> frozenset[str]:
        """The events that were counted."""
        return frozenset(event for event, count in self._counts.items() if count)

    def count(self, event: str, at: float, **numbers: float) -> None:
        """Count an event; `numbers` are those that several lines add up to."""
        self._counts[event] += 1
        self._times[event] = max(at, self._times[event])
        if numbers:
            self._values[event] = numbers

    def read(self, pattern: Pattern, text: str, at: float) -> None:
        """Count the event of a line, and read the line's numbers."""
        is_same_end = at - self._times[pattern.name] <= RANKS_END
        self.count(pattern.name, at)
        values = dict[str, float]()
        for name, amount in read_values(pattern, text).items():
            with suppress(ValueError):  # "2.0.0 GiB": a line may be anybody's
                values[name] = parse_amount(amount)
        if values:
            known = self._values.get(pattern.name, values) if is_same_end else values
            self._values[pattern.name] = known if known.get(FREE, inf) < values.get(FREE, inf) else values
        for field, value in values.items():
            if (pattern.name, field) in self._sums:
                self._sums[pattern.name, field] += value

    def note_unproven(self, event: str, at: float) -> None:
        """Note a line that shows an event, without proof that vLLM wrote it."""
        self._unproven[event] = max(at, self._unproven.get(event, 0.0))

    def samples(self) -> Iterator[Sample]:
        sums_claimed = {event for event, _ in self._sums if event in self._unproven}
        for event, count in self._counts.items():
            if count or event not in sums_claimed:  # 0 would be measured: nobody knows how many lines are vLLM's
                yield "diag_vllm_log_events_total", (event,), count
            yield "diag_vllm_log_event_last_timestamp_seconds", (event,), self._times[event]
        for event, at in self._unproven.items():
            yield "diag_vllm_log_hearsay_timestamp_seconds", (event,), at
        for event, fields in self._values.items():
            for field, value in fields.items():
                yield "diag_vllm_log_value", (event, field), value
        for labels, total in self._sums.items():
            yield "diag_vllm_log_value_total", labels, total


_TOKEN = re.compile(
    r"""(?P<string>'(?:[^'\\]|\\.)*+'?|"(?:[^"\\]|\\.)*+"?)|(?P<open>[\[{(])|(?P<close>[\]})])"""
    r"""|(?P<word>[^\s'"\[\]{}(),:=]+)|(?P<is>[=:])"""
)
"""An open quote takes the rest; otherwise the end would be searched for each of many open quotes."""
_ALIASES = {"max_seq_len": "max_model_len", "chunked_prefill_enabled": "enable_chunked_prefill"}


def parse_settings(text: str) -> dict[str, str]:
    """Parse the arguments that vLLM prints: names and values at the outermost level; of a list, the first element.

    "non-default args: {'a': 1}", "args: Namespace(a=1)", "Initializing ... with config: a=1, b=..." Nested values, such
    as the settings of a draft model, are left out.
    """
    body = re.split(r"(?:args|config): ", text, maxsplit=1)[-1]
    outer = 1 if body.startswith(("{", "Namespace(")) else 0
    settings: dict[str, str] = {}
    depth, before, key = 0, "", ""
    for token in _TOKEN.finditer(body):
        kind, word = token.lastgroup, token[0].strip("'\"")
        if kind in ("open", "close"):
            depth += 1 if kind == "open" else -1
        elif kind == "is":
            key = before if depth == outer else ""
        elif key:
            settings.setdefault(key, word)
            key = ""
        elif depth == outer:
            before = word
    return settings


class LoggedConfig:
    """Version, model and configuration of the latest start: numbers and words of the allow-lists, nothing else."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}
        self.words: Mapping[str, str] = {}
        self.version = ""
        self.model = ""
        self.platform = ""
        self.has_all_args = False
        """True if vLLM's own list of the non-default arguments was read."""
        self.compiles = True
        self._has_served_name = False

    def read(self, pattern: Pattern, text: str) -> None:
        settings = read_values(pattern, text)
        if pattern.name in ("args", "config"):
            settings |= parse_settings(text)
        self.has_all_args = self.has_all_args or pattern.name == "args"
        self.version = printable(settings.get("version", self.version), 40)
        self.platform = settings.get("platform", self.platform)

        served, model = settings.get("served_model_name", "None"), settings.get("model", "None")
        if served != "None":
            self.model, self._has_served_name = model_name(served), True
        elif not self._has_served_name and model != "None":
            self.model = model_name(model)

        self.words = {**self.words, **words(settings)}
        for name, value in settings.items():
            flag = _ALIASES.get(name, name)
            size = number(value.replace(",", "")) if flag in FLAGS else None
            if size is not None and size >= 0:
                self.numbers[flag] = size
        if pattern.name == "config":
            self.compiles = "a V1 LLM" in text and not self.numbers.get("enforce_eager")


def model_name(model: str) -> str:
    """Return a model's served name, or the last part of its path, without anything that looks like a secret."""
    name = model.strip().rstrip("/")
    is_path = name.startswith(("/", ".", "~")) or "://" in name or "\\" in name
    return printable(hidden(re.split(r"[/\\]", name)[-1] if is_path else name), 200)


MOST_TEXT, MOST_CAUSE, MOST_NAME = 300, 160, 200
"""Characters of the quoted line, of its cause, and of a file's name."""
SIGNALLED = "[shutdown] EngineCore: trigger received signal="
"""Logged by an engine that receives a signal to stop, also during its start; its exceptions are consequences."""
_UNRECOGNIZED = re.compile(r"(.*error: unrecognized arguments: )(.*)", re.DOTALL)
_NUMBER = re.compile(r"[\d.,]{1,12}")
_REPEATED = re.compile(r" ?\[type=\w+, input_value=.*", re.DOTALL)
"""The input that pydantic repeats, which may be anything."""
GIVES_REASON = 3
BURST = 60.0
"""Seconds after which a library's warning is no consequence of the one before."""


class RootCauseTracker:
    """Chooses the log line that explains why a start failed or a server died, once an event shows that one did.

    A worker logs its exception, then EngineCore that a worker failed, then the API server that EngineCore failed: the
    first line that gives more than the failure of another process counts. Clients' input is logged too, so only lines
    are quoted that vLLM or Python writes about the end of a process, and lines that show an event.
    """

    def __init__(self, file: str) -> None:
        self._file = quote(file, MOST_NAME)
        self._error: ErrorLine | None = None
        self._warned: ErrorLine | None = None
        self._ended = False

    def begin(self) -> None:
        self._error, self._ended = None, False

    def consider(self, error: ErrorLine) -> None:
        """Keep a line if it is more informative than the one kept so far."""
        kept = self._error
        gives_reason = informativeness(error.text) == GIVES_REASON
        if kept is not None and error.at - kept.at > SURVIVED and (gives_reason or not self._ended):
            self.begin()
        if self._error is None or informativeness(error.text) > informativeness(self._error.text):
            self._error = error

    def warn(self, line: ErrorLine) -> None:
        """Keep the line in which a library of collectives says what failed; of several at a time the first."""
        if self._warned is None or line.at - self._warned.at > BURST:
            self._warned = line

    @property
    def _told(self) -> ErrorLine | None:
        """The line that explains the failure; NCCL's own warning, if the exception only says that NCCL failed."""
        error, warned = self._error, self._warned
        if error is None or warned is None or abs(error.at - warned.at) > SURVIVED:
            return error
        if informativeness(error.text) == GIVES_REASON and not MARKS.of_nccl.match(error.text):
            return error
        return replace(error, text=warned.text, number=warned.number, process=warned.process, cause=error.text)

    @property
    def reason(self) -> str:
        return self._told.text if self._told is not None and self._ended else ""

    @property
    def number(self) -> int:
        """Return the number of the line in the log, 0 if unknown."""
        return self._told.number if self._told is not None and self._ended else 0

    @property
    def line(self) -> EventLine | None:
        """Return the line that explains the failure."""
        error = self._told if self._ended else None
        texts = (quote(error.text, MOST_TEXT), self._file, error.number, error.process, error.at) if error else None
        return EventLine(error.event, *texts, quote(error.frames, MOST_TEXT)) if error and texts else None

    @property
    def has_reason(self) -> bool:
        return self._error is not None and informativeness(self._error.text) == GIVES_REASON

    def end(self) -> None:
        """Note an event: a start failed, the engine died, or a device or its memory failed."""
        self._ended = True

    def samples(self, crash: float = 0.0) -> Iterator[Sample]:
        """Yield the line as labels with its time as the value, or with the time of the crash that it explains."""
        error = self._told
        if crash:
            error = error if self._ended and error else ErrorLine("", 0, crash, "", event="")
        elif error is None or not self._ended:
            return
        line = str(error.number) if error.number and self._file else ""
        text, cause = quote(error.text, MOST_TEXT), quote(error.cause, MOST_CAUSE)
        frames = quote(error.frames, MOST_TEXT)
        labels = (error.event, quote(error.process, MOST_NAME), self._file, line, text, cause, frames)
        yield f"diag_vllm_log_{'crash' if crash else 'error'}_timestamp_seconds", labels, crash or error.at


def informativeness(text: str) -> int:
    """Return 3 for a reason, 2 for the process that failed, 1 for a signal, which vLLM passes on to engines, else 0.

    A line that announces an exception has -1: the exception below it says at least which process failed.
    """
    if MARKS.names_process.match(text):
        return 2
    if text.startswith(SIGNALLED):
        return 1
    if MARKS.no_reason.search(text):
        return -1 if MARKS.headline.search(text) else 0
    return GIVES_REASON


def quote(text: str, most: int) -> str:
    """Return a text printable, without secrets, in at most `most` characters."""
    text = _REPEATED.sub("", text[:MOST_READ].strip())
    if unrecognized := _UNRECOGNIZED.match(text):
        words = unrecognized[2].split()
        text = unrecognized[1] + " ".join(map(_without_value, words, ["", *words]))
    return printable(hidden(text), most)


def _without_value(word: str, before: str) -> str:
    """Hide the value of an argument that vLLM does not recognise: it may be a key, with a misspelt name before it.

    The argument's own name stays, since it is what is wrong, as does a word behind no argument, such as a subcommand.
    """
    name, has_value, value = word.partition("=")
    if not word.startswith("-"):
        if before in known() and word in known()[before].choices:  # a word of vLLM's own list is no key
            return word
        return HIDDEN if before.startswith("-") and "=" not in before and not _NUMBER.fullmatch(word) else word
    if not (is_plain_name(name) or is_like_a_flag(name)):
        return f"--{HIDDEN}"
    is_secret = has_value and not _NUMBER.fullmatch(value) and not (name in known() and value in known()[name].choices)
    return f"{name}={HIDDEN}" if is_secret else word
