"""Each candidate for what binds a ramp, judged by declared signals or by what only its steps show."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from diag.core.formatting import number, quantity
from diag.core.incident import Fix
from diag.diagnosis.decision_table import Reading
from diag.diagnosis.diagnose import Diagnosis, diagnose
from diag.diagnosis.proposals import Proposal, Running, propose
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import CeilingShares, ceiling_shares
from diag.knowledge.signals import runs_on_cpu
from diag.ramp.binders import BINDERS, CLIENT_FIX, COMPUTE_FIX, Binder
from diag.ramp.plan import Limits, client_is_slow, closed
from diag.ramp.step import Step, value

FLAT = 0.15
"""Tokens per second that rise by less than this with twice the tokens in a step: the step is full."""
LOSS = -0.25
"""A full step serves as much as before; where it serves less, something else takes the time: neighbours, recomputes."""
APART = 1.5
"""How many times as many tokens in a step make two steps of a ramp comparable."""
ALIKE = 1.2
"""Up to how many times as many tokens in a step make two steps equally full."""
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


def candidates(steps: Sequence[Step], at: Step, limits: Limits, running: Mapping[str, Running]) -> Iterator[BoundBy]:
    """All of them, judged at this step, whose samples there are; `running` is what runs on each instance."""
    assert at.queries is not None
    yield _client(at, limits)
    yield _compute(steps, at)
    for binder in BINDERS:
        yield from _declared(binder, at.queries, running)
    yield from _slo(at, limits)


def recomputes(step: Step) -> bool:
    """Whether preemptions make it compute tokens twice."""
    return (step.preemptions or 0.0) > RECOMPUTES * max(step.requests, 1.0)


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
    rows = queries.ask(binder.pressure, binder.per, queries.whole)
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


def _compute(steps: Sequence[Step], at: Step) -> BoundBy:
    """Whether a larger batch still brings more: tokens/s against tokens in a step, over the steps of the ramp."""
    assert at.queries is not None
    roof = max(ceiling_shares(at.queries), key=lambda shares: shares.nearest, default=None)
    name = _hardware(at.queries, roof)
    pair = compared(steps)
    if pair is None:
        return BoundBy("compute", name, "cannot tell", "", ("no two steps differ enough in tokens per step",))
    base, top = pair
    gain = gain_per_doubling(base, top)
    sentences = [
        f"twice the tokens in a step bring {_more(gain)} tokens/s: {_step(base)}, {_step(top)}",
        *_itl(base, top),
        *([f"by the data sheet, {roof.sentence}"] if roof else []),
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


def _hardware(queries: QueryCache, roof: CeilingShares | None) -> str:
    """What a full step lacks: of two ceilings the nearer one, where GPU and model are known."""
    if value(queries, runs_on_cpu.promql):
        return "CPU compute"
    if roof is None:
        return "compute or memory bandwidth"
    return "memory bandwidth" if roof.nearest == roof.bandwidth else "compute"


def compared(steps: Sequence[Step]) -> tuple[Step, Step] | None:
    """The best of the full steps that compute nothing twice, and the fullest of those with clearly less in them.

    What disturbs a step, a neighbour on the host for one, only takes tokens/s away.
    """
    useful = [step for step in closed(steps) if not recomputes(step)]
    known = [step for step in useful if step.tokens_per_step and step.tokens_per_second > 0]
    most = max((step.tokens_per_step or 0.0 for step in known), default=0.0)
    full = [step for step in known if ALIKE * (step.tokens_per_step or 0.0) >= most]
    top = max(full, key=lambda step: step.tokens_per_second, default=None)
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
