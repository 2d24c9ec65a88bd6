"""The anatomy of a log's line: what stands before its text, and its time.

A log has history and a present. A line's own time wins: the outermost one, for `kubectl logs --timestamps`, CRI, Docker
and journald know more than vLLM, which writes neither year nor zone. Only a line feed ends a line: a carriage return,
which bars are redrawn with, may be part of a prompt, as may a head. So what stands around the first line with a head of
vLLM's stands around all of them, and what is not at the beginning of a line is marked.
"""

import json
import re
from collections.abc import Iterator
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Literal, NamedTuple

from diag.core.files import read_ends
from diag.exporter.log.pattern import RAW

MOST_CHARACTERS = 64 * 2**10
"""Of one line; the rest of it is not looked at."""
FIRST, LAST = 4 * 2**20, 16 * 2**20
"""Bytes read of the beginning and of the end of a log that is read as a whole: 15 s at worst."""
LONGEST = 2**20
"""Bytes kept of one line with all redrawings of its bars."""
DAY = 86_400.0
JOURNAL_SPLITS = 48 * 2**10
"""Bytes after which journald begins a new line (LineMax=)."""
Form = Literal["line", "inside", "json", "foreign"]
"""How a text stood there: as a line; behind the beginning of one; as a record of vLLM's JSON format; as one of a JSON
format that names no logger of vLLM.
"""

_ISO = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
_OUTER = re.compile(
    r"(?P<pod>\[pod/\S{1,300}\] )?(?P<service>[\w.-]{1,100} +\| )?"  # kubectl logs --prefix, docker compose logs
    rf"(?:(?P<iso>{_ISO}) "
    r"(?:(?P<stream>stdout|stderr) (?P<part>[FP])(?::\S*)? |(?P<host>\S{1,100}) \S{1,100}\[\d+\]: )?"
    r"|(?P<short>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d)(?:\.\d+)? \S{1,100} \S{1,100}\[\d+\]: )?"
)
_HEAD = re.compile(
    r"(?:\((?P<process>[A-Za-z][^()]{0,80}?) pid=(?P<pid>\d{1,10})[^()]{0,80}\) ?){0,3}(?:\[rank\d+\]: ?)?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<time>\d\d-\d\d \d\d:\d\d:\d\d)"
    r" \[?(?P<source>[^\]\s]{1,200}:\d+)\] ?"
    r"|(?P<uvicorn>DEBUG|INFO|WARNING|ERROR|CRITICAL):\s+"
    r"|\[?(?P<torch>[IWEF])(?P<day>\d{4}) (?P<clock>\d\d:\d\d:\d\d)\.\d+ (?P<glog>[^\]]{1,300})\] ?"  # 1121 02:32:18.12
    r"|\[(?P<old>[IWEF]) (?P<cpp>[\w.]{1,80}:\d+)\] ?)?"
)
ACCESS = re.compile(
    rf"(?:(?P<iso>{_ISO}) (?:std(?:out|err) F )?)?(?:\(\w{{1,40}} pid=\d+\) )?"
    r'INFO: +[^\s"]{1,80} - "[A-Z]{3,7} /'
)
"""A request in uvicorn's log: most lines, so they are not taken apart."""
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
BAR = re.compile(r"(?P<what>.{3,120}?): +(?P<percent>\d{1,3})%(?:.{0,200}?\| *(?P<done>\d+)/(?P<total>\d+) \[)?")
_GLUED = re.compile(
    r"(.{3,120}?: +\d{1,3}%.{0,200}?\| *\d+/\d+ \[[^\]]{0,80}\])"
    r"(\(\w[^()]{0,80} pid=\d+.*|(?:DEBUG|INFO|WARNING|ERROR) \d.*)"
)
"""A bar that has not ended, and what another process wrote behind it."""
_GLOG = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_LAYOUT = ("pod", "service", "iso", "stream", "host", "short")
_PLAIN = ("(", "INFO", " ", "Traceback", "ERROR", "WARNING", "DEBUG")
"""Most lines begin so, and with nothing around them."""


class Line(NamedTuple):
    """A line without what stands before its text, its `head`; `level` is RAW where it has none, `at` its own time.

    `source` is the file of vLLM that logs it and the line there, core.py:1510; `number` that of the line in the log's
    file, 0 where it is not known; `stamped` says that the time is not vLLM's, but of who keeps its log.
    """

    text: str
    level: str = RAW
    process: str = ""
    pid: str = ""
    at: float | None = None
    source: str = ""
    number: int = 0
    head: str = ""
    form: Form = "line"
    stamped: bool = False


