"""Scraping live servers: each on its own cadence, in the foreground or in a thread."""

import asyncio
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from diag.core.errors import UnknownHost, Unreachable
from diag.core.formatting import clock, listed, printable
from diag.exposition.scrapes import Target
from diag.http.address import Address, Credentials, from_environment, parse_all
from diag.http.client import Client
from diag.http.failure import UnknownName, sentence
from diag.http.vllm_server import DEAD, VllmServer
from diag.sources.live.server import JoinedPages, ScrapeClock, ScrapedServer, Sink
from diag.sources.observation import Observation, Origin, observation
from diag.vllm.running_config import ServerFacts

UNTIL_STOPPED = 10 * 365 * 86_400.0
"""Seconds of scraping that runs until it is stopped."""
UNWELL = 2
"""Looks in a row at every server that show no page, or a 503 of /health, after which an outage may be decided."""
GONE = 3
"""Failed scrapes in a row after which a server that has answered counts as gone."""
_SLACK = 1e-6
POST_MORTEM_HINT = (
    " If it ran before, its log (--log), diag exporter or a Prometheus (--prometheus) tells whether it died."
)


@dataclass(frozen=True)
class ScrapeProgress:
    """The progress of scraping: scrapes of all targets so far, and seconds."""

    scrapes: int
    failed: int
    seconds: float
    of_seconds: float


@dataclass(frozen=True)
class ScrapePlan:
    """The settings of scraping; times in seconds.

    credentials: None reads the environment. probe: time limit of one request for one token, None for no probe.
    client: makes the HTTP client for a server. beside: the source of a server's pages, None for the server itself.
    on_progress: called after every scrape. should_go_on: called when `duration` is over, and then every few scrapes.
    is_decided: called while every server has no page, or a 503 of vLLM's own /health; True ends the scraping.
    notes: what the source of the pages adds to the notes about the scraping.
    """

    every: float = 2.0
    duration: float = 30.0
    timeout: float = 5.0
    credentials: Credentials | None = None
    launch: str = ""
    probe: float | None = None
    client: Callable[[Address, Credentials, float], Client] = Client
    beside: Callable[[VllmServer], JoinedPages | None] = lambda _: None
    on_progress: Callable[[ScrapeProgress], None] = lambda _: None
    should_go_on: Callable[[Observation], bool] = lambda _: False
    is_decided: Callable[[Observation], bool] = lambda _: False
    notes: Callable[[], Sequence[str]] = tuple


class _Decided(Exception):
    """Ends the scraping: more scrapes of servers that are gone show nothing new."""


