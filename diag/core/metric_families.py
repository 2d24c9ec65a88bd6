"""The names that the exporter serves, and their text (the only importer of prometheus_client).

`FAMILIES` is a contract: incidents, alerts, dashboards, recordings and other people's rules are written against it. A
collector gives `Sample`s; what it cannot know has no sample, never 0, -1 or NaN.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, cast

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

Sample = tuple[str, tuple[str, ...], float]
"""A family's name, the values of its labels in the family's order, and the value."""


@dataclass(frozen=True)
class MetricFamily:
    """One metric: `labels` in the order in which a sample gives their values."""

    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Collected:
    """What a collector found at one scrape; a `problem` sets diag_scrape_success to 0, the samples are still served."""

    samples: Sequence[Sample]
    problem: str = ""


class Collector(Protocol):
    """One part of the page; `name` is its label in diag_scrape_success."""

    name: str

    def collect(self) -> Collected:
        """Look now; may raise, which costs only this part."""


GPU = ("gpu", "uuid")
FAMILIES: dict[str, MetricFamily] = {
    "diag_build_info": MetricFamily("gauge", "1, with the version of diag", ("version",)),
    "diag_scrape_success": MetricFamily("gauge", "1 when that part of the page worked", ("collector",)),
    "diag_scrape_duration_seconds": MetricFamily("gauge", "How long that part of the page took", ("collector",)),
    "diag_vllm_up": MetricFamily("gauge", "1 when vLLM's page answered with metrics"),
    "diag_vllm_config": MetricFamily("gauge", "The running value of a flag, booleans as 0 and 1", ("flag",)),
    "diag_vllm_info": MetricFamily("gauge", "1, with the version of vLLM and its model", ("version", "model")),
    "diag_vllm_startup_phase": MetricFamily(
        "gauge", "1 for the phase that the start-up is in, 0 for the others", ("phase",)
    ),
    "diag_vllm_startup_phase_seconds": MetricFamily("gauge", "Time spent in each phase so far", ("phase",)),
    "diag_vllm_startup_progress_ratio": MetricFamily("gauge", "How far the present phase is, where the log shows it"),
    "diag_vllm_startup_last_progress_timestamp_seconds": MetricFamily(
        "gauge", "Unix time of the last sign of progress"
    ),
    "diag_vllm_log_events_total": MetricFamily("counter", "Lines of that kind since the exporter started", ("event",)),
    "diag_vllm_log_event_last_timestamp_seconds": MetricFamily(
        "gauge", "Unix time of the last such line, or 0", ("event",)
    ),
    "diag_vllm_log_value": MetricFamily("gauge", "A number in the last such line", ("event", "field")),
    "diag_vllm_log_last_line_timestamp_seconds": MetricFamily("gauge", "Unix time of the last line of any kind"),
    "diag_probe_success": MetricFamily("gauge", "1 when the last request of our own was answered"),
    "diag_probe_duration_seconds": MetricFamily("gauge", "How long the last request of our own took"),
    "diag_probe_first_token_seconds": MetricFamily("gauge", "How long its first token took"),
    "diag_vllm_process_cpu_seconds_total": MetricFamily(
        "counter", "CPU time of one of vLLM's processes", ("pid", "role", "rank")
    ),
    "diag_vllm_process_stopped": MetricFamily(
        "gauge", "1 when the kernel says stopped, traced, zombie or uninterruptible", ("pid", "role", "rank")
    ),
    "diag_gpu_up": MetricFamily("gauge", "0 when this GPU does not answer", GPU),
    "diag_gpu_info": MetricFamily(
        "gauge",
        "1, with what this GPU is",
        (*GPU, "name", "pci_bus_id", "driver_version", "compute_capability"),
    ),
    "diag_gpu_temperature_celsius": MetricFamily("gauge", "Temperature", (*GPU, "sensor")),
    "diag_gpu_temperature_margin_celsius": MetricFamily("gauge", "Degrees left to the slowdown temperature", GPU),
    "diag_gpu_clock_hertz": MetricFamily("gauge", "Clock", (*GPU, "clock")),
    "diag_gpu_clock_max_hertz": MetricFamily("gauge", "Highest clock", (*GPU, "clock")),
    "diag_gpu_power_watts": MetricFamily("gauge", "Power drawn", GPU),
    "diag_gpu_power_limit_watts": MetricFamily("gauge", "Power limit in force", GPU),
    "diag_gpu_power_limit_min_watts": MetricFamily("gauge", "Lowest power limit that can be set", GPU),
    "diag_gpu_power_limit_default_watts": MetricFamily("gauge", "Power limit that the vendor set", GPU),
    "diag_gpu_energy_joules_total": MetricFamily("counter", "Energy used since the driver was loaded", GPU),
    "diag_gpu_utilization_ratio": MetricFamily("gauge", "Time with any kernel running", GPU),
    "diag_gpu_memory_busy_ratio": MetricFamily("gauge", "Time with memory being read or written", GPU),
    "diag_gpu_memory_total_bytes": MetricFamily("gauge", "Memory of this GPU", GPU),
    "diag_gpu_memory_used_bytes": MetricFamily("gauge", "Memory allocated", GPU),
    "diag_gpu_memory_free_bytes": MetricFamily("gauge", "Memory free", GPU),
    "diag_gpu_memory_reserved_bytes": MetricFamily("gauge", "Memory that driver and firmware keep", GPU),
    "diag_gpu_throttle_active": MetricFamily(
        "gauge", "1 when the clocks are held down for that reason", (*GPU, "reason")
    ),
    "diag_gpu_throttle_seconds_total": MetricFamily(
        "counter", "Time for which that held the clocks down", (*GPU, "reason")
    ),
    "diag_gpu_pcie_bytes_total": MetricFamily("counter", "Bytes over PCIe", (*GPU, "direction")),
    "diag_gpu_pcie_throughput_bytes_per_second": MetricFamily(
        "gauge", "Bytes over PCIe, where only the driver's own short sample exists", (*GPU, "direction")
    ),
    "diag_gpu_pcie_link_generation": MetricFamily("gauge", "PCIe generation; falls when idle", (*GPU, "which")),
    "diag_gpu_pcie_link_width": MetricFamily("gauge", "PCIe lanes", (*GPU, "which")),
    "diag_gpu_pcie_replays_total": MetricFamily("counter", "PCIe packets sent again", GPU),
    "diag_gpu_nvlink_bytes_total": MetricFamily("counter", "Bytes over all NVLinks", (*GPU, "direction")),
    "diag_gpu_nvlink_errors_total": MetricFamily("counter", "Errors on all NVLinks", (*GPU, "kind")),
    "diag_gpu_nvlink_active_links": MetricFamily("gauge", "NVLinks that are up", GPU),
    "diag_gpu_peer_info": MetricFamily("gauge", "1, with the path between a pair of GPUs", ("gpu", "peer", "path")),
    "diag_gpu_ecc_errors_total": MetricFamily("counter", "Memory errors since the driver was loaded", (*GPU, "kind")),
    "diag_gpu_remapped_rows": MetricFamily("gauge", "Memory rows replaced for that kind of error", (*GPU, "kind")),
    "diag_gpu_remap_failure": MetricFamily("gauge", "1 when a memory row could not be replaced", GPU),
    "diag_gpu_xid_errors_total": MetricFamily("counter", "Xid errors since the exporter started", (*GPU, "xid")),
    "diag_gpu_process_memory_bytes": MetricFamily(
        "gauge", "GPU memory of every process on this GPU", (*GPU, "pid", "role", "rank")
    ),
    "diag_gpu_serving": MetricFamily("gauge", "1 when a process of this vLLM is on this GPU, 0 when not", GPU),
}


def render(samples: Iterable[Sample]) -> bytes:
    """The samples in the text format 0.0.4, families in the order of the contract.

    prometheus_client writes what stands before a value, once for each series: it does not change from scrape to scrape.
    """
    from prometheus_client.utils import floatToGoString

    by_family: dict[str, list[Sample]] = {}
    for sample in samples:
        by_family.setdefault(sample[0], []).append(sample)
    lines: list[str] = []
    for name in filter(by_family.__contains__, FAMILIES):
        for at, (_, labels, value) in enumerate(by_family[name]):
            head = _HEADS.get((name, labels)) or _written(name, labels)
            lines.append(f"{'' if at else head[0]}{head[1]} {floatToGoString(value)}\n")  # type: ignore[no-untyped-call]
    return "".join(lines).encode()


_HEADS: dict[tuple[str, tuple[str, ...]], tuple[str, str]] = {}
MOST_HEADS = 20_000
"""Processes come and go, and every PID is a series of its own."""


def _written(name: str, labels: tuple[str, ...]) -> tuple[str, str]:
    """The family's comments and the series' name and labels, by prometheus_client."""
    from prometheus_client import generate_latest

    if len(_HEADS) >= MOST_HEADS:
        _HEADS.clear()
    page = generate_latest(cast("CollectorRegistry", _Registry((name, labels, 0.0)))).decode()
    comments, _, line = page.rstrip("\n").rpartition("\n")
    _HEADS[name, labels] = f"{comments}\n", line.rpartition(" ")[0]
    return _HEADS[name, labels]


def plain(samples: Iterable[Sample]) -> bytes:
    """The samples as bare lines, for a page that only we read; prometheus_client takes a while to load."""
    return "".join(f"{name}{_braces(name, labels)} {value!r}\n" for name, labels, value in samples).encode()


def _braces(name: str, labels: tuple[str, ...]) -> str:
    pairs = zip(FAMILIES[name].labels, labels, strict=True)
    text = ",".join(f'{label}="{value.translate(_ESCAPES)}"' for label, value in pairs)
    return f"{{{text}}}" if text else ""


_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})


class _Registry:
    """What `generate_latest` asks of a registry, with one sample."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        name, labels, value = self._sample
        family = FAMILIES[name]
        kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
        metric = kind(name, family.help, labels=family.labels)
        metric.add_metric(labels, value)
        yield metric
