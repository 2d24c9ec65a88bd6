"""One side of a comparison: what was judged before, or after, and what else can be asked of it over its whole span."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from diag.core.subjects import Floats, Subject
from diag.diagnosis.proposals import Running
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Report

INSTANCE = ("instance",)


@dataclass(frozen=True)
class Snapshot:
    """A report, the source that it was made from, and what is known of each server beside its samples."""

    report: Report
    asked: QueryCache
    running: Mapping[str, Running]

    @property
    def instances(self) -> tuple[str, ...]:
        """The servers that were looked at, by name."""
        return tuple(sorted(dict(each)["instance"] for each in self.asked.subjects(INSTANCE)))

    def value(self, promql: str, instance: str) -> float | None:
        """One number for a server over the whole span; None where there is none."""
        row = self.asked.ask(promql, INSTANCE, self.asked.whole).get((("instance", instance),))
        return None if row is None or np.isnan(row[-1]) else float(row[-1])

    def series(self, promql: str, instance: str) -> Iterator[tuple[dict[str, str], float]]:
        """The same for an expression with more labels than `instance`: labels and value of each that has one."""
        for subject, row in self.asked.ask(promql, INSTANCE, self.asked.whole).items():
            labels = dict(subject)
            if labels.get("instance") == instance and not np.isnan(row[-1]):
                yield labels, float(row[-1])

    def scraped(self, promql: str, instance: str) -> Floats:
        """The value at every scrape, NaN where it failed; for an expression over samples of one interval."""
        times = self.asked.source.instants
        rows = self.asked.ask(promql, INSTANCE, self.asked.holding(0.0), times)
        return rows.get((("instance", instance),), np.full(len(times), np.nan))


def renamed(subject: Subject, instance: str) -> Subject:
    """The same engine or GPU of a server that has another name."""
    return tuple(sorted({**dict(subject), "instance": instance}.items()))
