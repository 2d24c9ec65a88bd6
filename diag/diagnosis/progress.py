"""Forward progress, judged before anything else: each engine is idle, asleep, busy, slow, stalled, starting or dead.

Gauges freeze with the engine, so one that got stuck while idle looks idle, unless its ranks or a probe show otherwise.
Until a start is over there is no /metrics page: the log and the process table show it. `Liveness` judges one server as
a probe does: vLLM's own /health answers 200 through a hang, and a probe that only measures time restarts a server in a
long prefill.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from diag.core.contract import Contract
from diag.core.formatting import listed, number, plural, quantity
from diag.core.incident import Signal
from diag.core.subjects import Subject, in_words
from diag.diagnosis.query_cache import QueryCache, Window
from diag.exposition.scrapes import Target
from diag.knowledge.signals import (
    api_server_stopped,
    asleep,
    changes_under_way,
    death_claimed,
    elastic_scaling,
    endpoint_without_vllm,
    engine_dead_by_health,
    engine_death_logged,
    engine_process_missing,
    engines_lost,
    failed_answers,
    failed_share,
    kv_cache_usage_peak,
    progress,
    requests_in_flight,
    requests_in_flight_peak,
    requests_not_admitted,
    requests_stuck,
    requests_stuck_or_stopped,
    scheduler_paused,
    server_left_orphans,
    serves,
    shut_down,
    signs_of_life,
    sleep_level,
    steps_per_second,
    successful_scrapes,
    works_unseen,
)
from diag.knowledge.signals.expressions import running_value
from diag.knowledge.signals.peers import ranks_out_of_step
from diag.knowledge.signals.resources import processes_stopped
from diag.knowledge.signals.startup import processes, start_under_way, starting, startup_failed
from diag.sources.observation import Observation, Origin, observation

State = Literal["idle", "asleep", "busy", "slow", "stalled", "starting", "dead"]
ENGINE, INSTANCE = ("instance", "engine"), ("instance",)
SLOW_STEPS = 1.0
"""Engine steps per second below which an engine at work is called slow: each step then stalls its streams."""
NEARLY_ALL = 0.99
"""The share of failed answers from which a server serves errors alone."""
STILL = (
    "requests are in flight and nothing has moved; one very long prefill, or a step that compiles kernels, looks the "
    "same for up to two minutes"
)
DIVERGED = "no progress while one rank uses no CPU and its peers busy-wait; the gauges froze at 0 requests in flight"
HALTED = "the kernel says that a process of the engine is stopped"
IDLE = "no request in flight; an engine that got stuck while idle looks the same here, --probe tells the two apart"
COMPUTES = (
    "nothing has moved, but a GPU computes or the engine uses a whole CPU core: one long step, whose requests vLLM "
    "counts at its end"
)
SLEEPS = {
    0: "scheduling is paused (sleep level 0), with the weights in place",
    1: "sleep level 1, with the weights in host memory and no KV cache",
    2: "sleep level 2, with weights and KV cache discarded",
}
"""Reasons by the level of vllm:engine_sleep_state."""
WAKES_UP = "it serves no requests until POST /wake_up; requests that arrive wait, and no metric counts them"
PAUSED = (
    "scheduling is paused (POST /pause), with the weights in place; it serves no requests until POST /resume; requests "
    "that arrive wait, and no metric counts them"
)
CHANGES = (
    "a weight update, a sleep, a wake-up or an elastic scaling is under way: nothing is scheduled until the call is "
    "answered"
)
SCALES = "it changes the number of its data-parallel engines, and answers HTTP 503 until it has switched"
REFUSED = "requests wait, none runs and nothing moves: the scheduler admits no requests"
NEVER = "/metrics never answered: the server is starting, failed to start, or the address is wrong"
LOG_WOULD_SHOW, LOG_SHOWS_NOT = "; its log would show which (--log)", "; its log does not show which"
LOG_IS_READ = 'max by (instance) (last_over_time(diag_scrape_success{collector="log"}[$window]))'
GONE = "the last scrapes failed, but too few of them to call the server dead; observe it for longer"
NO_VLLM = "/metrics has no vLLM progress metrics: is it vLLM, and does it run without --disable-log-stats?"
NO_USAGE = (
    "requests are in flight and no token moves; a prefill in chunks looks the same here, because /metrics has no "
    "KV cache usage"
)
TOO_SHORT = "too few scrapes to see whether anything moves; observe it for longer"
OFTEN, INTERMITTENT = (
    0.75,
    "scrapes fail again and again, and those that succeed are too far apart to see whether anything moves; mend the "
    "page or the network first",
)
"""The share of successful scrapes below which those that fail are the reason, and its words."""
COUNTERS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:request_success_total")
UNCOUNTED = "its page lacks {}: without it nobody sees whether anything moves"
CLAIMED = (
    "its log reports the death of its engine, and the page of an idle server proves its API server alone; GET /health,"
    " a request (--probe) or the processes of its host tell"
)
STARTS = "its log shows a start in progress, and /metrics does not answer yet; diagnose it again once it does"
THERE = "its processes are running and /metrics does not answer yet"
HEADLESS = "it is a headless node, which has no API server: diagnose it together with the node that has it"
LOG_WOULD_SHOW_START = "; its log would show how far the start is (--log)"
DEATHS = (
    (startup_failed, 1, "its log shows that the engine failed to start and has not been started again"),
    (api_server_stopped, 1, "the kernel says that its API server is stopped, and /metrics does not answer"),
    (engine_dead_by_health, 1, "GET /health is answered with HTTP 503, as vLLM does for a dead engine alone"),
    (engine_process_missing, 1, "no engine process is left"),
    (engines_lost, 1, "the process of one of its engines has ended"),
    (engine_death_logged, 1, "its log reports that the engine died, and nothing has started since"),
    (successful_scrapes, 0, "/metrics answered before and has stopped answering"),
)
"""Signals that show that a server is dead: each with the value that does, and the reason in words."""
ORPHANED = "its API server has ended, and an engine process that it started still runs"
SHUT_DOWN = "it was shut down in order, as its log shows, and nothing has started since"
ENDING = (
    "it was told to stop, as its log shows, and its API server still runs: vLLM waits for open connections without a "
    "limit; after a grace period (Kubernetes: 30 s), end it with SIGKILL"
)
KEPT = 600_000
"""Milliseconds of scrapes that a probe judges by: the signals of progress look back five minutes."""
MOST_VALUES = 5_000_000
"""Scrapes times series, including series that are gone again, above which a probe discards all scrapes."""
LAST_INTERVALS = 2
"""Scrape intervals without a change that show a standstill: three equal pages."""
LATELY = "15s"
"""Window that shows a dead server or a stopped process."""
HELD, HELD_UNPROVEN = 25.0, 90.0
"""Seconds for which an engine has to be stalled or dead before a restart, from the first scrape that shows it, and for
which it has to stand still if only its gauges show that: a long prefill looks the same in the gauges, and a restart
during one is wrong."""
FAILED = ("stalled", "dead")
UNREADY = ("asleep", "starting", *FAILED)


class Progress(NamedTuple):
    """The state of one engine, or of an instance that is dead, at the last instant, and the reason."""

    subject: Subject
    state: State
    reason: str


class NotJudged(NamedTuple):
    """A reason why finding no incident does not mean health; `subject` is () if it concerns all subjects."""

    why: str
    subject: Subject = ()

    @property
    def sentence(self) -> str:
        """The reason, with the subject."""
        return f"{in_words(self.subject)}: {self.why}" if self.subject else self.why


def owed_and_still(found: tuple[Progress, ...]) -> bool:
    """Return True if some engine has work and does not move, but cannot be called stalled yet: observe longer."""
    return any(progress.reason == STILL for progress in found)


def judge(queries: QueryCache) -> tuple[tuple[Progress, ...], tuple[NotJudged, ...]]:
    """Return each engine's progress, and why that of others is unknown; ordered by subject.

    The health of an engine that is still starting, or stands still with work to do, is unknown as well. A headless
    node has no progress of its own: that of its server counts.
    """
    known: list[Progress] = []
    unknown: list[NotJudged] = []
    headless: list[NotJudged] = []
    for subject in queries.subjects(ENGINE):
        if not queries.is_gone(subject):
            last = _LastValues(subject, queries)
            if last.instance(running_value("headless")) and last.instance(processes):
                headless.append(NotJudged(HEADLESS, subject))
                continue
            found = _judge_engine(subject, queries)
            if isinstance(found, Progress):
                known.append(found)
            if isinstance(found, str) or found.state == "starting" or found.reason == STILL:
                unknown.append(NotJudged(found if isinstance(found, str) else found.reason, subject))
    return tuple(known), tuple(unknown if known else [*unknown, *headless])


class _LastValues(NamedTuple):
    """The values of signals for one subject at the last instant."""

    subject: Subject
    queries: QueryCache

    def engine(self, signal: Signal, window: Window | None = None) -> float | None:
        """Return a signal of the engine, by default over 30 s and three scrapes; None for no value."""
        lately = max(30.0, LAST_INTERVALS * self.queries.source.interval)
        return self._value(signal, ENGINE, window or self.queries.holding(min(lately, self.queries.span or lately)))

    def instance(self, signal: Signal, window: Window | None = None) -> float | None:
        """Return a signal of the engine's server; None for no value."""
        return self._value(signal, INSTANCE, window or self.queries.live("30s"))

    def _value(self, signal: Signal, per: tuple[str, ...], window: Window) -> float | None:
        row = self.queries.ask(signal, per, window).of(self.subject)
        return None if row is None or np.isnan(row[-1]) else float(row[-1])


