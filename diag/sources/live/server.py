"""One scraped server: its scrapes, what is kept of a failure, its probe, and the clock of the scrapes."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from diag.core.formatting import clock, printable
from diag.exposition import NotMetrics
from diag.exposition.scrapes import Target
from diag.http.deadline import run_in_thread
from diag.http.failure import Failure
from diag.http.vllm_server import Probe, VllmServer
from diag.vllm.running_config import ServerFacts

T = TypeVar("T")
_JUMP = 500.0
"""Milliseconds; a clock that is slewed moves less between two scrapes."""


class Sink(Protocol):
    """Receives scrapes as they arrive."""

    def page(self, at: int, instance: str, page: bytes) -> bytes:
        """Keep a page; return the page to judge."""

    def failed(self, at: int, instance: str, reason: str, beside: bytes) -> bytes:
        """Keep a failed scrape and `beside`, a page about the server's host; return the page to judge."""


class Discard:
    """A sink that keeps nothing."""

    def page(self, at: int, instance: str, page: bytes) -> bytes:
        """Return the page unchanged."""
        return page

    def failed(self, at: int, instance: str, reason: str, beside: bytes) -> bytes:
        """Return the page about the server's host unchanged."""
        return beside


class Unanswered(Failure):
    """The server returned no page; `beside` is a page about its log, its processes and its GPUs."""

    def __init__(self, why: Failure | NotMetrics, beside: bytes) -> None:
        hint = why.hint if isinstance(why, Failure) else "use the address of the server itself"
        super().__init__(str(why), hint)
        self.beside = beside


class Pages(Protocol):
    """A source of pages: the server itself, or one that adds metrics of its host or pod."""

    def page(self) -> bytes:
        """Return the page; Failure or NotMetrics if there is none, Unanswered if only its host shows the server."""

    def facts(self) -> ServerFacts:
        """Return the facts about the server that its pages lack."""


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
    """A server that is scraped by its own pages or those of `beside`; `tick` is the next point of its cadence."""

    target: Target
    server: VllmServer
    beside: Pages | None
    clock: ScrapeClock
    sink: Sink
    tick: int = 0
    answered: bool = False
    facts_requested: bool = False
    failure: Failure | None = None
    probed: Probe | None = None
    published: bool = False

    async def scrape(self) -> None:
        """Scrape once; a failure is kept with its reason and the page about the server's host."""
        at = self.clock.now()
        try:
            page = await _in_background((self.beside or self.server).page)
        except (Failure, NotMetrics) as error:
            reason = printable(str(error))
            hint = "use the address of the server itself"
            self.failure = error if isinstance(error, Failure) else Failure(reason, hint)
            beside = error.beside if isinstance(error, Unanswered) else b""
            self.published = self.published or bool(beside and self.probed)
            beside = _with_probe(beside, self.probed) if beside else b""
            self.target.fail(at, reason, self.sink.failed(at, self.target.instance, reason, beside))
            self.answered = self.answered or bool(beside)
            return
        self.published = self.probed is not None
        kept = self.sink.page(at, self.target.instance, _with_probe(page, self.probed))
        reason = await _in_background(partial(self.target.add, at, kept))
        self.failure = Failure(reason) if reason else None
        self.answered = self.answered or not reason

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

    @property
    def owes_probe(self) -> bool:
        """Return True if a probe has ended since the last scrape."""
        return self.probed is not None and not self.published


async def _in_background(work: Callable[[], T]) -> T:
    """Run work that waits for a server, or reads a large page, in a thread, so that it does not delay other servers."""
    return await asyncio.wrap_future(run_in_thread(work))


def _with_probe(page: bytes, probed: Probe | None) -> bytes:
    """Append the probe's result, unless the page is truncated or has a probe of its own."""
    fits = probed is not None and page.endswith(b"\n") and b"\ndiag_probe_success" not in page
    lines = [f"{name} {value:g}\n".encode() for name, _, value in probed.samples()] if probed and fits else ()
    return page + b"".join(lines)
