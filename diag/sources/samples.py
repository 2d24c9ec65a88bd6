"""Answers from samples in memory: what `diagnose` asks, evaluated over scraped or recorded pages."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from diag import promql
from diag.core.subjects import Floats, Instants, Subject


@dataclass(frozen=True)
class SampleSource:
    """Keeps the protocol `TelemetrySource`; `instants` are unix milliseconds, `interval` is in seconds."""

    samples: promql.Samples
    instants: Instants
    interval: float

    def ask(self, promql_text: str, instants: Instants) -> Mapping[Subject, Floats]:
        """One row per subject, NaN where there is no finite sample."""
        vector = promql.evaluate(promql_text, self.samples, instants)
        values = np.where(vector.present & np.isfinite(vector.values), vector.values, np.nan)
        return {tuple(sorted(labels.items())): row for labels, row in zip(vector.labels, values, strict=True)}
