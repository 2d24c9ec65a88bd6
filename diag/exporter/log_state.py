"""What a vLLM server's log says of it: lines in, samples out. Pure: neither files nor a clock.

A log has history and a present. A line's own time wins: the outermost one, for `kubectl logs --timestamps`, CRI, Docker
and journald know more than vLLM, which writes neither year nor zone. A line without one (uvicorn's, a traceback, a bar)
takes the moment at which it was read while the log is followed live, and the last time seen while an old log is read
from its beginning. No line is newer than the moment at which it was read.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, tzinfo
from pathlib import Path
from typing import NamedTuple

from diag.exporter.families import Sample
from diag.exporter.log_lines import EVENTS, OF_THE_DEVICE, PHASES, RAW, STAGES, Pattern, amount, recognise, values
from diag.sources.launch import FLAGS, hidden, number
from diag.sources.text import printable

MOST_CHARACTERS = 64 * 2**10
"""Of one line; the rest of it is not looked at."""
MOST_BARS = 1_000
DAY = 86_400.0
_READY = STAGES.index("ready")

# -- the anatomy of a line --------------------------------------------------------------------------------------------

_ISO = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
_OUTER = re.compile(
    r"(?:\[pod/\S{1,300}\] )?(?:[\w.-]{1,100} +\| )?"  # kubectl logs --prefix, docker compose logs
    rf"(?:(?P<iso>{_ISO}) (?:std(?:out|err) (?P<part>[FP])(?::\S*)? |\S{{1,100}} \S{{1,100}}\[\d+\]: )?"
    r"|(?P<short>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d)(?:\.\d+)? \S{1,100} \S{1,100}\[\d+\]: )?"
)
_HEAD = re.compile(
    r"(?:\((?P<process>[A-Za-z][^()]{0,80}?) pid=(?P<pid>\d+)[^()]{0,80}\) ?)?(?:\[rank\d+\]: ?)?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<time>\d\d-\d\d \d\d:\d\d:\d\d) \[?[^\]\s]{1,200}:\d+\] ?"
    r"|(?P<uvicorn>DEBUG|INFO|WARNING|ERROR|CRITICAL):\s+"
    r"|\[?(?P<torch>[IWEF])(?P<day>\d{4}) (?P<clock>\d\d:\d\d:\d\d)\.\d+ [^\]]{1,300}\] ?"  # glog: 1121 02:32:18.123456
    r"|\[(?P<old>[IWEF]) [\w.]{1,80}:\d+\] ?)?"
)
_ACCESS = re.compile(
    rf"(?:(?P<iso>{_ISO}) (?:std(?:out|err) F )?)?(?:\(\w{{1,40}} pid=\d+\) )?"
    r'INFO: +[^\s"]{1,80} - "[A-Z]{3,7} /'
)
"""A request in uvicorn's log: most lines, so they are not taken apart."""
_END = re.compile(r"[\r\n]+")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BAR = re.compile(r"(?P<what>.{3,120}?): +(?P<percent>\d{1,3})%(?:.{0,200}?\| *(?P<done>\d+)/(?P<total>\d+) \[)?")
_GLUED = re.compile(
    r"(.{3,120}?: +\d{1,3}%.{0,200}?\| *\d+/\d+ \[[^\]]{0,80}\])"
    r"(\(\w[^()]{0,80} pid=\d+.*|(?:DEBUG|INFO|WARNING|ERROR) \d.*)"
)
"""A bar that has not ended, and what another process wrote behind it."""
_GLOG = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_PLAIN = ("(", "INFO", " ", "Traceback", "ERROR", "WARNING", "DEBUG")
"""Most lines begin so, and with nothing around them."""


class Line(NamedTuple):
    """A line without what stands before its text; `level` is RAW where it has none, `at` its own time."""

    text: str
    level: str = RAW
    process: str = ""
    pid: str = ""
    at: float | None = None


