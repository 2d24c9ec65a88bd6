"""What can be seen of one vLLM server from its own host: its GPUs, its processes and its log."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import tzinfo

from diag.core.metric_families import Collector
from diag.exporter.gpu.collector import GpuCollector
from diag.exporter.log.tail import LogTail
from diag.exporter.process.collector import ProcessCollector
from diag.http.address import Address
from diag.http.locality import is_here
from diag.vllm.server.config import ServerFacts


@dataclass(frozen=True)
class HostCollectors:
    """The collectors of one server; None for what is on another host, and for a log that was not named."""

    gpus: GpuCollector | None
    log: LogTail | None
    processes: ProcessCollector | None

    @property
    def collectors(self) -> Sequence[Collector]:
        """Every part that is looked at."""
        return [each for each in (self.gpus, self.log, self.processes) if each]

    @property
    def has_server(self) -> bool:
        """Whether anything but its page shows that there is, or was, a server."""
        return self.log is not None or bool(self.processes and self.processes.owners())

    def start(self) -> None:
        """Start what goes on between two looks: Xid errors, the log."""
        for each in (self.gpus, self.log):
            if each:
                each.start()

    def told(self, told: ServerFacts) -> ServerFacts:
        """What a server says of itself, with what its log and its processes add."""
        process = self.processes.launch() if self.processes else ""
        return replace(self.log.state.completes(told) if self.log else told, process=process)


def host(address: Address, log: str, zone: tzinfo | None, gpus: tuple[str, ...] = ()) -> HostCollectors:
    """What there is here of that server; `log` is a path, "-" for standard input, "" for none."""
    tail = LogTail(log, zone) if log else None
    if not is_here(address):
        return HostCollectors(None, tail, None)
    processes = ProcessCollector(address.port)
    return HostCollectors(GpuCollector(gpus, processes.owners, processes.visible), tail, processes)
