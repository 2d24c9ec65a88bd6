"""The load of a server as its log alone has it: the answers of the access log, and the stats lines of its engines.

Answers: vLLM's own counters miss those of its authentication, which stands in front of them: with a wrong key every
answer is a 401, and /metrics counts none. The access log mostly has no time: the order of its lines counts. uvicorn's
lines have no head, so a client whose text is logged with its line feeds can imitate one. What the page shows of
successes outweighs the log.

Stats lines: vLLM prints one every 10 s at INFO while tokens move; they become the series of vLLM's own page. From the
second interval without a token on, it sends the line to DEBUG, however many requests run (0.8 and later, V1). So a line
of 0.0 tokens/s, at an unchanged usage of the KV cache, and silence after it mean that nothing has moved since, and
silence after any other line means nothing: the line was due and did not come. Lines behind it count the tokens of
drafts, transfers and offloaded blocks of the same interval (counters.toml).
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

from diag.core.declarations import PACKAGE, document, typed
from diag.core.formatting import quantity
from diag.core.metric_families import Sample
from diag.core.metric_prefix import FINISHED, GENERATED, PROMPTED, RUNNING, WAITING, metric
from diag.exposition.scrapes import Reading
from diag.log.parse_line import AnsweredRequest
from diag.log.trackers import quote
from diag.vllm.routes import MANAGING, asks_for_inference, is_served

SINGLE = ("400", "401", "403", "404", "413", "422")
"""Statuses with causes of their own; all others are counted by their class."""
STATUSES = ("2xx", *SINGLE, "4xx", "5xx")
LATEST = 20
"""Answers that show how a log's server answered at its end."""
MOST_ROUTES = 1_000
"""Routes that are counted; clients may ask for any number of them."""
MOST_NAMES, MOST_NAME, KEPT = 4, 100, 3_600.0
"""Names of a kind that are kept, their characters, and the seconds after which another name may take a place."""
_MODEL_ERROR = "Error with model "
_NO_MODEL = re.compile(r"The model `(?P<name>[^`]{1,400})` does not exist")


class AnswerCounts:
    """Counts the answers of one server process."""

    def __init__(self) -> None:
        self.by_route: Counter[tuple[str, str]] = Counter()
        """Answers by route and class of the status: "/v1/completions", "2xx"."""
        self._by_status = dict.fromkeys(STATUSES, 0)
        """Answers to requests for inference."""
        self._is_undecided = False
        self._row = self._longest = 0
        """Refused requests for inference since the last one that succeeded, and the most of them before that one."""
        self.latest: deque[str] = deque(maxlen=LATEST)
        """Classes of the last answers to requests for inference."""
        self.not_done: dict[str, None] = {}
        """Routes that change the server and whose last answer was an HTTP 5xx."""
        self._names: dict[tuple[str, str], float] = {}
        """Unix time of the last refused request by the kind and the name of what it asked for."""

    @property
    def succeeded(self) -> int | None:
        """Requests for inference that the server process has answered with success; None without any answer."""
        return self._by_status["2xx"] if any(self._by_status.values()) else None

    def begin(self) -> None:
        """Note that another server process was started."""
        self._by_status = dict.fromkeys(STATUSES, 0)
        self._row = self._longest = 0
        self.latest.clear()
        self.not_done.clear()

    def count(self, request: AnsweredRequest, at: float, is_doubted: bool = False) -> None:
        """Count the answer to a request; one that may be a client's text counts only if it accuses.

        Whoever can imitate a refusal can as well be refused, but not be served. From a doubted success on, the doubted
        refusals decide nothing either: if that was a true one, not all requests are refused.
        """
        route, status = request.route, request.status
        self._is_undecided = is_doubted and (self._is_undecided or status.startswith("2"))
        if self._is_undecided:
            return
        of_class = f"{status[0]}xx"
        self.by_route[route, of_class] += 1
        if len(self.by_route) > MOST_ROUTES:
            self.by_route.clear()
        if MANAGING.fullmatch(route):
            self.not_done.pop(route, None)
            self.not_done |= {route: None} if of_class == "5xx" else {}
        if not asks_for_inference(request.method, route):
            return
        self.latest.append(of_class)
        counted = status if status in SINGLE else of_class
        if counted in self._by_status:  # a redirection is followed by another answer
            self._by_status[counted] += 1
        if of_class == "2xx":
            self._row, self._longest = 0, max(self._longest, self._row)
        elif of_class == "4xx":
            self._row += 1
            if status == "404" and not is_served(route):
                self._note("route", route, at)

    def read_error(self, text: str, at: float) -> None:
        """Note the model that a request asked for and that is not served, if vLLM's line says that."""
        if text.startswith(_MODEL_ERROR) and (unknown := _NO_MODEL.search(text[:1_000])):
            self._note("model", unknown["name"], at)

    def _note(self, kind: str, name: str, at: float) -> None:
        """Keep a name, which is a client's text: few at a time, each for long, so that clients cannot make many."""
        key, of_kind = (kind, quote(name, MOST_NAME)), [name for name in self._names if name[0] == kind]
        if key not in self._names and len(of_kind) >= MOST_NAMES:
            oldest = min(of_kind, key=self._names.__getitem__)
            if at - self._names[oldest] < KEPT:
                return
            del self._names[oldest]
        self._names[key] = at

    def samples(self) -> Iterator[Sample]:
        for status, count in self._by_status.items():
            yield "diag_vllm_log_answers_total", (status,), count
        yield "diag_vllm_log_refused_in_a_row", ("current",), self._row
        yield "diag_vllm_log_refused_in_a_row", ("longest",), self._longest
        for key, at in self._names.items():
            yield "diag_vllm_log_refused_name_timestamp_seconds", key, at


