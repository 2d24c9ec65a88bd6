"""Conditions of an incident as they were found on one subject."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from diag.core.formatting import quantity, threshold
from diag.core.incident import Condition
from diag.diagnosis.decision_table import DecisionTable

TRUTH = {1: True, 0: False, -1: None}


class Reading(NamedTuple):
    """A condition as it was found: `value` at the instant that is reported, `history` at every instant judged.

    `culprits` names what is meant where the signal can: "rank 1".
    """

    condition: Condition
    value: float | None
    limit: float
    holds: bool | None
    history: tuple[float | None, ...]
    culprits: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The value with its unit, "-" where there is none."""
        return "-" if self.value is None else quantity(self.value, self.condition.signal.unit)

    @property
    def threshold(self) -> str:
        """What the value is compared with: "> 90 %"."""
        return threshold(self.condition.op, self.limit, self.condition.signal.unit)

    @property
    def sentence(self) -> str:
        """The signal's own sentence with the value in it, and the culprits."""
        if self.value is None:
            needs = self.condition.signal.needs
            return f"not measured, it needs at least {needs}" if needs else "not measured"
        sentence = self.condition.signal.sentence.format(value=self.shown)
        return f"{sentence} ({', '.join(self.culprits)})" if self.culprits else sentence


class Readings(Sequence[Reading]):
    """Conditions on the subject at a place of a table, at the last instant that shows what was decided.

    They are evaluated when they are looked at: most are of absent incidents, whose readings only JSON prints.
    """

    def __init__(self, conditions: tuple[Condition, ...], table: DecisionTable, place: int) -> None:
        self._conditions, self._table, self._place = conditions, table, place

    def __len__(self) -> int:
        return len(self._conditions)

    def __getitem__(self, at: Any) -> Any:
        return (
            [self._reading(condition) for condition in self._conditions[at]]
            if isinstance(at, slice)
            else self._reading(self._conditions[at])
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Readings) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(self._conditions)

    def _reading(self, condition: Condition) -> Reading:
        measured, last = self._table.evidence.of(condition), self._table.last[self._place]
        history = tuple(None if np.isnan(value) else value for value in measured.values[self._place].tolist())
        holds = TRUTH[int(measured.held[self._place, last])]
        return Reading(condition, history[last], self._table.evidence.limit(condition), holds, history)
