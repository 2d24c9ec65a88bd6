"""Recordings: raw /metrics pages in a folder, read page by page.

`metrics.prom.gz` (or metrics.prom) holds the pages, each after a line `# scrape <unix seconds> <instance>`; a scrape
that failed is a line `# scrape-failed <unix seconds> <instance> <reason>`, and below it what stood beside the server:
its log, its processes, its GPUs. `recording.toml` may say more, and
`server.log` is what the server wrote meanwhile.
"""

import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from diag.core.errors import BadRecording
from diag.core.files import exists, opened
from diag.core.formatting import moment, plural, printable
from diag.exposition.lines import MOST_BYTES
from diag.exposition.scrapes import Target
from diag.http.gunzip import FLUSHED, STEP, Gunzip, cut_at_flushes
from diag.sources.observation import Observation, Origin, observation
from diag.sources.recording import about
from diag.vllm.server.config import ServerFacts

if TYPE_CHECKING:
    from diag.sources.recording.log import RecordedLog

PAGES = ("metrics.prom.gz", "metrics.prom")
LOG = "server.log"
MOST_SCRAPES, MOST_TARGETS = 500_000, 1_000
MOST_VALUES = 100_000_000
"""Scrapes times series, over all targets: each value takes 8 bytes."""
MOST_PAGES = 4 * 2**30
"""Bytes of all pages, decompressed."""
LONGEST_INTERVAL = 86_400.0
_MARK = re.compile(rb"\n# scrape(?:-failed)? ")
_HEADER = re.compile(rb"\n# scrape(-failed)? +(\S+) +(\S+)(?:[ \t\r]([^\n]*))?(?:\n|$)")
_DAY = 86_400_000


class RecordedScrape(NamedTuple):
    """A scrape as it was answered at unix seconds; a failed one has a reason, and a page of what stood beside."""

    at: float
    page: bytes
    failed: str = ""


class Recorded(NamedTuple):
    """The scrapes of each server as they were, by instance, what is known of the servers, and where their log is."""

    scrapes: Mapping[str, Sequence[RecordedScrape]]
    facts: Mapping[str, ServerFacts]
    log: Path
    log_zone: tzinfo


def read_pages(path: Path) -> Recorded:
    """The pages of a recording themselves, to be served again; BadRecording where there is none."""
    file, told, gathered = _gathered_of(path, keep=True)
    facts = {instance: about.facts(told, instance, "", file) for instance in gathered.targets}
    return Recorded(gathered.kept, facts, gathered.log_file, gathered.log_zone)


def read(path: Path, launch: str = "") -> Observation:
    """Read a recording: its folder or the file of its pages. `launch` is the server's command, if it is known better.

    Raises BadRecording where there is nothing to judge.
    """
    file, told, gathered = _gathered_of(path)
    origin = Origin(
        "recording",
        str(path),
        every=min(LONGEST_INTERVAL, about.typed(float, told.get("scrape_interval_seconds", 0.0), file)),
        notes=(*about.typed(list, told.get("remarks", []), file), *gathered.notes()),
        truth=about.typed(dict, told.get("truth", {}), file),
    )
    facts = {instance: about.facts(told, instance, launch, file) for instance in gathered.targets}
    facts |= {name: log.state.completes(facts[name]) for name, log in gathered.logs.items()}
    return observation(origin, list(gathered.targets.values()), facts)


def _gathered_of(path: Path, keep: bool = False) -> "tuple[Path, Mapping[str, Any], _Gathered]":
    """The file of the pages, what recording.toml says, and what was read."""
    file = _pages_file(path)
    told = about.read(file.parent / about.ABOUT)
    try:
        gathered = _gather(file, about.log_zone(told, file), keep)
    except OSError as error:
        raise BadRecording(f"cannot read {error.filename or file}: {error.strerror}") from error
    if not gathered.targets:
        raise BadRecording(f"{file} {gathered.why_nothing()}")
    return file, told, gathered


def _names_log(page: bytes) -> bool:
    """Whether an exporter has put a log on this page already."""
    return b"\ndiag_vllm_log_events_total" in page


def _pages_file(path: Path) -> Path:
    if not exists(path):
        raise BadRecording(f"there is no recording at {printable(str(path))}")
    if path.is_file():
        return path
    file = next((path / name for name in PAGES if (path / name).is_file()), None)
    if file is None:
        raise BadRecording(f"{path} has no {PAGES[0]}: name a folder that `diag record` wrote")
    return file