class LineReader:
    """Takes lines apart; `zone` is that of times without one, None for this host's."""

    def __init__(self, zone: tzinfo | None = None) -> None:
        self._zone = zone
        self._parts: dict[str, str] = {}
        self._stream: str | None = None
        self._layout: tuple[str, ...] | None = None
        self._cut = False
        self._last: tuple[str, float] = ("", 0.0)

    def read(self, line: str, read_at: float) -> list[Line]:
        """The lines in it: none while it is the first part of one, several where a bar was redrawn in one record.

        What stood behind a carriage return begins with that. A time without a year is in the latest year in which it
        is no more than a day after `read_at`.
        """
        if line[:1] == "\r":
            return self._redrawn(line, read_at)
        layout: tuple[str, ...] = ()
        text, at, whole, self._stream = line, None, True, None
        if line.startswith('{"log"'):
            text, at, layout, whole = self._docker(line, read_at)
        elif not line.startswith(_PLAIN):
            match = _OUTER.match(line)
            if match and match.end():
                text, at = line[match.end() :], self._outer(match, read_at)
                layout = tuple(name for name in _LAYOUT if match[name])
                whole, self._stream = match["part"] != "P", match["stream"]
        if self._layout not in (None, layout):
            return [Line(line)]
        if ("host" in layout or "short" in layout) and self._was_cut(text):
            return []
        return self._joined(text, at, layout, whole, read_at)

    def _redrawn(self, line: str, read_at: float) -> list[Line]:
        """What stood behind a carriage return of the line before."""
        if self._stream in self._parts:
            self._parts[self._stream] = (self._parts[self._stream] + line)[:MOST_CHARACTERS]
            return []
        return [self._head(part, None, read_at)._replace(form="inside") for part in _parts(line[1:])]

    def _was_cut(self, text: str) -> bool:
        """Whether the line before was as long as journald lets one be: this is the rest of it."""
        is_cut = len(text) * 4 >= JOURNAL_SPLITS and len(text.encode("utf-8", "replace")) >= JOURNAL_SPLITS
        was_cut, self._cut = self._cut, is_cut
        return was_cut

    def _joined(self, text: str, at: float | None, layout: tuple[str, ...], whole: bool, read_at: float) -> list[Line]:
        """The lines of a record, once its last part is there; the two streams come in parts of their own."""
        stream = self._stream or ""
        if stream in self._parts or not whole:
            text = (self._parts.pop(stream, "") + text)[:MOST_CHARACTERS]
        if not whole:
            self._parts[stream] = text
            return []
        lines = self._record(text, at, read_at) if text.startswith('{"') else self._lines(text, at, read_at)
        if self._layout is None and lines and lines[0].source:
            self._layout = layout
        return lines

    def _lines(self, text: str, at: float | None, read_at: float) -> list[Line]:
        first, *others = _parts(text) or ("",)
        lines = [self._head(first, at, read_at)]
        return lines + [self._head(part, at, read_at)._replace(form="inside") for part in others]

    def _docker(self, line: str, read_at: float) -> tuple[str, float | None, tuple[str, ...], bool]:
        """A record of Docker's json-file driver; any other is passed on as it is."""
        record = _object(line)
        text = record.get("log")
        if not isinstance(text, str):
            return line, None, (), True
        self._stream = str(record.get("stream"))
        return text.removesuffix("\n"), self.moment(record.get("time"), read_at), ("log",), text.endswith("\n")

    def _record(self, text: str, at: float | None, read_at: float) -> list[Line]:
        """A record of vLLM's own JSON format, with its traceback; of any other, the message alone."""
        record = _object(text)
        message, name = record.get("message"), str(record.get("name", ""))
        if not isinstance(message, str):
            return [Line(text, at=at)]
        level = str(record.get("levelname"))
        time = at if at is not None else self.moment(record.get("asctime"), read_at)
        known = Line(
            message, level if level in _GLOG.values() else RAW, at=time, form="foreign", stamped=at is not None
        )
        known = known._replace(process=str(record.get("processName", "")), pid=str(record.get("process", "")))
        if name == "vllm" or name.startswith("vllm."):
            file = record.get("filename") or f"{name.rpartition('.')[2]}.py"
            head = f"{known.pid} {level} {record.get('asctime')} {file}:{record.get('lineno', 0)} "
            known = known._replace(source=f"{file}:{record.get('lineno', 0)}", head=head, form="json")
        elif name.startswith("uvicorn."):
            known = known._replace(form="json")
        first, *others = message.split("\n")
        trace = str(record.get("exc_info", "")).split("\n") if record.get("exc_info") else []
        return [
            known._replace(text=first),
            *(known._replace(text=part, form="inside") for part in others),
            *(known._replace(text=part) for part in trace),
        ]

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
        head, stamped = _HEAD.match(text), at is not None
        if head is None or not head.end():
            return Line(text, at=at, stamped=stamped)
        level = head["level"] or head["uvicorn"] or _GLOG.get(head["torch"] or head["old"], RAW)
        if at is None and head["time"]:
            at = self._dated(head["time"], "%m-%d %H:%M:%S", read_at)
        if at is None and head["day"]:
            at = self._dated(f"{head['day']} {head['clock']}", "%m%d %H:%M:%S", read_at)
        source = (head["source"] or (head["glog"] or "").rpartition(" ")[2] or head["cpp"] or "").rpartition("/")[2]
        end = head.end()
        return Line(
            text[end:], level, head["process"] or "", head["pid"] or "", at, source, 0, text[:end], "line", stamped
        )

    def _dated(self, text: str, form: str, read_at: float) -> float | None:
        """Unix time of a text without a year that ends in its seconds; lines of the same minute are looked up."""
        minute, seconds = text[:-2], text[-2:]
        if minute == self._last[0] and seconds < "60" and self._last[1] + int(seconds) <= read_at + DAY:
            return self._last[1] + int(seconds)
        latest = datetime.fromtimestamp(read_at + DAY, self._zone).year
        for year in range(latest, latest - 9, -1):  # a 29 February is at most eight years away
            try:
                moment = datetime.strptime(f"{year} {text}", f"%Y {form}").replace(tzinfo=self._zone).timestamp()
            except (ValueError, OverflowError, OSError):
                continue
            if moment <= read_at + DAY:
                self._last = minute, moment - int(seconds)
                return moment
        return None


