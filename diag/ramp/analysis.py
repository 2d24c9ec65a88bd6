"""Judge a ramp: the ceiling, what binds there and why, what was ruled out, what binds next, what to change.

A binder is judged by its declared signals (`diag.ramp.binders`); the client and compute by the steps of the ramp.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from diag.core.formatting import number, quantity
from diag.core.incident import Fix
from diag.diagnosis.diagnose import Diagnosis, diagnose
from diag.diagnosis.proposals import Proposal, Running, propose
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.vitals import ceiling_shares
from diag.knowledge.signals import runs_on_cpu
from diag.ramp.binders import BINDERS, CLIENT_FIX, COMPUTE_FIX
from diag.ramp.plan import (
    Limits,
    OwnTraffic,
    RequestLengths,
    ServingCeiling,
    ceiling,
    client_is_slow,
    closed,
    holds,
    why_enough,
    why_unusable,
)
from diag.ramp.step import Step, value

FLAT = 0.15
"""If twice the tokens in a step raise tokens/s by less than this share, the step is full."""
LOSS = -0.25
"""A full step serves as much as before; below this gain, something else takes the time: neighbours, recomputes."""
APART = 1.5
"""Ratio of tokens per step from which on two steps of a ramp can be compared."""
ALIKE = 1.2
"""Ratio of tokens per step up to which two steps are equally full."""
RECOMPUTES = 0.2
"""Preemptions per finished request from which on tokens are computed twice."""
QUEUED = 0.5
"""Mean waiting requests per running request from which on the engine admits no more of them."""
State = Literal["binds", "ruled out", "cannot tell"]


class BoundBy(NamedTuple):
    """A candidate, with its evidence in sentences; `pressure` is how near to its limit it is, 1 at the limit."""

    id: str
    name: str
    state: State
    cause: str
    evidence: tuple[str, ...]
    pressure: float | None = None
    proposals: tuple[Proposal, ...] = ()


class MeasuredOn(NamedTuple):
    """Circumstances of a measurement: the launch command, "" if unknown, the GPUs by name, the unix time, or 0.

    `power_limits` are those of the GPUs in watts, as far as they are known; `load_by` names the origin of the load.
    """

    launch: str = ""
    gpus: tuple[str, ...] = ()
    at: float = 0.0
    power_limits: tuple[float, ...] = ()
    load_by: str = ""


class Ramp(NamedTuple):
    """A whole ramp; `ended` is why it did not go on, `stopped` why it was cut short ("" if it was not).

    `lengths` are those of the requests that diag sent. `saturated` is the step that was judged. `unusable` is why
    nothing was concluded from a step with more load than that, "" if there is none.
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
    unusable: str = ""
    measured_on: MeasuredOn = MeasuredOn()

    @property
    def ruled_out(self) -> tuple[BoundBy, ...]:
        """Candidates that do not bind, each with its number."""
        return tuple(candidate for candidate in self.candidates if candidate.state == "ruled out")

    @property
    def headroom(self) -> float | None:
        """Requests/s of the ceiling as a multiple of today's; None without traffic or ceiling."""
        if self.ceiling is None or self.traffic is None or self.traffic.requests_per_second <= 0:
            return None
        return self.ceiling.step.requests_per_second / self.traffic.requests_per_second


class Circumstances(NamedTuple):
    """Facts about a ramp beside its steps."""

    target: str
    model: str = ""
    version: str = ""
    running: Mapping[str, Running] = {}
    traffic: OwnTraffic | None = None
    stopped: str = ""
    lengths: RequestLengths | None = None
    notes: tuple[str, ...] = ()
    attached: bool = False
    measured_on: MeasuredOn = MeasuredOn()


# -- the ramp as a whole -----------------------------------------------------------------------------------------------


