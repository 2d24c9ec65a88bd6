"""The limit on requests in flight that the doctor proposes for the gateway, recognized after the change.

A gateway is on no page of the server. What the page shows is that exactly as many requests as were proposed are in
flight, all the time: then fewer of them are the change itself, and no lighter load.
"""

from collections.abc import Iterator

from diag.core.formatting import number, quantity
from diag.knowledge.signals import RUNNING
from diag.verify.changes import GATEWAY_LIMIT, SettingChange, limits_requests
from diag.verify.load import Load
from diag.verify.same_load import SAME_LOAD, direction
from diag.verify.snapshot import ServerSnapshot

ENGINES = f"count by ($by) (last_over_time({RUNNING}[$window]))"


def gateway_limit(before: ServerSnapshot, loads: tuple[Load, Load]) -> SettingChange | None:
    """The change that a proposed limit is, where the requests in flight are held at it; None where they are not."""
    old, new = loads
    if not new.flat or direction(SAME_LOAD, old.in_flight, new.in_flight) != -1:
        return None
    held = any(not direction(SAME_LOAD, limit, new.most) for limit in _proposed(before))
    return SettingChange(GATEWAY_LIMIT, None, number(new.most)) if held else None


def _proposed(before: ServerSnapshot) -> Iterator[float]:
    """The limits that the doctor proposes for the server before the change, for all of its engines together."""
    engines = before.value(ENGINES) or 1.0
    for finding in before.report.present:
        if before.owns(finding.diagnosis.subject):
            proposed = (proposal.after for proposal in finding.proposals if limits_requests(proposal.fix))
            yield from (engines * limit for limit in proposed if isinstance(limit, float))


def notes(limit: SettingChange, loads: tuple[Load, Load]) -> Iterator[str]:
    """What is taken for granted, and what such a limit moves to where no page of the server shows it."""
    old, new = loads
    yield (
        f"requests in flight stay at {limit.after}, as proposed for the gateway: that is taken as the change. What"
        " waits there is on no page of the server, nor in its TTFT: see the gateway's own queue"
    )
    if old.in_flight is None or new.in_flight is None or not old.arrivals or not new.arrivals:
        return
    if old.closed_loop:
        outside = old.in_flight - new.in_flight
        yield (
            f"the {old.in_flight:.0f} requests of before were always in flight (closed-loop clients): {outside:.0f} of"
            f" them wait at the gateway now, {quantity(outside / new.arrivals, 'seconds')} each by Little's law"
        )
    elif direction(SAME_LOAD, old.arrivals, new.arrivals) == -1:
        yield (
            f"{number(old.arrivals)} requests / s arrived before, {number(new.arrivals)} / s are served at the limit:"
            " the difference waits at the gateway or is refused there"
        )
