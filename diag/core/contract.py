"""The decisions of a site: its SLOs, its own thresholds, and how it names its servers.

A declaration names a threshold that a site may set; the number is here.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, NamedTuple

from diag.core.formatting import quantity
from diag.core.metric_prefix import OWN

ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
"""The buckets of vLLM's histograms (0.8 - 0.33); since 0.32 a server may have others: `buckets`."""
STALL_BUCKETS = tuple(sorted({*ITL_BUCKETS} & {*LATENCY_BUCKETS}))


def _entry(default: float, meaning: str, unit: str, buckets: tuple[float, ...] = ()) -> Any:
    return field(default=default, metadata={"meaning": meaning, "unit": unit, "buckets": buckets})


class Site(NamedTuple):
    """The names of servers in this site's Prometheus, and the URLs of its pages.

    labels: the labels that identify a server. gpu_join: the labels that dcgm-exporter's series share with the server's.
    prefix: the prefix of vLLM's metrics. The URLs are bases without a slash at the end; a Prometheus fills in its own
    URL if none is given.
    """

    labels: tuple[str, ...] = ("instance",)
    gpu_join: tuple[str, ...] = ("namespace", "pod")
    runbook_base_url: str = "runbooks"
    grafana_url: str = "http://localhost:3000"
    prometheus_url: str = "{{ $externalURL }}"
    prefix: str = OWN


@dataclass(frozen=True)
class Contract:
    """One entry for each placeholder that an expression may use; `origin` is the file, "" for the defaults.

    `ignored_rules` are the ids of lint rules that [lint] ignores, with the place that names them. `baseline` is the
    baseline file, "" for none. `stated` are the entries that the file sets. The default SLOs are so wide that a server
    which violates them is of no use to any client.
    """

    freeze_seconds: float = _entry(1.0, "stream pause threshold", "seconds", STALL_BUCKETS)
    queue_seconds: float = _entry(1.0, "queue time threshold", "seconds")
    kv_pool_fill: float = _entry(0.9, "KV cache fill of a proposed --max-num-seqs", "share")
    ttft_seconds: float = _entry(40.0, "TTFT SLO", "seconds", TTFT_BUCKETS)
    itl_seconds: float = _entry(2.5, "ITL SLO", "seconds", ITL_BUCKETS)
    e2e_seconds: float = _entry(1920.0, "end-to-end latency SLO", "seconds", LATENCY_BUCKETS)
    objective: float = _entry(0.99, "SLO objective", "share")
    site: Site = field(default_factory=Site)
    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    ignored_rules: Mapping[str, str] = field(default_factory=dict)
    baseline: str = ""
    origin: str = ""
    stated: frozenset[str] = frozenset()

    def values(self) -> dict[str, float]:
        """Return every entry by its placeholder's name."""
        return {name: getattr(self, name) for name in names()}

    def limit(self, limit: float | str) -> float:
        """Return a condition's threshold as a number: the number itself, or the entry of that name."""
        return self.values()[limit] if isinstance(limit, str) else limit

    def lines(self) -> list[str]:
        """Return a line for each SLO and threshold: its value, and the file that set it."""
        lines = []
        for entry in _entries():
            value = quantity(getattr(self, entry.name), entry.metadata["unit"])
            origin = self.origin if entry.name in self.stated else "default"
            lines.append(f"{entry.metadata['meaning']}: {value} ({origin})")
        return lines


def _entries() -> list[Field[Any]]:
    return [entry for entry in fields(Contract) if entry.metadata]


def names() -> list[str]:
    """Return the keys that [contract] may have."""
    return [entry.name for entry in _entries()]
