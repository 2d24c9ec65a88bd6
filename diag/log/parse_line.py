"""Parse raw log lines: split off the heads that log collectors and vLLM write before the text; read each line's time.

The outermost time wins: `kubectl logs --timestamps`, CRI, Docker and journald record year and zone, vLLM neither. Only
a line feed ends a line: a carriage return, which redraws progress bars, may be part of a prompt, as may an imitated
head. So the layout around the first line with a head of vLLM is required of all lines, and text that does not begin a
line is marked as such.
"""

import re
from collections.abc import Iterable, Iterator
from datetime import datetime, tzinfo
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

from diag.core.files import parse_json, read_ends
from diag.log.marks import MARKS
from diag.log.patterns import RAW

MOST_CHARACTERS = 64 * 2**10
"""Characters of one line that are read; the rest is ignored."""
FIRST, LAST = 4 * 2**20, 16 * 2**20
"""Bytes read of the beginning and of the end of a log that is read as a whole: 15 s at worst."""
LONGEST = 2**20
"""Bytes kept of one line with all redrawings of its bars."""
DAY = 86_400.0
JOURNAL_SPLITS = 48 * 2**10
"""Bytes after which journald begins a new line (LineMax=)."""
Form = Literal["line", "inside", "json", "foreign"]
"""Where a text stood: at the beginning of a line ("line") or inside one ("inside"); in a record of vLLM's JSON format
("json"), or in a JSON record that names no logger of vLLM ("foreign").
"""

ISO = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
COLLECTOR = re.compile(
    r"(?P<pod>\[pod/\S{1,300}\] )?(?P<service>[\w.-]{1,100} +\| )?"  # kubectl logs --prefix, docker compose logs
    rf"(?:\[?(?P<iso>{ISO})\]?[ \t](?:\| )?"  # in brackets: Buildkite; Docker Desktop
    r"(?:(?P<stream>stdout|stderr) (?P<part>[FP])(?::\S*)? |(?P<host>\S{1,100}) (?:\S{1,100}\[\d+\]|kernel): )?"
    r"|(?P<short>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d)(?:\.\d+)? \S{1,100} (?:\S{1,100}\[\d+\]|kernel): )?"
)
_HEAD = re.compile(
    r"(?:\((?P<process>[A-Za-z][^()]{0,80}?(?= pid=)|(?:APIServer|EngineCore|Worker|VllmWorker)[\w =-]{0,40}(?=\)))"
    r"(?: pid=(?P<pid>\d{1,10})[^()]{0,80})?\) ?){0,3}(?:\[rank\d+\]: ?)?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<time>\d\d-\d\d \d\d:\d\d:\d\d)"
    r" \[?(?P<source>[^\]\s]{1,200}:\d+)\] ?"
    r"|(?P<untimed>DEBUG|INFO|WARNING|ERROR|CRITICAL) \[(?P<place>[\w./]{1,200}\.py:\d+)\] ?"  # without asctime
    r"|(?P<uvicorn>DEBUG|INFO|WARNING|ERROR|CRITICAL):\s+"
    r"|\[?(?P<torch>[IWEF])(?P<day>\d{4}) (?P<clock>\d\d:\d\d:\d\d)\.\d+ (?P<glog>[^\]]{1,300})\] ?"  # 1121 02:32:18.12
    r"|\[(?P<old>[IWEF]) (?P<cpp>[\w.]{1,80}:\d+)\] ?)?"
)
UVICORN = re.compile(rf"(?:(?P<iso>{ISO}) (?:std(?:out|err) F )?)?(?:\(\w{{1,40}} pid=\d+\) )?INFO: +")
"""The head of a line of uvicorn. Most lines are its access log's, so they skip the parser."""
_CLIENT_ENDS = ' - "'
_REQUEST = re.compile(
    r'(?P<method>[A-Z]{3,7}) (?P<route>/[^\s?]{0,100})\S* HTTP/\d(?:\.\d)?" (?P<status>[1-5]\d\d)'
    r"(?: [A-Za-z' -]{0,40})?\r?"
)
_ADDRESS = re.compile(r"(?:[\d.]{7,15}|[\da-fA-F:.]{2,45}):\d{1,5}|", re.ASCII)
LONGEST_REQUEST = 8_192
"""Characters of a line of uvicorn; a longer one has lost its end, or is a client's text for the most part."""
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PROGRESS_BAR = re.compile(
    r"(?P<what>.{3,120}?): +(?P<percent>\d{1,3})%(?:.{0,200}?\| *(?P<done>\d{1,12})/(?P<total>\d{1,12}) \[)?"
)
_GLOG = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_LAYOUT = ("pod", "service", "iso", "stream", "host", "short")
_PLAIN = ("(", "INFO", " ", "Traceback", "ERROR", "WARNING", "DEBUG")
"""Most lines begin so; no log collector has written before them."""