class Reader:
    """Takes lines apart; `zone` is that of times without one, None for this host's."""

    def __init__(self, zone: tzinfo | None = None) -> None:
        self._zone = zone
        self._part = ""
        self._last: tuple[str, float] = ("", 0.0)

    def read(self, line: str, read_at: float) -> list[Line]:
        """The lines in it: none while it is the first part of one, several where a bar was redrawn in one record.

        A time without a year is in the latest year in which it is no more than a day after `read_at`.
        """
        text, at, whole = line, None, True
        if line.startswith('{"'):
            text, at, whole = self._json(line, read_at)
        elif not line.startswith(_PLAIN):
            match = _OUTER.match(line)
            if match and match.end():
                text, at = line[match.end() :], self._outer(match, read_at)
                whole = match["part"] != "P"
        self._part = (self._part + text)[:MOST_CHARACTERS]
        if not whole:
            return []
        text, self._part = self._part, ""
        return [self._head(each, at, read_at) for each in _parts(text)]

    def _json(self, line: str, read_at: float) -> tuple[str, float | None, bool]:
        """A record of Docker's json-file driver, or of vLLM's own JSON format; any other is passed on as it is."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return line, None, True
        if isinstance(record.get("log"), str):
            return record["log"], self.moment(record.get("time"), read_at), record["log"].endswith("\n")
        if not isinstance(record.get("message"), str):
            return line, None, True
        level = record.get("levelname")
        head = f"{level}:     " if level in _GLOG.values() else ""
        return head + record["message"], self.moment(record.get("asctime"), read_at), True

    def _outer(self, match: re.Match[str], read_at: float) -> float | None:
        if match["iso"]:
            return self.moment(match["iso"], read_at)
        return self._dated(match["short"], "%b %d %H:%M:%S", read_at) if match["short"] else None

    def moment(self, text: object, read_at: float) -> float | None:
        """Unix time of what an outer log or a record says; None for what is no time."""
        if not isinstance(text, str):
            return None
        try:
            moment = datetime.fromisoformat(text.replace(",", "."))
            return (moment if moment.tzinfo else moment.replace(tzinfo=self._zone)).timestamp()
        except (ValueError, OverflowError, OSError):
            return self._dated(text, "%m-%d %H:%M:%S", read_at)

    def _head(self, text: str, at: float | None, read_at: float) -> Line:
        text = _ANSI.sub("", text) if "\x1b" in text else text
        head = _HEAD.match(text)
        if head is None or not head.end():
            return Line(text, at=at)
        level = head["level"] or head["uvicorn"] or _GLOG.get(head["torch"] or head["old"], RAW)
        if at is None and head["time"]:
            at = self._dated(head["time"], "%m-%d %H:%M:%S", read_at)
        if at is None and head["day"]:
            at = self._dated(f"{head['day']} {head['clock']}", "%m%d %H:%M:%S", read_at)
        return Line(text[head.end() :], level, head["process"] or "", head["pid"] or "", at)

    def _dated(self, text: str, form: str, read_at: float) -> float | None:
        """Unix time of a text without a year; lines of the same second are looked up."""
        if text == self._last[0] and self._last[1] <= read_at + DAY:
            return self._last[1]
        latest = datetime.fromtimestamp(read_at + DAY, self._zone).year
        for year in range(latest, latest - 9, -1):  # a 29 February is at most eight years away
            try:
                moment = datetime.strptime(f"{year} {text}", f"%Y {form}").replace(tzinfo=self._zone).timestamp()
            except (ValueError, OverflowError, OSError):
                continue
            if moment <= read_at + DAY:
                self._last = text, moment
                return moment
        return None


def _parts(text: str) -> Iterable[str]:
    if "\r" in text or "\n" in text:
        return (each for part in _END.split(text) if part for each in _parts(part))
    glued = _GLUED.match(text) if "%" in text else None
    return glued.groups() if glued else (text,)


def entries(path: Path, zone: tzinfo | None, year_hint: float) -> list[tuple[float, str]]:
    """Every line of a recorded log with its time, to be fed to a `ServerLog` of the same zone up to any moment.

    The times never go back; a line without one has that of the line before, or of the first line that has one.
    `year_hint` is a unix time at or after the end of the log, such as that of the recording's last scrape.
    """
    reader, found = Reader(zone), []
    for line in _parts(path.read_text(encoding="utf-8", errors="replace")):
        own = next((each.at for each in reader.read(line[:MOST_CHARACTERS], year_hint) if each.at is not None), None)
        found.append((own, line))
    at = next((own for own, _ in found if own is not None), year_hint)
    timed = []
    for own, line in found:
        at = at if own is None else max(at, own)
        timed.append((at, line))
    return timed


# -- the start --------------------------------------------------------------------------------------------------------


class Startup:
    """How far one start is. Stages only go forward: a rank that is late does not move it back.

    All phases are 0 once it failed or the server was shut down; the times spent stay. A server first seen at work is
    ready, and nothing is known of its start. Progress is a line of a stage, or a bar that moved: a bar redrawn where it
    stands, a warning, and the line that a rank waits are none. It ends with being ready.
    """

    def __init__(self, at: float | None = None) -> None:
        self.stage = None if at is None else 0
        self.over = False
        self._entered = at or 0.0
        self._moved = at
        self._spent: dict[str, float] = {}
        self._bars: dict[tuple[str, int], int] = {}
        self._ratio: float | None = None

    @property
    def seen(self) -> bool:
        """Neither failed nor shut down, and there."""
        return self.stage is not None and not self.over

    @property
    def ready(self) -> bool:
        """The start ended well, whatever came after."""
        return self.stage == _READY

    @property
    def under_way(self) -> bool:
        """The present phase still takes time."""
        return self.seen and not self.ready

    def reach(self, stage: int, at: float) -> None:
        """A line of that stage."""
        if self.over or self.ready:
            return
        if self.stage is None:
            self.stage, self._entered = stage, at
        self._moved = max(at, self._moved or at)
        if stage > self.stage:
            self._spend(at)
            self.stage, self._ratio = stage, None

    def move(self, at: float) -> None:
        """A line that shows progress inside of a stage."""
        if self.under_way:
            self.reach(0, at)

    def bar(self, stage: int, what: str, done: int, total: int, at: float) -> None:
        """A bar as it was drawn: the ranks draw the same one, so the highest count is where it is."""
        if done <= self._bars.get((what, total), -1) or len(self._bars) > MOST_BARS:
            return
        self._bars[what, total] = done
        self.reach(stage, at)
        if self.under_way and self.stage == stage and total:
            self._ratio = min(done / total, 1.0)

    def end(self, at: float) -> None:
        """The start failed, or the server was shut down."""
        if self.under_way:
            self._spend(at)
        self.over = True

    def _spend(self, at: float) -> None:
        phase = _phase(self.stage or 0)
        self._spent[phase] = self._spent.get(phase, 0.0) + max(at - self._entered, 0.0)
        self._entered = at

    def samples(self, now: float) -> Iterator[Sample]:
        """Nothing where neither a start nor a server at work was seen; `ready` takes no time."""
        if self.stage is None:
            return
        present = "" if self.over else _phase(self.stage)
        for phase in PHASES:
            yield "diag_vllm_startup_phase", (phase,), float(phase == present)
        spent = dict(self._spent)
        if self.under_way:
            spent[present] = spent.get(present, 0.0) + max(now - self._entered, 0.0)
        for phase, seconds in spent.items():
            yield "diag_vllm_startup_phase_seconds", (phase,), seconds
        if self.under_way and self._ratio is not None:
            yield "diag_vllm_startup_progress_ratio", (), self._ratio
        if self._moved is not None:
            yield "diag_vllm_startup_last_progress_timestamp_seconds", (), self._moved


def _phase(stage: int) -> str:
    return "warm_up" if STAGES[stage] == "kernel_warm_up" else STAGES[stage]


# -- how it runs ------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<open>[\[{(])|(?P<close>[\]})])"""
    r"""|(?P<word>[^\s'"\[\]{}(),:=]+)|(?P<is>[=:])"""
)
_ALIASES = {"max_seq_len": "max_model_len", "chunked_prefill_enabled": "enable_chunked_prefill"}


