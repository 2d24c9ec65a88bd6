"""Read logs as the only evidence: each is that of a server, judged by its own times; no host is asked for anything.

A log is sampled as its times go by, so that what it shows has a start and an end, as an incident of a recording has.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone, tzinfo

from diag.core.errors import BadRecording, Unreachable
from diag.core.formatting import printable
from diag.core.metric_prefix import OWN
from diag.exposition import labelled
from diag.exposition.scrapes import Reading, Target
from diag.knowledge.other_engines import ONLY_JUDGES, program_of_log
from diag.log.corroboration import RESOLUTION
from diag.log.files import FIRST, LAST, read_logs
from diag.log.marks import MARKS
from diag.log.parse_line import LONGEST, Line, LineParser, first_time, split_redrawn
from diag.log.paste import as_lines, as_logged, by_source
from diag.log.server_log import ServerLog
from diag.sources.observation import Observation, Origin, observation
from diag.vllm.running_config import ServerFacts

FIRST_LINES, LAST_LINES = 50_000, 250_000
"""Lines read of the beginning and of the end of a log, also if its bytes would be more lines."""
_TEXT = re.compile(rb"[^\n]+")
EVERY, KEPT = 10.0, 1_800.0
"""Seconds between two samples of a log, as between two stats lines, and before its end that are judged."""
BEFORE, AFTER, FAR, OF_START, MOST_FAR, LONGEST_NEARBY = 60, 60, 3_000, 100_000, 60, 4_000
"""Lines before and after the one that ended a server that belong to it, lines in which evidence of other programs is
looked for, and those in which the server's choices are, kept lines of each, and characters of a line."""
SAME_END = 600.0
"""Seconds between what another program logged and the end that it may have brought about."""
MOST_ENDS, SKEW = 500, 120.0
"""Last lines whose times refute a zone, and seconds by which clocks may differ."""
HALF_A_YEAR = timedelta(days=183)
YEAR_IS_SURE = 30 * 86_400.0
"""Seconds between the last line and the moment at which the file was written, up to which the year is not in doubt."""
DUE = 0.9
"""Share of `EVERY` after which a sample is due: stats lines come a little early or late."""
PROBE = re.compile(r'- "(?:GET|HEAD) /(?:health|metrics|ping|livez|readyz|load|version|v1/models)\b')
LONGEST_GAP, FEWEST_PROBES = 120.0, 3
"""Seconds between two lines with times around probes, and probes, that show their pace."""
MOST_UNTIMED = 10_000
"""Lines among which the first time of a log is looked for."""


def read(targets: Sequence[str], zone: tzinfo | None, launch: str, version: str) -> list[Observation]:
    """Return each log as the observation of a server; times without a zone are of `zone`, None for this host's.

    `launch` and `version` are the servers' launch command and vLLM release, "" if unknown. BadRecording if a log cannot
    be read, or all of them have no text; Unreachable if all of them are of other programs.
    """
    others: list[str] = []
    empty: list[str] = []
    observations: list[Observation] = []
    servers = (
        (text._replace(name=f"{text.name} ({name})" if name else text.name), as_logged(lines))
        for text in read_logs(targets)
        for name, lines in by_source(as_lines([*_lines(text.first, 1), *_lines(text.last, 0)]))
    )
    for text, lines in servers:
        if other := program_of_log(line.text[:LONGEST_NEARBY] for line in lines[:MOST_UNTIMED]):
            others.append(f"{printable(text.name)} is a log of {other}, not of vLLM: {ONLY_JUDGES}")
            continue
        # when it was written, or half a year after the day whose year a library's line tells
        tail = [line.text[:LONGEST_NEARBY] for line in lines[-MOST_UNTIMED:]]
        days = {vllm[1] for vllm in map(MARKS.yearless.match, tail) if vllm}
        dated = next((day for day in map(MARKS.dated.match, reversed(tail)) if day and day["day"] in days), None)
        written, told = text.written, None
        with suppress(ValueError):
            told = datetime.fromisoformat(f"{dated['year']}-{dated['day']}") if dated else None
        written = min(written, (told + HALF_A_YEAR).timestamp()) if told else written
        its_zone, remark = fitting_zone(lines, zone, written)
        log, target = ServerLog(its_zone, text.path), Target(text.name)
        _play(log, lines, its_zone, written, target)
        if log.latest is None:
            empty.append(f"{printable(text.name)} has no text: there is nothing to judge")
            continue
        cut = (f"of {text.name} only the first {FIRST >> 20} and the last {LAST >> 20} MiB were read",)
        is_timed = log.current.clock.newest > 0
        notes = (*(cut if text.last else ()), *remark)
        parser = LineParser(its_zone)
        ends = (at for line in lines[-MOST_ENDS:] for at in _times(parser, line.text, written))
        latest = max(ends, default=written)
        if parser.assumed_year and written - latest > YEAR_IS_SURE:  # the file is not as old as its lines seem to be
            year = datetime.fromtimestamp(latest, its_zone).year
            notes += (f"its lines have no year: {year} is the latest that fits",)
        notes += () if is_timed else (f"no line of {text.name} has a time: any time told is that of the file",)
        origin = Origin("log", printable(text.name), every=EVERY, notes=notes)
        facts = {text.name: log.completes(ServerFacts(version=version, launch=launch))}
        ending = log.ending
        near = nearby(lines, log.current.states.root_cause.number, its_zone, written)
        texts, numbers = "\n".join(line.text for line in near), tuple(line.number for line in near)
        context = ending.context._replace(nearby=texts, numbers=numbers)
        endings = {text.name: ending._replace(context=context, is_timed=is_timed)}
        observations.append(replace(observation(origin, [target], facts), endings=endings))
    aside = (*empty, *others)
    if aside and not observations:
        raise (BadRecording if empty else Unreachable)("; ".join(aside))
    return [replace(seen, notes=(*seen.notes, *(() if at else aside))) for at, seen in enumerate(observations)]


