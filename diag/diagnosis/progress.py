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
from diag.core.declarations import PACKAGE, read
from diag.core.formatting import listed, number, plural, quantity
from diag.core.incident import Signal
from diag.core.metric_prefix import FINISHED, GENERATED, PROMPTED, RUNNING, WAITING
from diag.core.subjects import Subject, in_words
from diag.diagnosis.query_cache import QueryCache, Window
from diag.exposition.scrapes import Target
from diag.knowledge import signals
from diag.knowledge.known_failures import KnownFailure
from diag.knowledge.signals import running_value
from diag.sources.observation import Observation, Origin, observation

State = Literal["idle", "asleep", "faulted", "busy", "slow", "stalled", "starting", "dead"]
ENGINE, INSTANCE = ("instance", "engine"), ("instance",)
SLOW_STEPS = 1.0
"""Engine steps per second below which an engine at work is called slow: each step then stalls its streams."""
NEARLY_ALL = 0.99
"""The share of failed answers from which a server serves errors alone."""
REASONS = read(PACKAGE / "diagnosis" / "reasons.toml", dict[str, dict[str, str]])
WHY = REASONS["progress"]
LOG_IS_READ = 'max by (instance) (last_over_time(diag_scrape_success{collector="log"}[$window]))'
OTHERWISE = ("lost", "max by (instance) (last_over_time(diag_vllm_lost[$window]))"), ("late", "$page_late")
OFTEN = 0.75
"""The share of successful scrapes below which those that fail are the reason why nothing is known."""
COUNTERS = (GENERATED, PROMPTED, FINISHED, RUNNING, WAITING)
DEATHS = (
    (signals.startup_failed, 1, "its log shows that the engine failed to start and has not been started again"),
    (signals.api_server_stopped, 1, "the kernel says that its API server is stopped, and /metrics does not answer"),
    (signals.engine_dead_by_health, 1, "GET /health is answered with HTTP 503, as vLLM does for a dead engine alone"),
    (signals.engine_process_missing, 1, "no engine process is left"),
    (signals.engines_lost, 1, "the process of one of its engines has ended"),
    (signals.engine_death_logged, 1, "its log reports that the engine died, and nothing has started since"),
    ("$page_gone", 1, "/metrics answered before and has stopped answering"),
)
"""Signals that show that a server is dead: each with the value that does, and the reason in words."""
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
UNREADY = ("asleep", "faulted", "starting", *FAILED)


class Progress(NamedTuple):
    """The state of one engine, or of an instance that is dead, at the last instant, and the reason."""

    subject: Subject
    state: State
    reason: str


class NotJudged(NamedTuple):
    """A reason why finding no incident does not mean health; `subject` is () if it concerns all subjects.

    `told` is the failure that a log names all the same.
    """

    why: str
    subject: Subject = ()
    told: KnownFailure | None = None

    @property
    def sentence(self) -> str:
        """The reason, with the subject."""
        return f"{in_words(self.subject)}: {self.why}" if self.subject else self.why


def owed_and_still(engines: tuple[Progress, ...]) -> bool:
    """Return True if some engine has work and does not move, but cannot be called stalled yet: observe longer."""
    return any(engine.reason == WHY["still"] for engine in engines)


def judge(queries: QueryCache) -> tuple[tuple[Progress, ...], tuple[NotJudged, ...]]:
    """Return each engine's progress, and why that of others is unknown; ordered by subject.

    The health of an engine that is still starting, or stands still with work to do, is unknown as well. A headless
    node has no progress of its own: that of its server counts.
    """
    judged: list[Progress] = []
    unknown: list[NotJudged] = []
    headless: list[NotJudged] = []
    for subject in queries.subjects(ENGINE):
        if queries.is_gone(subject):
            continue
        last = _LastValues(subject, queries)
        if last.instance(running_value("headless")) and last.instance(signals.processes):
            headless.append(NotJudged(WHY["headless"], subject))
            continue
        state, reason = _judge_engine(last)
        if state is not None:
            judged.append(Progress(subject, state, reason))
        if state in (None, "starting") or reason == WHY["still"]:
            unknown.append(NotJudged(reason, subject))
    return tuple(judged), tuple(unknown if judged else [*unknown, *headless])


