"""The GPUs of this host, as a lint rule looks at them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Sample = tuple[str, tuple[str, ...], float]
"""As the exporter has it: family, the values of its labels, value."""


@dataclass(frozen=True)
class HostGpu:
    """One GPU: memory in bytes, and how many processes are on it."""

    index: str
    name: str
    total: float
    free: float
    users: int = 0


@dataclass(frozen=True)
class HostGpus:
    """The GPUs that the server would see, in their order; `paths` has "nvlink", "sys" ... by pairs of indices."""

    gpus: tuple[HostGpu, ...]
    paths: Mapping[tuple[str, str], str]


def host(samples: Iterable[Sample]) -> HostGpus:
    """The GPUs in what the exporter's collector found."""
    gpu_samples = [(family.removeprefix("diag_gpu_"), labels, value) for family, labels, value in samples]
    names = {labels[0]: labels[2] for family, labels, _ in gpu_samples if family == "info"}
    bytes_ = {(family, labels[0]): value for family, labels, value in gpu_samples if family.startswith("memory_")}
    users = [labels[0] for family, labels, _ in gpu_samples if family == "process_memory_bytes"]
    gpus = tuple(
        HostGpu(at, name, bytes_["memory_total_bytes", at], bytes_["memory_free_bytes", at], users.count(at))
        for at, name in names.items()
        if {("memory_total_bytes", at), ("memory_free_bytes", at)} <= bytes_.keys()
    )
    peers = (labels for family, labels, _ in gpu_samples if family == "peer_info")
    return HostGpus(gpus, {(first, second): path for first, second, path, *_ in peers})
