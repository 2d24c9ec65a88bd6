"""The changes between two snapshots of a server: its settings, a limit at the gateway, and what they brought about.

A gateway is on no page of the server. If exactly as many requests as the doctor proposed for the gateway are in flight
all the time, the limit is recognised as the change: fewer requests in flight are then no lighter load. What users see
is as exact as a histogram: bucket edges.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from diag.core.formatting import number, quantity
from diag.core.incident import Condition, Fix, Incident
from diag.core.metric_prefix import RUNNING
from diag.core.subjects import label_value
from diag.diagnosis.decision_table import COMPARE
from diag.diagnosis.diagnose import Diagnosis
from diag.diagnosis.proposals import command_in, moves, written
from diag.diagnosis.query_cache import GPU_NAMES, MODELS, VERSIONS
from diag.diagnosis.report import SAME_LOAD, Finding, ServerSnapshot
from diag.knowledge import signals
from diag.knowledge.signals import E2E, ITL, TTFT
from diag.verify.load import Load, direction, flat, requests_in_flight
from diag.vllm.command.command import Command

CONFIG = "max by (instance, flag) (last_over_time(diag_vllm_config[$window]))"
FACTS = (("vLLM", VERSIONS, "version"), ("models served", MODELS, "model_name"), ("GPUs", GPU_NAMES, "name"))
"""Facts that identify a server: the name in a report, the query, and the label with the answer."""
DERIVED = ("num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency")
"""Settings that vLLM derives from its flags and the memory that it finds."""
ADDRESS = ("--host", "--port")
_HIDDEN = re.compile(r"\"?\$\{\w+:\?\}\"?")
"""A variable that stands for a secret in a published launch command."""
GATEWAY_LIMIT = "gateway concurrency limit"
"""Name of the change that is on no page of the server."""
CLEAR = 1 / 3
"""Share of the signal's size: preemptions differ by 0.21 between two runs of one load (kv_cascade, kv_cascade_base), by
0.49 if a watermark halves them (cure_watermark)."""
WORK = (
    *(signals.progress, signals.requests_finished, signals.requests_in_flight_peak, signals.requests_running),
    *(signals.requests_running_median, signals.speculates, signals.serving, signals.tokens_of_peers),
)
"""Signals that incidents require so that there is enough traffic to judge: more of it is no symptom."""
RUN_TO_RUN = 1.5
"""Runs of one configuration under one load: 1,375 output tokens/s and 1,706-2,127 in three others (kv_cascade_base)."""
ENGINES = f"count by ($by) (last_over_time({RUNNING}[$window]))"


@dataclass(frozen=True)
class SettingChange:
    """A setting and its values; None: not set on that side.

    `derived` marks settings that vLLM computes itself. `known` is false if one side does not publish the setting at
    all.
    """

    name: str
    before: str | None
    after: str | None
    derived: bool = False
    known: bool = True


@dataclass(frozen=True)
class AppliedFix:
    """A known fix of an incident that was applied, and the value that was proposed for it, "" for none."""

    fix: Fix
    proposed: str

    @property
    def name(self) -> str:
        """The flag, variable or command that was changed, or the limit at the gateway."""
        return GATEWAY_LIMIT if limits_requests(self.fix) else self.fix.name


def changes(before: ServerSnapshot, after: ServerSnapshot) -> tuple[SettingChange, ...]:
    """Return all known differences between two snapshots of a server; settings that vLLM derives come last."""
    facts = [(name, _fact(before, query, label), _fact(after, query, label)) for name, query, label in FACTS]
    identity = [SettingChange(name, old, new) for name, old, new in facts if old and new and old != new]

    # the options of the launch commands, if both are known; the command of a process has no variables
    by_name: dict[str, SettingChange] = {}
    commands = [command_in(server.running.launch) if server.running else None for server in (before, after)]
    launches = [options(command) if command else {} for command in commands]
    if all(launches):
        variables = all(any(not name.startswith("-") for name in launch) for launch in launches)
        for name in sorted(launches[0].keys() | launches[1].keys()):
            earlier, later = (launch.get(name) for launch in launches)
            is_hidden = any(_HIDDEN.fullmatch(value or "") for value in (earlier, later))  # a secret, not its value
            if name not in ADDRESS and earlier != later and not is_hidden:
                by_name[name] = SettingChange(name, earlier, later, known=name.startswith("-") or variables)

    # settings that are numbers; one that only a single side publishes may be the default of the other
    before_by_flag, after_by_flag = (
        {flag: f"{value:.12g}" for labels, value in server.series(CONFIG) if (flag := label_value(labels, "flag"))}
        for server in (before, after)
    )
    for flag in sorted(before_by_flag.keys() | after_by_flag.keys()):
        earlier, later, derived = before_by_flag.get(flag), after_by_flag.get(flag), flag in DERIVED
        on_both = earlier is not None and later is not None
        if earlier != later and (on_both or not (all(launches) or derived)):
            name = flag if derived else f"--{flag.replace('_', '-')}"
            by_name[name] = SettingChange(name, earlier, later, derived, on_both)
    return tuple(sorted([*identity, *by_name.values()], key=lambda change: change.derived))


def models(server: ServerSnapshot) -> str:
    """Return the names under which models are served, "" if no page has them."""
    return _fact(server, MODELS, "model_name")


def _fact(server: ServerSnapshot, query: str, name: str) -> str:
    counted = ((label_value(labels, name), count) for labels, count in server.series(query))
    return ", ".join(sorted(f"{count:.0f} x {text}" if query == GPU_NAMES else text for text, count in counted if text))


def options(command: Command) -> dict[str, str]:
    """Return the variables and options of a command by name, "" for a switch that is on, without the program's own."""
    by_name = {name: value for name, value in command.environment.items() if name.isupper()}
    for argument in command.given:
        option = argument.option
        key = f".{option.key}" if option and option.key else ""
        by_name[argument.name + key] = " ".join(argument.values) if option is None or option.on else "False"
    return by_name | ({"--model": command.model} if command.model else {})


