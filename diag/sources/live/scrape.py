"""Live servers, scraped side by side, each on its own cadence."""

import asyncio
import math
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass

from diag.core.errors import UnknownHost, Unreachable
from diag.core.formatting import listed, printable
from diag.exposition.scrapes import Target
from diag.http.address import Address, parse_all
from diag.http.client import Client, Manner
from diag.http.credentials import Credentials, from_environment
from diag.http.failure import UnknownName, sentence
from diag.http.vllm_server import VllmServer
from diag.sources.live.clock import WatchClock
from diag.sources.live.target import Discard, Pages, Sink, WatchedServer
from diag.sources.observation import Observation, Origin, observation
from diag.vllm.server.config import ServerFacts

_SLACK = 1e-6
WHO_TELLS = " If it ran before, its log (--log), diag exporter or a Prometheus (--prometheus) tells whether it died."


@dataclass(frozen=True)
class WatchProgress:
    """How far a watch is: scrapes of all targets so far, and seconds."""

    scrapes: int
    failed: int
    seconds: float
    of_seconds: float


@dataclass(frozen=True)
class ScrapePlan:
    """How to watch; times in seconds.

    credentials: None reads the environment. probe: how long one request for one token may take, None for no probe.
    client: what requests of a server go through. beside: where its pages come from if not from itself.
    on_progress: called after every scrape.
    should_go_on: called when the time is over, and then every few scrapes.
    """

    every: float = 2.0
    duration: float = 30.0
    timeout: float = 5.0
    credentials: Credentials | None = None
    launch: str = ""
    probe: float | None = None
    client: Callable[[Address, Credentials, Manner], Client] = Client
    beside: Callable[[VllmServer], Pages | None] = lambda _: None
    on_progress: Callable[[WatchProgress], None] = lambda _: None
    should_go_on: Callable[[Observation], bool] = lambda _: False


class _Interrupted(Exception):
    """Ctrl-C while a callback ran."""


def watch(targets: Sequence[str] | Mapping[str, Address], plan: ScrapePlan) -> Observation:
    """Scrape live servers, which are URLs, or addresses by instance.

    Unreachable where none of them answers with metrics at first contact.
    """
    return Watch(targets, plan).run()


