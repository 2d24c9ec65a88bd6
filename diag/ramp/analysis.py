"""What a ramp shows: the ceiling, what binds there and why, what was ruled out, what binds next, what to change."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from diag.diagnosis.proposals import Running
from diag.ramp.candidates import BoundBy, candidates, recomputes
from diag.ramp.plan import Limits, ServingCeiling, ceiling, client_is_slow, closed, holds, why_enough
from diag.ramp.step import Step
from diag.ramp.traffic import OwnTraffic, RequestLengths

QUEUED = 0.5
"""Requests that wait on average, for each that runs, from which on the engine takes no more of them."""


class Ramp(NamedTuple):
    """A whole ramp; `ended` is why it did not go on, `stopped` why it was cut short, "" where it was not.

    `lengths` are those of the requests that diag sent. `saturated` is the step that was judged.
    """

    target: str
    model: str
    version: str
    steps: tuple[Step, ...]
    limits: Limits
    ceiling: ServingCeiling | None
    saturated: Step | None
    binds: BoundBy | None
    next: BoundBy | None
    candidates: tuple[BoundBy, ...]
    traffic: OwnTraffic | None
    ended: str
    stopped: str
    lengths: RequestLengths | None
    notes: tuple[str, ...]

    @property
    def ruled_out(self) -> tuple[BoundBy, ...]:
        """What does not bind, each with its number."""
        return tuple(one for one in self.candidates if one.state == "ruled out")

    @property
    def headroom(self) -> float | None:
        """How many times today's requests per second the ceiling is; None without traffic or ceiling."""
        if self.ceiling is None or self.traffic is None or self.traffic.requests_per_second <= 0:
            return None
        return self.ceiling.step.requests_per_second / self.traffic.requests_per_second


class Circumstances(NamedTuple):
    """What is known of a ramp beside its steps."""

    target: str
    model: str = ""
    version: str = ""
    running: Mapping[str, Running] = {}
    traffic: OwnTraffic | None = None
    stopped: str = ""
    lengths: RequestLengths | None = None
    notes: tuple[str, ...] = ()
    attached: bool = False


def conclude(steps: Sequence[Step], limits: Limits, known: Circumstances) -> Ramp:
    """Judge what was measured, however little that is."""
    at = saturated(steps)
    judged = tuple(candidates(steps, at, limits, known.running)) if at else ()
    binds = _first(judged, at) if _has_reached(steps, at, limits, known.attached) else None
    others = [one for one in judged if binds is None or one.id != binds.id]
    pressed = [one for one in others if one.pressure is not None]
    return Ramp(
        target=known.target,
        model=known.model,
        version=known.version,
        steps=tuple(steps),
        limits=limits,
        ceiling=ceiling(steps, limits),
        saturated=at,
        binds=binds,
        next=max(pressed, key=lambda one: one.pressure or 0.0, default=None),
        candidates=judged,
        traffic=known.traffic,
        ended=why_enough(steps, limits),
        stopped=known.stopped,
        lengths=known.lengths,
        notes=known.notes,
    )


def saturated(steps: Sequence[Step]) -> Step | None:
    """The step with the most load of which there are samples."""
    measured = [step for step in steps if step.queries is not None]
    return max(closed(measured) or measured, key=lambda step: step.in_flight or 0.0, default=None)


def _has_reached(steps: Sequence[Step], at: Step | None, limits: Limits, attached: bool) -> bool:
    """Whether the load went as far as to a limit: one more step would have served no more, or served it too late."""
    if at is None:
        return False
    if attached:  # what binds shows in one step as well
        return True
    if at.running and (at.waiting or 0.0) >= QUEUED * at.running:  # what is offered beyond that only waits longer
        return True
    rising = closed(steps)
    flat = len(rising) > 1 and rising[-1].requests_per_second < 1.1 * rising[-2].requests_per_second
    return flat or not holds(at, limits) or client_is_slow(at, limits)


def _first(judged: Sequence[BoundBy], at: Step | None) -> BoundBy | None:
    """What stands in front of the engine hides all else; a full step explains a queue, unless it computes twice."""
    found = {one.id: one for one in judged if one.state == "binds"}
    twice = ["kv_cache"] if at and recomputes(at) else []
    before = ["api_server", "client", "power_or_heat", "kv_fetch", *twice, "compute"]
    return next((found[name] for name in before if name in found), next(iter(found.values()), None))