def _times(parser: LineParser, text: str, written: float) -> Iterator[float]:
    """Yield the times in a line."""
    parts = parser.parse(text[:LONGEST_NEARBY], written)
    return (part.at for part in parts if part.at is not None)


def fitting_zone(lines: Sequence[Line], zone: tzinfo | None, written: float) -> tuple[tzinfo | None, tuple[str, ...]]:
    """Return the zone of times without one, and a note if it is not the assumed one, this host's.

    No line is later than the moment at which the log was written or read: a zone in which one is has been refuted.
    Containers write UTC, so that is tried next, then zones to the east.
    """
    if zone is not None:
        return zone, ()
    for other in (None, UTC, *(timezone(timedelta(hours=hours)) for hours in range(1, 15))):
        if _latest(lines, other, written) <= written + SKEW:
            remark = (
                f"its times are read as {other}: as times of this host's zone the last ones would be later than the"
                " log itself (--log-timezone overrides)"
            )
            return other, (remark,) if other else ()
    return None, ()


def _latest(lines: Sequence[Line], zone: tzinfo | None, written: float) -> float:
    """Return the latest time of the last lines, 0 without any."""
    parser = LineParser(zone)
    return max((at for line in lines[-MOST_ENDS:] for at in _times(parser, line.text, written)), default=0.0)


def _play(log: ServerLog, lines: Sequence[Line], zone: tzinfo | None, written: float, target: Target) -> None:
    """Feed the lines, and sample the log every `EVERY` seconds of its own time and at its end.

    While the load is known, a moment without a line is sampled too: silence is what a stalled engine logs.
    """
    samples: deque[tuple[float, list[Reading]]] = deque(maxlen=2 * int(KEPT / EVERY))
    horizon = min(_latest(lines, zone, written), written) - KEPT  # what is older is not judged
    untimed, begun = first_time((line.text for line in lines[:MOST_UNTIMED]), zone, written)
    parser, first = LineParser(zone), 0  # the index of the first line to judge
    for place in range(len(lines) - 1, -1, -1):
        if any(at < horizon for at in _times(parser, lines[place].text, written)):
            first = place + 1
            break
    reason, clock, states = "", ProbeClock(), log.current.states
    load_lines, load = states.load.lines, states.load_at
    for place, line in enumerate(lines):
        before, served, states = log.current.clock.end, log.state == "serving", log.current.states
        if place == first and before:  # a silence that begins here shows what was true so far
            samples.append((before, _readings(log, before)))
        if states.load.lines != load_lines:
            load_lines, load = states.load.lines, states.load_at
        for part in split_redrawn(line.text):
            log.feed(part, begun if place < untimed else written, live=False, number=line.number)
        at = log.current.clock.end
        clock.read(line.text, at)
        if log.withdrawn is not None:  # what was sampled since is not true
            while samples and samples[-1][0] >= log.withdrawn - RESOLUTION:
                samples.pop()
            log.withdrawn = None
        if served and at - before > EVERY and samples and at >= horizon:
            now_known = states.load_at if states.load.dumped_at == at else load
            samples.extend(_quiet(samples[-1][1], now_known, before, at))
        is_due = not samples or (at >= horizon and at - samples[-1][0] >= DUE * EVERY)
        told = log.current.states.run.root_cause.reason  # it may come behind the line that shows the failure
        if at and (is_due or told not in ("", reason)):
            if not is_due and at - samples[-1][0] < RESOLUTION:
                samples.pop()
            samples.append((at, _readings(log, at)))
            reason = told
    log.current.finish()
    last = log.current.clock.end
    if not last:
        return
    if last - samples[-1][0] < RESOLUTION:
        samples.pop()
    samples.append((last, _readings(log, last)))
    end = last + clock.behind
    if log.state == "serving":
        samples.extend(_quiet(samples[-1][1], log.current.states.load_at, last, end + 1.0))
    for at, readings in dict(samples).items():  # of a time the last one: a line of another year may repeat it
        if end - at <= KEPT:  # else the log was silent for long
            target.note(round(at * 1000), readings)