class Watch:
    """A watch of live servers; `facts` is what they report of themselves, by instance."""

    def __init__(
        self, targets: Sequence[str] | Mapping[str, Address], plan: ScrapePlan, sink: Sink | None = None
    ) -> None:
        self._addresses = targets if isinstance(targets, Mapping) else parse_all(targets)
        self._plan = plan
        self._credentials = plan.credentials or from_environment(os.environ)
        self._sink = sink or Discard()
        self._clock = WatchClock()
        self._servers: list[WatchedServer] = []
        self._fact_requests: list[asyncio.Task[None]] = []
        self._probes: list[asyncio.Task[None]] = []
        self._untried = len(self._addresses)
        self._notes: list[str] = []
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self._start = 0.0
        self._scrapes = self._failed = 0

    @property
    def facts(self) -> dict[str, ServerFacts]:
        """What is known of each server beside its pages."""
        return {server.target.instance: server.facts for server in self._servers}

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes about the watch itself, beside those about the scrapes."""
        return (*self._notes, *self._clock.jumps, *(note for watched in self._servers for note in watched.server.notes))

    def run(self) -> Observation:
        """Watch to the end or until Ctrl-C and return what was seen; KeyboardInterrupt where that is nothing."""
        try:
            asyncio.run(self._run())
        except (KeyboardInterrupt, asyncio.CancelledError, _Interrupted) as error:
            if not any(server.answered for server in self._servers):
                raise KeyboardInterrupt from error
            self._notes.append("interrupted: only the scrapes until then were used")
        return self.observation()

    def stop(self) -> None:
        """End the watch as Ctrl-C does; may be called by a signal's handler, at any time."""
        self._stopped = True
        if self._task and not self._task.done():
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    @property
    def scrapes(self) -> int:
        """How many of all servers have ended so far."""
        return self._scrapes

    def last_failures(self, count: int) -> str:
        """Why the last so many scrapes of every server failed; "" where one of them did not, or there are fewer."""
        last = [scrape for server in self._servers for scrape in server.target.scrapes[-count:]]
        failed = bool(last) and len(last) >= count * len(self._servers) and all(scrape.reason for scrape in last)
        return last[-1].reason if failed else ""

    def forget(self, before: int) -> None:
        """Drop the scrapes before a time, unix milliseconds: a watch that nobody ends must not grow."""
        for server in self._servers:
            server.target.forget(before)

    def observation(self) -> Observation:
        """What was seen so far, also while it runs in another thread; there is at least one scrape."""
        watched = [server for server in self._servers if server.target.scrapes]
        shown = ", ".join(dict.fromkeys(address.shown for address in self._addresses.values()))
        origin = Origin("scrape", shown, self._plan.every, self.remarks)
        return observation(origin, [server.target for server in watched], self.facts)

    async def _run(self) -> None:
        self._task = asyncio.current_task()
        if self._stopped:
            raise asyncio.CancelledError
        for instance, address in self._addresses.items():
            client = self._plan.client(address, self._credentials, Manner(self._plan.timeout))
            server = VllmServer(address, client, ServerFacts(launch=self._plan.launch))
            beside = self._plan.beside(server)
            self._servers.append(WatchedServer(Target(instance), server, beside, self._clock, self._sink))
        self._start = _now()
        try:
            await self._watch()
        finally:
            for task in (*self._fact_requests, *self._probes):
                task.cancel()

    async def _watch(self) -> None:
        until = self._plan.duration
        await self._to(until)
        await asyncio.gather(*self._fact_requests)
        while not all(probe.done() for probe in self._probes) or self._goes_on():
            until = _now() - self._start + 2 * self._plan.every
            await self._to(until)
        await asyncio.gather(*self._probes)
        await _together(server.scrape() for server in self._servers if server.owes_probe)

    def _goes_on(self) -> bool:
        try:
            return self._plan.should_go_on(self.observation())
        except KeyboardInterrupt as error:
            raise _Interrupted from error

    async def _to(self, until: float) -> None:
        """Scrape every target until so many seconds after the start."""
        await _together(self._cadence(server, until) for server in self._servers)

    async def _cadence(self, server: WatchedServer, until: float) -> None:
        """Scrape one target at whole multiples of the interval; those that a slow response covers are skipped."""
        every = self._plan.every
        while server.tick * every <= until + _SLACK:
            await asyncio.sleep(self._start + server.tick * every - _now())
            await server.scrape()
            server.tick = max(server.tick + 1, math.ceil((_now() - self._start) / every - _SLACK))
            self._after(server)

    def _after(self, server: WatchedServer) -> None:
        if len(server.target.scrapes) == 1:
            self._first_contact()
        if server.server.path and not server.facts_requested:
            server.facts_requested = True
            self._fact_requests.append(asyncio.create_task(server.fetch_facts()))
            if self._plan.probe is not None:
                self._probes.append(asyncio.create_task(server.probe(self._plan.probe)))
        self._scrapes += 1
        self._failed += server.failure is not None
        try:
            seconds = _now() - self._start
            self._plan.on_progress(WatchProgress(self._scrapes, self._failed, seconds, self._plan.duration))
        except KeyboardInterrupt as error:
            raise _Interrupted from error

    def _first_contact(self) -> None:
        self._untried -= 1
        if not self._untried and not any(server.answered for server in self._servers):
            raise _unreachable(self._servers)


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _together(coroutines: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all; the first error ends the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _unreachable(watched_servers: Sequence[WatchedServer]) -> Unreachable:
    failures = [(watched.server.address.shown, watched.failure) for watched in watched_servers if watched.failure]
    kind = UnknownHost if any(isinstance(failure, UnknownName) for _, failure in failures) else Unreachable
    if len(failures) == 1:
        shown, failure = failures[0]
        return kind(sentence(printable(shown), failure) + ("" if failure.reached else WHO_TELLS))
    reasons = [f"{printable(shown)} ({failure})" for shown, failure in failures]
    return kind(f"none of {len(watched_servers)} servers returned metrics: {listed(reasons)}; {failures[0][1].hint}")