class _LastValues(NamedTuple):
    """The values of signals and expressions for one subject at the last instant."""

    subject: Subject
    queries: QueryCache

    def engine(self, signal: Signal, window: Window | None = None) -> float | None:
        """Return a signal of the engine, by default over 30 s and three scrapes; None for no value."""
        lately = max(30.0, LAST_INTERVALS * self.queries.source.interval)
        return self._value(signal, ENGINE, window or self.queries.holding(min(lately, self.queries.span or lately)))

    def instance(self, signal: Signal | str, window: Window | None = None) -> float | None:
        """Return a signal of the engine's server; None for no value."""
        return self._value(signal, INSTANCE, window or self.queries.live("30s"))

    def _value(self, signal: Signal | str, per: tuple[str, ...], window: Window) -> float | None:
        row = self.queries.ask(signal, per, window).of(self.subject)
        return None if row is None or np.isnan(row[-1]) else float(row[-1])


Judgement = tuple[State | None, str]
"""The state of an engine and the reason for it; None and the reason why it is unknown."""


def _judge_engine(last: _LastValues) -> Judgement:
    queries, lately = last.queries, last.queries.live(LATELY)
    lives = signals.signs_of_life, signals.start_under_way, signals.elastic_scaling
    if not any(last.instance(signal, lately) for signal in lives):
        if last.instance(signals.server_left_orphans, lately):
            return "dead", WHY["orphaned"]
        if deaths := [why for signal, dead, why in DEATHS if last.instance(signal, lately) == dead]:
            return "dead", "; ".join(deaths)
    if last.instance(signals.serves, queries.holding(max(queries.source.interval, 1.0))) == 0:
        return _judge_without_page(last)

    state, reason = _judge_by_gauges(last)
    if state is None:
        if not ("engine" in dict(last.subject) or last.engine(signals.requests_in_flight_peak)):
            return None, WHY["no_vllm"]
        counters = {name: f"sum by ($by) (last_over_time({name}[$window]))" for name in COUNTERS}
        rows = {name: queries.ask(promql, ENGINE, queries.whole).of(last.subject) for name, promql in counters.items()}
        if lacks := [name for name, row in rows.items() if row is None]:
            return None, WHY["uncounted"].format(listed(lacks))
        if last.instance(signals.serves) is None:
            return None, WHY["left"]
        succeed = last.instance(signals.successful_scrapes, queries.whole)
        return None, WHY["too_short" if succeed is None or succeed >= OFTEN else "intermittent"]
    if state != "busy":
        if last.engine(signals.asleep):
            level = str(int(last.engine(signals.sleep_level) or 0.0))
            depth = REASONS["sleeps"].get(level, "at an unknown sleep level")
            state, reason = "asleep", f"{depth}; {WHY['wakes_up']}"
        elif last.engine(signals.scheduler_paused):
            state, reason = "asleep", WHY["paused"]
        elif last.instance(signals.waits_for_recovery):
            state, reason = "faulted", WHY["recovers"]
        elif last.engine(signals.changes_under_way):
            state, reason = "asleep", WHY["changes"]
        elif last.engine(signals.requests_not_admitted):
            state, reason = "stalled", WHY["refused"]
        elif state == "idle" and last.instance(signals.ranks_out_of_step):
            state, reason = "stalled", WHY["diverged"]
        elif state == "idle" and last.instance(signals.works_unseen) and last.instance(signals.progress) == 0:
            state, reason = "slow", WHY["computes"]
    halted = last.engine(signals.requests_stuck_or_stopped, lately) and last.engine(signals.progress, lately) == 0
    if halted and state in ("busy", "idle", "slow"):
        state, reason = "stalled", WHY["halted"]
    if state in ("idle", "slow") and last.instance(signals.page_copied) and not last.engine(signals.progress):
        return None, WHY["copied"]
    if reason == WHY["still"] and last.engine(signals.kv_cache_usage_peak) is None:
        return None, WHY["no_usage"]
    is_idle = state == "idle"
    if is_idle and last.instance(signals.death_claimed, lately) and not last.instance(signals.signs_of_life, lately):
        return None, WHY["claimed"]
    if state in ("idle", "busy") and (last.instance(signals.failed_share) or 0) >= NEARLY_ALL:
        failed = number(last.instance(signals.failed_answers) or 0)
        return "busy", f"all answers at inference routes are errors (HTTP 5xx): {failed} of {failed}"
    return state, reason


