"""The exporter's page: vLLM's own, byte for byte, then the samples of the host's collectors: GPUs, processes, log.

Each collector has a time-out and a thread of its own, with one collection at a time: one that hangs costs only its part
of the page.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillRunning
from dataclasses import dataclass
from datetime import tzinfo
from functools import partial
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from diag import __version__
from diag.core import debug_log
from diag.core.formatting import printable
from diag.core.metric_families import Collector, Sample
from diag.exporter.gpu.collector import GpuCollector
from diag.exporter.infiniband import InfiniBandCollector, read_ports
from diag.exporter.nccl import NcclCollector
from diag.exporter.process.collector import ProcessCollector
from diag.exporter.process.table import listeners
from diag.exporter.vllm_page import CollectorFailed, Scraped
from diag.http.address import Address, is_here
from diag.http.failure import SCALES
from diag.log.corroboration import Measurement
from diag.log.tail import LogTail
from diag.vllm import work
from diag.vllm.running_config import Config, ServerFacts, settle

T = TypeVar("T")
log = logging.getLogger("diag.exporter")


@dataclass(frozen=True)
class CollectionResult(Generic[T]):
    """Result of a collection: its value, or None and the problem; its duration; whether its source responded."""

    value: T | None
    problem: str
    seconds: float
    answered: bool


class Collection(Generic[T]):
    """A collection under way; scrapes that come meanwhile share it."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.future: Future[CollectionResult[T]] = Future()

    def result(self, seconds: float) -> CollectionResult[T]:
        """Wait until so many seconds after the start, so that a collection that hangs delays the first scrape only."""
        left = self.start + seconds - time.monotonic()
        try:
            return self.future.result(max(left, 0.0))
        except StillRunning:
            return CollectionResult(None, "takes longer than a scrape may", time.monotonic() - self.start, False)


class CollectorThread(Generic[T]):
    """Collects on request, in a thread that ends with this object or with the process, even if it hangs."""

    def __init__(self, name: str, collect: Callable[[], T]) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._latest: Collection[T] | None = None
        wanted = self._wanted = SimpleQueue[Collection[T] | None]()

        def work() -> None:  # without this object, or a watch that scrapes again and again would gather threads
            while (collection := wanted.get()) is not None:
                value, problem, answered = None, "", True
                try:
                    value = collect()
                except CollectorFailed as error:
                    problem, answered = str(error), error.answered
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
                    log.debug("%s failed", name, exc_info=True)
                seconds = time.monotonic() - collection.start
                collection.future.set_result(CollectionResult(value, problem, seconds, answered))

        weakref.finalize(self, wanted.put, None)
        threading.Thread(target=work, name=f"diag-{name}", daemon=True).start()

    def collect(self) -> Collection[T]:
        """Begin a collection, or join the one under way."""
        with self._lock:
            if self._latest is None or self._latest.future.done():
                self._latest = Collection()
                self._wanted.put(self._latest)
            return self._latest


class ServerView(Protocol):
    """Telemetry of one server beside its own page."""

    @property
    def collectors(self) -> Sequence[Collector]: ...

    @property
    def has_server(self) -> bool:
        """True if a log or a process shows that there is, or was, a server."""

    @property
    def serves_nobody(self) -> bool:
        """True if the processes show that nothing is left to answer: engines whose API server has ended."""

    def start(self) -> None:
        """Start the threads that work between two scrapes."""

    def scraped(self, seen: Measurement) -> None:
        """Receive what vLLM's page has just measured: which claims of the log are believed depends on it."""

    def completed(self, facts: ServerFacts) -> ServerFacts:
        """Add facts from the log and the processes to those that the server reports."""


@dataclass(frozen=True)
class HostCollectors:
    """The collectors of one server; None on another host, and for a log that was not named."""

    gpus: GpuCollector | None
    log: LogTail | None
    processes: ProcessCollector | None
    nccl: NcclCollector | None = None
    infiniband: InfiniBandCollector | None = None

    @property
    def collectors(self) -> Sequence[Collector]:
        every = (self.gpus, self.log, self.processes, self.nccl, self.infiniband)
        return [collector for collector in every if collector]

    @property
    def has_server(self) -> bool:
        return self.log is not None or bool(self.processes and (self.processes.owners() or self.processes.strays()))

    @property
    def serves_nobody(self) -> bool:
        return bool(self.processes and self.processes.serves_nobody())

    def start(self) -> None:
        if self.gpus:
            self.gpus.start()
        if self.log and not self.log.is_file:  # a full pipe would stop the server
            self.log.start()

    def scraped(self, seen: Measurement) -> None:
        if self.nccl:
            self.nccl.page_answered(seen.page)
        if self.processes:
            self.processes.page(seen)
        if self.processes and self.log:
            started = self.processes.started()
            seen = seen._replace(
                started=seen.started if started is None else {**seen.started, "process table": started},
                processes=self.processes.identities(),
                lacks_engine=self.processes.lacks_engine(),
            )
        if self.log:
            self.log.page(seen)
            self.log.start()  # an old log is read once it is known which process its claims are about

    def completed(self, facts: ServerFacts) -> ServerFacts:
        process = self.processes.launch() if self.processes else ""
        return (self.log.state.completes(facts) if self.log else facts)._replace(process=process)


