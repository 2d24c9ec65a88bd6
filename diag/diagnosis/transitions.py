"""What changed from one look to the next, told once it has lasted: a moment's calm or a moment's trouble is no news."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from diag.core.subjects import Subject
from diag.diagnosis.diagnose import RANK, Diagnosis
from diag.diagnosis.report import Report

LOOKS = 2
"""Looks in a row that must agree before a change is told."""
Key = tuple[str, Subject]


@dataclass(frozen=True)
class Transition:
    """What happened to an incident, and how it is, or was when it held last; `at` is the unix second of the look.

    `gone` is set where it ended because its server is no longer there, which cures nothing.
    """

    what: Literal["began", "worse", "milder", "ended"]
    diagnosis: Diagnosis
    at: float
    gone: bool = False


@dataclass
class Transitions:
    """Remembers what holds; an incident that cannot be judged at a look stays what it was.

    The first look is the beginning: what holds then is no change.
    """

    holding: dict[Key, Diagnosis] = field(default_factory=dict)
    _streaks: dict[Key, int] = field(default_factory=dict)
    _has_looked: bool = False

    def look(self, report: Report) -> list[Transition]:
        """The changes that this look confirms, in the order in which it tells of incidents, the worst first."""
        found = {(each.incident.id, each.subject): each for each in _told(report)}
        if not self._has_looked:
            self._has_looked = True
            self.holding = {key: one for key, one in found.items() if _level(one)}
            return []
        known = dict.fromkeys([*found, *sorted(self.holding)])
        self._streaks = {key: count for key, count in self._streaks.items() if key in known}
        turned = [key for key in known if self._is_confirmed(key, found.get(key))]
        return [self._turn(key, found.get(key), report) for key in turned]

    def _is_confirmed(self, key: Key, one: Diagnosis | None) -> bool:
        """Whether it has been other than remembered for long enough; None is one whose server is gone."""
        if one and one.state == "unknown":
            return False
        if _level(one) == _level(self.holding.get(key)):
            self._streaks.pop(key, None)
            return False
        self._streaks[key] = self._streaks.get(key, 0) + 1
        return self._streaks[key] >= LOOKS

    def _turn(self, key: Key, one: Diagnosis | None, report: Report) -> Transition:
        self._streaks.pop(key)
        before, at = self.holding.pop(key, None), report.observed.end
        if one and _level(one):
            self.holding[key] = one
            worse = _level(one) > _level(before)
            return Transition("began" if not before else "worse" if worse else "milder", one, at)
        assert before
        gone = one is None or dict(one.subject).get("instance") in report.gone
        return Transition("ended", before, at, gone)

    @property
    def is_calm(self) -> bool:
        """Whether nothing holds, and nothing is about to."""
        return not self.holding and not self._streaks


def _told(report: Report) -> Iterator[Diagnosis]:
    return (each.diagnosis for each in report.findings if RANK[each.diagnosis.severity])


def _level(one: Diagnosis | None) -> int:
    """How bad it is, 0 where it does not hold now."""
    return RANK[one.severity] if one and one.state == "present" and one.ongoing else 0