def settings(text: str) -> dict[str, str]:
    """Names and values at the outermost level of what vLLM prints of its arguments; of a list, the first element.

    "non-default args: {'a': 1}", "args: Namespace(a=1)", "Initializing ... with config: a=1, b=..." What is nested,
    such as the settings of a draft model, is another's.
    """
    body = re.split(r"(?:args|config): ", text, maxsplit=1)[-1]
    outer = 1 if body.startswith(("{", "Namespace(")) else 0
    found: dict[str, str] = {}
    depth, before, key = 0, "", ""
    for token in _TOKEN.finditer(body):
        kind, word = token.lastgroup, token[0].strip("'\"")
        if kind in ("open", "close"):
            depth += 1 if kind == "open" else -1
        elif kind == "is":
            key = before if depth == outer else ""
        elif key:
            found.setdefault(key, word)
            key = ""
        elif depth == outer:
            before = word
    return found


def named(model: str) -> str:
    """A model's name: as it is served, or the last part of a path, without anything that looks like a secret."""
    name = model.strip().rstrip("/")
    is_path = name.startswith(("/", ".", "~")) or "://" in name or "\\" in name
    return printable(hidden(re.split(r"[/\\]", name)[-1] if is_path else name), 200)


class Facts:
    """Version, model and configuration of the latest start: numbers of the allow-list, nothing else."""

    def __init__(self) -> None:
        self.config: dict[str, float] = {}
        self.version = ""
        self.model = ""
        self.compiles = True
        self._served = False

    def read(self, pattern: Pattern, text: str) -> None:
        """What a line of the table says."""
        found = values(pattern, text)
        if pattern.name in ("args", "config"):
            found |= settings(text)
        self.version = printable(found.get("version", self.version), 40)
        self._name(found)
        for name, value in found.items():
            flag = _ALIASES.get(name, name)
            size = number(value.replace(",", "")) if flag in FLAGS else None
            if size is not None and size >= 0:
                self.config[flag] = size
        if pattern.name == "config":
            self.compiles = "a V1 LLM" in text and not self.config.get("enforce_eager")

    def _name(self, found: Mapping[str, str]) -> None:
        served = found.get("served_model_name", "None")
        if served != "None":
            self.model, self._served = named(served), True
        elif not self._served and found.get("model", "None") != "None":
            self.model = named(found["model"])