class Line(NamedTuple):
    """A line of text with its number in the file, 0 if unknown."""

    number: int
    text: str

    def cut(self, part: re.Match[str] | None) -> "Line":
        """Return the line without a part of it."""
        return Line(self.number, self.text[: part.start()] + self.text[part.end() :]) if part else self


class ParsedLine(NamedTuple):
    """A log line split into its `head` and its text; `level` is RAW if it has no head, `at` its own unix time.

    `source` is the file of vLLM that logs it and the line there, core.py:1510; `number` is its line number in the log
    file, 0 if unknown; `stamped` is true if the time comes from the log collector, not from vLLM.
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

    @property
    def file(self) -> str:
        """The file of vLLM that logs it."""
        return self.source.partition(":")[0]

    @property
    def is_of_api_server(self) -> bool:
        return self.process.lower().startswith("apiserver")


class AnsweredRequest(NamedTuple):
    """An answered request in uvicorn's access log; `is_addressed` is true if the client stands there as an address.

    Behind a proxy that is trusted, uvicorn prints the header X-Forwarded-For as it came: any text of the client. Its
    address has no port then, or port 0.
    """

    method: str
    route: str
    status: str
    is_addressed: bool


def is_access(line: ParsedLine) -> bool:
    """Return True for a line of the access log, also for one whose end is lost: what it begins with, a client wrote."""
    is_uvicorn = line.level == "INFO" and not line.source
    return is_uvicorn and (_CLIENT_ENDS in line.text or len(line.text) > LONGEST_REQUEST)


def parse_request(text: str) -> AnsweredRequest | None:
    """Parse the text of an access line from its end, where it is uvicorn's; None for one that is no answer."""
    client, _, behind = text.rpartition(_CLIENT_ENDS)
    request = _REQUEST.fullmatch(behind) if len(text) <= LONGEST_REQUEST else None
    if request is None:
        return None
    return AnsweredRequest(request["method"], request["route"], request["status"], bool(_ADDRESS.fullmatch(client)))