# -- which of them are fixes ------------------------------------------------------------------------------------------


def limits_requests(fix: Fix) -> bool:
    """Return True if a fix is a limit on requests in flight that the gateway keeps, not the server."""
    return not fix.name and fix.value == signals.requests_that_fit_kv_cache


def applied_fixes(finding: Finding, settings: tuple[SettingChange, ...]) -> tuple[AppliedFix, ...]:
    """Return the known fixes of the incident that are among the changes."""
    by_name = {change.name: change for change in settings if change.known and not change.derived}
    applied = []
    for fix in finding.diagnosis.incident.fixes:
        values = (proposal.after for proposal in finding.proposals if proposal.fix == fix)
        proposed = next((written(value) for value in values if value not in (None, "")), "")
        candidate = AppliedFix(fix, proposed)
        change = by_name.get(candidate.name)
        if change is None:
            continue
        old, new = _number(change.before), _number(change.after)
        if fix.value is None or change.after is None:
            is_applied = fix.value is None and change.after is None
        elif not fix.direction:
            is_applied = fix.value in ("", change.after) or not isinstance(fix.value, str)
        else:
            is_applied = new is not None and (old is None or moves(fix.direction, old, new))
        if is_applied:
            applied.append(candidate)
    return tuple(applied)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


# -- the signals that a fix should move ------------------------------------------------------------------------------


@dataclass(frozen=True)
class SignalDelta:
    """A condition that the fix should bring about, and its signal's mean over the windows judged before and after."""

    condition: Condition
    threshold: float
    before: float | None
    after: float | None

    @property
    def met(self) -> bool | None:
        """True if the condition holds after the change; None: not measured."""
        return None if self.after is None else bool(COMPARE[self.condition.op](self.after, self.threshold))

    @property
    def improvement(self) -> float:
        """The distance moved: a share of its size, or of its distance to the threshold; negative if it moved away."""
        if self.before is None or self.after is None:
            return 0.0
        size = max(abs(self.before), abs(self.after), abs(self.before - self.threshold))
        fell = (self.before - self.after) / size if size else 0.0
        return fell if self.condition.op.startswith("<") else -fell


