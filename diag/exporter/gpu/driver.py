"""The seam between the GPU collector and a vendor's library: a driver lists GPUs, and each GPU reads itself."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from diag.core.metric_families import Sample

RETRY = 30.0
"""Seconds between two starts of a library, while there is no driver or a GPU is lost."""
ANEW = 300.0
"""Seconds after which constant and refused readings are tried again."""
SELDOM = 10.0
"""Seconds between two slow readings: each error counter of AMD is a file of the driver."""


class DriverUnavailable(Exception):
    """The vendor's library cannot be used; the message is a sentence."""


class GpuLost(Exception):
    """This GPU does not answer, the others may."""


def handle_address(handle: Any) -> int | None:
    """Return the address behind a library's handle."""
    return ctypes.cast(handle, ctypes.c_void_p).value


class GpuDevice:
    """A GPU in the vendor's library, which remembers the requests that the GPU refused."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self._refused: set[tuple[Any, ...]] = set()
        self._answers = self._failures = 0

    def forget(self) -> None:
        """Repeat requests that were refused."""
        self._refused.clear()

    def fell_silent(self) -> bool:
        """Return True if no request was answered since the last call: some lost GPUs only report "unknown error"."""
        silent = self._failures > 0 and self._answers == 0
        self._answers = self._failures = 0
        return silent


Handle = TypeVar("Handle", bound=GpuDevice)


@dataclass
class ListedGpu(ABC, Generic[Handle]):
    """One GPU, with its state between two scrapes; without a device it is lost.

    `about` has the values of diag_gpu_info behind index and UUID; `processes` has bytes by PID, None if unknown, and is
    None if the driver does not list the processes; `utilization` has their shares of the GPU's time, None if unknown.
    """

    index: int
    device: Handle | None
    uuid: str
    about: tuple[str, ...]
    is_up: bool = False
    processes: Mapping[int, int | None] | None = None
    utilization: Mapping[int, float] | None = None
    _constant: Sequence[Sample] = ()
    _rare: Sequence[Sample] = ()
    _anew_at: float = 0.0
    _seldom_at: float = 0.0

    @property
    def labels(self) -> tuple[str, str]:
        """Index and UUID."""
        return str(self.index), self.uuid

    def read(self, now: float) -> list[Sample]:
        """Read all samples; none if the GPU is lost. Raises DriverUnavailable."""
        self.is_up, device = False, self.device
        if device is None:
            return []
        with suppress(GpuLost):
            if now >= self._anew_at:
                device.forget()
                self._constant = self._read_constant(device)
                self._anew_at = now + ANEW
            device.fell_silent()
            samples = self._read_each_time(device, now)
            if now >= self._seldom_at:
                self._rare = self._read_seldom(device)
                self._seldom_at = now + SELDOM
            self.is_up = True
            return [*samples, *self._rare, *self._constant]
        return []

    def info(self) -> Iterator[Sample]:
        """Yield the samples that a lost GPU has too."""
        yield "diag_gpu_up", self.labels, float(self.is_up)
        if self.about:
            yield "diag_gpu_info", (*self.labels, *self.about), 1.0

    @abstractmethod
    def is_named(self, names: Sequence[str]) -> bool:
        """Return True if an index or a UUID among `names` is this GPU's, as the vendor's runtime reads them."""

    @abstractmethod
    def _read_each_time(self, device: Handle, now: float) -> Sequence[Sample]:
        """Read the samples of every scrape, and the processes; raise GpuLost if the device fell silent."""

    @abstractmethod
    def _read_seldom(self, device: Handle) -> Sequence[Sample]: ...

    @abstractmethod
    def _read_constant(self, device: Handle) -> Sequence[Sample]: ...


AnyGpu = ListedGpu[Any]
"""A GPU of any vendor."""


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

    def gpus(self) -> Sequence[AnyGpu]:
        """List the GPUs; one that was listed before and is gone is lost. Whatever is still there stays the same."""

    def peers(self) -> Iterator[Sample]:
        """Yield the paths between the GPUs."""

    def watch(self) -> None:
        """Begin to count faults that the library reports only while something waits for them."""

    def unwatch(self) -> None: ...

    def faults(self, gpu: AnyGpu) -> Iterator[Sample]:
        """Yield the counted faults of one GPU; also of a lost one, whose last fault shows why."""
