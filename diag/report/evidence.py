"""The evidence of an incident as rows for a terminal: name, value, threshold, history."""

import sys

from diag.core.formatting import listed
from diag.diagnosis.decision_table import Reading
from diag.diagnosis.diagnose import Diagnosis
from diag.report import sentences as words

ROWS = 5
BARS = "▁▂▃▄▅▆▇█"
BARS_WIDE = 20


def rows(diagnosis: Diagnosis, *, culprits: bool = False) -> list[tuple[str, str, str, str]]:
    """At most five rows: the symptoms, then what supports them; `culprits` adds the ranks or events that they name."""
    shown = words.evidence(diagnosis)[:ROWS]
    return [(_name(reading, culprits), reading.shown, reading.threshold, spark(reading)) for reading in shown]


def _name(reading: Reading, culprits: bool) -> str:
    name = reading.condition.signal.name
    return f"{name} ({listed(list(reading.culprits))})" if culprits and reading.culprits else name


def spark(reading: Reading) -> str:
    """The history as bars from the least to the most value, a dot where there is none.

    Of many instants each bar shows the one nearest to the incident, or an hour of trouble would vanish in a day.
    """
    step = -(-len(reading.history) // BARS_WIDE)
    worst = max if reading.condition.op.startswith(">") else min
    parts = [reading.history[at : at + step] for at in range(0, len(reading.history), step)]
    history = [worst((value for value in part if value is not None), default=None) for part in parts]
    known = [value for value in history if value is not None]
    encoding = getattr(sys.stdout, "encoding", "utf-8")  # what stands in its place in diag top has none
    if len(known) < 2 or not (encoding or "").lower().startswith("utf"):
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join("·" if value is None else BARS[int((value - low) / span * (len(BARS) - 1))] for value in history)