# -- stats lines ------------------------------------------------------------------------------------------------------

INTERVAL = 10.0
"""Seconds between two stats lines (VLLM_LOG_STATS_INTERVAL)."""
OVERDUE = 3 * INTERVAL
"""Seconds after which a line that reported tokens says nothing of the present."""
LONGEST_STEP = 300.0
"""Seconds that vLLM gives a step of all ranks (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)."""
SHORTEST_ANSWER = 16
"""Tokens of an answer, at the least on average: where no access log counts answers, it bounds their number from above,
and so the time that they waited from below."""
ROOMY = 0.9
"""KV cache usage up to which no request was preempted: no release prints preemptions (0.11 - 0.33 forget them)."""
DONE = FINISHED
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

DUMPED = re.compile(
    r"\[Watchdog\]Dumped stack to .{1,300}?VLLM_STACK_DUMP_for_engine_(?P<engine>\d{1,5})_\d+\.log due to feed"
)
"""What the watchdog of an engine says that has stood still with requests in flight (0.33); it lets an idle one be."""


class CounterLine(NamedTuple):
    """A kind of line behind a stats line: words that it has, and those in front of each number, by counter."""

    holds: str
    counts: Mapping[str, str]


COUNTER_LINES: tuple[CounterLine, ...] = typed(
    document(PACKAGE / "log" / "counters.toml")[1]["line"], tuple[CounterLine, ...]
)
COUNT = r"""(?::\([^()]{1,99}\))?["']?(?:=|: )(\d{1,15})\b(?!\.)"""
"""A number behind its words and the values of its labels, also in the dictionary that a MultiConnector prints."""
DRAFTS = re.compile(
    r"Mean acceptance length: (?P<mean>\d{1,9}\.\d\d), .{0,120}?Accepted: (?P<accepted>\d{1,15}) tokens, "
    r"Drafted: (?P<drafted>\d{1,15}) tokens, Per-position acceptance rate: (?P<rates>\d\.\d{3}(?:, \d\.\d{3}){0,99})"
)