@contextmanager
def on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C only call `act` in the block; nothing changes in another thread, or if there is another handler.

    The asyncio module does so only while its event loop runs: while it makes the loop, Ctrl-C ends in a traceback.
    """
    current = threading.current_thread()
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or current is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def scrape(targets: Sequence[str] | Mapping[str, Address], plan: ScrapePlan) -> Observation:
    """Scrape live servers, given as URLs or as addresses by instance.

    Raises Unreachable if no server returns metrics at first contact.
    """
    return Scraper(targets, plan).run()


class Scraper:
    """Scrapes live servers; another thread may stop it and observe what it has."""

    def __init__(
        self, targets: Sequence[str] | Mapping[str, Address], plan: ScrapePlan, sink: Sink | None = None
    ) -> None:
        self._addresses = targets if isinstance(targets, Mapping) else parse_all(targets)
        self._plan = plan
        self._credentials = plan.credentials or from_environment(os.environ)
        self._sink = sink
        self._clock = ScrapeClock()
        self._servers: list[ScrapedServer] = []
        self._fact_requests: list[asyncio.Task[None]] = []
        self._probes: list[asyncio.Task[None]] = []
        self._untried = len(self._addresses)
        self._notes: list[str] = []
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self._looks = UNWELL
        self._start = 0.0
        self.scrapes = self._failed = 0
        """Finished scrapes of all servers so far, and those of them that failed."""

    @property
    def facts(self) -> dict[str, ServerFacts]:
        """The facts about each server that its pages lack, by instance."""
        return {server.target.instance: server.facts for server in self._servers}

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes about the scraping itself, without those about single scrapes."""
        of_servers = (note for watched in self._servers for note in watched.server.notes)
        return (*self._plan.notes(), *self._notes, *self._clock.jumps, *of_servers)

    def run(self) -> Observation:
        """Scrape to the end or until Ctrl-C; KeyboardInterrupt if no server has answered by then."""

        def interrupt() -> None:
            """Stop; a second Ctrl-C does not wait for what hangs, such as a name server, and loses no scrape either."""
            if self._stopped:
                raise KeyboardInterrupt
            self.stop()

        with on_interrupt(interrupt):
            try:
                asyncio.run(self._run())
            except (KeyboardInterrupt, asyncio.CancelledError):
                self._stopped = True
        if self._stopped:
            if not any(server.answered for server in self._servers):
                raise KeyboardInterrupt
            self._notes.append("interrupted: only the scrapes until then were used")
        return self.observation()

    def stop(self) -> None:
        """End the scraping as Ctrl-C does; a signal handler may call this at any time."""
        self._stopped = True
        if self._task and not self._task.done():
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    def last_failures(self, count: int) -> str:
        """Return why the last `count` scrapes of every server failed; "" if one succeeded or there are fewer."""
        last = [scrape for server in self._servers for scrape in server.target.scrapes[-count:]]
        failed = bool(last) and len(last) >= count * len(self._servers) and all(scrape.reason for scrape in last)
        return last[-1].reason if failed else ""

    def forget(self, before: int) -> None:
        """Drop the scrapes before a time in unix milliseconds, so that endless scraping needs bounded memory."""
        for server in self._servers:
            server.target.forget(before)

    def observation(self) -> Observation:
        """Return the observation so far, also while another thread is scraping; requires a scrape."""
        watched = [server for server in self._servers if server.target.scrapes]
        shown = ", ".join(dict.fromkeys(address.shown for address in self._addresses.values()))
        origin = Origin("scrape", shown, self._plan.every, self.remarks)
        return observation(origin, [server.target for server in watched], self.facts)

    async def _run(self) -> None:
        self._task = asyncio.current_task()
        if self._stopped:
            raise asyncio.CancelledError
        for instance, address in self._addresses.items():
            client = self._plan.client(address, self._credentials, self._plan.timeout)
            server = VllmServer(address, client, ServerFacts(launch=self._plan.launch))
            beside = self._plan.beside(server)
            self._servers.append(ScrapedServer(Target(instance), server, beside, self._clock, self._sink))
        self._start = _now()
        try:
            with suppress(_Decided):
                await self._scrape_until(self._plan.duration)
                await asyncio.gather(*self._fact_requests)
                while not all(probe.done() for probe in self._probes) or self._plan.should_go_on(self.observation()):
                    await self._scrape_until(_now() - self._start + 2 * self._plan.every)
            await asyncio.gather(*self._fact_requests, *self._probes)
            late = (server for server in self._servers if server.probed is not None and not server.published)
            await _gather(server.scrape() for server in late)  # their probes have ended since the last scrape
        finally:
            for task in (*self._fact_requests, *self._probes):
                task.cancel()

    async def _scrape_until(self, until: float) -> None:
        """Scrape every target until `until` seconds after the start.

        Each at whole multiples of the interval; a slow response skips those that it covers.
        """

        async def on_cadence(server: ScrapedServer, every: float) -> None:
            while server.tick * every <= until + _SLACK:
                await asyncio.sleep(self._start + server.tick * every - _now())
                await server.scrape()
                server.tick = max(server.tick + 1, math.ceil((_now() - self._start) / every - _SLACK))
                self._after_scrape(server)

        await _gather(on_cadence(server, self._plan.every) for server in self._servers)

    def _after_scrape(self, server: ScrapedServer) -> None:
        if len(server.target.scrapes) == 1:
            self._untried -= 1
            if not self._untried and not any(server.answered for server in self._servers):
                failures = [(one.server.address.shown, one.failure) for one in self._servers if one.failure]
                unknown = any(isinstance(failure, UnknownName) for _, failure in failures)
                kind, (address, failure) = UnknownHost if unknown else Unreachable, failures[0]
                if len(failures) == 1:
                    hint = "" if failure.reached else POST_MORTEM_HINT
                    raise kind(sentence(printable(address), failure) + hint)
                reasons = listed([f"{printable(address)} ({failure})" for address, failure in failures])
                raise kind(f"none of {len(self._servers)} servers returned metrics: {reasons}; {failure.hint}")
        if server.server.path and not server.facts_requested:
            server.facts_requested = True
            self._fact_requests.append(asyncio.create_task(server.fetch_facts()))
            if self._plan.probe is not None:
                self._probes.append(asyncio.create_task(server.probe(self._plan.probe)))
        is_unwell = server.failure is not None or server.server.health == DEAD
        server.unwell = server.unwell + (not server.is_partial) if is_unwell else 0
        self.scrapes += 1
        self._failed += server.failure is not None
        seconds = _now() - self._start
        self._plan.on_progress(ScrapeProgress(self.scrapes, self._failed, seconds, self._plan.duration))
        if (looks := min(each.unwell for each in self._servers)) >= self._looks:
            if self._plan.is_decided(self.observation()):
                raise _Decided
            self._looks = looks + (looks + 1) // 2  # judging takes time


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _gather(coroutines: Iterable[Coroutine[None, None, None]]) -> None:
    """Run coroutines side by side; the first error cancels the others and is raised without its group."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


@dataclass
class BackgroundScraper:
    """A scraper in a thread of its own, until a block ends; `failed` holds the exception that ended it earlier."""

    scraper: Scraper
    failed: list[BaseException] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator["BackgroundScraper"]:
        """Scrape while the block runs."""

        def run() -> None:
            try:
                self.scraper.run()
            except BaseException as error:  # noqa: BLE001  reported by `seen`
                self.failed.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.scraper.stop()
            thread.join(10)

    def seen(self) -> Observation | None:
        """Return the observation so far, None before the first scrape; Unreachable if the server never answered."""
        if self.failed and isinstance(self.failed[0], Unreachable):
            raise self.failed[0]
        return self.scraper.observation() if self.scraper.scrapes else None

    def gone(self) -> str:
        """Return why the server counts as gone, "" while it answers."""
        last = self.scraper.last_failures(GONE)
        return f"the server stopped answering at {clock(time.time())}: {last}" if last else ""
