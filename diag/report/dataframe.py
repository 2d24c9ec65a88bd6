"""Signals of a time range, and conditions of a diagnosis, as tables for analysis: the only importer of pandas."""

from collections.abc import Sequence
from typing import TextIO

import numpy as np

from diag.core.errors import BadUsage
from diag.core.formatting import pasted
from diag.core.incident import Incident
from diag.core.subjects import Rows
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Finding

try:
    import pandas as pd
except ModuleNotFoundError as error:  # it is half of an installation, and a diagnosis needs none of it
    raise BadUsage("tables need pandas: pip install 'diag[pandas]'") from error

SUBJECT = ("instance", "engine", "gpu")
VALUES = ("signal", "unit", "window", "value")
_BEGINS_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
COLUMNS = ("time", *SUBJECT, *VALUES)
CONDITIONS = ("incident", "state", "subject", "signal", "value", "threshold")


def write(incidents: Sequence[Incident], queries: QueryCache, out: TextIO) -> int:
    """Write every signal of the incidents at every judged instant as CSV; returns the number of values."""
    frame = signals(incidents, queries)
    frame.to_csv(out, index=False, date_format="%Y-%m-%dT%H:%M:%S.%fZ")
    return len(frame)


def signals(incidents: Sequence[Incident], queries: QueryCache) -> pd.DataFrame:
    """Return a row per instant, subject, signal and window: `COLUMNS`, the time in UTC; unmeasured values are left out.

    A user's own incidents may add labels to the subject; their columns follow its others.
    """
    parts, seen = [], set()
    for incident in incidents:
        window = queries.window(incident)
        for signal in dict.fromkeys(condition.signal for condition in incident.every_condition):
            key = (signal.name, incident.per, window)  # an incident may have a variant of a signal, of the same values
            rows = Rows() if key in seen else queries.ask(signal, incident.per, window)
            seen.add(key)
            if rows:
                times = pd.to_datetime(queries.instants(window), unit="ms", utc=True)
                subjects = [dict(subject) for subject in rows]
                labels = sorted({label for subject in subjects for label in subject})
                cells = {}
                for label in labels:  # escaped for a terminal, and with an apostrophe before what is like a formula
                    texts = [pasted(text) if text else text for text in (subject.get(label) for subject in subjects)]
                    safe = [f"'{text}" if (text or "").lstrip().startswith(_BEGINS_FORMULA) else text for text in texts]
                    cells[label] = np.array(safe, object)
                columns = {
                    "time": times.take(np.tile(np.arange(len(times)), len(rows))),
                    **{label: column.repeat(len(times)) for label, column in cells.items()},
                    "signal": signal.name,
                    "unit": signal.unit,
                    "window": window.text,
                    "value": np.concatenate(list(rows.values())),
                }
                parts.append(pd.DataFrame(columns))

    frame = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(COLUMNS))
    more = sorted({*frame.columns} - {*COLUMNS})
    known = frame.reindex(columns=["time", *SUBJECT, *more, *VALUES]).dropna(subset=["value"])
    order = ["time", *SUBJECT, *more, "signal", "window"]
    return known.sort_values(order, kind="stable", ignore_index=True)


def conditions(findings: Sequence[Finding]) -> pd.DataFrame:
    """Return a row per condition of each incident on each subject: `CONDITIONS`; NaN where nothing was measured."""
    rows = [
        (
            found.diagnosis.incident.id,
            found.diagnosis.state,
            ",".join(f"{label}={value}" for label, value in sorted(found.diagnosis.subject)),
            reading.condition.signal.name,
            np.nan if reading.value is None else reading.value,
            reading.limit,
        )
        for found in findings
        for reading in found.diagnosis.symptoms
    ]
    return pd.DataFrame(rows, columns=list(CONDITIONS))
