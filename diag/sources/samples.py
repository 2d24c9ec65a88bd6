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

    @cached_property
    def _evaluator(self) -> promql.Evaluator:
        return promql.Evaluator(self.samples)

    def ask(self, promql_text: str, instants: Instants) -> Mapping[Subject, Floats]:
        """One row per subject, NaN where there is no sample that can be a reading."""
        if self._holds_nothing_of(promql_text):
            return {}
        vector = self._evaluator.evaluate(promql_text, instants)
        values = np.where(vector.present & (np.abs(vector.values) < LARGEST), vector.values, np.nan)
        return {tuple(sorted(labels.items())): row for labels, row in zip(vector.labels, values, strict=True)}

    def _holds_nothing_of(self, promql_text: str) -> bool:
        """Whether no metric of a query has a sample, told without parsing it: most servers lack most telemetry."""
        if "[" not in promql_text:
            return False
        words = (found.group() for found in _WORDS.finditer(promql_text))
        return not any(word in self.samples.names or word in _YIELDS_WITHOUT_SAMPLES for word in words)
