"""Kinds of load under which a server is healthy: each is simulated, scraped, and may not be called ill.

The capacity suffices for every kind: where a burst queues, the queue is gone within seconds.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from support import connector_pages
from support.scenarios import PHASES, config, gpu, log, started, text, workers
from support.simulated_vllm import ROUTE, Engine, Limits, Request, page

HOUR = 3600.0
Rate = Callable[[float], float]
"""Arrivals a second at a time in seconds."""


@dataclass(frozen=True)
class Kind:
    """A load and its server; lengths in tokens are medians, which scatter; `cached` is a share of the prompt.

    `bursts`: so many requests come within a second, every so many seconds. `clients` of a closed loop pause `think`
    seconds. Of 100 requests so many are `lost`: their users hang up after `patience` seconds. `stops`: planned
    restarts, as (begin, seconds without a page). `missed`: the share of scrapes that fail.
    """

    rate: Rate = lambda _: 0.0
    prompt: float = 600
    answer: float = 200
    scatter: float = 0.6
    longest: int = 2000
    """The longest answer."""
    history: int = 0
    """Requests that finished before the first scrape."""
    cached: float = 0.3
    bursts: tuple[int, float] = (0, 300.0)
    clients: int = 0
    think: float = 0.0
    lost: float = 0.0
    patience: tuple[float, float] = (0.1, 3.0)
    limits: Limits = field(default_factory=Limits)
    stops: tuple[tuple[float, float], ...] = ()
    replicas: int = 1
    engines: int = 1
    exporter: bool = False
    missed: float = 0.0
    refused: float = 0.0
    """The share of requests that are the client's error, answered with 4xx."""
    errors: tuple[float, ...] = ()
    """Times of single answers with 5xx."""
    sleeps: tuple[float, float] = (-1.0, -1.0)
    families: Callable[[str], str] = str
    """Changes a page: families that a connector or a parser adds."""
    events: tuple[tuple[str, float], ...] = ()
    """Events of the log, with seconds after the start."""


def wave(low: float, high: float, period: float = HOUR) -> Rate:
    """A load that rises from the least to the most and falls back within a period."""
    return lambda t: low + (high - low) * (1 - math.cos(2 * math.pi * t / period)) / 2


def steady(rate: float) -> Rate:
    """A constant load."""
    return lambda _: rate


def steps(*each: tuple[float, float]) -> Rate:
    """A load that takes another rate at each of these times."""
    return lambda t: next((rate for at, rate in reversed(each) if t >= at), 0.0)


def offloaded(page: str) -> str:
    """The page of a server with tiers of offloading whose jobs all succeed."""
    return connector_pages.tiers(page, hits=0.4)


