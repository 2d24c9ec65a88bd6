"""How near each engine is to the ceilings of its GPUs: no incident, but the headroom that every reader asks for."""

from typing import NamedTuple

import numpy as np

from diag.core.formatting import number, quantity
from diag.core.incident import Signal
from diag.core.subjects import Subject
from diag.diagnosis.query_cache import QueryCache
from diag.knowledge.signals.ceilings import FULL, all_reduce_share, bandwidth_share, batch, compute_share, nvlink_share

ENGINE = ("instance", "engine")


class CeilingShares(NamedTuple):
    """Shares of one engine's ceilings, 0 to 1, and the tokens that it decodes in a step; None where it is not known.

    `nvlink` and `pcie` are what the all-reduces of tensor parallelism need of either link.
    """

    subject: Subject
    bandwidth: float | None
    compute: float | None
    nvlink: float | None
    pcie: float | None
    batch: float | None

    @property
    def nearest(self) -> float:
        """The larger share of both ceilings."""
        return max(self.bandwidth or 0.0, self.compute or 0.0)

    @property
    def bound(self) -> str:
        """What binds the engine: "bandwidth", "compute", "" while both have room."""
        if self.nearest < FULL:
            return ""
        return "bandwidth" if self.nearest == self.bandwidth else "compute"

    @property
    def sentence(self) -> str:
        """Such as "38 % of the bandwidth ceiling at batch 12, 4 % of compute"."""
        batch = f" at batch {number(self.batch)}" if self.batch else ""
        named = {"the bandwidth ceiling": self.bandwidth, "compute": self.compute}
        parts = [f"{quantity(share, 'share')} of {name}" for name, share in named.items() if share is not None]
        links = {"NVLink": self.nvlink, "PCIe": self.pcie if self.nvlink is None else None}
        sent = [f"all-reduces {quantity(one, 'share')} of {name}" for name, one in links.items() if one is not None]
        bound = f": {self.bound}-bound" if self.bound else ""
        return ", ".join([parts[0] + batch, *parts[1:], *sent]) + bound


def ceiling_shares(queries: QueryCache) -> tuple[CeilingShares, ...]:
    """Of every engine whose GPU and work are known, over the last live window; ordered by subject."""
    first = _last(bandwidth_share, queries), _last(compute_share, queries)
    if not any(first):
        return ()
    rest = (_last(signal, queries) for signal in (nvlink_share, all_reduce_share, batch))
    columns = (*first, *rest)
    subjects = sorted(subject for subject in {**first[0], **first[1]} if not queries.is_gone(subject))
    return tuple(CeilingShares(subject, *(column.get(subject) for column in columns)) for subject in subjects)


def _last(signal: Signal, queries: QueryCache) -> dict[Subject, float]:
    rows = queries.ask(signal, ENGINE, queries.live("30s"), queries.source.instants[-1:])
    return {subject: float(row[-1]) for subject, row in rows.items() if np.isfinite(row[-1])}