def expected(incident: Incident, fixes: Sequence[AppliedFix]) -> tuple[Condition, ...]:
    """Return the effects of the applied fixes, then that the symptoms no longer hold; one condition per signal."""
    effects = dict.fromkeys(condition for applied in fixes for condition in applied.fix.expects)
    taken = {condition.signal for condition in effects} | {*WORK}
    symptoms = (symptom for symptom in incident.symptoms if symptom.signal not in taken)
    return (*effects, *(symptom.opposite for symptom in symptoms))


def signal_deltas(
    diagnosis: Diagnosis, conditions: Sequence[Condition], before: ServerSnapshot, after: ServerSnapshot
) -> tuple[SignalDelta, ...]:
    """Measure each condition before and after, over windows of one length: a count would grow with them."""
    sides = (before, after)
    spans = [side.queries.span for side in sides if side.queries.span > 0]
    seconds = min([max(side.queries.window(diagnosis.incident).seconds for side in sides), *spans])

    def mean(condition: Condition, server: ServerSnapshot) -> float | None:
        rows = server.queries.ask(condition.signal, diagnosis.incident.per, server.queries.holding(seconds))
        row = rows.of(server.renamed(diagnosis.subject))
        return None if row is None or np.isnan(row).all() else float(np.nanmean(row))

    threshold = before.queries.contract.limit
    return tuple(
        SignalDelta(condition, threshold(condition.limit), mean(condition, before), mean(condition, after))
        for condition in conditions
    )


# -- what users see ---------------------------------------------------------------------------------------------------

Wanted = Literal["lower", "higher"]
Change = Literal["better", "worse", "same", "unknown"]


@dataclass(frozen=True)
class Bounds:
    """A value above `lower` and at or below `upper`; both are the value itself if it is exact."""

    lower: float
    upper: float


@dataclass(frozen=True)
class UserMetric:
    """One user-visible metric; `change` is "worse" only if it exceeds the noise between two runs."""

    name: str
    unit: str
    before: Bounds | None
    after: Bounds | None
    change: Change


class _Metric(NamedTuple):
    """The measurement of a metric: one number, or a quantile of a histogram.

    `notable` is the least difference that a user notices (judged).
    """

    name: str
    unit: str
    wanted: Wanted
    notable: float
    promql: str = ""
    histogram: str = ""
    quantile: float = 0.0


E2E_MEAN = f"$end_to_end_seconds_total / (sum by ($by) (increase({E2E}_count[$window])) > 0)"
METRICS = (
    _Metric("output tokens / s", "1/s", "higher", 1.0, "$output_tokens"),
    _Metric("TTFT p50", "seconds", "lower", 0.1, histogram=TTFT, quantile=0.5),
    _Metric("TTFT p95", "seconds", "lower", 0.1, histogram=TTFT, quantile=0.95),
    _Metric("ITL p99.9", "seconds", "lower", 0.1, histogram=ITL, quantile=0.999),
    _Metric("ITL (maximum)", "seconds", "lower", 0.1, histogram=ITL, quantile=1.0),
    _Metric("stream pauses / finished request", "ratio", "lower", 0.1, signals.stream_pauses_per_request.promql),
    _Metric("end-to-end latency (mean)", "seconds", "lower", 0.3, E2E_MEAN),
    _Metric("preemptions / finished request", "ratio", "lower", 0.1, "$preemptions / ($finished_requests >= 3)"),
)


