"""What a ramp shows: the ceiling, what binds there and why, what was ruled out, what binds next, what to change."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from diag.core.formatting import number, quantity
from diag.core.incident import Fix
from diag.diagnosis.diagnose import Diagnosis, diagnose
from diag.diagnosis.proposals import Proposal, Running, propose
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.readings import Reading
from diag.knowledge.signals import runs_on_cpu
from diag.ramp.binders import BINDERS, CLIENT_FIX, COMPUTE_FIX, Binder
from diag.ramp.hardware import reached
from diag.ramp.plan import Limits, ServingCeiling, ceiling, client_is_slow, closed, holds, why_enough
from diag.ramp.step import Step, value
from diag.ramp.traffic import OwnTraffic, RequestLengths
from diag.vllm.capacity.roofline import Replica

FLAT = 0.15
"""Tokens per second that rise by less than this with twice the tokens in a step: the step is full."""
LOSS = -0.25
"""A full step serves as much as before; where it serves less, something else takes the time: neighbours, recomputes."""
APART = 1.5
"""How many times as many tokens in a step make two steps of a ramp comparable."""
RECOMPUTES = 0.2
"""Preemptions per finished request from which on tokens are computed twice."""
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
    replica: Replica | None = None


def conclude(steps: Sequence[Step], limits: Limits, known: Circumstances) -> Ramp:
    """Judge what was measured, however little that is."""
    at = saturated(steps)
    candidates = tuple(_candidates(steps, at, limits, known)) if at else ()
    binds = _first(candidates, at) if _has_reached(steps, at, limits, known.attached) else None
    others = [one for one in candidates if binds is None or one.id != binds.id]
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
        candidates=candidates,
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
    rising = closed(steps)
    flat = len(rising) > 1 and rising[-1].requests_per_second < 1.1 * rising[-2].requests_per_second
    return flat or not holds(at, limits) or client_is_slow(at, limits)


def _first(candidates: Sequence[BoundBy], at: Step | None) -> BoundBy | None:
    """What stands in front of the engine hides all else; a full step explains a queue, unless it computes twice."""
    found = {one.id: one for one in candidates if one.state == "binds"}
    recomputes = at is not None and _recomputes(at)
    before = ["api_server", "client", "power_or_heat", "kv_fetch", *(["kv_cache"] if recomputes else []), "compute"]
    return next((found[name] for name in before if name in found), next(iter(found.values()), None))


def _recomputes(step: Step) -> bool:
    return (step.preemptions or 0.0) > RECOMPUTES * max(step.requests, 1.0)


def _candidates(steps: Sequence[Step], at: Step, limits: Limits, known: Circumstances) -> Iterator[BoundBy]:
    assert at.queries is not None
    yield _client(at, limits)
    yield _compute(steps, at, known.replica)
    for binder in BINDERS:
        yield from _declared(binder, at.queries, known.running)
    yield from _slo(at, limits)


# -- what is declared --------------------------------------------------------------------------------------------------


def _declared(binder: Binder, queries: QueryCache, running: Mapping[str, Running]) -> Iterator[BoundBy]:
    """By its signals; nothing where there is no such part, a GPU for one."""
    found = diagnose([binder.incident], queries)
    if not found:
        return
    first = min(found, key=_order)
    state = _state(first)
    if state == "cannot tell" and all(reading.value is None for reading in first.symptoms):
        return
    name = dict(first.subject).get("instance", "")
    proposals = propose(first, queries, running.get(name, Running())) if state == "binds" else ()
    yield BoundBy(
        binder.id,
        binder.name,
        state,
        binder.cause,
        tuple(_evidence(first, state)),
        _pressure(binder, queries, first),
        tuple(proposal for proposal in proposals if proposal.is_computed),
    )


def _order(diagnosis: Diagnosis) -> int:
    return ("binds", "cannot tell", "ruled out").index(_state(diagnosis))


def _state(diagnosis: Diagnosis) -> State:
    """By its readings alone: a step is as long as it is."""
    if any(reading.holds is False for reading in diagnosis.symptoms):
        return "ruled out"
    return "binds" if all(reading.holds for reading in diagnosis.symptoms) else "cannot tell"


def _evidence(diagnosis: Diagnosis, state: State) -> Iterator[str]:
    """Every reading of what binds; of anything else the one that decides."""
    for reading in diagnosis.symptoms:
        if state == "binds" or reading.holds is not True:
            yield f"{reading.sentence} ({reading.threshold})" if state == "binds" else _refuted(reading)
            if state == "ruled out" and reading.holds is False:
                return


def _refuted(reading: Reading) -> str:
    """A reading that does not hold, or has no value, and what it would have to be."""
    return f"{reading.sentence}; it requires {reading.threshold.removeprefix('= ')}"


def _pressure(binder: Binder, queries: QueryCache, diagnosis: Diagnosis) -> float | None:
    if binder.pressure is None:
        return None
    rows = queries.ask(binder.pressure.promql, binder.per, queries.whole)
    row = rows.get(diagnosis.subject)
    return float(row[-1]) if row is not None and math.isfinite(row[-1]) else None


# -- what only the ramp shows ------------------------------------------------------------------------------------------


def _client(at: Step, limits: Limits) -> BoundBy:
    """Whether the generator was the limit: what it was told to keep in flight is not there, and nothing waits."""
    offered, cores = at.offer.concurrency, at.client.cores if at.client else None
    used = f"; it used {number(cores)} CPU cores" if cores is not None else ""
    if not offered or at.in_flight is None:
        return BoundBy("client", "client", "cannot tell", "", ("the load was not offered by diag",))
    sentence = f"{number(at.in_flight)} of {offered} offered requests are in flight on average{used}"
    slow = client_is_slow(at, limits)
    return BoundBy(
        "client",
        "client",
        "binds" if slow else "ruled out",
        "the load generator sends requests and reads answers more slowly than the server serves them",
        (sentence, *(("no request waits in the server",) if slow else ())),
        None,
        (_advice(CLIENT_FIX),) if slow else (),
    )


def _compute(steps: Sequence[Step], at: Step, replica: Replica | None) -> BoundBy:
    """Whether a larger batch still brings more: tokens/s against tokens in a step, over the steps of the ramp."""
    cpu = at.queries is not None and bool(value(at.queries, runs_on_cpu.promql))
    roof = reached(replica, at) if replica and not cpu else None
    name = "CPU compute" if cpu else roof.binds if roof else "compute or memory bandwidth"
    compared = _compared(steps)
    if compared is None:
        return BoundBy("compute", name, "cannot tell", "", ("no two steps differ enough in tokens per step",))
    base, top = compared
    gain = gain_per_doubling(base, top)
    sentences = [
        f"twice the tokens in a step bring {_more(gain)} tokens/s: {_step(base)}, {_step(top)}",
        *_itl(base, top),
        *([roof.sentence] if roof else []),
    ]
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


def _compared(steps: Sequence[Step]) -> tuple[Step, Step] | None:
    """The fullest step of the ramp that computes nothing twice, and the fullest of those with clearly less in them."""
    useful = [step for step in closed(steps) if not _recomputes(step)]
    known = [step for step in useful if step.tokens_per_step and step.tokens_per_second > 0]
    top = max(known, key=lambda step: step.tokens_per_step or 0.0, default=None)
    if top is None:
        return None
    less = [step for step in known if APART * (step.tokens_per_step or 0.0) <= (top.tokens_per_step or 0.0)]
    base = max(less, key=lambda step: step.tokens_per_step or 0.0, default=None)
    return (base, top) if base else None


def gain_per_doubling(base: Step, top: Step) -> float:
    """By what share tokens/s rise when a step holds twice the tokens."""
    doublings = math.log2((top.tokens_per_step or 1.0) / (base.tokens_per_step or 1.0))
    return float((top.tokens_per_second / base.tokens_per_second) ** (1 / doublings)) - 1


def _more(gain: float) -> str:
    return f"{quantity(abs(gain), 'share')} {'more' if gain >= 0 else 'fewer'}"


def _step(step: Step) -> str:
    return f"{number(step.tokens_per_second)} tokens/s with {number(step.tokens_per_step or 0.0)} in a step"


def _itl(base: Step, top: Step) -> Iterator[str]:
    if base.itl.p50 and top.itl.p50:
        before, after = (quantity(step.itl.p50 or 0.0, "seconds") for step in (base, top))
        yield f"median inter-token latency {before} -> {after}"


def _slo(at: Step, limits: Limits) -> Iterator[BoundBy]:
    """Where the contract is broken and no resource is at its limit, the SLO itself is the limit."""
    breaches = at.breaches(limits.contract)
    if breaches:
        sentences = tuple(breach.sentence for breach in breaches)
        cause = "the latency rises with the load, and no single resource is at its limit yet"
        yield BoundBy("slo", "latency SLO", "binds", cause, sentences)


def _advice(fix: Fix) -> Proposal:
    return Proposal(fix, None, None, (), False, fix.name, fix.change)
