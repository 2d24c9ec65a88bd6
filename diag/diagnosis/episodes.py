"""Episodes: the times in which an incident held, and which of them count as the incident and which are only notes.

An episode counts if it lasted as long as its alert waits (`Incident.hold`), or if so little was observed that none
could last so long: an episode that goes on at the end counts if nothing in the last `hold` refutes it. An outage counts
for 15 minutes after its end in any case. A server that came back as another process, without a sign of a crash, was
restarted: that counts only if it repeats.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from diag.core.incident import Incident, seconds
from diag.core.subjects import Instants, Subject
from diag.diagnosis.query_cache import QueryCache, Window

RECENT = 900.0
"""Seconds for which an ended outage stays told: its cause may end the server again."""
Episode = tuple[float | None, float]
"""Unix seconds of the first and the last instant at which an incident held; None: it held from the beginning."""
Run = NDArray[np.int64]
"""The places of the instants of one episode at which the incident held."""
START_TIME = "$latest_start_time"
TOKENS = "$output_tokens_since_start"


def runs(states: NDArray[np.int8], times: Instants, apart: float) -> list[Run]:
    """Return the episodes of one subject: health for more than `apart` seconds separates two of them."""
    at = np.flatnonzero(states == 1)
    health = np.diff(np.cumsum(states == 0)[at]) > 0
    return np.split(at, np.flatnonzero(health & (np.diff(times[at]) > apart * 1000)) + 1) if len(at) else []


def counting(
    states: NDArray[np.int8],
    found: Sequence[Run],
    subject: Subject,
    incident: Incident,
    window: Window,
    times: Instants,
    queries: QueryCache,
) -> list[Run]:
    """Return the episodes of a subject that count as the incident; the others are notes."""
    hold, last = seconds(incident.hold), len(times) - 1
    # a day of a fleet is judged at few instants: what holds at one of them held for about as long as they are apart
    apart = max(queries.source.interval, float(np.median(np.diff(times))) / 1000 if last else 0.0)
    needed = hold - apart / 2
    could_hold = bool((states[times >= times[-1] - needed * 1000] != 0).all())
    could_last = queries.span >= max(seconds(incident.window), window.seconds) + hold

    def lasted(run: Run) -> bool:
        unbroken = np.split(run, np.flatnonzero(np.diff(run) > 1) + 1)
        longest = max(float(times[part[-1]] - times[part[0]]) / 1000 for part in unbroken)
        return longest >= needed or (could_hold and run[-1] == last)

    def counts(at: int) -> bool:
        run = found[at]
        is_over = run[-1] < last
        if not incident.outage:
            return lasted(run) or not could_last
        if incident.crash is not None and is_over:
            sign = queries.ask(incident.crash.signal, incident.per, window).get(subject)
            crashed = sign is not None and (sign[run[0] :] >= queries.contract.limit(incident.crash.limit)).any()
            repeats = any(abs(float(times[run[0]] - times[other[0]])) <= RECENT * 1000 for other in found[:at])
            repeats |= any(abs(float(times[run[0]] - times[other[0]])) <= RECENT * 1000 for other in found[at + 1 :])
            return bool(crashed or repeats or (lasted(run) and not _restarted(run, subject, incident, window, queries)))
        return not is_over or float(times[last] - times[run[-1]]) <= RECENT * 1000 or lasted(run)

    return [run for at, run in enumerate(found) if counts(at)]


def _restarted(run: Run, subject: Subject, incident: Incident, window: Window, queries: QueryCache) -> bool:
    """Return True if another process answers after the episode, or if no page before it can be compared."""
    compared = False
    for promql, sign in ((START_TIME, 1), (TOKENS, -1)):
        row = queries.ask(promql, incident.per, window).get(subject)
        if row is not None:
            before, after = (sign * part[np.isfinite(part)] for part in (row[: run[0] + 1], row[run[-1] :]))
            if len(before) and len(after):
                compared = True
                if after.max() > before[-1] + (1.0 if sign > 0 else 0.0):
                    return True
    return not compared
