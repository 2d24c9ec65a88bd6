"""Queries over samples in memory: those of scraped or recorded pages."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from diag import promql
from diag.core.subjects import Floats, Instants, Subject


@dataclass(frozen=True)
class SampleSource:
    """Keeps the protocol `TelemetrySource`; `instants` are unix milliseconds, `interval` is in seconds."""

    samples: promql.Samples
    instants: Instants
    interval: float

    @cached_property
    def _evaluator(self) -> promql.Evaluator:
        return promql.Evaluator(self.samples)

    def ask(self, promql_text: str, instants: Instants) -> Mapping[Subject, Floats]:
        """One row per subject, NaN where there is no finite sample."""
        vector = self._evaluator.evaluate(promql_text, instants)
        values = np.where(vector.present & np.isfinite(vector.values), vector.values, np.nan)
        return {tuple(sorted(labels.items())): row for labels, row in zip(vector.labels, values, strict=True)}
