"""Frames of the view, a row for each server with its verdict and numbers, and the thread that makes them.

The thread scrapes or queries, and judges; the view only looks at the last frame. Scraped pages of the last minutes stay
in memory, and are written as a recording on request.
"""

import math
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from diag.core.errors import BadUsage, Unreachable
from diag.core.formatting import plural, quantity
from diag.core.incident import RANK
from diag.core.subjects import UNKNOWN, Instants, Subject, instance_name, label_value
from diag.diagnosis.decision_table import LOOK
from diag.diagnosis.diagnose import Diagnosis, without_the_past
from diag.diagnosis.health import HealthEvidence
from diag.diagnosis.progress import NotJudged
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Finding, Report, verdict_of
from diag.diagnosis.vitals import MEASURES, NOW, SERVING, measured
from diag.report import coverage
from diag.report.answer import fleet_rows
from diag.sources.live.scrape import BackgroundScraper, Scraper
from diag.sources.observation import Observation
from diag.sources.recording.writer import Recorder, fit
from diag.vllm.running_config import ServerFacts

POINTS = 60
"""Values of a sparkline: five minutes at one scrape every 5 s."""
REASONS = 'reason!~"gpu_idle|applications_clocks"'
THROTTLED = (
    f"max by (instance, gpu, reason) (max_over_time(diag_gpu_throttle_active{{{REASONS}}}[$window]){SERVING}"
    f" or rate(diag_gpu_throttle_seconds_total{{{REASONS}}}[$window]){SERVING}) > 0"
)
"""Throttle reasons of each GPU, except idle and user-set clocks."""
KEPT = 300.0
"""Seconds of pages in memory, to be recorded."""
MOST_BYTES = 24 * 2**20
"""Limit for all pages in memory, compressed: five minutes of some fifty servers."""
FAST = 1
"""The level of zlib."""
JUDGED, FEWEST_JUDGED = 60.0, 12
"""Seconds that are judged, up to now (`diag doctor --watch` takes 30), and the least number of scrapes."""
SHARE, LONGEST_PAUSE = 0.02, 30.0
"""Share of a core for judging: if it takes more, fewer scrapes are judged. And the longest pause, in seconds."""
SETTLES = 0.5
"""Seconds in which the servers that are scraped at the same time answer."""
QUERY_EVERY = 15.0
"""Seconds between two looks at a Prometheus, which has nothing new before its next scrape."""
Judged = tuple[Report, QueryCache]


# -- the numbers of a server ------------------------------------------------------------------------------------------


