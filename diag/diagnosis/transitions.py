"""Changes of incidents between observations, reported once two observations in a row agree: one alone may be a blip."""

from dataclasses import dataclass, field
from typing import Literal

from diag.core.incident import RANK
from diag.core.subjects import Subject, instance_name
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.report import Report

CONFIRMATIONS = 2
"""Observations in a row that must agree before a change is reported."""
Key = tuple[str, Subject]


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
