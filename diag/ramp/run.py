"""A ramp as it runs: load and scrapes side by side, step after step, until the ceiling is known or something ends it.

Whatever ends it, what was measured until then is kept and judged.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from diag.core.formatting import plural
from diag.ramp.generator import Generator, GeneratorFailed
from diag.ramp.plan import Limits, again, next_offer, prompts
from diag.ramp.step import ClientResult, Offer, Step, measure, of_client
from diag.sources.live.scrape import BackgroundWatch
from diag.sources.observation import Observation

WARM_UP = 3
"""Requests, one at a time, before anything counts: they show that the load can be made, and how fast one is."""
MOST_SECONDS = 60.0
"""Besides four times what a step should take: to load a tokenizer and make the prompts on a busy host."""
Tick = Callable[[str, float], None]
"""Told what is done and the share of it that is over."""


def between(seen: Observation | None, start: float, end: float) -> Observation | None:
    """The scrapes from one moment to another, in unix seconds."""
    if seen is None:
        return None
    within = (seen.instants >= start * 1000) & (seen.instants <= end * 1000)
    return seen._replace(instants=seen.instants[within]) if np.count_nonzero(within) > 1 else None


@dataclass
class RampRun:
    """The steps of one ramp so far; `stopped` is why it was cut short."""

    generator: Generator
    watched: BackgroundWatch
    limits: Limits
    tick: Tick
    first: int = 1
    steps: list[Step] = field(default_factory=list)
    stopped: str = ""
    warm: float = 1.0

    def run(self) -> None:
        """Go as far as it gets; nothing is raised for what ends a ramp."""
        try:
            with self.generator.running(self._goes_on("loading vLLM's modules", 20.0)):
                self._warm_up()
                while not self.stopped and (offer := next_offer(self.steps, self.limits, self.first)):
                    self._step(offer)
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        except GeneratorFailed as error:
            self.stopped = self.stopped or str(error)

    def _warm_up(self) -> None:
        client = self._load(Offer(concurrency=1), WARM_UP, "warming up", self.limits.seconds)
        if client and client.failed >= WARM_UP:
            self.stopped = "every request of the warm-up failed: look at the server's log"
        elif client:
            self.warm = max(client.requests_per_second, 0.01)

    def _step(self, offer: Offer) -> None:
        """One step, and once more with more requests where it was over too soon."""
        count = prompts(offer, self.steps, self.warm, self.limits)
        step = self._measured(offer, count)
        if step and not self.stopped and (more := again(step, count, self.limits)) and self._measured(offer, more):
            self.steps = [kept for kept in self.steps if kept is not step]
        if step is None and not self.stopped:
            why = self.watched.watch.last_failures(1) or "they were over between two scrapes"
            self.stopped = f"none of {plural(count, 'request')} was seen in the server: {why}"

    def _measured(self, offer: Offer, count: int) -> Step | None:
        """A step with so many requests; it is measured also where it was cut short."""
        start, client = time.time(), None
        try:
            client = self._load(offer, count, f"{offer.shown} requests", self.limits.seconds)
        finally:
            step = measure(offer, between(self.watched.seen(), start, time.time()), self.limits.contract, client)
            step = step or (of_client(offer, client, self.limits.contract) if client else None)
            self.steps += [step] if step else []
        return step

    def _load(self, offer: Offer, count: int, what: str, seconds: float) -> ClientResult | None:
        try:
            return self.generator.run(offer, count, MOST_SECONDS + 4 * seconds, self._goes_on(what, seconds))
        except GeneratorFailed as error:
            self.stopped = self.stopped or str(error)
            return None

    def _goes_on(self, what: str, seconds: float) -> Callable[[], bool]:
        """Shows progress, and says whether there is still a server to put load on."""
        begun = time.monotonic()

        def tick() -> bool:
            self.tick(what, (time.monotonic() - begun) / seconds)
            self.stopped = self.stopped or self.watched.gone()
            return not self.stopped

        return tick
