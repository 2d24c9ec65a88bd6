"""What can be seen of one vLLM server from its own host: its GPUs, its processes and its log."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import tzinfo
from typing import Protocol

from diag import __version__
from diag.core.formatting import printable
from diag.core.metric_families import Collector, Sample, render
from diag.exporter.collector_thread import Collection, CollectionResult, CollectorThread
from diag.exporter.gpu.collector import GpuCollector
from diag.exporter.log.tail import LogTail
from diag.exporter.process.collector import ProcessCollector
from diag.exporter.vllm_page import Scraped
from diag.http.address import Address
from diag.http.locality import is_here
from diag.vllm.capacity import series
from diag.vllm.server.config import Config, ServerFacts, settle


class ServerView(Protocol):
    """What can be seen of one server beside its own page."""

    @property
    def collectors(self) -> Sequence[Collector]:
        """What adds to its page."""

    @property
    def has_server(self) -> bool:
        """Whether anything but its page shows that there is, or was, a server."""

    def start(self) -> None:
        """Start what goes on between two scrapes."""

    def scraped(self, answered: bool) -> None:
        """Whether its page has just answered: what its log may mean depends on it."""

    def completed(self, facts: ServerFacts) -> ServerFacts:
        """What a server reports of itself, with what else is known of it."""


@dataclass(frozen=True)
class HostCollectors:
    """The collectors of one server; None for what is on another host, and for a log that was not named."""

    gpus: GpuCollector | None
    log: LogTail | None
    processes: ProcessCollector | None

    @property
    def collectors(self) -> Sequence[Collector]:
        """Those that there are."""
        return [collector for collector in (self.gpus, self.log, self.processes) if collector]

    @property
    def has_server(self) -> bool:
        """Whether anything but its page shows that there is, or was, a server."""
        return self.log is not None or bool(self.processes and self.processes.owners())

    def start(self) -> None:
        """Start the threads that go on between two scrapes: Xid errors, the log."""
        for collector in (self.gpus, self.log):
            if collector:
                collector.start()

    def scraped(self, answered: bool) -> None:
        """Whether its page has just answered: what its log may mean depends on it."""
        if self.log:
            self.log.page(answered)

    def completed(self, facts: ServerFacts) -> ServerFacts:
        """What a server reports of itself, with what its log and its processes add."""
        process = self.processes.launch() if self.processes else ""
        return (self.log.state.completes(facts) if self.log else facts)._replace(process=process)


def host_collectors(address: Address, log: str, zone: tzinfo | None, gpus: tuple[str, ...] = ()) -> HostCollectors:
    """The collectors for that server; `log` is a path, "-" for standard input, "" for none."""
    tail = LogTail(log, zone) if log else None
    if not is_here(address):
        return HostCollectors(None, tail, None)
    processes = ProcessCollector(address.port)
    return HostCollectors(GpuCollector(gpus, processes.owners, processes.visible), tail, processes)


log = logging.getLogger("diag.exporter")
TURN = 0.01
"""Seconds that a collector has before the next one starts beside it. Two that run at once hand Python's global lock to
each other at every system call, which takes twice the CPU time.
"""
Write = Callable[[Iterable[Sample]], bytes]
"""Samples as text: `render` for Prometheus, `plain` for a page that only we read."""


@dataclass(frozen=True)
class Rendered:
    """A collector's families as text, and what is wrong with them."""

    text: bytes
    problem: str


class HostPage:
    """Everything on the page but vLLM's own part."""

    def __init__(self, host: ServerView, more: Callable[[], Iterable[Sample]] = tuple, write: Write = render) -> None:
        self._host = host
        self._more = more
        self._write = write
        self._threads = [CollectorThread(part.name, _rendering(part, write)) for part in host.collectors]
        self._reported: dict[str, str] = {}
        self._last_up = 0.0
        self._known: tuple[bool, Config, ServerFacts] | None = None
        self._running: Sequence[Sample] = ()

    def collect(self) -> list[Collection[Rendered]]:
        """Start one collector after the other, while vLLM works on its page; none waits for one that hangs."""
        collections = []
        for thread in self._threads:
            collections.append(thread.collect())
            collections[-1].result(TURN)
        return collections

    def page(
        self, scraped: CollectionResult[Scraped], collections: Sequence[Collection[Rendered]], seconds: float
    ) -> bytes:
        """The whole page; a collection may take so many seconds from its beginning on."""
        pairs = zip(self._threads, collections, strict=True)
        rendered = {thread.name: collection.result(seconds) for thread, collection in pairs}
        self._host.scraped(scraped.answered)
        results: dict[str, CollectionResult[Scraped] | CollectionResult[Rendered]] = {"vllm": scraped, **rendered}
        problems = {name: _problem(result) for name, result in results.items()}
        self._log(problems)
        durations = {name: result.seconds for name, result in results.items()}
        own = self._write([*_collectors(problems, durations), *self._server(scraped.value), *self._more()])
        texts = (result.value.text for result in rendered.values() if result.value)
        return b"".join([scraped.value.page if scraped.value else b"", *texts, own])

    def _server(self, scraped: Scraped | None) -> Iterator[Sample]:
        yield "diag_build_info", (__version__,), 1
        up = bool(scraped and scraped.up)
        if scraped and scraped.renamed:
            yield "diag_vllm_metrics_renamed", (scraped.renamed,), 1
        self._last_up = time.time() if up else self._last_up
        yield "diag_vllm_up", (), float(up)
        if self._last_up:
            yield "diag_vllm_last_up_timestamp_seconds", (), self._last_up
        facts = self._host.completed(scraped.facts if scraped else ServerFacts())
        yield from self._configuration(up, scraped.config if scraped else {}, facts)

    def _configuration(self, up: bool, config: Config, facts: ServerFacts) -> Sequence[Sample]:
        """Worked out when it changes: vLLM's page is there by now, and who scrapes waits."""
        if (up, config, facts) != self._known:
            self._known = up, config, facts
            self._running = list(_running(up, config, facts))
        return self._running

    def _log(self, problems: dict[str, str]) -> None:
        """One line in the log for every problem that comes or goes."""
        for name, problem in problems.items():
            if problem != self._reported.get(name, ""):
                log.warning("%s: %s", name, printable(problem, 400) or "works again")
        self._reported = problems


def _rendering(collector: Collector, write: Write) -> Callable[[], Rendered]:
    def collect() -> Rendered:
        collected = collector.collect()
        return Rendered(write(collected.samples), collected.problem)

    return collect


def _running(up: bool, config: Config, facts: ServerFacts) -> Iterator[Sample]:
    settled = settle(config, facts)
    if facts.version or facts.models or settled.device:
        yield "diag_vllm_info", (facts.version, ", ".join(facts.models), settled.device), 1
    for flag, value in sorted(settled.numbers.items()):
        yield "diag_vllm_config", (flag,), value
    if up:  # by then the model's files are there
        yield from series.of_server(settled, facts)


def _problem(result: CollectionResult[Scraped] | CollectionResult[Rendered]) -> str:
    return result.problem or (result.value.problem if result.value else "")


def _collectors(problems: dict[str, str], durations: dict[str, float]) -> Iterator[Sample]:
    for name, problem in problems.items():
        yield "diag_scrape_success", (name,), float(not problem)
        yield "diag_scrape_duration_seconds", (name,), durations[name]
