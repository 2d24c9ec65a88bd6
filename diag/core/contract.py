"""What a site decides: what its users were promised, limits of its own, and how it names things.

A limit that depends on what users were promised is a name in a declaration and a number here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

ITL_EDGES = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TTFT_EDGES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
LATENCY_EDGES = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
"""The edges of vLLM's histograms (0.8 - 0.33); from 0.32 on a server may be given others: `buckets`."""
FREEZE_EDGES = tuple(sorted({*ITL_EDGES} & {*LATENCY_EDGES}))


def _promise(seconds: float, says: str, edges: tuple[float, ...] = ()) -> Any:
    return field(default=seconds, metadata={"says": says, "edges": edges})


@dataclass(frozen=True)
class Site:
    """How this site names servers and where its pages are.

    labels: what tells one server from another in its Prometheus. gpu_join: the labels that dcgm-exporter's series share
    with the server's. The URLs are bases without a slash at the end.
    """

    labels: tuple[str, ...] = ("instance",)
    gpu_join: tuple[str, ...] = ("namespace", "pod")
    runbook_base_url: str = "runbooks"
    grafana_url: str = "http://localhost:3000"


@dataclass(frozen=True)
class Contract:
    """One entry per placeholder that an expression may use; `origin` says where it was read, "" for the defaults.

    The promises to users are so wide by default that a server which breaks them is of no use to anybody.
    """

    freeze_seconds: float = _promise(1.0, "a gap between two tokens that users call a freeze", FREEZE_EDGES)
    queue_seconds: float = _promise(1.0, "the mean wait for one's turn from which on users call it a queue")
    kv_pool_fill: float = _promise(0.9, "the share of the KV pool that a proposed --max-num-seqs may fill")
    ttft_seconds: float = _promise(40.0, "the time to the first token that users were promised", TTFT_EDGES)
    itl_seconds: float = _promise(2.5, "the gap between two tokens that users were promised", ITL_EDGES)
    e2e_seconds: float = _promise(1920.0, "the time of a whole answer that users were promised", LATENCY_EDGES)
    objective: float = _promise(0.99, "the share of answers that keep each of these three promises")
    site: Site = Site()
    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    origin: str = ""
    stated: frozenset[str] = frozenset()

    def values(self) -> dict[str, float]:
        """Every entry by its placeholder's name."""
        return {name: getattr(self, name) for name in names()}

    def limit(self, limit: float | str) -> float:
        """A condition's limit as a number: itself, or the entry of that name."""
        return self.values()[limit] if isinstance(limit, str) else limit

    def lines(self) -> list[str]:
        """One line per entry, a default printed as a default."""
        marks = {name: self.origin if name in self.stated else "default" for name in names()}
        return [f"{name} = {value:g} ({marks[name]})" for name, value in self.values().items()]


def names() -> list[str]:
    """The entries that [contract] may have."""
    return [each.name for each in fields(Contract) if each.metadata]