def _judge_engine(subject: Subject, queries: QueryCache) -> Progress | str:
    """Return the state of an engine, or why it is unknown."""
    last = _LastValues(subject, queries)
    lately = queries.live(LATELY)
    if not any(last.instance(signal, lately) for signal in (signs_of_life, start_under_way, elastic_scaling)):
        if last.instance(server_left_orphans, lately):
            return Progress(subject, "dead", ORPHANED)
        deaths = [why for signal, dead, why in DEATHS if last.instance(signal, lately) == dead]
        if deaths:
            return Progress(subject, "dead", "; ".join(deaths))
    if last.instance(serves, queries.holding(max(queries.source.interval, 1.0))) == 0:
        return _judge_without_page(last)

    state = _state_by_gauges(last)
    if state is None:
        if not ("engine" in dict(subject) or last.engine(requests_in_flight_peak)):
            return NO_VLLM
        counted = (f"sum by ($by) (last_over_time({name}[$window]))" for name in COUNTERS)
        rows = zip(COUNTERS, (queries.ask(each, ENGINE, queries.whole).of(subject) for each in counted), strict=True)
        lacks = [name for name, row in rows if row is None]
        if lacks:
            return UNCOUNTED.format(listed(lacks))
        succeed = last.instance(successful_scrapes, queries.whole)
        return TOO_SHORT if succeed is None or succeed >= OFTEN else INTERMITTENT
    if state[0] != "busy":
        if last.engine(asleep):
            level = last.engine(sleep_level) or 0.0
            state = "asleep", f"{SLEEPS.get(int(level), 'at an unknown sleep level')}; {WAKES_UP}"
        elif last.engine(scheduler_paused):
            state = "asleep", PAUSED
        elif last.engine(changes_under_way):
            state = "asleep", CHANGES
        elif last.engine(requests_not_admitted):
            state = "stalled", REFUSED
        elif state[0] == "idle" and last.instance(ranks_out_of_step):
            state = "stalled", DIVERGED
        elif state[0] == "idle" and last.instance(works_unseen) and last.instance(progress) == 0:
            state = "slow", COMPUTES
    halted = last.engine(requests_stuck_or_stopped, lately) and last.engine(progress, lately) == 0
    if halted and state[0] in ("busy", "idle", "slow"):
        state = "stalled", HALTED
    if state[1] == STILL and last.engine(kv_cache_usage_peak) is None:
        return NO_USAGE
    if state[0] == "idle" and last.instance(death_claimed, lately) and not last.instance(signs_of_life, lately):
        return CLAIMED
    if state[0] in ("idle", "busy") and (last.instance(failed_share) or 0) >= NEARLY_ALL:
        failed = number(last.instance(failed_answers) or 0)
        state = "busy", f"all answers at inference routes are errors (HTTP 5xx): {failed} of {failed}"
    return Progress(subject, *state)