def _judge_without_page(last: _LastValues) -> Judgement:
    """Judge a server whose /metrics page does not answer at present."""
    if last.instance(signals.starting):
        return "starting", WHY["starts"]
    if last.instance(signals.elastic_scaling):
        return "starting", WHY["scales"]
    whole = last.queries.whole
    has_log = bool(last.instance(LOG_IS_READ, whole))
    there = WHY["there"] + ("" if has_log else WHY["log_would_show_start"])
    if last.instance(signals.shut_down):
        if last.instance(signals.start_under_way):
            return "starting", there
        return None, WHY["ending" if last.instance(signals.processes) else "shut_down"]
    if last.instance(signals.serves, whole):
        shown = (why for why, query in OTHERWISE if last.instance(query, last.queries.live(LATELY)))
        return None, WHY[next(shown, "gone")]
    if last.instance(signals.processes):
        return "starting", there
    if last.instance(signals.endpoint_without_vllm, whole):
        return None, WHY["no_vllm"]
    return None, WHY["never"] + WHY["log_shows_not" if has_log else "log_would_show"]


def _judge_by_gauges(last: _LastValues) -> Judgement:
    """Judge an engine by vLLM's own gauges and counters; they have too few samples if its state is unknown."""
    moved, most, least, stuck, steps = (
        last.engine(signal)
        for signal in (
            *(signals.progress, signals.requests_in_flight_peak, signals.requests_in_flight),
            *(signals.requests_stuck, signals.steps_per_second),
        )
    )
    if moved is None or most is None or least is None:
        return None, ""
    if stuck:
        return "stalled", f"{plural(round(stuck), 'request')} in flight, and no token or request moves"
    if moved == 0 and most == 0:
        return "idle", WHY["idle"]
    if moved == 0:
        return "slow", WHY["still"] if least > 0 else "a request has arrived and nothing has moved yet"
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
        engines, unknown = judge(queries)
        liveness = _sentences(engines) or f"cannot tell: {'; '.join(item.sentence for item in unknown)}"
        last_page = self._target.scrapes[-1].page
        unready = _sentences([engine for engine in engines if engine.state in UNREADY])
        if not unready and not (last_page and last_page.layout.vllm):
            unready = "vLLM's /metrics does not answer"
        failing = [engine for engine in engines if engine.state in FAILED]
        if not failing:
            self._failing_since = None
            return Health(True, not unready, liveness, unready or liveness)

        lately = queries.live(LATELY)
        proofs = (signals.processes_stopped, lately), (signals.ranks_out_of_step, queries.live("30s"))
        stopped, missing = (
            any(values[-1] > 0 for values in queries.ask(signal, INSTANCE, window).values())
            for signal, window in proofs
        )
        is_proven = stopped or missing or any(engine.state == "dead" for engine in failing)
        if self._failing_since is None:  # a process counts as stopped if it was so in the whole window
            self._failing_since = at - round(1000 * lately.seconds) if stopped else at
        left = (HELD if is_proven else HELD_UNPROVEN) - (at - self._failing_since) / 1000
        waits = f" (the answer is 503 if that lasts for another {quantity(left, 'seconds')})" if left > 0 else ""
        return Health(left > 0, False, _sentences(failing) + waits, unready)


def _sentences(engines: Sequence[Progress]) -> str:
    return "; ".join(f"{in_words(engine.subject)} is {engine.state}: {engine.reason}" for engine in engines)