def host_collectors(
    address: Address, log: str, zone: tzinfo | None, gpus: tuple[str, ...] = (), nccl: tuple[str, int] | None = None
) -> HostCollectors:
    """Return the collectors of a server; `log` is a path, "-" for standard input, "" for none.

    `nccl` is the address of NCCL's RAS service; None asks none.
    """
    tail = LogTail(log, zone) if log else None
    if not is_here(address):
        return HostCollectors(None, tail, None)
    processes = ProcessCollector(address.port, log=log)

    def others(port: int) -> bool:
        """Return True if a process that is not of this server listens on a port, as far as that is visible."""
        pids = processes.owners().keys()
        return bool(pids and set(listeners(port)) - pids)

    asked = NcclCollector(nccl, others) if nccl else None
    ports = InfiniBandCollector() if any(read_ports()) else None
    return HostCollectors(GpuCollector(gpus, processes.owners, processes.visible), tail, processes, asked, ports)


TURN = 0.01
"""Seconds between the starts of two collectors. Two that run at once pass Python's global lock to each other at every
system call, which takes twice the CPU time.
"""
P = TypeVar("P")
"""A part of the page: text for Prometheus, or the samples themselves for a diagnosis in the same process."""


@dataclass(frozen=True)
class Rendered(Generic[P]):
    """A collector's part of the page, and its problem, or ""."""

    part: P
    problem: str


class HostPage(Generic[P]):
    """Puts together the page: vLLM's own part, the collectors' samples, and samples about the scrape itself.

    `write` makes a part of the page from samples; `clock` returns unix time.
    """

    def __init__(
        self,
        host: ServerView,
        write: Callable[[Iterable[Sample]], P],
        more: Callable[[], Iterable[Sample]] = tuple,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._host = host
        self._clock = clock
        self._more = more
        self._write = write

        def rendered(collector: Collector) -> Rendered[P]:
            collected = collector.collect()
            return Rendered(write(collected.samples), collected.problem)

        self._threads = [CollectorThread(part.name, partial(rendered, part)) for part in host.collectors]
        self._reported: dict[str, str] = {}
        self._last_up = 0.0
        self._asked_at = 0.0
        self._known: tuple[bool, Config, ServerFacts] | None = None
        self._configuration: Sequence[Sample] = ()

    def collect(self) -> list[Collection[Rendered[P]]]:
        """Start one collector after the other, while vLLM renders its page; none waits for one that hangs."""
        self._asked_at = self._clock()
        collections = []
        for thread in self._threads:
            collections.append(thread.collect())
            collections[-1].result(TURN)
        return collections

    def parts(
        self, scraped: CollectionResult[Scraped], collections: Sequence[Collection[Rendered[P]]], seconds: float
    ) -> list[P]:
        """Return the parts that follow vLLM's own page; a collection may take so many seconds from its start."""
        pairs = zip(self._threads, collections, strict=True)
        rendered = {thread.name: collection.result(seconds) for thread, collection in pairs}
        nothing = Measurement(self._asked_at, page=False, answers=scraped.answered)
        self._host.scraped(scraped.value.measured(self._asked_at) if scraped.value else nothing)
        results: dict[str, CollectionResult[Scraped] | CollectionResult[Rendered[P]]] = {"vllm": scraped, **rendered}
        samples: list[Sample] = [("diag_vllm_elastic_scaling", (), 1.0)] if SCALES in scraped.problem else []
        for name, result in results.items():
            problem = result.problem or (result.value.problem if result.value else "")
            if problem != self._reported.get(name, ""):
                log.warning("%s: %s", name, printable(problem, 400) or "works again")
            self._reported[name] = problem
            samples.append(("diag_scrape_success", (name,), float(not problem)))
            samples.append(("diag_scrape_duration_seconds", (name,), result.seconds))
            debug_log.took("collector", name, result.seconds)
        parts = [result.value.part for result in rendered.values() if result.value]
        return [*parts, self._write([*samples, *self._server(scraped.value), *self._more()])]

    def _server(self, scraped: Scraped | None) -> Iterator[Sample]:
        yield "diag_build_info", (__version__,), 1
        up = bool(scraped and scraped.up)
        if scraped and scraped.renamed:
            yield "diag_vllm_metrics_renamed", (scraped.renamed,), 1
        self._last_up = self._clock() if up else self._last_up
        yield "diag_vllm_up", (), float(up)
        if scraped and scraped.health is not None:
            yield "diag_vllm_health_status", (), scraped.health
        elif scraped and scraped.unanswered:
            yield "diag_vllm_health_unanswered", (), 1
        if self._last_up:
            yield "diag_vllm_last_up_timestamp_seconds", (), self._last_up
        facts = self._host.completed(scraped.facts if scraped else ServerFacts())._replace(log_ending=None)
        config: Config = scraped.config if scraped else {}
        if (up, config, facts) != self._known:  # computed only if it changes: Prometheus is waiting
            self._known, settled = (up, config, facts), settle(config, facts)
            info: Sample = ("diag_vllm_info", (facts.version, ", ".join(facts.models), settled.device), 1)
            self._configuration = [
                *([info] if facts.version or facts.models or settled.device else ()),
                *(("diag_vllm_config", (flag,), value) for flag, value in sorted(settled.numbers.items())),
                *(work.server_samples(settled, facts) if up else ()),  # by then the model's files are on the disk
            ]
        yield from self._configuration