def _judge_without_page(last: _LastValues) -> Progress | str:
    """Return the state of a server whose /metrics page does not answer at present, or why it is unknown."""
    if last.instance(starting):
        return Progress(last.subject, "starting", STARTS)
    if last.instance(elastic_scaling):
        return Progress(last.subject, "starting", SCALES)
    log = last.queries.ask(LOG_IS_READ, INSTANCE, last.queries.whole).of(last.subject)
    has_log = log is not None and bool(np.nan_to_num(log[-1]))
    there = THERE if has_log else THERE + LOG_WOULD_SHOW_START
    if last.instance(shut_down):
        if last.instance(start_under_way):
            return Progress(last.subject, "starting", there)
        return ENDING if last.instance(processes) else SHUT_DOWN
    if last.instance(serves, last.queries.whole):
        return GONE
    if last.instance(processes):
        return Progress(last.subject, "starting", there)
    never = NEVER + (LOG_SHOWS_NOT if has_log else LOG_WOULD_SHOW)
    return NO_VLLM if last.instance(endpoint_without_vllm, last.queries.whole) else never


def _state_by_gauges(last: _LastValues) -> tuple[State, str] | None:
    """Return the state that vLLM's own gauges and counters show; None if there are too few samples of them."""
    moved, most, least = map(last.engine, (progress, requests_in_flight_peak, requests_in_flight))
    stuck, steps = last.engine(requests_stuck), last.engine(steps_per_second)
    if moved is None or most is None or least is None:
        return None
    if stuck:
        return "stalled", f"{plural(round(stuck), 'request')} in flight, and no token or request moves"
    if moved == 0 and most == 0:
        return "idle", IDLE
    if moved == 0:
        return "slow", STILL if least > 0 else "a request has arrived and nothing has moved yet"
    if steps is not None and steps < SLOW_STEPS and least > 0:
        return "slow", f"{number(steps)} engine steps per second with requests in flight all the time"
    return "busy", "tokens are generated"


