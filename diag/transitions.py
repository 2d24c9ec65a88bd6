"""What changed from one look to the next, told once it has lasted: a moment's calm or a moment's trouble is no news."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from diag.asking import Subject
from diag.diagnose import RANK, Diagnosis
from diag.judgement import Judgement

LOOKS = 2
"""Looks in a row that must agree before a change is told."""
Key = tuple[str, Subject]


@dataclass(frozen=True)
class Change:
    """An incident that began or ended; `at` is the unix second of the look that confirmed it."""

    diagnosis: Diagnosis
    began: bool
    at: float


@dataclass
class Transitions:
    """Remembers what holds; an incident that cannot be judged at a look stays what it was."""

    holding: dict[Key, Diagnosis] = field(default_factory=dict)
    _streaks: dict[Key, int] = field(default_factory=dict)

    def look(self, judgement: Judgement) -> list[Change]:
        """The changes that this look confirms, the worst first."""
        return list(self._changes(judgement))

    def _changes(self, judgement: Judgement) -> Iterator[Change]:
        seen: set[Key] = set()
        for one in (each.diagnosis for each in judgement.findings if RANK[each.diagnosis.severity]):
            key = (one.incident.id, one.subject)
            seen.add(key)
            holds = one.state == "present" and one.ongoing
            if self._confirmed(key, holds, known=one.state != "unknown"):
                yield self._turn(key, one, holds, judgement.observed.end)
        for key in self.holding.keys() - seen:  # its server is gone
            if self._confirmed(key, holds=False, known=True):
                yield self._turn(key, self.holding[key], False, judgement.observed.end)

    def _confirmed(self, key: Key, holds: bool, known: bool) -> bool:
        """Whether it has been other than remembered for long enough."""
        if not known:
            return False
        differs = holds != (key in self.holding)
        self._streaks[key] = self._streaks.get(key, 0) + 1 if differs else 0
        return self._streaks[key] >= LOOKS

    def _turn(self, key: Key, one: Diagnosis, holds: bool, at: float) -> Change:
        self._streaks[key] = 0
        if holds:
            self.holding[key] = one
        else:
            self.holding.pop(key)
        return Change(one, holds, at)

    @property
    def is_calm(self) -> bool:
        """Whether nothing holds, and nothing is about to."""
        return not self.holding and not any(self._streaks.values())
