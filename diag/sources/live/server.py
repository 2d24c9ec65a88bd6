"""One scraped server: its pages, joined with those of its host or pod, its probe, and the clock of the scrapes."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillRunning
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol, TypeVar

from diag.core.formatting import clock, printable
from diag.core.metric_families import Sample
from diag.exporter.page import CollectionResult, HostPage, ServerView
from diag.exporter.vllm_page import PageReader, Scraped, health_alone, is_answer, is_ours
from diag.exposition import NotMetrics, labelled, plain
from diag.exposition.scrapes import Target
from diag.http.client import run_in_thread
from diag.http.failure import SCALES, Failure
from diag.http.vllm_server import DEAD, Probe, VllmServer
from diag.vllm.running_config import ServerFacts

T = TypeVar("T")
SECONDS, ALONE_SECONDS = 2.0, 8.0
"""Time limit for reading GPUs, processes or log beside a page; alone they decide, also on a host without a free CPU."""
ORPHANED_SECONDS = 0.5
"""Seconds for which the page is awaited of a port that engines hold whose API server has ended."""
_JUMP = 500.0
"""Milliseconds; a clock that is slewed moves less between two scrapes."""


class ServerPage(NamedTuple):
    """The page of a server, b"" for none, and the samples of its host or pod."""

    page: bytes
    samples: Sequence[Sample] = ()


class Sink(Protocol):
    """Receives scrapes as they arrive, as text: what is judged is then what is kept."""

    def page(self, at: int, instance: str, page: bytes) -> bytes:
        """Keep a page; return the page to judge."""

    def failed(self, at: int, instance: str, reason: str, beside: bytes) -> bytes:
        """Keep a failed scrape and `beside`, a page about the server's host; return the page to judge."""


class Unanswered(Failure):
    """The server returned no page; `beside` are samples of its log, its processes and its GPUs."""

    def __init__(self, why: Failure | NotMetrics, beside: Sequence[Sample]) -> None:
        hint = why.hint if isinstance(why, Failure) else "use the address of the server itself"
        super().__init__(str(why), hint)
        self.beside = beside


class JoinedPages:
    """A server's page, joined with the samples of its host or pod that `diag exporter` would add."""

    def __init__(self, server: VllmServer, host: ServerView) -> None:
        self._server = server
        self._host = host
        self._host_page = HostPage[list[Sample]](self._host, list)
        self._reader = PageReader()
        self._is_shown = False
        self._asked: Future[bytes] | None = None
        self._host.start()

    def page(self) -> ServerPage:
        """Return the page and the samples; Unanswered without a page if the host or an earlier page shows a server.

        Raises Failure or NotMetrics if nothing shows a server, or something else answers at its address.
        """
        collections, begin = self._host_page.collect(), time.monotonic()
        try:
            page = self._server_page()
            if is_ours(page):
                return ServerPage(page)
            scraped = self._reader.read(page, self._server.facts, self._server.health, self._server.unanswered)
        except (Failure, NotMetrics) as error:
            self._is_shown = self._is_shown or (self._host.has_server and not is_answer(error))
            if not self._is_shown:
                raise
            health = None if self._server.health is None else health_alone(str(error), self._server)
            answered = is_answer(error) or health is not None
            nothing = CollectionResult[Scraped](health, str(error), time.monotonic() - begin, answered)
            raise Unanswered(error, list(chain(*self._host_page.parts(nothing, collections, ALONE_SECONDS)))) from error
        self._is_shown = True
        parts = self._host_page.parts(CollectionResult(scraped, "", 0.0, True), collections, SECONDS)
        return ServerPage(scraped.page, list(chain(*parts)))

    def _server_page(self) -> bytes:
        """Return the page of the server; Failure or NotMetrics if there is none.

        A port that orphaned engines keep open accepts connections and never answers: it gets no second request then.
        """
        if self._asked is None or self._asked.done():
            self._asked = run_in_thread(self._server.page)
        with suppress(StillRunning):
            return self._asked.result(ORPHANED_SECONDS)
        if self._host.serves_nobody:
            raise Failure(f"did not answer within {ORPHANED_SECONDS:g} s, and the process that would has ended")
        return self._asked.result()

    def facts(self) -> ServerFacts:
        """Return the facts that the server reports, completed by those of its host or pod."""
        return self._host.completed(self._server.facts)


