"""The comparison of two snapshots as data: the outcome of each incident, of each server, and of the change."""

from dataclasses import dataclass
from typing import Literal

from diag.core.incident import RANK
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Report
from diag.verify.changes import AppliedFix, SettingChange
from diag.verify.load import Load
from diag.verify.signal_deltas import SignalDelta
from diag.verify.user_metrics import UserMetric

Verdict = Literal["fixed", "better", "no effect", "worse", "not comparable"]
WORST: tuple[Verdict, ...] = ("worse", "not comparable", "no effect", "better", "fixed")


@dataclass(frozen=True)
class IncidentOutcome:
    """What became of one incident; `because` is the sentence that gives the reason for the verdict."""

    before: Diagnosis
    after: Diagnosis | None
    verdict: Verdict
    because: str
    signal_deltas: tuple[SignalDelta, ...]
    applied_fixes: tuple[AppliedFix, ...]


@dataclass(frozen=True)
class ServerComparison:
    """One server before and after, by its name on either side; `new_incidents` are present only after.

    down: why it does not serve after the change, "" where it does. differences: what else makes the two snapshots
    incomparable. unknown_before: why its state before is unknown. notes: what a reader of the numbers has to know.
    """

    before: str
    after: str
    loads: tuple[Load, Load]
    down: str
    differences: tuple[str, ...]
    changes: tuple[SettingChange, ...]
    user_metrics: tuple[UserMetric, ...]
    outcomes: tuple[IncidentOutcome, ...]
    new_incidents: tuple[Diagnosis, ...]
    unknown_before: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why before and after cannot be compared."""
        return (*((self.down,) if self.down else ()), *self.differences)

    @property
    def first(self) -> IncidentOutcome | None:
        """The worst outcome among the most severe incidents, without those that another incident explains."""
        causes = [outcome for outcome in self.outcomes if outcome.before.explained_by is None] or self.outcomes
        highest = max((RANK[outcome.before.severity] for outcome in causes), default=0)
        most_severe = (outcome for outcome in causes if RANK[outcome.before.severity] == highest)
        return min(most_severe, key=lambda outcome: WORST.index(outcome.verdict), default=None)

    @property
    def verdict(self) -> Verdict:
        """That of the first outcome; worse where there are new incidents only."""
        if self.first:
            return self.first.verdict
        return "worse" if self.broken or (self.new_incidents and not self.reasons) else "not comparable"

    @property
    def broken(self) -> Diagnosis | None:
        """The new incident that stopped the server: a different load before does not excuse that."""
        critical = (diagnosis for diagnosis in self.new_incidents if diagnosis.severity == "critical")
        return next(critical, None) if self.down else None

    @property
    def is_bystander(self) -> bool:
        """Whether it had no incident, before or after."""
        return not (self.outcomes or self.new_incidents or self.down or self.unknown_before)

    @property
    def trade_offs(self) -> tuple[UserMetric, ...]:
        """What got worse for users; nothing where it cannot be compared."""
        return () if self.reasons else tuple(metric for metric in self.user_metrics if metric.change == "worse")


@dataclass(frozen=True)
class Verification:
    """The whole comparison, the worst server first; `unmatched` says which servers only one side has."""

    before: Report
    after: Report
    verdict: Verdict
    servers: tuple[ServerComparison, ...]
    unmatched: tuple[str, ...]
