"""Forward progress, judged before anything else: each engine is idle, asleep, busy, slow, stalled, starting or dead.

Gauges freeze with the engine, so one that got stuck while idle looks idle, unless its ranks or a probe show otherwise.
Until a start is over there is no /metrics page: the log and the process table show it.
"""

from typing import Literal, NamedTuple

import numpy as np

from diag.core.formatting import number, plural
from diag.core.incident import Signal
from diag.core.subjects import Subject
from diag.diagnosis.query_cache import QueryCache, Window
from diag.knowledge.signals import (
    asleep,
    endpoint_without_vllm,
    engine_death_logged,
    engine_processes,
    engines_lost,
    kv_cache_usage_peak,
    progress,
    requests_in_flight,
    requests_in_flight_peak,
    requests_not_admitted,
    requests_stuck,
    requests_stuck_or_stopped,
    scheduler_paused,
    serves,
    shut_down,
    sleep_level,
    steps_per_second,
    successful_scrapes,
    tokens_or_shutdown,
)
from diag.knowledge.signals.peers import ranks_out_of_step
from diag.knowledge.signals.startup import processes, start_under_way, starting, startup_failed

State = Literal["idle", "asleep", "busy", "slow", "stalled", "starting", "dead"]
ENGINE, INSTANCE = ("instance", "engine"), ("instance",)
SLOW_STEPS = 1.0
"""Engine steps per second below which an engine at work is called slow: a step then takes as long as a freeze."""


class Progress(NamedTuple):
    """The state of one engine, or of an instance that is dead, at the last instant, and why it is called that."""

    subject: Subject
    state: State
    reason: str


class NotJudged(NamedTuple):
    """Why finding nothing does not mean health; of the subject, () for the whole look."""

    why: str
    subject: Subject = ()

    @property
    def sentence(self) -> str:
        """With the subject."""
        return f"{scope(self.subject)}: {self.why}" if self.subject else self.why


def judge(queries: QueryCache) -> tuple[tuple[Progress, ...], tuple[NotJudged, ...]]:
    """Each engine's progress, and why that of others is unknown; ordered by subject."""
    subjects = [subject for subject in queries.subjects(ENGINE) if not queries.is_gone(subject)]
    found = {subject: _judge_one(subject, queries) for subject in subjects}
    known = tuple(progress for progress in found.values() if isinstance(progress, Progress))
    return known, tuple(NotJudged(why, subject) for subject, progress in found.items() if (why := _unknown(progress)))


def _unknown(found: Progress | str) -> str:
    """Why the health of an engine is unknown, or ""; one that is still starting serves nobody yet."""
    if isinstance(found, str):
        return found
    return found.reason if found.state == "starting" or found.reason == STILL else ""


def owed_and_still(found: tuple[Progress, ...]) -> bool:
    """Whether some engine has work and does not move, but cannot be called stalled yet: worth watching on."""
    return any(progress.reason == STILL for progress in found)


def scope(subject: Subject) -> str:
    """A subject in words: "host:8000 engine 0"."""
    labels = dict(subject)
    rest = (f"{name} {value}" for name, value in labels.items() if name != "instance")
    return " ".join([labels.get("instance", ""), *rest]).strip()


STILL = (
    "requests are in flight and nothing has moved; one very long prefill, or a step that compiles kernels, looks the "
    "same for up to two minutes"
)
DIVERGED = "no progress while one rank uses no CPU and its peers busy-wait; the gauges froze at 0 requests in flight"
HALTED = "the kernel says that a process of the engine is stopped"
IDLE = "no request in flight; an engine that got stuck while idle looks the same here, --probe tells the two apart"
SLEEPS = {
    0: "scheduling is paused (sleep level 0), with the weights in place",
    1: "sleep level 1, with the weights in host memory and no KV cache",
    2: "sleep level 2, with weights and KV cache discarded",
}
"""By the level of vllm:engine_sleep_state."""
WAKES_UP = "it serves nobody until POST /wake_up"
PAUSED = "scheduling is paused (POST /pause), with the weights in place; it serves nobody until POST /resume"
REFUSED = "requests wait, none runs and nothing moves: the scheduler admits nobody"
NEVER = (
    "/metrics never answered: the server is starting, failed to start, or the address is wrong; "
    "its log would show which (--log)"
)
GONE = "the last scrapes failed, but too few of them to call the server dead; observe it for longer"
NO_VLLM = "/metrics has no vLLM progress metrics: is it vLLM, and does it run without --disable-log-stats?"
NO_USAGE = (
    "requests are in flight and no token moves; a prefill in chunks looks the same here, because /metrics has no "
    "KV cache usage"
)
TOO_SHORT = "too few scrapes to see whether anything moves; observe it for longer"
STARTS = "its log shows a start in progress, and /metrics does not answer yet; diagnose it again once it does"
THERE = "its processes are running and /metrics does not answer yet; its log would show how far the start is (--log)"
DEATHS = (
    (startup_failed, 1, "its log shows that the engine failed to start and has not been started again"),
    (engine_processes, 0, "no engine process is left"),
    (engines_lost, 1, "the process of one of its engines has ended"),
    (engine_death_logged, 1, "its log reports that the engine died, and nothing has started since"),
    (successful_scrapes, 0, "/metrics answered before and has stopped answering"),
)
"""What shows that a server is dead: the value that does, and the reason in words."""
SHUT_DOWN = "it was shut down in order, as its log shows, and nothing has started since"
ENDING = (
    "it was told to stop, as its log shows, and its API server still runs: vLLM waits for open connections without a "
    "limit; after a grace period (Kubernetes: 30 s), end it with SIGKILL"
)


