"""The GPUs of one vLLM server, whichever vendor's library lists them: which they are, and the samples of each."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diag.core.metric_families import Collected, Sample
from diag.exporter.gpu.amd import KFD, AmdDriver
from diag.exporter.gpu.driver import RETRY, AnyGpu, DriverUnavailable, GpuDriver
from diag.exporter.gpu.nvidia import NvidiaDriver

if TYPE_CHECKING:
    from diag.exporter.process.server import Owner

PCI = Path("/sys/bus/pci/devices")
"""Containers see those of their host."""


def host_driver(pci: Path = PCI, kfd: Path = KFD) -> GpuDriver:
    """Return the driver of this host's GPUs: AMD's if the kernel has ROCm's driver and shows no NVIDIA GPU."""
    return AmdDriver() if kfd.exists() and NvidiaDriver.pci_vendor not in _vendors(pci) else NvidiaDriver()


def _vendors(pci: Path) -> Sequence[str]:
    return [path.read_text(encoding="ascii").strip() for path in pci.glob("*/vendor")]


class GpuCollector:
    """Collects the GPUs of this server.

    They are the GPUs named with `--gpus`; else those that a process of the server uses or its environment
    (CUDA_VISIBLE_DEVICES) names; else all. A GPU that was shown once stays, or a crash would remove its series. A
    missing driver is a problem only if the host has a GPU.
    """

    def __init__(
        self,
        select: tuple[str, ...],
        owners: Callable[[], "Mapping[int, Owner]"],
        visible: Callable[[], str | None],
        driver: GpuDriver | None = None,
        proc: Path = Path("/proc"),
        pci: Path = PCI,
    ) -> None:
        self._driver = driver or host_driver(pci)
        self.name = self._driver.name
        self._select = select
        self._owners = owners
        self._visible = visible
        self._proc = proc
        self._pci = pci
        self._gpus: Sequence[AnyGpu] = ()
        self._shown: set[str] = set()
        self._peers: list[Sample] = []
        self._started = False
        self._start_at = self._anew_at = 0.0
        self._why = ""

    def start(self) -> None:
        self._driver.watch()

    def stop(self) -> None:
        self._driver.unwatch()

    def collect(self) -> Collected:
        now = time.monotonic()
        try:
            if not self._started:
                if now < self._start_at:
                    raise DriverUnavailable(self._why)
                self._driver.start()
                self._started = True
                self._enumerate()
            elif self._driver.count() != len(self._gpus):
                self._enumerate()
            by_gpu = [(gpu, gpu.read(now)) for gpu in self._gpus]
        except DriverUnavailable as error:
            if self._started:
                self._driver.stop()
            if self._started or now >= self._start_at:
                self._start_at = now + RETRY
            vendors = _vendors(self._pci)
            has_gpu = self._driver.pci_vendor in vendors or not vendors  # without any vendor, it is unknown
            is_problem = self._select or self._gpus or has_gpu
            self._started, self._why = False, str(error) if is_problem else ""
            for gpu in self._gpus:
                gpu.is_up = False
            return Collected([sample for gpu in self._gpus for sample in gpu.info()], self._why)

        samples = list(self._samples(by_gpu))
        lost = [str(gpu.index) for gpu in self._gpus if not gpu.is_up]
        if lost and now >= self._anew_at:  # only a restart of the library finds a GPU that was reset
            self._anew_at = now + RETRY
            self._driver.stop()
            self._started = False
        problem = f"GPU {', '.join(lost)} does not answer" if lost else ""
        if self._select and not any(self._is_selected(gpu) for gpu in self._gpus):
            problem = f"--gpus {','.join(self._select)} names no GPU of this host"
        return Collected(samples, problem)

    def _enumerate(self) -> None:
        self._gpus = self._driver.gpus()
        self._peers = list(self._driver.peers())

    def _samples(self, by_gpu: Sequence[tuple[AnyGpu, list[Sample]]]) -> Iterator[Sample]:
        owners = self._owners()
        serving = {gpu.uuid: self._serves(gpu, owners) for gpu, _ in by_gpu}
        self._shown |= {uuid for uuid, is_serving in serving.items() if is_serving}
        for gpu, samples in by_gpu:
            if (self._shown or self._select) and gpu.uuid not in self._shown:
                continue
            yield from gpu.info()
            yield from samples
            yield from self._driver.faults(gpu)
            for pid, used in (gpu.processes or {}).items():
                owner = owners.get(pid)
                role = owner.role if owner else "other" if (self._proc / str(pid)).exists() else "unknown"
                labels = (*gpu.labels, str(pid), role, owner.rank if owner else "")
                if used is not None and gpu.is_up:
                    yield "diag_gpu_process_memory_bytes", labels, float(used)
                if gpu.utilization is not None and gpu.is_up:
                    yield "diag_gpu_process_utilization_ratio", labels, gpu.utilization.get(pid, 0.0)
            if serving[gpu.uuid] is not None:
                yield "diag_gpu_serving", gpu.labels, float(bool(serving[gpu.uuid]))
        yield from self._peers

    def _is_selected(self, gpu: AnyGpu) -> bool:
        """Return True if --gpus has the GPU's label or UUID; an environment may number them in another order."""
        return gpu.labels[0] in self._select or gpu.is_named([name for name in self._select if not name.isdigit()])

    def _serves(self, gpu: AnyGpu, owners: "Mapping[int, Owner]") -> bool | None:
        """Return True if this vLLM uses the GPU, None if that is unknown."""
        if self._select:
            return self._is_selected(gpu)
        if not (gpu.processes or {}).keys().isdisjoint(owners):
            return True
        visible = self._visible()
        if visible is not None:
            return gpu.is_named(tuple(visible.split(",")))
        lists = [other.processes for other in self._gpus]
        seen = owners and all(
            pids is not None and all((self._proc / str(pid)).exists() for pid in pids) for pids in lists
        )
        return False if seen else None
