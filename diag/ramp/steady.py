"""The steady part of a step: the scrapes in which all offered requests are in flight.

A load generator starts with one request alone and then sends all at once, and at its end the last requests finish one
after the other: neither shows the server at the offered load. The server's own counters tell both; the generator's
clock does not.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diag.core.subjects import Floats

FEWEST_SCRAPES = 4
"""Scrapes in the steady part below which a step is too short: nothing is concluded from fewer."""
SETTLES = 0.15, 5.0
"""The share of the steady part at its begin that is left out, for requests that were sent at once are prefilled at
once; and the most seconds of that."""
ALL = 0.9
"""Share of the offered requests that counts as all of them: a request that has just ended and the one that takes its
place are both in no gauge."""
PLATEAU = 0.5
"""Share of the usual rate of tokens from which on a server serves at its plateau; a neighbour may halve it."""


class Counted(NamedTuple):
    """The server's counters at each scrape of a step, NaN if the scrape failed; `times` in seconds.

    `tokens` are those of prompts and answers.
    """

    times: Floats
    in_flight: Floats
    finished: Floats
    tokens: Floats


def steady_part(counted: Counted, concurrency: int | None, *, generated: bool) -> slice:
    """Return the steady scrapes; an empty slice if none shows any load.

    `concurrency` are the requests that a closed loop keeps in flight. A load that was not generated for this step, of
    other clients, has no start and no end: all scrapes with at least half of its usual requests in flight are steady.
    """
    in_flight, times = np.nan_to_num(counted.in_flight), counted.times
    growth = np.nan_to_num(np.diff(counted.tokens, prepend=np.nan) / np.diff(times, prepend=np.nan))
    active = (in_flight > 0) | (growth > 0)  # short requests may be in flight at no scrape
    if not active.any():
        return slice(0, 0)
    if not generated:
        return _settled(active & (in_flight >= np.median(in_flight[active]) / 2), times)

    arriving = active & _before_last_arrival(counted)
    if concurrency is None:
        return _settled(arriving, times)
    full = in_flight >= ALL * concurrency
    if not arriving.any() or full[arriving].mean() >= 0.5:
        return _settled(full, times)
    # while requests still arrive, fewer are in flight than were offered: the client is slow, or requests are so short
    # that the gauges miss many
    usual = np.quantile(growth[arriving & (growth > 0)], 0.75) if (arriving & (growth > 0)).any() else 0.0
    return _settled(arriving & (growth >= PLATEAU * usual), times)


def _before_last_arrival(counted: Counted) -> NDArray[np.bool_]:
    """Return True for the scrapes after which another request arrived; all are True if no counter tells."""
    arrived = counted.finished + counted.in_flight
    known = np.flatnonzero(np.isfinite(arrived))
    if not len(known):
        return np.ones(len(arrived), bool)
    last = np.flatnonzero(arrived < arrived[known[-1]] - 0.5)
    return np.arange(len(arrived)) <= (last[-1] if len(last) else -1)


def _settled(loaded: NDArray[np.bool_], times: Floats) -> slice:
    """Return the scrapes from the first loaded one, once it has settled, to the last one."""
    at = np.flatnonzero(loaded)
    if not len(at):
        return slice(0, 0)
    first, last = int(at[0]), int(at[-1])
    begin = times[first] + min(SETTLES[0] * (times[last] - times[first]), SETTLES[1])
    return slice(int(np.searchsorted(times, begin)), last + 1)
