"""What can be seen of one vLLM server from its own host: its GPUs, its processes and its log."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import tzinfo
from typing import Protocol

from diag.core.metric_families import Collector
from diag.exporter.gpu.collector import GpuCollector
from diag.exporter.log.tail import LogTail
from diag.exporter.process.collector import ProcessCollector
from diag.http.address import Address, is_here
from diag.vllm.server.config import ServerFacts


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