class LineParser:
    """Parses the lines of one log in their order; `zone` applies to times without one, None is this host's."""

    def __init__(self, zone: tzinfo | None = None) -> None:
        self._zone = zone
        self._unfinished: dict[str, str] = {}
        """The parts so far of a line that CRI or Docker splits, by stream."""
        self._stream: str | None = None
        self._layout: tuple[str, ...] | None = None
        self._cut_by_journald = False
        self._last_minute: tuple[str, float] = ("", 0.0)
        self.assumed_year = False
        """True once a time had no year."""

    @property
    def is_within_line(self) -> bool:
        """Return True if the next line may be the rest of one that the log collector has split."""
        return bool(self._unfinished) or self._cut_by_journald

    def parse(self, line: str, read_at: float) -> list[ParsedLine]:
        """Return the lines in a raw one: none for the first part of a split line, several for a bar redrawn in it.

        Text that stood behind a carriage return begins with one. A time without a year is in the latest year in which
        it is no more than a day after `read_at`.
        """
        if line[:1] == "\r":
            if self._stream in self._unfinished:
                self._unfinished[self._stream] = (self._unfinished[self._stream] + line)[:MOST_CHARACTERS]
                return []
            return [self._split_head(part, None, read_at)._replace(form="inside") for part in _split_bars(line[1:])]

        text, at, layout, is_whole = self._strip_collector(line, read_at)
        if self._layout not in (None, layout):
            return [ParsedLine(line)]
        if "host" in layout or "short" in layout:
            was_cut = self._cut_by_journald
            may_be_cut = len(text) * 4 >= JOURNAL_SPLITS
            self._cut_by_journald = may_be_cut and len(text.encode("utf-8", "replace")) >= JOURNAL_SPLITS
            if was_cut:  # this is the rest of the line before
                return []

        stream = self._stream or ""
        if stream in self._unfinished or not is_whole:
            text = (self._unfinished.pop(stream, "") + text)[:MOST_CHARACTERS]
        if not is_whole:
            self._unfinished[stream] = text
            return []

        if text.startswith('{"'):
            lines = self._parse_json(text, at, read_at)
        else:
            lines = [self._split_head(part, at, read_at) for part in _split_bars(text) or ("",)]
            lines[1:] = [part._replace(form="inside") for part in lines[1:]]
        if self._layout is None and lines and lines[0].source:
            self._layout = layout
        return lines

    def _strip_collector(self, line: str, read_at: float) -> tuple[str, float | None, tuple[str, ...], bool]:
        """Return the text without the log collector's head, its time, the layout, and False for a part of a line."""
        self._stream = None
        if line.startswith('{"log"'):  # Docker's json-file driver
            record = _load_object(line)
            text = record.get("log")
            if not isinstance(text, str):
                return line, None, (), True
            self._stream = str(record.get("stream"))
            at = self.parse_time(record.get("time"), read_at)
            return text.removesuffix("\n"), at, ("log",), text.endswith("\n")

        match = None if line.startswith(_PLAIN) else COLLECTOR.match(line)
        if not match or not match.end():
            return line, None, (), True
        at = None
        if match["iso"]:
            at = self.parse_time(match["iso"], read_at)
        elif match["short"]:
            at = self._add_year(match["short"], "%b %d %H:%M:%S", read_at)
        self._stream = match["stream"]
        return line[match.end() :], at, tuple(name for name in _LAYOUT if match[name]), match["part"] != "P"

    def _parse_json(self, text: str, at: float | None, read_at: float) -> list[ParsedLine]:
        """Parse a record of vLLM's own JSON format, with its traceback; of any other, the message alone."""
        record = _load_object(text)
        message, name = record.get("message"), str(record.get("name", ""))
        if not isinstance(message, str):
            return [ParsedLine(text, at=at)]
        level, pid = str(record.get("levelname")), str(record.get("process", ""))
        line = ParsedLine(
            message,
            level if level in _GLOG.values() else RAW,
            process=str(record.get("processName", "")),
            pid=pid,
            at=at if at is not None else self.parse_time(record.get("asctime"), read_at),
            form="foreign",
            stamped=at is not None,
        )
        if name == "vllm" or name.startswith("vllm."):
            file = record.get("filename") or f"{name.rpartition('.')[2]}.py"
            source = f"{file}:{record.get('lineno', 0)}"
            line = line._replace(source=source, head=f"{pid} {level} {record.get('asctime')} {source} ", form="json")
        elif name.startswith("uvicorn."):
            line = line._replace(form="json")
        first, *others = message.split("\n")
        traceback = str(record.get("exc_info", "")).split("\n") if record.get("exc_info") else []
        return [
            line._replace(text=first),
            *(line._replace(text=part, form="inside") for part in others),
            *(line._replace(text=part) for part in traceback),
        ]

    def _split_head(self, text: str, at: float | None, read_at: float) -> ParsedLine:
        text = _ANSI.sub("", text) if "\x1b" in text else text
        head, stamped = _HEAD.match(text), at is not None
        if head is None or not head.end():
            return ParsedLine(text, at=at, stamped=stamped)
        level = head["level"] or head["untimed"] or head["uvicorn"] or _GLOG.get(head["torch"] or head["old"], RAW)
        if at is None and head["time"]:
            at = self._add_year(head["time"], "%m-%d %H:%M:%S", read_at)
        if at is None and head["day"]:
            at = self._add_year(f"{head['day']} {head['clock']}", "%m%d %H:%M:%S", read_at)
        source = (
            head["source"] or head["place"] or (head["glog"] or "").rpartition(" ")[2] or head["cpp"] or ""
        ).rpartition("/")[2]
        end = head.end()
        return ParsedLine(
            text[end:], level, head["process"] or "", head["pid"] or "", at, source, 0, text[:end], "line", stamped
        )

    def parse_time(self, text: object, read_at: float) -> float | None:
        """Return the unix time that a log collector or a JSON record states; None if `text` is no time."""
        if not isinstance(text, str):
            return None
        try:
            moment = datetime.fromisoformat(text.replace(",", "."))
            return (moment if moment.tzinfo else moment.replace(tzinfo=self._zone)).timestamp()
        except (ValueError, OverflowError, OSError):
            return self._add_year(text, "%m-%d %H:%M:%S", read_at)

    def _add_year(self, text: str, form: str, read_at: float) -> float | None:
        """Return the unix time of a text that has no year and ends in its seconds; the last minute is remembered."""
        minute, seconds, self.assumed_year = text[:-2], text[-2:], True
        if minute == self._last_minute[0] and seconds < "60" and self._last_minute[1] + int(seconds) <= read_at + DAY:
            return self._last_minute[1] + int(seconds)
        latest = datetime.fromtimestamp(read_at + DAY, self._zone).year
        for year in range(latest, latest - 9, -1):  # a 29 February is at most eight years away
            try:
                moment = datetime.strptime(f"{year} {text}", f"%Y {form}").replace(tzinfo=self._zone).timestamp()
            except (ValueError, OverflowError, OSError):
                continue
            if moment <= read_at + DAY:
                self._last_minute = minute, moment - int(seconds)
                return moment
        return None


