"""A ramp in print: what binds, what to change and what comes next, then its steps; and JSON of schema "diag.ramp/1"."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from diag import __version__
from diag.core.formatting import number, quantity
from diag.diagnosis.proposals import Proposal, written
from diag.ramp.analysis import BoundBy, Ramp
from diag.ramp.plan import holds
from diag.ramp.step import SLOS, ClientResult, Latency, Step
from diag.report.layout import labelled, paragraph, table

SCHEMA = "diag.ramp/1"
LABEL = 13
HEAD = ["load", "requests/s", "output/s", "TTFT p50", "p99", "ITL p50", "p99", "in flight", "waiting", ""]
MOST_CHANGES = 3


# -- for a terminal ----------------------------------------------------------------------------------------------------


def render(ramp: Ramp) -> str:
    """One screen: the ceiling, what binds, what to change, what is next; the steps below."""
    lines = [*paragraph(headline(ramp)), ""]
    for label, texts in summary(ramp):
        lines += labelled(label, texts, LABEL)
    if ramp.steps:
        lines += ["", *table([HEAD, *(row(ramp, step) for step in ramp.steps)], right=range(1, 9))]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def headline(ramp: Ramp) -> str:
    """Which server was ramped, with what."""
    named = [text for text in (ramp.model, f"vLLM {ramp.version}" if ramp.version else "") if text]
    served = f" ({', '.join(named)})" if named else ""
    if ramp.lengths is None:
        return f"Ramp of {ramp.target}{served}"
    return f"Ramp of {ramp.target}{served}: {ramp.lengths.shown}"


def summary(ramp: Ramp) -> Iterator[tuple[str, list[str]]]:
    """Labels and sentences, in the order in which they are read."""
    yield "Ceiling", [ceiling(ramp)]
    yield "Bound by", [bound_by(ramp)]
    if ramp.binds:
        yield "Evidence", list(ramp.binds.evidence)
        yield "Change", [change(proposal) for proposal in ramp.binds.proposals[:MOST_CHANGES]]
    if ramp.next and ramp.binds:
        yield "Next", [_next(ramp.next)]
    yield "Headroom", headroom(ramp)
    yield "Ruled out", [f"{one.name}: {one.evidence[0]}" for one in ramp.ruled_out]
    yield (
        "Cannot tell",
        [f"{one.name}: {'; '.join(one.evidence)}" for one in ramp.candidates if one.state == "cannot tell"],
    )
    yield "Ended", [text for text in (ramp.stopped, ramp.ended) if text]
    yield "Notes", [*ramp.notes, *_unsteady(ramp)]


def ceiling(ramp: Ramp) -> str:
    """The most that was served inside the SLO, and by which kind of load."""
    if ramp.ceiling is None:
        return "not known: no step was long enough, with enough requests, inside the SLO"
    step, knee = ramp.ceiling.step, ramp.ceiling.knee
    kind = "Poisson arrivals" if step.offer.rate is not None else "closed loop" if step.offer.concurrency else "as seen"
    flight = f" with {number(step.in_flight)} in flight" if step.in_flight is not None else ""
    at = f"; the knee is at {knee.offer.concurrency} requests at a time" if knee else ""
    output = f"{number(step.output_tokens_per_second)} output tokens/s"
    return f"{number(step.requests_per_second)} requests/s, {output}{flight} ({kind}){at}"


def bound_by(ramp: Ramp) -> str:
    """The binder and what that means."""
    if ramp.binds:
        return f"{ramp.binds.name}: {ramp.binds.cause}" if ramp.binds.cause else ramp.binds.name
    if ramp.saturated is None:
        return "cannot tell: the server's metrics do not show a step"
    return "nothing yet: more load may be served"


def _next(one: BoundBy) -> str:
    return f"{one.name}, at {quantity(one.pressure or 0.0, 'share')} of its limit: {one.evidence[0]}"


def change(proposal: Proposal) -> str:
    """A flag with both values and what it does, or advice."""
    if not proposal.fix.flag:
        return proposal.text
    before = "" if proposal.before is None else f" {written(proposal.before)}"
    name = (
        f"remove {proposal.name}{before}"
        if proposal.after is None
        else f"{proposal.name}{before} -> {written(proposal.after)}"
    )
    restart = " (restart needed)" if proposal.fix.restart else ""
    return f"{name}{restart}: {proposal.text}"


def headroom(ramp: Ramp) -> list[str]:
    """What the server had to do before, against the ceiling."""
    if ramp.traffic is None:
        return []
    if ramp.headroom is None:
        return ["the server had no traffic before the ramp"]
    share = quantity(1 / ramp.headroom, "share")
    return [f"its own {number(ramp.traffic.requests_per_second)} requests/s are {share} of the ceiling"]


def row(ramp: Ramp, step: Step) -> list[str]:
    """A step as a line of the table."""
    flight, waiting = (("" if value is None else number(value)) for value in (step.in_flight, step.waiting))
    cells = [step.offer.shown, number(step.requests_per_second), number(step.output_tokens_per_second)]
    for latency in (step.ttft, step.itl):
        cells += [_seconds(latency.p50), _seconds(latency.p99)]
    return [*cells, flight, waiting, remark(ramp, step)]


def remark(ramp: Ramp, step: Step) -> str:
    """Why a step is no ceiling, or that it is."""
    if ramp.ceiling and step is ramp.ceiling.step:
        return "ceiling"
    if not step.counts(ramp.limits.seconds):
        return "too short"
    if step.breaches(ramp.limits.contract):
        return "SLO"
    if not holds(step, ramp.limits):
        return "queue grows"
    if step.by == "client" and ramp.saturated:
        return "by the client"
    return "knee" if ramp.ceiling and step is ramp.ceiling.knee else ""


def _seconds(value: float | None) -> str:
    return "" if value is None else quantity(value, "seconds")


def _unsteady(ramp: Ramp) -> Iterator[str]:
    short = sum(not step.counts(ramp.limits.seconds) for step in ramp.steps)
    if short:
        yield (
            f"{short} of {len(ramp.steps)} steps do not count: shorter than {number(0.6 * ramp.limits.seconds)} s or"
            " fewer than 10 requests"
        )


# -- for a machine -----------------------------------------------------------------------------------------------------


def render_json(ramp: Ramp) -> str:
    """The same as JSON."""
    return json.dumps(document(ramp), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def document(ramp: Ramp) -> dict[str, Any]:
    """The ramp as plain values, in the schema's order."""
    contract = ramp.limits.contract
    return {
        "schema": SCHEMA,
        "diag": __version__,
        "target": ramp.target,
        "model": ramp.model,
        "vllm": ramp.version,
        "prompt_tokens": ramp.lengths.prompt if ramp.lengths else None,
        "output_tokens": ramp.lengths.output if ramp.lengths else None,
        "slo": {name: getattr(contract, name) for name in (*SLOS.values(), "objective")},
        "ceiling": _step(ramp, ramp.ceiling.step) if ramp.ceiling else None,
        "knee": ramp.ceiling.knee.offer.concurrency if ramp.ceiling and ramp.ceiling.knee else None,
        "binds": _bound_by(ramp.binds) if ramp.binds else None,
        "next": ramp.next.id if ramp.next else None,
        "candidates": [_bound_by(one) for one in ramp.candidates],
        "traffic": ramp.traffic._asdict() if ramp.traffic else None,
        "headroom": ramp.headroom,
        "ended": ramp.ended,
        "stopped": ramp.stopped,
        "steps": [_step(ramp, step) for step in ramp.steps],
        "notes": list(ramp.notes),
    }


