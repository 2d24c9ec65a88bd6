"""Reading a recording, a folder of raw /metrics pages that are read one by one, and replaying its pages.

`metrics.prom.gz` (or metrics.prom) has the pages, each after a line `# scrape <unix seconds> <instance>`. A failed
scrape is a line `# scrape-failed <unix seconds> <instance> <reason>`; the page below it is about the server's log, its
processes and its GPUs. `recording.toml` has facts about the servers, and `server.log` is the server's log meanwhile.
"""

import math
import re
import time
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from diag.core.errors import BadRecording
from diag.core.files import FLUSHED, STEP, Gunzip, cut_at_flushes, exists, opened, read_toml
from diag.core.formatting import in_python, moment, plural, printable
from diag.exposition import MOST_BYTES
from diag.exposition.scrapes import Reading, Target
from diag.log.files import NAMED, PAGES
from diag.sources.observation import Observation, Origin, observation
from diag.vllm.running_config import FLAGS, ServerFacts, settings

LOG = "server.log"
ABOUT = "recording.toml"
MOST_SCRAPES, MOST_TARGETS = 200_000, 1_000
MOST_VALUES = 100_000_000
"""Scrapes times series, over all targets: each value takes 8 bytes."""
MOST_PAGES = 4 * 2**30
"""Decompressed bytes of all pages."""
LONGEST_INTERVAL = 86_400.0
_MARK = re.compile(rb"\n# scrape(?:-failed)? ")
_HEADER = re.compile(rb"\n# scrape(-failed)? +(\S+) +(\S+)(?:[ \t\r]([^\n]*))?(?:\n|$)")
_DAY = 86_400_000
_TYPE = re.compile(rb"# TYPE (\S+) (counter|histogram|summary)$")
_SAMPLE = re.compile(rb"(([^#{ ][^{ ]*)(?:\{.*\})?) (\S+)")
_COUNTS = (b"", b"_total", b"_bucket", b"_count", b"_sum")
"""Suffixes of series that only grow."""
_MOMENT = re.compile(rb"(_created|_timestamp_seconds|_start_time_seconds)\b")
_STAMP = re.compile(r"\d\d-\d\d \d\d:\d\d:\d\d")
_LEAST_UNIX = 1e9
"""Seconds; a smaller value is not a time in a server's life."""
T = TypeVar("T")


class RecordedScrape(NamedTuple):
    """A scrape at unix seconds; a failed one has a reason and a page about the server's host."""

    at: float
    page: bytes
    failed: str = ""


class Recorded(NamedTuple):
    """The unchanged scrapes of each server by instance, the facts about the servers, and their log."""

    scrapes: Mapping[str, Sequence[RecordedScrape]]
    facts: Mapping[str, ServerFacts]
    log: Path
    log_zone: tzinfo


def read_pages(path: Path) -> Recorded:
    """Read the pages of a recording, to be served again; BadRecording if there are none."""
    file, about, gathered = _gather(path, keep=True)
    facts = {instance: _server_facts(about, instance, "", file) for instance in gathered.targets}
    return Recorded(gathered.kept, facts, gathered.log_file, gathered.log_zone)


def read(path: Path, launch: str = "", shown: str = "") -> Observation:
    """Read a recording from its folder or its file of pages; `launch` replaces the recorded command of the server.

    The observation is called by `shown` instead of its path. Raises BadRecording if there is nothing to judge.
    """
    file, about, gathered = _gather(path, shown=shown)
    origin = Origin(
        "recording",
        shown or str(path),
        every=min(LONGEST_INTERVAL, _typed(float, about.get("scrape_interval_seconds", 0.0), file)),
        notes=(*_texts(about.get("remarks", []), file), *gathered.notes()),
    )
    facts = {instance: _server_facts(about, instance, launch, file) for instance in gathered.targets}
    for name, log in gathered.logs.items():
        if gathered.targets[name].scrapes[-1].reason:  # nothing came behind the last line of its log
            log.state.current.finish()
        complete, began = log.state.completes(facts[name]), gathered.targets[name].scrapes[0].at / 1000
        if complete.version and log.releases and log.releases[-1][0] > began:  # it was upgraded meanwhile
            first = complete.version if log.releases[0][0] > began else log.releases[0][1]
            complete = complete._replace(version=log.releases[-1][1], releases=((0.0, first), *log.releases))
        facts[name] = complete
    return observation(origin, list(gathered.targets.values()), facts)