class ProbeClock:
    """Measures how long a log went on behind its last line with a time, by the probes in its access log.

    uvicorn writes no times. Probes and scrapes come at a steady pace, which the lines with times around them show.
    """

    def __init__(self) -> None:
        self._last = self._seconds = 0.0
        self._probes = self._pending = 0

    def read(self, text: str, reached: float) -> None:
        """Read a line; `reached` is the time that the log has reached with it."""
        if reached > self._last:
            if self._last and self._pending and reached - self._last <= LONGEST_GAP:
                self._seconds += reached - self._last
                self._probes += self._pending
            self._last, self._pending = reached, 0
        elif PROBE.search(text):
            self._pending += 1

    @property
    def behind(self) -> float:
        """Seconds from the last time to the end of the log; 0 if too few probes have shown their pace."""
        if self._probes < FEWEST_PROBES:
            return 0.0
        return min(self._pending * self._seconds / self._probes, KEPT)


def nearby(lines: Sequence[Line], number: int, zone: tzinfo | None, written: float) -> list[Line]:
    """Return the lines around the one with a number, or the last ones, and those of other programs further off.

    What another program logged long before has not ended this server.
    """
    at = next((place for place in range(len(lines) - 1, -1, -1) if lines[place].number == number), len(lines) - 1)
    at = at if number else len(lines) - 1
    first, last = max(0, at - BEFORE), at + AFTER

    def time(text: str) -> float | None:
        return next(filter(None, _times(LineParser(zone), text, written)), None)

    def kept(distance: int, words: re.Pattern[str]) -> list[Line]:
        before = lines[max(0, at - distance) : first]
        return [line for line in before if words.search(line.text[:LONGEST_NEARBY])][-MOST_FAR:]

    ended = next(filter(None, (time(line.text) for line in reversed(lines[first : at + 1]))), None)

    def is_of_this_end(line: Line) -> bool:
        if ended is None or not MARKS.of_others.search(line.text[:LONGEST_NEARBY]):
            return True
        logged = time(line.text[:LONGEST_NEARBY])
        return logged is None or abs(logged - ended) <= SAME_END

    around = filter(is_of_this_end, [*kept(FAR, MARKS.of_others), *lines[first:last]])
    return [line._replace(text=line.text[:LONGEST_NEARBY]) for line in (*kept(OF_START, MARKS.of_choices), *around)]


def _quiet(
    last: Sequence[Reading], load: Callable[[float], list[Reading]], start: float, end: float
) -> Iterator[tuple[float, list[Reading]]]:
    """Yield the samples of a time without a line, while the load is known."""
    first = max(start, end - KEPT)
    others = [reading for reading in last if not reading[0]["__name__"].startswith(OWN)]
    for step in range(1, int((end - first - 0.001) / EVERY) + 1):
        at = first + step * EVERY
        if series := load(at):
            yield at, [*others, *series]


def _readings(log: ServerLog, at: float) -> list[Reading]:
    """Return what the log shows at a moment, also whether the server is up, and how it answers.

    A server that was ended from outside counts as up to its end: it did not fail.
    """
    is_up = float(log.state in ("serving", "stopped", "script failed", "run over"))
    answers = [
        ({"__name__": "http_requests_total", "handler": route, "status": status}, float(count))
        for (route, status), count in log.current.states.answers.by_route.items()
    ]
    ups = [({"__name__": name}, is_up) for name in ("up", "diag_vllm_up")]
    load = log.current.states.load_at(at) if log.state == "serving" else ()
    return [*labelled(log.samples(at)), *ups, *answers, *load]


def _lines(data: bytes, number: int) -> list[Line]:
    """Return the lines of some bytes, numbered from `number` on; for 0 without numbers, and without the torn first.

    Of several blank lines one is kept, and of too many lines the first and the last.
    """
    first: list[Line] = []
    last: deque[Line] = deque(maxlen=LAST_LINES)
    end = 0 if number else data.find(b"\n") + 1
    for match in _TEXT.finditer(data, end):
        skipped = data.count(b"\n", end, match.start())
        end, number = match.end(), number + skipped if number else 0
        text = match[0][:LONGEST].decode("utf-8", "replace")
        lines = first if len(first) < FIRST_LINES else last
        if skipped > 1:
            lines.append(Line(number - 1 if number else 0, ""))
        lines.append(Line(number, text))
    return [*first, *last]