def steady() -> float:
    """Seconds of a clock that cannot be set, and that also counts while the machine sleeps if the system has one."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class ScrapeClock:
    """Reads the time of day once and counts on from there, so that setting the clock does not tear the samples."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = steady) -> None:
        self._wall = wall
        self._steady = steady
        self._offset = wall() - steady()
        self._apart = 0.0
        self.jumps: list[str] = []

    def now(self) -> int:
        """Return unix milliseconds that never go back; note a jump of the clock in `jumps`."""
        millis = (self._steady() + self._offset) * 1000
        apart = self._wall() * 1000 - millis
        if abs(apart - self._apart) > _JUMP:
            jump = apart - self._apart
            way, seconds = "back" if jump < 0 else "forward", f"{abs(jump) / 1000:.1f} s"
            self.jumps.append(
                f"the clock jumped {way} by {seconds} at {clock(millis / 1000)}; the times of the scrapes continue as"
                " if it had not"
            )
            self._apart = apart
        return round(millis)


@dataclass
class ScrapedServer:
    """A server that is scraped by its own pages or those of `beside`.

    `tick` is the next point of its cadence, `unwell` the looks in a row that show no page, or a 503 of vLLM's /health.
    `is_partial`: the last look had no page, and not all that stands beside it was read in time.
    """

    target: Target
    server: VllmServer
    beside: JoinedPages | None
    clock: ScrapeClock
    sink: Sink | None
    tick: int = 0
    unwell: int = 0
    is_partial: bool = False
    answered: bool = False
    facts_requested: bool = False
    failure: Failure | None = None
    probed: Probe | None = None
    published: bool = False

    async def scrape(self) -> None:
        """Scrape once; a failure is kept with its reason and the page about the server's host."""

        def own_page() -> ServerPage:
            page = self.server.page()
            return ServerPage(page, self.server.health_samples() if page.endswith(b"\n") else ())

        at, self.is_partial = self.clock.now(), False
        try:
            page = await _in_background(self.beside.page if self.beside else own_page)
        except (Failure, NotMetrics) as error:
            reason = printable(str(error))
            hint = "use the address of the server itself"
            self.failure = error if isinstance(error, Failure) else Failure(reason, hint)
            beside = ServerPage(b"", error.beside if isinstance(error, Unanswered) else self.server.health_samples())
            took = (value for name, _, value in beside.samples if name == "diag_scrape_duration_seconds")
            self.is_partial = max(took, default=0.0) >= ALONE_SECONDS
            if SCALES in reason and not isinstance(error, Unanswered):
                beside = beside._replace(samples=[("diag_vllm_elastic_scaling", (), 1.0)])
            if isinstance(error, Unanswered) or SCALES in reason or self.server.health == DEAD:
                self.answered, self.published = True, self.published or self.probed is not None
                beside = self._with_probe(beside)
            if self.sink:
                kept = self.sink.failed(at, self.target.instance, reason, plain(beside.samples))
                self.target.fail(at, reason, kept)
            else:
                self.target.fail(at, reason, beside=labelled(beside.samples))
            return
        self.published = self.probed is not None
        page = self._with_probe(page)
        if self.sink:
            kept = self.sink.page(at, self.target.instance, page.page + plain(page.samples))
            add = partial(self.target.add, at, kept)
        else:
            add = partial(self.target.add, at, page.page, labelled(page.samples))
        reason = await _in_background(add)
        self.failure = Failure(reason) if reason else None
        self.answered = self.answered or not reason

    def _with_probe(self, page: ServerPage) -> ServerPage:
        """Add the probe's result, unless the page is truncated or has a probe of its own."""
        fits = not page.page or (page.page.endswith(b"\n") and b"\ndiag_probe_success" not in page.page)
        return page._replace(samples=[*page.samples, *self.probed.samples()]) if self.probed and fits else page

    @property
    def facts(self) -> ServerFacts:
        """Return the facts about the server that its pages lack."""
        return self.beside.facts() if self.beside else self.server.facts

    async def fetch_facts(self) -> None:
        """Query the facts that the server's page lacks."""
        await _in_background(self.server.fetch_facts)

    async def probe(self, seconds: float) -> None:
        """Send one request for one token; every later page includes the result."""
        self.probed = await _in_background(partial(self.server.probe, seconds))


async def _in_background(work: Callable[[], T]) -> T:
    """Run work that waits for a server, or reads a large page, in a thread, so that it does not delay other servers."""
    return await asyncio.wrap_future(run_in_thread(work))
