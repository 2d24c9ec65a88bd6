"""InfiniBand and RoCE ports of this host: state, rate and error counters, from /sys/class/infiniband."""

import socket
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from diag.core.metric_families import Collected, Sample
from diag.exporter.process.kernel import read_file, whole

SYS = Path("/sys")
MOST_PORTS = 32
"""Ports that are read: a host of eight GPUs has eight to sixteen, virtual functions not counted."""
_ERRORS = ("symbol_error", "link_downed", "port_rcv_errors", "link_error_recovery", "local_link_integrity_errors")
_TIMEOUTS = "local_ack_timeout_err"
"""A counter of mlx5 devices (hw_counters): packets that no receiver has acknowledged in time, also with RoCE."""


class InfiniBandPort(NamedTuple):
    """One port: "mlx5_0/1", its state ("4: ACTIVE"), its rate ("400 Gb/sec (4X NDR)"), and its errors by counter."""

    name: str
    state: str
    rate: str
    counts: dict[str, int]

    @property
    def errors(self) -> dict[str, int]:
        """Errors of the link since its counters were reset, without those that are 0 and without timeouts."""
        return {name: count for name, count in self.counts.items() if count and name != _TIMEOUTS}


def read_ports(sys: Path = SYS) -> Iterator[InfiniBandPort]:
    """Yield the ports in the order of their names, with the counters that they have."""
    for port in islice(sorted((sys / "class/infiniband").glob("*/ports/*")), MOST_PORTS):
        texts = {name: read_file(f"{port}/counters/{name}") for name in _ERRORS}
        texts[_TIMEOUTS] = read_file(f"{port}/hw_counters/{_TIMEOUTS}")
        counts = {name: count for name, text in texts.items() if (count := whole([text])) is not None}
        name = f"{port.parent.parent.name}/{port.name}"
        yield InfiniBandPort(name, read_file(f"{port}/state"), read_file(f"{port}/rate"), counts)


class InfiniBandCollector:
    """Collects state and errors of every port; a host without ports needs none."""

    name = "infiniband"

    def __init__(self, sys: Path = SYS) -> None:
        self._sys = sys

    def collect(self) -> Collected:
        host = socket.gethostname()
        samples: list[Sample] = []
        for port in read_ports(self._sys):
            if port.state:
                samples.append(("diag_infiniband_port_active", (port.name, host), float("ACTIVE" in port.state)))
            for kind, count in port.counts.items():
                samples.append(("diag_infiniband_errors_total", (port.name, host, kind), float(count)))
        return Collected(samples)