# recording.toml


def read_about(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the text of recording.toml and its tables, empty if there is none; BadRecording if it is not valid."""
    file = folder / ABOUT
    try:
        return read_toml(file) if exists(file) else ("", {})
    except OSError as error:
        raise BadRecording(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadRecording(f"{file} is not valid TOML: {error}") from error


def _server_facts(about: Mapping[str, Any], instance: str, launch: str, file: Path) -> ServerFacts:
    """Return the facts about one server; [config] applies to all servers, [config."host:port"] to one."""
    config = _typed(dict, about.get("config", {}), file)
    server = _typed(dict, config.get(instance, {}), file)
    longest = server.get("max_model_len")
    flags = {name: value for name, value in config.items() if name in FLAGS}
    server_info = flags | _typed(dict, server.get("server_info", {}), file)
    return ServerFacts(
        version=_typed(str, server.get("version", about.get("vllm", "")), file),
        models=_texts(server.get("models", []), file),
        max_model_len=None if longest is None else _typed(float, longest, file),
        server_info=settings(server_info),
        launch=launch or _typed(str, server.get("launch", about.get("launch", "")), file),
        process=_typed(str, server.get("process", ""), file),
    )


def _log_zone(about: Mapping[str, Any], file: Path) -> tzinfo:
    """Return the time zone of the log; `log_utc_offset` is in hours, or text like "+02:00", and UTC by default."""
    offset = about.get("log_utc_offset")
    try:
        if isinstance(offset, int | float):
            return timezone(timedelta(hours=offset))
        text = str(offset or "+00:00").removeprefix("UTC") or "+00:00"
        hours, _, minutes = text.lstrip("+-").partition(":")
        size = timedelta(hours=int(hours), minutes=int(minutes or 0))
        return timezone(-size if text.startswith("-") else size) if size else UTC
    except (ValueError, OverflowError) as error:
        raise BadRecording(f"{file.parent / ABOUT}: log_utc_offset should be hours from UTC") from error


def _typed(kind: type[T], value: object, file: Path) -> T:
    """Return a value of recording.toml; BadRecording if it has another type, or is a negative or infinite number."""
    if kind is float and isinstance(value, int):
        value = float(value)
    if isinstance(value, float) and not 0 <= value < math.inf:
        raise BadRecording(f"{file.parent / ABOUT}: {value} should be a number from 0 on")
    if not isinstance(value, kind):
        raise BadRecording(f"{file.parent / ABOUT}: {in_python(value)} should be a {kind.__name__}")
    return value


def _texts(value: object, file: Path) -> tuple[str, ...]:
    return tuple(_typed(str, text, file) for text in _typed(list, value, file))


# server.log


class RecordedLog:
    """Replays a log beside the scrapes of its server; times are unix seconds."""

    def __init__(self, file: Path, shown: str, zone: tzinfo, first: float, span: float) -> None:
        """`shown` is its path in messages, `first` the time of a scrape, `span` the seconds from there to the last."""
        from diag.log.parse_line import read_timed_lines, skipped_note
        from diag.log.server_log import ServerLog

        self.state = ServerLog(zone, shown)
        self.releases: list[tuple[float, str]] = []
        self._begun = False
        self._rest = deque(read_timed_lines(file, zone, first, first + span))
        guesses = sum(line.is_guess for line in self._rest)
        untimed = f"{plural(guesses, 'error')} in {file.name} without a time: assumed to be spread evenly"
        self.notes = [note for note in (skipped_note(file), untimed * bool(guesses)) if note]

    def until(self, at: float, page: bytes) -> Sequence[Reading]:
        """Return the log's metrics at a scrape; `page` is b"" if it failed. Scrapes come in order."""
        from diag.core.metric_prefix import named_as_ours
        from diag.exposition import labelled
        from diag.log.corroboration import Measurement, measure

        measured = measure(at, named_as_ours(page)[0]) if page else Measurement(at, page=False, answers=False)
        if not self._begun:  # the lines before the first scrape are judged by what it measured
            self.state.page(measured, live=False)
        self._begun = True
        while self._rest and self._rest[0].at <= at:
            entry = self._rest.popleft()
            self.state.feed(entry.text, entry.at, live=False, number=entry.number)
        self.state.page(measured, live=False)
        release = self.state.config.version
        if release and (not self.releases or self.releases[-1][1] != release):
            self.releases.append((at, release))
        return list(labelled(self.state.samples(at))) if self.state.latest is not None else ()


# The file of the pages


@dataclass
class _Gathered:
    log_file: Path
    log_shown: str
    log_zone: tzinfo
    span: float
    keep: bool
    kept: dict[str, list[RecordedScrape]] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    logs: dict[str, RecordedLog] = field(default_factory=dict)
    scrapes: int = 0
    values: int = 0
    limit: str = ""
    unreadable: list[str] = field(default_factory=list)
    damage: str = ""
    torn: int = 0
    begun: bool = False

    def why_empty(self) -> str:
        if not self.begun:
            return "is empty" + (f": {self.damage}" if self.damage else "")
        if self.unreadable:
            return f"has no scrape with a time and an instance: {self.unreadable[0]}"
        return self.damage or "has no line '# scrape <unix seconds> <instance>': it was not written by `diag record`"

    def notes(self) -> Iterator[str]:
        if self.damage:
            yield f"the recording {self.damage}: the readable part was used"
        if self.unreadable:
            yield f"{plural(len(self.unreadable), 'scrape')} skipped (without a valid time): {self.unreadable[0]}"
        if self.limit:
            yield f"the recording goes beyond {self.limit}: its first {plural(self.scrapes, 'scrape')} were used"
        yield from (note for log in self.logs.values() for note in log.notes)
        last = max(scrape.at for target in self.targets.values() for scrape in target.scrapes)
        if last > time.time() * 1000 + _DAY:
            yield f"the last scrape is dated in the future ({moment(last / 1000)}): a clock was wrong"

    def add(self, section: bytes, too_big: bool) -> None:
        """Add one scrape: its header line and the page below."""
        header = _HEADER.match(section)
        try:
            seconds = float(header[2]) if header else -1.0
        except ValueError:
            seconds = -1.0
        if header is None or not 0 <= seconds < 1e11:
            self.unreadable.append(printable(section.lstrip(b"\n").split(b"\n")[0].decode("utf-8", "replace"), 60))
            return
        at, page, instance = round(seconds * 1000), section[header.end() :], header[3].decode("utf-8", "replace")
        reason = ((header[4] or b"").strip() or b"no reason was recorded").decode("utf-8", "replace")
        target = self.targets.setdefault(instance, Target(instance))
        before = target.size
        if self.keep:
            failed = reason if header[1] else too_big * "it was too large to be kept"
            self.kept.setdefault(instance, []).append(RecordedScrape(at / 1000, page, failed))
        log: Sequence[Reading] = ()
        answers = not header[1] and b"diag_vllm_up 0" not in page
        is_first = self.targets.keys() <= {instance}  # the log is that of the first server
        if is_first and self.log_file.is_file():
            if instance not in self.logs:
                self.logs[instance] = RecordedLog(self.log_file, self.log_shown, self.log_zone, at / 1000, self.span)
            log = self.logs[instance].until(at / 1000, page if answers else b"")
        if header[1]:
            target.fail(at, reason, page, log)
        elif too_big:
            target.fail(at, f"sent more than {MOST_BYTES >> 20} MiB", beside=log)
        else:
            target.add(at, page, log)
        self.values += target.size - before
        self.scrapes += 1

    def reached(self) -> str:
        """Return the limit that the recording has reached, or ""."""
        counts = {"scrapes": self.scrapes, "servers": len(self.targets), "values": self.values}
        most = {"scrapes": MOST_SCRAPES, "servers": MOST_TARGETS, "values": MOST_VALUES}
        return next((f"{most[name]:,} {name}" for name, count in counts.items() if count >= most[name]), "")


def _gather(path: Path, keep: bool = False, shown: str = "") -> tuple[Path, Mapping[str, Any], _Gathered]:
    """Read a recording; return the file of the pages, the content of recording.toml, and the scrapes."""
    if not exists(path):
        raise BadRecording(f"there is no recording at {printable(str(path))}")
    file = path if path.is_file() else next((path / name for name in PAGES if (path / name).is_file()), None)
    if file is None:
        raise BadRecording(
            f"{printable(str(path))} holds neither a recording ({PAGES[0]}) nor logs ({', '.join(NAMED)}): name the log"
            " itself, or a folder that `diag record` wrote"
        )

    about = read_about(file.parent)[1]
    place = Path(shown) if shown else file.parent
    span = _typed(float, about.get("span_seconds", 0.0), file)
    gathered = _Gathered(file.parent / LOG, str(place / LOG), _log_zone(about, file), span, keep)
    try:
        for section, too_big in _sections(_decoded(file, gathered), gathered):
            whole = section[: len(section) - gathered.torn] if gathered.torn < len(section) else b""
            if _MARK.match(whole):
                gathered.limit = gathered.limit or gathered.reached()
                if not gathered.limit:
                    gathered.add(whole, too_big)
            if gathered.limit:
                break
    except OSError as error:
        raise BadRecording(f"cannot read {error.filename or file}: {error.strerror}") from error
    if not gathered.targets:
        raise BadRecording(f"{file} {gathered.why_empty()}")
    return file, about, gathered


def _decoded(file: Path, gathered: _Gathered) -> Iterator[bytes]:
    """Yield the file's content in chunks, decompressed if it is gzip; damage ends it and is noted.

    `torn` is the number of bytes at the end that may be an incomplete scrape.
    """
    with opened(file) as stream:
        first = stream.read(STEP)
        gathered.begun = bool(first)
        chunks = chain((first,), iter(lambda: stream.read(STEP), b""))
        if not first.startswith(b"\x1f\x8b"):
            yield from chunks
            return
        gunzip, since_flush = Gunzip(), 0
        try:
            for piece in cut_at_flushes(chunks):
                for text in gunzip.feed(piece):
                    since_flush += len(text)
                    yield text
                since_flush = 0 if piece.endswith(FLUSHED) else since_flush
        except zlib.error as error:
            gathered.damage, gathered.torn = f"is damaged ({error})", since_flush
            return
        if not gunzip.complete:
            gathered.damage, gathered.torn = "ends in the middle (a truncated gzip file)", since_flush


def _sections(chunks: Iterable[bytes], gathered: _Gathered) -> Iterator[tuple[bytes, bool]]:
    """Split the text before each `# scrape` line; yield each part, after a newline, and True if it was too big.

    Ends at MOST_PAGES, and notes the limit: the last page is then not truncated by its server.
    """
    buffer, searched, too_big, room = bytearray(b"\n"), 0, False, MOST_PAGES
    for chunk in chunks:
        room -= len(chunk)
        if room < 0:
            gathered.limit = f"{MOST_PAGES >> 20:,} MiB"
            break
        buffer += chunk
        while match := _MARK.search(buffer, searched):
            cut = match.start()
            del match
            if cut:
                yield bytes(buffer[: cut + 1]), too_big
            del buffer[:cut]
            searched, too_big = 1, False
        if len(buffer) > MOST_BYTES:
            del buffer[STEP:]
            too_big = True
        searched = max(searched, len(buffer) - 20)
    yield bytes(buffer), too_big


# Replay


class Replay:
    """A recording as a server that runs now: its pages at their pace, with current times and growing counters.

    Times on a page are moved to the time of the replay; otherwise restarts would lie in the past. After its end the
    recording begins again; its counters continue from their last value, like those of a server in the same state.
    Serves the scrapes of one server from unix time `begin` on, `speed` times as fast as they were recorded.

    `first` is the unix time of the first recorded scrape; `again` repeats the recording after its end.
    """

    def __init__(self, scrapes: Sequence[RecordedScrape], begin: float, speed: float, again: bool) -> None:
        self._scrapes = sorted(scrapes)
        self._begin = begin
        self._speed = speed
        self._again = again
        self.first = self._scrapes[0].at

    @property
    def length(self) -> float:
        """Seconds of the recording, including one scrape interval after the last scrape."""
        span = self._scrapes[-1].at - self.first
        return span + span / max(1, len(self._scrapes) - 1) or 1.0

    @property
    def end(self) -> float:
        """The unix time of the replay's first end."""
        return self._begin + self.length / self._speed

    def at(self, now: float) -> RecordedScrape:
        """Return the scrape to serve at a unix time, with times of the replay, and counters grown by the earlier turns.

        A time that is constant in the recording, such as the server's start, is not moved by later turns.
        """
        turn, elapsed = divmod((now - self._begin) * self._speed, self.length)
        held = 0.0
        if turn and not self._again:
            held, turn, elapsed = turn - 1 + elapsed / self.length, 0.0, self.length
        place = bisect_right(self._scrapes, self.first + elapsed, key=lambda scrape: scrape.at)
        scrape = self._scrapes[max(0, place - 1)]

        lines, growing = [], set[bytes]()
        for line in scrape.page.split(b"\n"):
            if family := _TYPE.match(line):
                growing = {family[1] + ending for ending in _COUNTS}
            name, series, value = _sample(line) or (b"", b"", 0.0)
            growth = self._growth.get(series, 0.0)
            if value >= _LEAST_UNIX and _MOMENT.search(name):
                lines.append(b"%s %.17g" % (series, self.moment(value, int(turn) if growth else 0)))
            elif held and name == b"process_cpu_seconds_total":  # the API server of a hung engine goes on
                lines.append(b"%s %.17g" % (series, value + held * growth))
            elif turn and name in growing:
                lines.append(b"%s %.17g" % (series, value + int(turn) * growth))
            else:
                lines.append(line)
        return scrape._replace(page=b"\n".join(lines))

    def moment(self, recorded: float, turn: int = 0) -> float:
        """Convert a recorded unix time into the time of the replay's given turn."""
        return self._begin + (recorded - self.first + turn * self.length) / self._speed

    @cached_property
    def _growth(self) -> Mapping[bytes, float]:
        """Growth of each series from the first page to the last one; 0 if the server was restarted."""

        def values(page: bytes) -> dict[bytes, float]:
            return {sample[1]: sample[2] for line in page.split(b"\n") if (sample := _sample(line))}

        pages = [scrape.page for scrape in self._scrapes if not scrape.failed]
        first, last = (values(pages[0]), values(pages[-1])) if pages else ({}, {})
        return {series: max(0.0, value - first.get(series, value)) for series, value in last.items()}


def _sample(line: bytes) -> tuple[bytes, bytes, float] | None:
    """Return name, name with labels, and value; None for a comment or a line in another format."""
    match = _SAMPLE.fullmatch(line)
    try:
        return (match[2], match[1], float(match[3])) if match else None
    except ValueError:
        return None


def restamped(line: str, at: float) -> str:
    """Replace the time stamp of a line of vLLM's log by a unix time, in the time zone of this host."""
    return _STAMP.sub(datetime.fromtimestamp(at).astimezone().strftime("%m-%d %H:%M:%S"), line, count=1)
