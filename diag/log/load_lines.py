"""The load of a server as its log alone has it: the stats line of each engine, as the series of vLLM's own page.

vLLM prints the line every 10 s at INFO while tokens move. From the second interval without a token on, it sends the
line to DEBUG, however many requests run (0.8 and later, V1). So a line of 0.0 tokens/s and silence after it mean that
nothing has moved since, and silence after any other line means nothing: the line was due and did not come.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from diag.core.formatting import quantity
from diag.exposition.scrapes import Reading

INTERVAL = 10.0
"""Seconds between two stats lines (VLLM_LOG_STATS_INTERVAL)."""
OVERDUE = 3 * INTERVAL
"""Seconds after which a line that reported tokens says nothing of the present."""
SHORTEST_ANSWER = 16
"""Tokens of an answer, at the least on average: where no access log counts answers, it bounds their number from above,
and so the time that they waited from below."""
ROOMY = 0.9
"""KV cache usage up to which no request was preempted: no release prints preemptions (0.11 - 0.33 forget them)."""
DONE = "vllm:request_success_total"
"""Answered requests; the log tells no reason for which one finished, so the series has no label for it."""
LINE = re.compile(
    r"(?:Engine (?P<engine>\d{1,6}): |\d{1,6} Engines Aggregated: )?"
    r"Avg prompt throughput: (?P<prompt>\d{1,15}(?:\.\d{1,6})?) tokens/s,"
    r" Avg generation throughput: (?P<output>\d{1,15}(?:\.\d{1,6})?) tokens/s, Running: (?P<running>\d{1,9}) reqs,"
    r"(?: Swapped: \d{1,9} reqs,)? (?P<kind>Waiting|Pending): (?P<waiting>\d{1,9}) reqs,?"
    r"(?: Deferred: (?P<deferred>\d{1,9}) reqs,)?(?: KV fetch: [^,]{1,60}, [^,]{1,60}, [^,]{1,60},)?"
    r"(?: Preemptions: \d{1,9},)?(?: \w{1,20} KV cache usage: (?P<usage>\d{1,4}(?:\.\d{1,6})?)%)?"
)

ABORTED = re.compile(r"Request \S{1,200} aborted\.")
"""What vLLM says of a client that gave up (0.8 and later, with --enable-log-requests)."""


def reports_tokens(text: str) -> bool:
    """Return True for a stats line of an engine that has processed tokens."""
    line = LINE.match(text)
    return line is not None and bool(float(line["prompt"]) or float(line["output"]))


@dataclass
class EngineLoad:
    """The last stats line of an engine, at a unix time, and the tokens that all lines add up to."""

    at: float
    running: int = 0
    waiting: int = 0
    deferred: int | None = None
    usage: float | None = None
    rate: float = 0.0
    """Tokens per second, of prompts and answers."""
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    highest_usage: float = 0.0
    is_still: bool = False
    """True if the line reported no token, in a release that falls silent then."""

    def read(self, line: re.Match[str], at: float) -> None:
        """Take the next line: its throughputs are the means since the line that was due before it."""
        elapsed = min(at - self.at, INTERVAL) if at > self.at else 0.0
        prompt, output = float(line["prompt"]), float(line["output"])
        self.rate = prompt + output
        self.prompt_tokens += prompt * elapsed
        self.output_tokens += output * elapsed
        self.at, self.running, self.waiting = at, int(line["running"]), int(line["waiting"])
        self.deferred = int(line["deferred"]) if line["deferred"] else None
        self.usage = float(line["usage"]) / 100 if line["usage"] else None
        self.highest_usage = max(self.highest_usage, 1.0 if self.usage is None else self.usage)
        self.is_still = not (prompt or output) and line["kind"] == "Waiting"

    def give_up(self) -> None:
        """Take one request out, whose client gave up: where none is left, nobody knows whether the engine is well."""
        self.waiting, self.running = (self.waiting - 1, self.running) if self.waiting else (0, max(0, self.running - 1))
        self.is_still = self.is_still and self.running > 0

    def is_known(self, now: float) -> bool:
        """Return True if the line still tells the load at a moment."""
        return self.is_still or now - self.at <= OVERDUE


class LoadLines:
    """Collects the stats lines of one server process."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineLoad] = {}
        self._settled = 0
        """Answers before the last stats line that reported tokens: a stream is answered before its first token."""
        self._uncounted = 0
        """Estimated answers before the first line of the access log."""
        self.lines = 0
        """Stats lines read so far, and starts."""

    def begin(self) -> None:
        """Note that another server process was started."""
        self.engines, self._settled, self._uncounted = {}, 0, 0
        self.lines += 1

    def read(self, text: str, at: float, answers: int | None) -> None:
        """Read a stats line; `answers` are the successful ones of the access log so far, None without any answer."""
        line = LINE.match(text)
        if line is None:
            if ABORTED.match(text) and len(self.engines) == 1:
                next(iter(self.engines.values())).give_up()
            return
        self._settled = self._settled if self.engines else answers or 0
        engine = str(int(line["engine"] or 0))
        load = self.engines.setdefault(engine, EngineLoad(at - INTERVAL))
        load.read(line, at)
        self.lines += 1
        if float(line["prompt"]) or float(line["output"]):
            self._settled = answers or 0
        if answers is None:
            self._uncounted = int(load.output_tokens / SHORTEST_ANSWER)

    def words(self, now: float) -> str:
        """Return the last load in words: "2 running, 0 waiting, 345 tokens/s (10 s before the end)"."""
        if not self.engines:
            return ""
        loads = self.engines.values()
        running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
        rate, before = sum(load.rate for load in loads), max(0.0, now - max(load.at for load in loads))
        return (
            f"{running} running, {waiting} waiting, {rate:,.0f} tokens/s ({quantity(before, 'seconds')} before the end)"
        )

    @property
    def is_still(self) -> bool:
        """True if the last line of an engine reported requests and no token."""
        return any(load.is_still and load.running + load.waiting > 0 for load in self.engines.values())

    @property
    def has_requests(self) -> bool:
        """True if the last line of an engine reported requests."""
        return any(load.running + load.waiting > 0 for load in self.engines.values())

    def frozen(self) -> "LoadLines":
        """Return a copy that further lines do not change."""
        other = LoadLines()
        other.engines = {name: replace(load) for name, load in self.engines.items()}
        other._settled, other._uncounted = self._settled, self._uncounted
        return other

    def series(self, now: float, answers: int | None) -> Iterator[Reading]:
        """Yield the series of vLLM's page that the log tells at a moment, with the successful `answers` so far."""
        for engine, load in self.engines.items():
            if not load.is_known(now):
                continue
            finished = float(int(load.output_tokens / SHORTEST_ANSWER))
            if len(self.engines) == 1 and answers is not None:
                finished = float(self._uncounted + self._settled)
            values: dict[str, float] = {
                "vllm:num_requests_running": load.running,
                "vllm:num_requests_waiting": load.waiting,
                "vllm:prompt_tokens_total": load.prompt_tokens,
                "vllm:generation_tokens_total": load.output_tokens,
                "vllm:time_to_first_token_seconds_count": finished,
            }
            if load.highest_usage <= ROOMY:
                values["vllm:num_preemptions_total"] = 0
            if load.usage is not None:
                values["vllm:kv_cache_usage_perc"] = load.usage
            for name, value in values.items():
                yield {"__name__": name, "engine": engine}, float(value)
            if load.deferred is not None or not load.waiting:
                for reason, count in (
                    ("capacity", load.waiting - (load.deferred or 0)),
                    ("deferred", load.deferred or 0),
                ):
                    yield (
                        {"__name__": "vllm:num_requests_waiting_by_reason", "engine": engine, "reason": reason},
                        float(count),
                    )
            yield {"__name__": DONE, "engine": engine}, finished
        if answers is not None and not self.engines:
            yield {"__name__": DONE, "engine": "0"}, float(answers)
