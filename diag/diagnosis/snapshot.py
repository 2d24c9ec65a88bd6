"""A snapshot: the report of one run, with further queries about each server over the whole span."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from diag.core.subjects import Floats, Subject, instance_name
from diag.diagnosis.proposals import Running
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Report

INSTANCE = ("instance",)


class Snapshot(NamedTuple):
    """A report, the queries that it was made from, and the facts of each server beside its samples."""

    report: Report
    queries: QueryCache
    running: Mapping[str, Running]

    @property
    def instances(self) -> tuple[str, ...]:
        """The observed servers, by name."""
        return tuple(sorted(map(instance_name, self.queries.subjects(INSTANCE))))

    def server(self, instance: str) -> "ServerSnapshot":
        return ServerSnapshot(instance, self.report, self.queries, self.running.get(instance))


class ServerSnapshot(NamedTuple):
    """One server of a snapshot; `report` and `queries` are those of the whole snapshot."""

    instance: str
    report: Report
    queries: QueryCache
    running: Running | None

    def value(self, promql: str) -> float | None:
        """Return one number for the server over the whole span; None for no value."""
        row = self.queries.ask(promql, INSTANCE, self.queries.whole).get((("instance", self.instance),))
        return None if row is None or np.isnan(row[-1]) else float(row[-1])

    def series(self, promql: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yield labels and value of each series of the server, for an expression with more labels than `instance`."""
        for subject, row in self.queries.ask(promql, INSTANCE, self.queries.whole).items():
            if self.owns(subject) and not np.isnan(row[-1]):
                yield dict(subject), float(row[-1])

    def histogram(self, name: str) -> list[tuple[float, float]]:
        """Return the upper edge of each bucket and the observations up to it, by edge, over the whole span.

        Series whose edge is no positive number are left out.
        """
        counts: dict[float, float] = {}
        for labels, count in self.series(f"sum by (instance, le) (increase({name}_bucket[$window]))"):
            with suppress(KeyError, ValueError):
                if (edge := float(labels["le"])) > 0:
                    counts[edge] = counts.get(edge, 0.0) + count
        return sorted(counts.items())

    def scraped(self, promql: str) -> Floats:
        """Return the value at every scrape, NaN if it failed; for an expression over samples of one interval."""
        times = self.queries.source.instants
        rows = self.queries.ask(promql, INSTANCE, self.queries.holding(0.0), times)
        return rows.get((("instance", self.instance),), np.full(len(times), np.nan))

    def owns(self, subject: Subject) -> bool:
        """Return True if an engine or a GPU is this server's."""
        return instance_name(subject) == self.instance

    def renamed(self, subject: Subject) -> Subject:
        """Return an engine or a GPU of the other snapshot under this server's name."""
        return tuple(sorted({**dict(subject), "instance": self.instance}.items()))
