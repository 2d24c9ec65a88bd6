"""The vital signs of a server: load, latency, KV cache, GPUs, and the shares of its GPUs' ceilings."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from diag.core.declarations import PACKAGE, read
from diag.core.formatting import number, quantity
from diag.core.incident import Signal
from diag.core.subjects import Floats, Instants, Subject, instance_name
from diag.diagnosis.progress import ENGINE, INSTANCE
from diag.diagnosis.proposals import Running
from diag.diagnosis.query_cache import QueryCache
from diag.knowledge.signals import all_reduce_share, bandwidth_share, batch, compute_share, nvlink_share
from diag.knowledge.signals.steps import FULL
from diag.vllm.command.shown import shown

SERVING = " unless on (instance, gpu) $gpus_not_serving"
NOW = 15.0
"""Seconds of samples for values that change with every scrape."""
START = "max by ($by) (last_over_time(process_start_time_seconds[$window]))"


class ServerMeasure(NamedTuple):
    """A number of each server, computed from so many seconds of samples; `unit` as signals have them."""

    title: str
    promql: str
    unit: str = ""
    seconds: float = NOW


MEASURES = read(PACKAGE / "diagnosis" / "vitals.toml", dict[str, ServerMeasure])


class Vitals(NamedTuple):
    """The vital signs of one server at each of `instants`, unix seconds; None for a hole.

    `launch` is its launch command without secrets, "" if unknown; `restarts` are the unix times at which it started
    again.
    """

    name: str
    launch: str
    instants: tuple[float, ...]
    histories: Mapping[str, tuple[float | None, ...]]
    restarts: tuple[float, ...] = ()

    @property
    def now(self) -> dict[str, float]:
        """The value of each measure at the last instant, without the unknown ones."""
        last = {key: history[-1] for key, history in self.histories.items() if history}
        return {key: value for key, value in last.items() if value is not None}


def vitals(queries: QueryCache, running: Mapping[str, Running]) -> tuple[Vitals, ...]:
    """Return the vital signs of every server over the observed time; ordered by name."""

    def history(values: Floats) -> tuple[float | None, ...]:
        return tuple(None if np.isnan(value) else float(value) for value in values)

    values = measured(queries, queries.source.instants)
    starts = _by_server(queries, START, NOW, queries.source.instants)
    instants = tuple(float(unix) / 1000 for unix in queries.source.instants)
    signs = []
    for name in sorted(map(instance_name, queries.subjects(INSTANCE))):
        histories = {key: history(rows[name]) for key, rows in values.items() if name in rows}
        began = [unix for unix in history(starts[name]) if unix is not None] if name in starts else []
        launch = shown(running[name].launch) if name in running else ""
        signs.append(Vitals(name, launch, instants, histories, tuple(sorted(set(began) - {*began[:1]}))))
    return tuple(signs)


def measured(queries: QueryCache, instants: Instants) -> dict[str, dict[str, Floats]]:
    """Return the values of every measure at these instants, by its key and the server's name."""
    return {key: _by_server(queries, one.promql, one.seconds, instants) for key, one in MEASURES.items()}


def _by_server(queries: QueryCache, promql: str, seconds: float, instants: Instants) -> dict[str, Floats]:
    rows = queries.ask(promql, INSTANCE, queries.holding(seconds), instants)
    return {instance_name(subject): values for subject, values in rows.items()}


class CeilingShares(NamedTuple):
    """Shares of one engine's ceilings, 0 to 1, and the tokens that it decodes in a step; None if unknown.

    The rest is headroom; a high share is no incident. `nvlink` and `pcie` are the shares of either link that the
    all-reduces of tensor parallelism need.
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
        """The ceiling that binds the engine: "bandwidth", "compute", or "" if both have headroom."""
        if self.nearest < FULL:
            return ""
        return "bandwidth" if self.nearest == self.bandwidth else "compute"

    @property
    def sentence(self) -> str:
        """The shares in words: "38 % of the GPU's memory bandwidth, 4 % of its compute in use: ..."."""
        named = {
            "the GPU's memory bandwidth": self.bandwidth,
            "its compute": self.compute,
            "NVLink": self.nvlink,
            "PCIe": self.pcie if self.nvlink is None else None,
        }
        parts = [f"{quantity(share, 'share')} of {name}" for name, share in named.items() if share is not None]
        batch = f" ({number(self.batch)} requests in a decoding step)" if self.batch else ""
        bound = "memory bandwidth" if self.bound == "bandwidth" else self.bound
        limit = f"{bound or 'the GPU'} {'limits' if bound else 'does not limit'} the speed"
        return f"{', '.join(parts)} in use{batch}: {limit}"


def ceiling_shares(queries: QueryCache) -> tuple[CeilingShares, ...]:
    """Return the shares of every engine whose GPU and work are known, over the last live window; ordered by subject."""

    def last(signal: Signal) -> dict[Subject, float]:
        rows = queries.ask(signal, ENGINE, queries.live("30s"), queries.source.instants[-1:])
        return {subject: float(row[-1]) for subject, row in rows.items() if np.isfinite(row[-1])}

    first = last(bandwidth_share), last(compute_share)
    subjects = sorted(subject for subject in {**first[0], **first[1]} if not queries.is_gone(subject))
    if not subjects:
        return ()
    columns = (*first, *map(last, (nvlink_share, all_reduce_share, batch)))
    return tuple(CeilingShares(subject, *(column.get(subject) for column in columns)) for subject in subjects)
