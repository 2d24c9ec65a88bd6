"""The seam between the GPU collector and a vendor's library: a driver lists GPUs, and each GPU reads itself."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from diag.core.metric_families import Sample

RETRY = 30.0
"""Seconds between two starts of a library, while there is no driver or a GPU is lost."""


class DriverUnavailable(Exception):
    """The vendor's library cannot be used; the message is a sentence."""


class GpuLost(Exception):
    """This GPU does not answer, the others may."""


class ListedGpu(Protocol):
    """One GPU, with its state between two scrapes."""

    index: int
    uuid: str
    is_up: bool

    @property
    def processes(self) -> Mapping[int, int | None] | None:
        """Bytes by PID, each None if unknown; None if the driver does not list the processes."""

    @property
    def labels(self) -> tuple[str, str]:
        """Index and UUID."""

    def read(self, now: float) -> list[Sample]:
        """Read all samples; none if the GPU is lost. Raises DriverUnavailable."""

    def info(self) -> Iterator[Sample]:
        """Yield the samples that a lost GPU has too."""

    def is_named(self, names: Sequence[str]) -> bool:
        """Return True if an index or a UUID among `names` is this GPU's, as the vendor's runtime reads them."""


class GpuDriver(Protocol):
    """The library of one vendor. All its methods may raise DriverUnavailable."""

    name: str
    """The library: the collector's label in diag_scrape_success."""
    pci_vendor: str
    """The vendor's number as /sys/bus/pci writes it."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def count(self) -> int:
        """Return the number of GPUs that the library lists; it may list a lost one."""

    def gpus(self) -> Sequence[ListedGpu]:
        """List the GPUs; one that was listed before and is gone is lost. Whatever is still there stays the same."""

    def peers(self) -> Iterator[Sample]:
        """Yield the paths between the GPUs."""

    def watch(self) -> None:
        """Begin to count faults that the library reports only while something waits for them."""

    def unwatch(self) -> None: ...

    def faults(self, gpu: ListedGpu) -> Iterator[Sample]:
        """Yield the counted faults of one GPU; also of a lost one, whose last fault shows why."""
