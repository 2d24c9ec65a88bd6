"""Queries to a source of telemetry: the window that fits its samples, each expression evaluated once."""

from collections.abc import Mapping
from threading import Lock
from typing import NamedTuple

from diag.core.contract import Contract
from diag.core.debug_log import timed
from diag.core.errors import NotAnswered, QueryFailed
from diag.core.incident import Incident, Part, Signal, seconds
from diag.core.metric_prefix import GENERATED, RUNNING, WAITING
from diag.core.subjects import Floats, Instants, Rows, Subject, instance_name
from diag.knowledge.formulas import formula
from diag.promql import Formula
from diag.sources.source import TelemetrySource

FEWEST_INTERVALS = 3
"""Scrape intervals in a window, at least; such a window holds one scrape more: four."""
ENGINES = f'count by (instance, engine) (last_over_time({{__name__=~"{RUNNING}|{WAITING}|{GENERATED}"}}[$window]))'
GPUS = 'count by (instance, gpu) (last_over_time({__name__=~"diag_gpu_(up|power_watts|utilization_ratio)"}[$window]))'
INSTANCES = "count by (instance) (count_over_time(up[$window]))"
VERSIONS = "count by (instance, version) (last_over_time(diag_vllm_info[$window]))"
MODELS = f"count by (instance, model_name) (last_over_time({RUNNING}[$window]))"
"""Served models by the page itself: /v1/models also lists LoRA adapters, which are no other model."""
GPU_NAMES = "count by (instance, name) (last_over_time(diag_gpu_info[$window]))"
PARTS = {"engine": ENGINES, "gpu": GPUS}
"""Queries that list the engines and GPUs of the instances, by label. dcgm-exporter has no diag_gpu_up."""


class SourceAtInstants(NamedTuple):
    """A source judged at other instants; implements the protocol `TelemetrySource`."""

    source: TelemetrySource
    instants: Instants

    @property
    def first(self) -> int:
        """The first of the instants."""
        return int(self.instants[0])

    @property
    def interval(self) -> float:
        """The usual time between two samples of one target."""
        return self.source.interval

    def ask(self, promql: Formula, instants: Instants) -> Mapping[Subject, Floats]:
        """Return one row per subject."""
        return self.source.ask(promql, instants)


class _Result:
    """Rows of one query; `lock` is held while a thread fetches them, so that the others wait for the rows."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.rows: Rows | None = None


class Window(NamedTuple):
    """Length of the range `$window`: `seconds` of samples, and its text in PromQL."""

    seconds: float
    text: str


class QueryCache:
    """A telemetry source under one contract; each distinct expression is evaluated once.

    `gone` are the instances that no longer exist at the last instant; their state at that instant is not judged.
    `unanswered` are the expressions that the source refused: they have no rows, which does not mean that the source
    has no such series.
    """

    def __init__(self, source: TelemetrySource, contract: Contract) -> None:
        self.source = source
        self.contract = contract
        self.gone: frozenset[str] = frozenset()
        self.unanswered: set[str] = set()
        self._cache: dict[tuple[str, int, int], _Result] = {}
        self._subjects: dict[tuple[str, ...], list[Subject]] = {}
        self._instants: dict[Window, Instants] = {}
        self._times: dict[Window, tuple[float, ...]] = {}

    def at(self, instants: Instants) -> "QueryCache":
        """Return a cache of the same source, judged at other instants."""
        return QueryCache(SourceAtInstants(self.source, instants), self.contract)

    @property
    def span(self) -> float:
        """Seconds from the first sample to the last instant."""
        return float(self.source.instants[-1] - self.source.first) / 1000

    @property
    def has_few_scrapes(self) -> bool:
        """True if no window holds four scrapes: conditions on gauges need three, so one missed scrape blinds them."""
        return self.span < (FEWEST_INTERVALS - 0.5) * self.source.interval

    @property
    def whole(self) -> Window:
        """A window that holds all samples."""
        return self.holding(max(self.span, self.live("30s").seconds))

    def holding(self, wanted: float) -> Window:
        """Return a window over `wanted` seconds of samples: one interval longer, because windows are open on the left.

        The text is a PromQL duration as people write it, so that it equals an incident's own window and is evaluated
        once.
        """
        millis = round((wanted + self.source.interval) * 1000)
        size, unit = next((pair for pair in ((60_000, "m"), (1000, "s")) if millis % pair[0] == 0), (1, "ms"))
        return Window(wanted, f"{millis // size}{unit}")

    def live(self, window: str) -> Window:
        """Return the window, lengthened if it holds too few scrapes; never longer than the span."""
        wanted = max(seconds(window), FEWEST_INTERVALS * self.source.interval)
        return self.holding(min(wanted, self.span) if self.span > 0 else wanted)

    def window(self, incident: Incident) -> Window:
        """Return the window to judge an incident over: the live one, or its alert's if the samples span it twice.

        An outage may be shorter than its alert's window: it is judged over the live one. If both windows have the same
        range, it is the alert's: a signal that other incidents share is asked for once.
        """
        alert, live = Window(seconds(incident.window), incident.window), self.live(incident.live_window)
        keeps_live = incident.outage and live.text != alert.text
        if self.span >= 2 * alert.seconds >= 2 * FEWEST_INTERVALS * self.source.interval and not keeps_live:
            return alert
        return live

    def instants(self, window: Window) -> Instants:
        """Return every instant from the first full window on; if no window is full, the last instant alone."""
        if window not in self._instants:
            times = self.source.instants
            full = times[times - self.source.first >= window.seconds * 1000 - 1]
            self._instants[window] = full if len(full) else times[-1:]
        return self._instants[window]

    def times(self, window: Window) -> tuple[float, ...]:
        """Return those instants in unix seconds, once for all incidents that are judged over the window."""
        if window not in self._times:
            self._times[window] = tuple((self.instants(window) / 1000).tolist())
        return self._times[window]

    def ask(
        self, asked: Part | Signal | str, per: tuple[str, ...], window: Window, instants: Instants | None = None
    ) -> Rows:
        """Evaluate a signal, a part or an expression at every judged instant, or at `instants`."""
        at = self.instants(window) if instants is None else instants
        promql = formula(asked, per, window.text, self.contract)
        key = (promql.text, int(at[0]), len(at))
        result = self._cache.setdefault(key, _Result())
        with result.lock:
            if result.rows is None:
                try:
                    with timed("query", asked if isinstance(asked, str) else asked.id):
                        result.rows = Rows(self.source.ask(promql, at))
                except (NotAnswered, QueryFailed):  # QueryFailed: samples that no vLLM serves, such as duplicate series
                    self.unanswered.add(asked if isinstance(asked, str) else asked.promql)
                    result.rows = Rows()
        return result.rows

    def is_gone(self, subject: Subject) -> bool:
        """Return True if the subject's instance no longer exists at the last instant."""
        return instance_name(subject) in self.gone

    def subjects(self, per: tuple[str, ...]) -> list[Subject]:
        """Return the universe: every instance that was scraped and every engine or GPU that was seen on one.

        An instance without engines or GPUs stays as a subject of its own, so that a replica without telemetry stays
        visible.
        """
        if per not in self._subjects:
            instances = self.ask(INSTANCES, per, self.whole)
            parts = [self.ask(query, per, self.whole) for label, query in PARTS.items() if label in per]
            inside = [subject for part in parts for subject in part]
            seen = set(map(instance_name, inside))
            blind = (subject for subject in instances if instance_name(subject) not in seen)
            self._subjects[per] = sorted([*inside, *blind])
        return self._subjects[per]
