"""The samples of one collection of GPUs, by family and labels."""

from dataclasses import dataclass

from diag.exporter.gpu.collector import GpuCollector


@dataclass
class Shown:
    """The samples of one collection."""

    values: dict[tuple[str, ...], float]
    problem: str

    def of(self, name: str, gpu: int = 0, *labels: str) -> float | None:
        """The value of a family without its "diag_gpu_", None where there is no sample."""
        found = [
            v
            for (n, *rest), v in self.values.items()
            if n == f"diag_gpu_{name}" and rest[0] == str(gpu) and tuple(rest[2:]) == labels
        ]
        return found[0] if found else None

    def names(self, gpu: int = 0) -> set[str]:
        return {key[0].removeprefix("diag_gpu_") for key in self.values if key[1] == str(gpu)}


def look(one: GpuCollector) -> Shown:
    found = one.collect()
    return Shown({(name, *labels): value for name, labels, value in found.samples}, found.problem)
