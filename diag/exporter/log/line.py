"""The anatomy of a log's line: what stands before its text, and its time.

A log has history and a present. A line's own time wins: the outermost one, for `kubectl logs --timestamps`, CRI, Docker
and journald know more than vLLM, which writes neither year nor zone.
"""

import json
import re
from collections.abc import Iterable
from datetime import datetime, tzinfo
from pathlib import Path
from typing import NamedTuple

from diag.exporter.log.pattern import RAW

MOST_CHARACTERS = 64 * 2**10
"""Of one line; the rest of it is not looked at."""
DAY = 86_400.0

_ISO = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
_OUTER = re.compile(
    r"(?:\[pod/\S{1,300}\] )?(?:[\w.-]{1,100} +\| )?"  # kubectl logs --prefix, docker compose logs
    rf"(?:(?P<iso>{_ISO}) (?:std(?:out|err) (?P<part>[FP])(?::\S*)? |\S{{1,100}} \S{{1,100}}\[\d+\]: )?"
    r"|(?P<short>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d)(?:\.\d+)? \S{1,100} \S{1,100}\[\d+\]: )?"
)
_HEAD = re.compile(
    r"(?:\((?P<process>[A-Za-z][^()]{0,80}?) pid=(?P<pid>\d+)[^()]{0,80}\) ?){0,3}(?:\[rank\d+\]: ?)?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<time>\d\d-\d\d \d\d:\d\d:\d\d)"
    r" \[?(?P<source>[^\]\s]{1,200}:\d+)\] ?"
    r"|(?P<uvicorn>DEBUG|INFO|WARNING|ERROR|CRITICAL):\s+"
    r"|\[?(?P<torch>[IWEF])(?P<day>\d{4}) (?P<clock>\d\d:\d\d:\d\d)\.\d+ [^\]]{1,300}\] ?"  # glog: 1121 02:32:18.123456
    r"|\[(?P<old>[IWEF]) [\w.]{1,80}:\d+\] ?)?"
)
ACCESS = re.compile(
    rf"(?:(?P<iso>{_ISO}) (?:std(?:out|err) F )?)?(?:\(\w{{1,40}} pid=\d+\) )?"
    r'INFO: +[^\s"]{1,80} - "[A-Z]{3,7} /'
)
"""A request in uvicorn's log: most lines, so they are not taken apart."""
_END = re.compile(r"[\r\n]+")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
BAR = re.compile(r"(?P<what>.{3,120}?): +(?P<percent>\d{1,3})%(?:.{0,200}?\| *(?P<done>\d+)/(?P<total>\d+) \[)?")
_GLUED = re.compile(
    r"(.{3,120}?: +\d{1,3}%.{0,200}?\| *\d+/\d+ \[[^\]]{0,80}\])"
    r"(\(\w[^()]{0,80} pid=\d+.*|(?:DEBUG|INFO|WARNING|ERROR) \d.*)"
)
"""A bar that has not ended, and what another process wrote behind it."""
_GLOG = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_PLAIN = ("(", "INFO", " ", "Traceback", "ERROR", "WARNING", "DEBUG")
"""Most lines begin so, and with nothing around them."""


class Line(NamedTuple):
    """A line without what stands before its text; `level` is RAW where it has none, `at` its own time.

    `source` is the file of vLLM that logs it and the line there, core.py:1510; `number` that of the line in the log's
    file, 0 where it is not known.
    """

    text: str
    level: str = RAW
    process: str = ""
    pid: str = ""
    at: float | None = None
    source: str = ""
    number: int = 0


class LineReader:
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
        return [self._head(part, at, read_at) for part in _parts(text)]

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
        source = (head["source"] or "").rpartition("/")[2]
        return Line(text[head.end() :], level, head["process"] or "", head["pid"] or "", at, source)

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
        return (line for part in _END.split(text) if part for line in _parts(part))
    glued = _GLUED.match(text) if "%" in text else None
    return glued.groups() if glued else (text,)


class LogLine(NamedTuple):
    """A line of a file with its time and its number there; a bar drawn several times in one line has one number."""

    at: float
    text: str
    number: int


def entries(path: Path, zone: tzinfo | None, year_hint: float) -> list[LogLine]:
    """Every line of a recorded log, to be fed to a `ServerLog` of the same zone up to any moment.

    The times never go back; a line without one has that of the line before, or of the first line that has one.
    `year_hint` is a unix time at or after the end of the log, such as that of the recording's last scrape.
    """
    reader, found = LineReader(zone), []
    for number, whole in enumerate(path.read_bytes().decode("utf-8", "replace").split("\n"), 1):
        for line in _parts(whole) if whole else ():
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
