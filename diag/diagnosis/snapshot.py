"""A snapshot, the report of one run with further queries over its span; and changes of incidents between two runs."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from diag.core.incident import RANK
from diag.core.subjects import Floats, Subject, instance_name
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.proposals import Running
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Report

INSTANCE = ("instance",)
CONFIRMATIONS = 2
"""Observations in a row that must agree before a change is reported."""
FEWEST_REQUESTS = 3
"""Requests below which the signals have no value either."""
SAME_LOAD = 1.33
"""Runs of one load differ by up to 1.21 in requests in flight (engine_stalled, healthy), others from 1.36 on."""
SAME_LENGTHS = 1.5
"""Runs of one load differ by up to 1.07 in mean lengths (kv_cascade, kv_cascade_base), by more if few are long."""
Key = tuple[str, Subject]


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


@dataclass(frozen=True)
class Transition:
    """A change of an incident, and its diagnosis now, or when it held last; `at` is when the change was observed.

    `gone` is set if it ended because its server is no longer there, which fixes nothing.
    """

    what: Literal["began", "worse", "milder", "ended"]
    diagnosis: Diagnosis
    at: float
    gone: bool = False


@dataclass
class Transitions:
    """Remembers which incidents hold; an incident that is unknown in an observation keeps its last state.

    The first observation is the beginning: an incident that holds then is no change.
    """

    holding: dict[Key, Diagnosis] = field(default_factory=dict)
    _streaks: dict[Key, int] = field(default_factory=dict)
    _has_begun: bool = False

    def observe(self, report: Report) -> list[Transition]:
        """Return the changes that this observation confirms, in the order of its diagnoses, the worst first."""
        alarming = (finding.diagnosis for finding in report.findings if RANK[finding.diagnosis.severity])
        found = {(diagnosis.incident.id, diagnosis.subject): diagnosis for diagnosis in alarming}
        if not self._has_begun:
            self._has_begun = True
            self.holding = {key: diagnosis for key, diagnosis in found.items() if _level(diagnosis)}
            return []
        known = dict.fromkeys([*found, *sorted(self.holding)])
        self._streaks = {key: count for key, count in self._streaks.items() if key in known}
        changes, at = [], report.observed.end
        for key in known:
            diagnosis = found.get(key)  # None: its server is gone
            before, level = self.holding.get(key), _level(diagnosis)
            if diagnosis and diagnosis.state == "unknown":
                continue
            if level == _level(before):
                self._streaks.pop(key, None)
                continue
            self._streaks[key] = self._streaks.get(key, 0) + 1
            if self._streaks[key] < CONFIRMATIONS:
                continue

            del self._streaks[key]
            if diagnosis and level:
                self.holding[key] = diagnosis
                worse = level > _level(before)
                changes.append(Transition("began" if not before else "worse" if worse else "milder", diagnosis, at))
            else:
                ended = self.holding.pop(key)
                gone = diagnosis is None or instance_name(diagnosis.subject) in report.gone
                changes.append(Transition("ended", ended, at, gone))
        return changes

    @property
    def is_calm(self) -> bool:
        """True if no incident holds, and no change awaits confirmation."""
        return not self.holding and not self._streaks


def _level(diagnosis: Diagnosis | None) -> int:
    """Return the rank of its severity, 0 if it does not hold now."""
    return RANK[diagnosis.severity] if diagnosis and diagnosis.state == "present" and diagnosis.ongoing else 0