def _object(text: str) -> dict[str, object]:
    """A JSON object; empty for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _parts(text: str) -> list[str]:
    """A text, the redrawings of a bar behind it, and what another process wrote behind a bar."""
    if "\r" in text or "\n" in text:
        return [line for part in re.split(r"[\r\n]+", text) if part for line in _parts(part)]
    glued = _GLUED.match(text) if "%" in text else None
    return list(glued.groups()) if glued else [text]


def cut(line: str) -> list[str]:
    """A line of a file, and what stands behind its carriage returns and bars, with a carriage return before it."""
    first, *others = (part for behind in line.split("\r") for part in _parts(behind))
    return [part for part in (first, *(f"\r{part}" for part in others if part)) if part]


def ends(path: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of a log; of a large one those of its first and last bytes, the last with number 0.

    OSError where it is no regular file or cannot be read.
    """
    first, last = read_ends(path, FIRST, LAST)
    for number, line in enumerate(first.split(b"\n"), 1):
        yield number, line[:LONGEST].decode("utf-8", "replace")
    for line in last.split(b"\n")[1:]:  # the first one is the rest of a line
        yield 0, line[:LONGEST].decode("utf-8", "replace")


def skipped(path: Path) -> str:
    """The sentence about what `ends` leaves out, or ""."""
    too_large = path.stat().st_size > FIRST + LAST
    return f"of {path.name} only the first {FIRST >> 20} and the last {LAST >> 20} MiB were read" if too_large else ""


class LogLine(NamedTuple):
    """A line of a file with its time and its number there; a bar drawn several times in one line has one number."""

    at: float
    text: str
    number: int


def entries(path: Path, zone: tzinfo | None, year_hint: float) -> list[LogLine]:
    """Every line of a recorded log, to be fed to a `ServerLog` of the same zone up to any moment.

    Of a log that is larger than FIRST and LAST bytes, what is between them is skipped.
    The times never go back; a line without one has that of the line before, or of the first line that has one.
    `year_hint` is a unix time at or after the end of the log, such as that of the recording's last scrape.
    """
    reader, found = LineReader(zone), []
    for number, whole in ends(path):
        for line in cut(whole):
            own = next(
                (part.at for part in reader.read(line[:MOST_CHARACTERS], year_hint) if part.at is not None), None
            )
            found.append((own, line, number))
    at = next((own for own, *_ in found if own is not None), year_hint)
    timed = []
    for own, line, number in found:
        at = at if own is None else max(at, own)
        timed.append(LogLine(at, line, number))
    return timed