def conclude(steps: Sequence[Step], limits: Limits, circumstances: Circumstances) -> Ramp:
    """Judge what was measured, however little that is."""
    usable = [step for step in steps if step.is_usable]
    at = saturated(usable)
    judged = tuple(candidates(usable, at, limits, circumstances.running)) if at else ()
    binds = None
    rising = closed(usable)
    is_flat = len(rising) > 1 and rising[-1].requests_per_second < 1.1 * rising[-2].requests_per_second
    if at and (
        circumstances.attached  # of other load, one step shows what binds
        or (at.running and (at.waiting or 0.0) >= QUEUED * at.running)  # more load would only wait longer
        or is_flat
        or not holds(at, limits)
        or client_is_slow(at, limits)
    ):
        binding = {candidate.id: candidate for candidate in judged if candidate.state == "binds"}
        # a bottleneck in front of the engine hides all others; a full step explains a queue, unless preempted requests
        # are recomputed
        recomputed = ["kv_cache"] if recomputes(at) else []
        order = ["api_server", "client", "power_or_heat", "kv_fetch", *recomputed, "compute", *binding]
        binds = next((binding[id] for id in order if id in binding), None)
    others = [candidate for candidate in judged if binds is None or candidate.id != binds.id]
    pressed = [candidate for candidate in others if candidate.pressure is not None]
    # steps are in the order of their load, except open-loop ones, which are below the ceiling
    worthless = [step for step in closed(steps) or steps if not step.is_usable]
    more = [step for step in worthless if at is None or (step.offer.concurrency or 0) > (at.offer.concurrency or 0)]
    return Ramp(
        target=circumstances.target,
        model=circumstances.model,
        version=circumstances.version,
        steps=tuple(steps),
        limits=limits,
        ceiling=ceiling(steps, limits),
        saturated=at,
        binds=binds,
        next=max(pressed, key=lambda candidate: candidate.pressure or 0.0, default=None),
        candidates=judged,
        traffic=circumstances.traffic,
        ended=why_enough(steps, limits),
        stopped=circumstances.stopped,
        lengths=circumstances.lengths,
        notes=circumstances.notes,
        unusable=why_unusable(more[-1], limits) if more else "",
        measured_on=circumstances.measured_on,
    )


def saturated(steps: Sequence[Step]) -> Step | None:
    """Return the step with the most load that has samples."""
    measured = [step for step in steps if step.queries is not None]
    return max(closed(measured) or measured, key=lambda step: step.in_flight or 0.0, default=None)


def recomputes(step: Step) -> bool:
    return (step.preemptions or 0.0) > RECOMPUTES * max(step.requests, 1.0)


# -- each candidate ----------------------------------------------------------------------------------------------------


def candidates(steps: Sequence[Step], at: Step, limits: Limits, running: Mapping[str, Running]) -> Iterator[BoundBy]:
    """Judge all candidates at a step that has samples; `running` is what runs on each instance."""
    assert at.queries is not None
    offered = at.offer.concurrency
    if offered and at.in_flight is not None:
        # it binds if fewer requests are in flight than it was to keep there and none waits
        cores, slow = at.client.cores if at.client else None, client_is_slow(at, limits)
        used = f"; it used {number(cores)} CPU cores" if cores is not None else ""
        sentence = f"{number(at.in_flight)} of {offered} offered requests are in flight on average{used}"
        yield BoundBy(
            "client",
            "client",
            "binds" if slow else "ruled out",
            "the load generator sends requests and reads answers more slowly than the server serves them",
            (sentence, *(("no request waits in the server",) if slow else ())),
            None,
            (_advice(CLIENT_FIX),) if slow else (),
        )
    else:
        yield BoundBy("client", "client", "cannot tell", "", ("the load was not offered by diag",))
    yield _judge_compute(steps, at.queries)
    for binder in BINDERS:
        diagnoses = diagnose([binder.incident], at.queries)
        if not diagnoses:  # the server has no such part, a GPU for one
            continue
        first = min(diagnoses, key=lambda diagnosis: ("binds", "cannot tell", "ruled out").index(_state(diagnosis)))
        state, proposals = _state(first), tuple[Proposal, ...]()
        if state == "cannot tell" and all(reading.value is None for reading in first.symptoms):
            continue
        if state == "binds":
            evidence = [f"{reading.sentence} ({reading.threshold})" for reading in first.symptoms]
            proposals = propose(first, at.queries, running.get(first.server, Running()))
        else:
            decisive = [reading for reading in first.symptoms if reading.holds is not True]
            if state == "ruled out":  # the readings up to the first one that decides
                decisive = decisive[
                    : 1 + next(place for place, reading in enumerate(decisive) if reading.holds is False)
                ]
            needed = ((reading.sentence, reading.threshold.removeprefix("= ")) for reading in decisive)
            evidence = [f"{sentence}; it requires {bound}" for sentence, bound in needed]
        rows = at.queries.ask(binder.pressure, binder.per, at.queries.whole) if binder.pressure else {}
        row = rows.get(first.subject)
        yield BoundBy(
            binder.id,
            binder.name,
            state,
            binder.cause,
            tuple(evidence),
            float(row[-1]) if row is not None and math.isfinite(row[-1]) else None,
            tuple(proposal for proposal in proposals if proposal.is_computed),
        )
    if breaches := at.breaches(limits.contract):  # if no resource is at its limit, the SLO itself is the limit
        cause = "the latency rises with the load, and no single resource is at its limit yet"
        yield BoundBy("slo", "latency SLO", "binds", cause, tuple(breach.sentence for breach in breaches))