def _load_object(text: str) -> dict[str, object]:
    """Load a JSON object; empty for anything else."""
    try:
        record = parse_json(text)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _split_bars(text: str) -> list[str]:
    """Split a text from the redrawings of a bar behind it, and from another process's text behind a bar."""
    if "\r" in text or "\n" in text:
        return [line for part in re.split(r"[\r\n]+", text) if part for line in _split_bars(part)]
    is_bar = "%" in text and not MARKS.behind_uvicorn.match(text)
    glued = MARKS.glued.match(text) if is_bar else None
    return list(glued.groups()) if glued else [text]


def split_redrawn(line: str) -> list[str]:
    """Split a line of a file at carriage returns and bars; each part but the first begins with a carriage return."""
    first, *others = (part for behind in line.split("\r") for part in _split_bars(behind))
    return [part for part in (first, *(f"\r{part}" for part in others if part)) if part]


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a log; of a large one its first and last bytes, the last lines with number 0.

    OSError if it is no regular file or cannot be read.
    """
    first, last = read_ends(path, FIRST, LAST)
    for number, line in enumerate(first.split(b"\n"), 1):
        yield number, line[:LONGEST].decode("utf-8", "replace")
    for line in last.split(b"\n")[1:]:  # the first one is the rest of a line
        yield 0, line[:LONGEST].decode("utf-8", "replace")


def skipped_note(path: Path) -> str:
    """Return the sentence about the part of a large log that `read_lines` skips, or ""."""
    too_large = path.stat().st_size > FIRST + LAST
    return f"of {path.name} only the first {FIRST >> 20} and the last {LAST >> 20} MiB were read" if too_large else ""


def first_time(lines: Iterable[str], zone: tzinfo | None, year_hint: float) -> tuple[int, float]:
    """Return the index of the first line that states a time, and that unix time.

    Without one: 0 and `year_hint`, which is a time at or after the end of the log.
    """
    parser = LineParser(zone)
    parsed = ((at, part) for at, line in enumerate(lines) for part in parser.parse(line[:MOST_CHARACTERS], year_hint))
    return next(((at, part.at) for at, part in parsed if part.at is not None), (0, year_hint))


class TimedLine(NamedTuple):
    """A line of a file with its time and its number; the redrawings of a bar in one line have the same number.

    `is_guess`: an answer that is an error, and whose time no line bounds to a minute.
    """

    at: float
    text: str
    number: int
    is_guess: bool = False


def read_timed_lines(path: Path, zone: tzinfo | None, year_hint: float, until: float = 0.0) -> list[TimedLine]:
    """Read a recorded log, to be fed to a `ServerLog` of the same zone up to any moment.

    If the log is larger than FIRST and LAST bytes, the part between them is skipped. The times never go back; a line
    without a time has that of the line before, or of the first line that has one. Answers without a time are spread up
    to the next time, or up to `until`, the end of the recording, as an idle server logs nothing else: those of /metrics
    evenly, since scrapes are, with the others between them; without scrapes, all of them.
    `year_hint` is a unix time at or after the end of the log, such as that of the recording's last scrape.
    """
    parser, stated = LineParser(zone), []
    for number, raw in read_lines(path):
        for line in split_redrawn(raw):
            parsed = parser.parse(line[:MOST_CHARACTERS], year_hint)
            stated.append((next((part.at for part in parsed if part.at is not None), None), line, number))
    at, begun = next((time for time, *_ in stated if time is not None), year_hint), False
    timed, answers = list[TimedLine](), dict[int, AnsweredRequest]()
    for time, line, number in [*stated, (until, "", 0)]:
        head = UVICORN.match(line) if time is None and begun else None
        if head and (request := parse_request(line[head.end() :])):
            answers[len(timed)] = request
        elif time is not None:
            pages = [request.route == "/metrics" for request in answers.values()]
            steps = [*accumulate(pages if any(pages) else [True] * len(pages))]
            for (answer, request), step in zip(answers.items(), steps, strict=True):
                guess = request.status >= "400" and (time - at) / (sum(pages) + 1) > 60
                moment = at + max(time - at, 0.0) * step / (steps[-1] + 1)
                timed[answer] = timed[answer]._replace(at=moment, is_guess=guess)
            at, begun, answers = max(at, time), True, {}
        timed.append(TimedLine(at, line, number))
    latest = accumulate((line.at for line in timed[:-1]), max)
    return [line._replace(at=moment) for line, moment in zip(timed, latest, strict=False)]
