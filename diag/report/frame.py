"""A span's signals as a table for a person to analyse: the only importer of pandas."""

from collections.abc import Iterator, Sequence
from typing import TextIO

import pandas as pd

from diag.asking import Asked, Rows, Window
from diag.incident import Incident, Signal

COLUMNS = ("time", "instance", "engine", "gpu", "signal", "unit", "window", "value")


def write(incidents: Sequence[Incident], asked: Asked, out: TextIO) -> int:
    """Write every signal of the incidents at every judged instant as CSV; returns the number of values."""
    frame = signals(incidents, asked)
    frame.to_csv(out, index=False, date_format="%Y-%m-%dT%H:%M:%S.%fZ")
    return len(frame)


def signals(incidents: Sequence[Incident], asked: Asked) -> pd.DataFrame:
    """One row per instant, subject and signal: `COLUMNS`, the time in UTC; without those that were not measured."""
    parts = [_part(*each) for each in _asked(incidents, asked)]
    frame = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(COLUMNS))
    known = frame.reindex(columns=list(COLUMNS)).dropna(subset=["value"])
    return known.sort_values(["time", "instance", "engine", "gpu", "signal"], kind="stable", ignore_index=True)


def _asked(incidents: Sequence[Incident], asked: Asked) -> Iterator[tuple[Signal, Window, "pd.DatetimeIndex", Rows]]:
    """Each signal once for each window that it is judged over."""
    seen = set()
    for incident in incidents:
        window = asked.window(incident)
        for signal in dict.fromkeys(each.signal for each in incident.every_condition):
            if (signal.promql, incident.per, window) not in seen:
                seen.add((signal.promql, incident.per, window))
                times = pd.to_datetime(asked.instants(window), unit="ms", utc=True)
                yield signal, window, times, asked.ask(signal.promql, incident.per, window)


def _part(signal: Signal, window: Window, times: "pd.DatetimeIndex", rows: Rows) -> pd.DataFrame:
    told = {"signal": signal.name, "unit": signal.unit, "window": window.text}
    frames = [pd.DataFrame({"time": times, "value": row, **dict(subject), **told}) for subject, row in rows.items()]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(COLUMNS))
