"""Queries over samples in memory: those of scraped or recorded pages."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from diag import promql
from diag.core.subjects import LARGEST, Floats, Instants, Subject

_WORDS = re.compile(r"[a-zA-Z_:][\w:]*|(?<![\w:])\{", re.ASCII)
"""Every name in an expression, and the brace of a selector that has none."""
_YIELDS_WITHOUT_SAMPLES = frozenset({"{", "absent", "absent_over_time", "vector", "scalar"})


@dataclass(frozen=True, eq=False, repr=False)
class SampleSource:
    """Keeps the protocol `TelemetrySource`; `instants` are unix milliseconds, `interval` is in seconds."""

    samples: promql.Samples
    instants: Instants
    interval: float

    @property
    def first(self) -> int:
        """The time of the first scrape."""
        return int(self.instants[0])

    @cached_property
    def _evaluator(self) -> promql.Evaluator:
        return promql.Evaluator(self.samples)

    @cached_property
    def _known(self) -> dict[promql.Formula | str, bool]:
        return {}

    def ask(self, asked: promql.Formula | str, instants: Instants) -> Mapping[Subject, Floats]:
        """One row per subject, NaN where there is no sample that can be a reading."""
        if not self._may_hold(asked):
            return {}
        vector = self._evaluator.evaluate(asked, instants)
        values = np.where(vector.present & (np.abs(vector.values) < LARGEST), vector.values, np.nan)
        return {tuple(sorted(labels.items())): row for labels, row in zip(vector.labels, values, strict=True)}

    def _may_hold(self, asked: promql.Formula | str) -> bool:
        """Return False if no metric of a query has a sample, without parsing it: most servers lack most telemetry."""
        if asked not in self._known:
            text, parts = (asked, {}) if isinstance(asked, str) else (asked.text, asked.parts)
            words = (found.group() for found in _WORDS.finditer(text))
            named = any(word in self.samples.names or word in _YIELDS_WITHOUT_SAMPLES for word in words)
            instant = "[" not in text and not parts
            self._known[asked] = named or instant or any(map(self._may_hold, parts.values()))
        return self._known[asked]