# -- as a probe -------------------------------------------------------------------------------------------------------


class Health(NamedTuple):
    """The answers of a probe: alive, and ready, each with a sentence. A server whose state is unknown is alive."""

    alive: bool
    ready: bool
    liveness: str
    readiness: str


def unknown_health(why: str) -> Health:
    """Return the answer of a probe without data: alive, which prevents a restart, and not ready."""
    return Health(alive=True, ready=False, liveness=f"cannot tell: {why}", readiness=f"cannot tell: {why}")


class Liveness:
    """Gathers the pages of one exporter and judges them."""

    def __init__(self, instance: str, every: float) -> None:
        self._target = Target(instance)
        self._every = every
        self._failing_since: int | None = None

    def seen(self) -> Observation:
        """Return the observation of all pages that are kept."""
        return observation(Origin("scrape", self._target.instance, self._every), [self._target], {})

    def observe(self, at: int, page: bytes) -> Health:
        """Add a page that was taken at unix milliseconds, and judge all pages until then."""
        if self._target.size > MOST_VALUES:
            self._target = Target(self._target.instance)
        self._target.scrapes[:] = [scrape for scrape in self._target.scrapes if scrape.at >= at - KEPT]
        self._target.add(at, page)
        queries = QueryCache(self.seen(), Contract())
        known, unknown = judge(queries)

        liveness = _sentences(known) or f"cannot tell: {'; '.join(item.sentence for item in unknown)}"
        last_page = self._target.scrapes[-1].page
        unready = _sentences([progress for progress in known if progress.state in UNREADY])
        if not unready and not (last_page and last_page.layout.vllm):
            unready = "vLLM's /metrics does not answer"
        failing = [progress for progress in known if progress.state in FAILED]
        if not failing:
            self._failing_since = None
            return Health(True, not unready, liveness, unready or liveness)

        lately = queries.live(LATELY)
        stopped, missing = (
            any(values[-1] > 0 for values in queries.ask(signal, INSTANCE, window).values())
            for signal, window in ((processes_stopped, lately), (ranks_out_of_step, queries.live("30s")))
        )
        is_proven = stopped or missing or any(progress.state == "dead" for progress in failing)
        if self._failing_since is None:  # a process counts as stopped if it was so in the whole window
            self._failing_since = at - round(1000 * lately.seconds) if stopped else at
        left = (HELD if is_proven else HELD_UNPROVEN) - (at - self._failing_since) / 1000
        waits = f" (the answer is 503 if that lasts for another {quantity(left, 'seconds')})" if left > 0 else ""
        return Health(left > 0, False, _sentences(failing) + waits, unready)


def _sentences(known: Sequence[Progress]) -> str:
    return "; ".join(f"{in_words(progress.subject)} is {progress.state}: {progress.reason}" for progress in known)