# -- everything together ----------------------------------------------------------------------------------------------

_ENTRY = re.compile(
    r' +File "(?:<frozen runpy>|.{0,300}/runpy\.py|.{0,300}/bin/vllm|.{0,300}/api_server\.py", line \d+, in <module>)'
)
_EXCEPTION = re.compile(r"(?P<error>[A-Za-z_][\w.]{0,200}(?:Error|Exception)(?::|$))|KeyboardInterrupt|SystemExit")


class ServerLog:
    """Fed with lines in their order, knows at any time what they told.

    Counts and times of events outlive a restart of the server, as do the numbers of the last line of each; phases,
    progress, configuration, version and model are those of the latest start.
    """

    def __init__(self, zone: tzinfo | None = None) -> None:
        self.ahead = 0.0
        """By how many seconds the last line that was read live and has a time is ahead of the clock: a wrong zone."""
        self.latest: float | None = None
        """Unix time of the last line of any kind."""
        self._reader = Reader(zone)
        self._startup = Startup()
        self._facts = Facts()
        self._banners: set[str] = set()
        self._pid = ""
        self._own: float | None = None
        self._counts = dict.fromkeys(EVENTS, 0)
        self._times = dict.fromkeys(EVENTS, 0.0)
        self._values: dict[str, dict[str, float]] = {}
        self._of_a_request = False
        self._traceback: str = ""

    @property
    def config(self) -> Mapping[str, float]:
        """What is known of the running configuration by now, names of `launch.FLAGS`."""
        return dict(self._facts.config)  # a copy: another thread may read it

    @property
    def version(self) -> str:
        """Of vLLM; "" where not said."""
        return self._facts.version

    @property
    def model(self) -> str:
        """The name it is served under, never a path; "" where not said."""
        return self._facts.model

    def feed(self, line: str, read_at: float, live: bool = True) -> None:
        """One line, or one redrawing of a bar, without its end; `live` says what a line without a time takes."""
        request = _ACCESS.match(line)
        if request:
            own = self._reader.moment(request["iso"], read_at)
            self._startup.reach(_READY, self._at(own, read_at, live))
            return
        for each in self._reader.read(line[:MOST_CHARACTERS], read_at):
            self._take(each, self._at(each.at, read_at, live))

    def _at(self, own: float | None, read_at: float, live: bool) -> float:
        if own is not None:
            self.ahead = own - read_at if live else 0.0
            self._own = at = min(own, read_at)
        else:
            at = read_at if live or self._own is None else self._own
        self.latest = max(at, self.latest or at)
        return at

    def _take(self, line: Line, at: float) -> None:
        pattern = recognise(line.text, line.level)
        if line.level != RAW:
            self._of_a_request = line.text.startswith("Exception in ASGI application")
        elif self._uncaught(line.text) and not (pattern and pattern.name == "engine_start_failed"):
            self._fail(at)
        if pattern:
            getattr(self, f"_on_{pattern.kind}")(pattern, line, at)

    def _uncaught(self, text: str) -> bool:
        """Whether this is the last line of a traceback that ended the process: one that began at its entry point."""
        if text.startswith("Traceback (most recent call last)"):
            self._traceback = "begun"
        elif self._traceback == "begun":
            self._traceback = "uncaught" if _ENTRY.match(text) else ""
        elif self._traceback == "uncaught" and (end := _EXCEPTION.match(text)):
            self._traceback = ""
            return end["error"] is not None
        return False

    def _on_banner(self, pattern: Pattern, line: Line, at: float) -> None:
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

    def _begin(self, at: float) -> None:
        self._startup, self._facts, self._banners = Startup(at), Facts(), set()

    def _on_stage(self, pattern: Pattern, line: Line, at: float) -> None:
        name = pattern.name
        if name == "compile" and not self._facts.compiles:
            name = "profile_memory"
        stage, bar = STAGES.index(name), _BAR.match(line.text) if line.level == RAW else None
        if bar:
            done, total = (bar["done"], bar["total"]) if bar["done"] else (bar["percent"], 100)
            self._startup.bar(stage, bar["what"], int(done), int(total), at)
        else:
            self._startup.reach(stage, at)
        self._facts.read(pattern, line.text)

    def _on_setting(self, pattern: Pattern, line: Line, at: float) -> None:
        self._facts.read(pattern, line.text)
        self._startup.move(at)

    def _on_progress(self, pattern: Pattern, line: Line, at: float) -> None:
        self._startup.move(at)

    def _on_serves(self, pattern: Pattern, line: Line, at: float) -> None:
        self._startup.reach(_READY, at)

    def _on_ends(self, pattern: Pattern, line: Line, at: float) -> None:
        self._startup.end(at)

    def _on_fatal(self, pattern: Pattern, line: Line, at: float) -> None:
        if self._of_a_request:
            return
        self._begin(at)
        self._fail(at)

    def _on_event(self, pattern: Pattern, line: Line, at: float) -> None:
        if self._doubtful(pattern, line):
            return
        if pattern.name == "engine_start_failed":
            self._fail(at)
            return
        self._count(pattern.name, at)
        found = {name: amount(value) for name, value in values(pattern, line.text).items()}
        if found:
            self._values[pattern.name] = found

    def _doubtful(self, pattern: Pattern, line: Line) -> bool:
        """Text that a client may have sent; or the death of an engine whose server was told to stop."""
        if self._startup.ready and self._startup.over and pattern.name in ("engine_dead", "worker_died"):
            return True
        if line.level == RAW:
            return self._of_a_request
        return line.process.lower().startswith("apiserver") and pattern.name in OF_THE_DEVICE

    def _count(self, event: str, at: float) -> None:
        self._counts[event] += 1
        self._times[event] = max(at, self._times[event])

    def _fail(self, at: float) -> None:
        """What breaks after the start ended is no failure of it."""
        if self._startup.ready:
            return
        self._count("engine_start_failed", at)
        if self._startup.stage is None:
            self._startup = Startup(at)
        self._startup.end(at)

    def samples(self, now: float) -> list[Sample]:
        """Everything that is known, at that time."""
        found = list(self._startup.samples(now))
        for event, count in self._counts.items():
            found.append(("diag_vllm_log_events_total", (event,), count))
            found.append(("diag_vllm_log_event_last_timestamp_seconds", (event,), self._times[event]))
        for event, fields in self._values.items():
            found += [("diag_vllm_log_value", (event, field), value) for field, value in fields.items()]
        if self.latest is not None:
            found.append(("diag_vllm_log_last_line_timestamp_seconds", (), self.latest))
        return found