def with_tools(page: str) -> str:
    """The page of a server whose tool parser finds a call in a quarter of the answers."""
    name, text = "vllm:tool_call_parser_invocations", "Total number of ToolParser invocations."
    answers = connector_pages.value(page, 'vllm:request_success_total{engine="0",finished_reason="stop"')
    answers += connector_pages.value(page, 'vllm:request_success_total{engine="0",finished_reason="length"')
    labels = 'mode="{}",model_name="tiny",outcome="{}",request_type="chat_completions"'
    shares = {"tool_call": (0.25, 0.0), "no_tool_call": (0.75, 0.0)}
    return page + "".join(
        connector_pages.counter(name, text, answers * share // 1, labels.format(mode, outcome))
        for outcome, of_modes in shares.items()
        for mode, share in zip(("non_streaming", "streaming"), of_modes, strict=True)
    )


RECOVERED = ("engine_fault_held", 100.0), ("engine_fault_over", 110.0)
PAIR = Limits(connector="kv_producer"), Limits(connector="kv_consumer")
KINDS: dict[str, Kind] = {
    "chat": Kind(steady(2)),
    "chat with exporter": Kind(steady(2), exporter=True),
    "day and night": Kind(wave(0.01, 4)),
    "sudden morning": Kind(steps((0, 0.02), (1500, 3.5)), exporter=True),
    "bursts that drain": Kind(steady(0.7), answer=60, bursts=(220, 300)),
    "bursts of a cron job": Kind(steady(0.3), prompt=1200, answer=30, bursts=(300, 900), exporter=True),
    "batch at the cap": Kind(clients=128, prompt=500, answer=250),
    "batch at night": Kind(steps((0, 1.0), (1800, 0.1)), clients=24, prompt=800, answer=300, think=2),
    "agents": Kind(steady(0.5), prompt=12_000, answer=120, cached=0.92),
    "rag": Kind(steady(0.6), prompt=6000, answer=150, cached=0.1),
    "long documents": Kind(steady(0.05), prompt=16_000, answer=400, scatter=0.3, cached=0.02),
    "classification": Kind(steady(12), prompt=300, answer=3, scatter=0.4, cached=0.6),
    "one token": Kind(steady(15), prompt=200, answer=1, scatter=0.3, cached=0.0),
    "completions cancelled by typing": Kind(steady(3), prompt=900, answer=50, cached=0.7, lost=25, patience=(0.1, 0.8)),
    "users who stop": Kind(steady(2), answer=400, lost=8, patience=(2, 9)),
    "adapters": Kind(steady(1.5), limits=Limits(adapters=4), answer=150),
    "speculative decoding": Kind(steady(2.5), limits=Limits(drafted=4, step=0.026)),
    "single requests": Kind(steady(0.02), answer=300),
    "sleep at night": Kind(steps((0, 1.5), (1100, 0.0), (2600, 1.5)), sleeps=(1200, 2500)),
    "restart": Kind(steady(2), stops=((1700, 102),)),
    "restart with exporter": Kind(steady(2), stops=((1700, 102),), exporter=True),
    "two restarts a day": Kind(wave(0.5, 2.5), stops=((900, 75), (2700, 90))),
    "rolling upgrade": Kind(steady(3), replicas=2, stops=((1200, 95), (1500, 95))),
    "two replicas": Kind(wave(1, 5), replicas=2),
    "two replicas, prefix-aware": Kind(steady(3), replicas=2, cached=0.8, prompt=2500, exporter=True),
    "data parallel": Kind(steady(4), engines=2),
    "disaggregated pair": Kind(steady(2), replicas=2, prompt=3000, cached=0.2),
    "missed scrapes": Kind(steady(2), missed=0.04),
    "client errors": Kind(steady(2), refused=0.03),
    "one server error": Kind(steady(1), errors=(1234.0, 2900.0)),
    "pool often full, no preemption": Kind(
        clients=40, prompt=2200, answer=350, scatter=0.2, think=0.5, limits=Limits(num_gpu_blocks=7400, max_num_seqs=64)
    ),
    "offloading with tiers": Kind(steady(2), cached=0.3, families=offloaded),
    "tool calls": Kind(steady(2), families=with_tools),
    "fault tolerance, recovered before": Kind(steady(2), exporter=True, events=RECOVERED),
    "small server": Kind(
        steady(0.5), prompt=200, answer=80, limits=Limits(max_num_seqs=16, step=0.03, num_gpu_blocks=4000)
    ),
}


def is_down(name: str, first: float, last: float) -> bool:
    """Return True if a planned restart overlaps this time."""
    return any(begin <= last and first <= begin + seconds for begin, seconds in KINDS[name].stops)


class Scrape:
    """A scrape of a server; its page is "" if it failed."""

    __slots__ = ("at", "instance", "page")

    def __init__(self, at: float, instance: str, page: str) -> None:
        self.at, self.instance, self.page = at, instance, page


def scraped(name: str, seed: int, times: list[float], begun: float, length: float = HOUR) -> Iterator[Scrape]:
    """Simulate a kind for so many seconds from `begun` on (unix seconds), scraped at these times after it."""
    yield from scraped_kind(KINDS[name], name, seed, times, begun, length)


def scraped_kind(
    kind: Kind, name: str, seed: int, times: list[float], begun: float, length: float = HOUR
) -> Iterator[Scrape]:
    """Simulate a load that is not in the table; its name decides about chance."""
    for replica in range(kind.replicas):
        server = _Server(kind, name, replica, random.Random(f"{name} {seed} {replica}"), begun)
        yield from server.scraped(times, length)


class _Server:
    """One API server with its engines, restarted as planned."""

    def __init__(self, kind: Kind, name: str, replica: int, chance: random.Random, begun: float) -> None:
        limits = PAIR[replica] if name == "disaggregated pair" else kind.limits
        self.kind = replace(kind, limits=limits, answer=1 if limits.connector == "kv_producer" else kind.answer)
        self.chance, self.begun, self.instance = chance, begun, f"10.0.0.{replica + 1}:8000"
        rolling = kind.stops[replica : replica + 1] if kind.replicas > 1 else kind.stops
        self.stops = [(at, at + seconds) for at, seconds in rolling]
        self.born = begun - chance.uniform(600, 90_000)
        self.engines = self._start(self.born, 0.0)
        self.busy = 0.0
        self.told_at = 0.0

    def _start(self, born: float, serves: float) -> list[Engine]:
        engines = [Engine(self.kind.limits, born, index) for index in range(self.kind.engines)]
        for engine in engines:
            engine.now = self.begun + serves
            for earlier in (self._request(born) for _ in range(self.kind.history)):
                engine.seen["vllm:request_prompt_tokens"].add(earlier.prompt)
                engine.seen["vllm:request_generation_tokens"].add(earlier.answer)
                engine.count["vllm:prefix_cache_hits_total"] += earlier.cached
            for _ in range(self.kind.clients // self.kind.engines):
                request = self._request(engine.now + self.chance.uniform(0, 3 + self.kind.think))
                request.client = self.kind.think
                engine.send(request)
        return engines

    def scraped(self, times: list[float], length: float) -> Iterator[Scrape]:
        """Yield the scrapes of the whole course."""
        arrivals = iter([*self._arrivals(length), (math.inf, 0)])
        due, together = next(arrivals)
        for t in times:
            for begin, end in self.stops[:1]:
                if t >= begin:  # it is stopped: what was in flight is lost
                    self.born = self.begun + begin + 2
                    self.engines = self._start(self.born, end)
                    self.stops.pop(0)
                    self.down = end
            while due <= t:
                for _ in range(abs(together)):
                    self._arrive(self.begun + due, together)
                due, together = next(arrivals)
            yield Scrape(self.begun + t, self.instance, self._page(t))

    down = -1.0

    def _page(self, t: float) -> str:
        failed = t < self.down or self.chance.random() < self.kind.missed
        for engine in self.engines:
            engine.asleep = self.kind.sleeps[0] <= t < self.kind.sleeps[1]
            engine.run(self.begun + t)
        shown = "" if failed else self.kind.families(page(self.engines))
        return shown + self._beside(t, shown) if self.kind.exporter else shown

    def _beside(self, t: float, shown: str) -> str:
        """Return the samples that the exporter adds; without the API server there is no engine either."""
        busy = sum(engine.busy for engine in self.engines)
        share = min(1.0, max(0.0, busy - self.busy) / max(1e-9, t - self.told_at)) if t > self.told_at else 0.0
        self.busy, self.told_at = busy, t
        limits, ago = self.kind.limits, {event: 80 - seconds for event, seconds in self.kind.events}
        parts = (
            gpu(0, utilization_ratio=share, power_watts=110 + 480 * share, throttle_seconds_total__sw_power_cap=busy),
            workers(1.0),
            started(self.born),
            log("ready" if shown else "load_weights", dict.fromkeys(PHASES[:-1], 10.0), start=self.born + 80, **ago),
            config(
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
                gpu_memory_utilization=0.9,
                enable_prefix_caching=1,
                tensor_parallel_size=1,
            ),
        )
        return text(self.begun + t - self.born, shown, parts)

    def _arrivals(self, length: float) -> Iterator[tuple[float, int]]:
        """Times and numbers of requests that arrive together."""
        most = max(self.kind.rate(second) for second in range(0, int(length), 10)) / self.kind.replicas
        found, t = [(at, -1) for at in self.kind.errors], 0.0
        while most > 0 and (t := t + self.chance.expovariate(most)) < length:
            if self.chance.random() * most * self.kind.replicas < self.kind.rate(t):
                found.append((t, 1))
        many, every = self.kind.bursts
        if many:
            found += [(at + self.chance.uniform(-40, 40), many) for at in range(int(every), int(length), int(every))]
        return iter(sorted(found))

    def _arrive(self, at: float, together: int) -> None:
        if at - self.begun < self.down:
            return
        engine = self.chance.choice(self.engines)
        if together < 0:
            engine.http[ROUTE, "5xx"] += 1
        elif self.chance.random() < self.kind.refused:
            engine.http[ROUTE, "4xx"] += 1
        else:
            engine.send(self._request(at))

    def _request(self, at: float) -> Request:
        kind, chance = self.kind, self.chance
        prompt = max(4, round(kind.prompt * math.exp(chance.gauss(0, kind.scatter))))
        answer = max(1, round(kind.answer * math.exp(chance.gauss(0, kind.scatter))))
        prompt, answer = min(prompt, kind.limits.max_model_len - kind.longest - 100), min(answer, kind.longest)
        request = Request(at, prompt, 1 if kind.answer == 1 else answer)
        request.cached = int(prompt * min(0.98, kind.cached * chance.uniform(0.6, 1.2))) // 16 * 16
        if chance.uniform(0, 100) < kind.lost:
            request.until = at + chance.uniform(*kind.patience)
        if kind.limits.adapters:
            request.adapter = f"adapter{chance.randrange(kind.limits.adapters)}"
        return request
