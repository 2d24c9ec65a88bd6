"""Asking a source of telemetry: the protocol it keeps, the window that fits its samples, each expression once."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from diag.contract import Contract
from diag.incident import fill

Subject = tuple[tuple[str, str], ...]
"""Sorted pairs of label and value, for example (("engine", "0"), ("instance", "host:8000"))."""
Floats = NDArray[np.float64]
Instants = NDArray[np.int64]

FEWEST_INTERVALS = 3
"""A window holds one scrape more than it has intervals: four."""
ENGINES = (
    "count by (instance, engine) (last_over_time("
    '{__name__=~"vllm:num_requests_(running|waiting)|vllm:generation_tokens_total"}[$window]))'
)
GPUS = "count by (instance, gpu) (last_over_time(diag_gpu_up[$window]))"
INSTANCES = "count by (instance) (count_over_time(up[$window]))"
PARTS = {"engine": ENGINES, "gpu": GPUS}
"""What an instance has several of, by the label that tells them apart."""


class Answers(Protocol):
    """What a source of telemetry can do. `instants` are unix milliseconds, `interval` is in seconds."""

    @property
    def instants(self) -> Instants:
        """The instants to judge, ascending."""

    @property
    def interval(self) -> float:
        """The usual time between two samples of one target."""

    def ask(self, promql: str, instants: Instants) -> Mapping[Subject, Floats]:
        """One row per subject, NaN where there is no (finite) sample."""


def seconds(duration: str) -> float:
    """A PromQL duration of one unit, "30s" or "5m", in seconds."""
    return float(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


class Asked:
    """A source under one contract; each distinct expression is asked once."""

    def __init__(self, answers: Answers, contract: Contract) -> None:
        self.answers = answers
        self.contract = contract
        self._cache: dict[tuple[str, int, int], Mapping[Subject, Floats]] = {}

    @property
    def span(self) -> float:
        """Seconds from the first instant to the last."""
        times = self.answers.instants
        return float(times[-1] - times[0]) / 1000

    @property
    def whole(self) -> float:
        """A window in seconds that holds everything."""
        return max(self.span, self.wanted("30s"))

    def wanted(self, live_window: str) -> float:
        """The window in seconds that fits these samples.

        The live one, or longer where too few scrapes fall into it; never longer than the span, which is judged once.
        """
        wanted = max(seconds(live_window), FEWEST_INTERVALS * self.answers.interval)
        return min(wanted, self.span) if self.span > 0 else wanted

    def instants(self, wanted: float) -> Instants:
        """Every instant from the first full window on; the last one alone where none is full."""
        times = self.answers.instants
        full = times[times - times[0] >= wanted * 1000 - 1]
        return full if len(full) else times[-1:]

    def ask(
        self, promql: str, per: tuple[str, ...], wanted: float, instants: Instants | None = None
    ) -> Mapping[Subject, Floats]:
        """Ask at every judged instant, or at those given.

        Windows are open on the left: one interval more than is wanted makes them hold all of it.
        """
        at = self.instants(wanted) if instants is None else instants
        text = fill(promql, per, f"{round((wanted + self.answers.interval) * 1000)}ms", self.contract.values())
        key = (text, int(at[0]), len(at))
        if key not in self._cache:
            self._cache[key] = self.answers.ask(text, at)
        return self._cache[key]

    def subjects(self, per: tuple[str, ...]) -> list[Subject]:
        """The universe: every instance that was scraped and every engine or GPU that was seen on one.

        An instance without any stays as a subject of its own, so that a blind replica does not vanish.
        """
        instances = self.ask(INSTANCES, per, self.whole)
        parts = [self.ask(query, per, self.whole) for label, query in PARTS.items() if label in per]
        inside = [subject for part in parts for subject in part]
        seen = {dict(subject).get("instance") for subject in inside}
        return sorted([*inside, *(each for each in instances if dict(each).get("instance") not in seen)])


def agree(one: Subject, other: Subject) -> bool:
    """Whether two subjects are the same on the labels that both have."""
    left, right = dict(one), dict(other)
    return all(left[name] == right[name] for name in left.keys() & right.keys())