@dataclass
class _Gathered:
    log_file: Path
    log_zone: tzinfo
    keep: bool
    kept: dict[str, list[RecordedScrape]] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    logs: "dict[str, RecordedLog]" = field(default_factory=dict)
    scrapes: int = 0
    values: int = 0
    limit: str = ""
    unreadable: list[str] = field(default_factory=list)
    damage: str = ""
    torn: int = 0
    begun: bool = False

    def why_nothing(self) -> str:
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
        yield from (log.skipped for log in self.logs.values() if log.skipped)
        last = max(scrape.at for target in self.targets.values() for scrape in target.scrapes)
        if last > time.time() * 1000 + _DAY:
            yield f"the last scrape is dated in the future ({moment(last / 1000)}): a clock was wrong"

    def add(self, section: bytes, too_big: bool) -> None:
        """Add one header line and the page below it."""
        header = _HEADER.match(section)
        at = _millis(header[2]) if header else None
        if header is None or at is None:
            self.unreadable.append(printable(section.lstrip(b"\n").split(b"\n")[0].decode("utf-8", "replace"), 60))
            return
        instance = header[3].decode("utf-8", "replace")
        target = self.targets.setdefault(instance, Target(instance))
        before = target.size
        if self.keep:
            failed = _reason(header) if header[1] else too_big * "it was too large to be kept"
            kept = RecordedScrape(at / 1000, section[header.end() :], failed)
            self.kept.setdefault(instance, []).append(kept)
        self._add(target, header, at, section[header.end() :], too_big)
        self.values += target.size - before
        self.scrapes += 1

    def reached(self) -> str:
        """The limit that leaves no room for one more scrape, or ""."""
        counts = {"scrapes": self.scrapes, "servers": len(self.targets), "values": self.values}
        most = {"scrapes": MOST_SCRAPES, "servers": MOST_TARGETS, "values": MOST_VALUES}
        return next((f"{most[name]:,} {name}" for name, count in counts.items() if count >= most[name]), "")

    def _add(self, target: Target, header: re.Match[bytes], at: int, page: bytes, too_big: bool) -> None:
        instance = target.instance
        log = self._log(instance, at, page, not header[1] and b"diag_vllm_up 0" not in page)
        if header[1]:
            target.fail(at, _reason(header), page + log)
        elif too_big:
            target.fail(at, f"sent more than {MOST_BYTES >> 20} MiB", log)
        else:
            target.add(at, page + log if page.endswith(b"\n") else page)

    def _log(self, instance: str, at: int, page: bytes, answers: bool) -> bytes:
        """What the log showed by then: of the first server only, and not where the page has a log already."""
        if not self.targets.keys() <= {instance} or _names_log(page) or not self.log_file.is_file():
            return b""
        if instance not in self.logs:
            from diag.sources.recording.log import RecordedLog  # its expressions take a while to compile

            self.logs[instance] = RecordedLog(self.log_file, self.log_zone, at / 1000)
        return self.logs[instance].until(at / 1000, answers)


def _reason(header: re.Match[bytes]) -> str:
    """Why a scrape failed."""
    return ((header[4] or b"").strip() or b"no reason was recorded").decode("utf-8", "replace")


def _gather(file: Path, log_zone: tzinfo, keep: bool) -> _Gathered:
    gathered = _Gathered(file.parent / LOG, log_zone, keep)
    for section, too_big in _sections(_first(_decoded(file, gathered), gathered)):
        whole = section[: len(section) - gathered.torn] if gathered.torn < len(section) else b""
        if _MARK.match(whole):
            gathered.limit = gathered.limit or gathered.reached()
            if not gathered.limit:
                gathered.add(whole, too_big)
        if gathered.limit:
            break
    return gathered


def _first(chunks: Iterable[bytes], gathered: _Gathered) -> Iterator[bytes]:
    """Up to MOST_PAGES; what is cut off there is not a page that the server cut."""
    room = MOST_PAGES
    for chunk in chunks:
        room -= len(chunk)
        if room < 0:
            gathered.limit = f"{MOST_PAGES >> 20:,} MiB"
            return
        yield chunk


def _decoded(file: Path, gathered: _Gathered) -> Iterator[bytes]:
    """The file's content in chunks, decompressed where it is gzip; damage ends it and is noted.

    `torn` is how many of its last bytes may be a part of a scrape.
    """
    with opened(file) as stream:
        first = stream.read(STEP)
        gathered.begun = bool(first)
        chunks = _chain(first, iter(lambda: stream.read(STEP), b""))
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


def _chain(first: bytes, rest: Iterable[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


def _sections(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """The text from one `# scrape` line to the next, and whether it was too big to keep; a newline comes first."""
    buffer, searched, too_big = bytearray(b"\n"), 0, False
    for chunk in chunks:
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


def _millis(text: bytes) -> int | None:
    """Unix seconds as milliseconds; None where it is not a time since 1970."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return round(seconds * 1000) if 0 <= seconds < 1e11 else None