def user_metrics(before: ServerSnapshot, after: ServerSnapshot, loads: tuple[Load, Load]) -> tuple[UserMetric, ...]:
    """Measure user-visible latency and throughput of one server under its load before and after."""
    lasted = loads[0].seconds, loads[1].seconds
    measured = []
    for metric in METRICS:
        old, new = _bounds(metric, before, lasted[0]), _bounds(metric, after, lasted[1])
        change: Change = "unknown"
        # a maximum grows with the time observed: it is compared over like spans only
        is_like = metric.quantile < 1 or max(lasted) <= RUN_TO_RUN * min(lasted)
        if old is not None and new is not None and is_like:
            grew, fell = _exceeds(new, old, metric.notable), _exceeds(old, new, metric.notable)
            better = grew == (metric.wanted == "higher")
            change = "same" if not grew and not fell else "better" if better else "worse"
        measured.append(UserMetric(metric.name, metric.unit, old, new, change))
    return tuple(measured)


def _bounds(metric: _Metric, server: ServerSnapshot, seconds: float) -> Bounds | None:
    if metric.histogram:
        return bucket(metric.quantile, server.histogram(metric.histogram))
    value = server.value(metric.promql)
    if value is not None and metric.unit == "1/s":
        value = value / seconds if seconds else None
    return None if value is None else Bounds(value, value)


def bucket(share: float, counts: Sequence[tuple[float, float]]) -> Bounds | None:
    """Return the bucket with a quantile: for the maximum, the last one that is not empty.

    `counts` are (upper edge, observations up to it), in any order.
    """
    edges = [(0.0, 0.0), *sorted(counts)]
    wanted = share * edges[-1][1]
    if not wanted:
        return None
    return next(Bounds(low, high) for (low, _), (high, count) in pairwise(edges) if count >= wanted * (1 - 1e-9))


def _exceeds(high: Bounds, low: Bounds, notable: float) -> bool:
    """Return True if one value is clearly above another, by the least distance that the bounds allow."""
    return not math.isinf(low.upper) and high.lower >= RUN_TO_RUN * low.upper and high.lower - low.upper >= notable


# -- the limit at the gateway -----------------------------------------------------------------------------------------


def gateway_limit(before: ServerSnapshot, after: ServerSnapshot, load_before: Load) -> SettingChange | None:
    """Return the proposed limit as a change, if the requests in flight are held at it; else None.

    The queue of before may still be in the server when it is observed, so the second half of the scrapes counts. The
    limits that the doctor proposed are those of one engine.
    """
    in_flight = requests_in_flight(after)
    settled = in_flight[len(in_flight) // 2 :]
    if np.isnan(settled).all():
        return None
    mean, most = float(np.nanmean(settled)), float(np.nanmax(settled))
    if not flat(mean, float(np.nanvar(settled))) or direction(SAME_LOAD, load_before.in_flight, mean) != -1:
        return None
    engines = before.value(ENGINES) or 1.0
    limits = (
        engines * proposal.after
        for finding in before.present
        for proposal in finding.proposals
        if limits_requests(proposal.fix) and isinstance(proposal.after, float)
    )
    held = any(not direction(SAME_LOAD, limit, most) for limit in limits)
    return SettingChange(GATEWAY_LIMIT, None, number(most)) if held else None


def gateway_notes(limit: SettingChange, after: ServerSnapshot, loads: tuple[Load, Load]) -> Iterator[str]:
    """Yield what is assumed about a gateway limit, and which requests wait where no page of the server shows them."""
    yield (
        f"requests in flight stay at {limit.after}, as proposed for the gateway: that is taken as the change. What"
        " waits there is on no page of the server, nor in its TTFT: see the gateway's own queue"
    )
    in_flight, most = requests_in_flight(after), float(limit.after or 0)
    if drained := after.queries.source.interval * int((in_flight > most).sum()):
        yield f"the queue of before was in the server for the first {quantity(drained, 'seconds')} of AFTER"
    yield from gateway_queue(most, *loads)


def gateway_queue(limit: float, before: Load, after: Load) -> Iterator[str]:
    """Yield how much waits at the gateway, as far as the load before the change tells."""
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
