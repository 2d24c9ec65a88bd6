"""Compare kept ramps: the ceiling, latencies at the old rates, what binds, and what changed between them.

Two runs of one server differ: each figure has the range in which another run may lie, and a difference counts only if
the ranges do not overlap.

- A rate scatters as much as the quarters of its step, and as the steps from the ceiling on, which all serve what the
  server can. Without quarters (an older diag, a load tool), by chance alone: two standard errors of its requests.
- A ceiling lies between the highest rate that held and the lowest one that did not; it is unbounded if the ramp reached
  no limit, or that of its own client.
- While its processes waited for a CPU, a server served less than it could.
- An exact p99 scatters with the few values above it: two standard errors of their number, on an exponential tail from
  p90 to p99. A p99 read off a histogram is anywhere in its bucket.
- Between two measured rates a latency is at least that of the lower one, since latency rises with the load.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from diag.core.errors import BadUsage
from diag.core.formatting import listed, number, printable, quantity
from diag.diagnosis.report import SAME_LENGTHS
from diag.ramp.analysis import RECOMPUTES
from diag.ramp.plan import GAIN
from diag.sources.kept_ramp import Kind, LoadStep, RampResult, settings
from diag.vllm.command.parse import parse as parse_command
from diag.vllm.command.shown import shown

NOTABLE = 0.1
"""The least difference that is reported: a smaller one is not worth a search (judged)."""
SAME_RATE = 0.05
"""Rates that differ by less are one load: so much differ the steps of two runs on a calm host (judged)."""
NEAR_LIMIT = 0.85
"""Share of the highest rate from which on the latency depends on the concurrency, and no longer on the rate: a step at
the knee serves 90 % (`plan.TOP`), and closed-loop steps of twice the concurrency and latency hardly more."""
ERRORS = 2.0
"""Standard errors that chance explains, in 95 % of cases."""
MOST_RATES = 20
"""Rates of a ramp that are tried as the common one of a trend: the highest."""
OTHERS = 0.05
"""Share of the ceiling from which on traffic of others changes a ramp by as much as two runs differ (judged)."""
WAITS = 0.1
"""Difference in CPU wait from which on a host was clearly busier (judged)."""
NOT_SET = "not set"
NOT_MEASURED, NEAR = "not measured at this rate", "near the limit"
Verdict = Literal["worse", "better", "no change", "not comparable"]
Measure = Literal["ITL", "TTFT"]
MEASURES: tuple[Measure, ...] = ("ITL", "TTFT")


Category = Literal["model", "release", "flags", "traffic", "hardware", "SLO", "host"]


class Difference(NamedTuple):
    """A circumstance that changed between two ramps, in words."""

    category: Category
    name: str
    before: str
    after: str

    @property
    def sentence(self) -> str:
        return f"{self.name} {self.before} -> {self.after}"


class Figure(NamedTuple):
    """A measured value, and the range in which another run of the same server may lie."""

    value: float
    low: float
    high: float


class ComparedFigure(NamedTuple):
    """A figure of both ramps; `rate` are the requests/s at which a latency was measured, None for a ceiling.

    `why` is the reason for a figure without a value after, and `is_interpolated` true for one between two steps.
    """

    name: Literal["ceiling", "highest rate inside the SLO"] | Measure
    worse: Literal["higher", "lower"]
    before: Figure | None
    after: Figure | None
    rate: float | None = None
    why: str = ""
    is_interpolated: bool = False

    @property
    def change(self) -> float | None:
        """The difference as a share of the value before."""
        if self.before is None or self.after is None or not self.before.value:
            return None
        return self.after.value / self.before.value - 1

    @property
    def scatter(self) -> float | None:
        """The least difference in this direction that chance does not explain, as a share of the value before."""
        if self.before is None or self.after is None or not self.before.value:
            return None
        if self.after.value < self.before.value:
            apart = self.before.value - self.before.low + self.after.high - self.after.value
        else:
            apart = self.before.high - self.before.value + self.after.value - self.after.low
        return apart / self.before.value

    @property
    def verdict(self) -> Verdict:
        if self.change is None or self.scatter is None or math.isinf(self.scatter):
            return "not comparable"
        if abs(self.change) <= max(self.scatter, NOTABLE):
            return "no change"
        return "worse" if (self.change > 0) == (self.worse == "higher") else "better"


class RampComparison(NamedTuple):
    """Two ramps; `rates` are the ceiling and the highest rate inside the SLO, `latencies` those at the old rates.

    `differences` are the circumstances that changed, `unknown` those that one of both does not tell.
    """

    before: RampResult
    after: RampResult
    rates: tuple[ComparedFigure, ...]
    latencies: tuple[ComparedFigure, ...]
    differences: tuple[Difference, ...]
    unknown: tuple[str, ...]

    @property
    def lost_ceiling(self) -> bool:
        """True if no load is served inside the SLO any more, not even less than that of the old ceiling."""
        old = self.before.ceiling
        loads = [step.in_flight for step in self.after.steps]
        return bool(old and not self.after.ceiling and loads and min(loads) <= old.in_flight)

    @property
    def verdict(self) -> Verdict:
        """Judge by the rates, and by a latency that differs at two of the old rates, or at the only one measured."""
        found = [figure.verdict for figure in self.rates]
        for measure in MEASURES:
            all_of_it = [figure.verdict for figure in self.latencies if figure.name == measure]
            each: list[Verdict] = [verdict for verdict in all_of_it if verdict != "not comparable"]
            wanted: tuple[Verdict, ...] = ("worse", "better")
            found += [verdict for verdict in wanted if each.count(verdict) >= min(2, max(len(each), 1))]
            if each:
                found.append("no change")
        order: tuple[Verdict, ...] = ("worse", "better", "no change")
        return "worse" if self.lost_ceiling else next((each for each in order if each in found), "not comparable")


def compare(before: RampResult, after: RampResult) -> RampComparison:
    """Compare a ramp with an earlier one."""
    ceilings, highest = ((before.ceiling, after.ceiling), (_highest(before), _highest(after)))
    rates: list[ComparedFigure] = []
    for old, new in dict.fromkeys((ceilings, highest)):
        figures = old and _limit(before, old), new and _limit(after, new)
        why = "" if new else "no load was inside the SLO"
        rates.append(ComparedFigure("highest rate inside the SLO" if rates else "ceiling", "lower", *figures, why=why))
    # p99 ITL and TTFT at the rates of the ramp before that were inside the SLO
    latencies: list[ComparedFigure] = []
    now, up_to = rising(after.steps), min(comparable_up_to(before), comparable_up_to(after))
    for step in rising(before.steps):
        if highest[0] is None or step.served > highest[0].served:
            continue
        same = [other for other in now if other.kind == step.kind]
        for measure in MEASURES:
            exact = all(_exact(one, measure) is not None for one in (step, *same))
            was, becomes, why, between = latency(step, measure, exact), None, NEAR, False
            if step.served < up_to:
                becomes, between = at_rate(same, step.served, measure, exact)
                why = NOT_MEASURED if becomes is None else ""
            if was is not None:
                latencies.append(ComparedFigure(measure, "higher", was, becomes, step.served, why, between))
    return RampComparison(
        before,
        after,
        tuple(rates),
        tuple(latencies),
        differences(before, after),
        unknown(before, after),
    )


# -- rates -------------------------------------------------------------------------------------------------------------


def _highest(ramp: RampResult) -> LoadStep | None:
    """Return the step that served most inside the SLO, in either loop: open-loop rates are tried in steps of 15 %."""
    return max((step for step in ramp.steps if step.holds), key=lambda step: step.served, default=None)


def _is_limited(ramp: RampResult) -> bool:
    """Return True if a ramp reached a limit of the server; one of its client hides those of the server."""
    if ramp.binds:
        return ramp.binds != "client"
    closed = sorted((step for step in ramp.steps if step.kind == "closed"), key=lambda step: step.in_flight)
    is_flat = len(closed) > 1 and closed[-1].served < GAIN * closed[-2].served
    return is_flat or not all(step.holds for step in ramp.steps)


def _limit(ramp: RampResult, step: LoadStep) -> Figure:
    """Return the rate of the best step, whose true limit lies below the next rate at which a step did not hold."""
    value, low, high = served(ramp, step)
    if not _is_limited(ramp) or not value:
        return Figure(value, low, math.inf)
    is_open = step.kind == "open"
    more = [other.served for other in ramp.steps if other.served > value and (other.kind == "open") == is_open]
    return Figure(value, low, high * min(more, default=value) / value)


def served(ramp: RampResult, step: LoadStep) -> Figure:
    """Return the requests/s of a step."""
    if step.quarters and min(step.quarters) > 0:
        # four quarters reach, from the lowest to the highest, over four standard errors of their mean
        mean = sum(step.quarters) / len(step.quarters)
        low, high = min(step.quarters) / mean, max(step.quarters) / mean
    else:
        error = ERRORS / math.sqrt(max(step.requests, 1.0))
        low, high = max(1 - error, 0.0), 1 + error
    full = [other for other in ramp.steps if other.kind == "closed" and other.in_flight >= step.in_flight]
    rates = [other.served for other in full if other.preemptions <= RECOMPUTES * other.requests]
    if step.kind == "closed" and step == _highest(ramp) and len(rates) > 1 and max(rates) > 0:
        apart = (max(rates) - min(rates)) / (max(rates) + min(rates))
        low, high = min(low, 1 - apart), max(high, 1 + apart)
    return Figure(step.served, step.served * low, step.served * high / (1 - min(step.cpu_wait or 0.0, 0.9)))


# -- latencies at the old rates ----------------------------------------------------------------------------------------


def comparable_up_to(ramp: RampResult) -> float:
    """Return the requests/s below which a rate determines the latency."""
    top = max((step.served for step in ramp.steps), default=0.0)
    return NEAR_LIMIT * top if _is_limited(ramp) else math.inf


def rising(steps: Sequence[LoadStep]) -> list[LoadStep]:
    """Return the steps of each kind in which a higher load clearly served more, so that one rate is one load."""
    higher: list[LoadStep] = []
    kinds: tuple[Kind, ...] = ("seen", "closed", "open")
    for kind in kinds:
        top = 0.0
        for step in sorted((step for step in steps if step.kind == kind), key=lambda step: step.in_flight):
            if step.served > GAIN * top:
                higher.append(step)
                top = step.served
    return higher


def at_rate(steps: Sequence[LoadStep], rate: float, measure: Measure, exact: bool) -> tuple[Figure | None, bool]:
    """Return the p99 at a rate, and True if it lies between two steps; None beyond the steps."""
    near = min(steps, key=lambda step: abs(step.served - rate), default=None)
    if near and abs(near.served - rate) <= SAME_RATE * rate:
        return latency(near, measure, exact), False
    for lower, upper in pairwise(sorted(steps, key=lambda step: step.served)):
        if lower.served <= rate <= upper.served:
            less, more = latency(lower, measure, exact), latency(upper, measure, exact)
            if less is not None and more is not None:
                share = (rate - lower.served) / (upper.served - lower.served)
                value = less.value + share * (more.value - less.value)
                return Figure(value, min(less.low, value), max(more.high, value)), True
    return None, False


def latency(step: LoadStep, measure: Measure, exact: bool) -> Figure | None:
    """Return the p99 of a step: the client's if `exact`, else that of the server's histogram."""
    if not exact:
        found = step.itl if measure == "ITL" else step.ttft
        low, high = found.bucket or (-math.inf, None)  # an older diag keeps no bucket: its p99 may be anywhere
        return None if found.p99 is None else Figure(found.p99, min(low, found.p99), math.inf if high is None else high)
    return _exact(step, measure)


def _exact(step: LoadStep, measure: Measure) -> Figure | None:
    exact = step.client_itl if measure == "ITL" else step.client_ttft
    if exact is None or exact.p99 is None:
        return None
    # tokens of one engine step are late together: each step counts once
    count = step.output_tokens * step.seconds / step.in_flight if measure == "ITL" else exact.observed
    lower, times = (exact.p50, 50.0) if exact.p90 is None else (exact.p90, 10.0)
    tail = 0.0 if lower is None else max(exact.p99 - lower, 0.0) / math.log(times)
    error = ERRORS * tail / math.sqrt(max(0.01 * count, 0.1))
    return Figure(exact.p99, max(exact.p99 - error, 0.0), exact.p99 + error)


# -- circumstances -----------------------------------------------------------------------------------------------------


def differences(before: RampResult, after: RampResult) -> tuple[Difference, ...]:
    """Return all known differences; what one of both does not tell is none."""
    pairs: list[tuple[Category, str, str, str]] = [
        ("model", "model", before.model, after.model),
        ("release", "vLLM", before.version, after.version),
        ("traffic", "load by", before.load_by, after.load_by),
        ("hardware", "GPUs", _counted(before.gpus), _counted(after.gpus)),
        ("hardware", "power limits", _limits(before), _limits(after)),
    ]
    if before.load_by.startswith(after.load_by) or after.load_by.startswith(before.load_by):
        del pairs[2]  # they differ at most in a version that one of both does not tell
    changed = [Difference(*pair) for pair in pairs if pair[2] and pair[3] and pair[2] != pair[3]]

    old_flags, new_flags = _parsed(before.launch), _parsed(after.launch)
    for name in sorted({*old_flags, *new_flags}) if old_flags and new_flags else ():
        old, new = (printable(flags.get(name, NOT_SET), 60) for flags in (old_flags, new_flags))
        if old != new:
            changed.append(Difference("flags", name, old, new))

    # the lengths that were set, else those that were measured at the ceiling, and the traffic of others
    for field, name in {"prompt_tokens": "prompt tokens", "output_tokens": "output tokens"}.items():
        length, later, factor = before.lengths[field], after.lengths[field], 1.0
        if length is None or later is None:
            ceilings, factor = (before.ceiling, after.ceiling), SAME_LENGTHS
            length, later = (getattr(step, field) / step.served if step and step.served else None for step in ceilings)
        if length and later and max(length, later) > factor * min(length, later):
            changed.append(Difference("traffic", f"{name} a request", number(length), number(later)))
    for field, name in {"prefix_tokens": "shared prefix tokens", "length_spread": "spread of the lengths"}.items():
        length, later = before.lengths[field], after.lengths[field]
        unit = "share" if field == "length_spread" else ""
        if length is not None and later is not None and quantity(length, unit) != quantity(later, unit):
            changed.append(Difference("traffic", name, quantity(length, unit), quantity(later, unit)))
    then, now = before.others, after.others
    if then is not None and now is not None and before.ceiling and abs(now - then) > OTHERS * before.ceiling.served:
        changed.append(Difference("traffic", "requests/s of others", number(then), number(now)))

    for name in sorted(before.slo.keys() & after.slo.keys()):
        if before.slo[name] != after.slo[name]:
            changed.append(Difference("SLO", name, number(before.slo[name]), number(after.slo[name])))

    then, now = (ramp.ceiling.cpu_wait if ramp.ceiling else None for ramp in (before, after))
    if then is not None and now is not None and abs(now - then) > WAITS:
        name = "time in which vLLM waited for a CPU"
        changed.append(Difference("host", name, quantity(then, "share"), quantity(now, "share")))
    return tuple(changed)


def unknown(before: RampResult, after: RampResult) -> tuple[str, ...]:
    """Return the circumstances that one of both results does not tell."""
    told: dict[str, tuple[object, object]] = {
        "release": (before.version, after.version),
        "flags": (_parsed(before.launch), _parsed(after.launch)),
        "GPUs": (before.gpus, after.gpus),
        "GPU power limits": (before.power_limits, after.power_limits),
        "load generator": (before.load_by, after.load_by),
    }
    return tuple(name for name, (then, now) in told.items() if not then or not now)


def _counted(names: Iterable[str]) -> str:
    return listed([f"{count} x {name}" if count > 1 else name for name, count in sorted(Counter(names).items())])


def _limits(ramp: RampResult) -> str:
    return _counted(quantity(limit, "watts") for limit in ramp.power_limits)


def _parsed(launch: str) -> Mapping[str, str]:
    """Return flags and environment of a launch command, {} if it cannot be read; a file may hold secrets as well."""
    try:
        command = parse_command(shown(launch)) if launch else None
    except BadUsage:
        return {}
    return {"vllm": "", **settings(command), **command.environment} if command else {}


# -- many ramps --------------------------------------------------------------------------------------------------------


class TrendLine(NamedTuple):
    """A ramp, its p99 ITL at the common rate, and its comparison with the ramp before it, None for the first one."""

    ramp: RampResult
    itl: Figure | None
    against: RampComparison | None


class Trend(NamedTuple):
    """Ramps in order of their time; `rate` are the requests/s at which most of them have an ITL, None if none has."""

    rate: float | None
    lines: tuple[TrendLine, ...]


def trend(ramps: Sequence[RampResult]) -> Trend:
    """Line up ramps by their time; the common rate is one of the last ramp's: the highest that most others measured."""
    ordered = sorted(ramps, key=lambda ramp: ramp.measured)
    loads = [rising(ramp.steps) for ramp in ordered]
    loads = [[step for step in steps if step.kind == "closed"] or steps for steps in loads]
    limits = [comparable_up_to(ramp) for ramp in ordered]

    def itls(rate: float) -> list[Figure | None]:
        exact = [all(_exact(step, "ITL") is not None for step in steps) for steps in loads]
        return [
            at_rate(steps, rate, "ITL", each)[0] if rate < limit else None
            for steps, limit, each in zip(loads, limits, exact, strict=True)
        ]

    def measured(rate: float) -> tuple[int, float]:
        return sum(itl is not None for itl in itls(rate)), rate

    rates = [step.served for step in loads[-1][-MOST_RATES:]] if loads else []
    count, rate = max(map(measured, rates), default=(0, 0.0))
    comparisons = [None, *(compare(*pair) for pair in pairwise(ordered))]
    lines = zip(ordered, itls(rate), comparisons, strict=True)
    return Trend(rate if count else None, tuple(TrendLine(*line) for line in lines))