class Histories:
    """The last `POINTS` values of each measure of each server; a server without samples is dropped."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, deque[float | None]]] = {}

    def add(self, queries: QueryCache, instants: Instants) -> None:
        """Add the values at these instants, which must be later than the earlier ones."""
        found = measured(queries, instants)
        self._values = {
            name: self._values.get(name) or {key: deque(maxlen=POINTS) for key in MEASURES}
            for name in {name for servers in found.values() for name in servers}
        }
        for name, history in self._values.items():
            for key, servers in found.items():
                new = servers[name].tolist() if name in servers else [math.nan] * len(instants)
                history[key] += [None if math.isnan(value) else value for value in new]

    def of_server(self, name: str) -> Mapping[str, Sequence[float | None]]:
        """Return the values of one server by measure, the latest at the end."""
        return {key: tuple(values) for key, values in self._values.get(name, {}).items()}


def throttle_reasons(queries: QueryCache, instants: Instants) -> dict[str, tuple[str, ...]]:
    """Return the throttle reasons at the last instant by server; a power cap, which is usual, comes last."""
    found: dict[str, set[str]] = {}
    for subject, values in queries.ask(THROTTLED, (), queries.holding(NOW), instants[-1:]).items():
        if not np.isnan(values[-1]):
            found.setdefault(instance_name(subject), set()).add(label_value(subject, "reason") or UNKNOWN)
    return {
        name: tuple(sorted(reasons, key=lambda reason: (reason == "sw_power_cap", reason)))
        for name, reasons in found.items()
    }


# -- the verdict of now -----------------------------------------------------------------------------------------------


class Onsets:
    """Remembers over many judgements when each incident began: one judgement sees no further back than its samples."""

    def __init__(self) -> None:
        self._onsets: dict[tuple[str, Subject], tuple[float, bool]] = {}

    def carry_over(self, report: Report) -> Report:
        """Return the report of now: an ended incident is absent, an ongoing one began when it was first seen."""
        by_key = {_key(finding.diagnosis): finding for finding in report.findings}
        findings, onsets = [], {}
        for diagnosis in without_the_past([finding.diagnosis for finding in report.findings]):
            key, finding = _key(diagnosis), Finding(diagnosis)
            known = self._onsets.get(key)
            if diagnosis.state == "present":
                began = diagnosis.one_by_one[-1].since
                new = (diagnosis.watched_since, True) if began is None else (began, False)
                start, before = known = min(new, known or new)
                since = None if before else start
                watched = diagnosis.instants[0] - start if before else diagnosis.watched
                episodes = ((since, diagnosis.episodes[-1][1]),)
                finding = by_key[key]._replace(
                    diagnosis=diagnosis._replace(since=since, episodes=episodes, watched=watched)
                )
            if known and diagnosis.state != "absent":
                onsets[key] = known
            findings.append(finding)
        self._onsets = onsets
        return report._replace(findings=tuple(findings), verdict=verdict_of(findings, report.not_judged, report.health))


def _key(diagnosis: Diagnosis) -> tuple[str, Subject]:
    return diagnosis.incident.id, diagnosis.subject


def without_verdict(report: Report, seen: float) -> Report:
    """Return the report of the first `seen` seconds: present incidents are unknown until the doctor has enough data."""
    findings = tuple(
        Finding(finding.diagnosis._replace(state="unknown", primary=False, explained_by=None))
        if finding.diagnosis.state == "present"
        else finding
        for finding in report.findings
    )
    why = f"too little seen: {quantity(round(seen), 'seconds')} of the {quantity(LOOK, 'seconds')} that a verdict needs"
    return report._replace(findings=findings, not_judged=(NotJudged(why),), health=HealthEvidence(), verdict="unknown")


# -- the rows ---------------------------------------------------------------------------------------------------------


class ServerRow(NamedTuple):
    """One server; its worst present incident began at `since`, unix seconds, or earlier if `before` is set.

    `runs` describes release and model. `values` are the known ones of `MEASURES`, `history` the last ones of each, None
    for holes.
    """

    instance: str
    runs: str
    verdict: str
    state: str
    incidents: tuple[str, ...]
    since: float | None
    before: bool
    values: Mapping[str, float]
    history: Mapping[str, Sequence[float | None]]
    throttled: tuple[str, ...] = ()


class Frame(NamedTuple):
    """The content of the view until the next frame; `at` is the time of the last samples, unix seconds.

    `queries` answered the judgement; `lost` is the reason why no newer samples arrive.
    """

    at: float
    report: Report
    queries: QueryCache
    rows: tuple[ServerRow, ...]
    lost: str = ""


def server_rows(
    report: Report, histories: Histories, throttled: Mapping[str, tuple[str, ...]]
) -> tuple[ServerRow, ...]:
    """Return a row for each server, the worst first; `throttled` are the throttle reasons by server."""
    worst: dict[str, Diagnosis] = {}
    for diagnosis in (finding.diagnosis for finding in report.present if RANK[finding.diagnosis.severity]):
        worst.setdefault(instance_name(diagnosis.subject), diagnosis)
    runs = {server.name: line for server, line in zip(report.observed.servers, coverage.servers(report), strict=True)}

    rows = []
    for server in fleet_rows(report):
        incident, history = worst.get(server.name), histories.of_server(server.name)
        last = {key: values[-1] for key, values in history.items() if values}
        since = incident and (incident.watched_since if incident.since is None else incident.since)
        rows.append(
            ServerRow(
                instance=server.name,
                runs=runs.get(server.name, ""),
                verdict=server.verdict,
                state=server.states,
                incidents=server.incidents,
                since=since,
                before=incident is not None and incident.since is None,
                values={key: value for key, value in last.items() if value is not None},
                history=history,
                throttled=throttled.get(server.name, ()),
            )
        )
    return tuple(rows)


class Feed:
    """A thread that makes frames until it is stopped; `failed` is the error that ended it."""

    def __init__(self) -> None:
        self.latest: Frame | None = None
        self.failed: BaseException | None = None
        self._stopped = threading.Event()
        self._histories, self._onsets = Histories(), Onsets()

    def start(self) -> None:

        def run() -> None:
            try:
                self._watch()
            except BaseException as error:  # noqa: BLE001  the view looks at `failed`
                self.failed = error

        threading.Thread(target=run, name="diag-top", daemon=True).start()

    def stop(self) -> None:
        """End the thread soon, without waiting for a server that does not answer."""
        self._stopped.set()

    def record(self) -> str:
        """Write the last minutes as a recording; returns a sentence with its place."""
        raise BadUsage("nothing is recorded: a Prometheus keeps its samples; diagnose them later with --at")

    def _watch(self) -> None:
        raise NotImplementedError

    def _show(self, judged: Judged) -> None:
        """Make a frame of a judgement, with the numbers of the instants since the last one."""
        report, queries = judged
        seen, instants = queries.span + queries.source.interval, queries.source.instants[-POINTS:]
        is_enough = seen >= LOOK or bool(report.observed.endings)  # a log is whole at once
        report = self._onsets.carry_over(report) if is_enough else without_verdict(report, seen)
        new = instants[instants > self.latest.at * 1000 + 1] if self.latest else instants
        if len(new):
            self._histories.add(queries, new)
        rows = server_rows(report, self._histories, throttle_reasons(queries, instants))
        self.latest = Frame(float(instants[-1]) / 1000, report, queries, rows)


class ScrapeFeed(Feed):
    """Frames of scraped servers: judged with every scrape, or as often as that takes little of a core."""

    def __init__(
        self, scraper: Scraper, memory: "PageMemory", every: float, judge: Callable[[Observation], Judged]
    ) -> None:
        super().__init__()
        self._watched, self._memory, self._every, self._judge = scraper, memory, every, judge

    def record(self) -> str:
        folder = Path(f"diag-top-{datetime.fromtimestamp(time.time(), UTC):%Y%m%dT%H%M%SZ}")
        count = self._memory.write(folder, self._watched.facts, self._watched.remarks, self._every)
        return f"{plural(count, 'scrape')} recorded; diagnose them with: diag doctor {folder}"

    def _watch(self) -> None:
        shown, last = 0, 0.0  # the first judgement fills caches: it takes longer than the next ones
        with BackgroundScraper(self._watched).running() as watched:
            while not self._stopped.wait(SETTLES):
                if watched.failed:
                    raise watched.failed[0]
                if self._watched.scrapes == shown:
                    continue
                self._stopped.wait(SETTLES)

                shown, begun = self._watched.scrapes, time.thread_time()
                seen = self._watched.observation()
                self._watched.forget(int(seen.instants[-1] - 1000 * max(JUDGED, FEWEST_JUDGED * self._every)))
                self._show(self._judge(seen))
                spent = time.thread_time() - begun

                self._stopped.wait(min(last / SHARE, spent / SHARE, LONGEST_PAUSE))
                last = spent


class QueryFeed(Feed):
    """Frames of the servers of a Prometheus, or of logs; `look` queries or reads them, and judges."""

    def __init__(self, look: Callable[[], Judged]) -> None:
        super().__init__()
        self._look = look

    def _watch(self) -> None:
        while not self._stopped.is_set():
            try:
                self._show(self._look())
            except Unreachable as error:
                if self.latest is None:
                    raise
                self.latest = self.latest._replace(lost=str(error))
            self._stopped.wait(QUERY_EVERY)


class KeptScrape(NamedTuple):
    """One scrape at unix milliseconds; `page` is compressed, `reason` is "" unless the scrape failed."""

    at: int
    instance: str
    page: bytes
    reason: str


class PageMemory:
    """A `Sink` that keeps the scrapes of the last `seconds`, and fewer if these have more than `most_bytes`."""

    def __init__(self, seconds: float, most_bytes: int = MOST_BYTES) -> None:
        self._milliseconds, self._most = seconds * 1000, most_bytes
        self._kept: deque[KeptScrape] = deque()
        self._size = 0
        self._lock = threading.Lock()

    def page(self, at: int, instance: str, page: bytes) -> bytes:
        """Keep a page; returns it as it would be recorded, to be judged."""
        return self._keep(at, instance, page, "")

    def failed(self, at: int, instance: str, reason: str, beside: bytes) -> bytes:
        """Keep a failed scrape with the samples of the server's host."""
        return self._keep(at, instance, beside, reason)

    def _keep(self, at: int, instance: str, page: bytes, reason: str) -> bytes:
        page = fit(page)
        scrape = KeptScrape(at, instance, zlib.compress(page, FAST), reason)
        with self._lock:
            self._kept.append(scrape)
            self._size += len(scrape.page)
            while self._kept and (self._kept[0].at < at - self._milliseconds or self._size > self._most):
                self._size -= len(self._kept.popleft().page)
        return page

    def write(self, folder: Path, facts: Mapping[str, ServerFacts], remarks: Sequence[str], every: float) -> int:
        """Write the kept scrapes as `diag record` would have; returns their number.

        Raises BadUsage if the folder is not empty or nothing is kept, BadRecording if it cannot be written.
        """
        with self._lock:
            kept = tuple(self._kept)
        if not kept:
            raise BadUsage("nothing was scraped yet: record again in some seconds")
        with Recorder(folder) as recorder:
            for scrape in kept:
                page = zlib.decompress(scrape.page)
                if scrape.reason:
                    recorder.failed(scrape.at, scrape.instance, scrape.reason, page)
                else:
                    recorder.page(scrape.at, scrape.instance, page)
            recorder.about(facts, remarks, every)
        return len(kept)