def _judge_one(subject: Subject, queries: QueryCache) -> Progress | str:
    """The state of an engine, or why it is unknown."""
    deaths = _deaths(subject, queries)
    if deaths:
        return Progress(subject, "dead", deaths)
    if _last(serves, INSTANCE, subject, queries, queries.holding(max(queries.source.interval, 1.0))) == 0:
        return _silent(subject, queries)
    state = _engine_state(*(_last(signal, ENGINE, subject, queries) for signal in SIGNALS))
    if state is None:
        has_engine = "engine" in dict(subject) or _last(requests_in_flight_peak, ENGINE, subject, queries)
        return TOO_SHORT if has_engine else NO_VLLM
    if state[0] != "busy":
        state = _beyond_gauges(state, subject, queries)
    proves_nothing = state[1] == STILL and _last(kv_cache_usage_peak, ENGINE, subject, queries) is None
    return NO_USAGE if proves_nothing else Progress(subject, *state)


def _beyond_gauges(state: tuple[State, str], subject: Subject, queries: QueryCache) -> tuple[State, str]:
    """The state of an engine that is not busy, by what shows why."""
    if _last(asleep, ENGINE, subject, queries):
        level = _last(sleep_level, ENGINE, subject, queries) or 0.0
        return "asleep", f"{SLEEPS.get(int(level), 'at an unknown sleep level')}; {WAKES_UP}"
    if _last(scheduler_paused, ENGINE, subject, queries):
        return "asleep", PAUSED
    if _last(requests_not_admitted, ENGINE, subject, queries):
        return "stalled", REFUSED
    if state[0] == "idle" and _last(ranks_out_of_step, INSTANCE, subject, queries):
        return "stalled", DIVERGED
    if state[0] in ("idle", "slow") and _last(requests_stuck_or_stopped, ENGINE, subject, queries):
        return "stalled", HALTED
    return state


def _deaths(subject: Subject, queries: QueryCache) -> str:
    """What shows that it is dead, "" where nothing does."""
    window = queries.live("15s")
    if any(_last(signal, INSTANCE, subject, queries, window) for signal in (tokens_or_shutdown, start_under_way)):
        return ""
    found = [why for signal, dead, why in DEATHS if _last(signal, INSTANCE, subject, queries, window) == dead]
    return "; ".join(found)


def _silent(subject: Subject, queries: QueryCache) -> Progress | str:
    """The state of a server whose /metrics page does not answer at present."""
    if _last(starting, INSTANCE, subject, queries):
        return Progress(subject, "starting", STARTS)
    if _last(shut_down, INSTANCE, subject, queries):
        return _shut_down(subject, queries)
    if _last(serves, INSTANCE, subject, queries, queries.whole):
        return GONE
    if _last(processes, INSTANCE, subject, queries):
        return Progress(subject, "starting", THERE)
    return NO_VLLM if _last(endpoint_without_vllm, INSTANCE, subject, queries, queries.whole) else NEVER


def _shut_down(subject: Subject, queries: QueryCache) -> Progress | str:
    """Of a server that was told to stop."""
    if _last(start_under_way, INSTANCE, subject, queries):
        return Progress(subject, "starting", THERE)
    return ENDING if _last(processes, INSTANCE, subject, queries) else SHUT_DOWN


SIGNALS = (progress, requests_in_flight_peak, requests_in_flight, requests_stuck, steps_per_second)


def _engine_state(
    moved: float | None, most: float | None, least: float | None, stuck: float | None, steps: float | None
) -> tuple[State, str] | None:
    if moved is None or most is None or least is None:
        return None
    if stuck:
        return "stalled", f"{plural(round(stuck), 'request')} in flight, and no token or request moves"
    if moved == 0:
        return _still(most, least)
    if steps is not None and steps < SLOW_STEPS and least > 0:
        return "slow", f"{number(steps)} engine steps per second with requests in flight all the time"
    return "busy", "tokens are generated"


def _still(most: float, least: float) -> tuple[State, str]:
    if most == 0:
        return "idle", IDLE
    return "slow", STILL if least > 0 else "a request has arrived and nothing has moved yet"


def _last(
    signal: Signal, per: tuple[str, ...], subject: Subject, queries: QueryCache, window: Window | None = None
) -> float | None:
    """The signal's value for a subject at the last instant, None where there is none."""
    row = queries.ask(signal, per, window or queries.live("30s")).of(subject)
    return None if row is None or np.isnan(row[-1]) else float(row[-1])
