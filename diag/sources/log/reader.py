"""Read logs as the only evidence: each is that of a server, judged by its own times; no host is asked for anything.

A log is sampled as its times go by, so that what it shows has a start and an end, as an incident of a recording has.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import tzinfo

from diag.core.errors import BadRecording
from diag.core.formatting import printable
from diag.exporter.log.corroboration import RESOLUTION
from diag.exporter.log.parse_line import LONGEST, first_time, split_redrawn
from diag.exporter.log.server_log import ServerLog
from diag.exposition.rendering import labelled
from diag.exposition.scrapes import Reading, Target
from diag.sources.log.export import as_lines
from diag.sources.log.files import FIRST, LAST, read_logs
from diag.sources.log.paste import Line, as_logged
from diag.sources.observation import Observation, Origin, observation
from diag.vllm.running_config import ServerFacts

FIRST_LINES, LAST_LINES = 50_000, 250_000
"""Lines read of the beginning and of the end of a log, also if its bytes would be more lines."""
_TEXT = re.compile(rb"[^\n]+")
EVERY, KEPT = 15.0, 1_800.0
"""Seconds between two samples of a log, and before its end from which on they are judged."""
MOST_UNTIMED = 10_000
"""Lines among which the first time of a log is looked for."""


def read(targets: Sequence[str], zone: tzinfo | None, launch: str, version: str) -> Iterator[Observation]:
    """Yield each log as the observation of a server; times without a zone are of `zone`, None for this host's.

    `launch` and `version` are the servers' launch command and vLLM release, "" if unknown. BadRecording if a log cannot
    be read or has no text.
    """
    for each in read_logs(targets):
        log, target = ServerLog(zone, each.path), Target(each.name)
        _play(log, [*_lines(each.first, 1), *_lines(each.last, 0)], zone, each.written, target)
        if log.latest is None:
            raise BadRecording(f"{printable(each.name)} has no text: there is nothing to judge")
        notes = (f"of {each.name} only the first {FIRST >> 20} and the last {LAST >> 20} MiB were read",)
        origin = Origin("log", printable(each.name), every=EVERY, notes=notes if each.last else ())
        facts = {each.name: log.completes(ServerFacts(version=version, launch=launch))}
        yield replace(observation(origin, [target], facts), endings={each.name: log.ending})


def _play(log: ServerLog, lines: Sequence[Line], zone: tzinfo | None, written: float, target: Target) -> None:
    """Feed the lines, and sample the log every `EVERY` seconds of its own time and at its end."""
    samples: deque[tuple[float, list[Reading]]] = deque(maxlen=2 * int(KEPT / EVERY))
    plain = as_logged(as_lines(lines))
    reason = log.reason
    untimed, begun = first_time((line.text for line in plain[:MOST_UNTIMED]), zone, written)
    for place, line in enumerate(plain):
        for part in split_redrawn(line.text):
            log.feed(part, begun if place < untimed else written, live=False, number=line.number)
        if log.withdrawn is not None:  # what was sampled since is not true
            while samples and samples[-1][0] >= log.withdrawn - RESOLUTION:
                samples.pop()
            log.withdrawn = None
        at = log.reached
        is_due = not samples or at - samples[-1][0] >= EVERY
        if at and (
            is_due or log.reason not in ("", reason)
        ):  # a reason may come behind the line that shows the failure
            if not is_due and at - samples[-1][0] < RESOLUTION:
                samples.pop()
            samples.append((at, _readings(log, at)))
            reason = log.reason
    log.finish()
    if not log.reached:
        return
    if log.reached - samples[-1][0] < RESOLUTION:
        samples.pop()
    samples.append((log.reached, _readings(log, log.reached)))
    for at, readings in samples:
        if log.reached - at > KEPT:  # a log that was silent for long
            continue
        target.note(round(at * 1000), readings)


def _readings(log: ServerLog, at: float) -> list[Reading]:
    """Return what the log shows at a moment, also whether the server is up, and how it answers.

    A server that was ended from outside counts as up to its end: it did not fail.
    """
    is_up = float(log.state in ("serving", "stopped", "script failed", "run over"))
    answers = [
        ({"__name__": "http_requests_total", "handler": route, "status": status}, float(count))
        for (route, status), count in log.answers.items()
    ]
    ups = [({"__name__": name}, is_up) for name in ("up", "diag_vllm_up")]
    return [*labelled(log.samples(at)), *ups, *answers]


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