def _bound_by(one: BoundBy) -> dict[str, Any]:
    return {
        "id": one.id,
        "name": one.name,
        "state": one.state,
        "cause": one.cause,
        "evidence": list(one.evidence),
        "pressure": one.pressure,
        "changes": [_change(proposal) for proposal in one.proposals],
    }


def _change(proposal: Proposal) -> dict[str, Any]:
    return {
        "flag": proposal.fix.flag or None,
        "before": proposal.before,
        "after": proposal.after,
        "restart": proposal.fix.restart,
        "text": proposal.text,
    }


def _step(ramp: Ramp, step: Step) -> dict[str, Any]:
    plain = ("seconds", "requests", "requests_per_second", "output_tokens_per_second", "prompt_tokens_per_second")
    gauges = ("running", "waiting", "in_flight", "tokens_per_step", "preemptions")
    return {
        "concurrency": step.offer.concurrency,
        "rate": step.offer.rate,
        "measured_by": step.by,
        "counts": step.counts(ramp.limits.seconds),
        "within_slo": not step.breaches(ramp.limits.contract),
        **{name: getattr(step, name) for name in (*plain, *gauges)},
        **{name: _latency(getattr(step, name)) for name in ("ttft", "itl", "e2e")},
        "client": _client(step.client) if step.client else None,
    }


def _latency(latency: Latency) -> dict[str, Any]:
    return latency._asdict()


def _client(client: ClientResult) -> dict[str, Any]:
    plain: Sequence[str] = (
        "completed",
        "failed",
        "seconds",
        "requests_per_second",
        "output_tokens_per_second",
        "cores",
    )
    latencies = {name: _latency(getattr(client, name)) for name in ("ttft", "itl", "e2e")}
    return {name: getattr(client, name) for name in plain} | latencies