def _state(diagnosis: Diagnosis) -> State:
    """Judge by the readings alone: how long a symptom holds does not matter in a step."""
    if any(reading.holds is False for reading in diagnosis.symptoms):
        return "ruled out"
    return "binds" if all(reading.holds for reading in diagnosis.symptoms) else "cannot tell"


def _judge_compute(steps: Sequence[Step], queries: QueryCache) -> BoundBy:
    """Judge whether a larger batch still serves more: tokens/s against tokens in a step, over the steps of the ramp."""
    roof = max(ceiling_shares(queries), key=lambda shares: shares.nearest, default=None)
    if value(queries, runs_on_cpu.promql):
        name = "CPU compute"
    elif roof is None:
        name = "compute or memory bandwidth"
    else:
        name = "memory bandwidth" if roof.nearest == roof.bandwidth else "compute"
    pair = compared(steps)
    if pair is None:
        return BoundBy("compute", name, "cannot tell", "", ("no two steps differ enough in tokens per step",))
    base, top = pair
    gain = gain_per_doubling(base, top)
    less, more = (
        f"{number(step.tokens_per_second)} tokens/s with {number(step.tokens_per_step or 0.0)} in a step"
        for step in pair
    )
    change = f"{quantity(abs(gain), 'share')} {'more' if gain >= 0 else 'fewer'}"
    sentences = [f"twice the tokens in a step bring {change} tokens/s: {less}, {more}"]
    if base.itl.p50 and top.itl.p50:
        before, after = quantity(base.itl.p50, "seconds"), quantity(top.itl.p50, "seconds")
        sentences.append(f"median inter-token latency {before} -> {after}")
    if roof:
        sentences.append(f"by the data sheet, {roof.sentence}")
    if gain < LOSS:
        return BoundBy("compute", name, "cannot tell", "", (f"something else takes time: {sentences[0]}",))
    flat = gain < FLAT
    return BoundBy(
        "compute",
        name,
        "binds" if flat else "ruled out",
        "a step takes longer in proportion to what is in it: more requests share the same tokens/s",
        tuple(sentences if flat else sentences[:1]),
        min(max(1 - gain, 0.0), 1.0),
        (_advice(COMPUTE_FIX),) if flat else (),
    )


def compared(steps: Sequence[Step]) -> tuple[Step, Step] | None:
    """Return the fullest step with clearly less in it, and the best of the full steps; neither recomputes tokens.

    A disturbance, such as a neighbour on the host, only takes tokens/s away, so the best step is the undisturbed one.
    """
    useful = [step for step in closed(steps) if not recomputes(step)]
    measured = [step for step in useful if step.tokens_per_step and step.tokens_per_second > 0]
    most = max((step.tokens_per_step or 0.0 for step in measured), default=0.0)
    full = [step for step in measured if ALIKE * (step.tokens_per_step or 0.0) >= most]
    top = max(full, key=lambda step: step.tokens_per_second, default=None)
    if top is None:
        return None
    less = [step for step in measured if APART * (step.tokens_per_step or 0.0) <= (top.tokens_per_step or 0.0)]
    base = max(less, key=lambda step: step.tokens_per_step or 0.0, default=None)
    return (base, top) if base else None


def gain_per_doubling(base: Step, top: Step) -> float:
    """Return the share by which tokens/s rise when a step holds twice the tokens."""
    doublings = math.log2((top.tokens_per_step or 1.0) / (base.tokens_per_step or 1.0))
    return float((top.tokens_per_second / base.tokens_per_second) ** (1 / doublings)) - 1


def _advice(fix: Fix) -> Proposal:
    return Proposal(fix, None, None, (), False, fix.name, fix.change)
