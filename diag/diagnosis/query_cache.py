"""Querying a source of telemetry: its protocol, the window that fits its samples, each expression once."""

from collections.abc import Mapping
from threading import Lock
from typing import NamedTuple, Protocol

from diag.core.contract import Contract
from diag.core.errors import NotAnswered, QueryFailed
from diag.core.incident import Incident, Part, Signal, seconds
from diag.core.subjects import Floats, Instants, Rows, Subject
from diag.knowledge.formulas import formula
from diag.promql import Formula

FEWEST_INTERVALS = 3
"""A window holds one scrape more than it has intervals: four."""
FEW_INTERVALS = 5
"""A live window of fewer gives way to the alert's, where the samples span at least two of that."""
ENGINES = (
    "count by (instance, engine) (last_over_time("
    '{__name__=~"vllm:num_requests_(running|waiting)|vllm:generation_tokens_total"}[$window]))'
)
GPUS = 'count by (instance, gpu) (last_over_time({__name__=~"diag_gpu_(up|power_watts|utilization_ratio)"}[$window]))'
INSTANCES = "count by (instance) (count_over_time(up[$window]))"
PARTS = {"engine": ENGINES, "gpu": GPUS}
"""What an instance has several of, by the label that distinguishes them. dcgm-exporter has no diag_gpu_up."""


class TelemetrySource(Protocol):
    """What a source of telemetry can do. `instants` are unix milliseconds, `interval` is in seconds."""

    @property
    def instants(self) -> Instants:
        """The instants to judge, ascending."""

    @property
    def first(self) -> int:
        """The time of the first sample in unix milliseconds; the first instant to judge may be later."""

    @property
    def interval(self) -> float:
        """The usual time between two samples of one target."""

    def ask(self, promql: Formula, instants: Instants) -> Mapping[Subject, Floats]:
        """One row per subject, NaN where there is no (finite) sample; NotAnswered where the query is refused."""


class _Result:
    """Rows once they are there; another thread with the same query waits for them."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.rows: Rows | None = None


class Window(NamedTuple):
    """What `$window` stands for: `seconds` of samples, and its text in PromQL."""

    seconds: float
    text: str


class QueryCache:
    """A source under one contract; each distinct expression is evaluated once.

    `gone` are the instances that no longer exist at the last instant, and whose state then is not judged. `unanswered`
    are the expressions that the source refused: they have no rows, which does not mean that there is nothing.
    """

    def __init__(self, source: TelemetrySource, contract: Contract) -> None:
        self.source = source
        self.contract = contract
        self.gone: frozenset[str] = frozenset()
        self.unanswered: set[str] = set()
        self._cache: dict[tuple[str, int, int], _Result] = {}
        self._subjects: dict[tuple[str, ...], list[Subject]] = {}

    @property
    def span(self) -> float:
        """Seconds from the first sample to the last instant."""
        return float(self.source.instants[-1] - self.source.first) / 1000

    @property
    def has_few_scrapes(self) -> bool:
        """Whether no window holds four scrapes: of gauges, which need three, one missed scrape leaves nothing."""
        return self.span < (FEWEST_INTERVALS - 0.5) * self.source.interval

    @property
    def whole(self) -> Window:
        """A window that holds everything."""
        return self.holding(max(self.span, self.live("30s").seconds))

    def holding(self, wanted: float) -> Window:
        """A window of so many seconds; being open on the left, it holds all of them with one interval more."""
        return Window(wanted, _written(round((wanted + self.source.interval) * 1000)))

    def live(self, window: str) -> Window:
        """This window, or a longer one where too few scrapes fall into it; never longer than the span."""
        wanted = max(seconds(window), FEWEST_INTERVALS * self.source.interval)
        return self.holding(min(wanted, self.span) if self.span > 0 else wanted)

    def window(self, incident: Incident) -> Window:
        """The window to judge an incident over: the live one, or its alert's where scrapes are rare and many."""
        alert = seconds(incident.window)
        rare = seconds(incident.live_window) < FEW_INTERVALS * self.source.interval
        rare = rare or incident.live_window == incident.window
        if rare and self.span >= 2 * alert >= 2 * FEWEST_INTERVALS * self.source.interval:
            return Window(alert, incident.window)
        return self.live(incident.live_window)

    def instants(self, window: Window) -> Instants:
        """Every instant from the first full window on; the last one alone where none is full."""
        times = self.source.instants
        full = times[times - self.source.first >= window.seconds * 1000 - 1]
        return full if len(full) else times[-1:]

    def ask(
        self, asked: Part | Signal | str, per: tuple[str, ...], window: Window, instants: Instants | None = None
    ) -> Rows:
        """Evaluate a signal, a part or an expression at every judged instant, or at those given."""
        at = self.instants(window) if instants is None else instants
        promql = formula(asked, per, window.text, self.contract)
        key = (promql.text, int(at[0]), len(at))
        result = self._cache.setdefault(key, _Result())
        with result.lock:
            if result.rows is None:
                result.rows = self._rows(asked if isinstance(asked, str) else asked.promql, promql, at)
        return result.rows

    def _rows(self, promql: str, filled: Formula, instants: Instants) -> Rows:
        try:
            return Rows(self.source.ask(filled, instants))
        except (NotAnswered, QueryFailed):  # the second by samples that no vLLM serves, two series for one, say
            self.unanswered.add(promql)
            return Rows()

    def is_gone(self, subject: Subject) -> bool:
        """Whether a subject's instance is among those that are gone."""
        return dict(subject).get("instance") in self.gone

    def subjects(self, per: tuple[str, ...]) -> list[Subject]:
        """The universe: every instance that was scraped and every engine or GPU that was seen on one.

        An instance without any stays as a subject of its own, so that a blind replica does not vanish.
        """
        if per not in self._subjects:
            self._subjects[per] = self._universe(per)
        return self._subjects[per]

    def _universe(self, per: tuple[str, ...]) -> list[Subject]:
        instances = self.ask(INSTANCES, per, self.whole)
        parts = [self.ask(query, per, self.whole) for label, query in PARTS.items() if label in per]
        inside = [subject for part in parts for subject in part]
        seen = {dict(subject).get("instance") for subject in inside}
        return sorted([*inside, *(alone for alone in instances if dict(alone).get("instance") not in seen)])


def _written(millis: int) -> str:
    """A PromQL duration as people write it, so that it equals an incident's own window and is evaluated once."""
    unit, name = next((scale for scale in ((60_000, "m"), (1000, "s")) if millis % scale[0] == 0), (1, "ms"))
    return f"{millis // unit}{name}"
