"""Forward progress, asked before anything else: each engine is idle, busy, slow, stalled, starting or dead.

Gauges freeze with the engine, so one that got stuck while idle looks idle, unless its ranks or a probe tell. Until a
start is over there is no page: the log and the process table show it.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from diag.core.incident import Signal
from diag.core.subjects import Subject
from diag.diagnosis.query_cache import QueryCache, Window
from diag.knowledge.signals.engine import (
    other_page,
    page_answers,
    progress,
    requests_in_flight,
    requests_in_flight_peak,
    requests_stuck,
    serves,
    steps_per_second,
)
from diag.knowledge.signals.host import processes, ranks_apart, starting, startup_failed

State = Literal["idle", "busy", "slow", "stalled", "starting", "dead"]
ENGINE, INSTANCE = ("instance", "engine"), ("instance",)
SLOW_STEPS = 1.0
"""Engine steps per second below which an engine at work is called slow: a step then takes as long as a freeze."""


@dataclass(frozen=True)
class Progress:
    """The state of one engine, or of an instance that is dead, at the last instant, and why it is called that."""

    subject: Subject
    state: State
    reason: str


def judge(queries: QueryCache) -> tuple[tuple[Progress, ...], tuple[str, ...]]:
    """Every engine whose progress can be judged, and a sentence for each subject whose cannot; ordered by subject."""
    subjects = [each for each in queries.subjects(ENGINE) if not queries.is_gone(each)]
    found = {subject: _judge_one(subject, queries) for subject in subjects}
    known = tuple(each for each in found.values() if isinstance(each, Progress))
    return known, tuple(f"{scope(subject)}: {why}" for subject, each in found.items() if (why := _blind(each)))


def _blind(found: Progress | str) -> str:
    """Why the health of an engine cannot be told, or ""; one that still starts serves nobody yet."""
    if isinstance(found, str):
        return found
    return found.reason if found.state == "starting" else ""


def owed_and_still(found: tuple[Progress, ...]) -> bool:
    """Whether some engine has work and does not move, but cannot be called stalled yet: worth watching on."""
    return any(each.reason == STILL for each in found)


def scope(subject: Subject) -> str:
    """A subject in words: "host:8000 engine 0"."""
    labels = dict(subject)
    rest = (f"{name} {value}" for name, value in labels.items() if name != "instance")
    return " ".join([labels.get("instance", ""), *rest]).strip()


STILL = "requests are in flight and nothing has moved; one huge prefill looks the same for up to two minutes"
APART = "nothing moves while one rank stands still and its peers spin: the gauges froze at nothing in flight"
IDLE = "nothing is in flight; an engine that got stuck while idle looks the same from this page, --probe tells"
NEVER = "no page was ever answered; whether it starts, failed to start or is the wrong address, its log would tell"
GONE = "the last scrapes failed, too few of them to call it dead"
NO_VLLM = "the page has none of vLLM's metrics of progress (is it vLLM, and without --disable-log-stats?)"
TOO_SHORT = "too few scrapes to see whether anything moves"
FAILED = "its log says that the engine did not start, and nothing has started since"
STARTS = "its log shows a start under way, and no page answers yet"
THERE = "its processes are there and no page answers yet; its log would tell how far it is"
DEAD = "the page answered before and has stopped answering"


def _judge_one(subject: Subject, queries: QueryCache) -> Progress | str:
    """The state of an engine, or why it cannot be told."""
    if _last(serves, INSTANCE, subject, queries, queries.holding(max(queries.source.interval, 1.0))) == 0:
        return _silent(subject, queries)
    state = _engine_state(*(_last(each, ENGINE, subject, queries) for each in ASKED))
    if state is None:
        has_engine = "engine" in dict(subject) or _last(requests_in_flight_peak, ENGINE, subject, queries)
        return TOO_SHORT if has_engine else NO_VLLM
    if state[0] == "idle" and _last(ranks_apart, INSTANCE, subject, queries):
        return Progress(subject, "stalled", APART)
    return Progress(subject, *state)


def _silent(subject: Subject, queries: QueryCache) -> Progress | str:
    """The state of a server whose page does not answer at present."""
    if _last(starting, INSTANCE, subject, queries):
        return Progress(subject, "starting", STARTS)
    if _last(startup_failed, INSTANCE, subject, queries):
        return Progress(subject, "dead", FAILED)
    if _last(page_answers, INSTANCE, subject, queries, queries.live("15s")) == 0:
        return Progress(subject, "dead", DEAD)
    if _last(serves, INSTANCE, subject, queries, queries.whole):
        return GONE
    if _last(processes, INSTANCE, subject, queries):
        return Progress(subject, "starting", THERE)
    return NO_VLLM if _last(other_page, INSTANCE, subject, queries, queries.whole) else NEVER


ASKED = (progress, requests_in_flight_peak, requests_in_flight, requests_stuck, steps_per_second)


def _engine_state(
    moved: float | None, most: float | None, least: float | None, stuck: float | None, steps: float | None
) -> tuple[State, str] | None:
    if moved is None or most is None or least is None:
        return None
    if stuck:
        return "stalled", f"{stuck:.0f} requests are in flight and nothing moves"
    if moved == 0:
        return _still(most, least)
    if steps is not None and steps < SLOW_STEPS and least > 0:
        return "slow", f"{steps:.2g} engine steps a second with requests in flight all the time"
    return "busy", "tokens flow"


def _still(most: float, least: float) -> tuple[State, str]:
    if most == 0:
        return "idle", IDLE
    return "slow", STILL if least > 0 else "a request came in and nothing has moved yet"


def _last(
    signal: Signal, per: tuple[str, ...], subject: Subject, queries: QueryCache, window: Window | None = None
) -> float | None:
    """The signal's value for a subject at the last instant, None where there is none."""
    row = queries.ask(signal.promql, per, window or queries.live("30s")).of(subject)
    return None if row is None or np.isnan(row[-1]) else float(row[-1])
