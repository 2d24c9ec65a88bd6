"""The limit on requests in flight that the doctor proposes for the gateway, recognized after the change.

A gateway is on no page of the server. What the page shows is that exactly as many requests as were proposed are in
flight, all the time: then fewer of them are the change itself, and no lighter load. The queue of before may still be in
the server when it is observed, so the second half of the scrapes counts.
"""

from collections.abc import Iterator

import numpy as np

from diag.core.formatting import number, quantity
from diag.knowledge.signals import RUNNING
from diag.verify.changes import GATEWAY_LIMIT, SettingChange, limits_requests
from diag.verify.load import Load, flat, requests_in_flight
from diag.verify.same_load import SAME_LOAD, direction
from diag.verify.snapshot import ServerSnapshot

ENGINES = f"count by ($by) (last_over_time({RUNNING}[$window]))"


def gateway_limit(before: ServerSnapshot, after: ServerSnapshot, load_before: Load) -> SettingChange | None:
    """The change that a proposed limit is, where the requests in flight are held at it; None where they are not."""
    in_flight = requests_in_flight(after)
    settled = in_flight[len(in_flight) // 2 :]
    if np.isnan(settled).all():
        return None
    mean, most = float(np.nanmean(settled)), float(np.nanmax(settled))
    if not flat(mean, float(np.nanvar(settled))) or direction(SAME_LOAD, load_before.in_flight, mean) != -1:
        return None
    held = any(not direction(SAME_LOAD, limit, most) for limit in _proposed(before))
    return SettingChange(GATEWAY_LIMIT, None, number(most)) if held else None


def _proposed(before: ServerSnapshot) -> Iterator[float]:
    """The limits that the doctor proposes for the server before the change, for all of its engines together."""
    engines = before.value(ENGINES) or 1.0
    for finding in before.report.present:
        if before.owns(finding.diagnosis.subject):
            proposed = (proposal.after for proposal in finding.proposals if limits_requests(proposal.fix))
            yield from (engines * limit for limit in proposed if isinstance(limit, float))


def notes(limit: SettingChange, after: ServerSnapshot, loads: tuple[Load, Load]) -> Iterator[str]:
    """What is taken for granted, and what such a limit moves to where no page of the server shows it."""
    yield (
        f"requests in flight stay at {limit.after}, as proposed for the gateway: that is taken as the change. What"
        " waits there is on no page of the server, nor in its TTFT: see the gateway's own queue"
    )
    in_flight, most = requests_in_flight(after), float(limit.after or 0)
    if drained := after.queries.source.interval * int((in_flight > most).sum()):
        yield f"the queue of before was in the server for the first {quantity(drained, 'seconds')} of AFTER"
    yield from outside(most, *loads)


def outside(limit: float, before: Load, after: Load) -> Iterator[str]:
    """How much waits at the gateway, as far as the load before the change tells."""
    if before.in_flight is None or not before.arrivals or not after.arrivals:
        return
    if before.closed_loop:
        waiting = before.in_flight - limit
        yield (
            f"the {before.in_flight:.0f} requests of before were always in flight (closed-loop clients): {waiting:.0f}"
            f" of them wait at the gateway now, {quantity(waiting / after.arrivals, 'seconds')} each by Little's law"
        )
    elif direction(SAME_LOAD, before.arrivals, after.arrivals) == -1:
        yield (
            f"{number(before.arrivals)} requests / s arrived before, {number(after.arrivals)} / s are served at the"
            " limit: the difference waits at the gateway or is refused there"
        )