def counted(text: str) -> Iterator[tuple[str, str, float]]:
    """Yield what a line behind a stats line counts: a counter of vLLM's page, a position in drafts or "", a number."""
    for counter, words in (
        (name, words) for kind in COUNTER_LINES if kind.holds in text for name, words in kind.counts.items()
    ):
        for number in re.finditer(words + COUNT, text):
            yield counter, "", float(number[1])
    if line := DRAFTS.search(text):
        rates, accepted = [float(rate) for rate in line["rates"].split(", ")], float(line["mean"]) - 1
        drafts = float(line["accepted"]) / accepted if accepted > 0 else float(line["drafted"]) / len(rates)
        yield metric("spec_decode_num_drafts_total"), "", drafts
        for position, rate in enumerate(rates):
            yield metric("spec_decode_num_accepted_tokens_per_pos_total"), str(position), rate * drafts


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
    """True if the line reported no token, in a release that falls silent then, or the watchdog says so."""
    prefilled: bool = False
    """True if such a line shows by a higher usage of the KV cache that the engine worked, so that it proves no stall.

    A prompt counts when its last chunk is computed, for a long one minutes after the first: the silence that follows
    may be the rest of that prefill, or not.
    """

    def read(self, line: re.Match[str], at: float) -> None:
        """Take the next line: its throughputs are the means since the line that was due before it."""
        elapsed = min(at - self.at, INTERVAL) if at > self.at else 0.0
        prompt, output = float(line["prompt"]), float(line["output"])
        self.rate = prompt + output
        self.prompt_tokens += prompt * elapsed
        self.output_tokens += output * elapsed
        self.at, self.running, self.waiting = at, int(line["running"]), int(line["waiting"])
        self.deferred = int(line["deferred"]) if line["deferred"] else None
        before, self.usage = self.usage, float(line["usage"]) / 100 if line["usage"] else None
        self.highest_usage = max(self.highest_usage, 1.0 if self.usage is None else self.usage)
        moves_nothing = not (prompt or output) and line["kind"] == "Waiting"
        self.prefilled = moves_nothing and before is not None and self.usage is not None and self.usage > before
        self.is_still = moves_nothing and not self.prefilled

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
        self.dumped_at = 0.0
        """Unix time at which an engine was shown to have stood still since its last stats line."""
        self._ranks_wait_since = 0.0
        """Unix time of the first line behind the last stats line that says that ranks wait for one of them, or 0."""
        self.lines = 0
        """Stats lines and lines behind them read so far, and starts."""
        self._latest = "0"
        """The engine of the last stats line."""
        self._counters: dict[tuple[str, str, str], float] = {}
        """What lines behind them counted, by engine, counter and position."""

    def begin(self) -> None:
        """Note that another server process was started."""
        self.engines, self._settled, self._uncounted = {}, 0, 0
        self.lines += 1
        self._counters.clear()

    def read(self, text: str, at: float, answers: int | None) -> None:
        """Read a stats line; `answers` are the successful ones of the access log so far, None without any answer."""
        line = LINE.match(text)
        if line is None:
            if (dump := DUMPED.match(text)) and (load := self.engines.get(str(int(dump["engine"])))):
                load.is_still, self.dumped_at = True, at
            if ABORTED.match(text) and len(self.engines) == 1:
                next(iter(self.engines.values())).give_up()
            for counter, position, count in counted(text):
                key = self._latest, counter, position
                self._counters[key] = self._counters.get(key, 0.0) + count
                self.lines += 1
            return
        self._settled = self._settled if self.engines else answers or 0
        engine = self._latest = str(int(line["engine"] or 0))
        load = self.engines.setdefault(engine, EngineLoad(at - INTERVAL))
        load.read(line, at)
        self._ranks_wait_since = 0.0
        self.lines += 1
        if float(line["prompt"]) or float(line["output"]):
            self._settled = answers or 0
        if answers is None:
            self._uncounted = int(load.output_tokens / SHORTEST_ANSWER)

    def wait_for_a_rank(self, at: float) -> None:
        """Take a line that says so: waits for longer than a step may take are no chunk of a prompt."""
        self._ranks_wait_since = self._ranks_wait_since or at
        if len(self.engines) == 1 and at - self._ranks_wait_since >= LONGEST_STEP:  # else it may be another engine's
            self.engines[self._latest].is_still, self.dumped_at = True, at

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
        loads = self.engines.values()
        return any((load.is_still or load.prefilled) and load.running + load.waiting > 0 for load in loads)

    @property
    def requests(self) -> int:
        """The requests that the last lines of the engines reported."""
        return sum(load.running + load.waiting for load in self.engines.values())

    def frozen(self, answers: int | None) -> Callable[[float], list[Reading]]:
        """Return the series so far as a function of time, which further lines do not change."""
        so_far = deepcopy(self)
        return lambda now: list(so_far.series(now, answers))

    def series(self, now: float, answers: int | None) -> Iterator[Reading]:
        """Yield the series of vLLM's page that the log tells at a moment, with the successful `answers` so far."""
        for engine, load in self.engines.items():
            if not load.is_known(now):
                continue
            finished = float(int(load.output_tokens / SHORTEST_ANSWER))
            if len(self.engines) == 1 and answers is not None:
                finished = float(self._uncounted + self._settled)
            values: dict[str, float] = {
                RUNNING: load.running,
                WAITING: load.waiting,
                PROMPTED: load.prompt_tokens,
                GENERATED: load.output_tokens,
                metric("time_to_first_token_seconds_count"): finished,
            }
            if load.highest_usage <= ROOMY:
                values[metric("num_preemptions_total")] = 0
            if load.usage is not None:
                values[metric("kv_cache_usage_perc")] = load.usage
            for name, value in values.items():
                yield {"__name__": name, "engine": engine}, float(value)
            for (of, name, position), count in self._counters.items():
                if of == engine:
                    yield {"__name__": name, "engine": of, **({"position": position} if position else {})}, count
            if load.deferred is not None or not load.waiting:
                for reason, count in (
                    ("capacity", load.waiting - (load.deferred or 0)),
                    ("deferred", load.deferred or 0),
                ):
                    yield (
                        {"__name__": f"{WAITING}_by_reason", "engine": engine, "reason": reason},
                        float(count),
                    )
            yield {"__name__": DONE, "engine": engine}, finished
        if answers is not None and not self.engines:
            yield {"__name__": DONE, "engine": "0"}, float(answers)
