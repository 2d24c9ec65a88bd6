"""One live server that is watched: its page scraped on a cadence and gathered, its probe on every later page."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from diag.core.formatting import printable
from diag.exposition.lines import NotMetrics
from diag.exposition.scrapes import Target
from diag.http.deadline import run_in_thread
from diag.http.failure import Failure
from diag.http.vllm_server import Probe, VllmServer
from diag.sources.live.clock import WatchClock
from diag.vllm.server.config import ServerFacts

T = TypeVar("T")


class Sink(Protocol):
    """Where scrapes go as they come in."""

    def page(self, at: int, instance: str, page: bytes) -> bytes:
        """Keep a page; what is returned is what is judged."""

    def failed(self, at: int, instance: str, reason: str, beside: bytes) -> bytes:
        """Keep a failed scrape and the page of what stands beside the server; what is returned is what is judged."""


class Discard:
    """Keeps nothing."""

    def page(self, at: int, instance: str, page: bytes) -> bytes:
        """Judge the page as it is."""
        return page

    def failed(self, at: int, instance: str, reason: str, beside: bytes) -> bytes:
        """Judge what stands beside the server as it is."""
        return beside


class Unanswered(Failure):
    """The server gave no page; `beside` is a page of what else there is: its log, its processes, its GPUs."""

    def __init__(self, why: Failure | NotMetrics, beside: bytes) -> None:
        hint = why.hint if isinstance(why, Failure) else "use the address of the server itself"
        super().__init__(str(why), hint)
        self.beside = beside


class Pages(Protocol):
    """A source of pages: the server itself, or one that adds what this host knows of it."""

    def page(self) -> bytes:
        """The page; Failure or NotMetrics where there is none, Unanswered where there is something beside it."""

    def facts(self) -> ServerFacts:
        """What is known of the server beside its pages."""


@dataclass
class WatchedServer:
    """A server that is watched, by its own pages or by those of `beside`; `tick` is the next point of its cadence."""

    target: Target
    server: VllmServer
    beside: Pages | None
    clock: WatchClock
    sink: Sink
    tick: int = 0
    answered: bool = False
    facts_requested: bool = False
    failure: Failure | None = None
    probed: Probe | None = None
    published: bool = False

    async def scrape(self) -> None:
        """Scrape once; a failure is kept with its reason and what stands beside the server."""
        at = self.clock.now()
        try:
            page = await _in_background((self.beside or self.server).page)
        except (Failure, NotMetrics) as error:
            self._failed(at, error)
            return
        self.published = self.probed is not None
        kept = self.sink.page(at, self.target.instance, _with(page, self.probed))
        reason = await _in_background(partial(self.target.add, at, kept))
        self.failure = Failure(reason) if reason else None
        self.answered = self.answered or not reason

    def _failed(self, at: int, error: Failure | NotMetrics) -> None:
        reason = printable(str(error))
        self.failure = error if isinstance(error, Failure) else Failure(reason, "use the address of the server itself")
        beside = error.beside if isinstance(error, Unanswered) else b""
        self.published = self.published or bool(beside and self.probed)
        kept = self.sink.failed(at, self.target.instance, reason, _with(beside, self.probed) if beside else b"")
        self.target.fail(at, reason, kept)
        self.answered = self.answered or bool(beside)

    @property
    def facts(self) -> ServerFacts:
        """What is known of the server beside its pages."""
        return self.beside.facts() if self.beside else self.server.facts

    async def fetch_facts(self) -> None:
        """Ask the server for what its page does not contain."""
        await _in_background(self.server.fetch_facts)

    async def probe(self, seconds: float) -> None:
        """Send one request for one token; how it went is on every later page."""
        self.probed = await _in_background(partial(self.server.probe, seconds))

    @property
    def owes_probe(self) -> bool:
        """Whether a probe ended since the last scrape."""
        return self.probed is not None and not self.published


async def _in_background(work: Callable[[], T]) -> T:
    """Run what waits for a server, or reads a large page, in a thread: one server does not delay another."""
    return await asyncio.wrap_future(run_in_thread(work))


def _with(page: bytes, probed: Probe | None) -> bytes:
    """The page with the probe's result, unless it is cut off or has a probe of its own."""
    fits = probed is not None and page.endswith(b"\n") and b"\ndiag_probe_success" not in page
    lines = [f"{name} {value:g}\n".encode() for name, _, value in probed.samples()] if probed and fits else ()
    return page + b"".join(lines)
