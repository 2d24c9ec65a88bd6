"""Two pools by prompt length, instead of replicas that mix them: where to split, how large, and with what effect.

The answer is simulated: requests with this server's own lengths, as many at a time as it has in flight, run through the
model of `scheduler_model.py`. The model is tested against the present first: if its requests per second, TTFT, KV cache
usage and the harm of the incident are not those of the server within `MOST_ERROR`, there is no answer.

vLLM counts prompts and outputs in two histograms. How they belong together shows from scrape to scrape: the mean output
of long prompts is the one that explains the outputs of the requests that finished between two scrapes. The number of
simulated requests is bounded, so an answer takes less than half a second.
"""

import math
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from diag.core.formatting import quantity
from diag.core.subjects import Floats, Instants, label_value
from diag.diagnosis.diagnose import FEW, Diagnosis
from diag.diagnosis.query_cache import QueryCache, Window
from diag.diagnosis.scheduler_model import LengthHistogram, ReplicaFigures, Requests, ServerModel, draw, simulate

MOST_ERROR = 0.25
"""Relative error of the model of the present from which on it says nothing."""
REPLICAS = (2, 3, 4)
"""Replicas to divide into two pools; the proportions hold for more of them."""
REQUESTS, BASE_REQUESTS = 300, 1200
"""Simulated requests for each replica, and for the present; the first third of them warms up the model."""
MOST_CLIENTS = 100
"""Requests in flight at a replica up to which so few requests are a steady state."""
LEAST_LONG, MOST_LONG = 0.02, 0.6
"""Share of requests beyond a split point."""
HELPS, KEEPS = 0.5, 0.9
"""Two pools leave at most this share of the harm, and keep at least this share of the requests per second."""
CLEARLY = 0.02
"""Harm by which more replicas have to be better to be proposed instead of fewer."""
FEWEST = 20
"""Finished requests below which their lengths say little."""

MOST_SECONDS = 900.0
"""Seconds of samples to look at: the more long prompts, the less of what they do is chance."""
FEWEST_ROWS = 6
SHORTEST_STEP, LONGEST = 1e-4, 1e7
"""Seconds of a step and tokens of a request beyond which a number is no server's."""
SCRAPES = 3
"""Intervals between scrapes over which counters are compared: a prompt is counted when its prefill ends."""

PROMPTS = "sum by ($by, le) (increase(vllm:request_prompt_tokens_bucket[$window]))"
OUTPUTS = "sum by ($by, le) (increase(vllm:request_generation_tokens_bucket[$window]))"
NUMBERS = {
    "usage": "$kv_cache_usage_mean",
    "finished": "$finished_requests",
    "seconds": "$window_seconds",
    "time_in_server": "$end_to_end_seconds_total",
    "ttft": "sum by ($by) (increase(vllm:time_to_first_token_seconds_sum[$window])) / ($first_tokens > 0)",
    "computed": "clamp_max($prefilled_tokens / ($finished_prompt_tokens > 0), 1)",
    "mean_prompt": "$mean_prompt_tokens",
    "mean_output": "$mean_output_tokens",
    "preemptions": "$preemptions / ($finished_requests > 0)",
    "paused": "$paused_time / ($itl_sum > 0)",
    "capacity": "$config_kv_cache_size_tokens",
}
"""What the server shows, each a number for each engine."""


class Pools(NamedTuple):
    """Two pools: prompts up to `edge` tokens on `short` replicas, longer ones on `long`; `error` is the model's."""

    edge: float
    short: int
    long: int
    error: float
    mixed: ReplicaFigures
    split: ReplicaFigures

    @property
    def text(self) -> str:
        """The proposal in words, with the effect on the harm and on TTFT."""
        if self.mixed.preemptions > self.mixed.paused:
            harm = ("preemptions per finished request", "preemptions", "ratio")
        else:
            harm = ("decode time in stream pauses", "paused", "share")
        rows = (harm, ("TTFT (mean)", "ttft", "seconds"))
        effects = (
            f"{name} {' -> about '.join(quantity(getattr(o, figure), unit) for o in (self.mixed, self.split))}"
            for name, figure, unit in rows
        )
        return (
            f"Of every {self.short + self.long} replicas, serve prompts up to {self.edge:,.0f} tokens on {self.short} "
            f"and longer ones on {self.long}. Simulated with the lengths and the load of this server (model error "
            f"{100 * self.error:.0f} %): {', '.join(effects)}."
        )


# -- what the server shows ---------------------------------------------------------------------------------------------


class _Engine:
    """Telemetry of an engine at the instant that is reported."""

    def __init__(self, diagnosis: Diagnosis, queries: QueryCache) -> None:
        self.queries, self.per, self.subject = queries, diagnosis.incident.per, diagnosis.subject
        interval = queries.source.interval
        end = round(diagnosis.instants[diagnosis.reported] * 1000)
        self.window = queries.holding(min(MOST_SECONDS, (end - queries.source.first) / 1000))
        self.short = queries.holding(SCRAPES * interval)
        steps = np.arange(max(0, int((self.window.seconds - self.short.seconds) // interval)), -1, -1)
        self.instants = (end - steps * round(interval * 1000)).astype(np.int64)
        self.now = self.instants[-1:]
        found = {name: self._value(promql) for name, promql in NUMBERS.items()}
        self.numbers = {name: value for name, value in found.items() if math.isfinite(value)}

    def _value(self, promql: str) -> float:
        row = self.queries.ask(promql, self.per, self.window, self.now).of(self.subject)
        return math.nan if row is None else float(row[-1])

    def lengths(self, promql: str) -> LengthHistogram | None:
        """Return a histogram; None if it has no requests."""
        buckets = self._buckets(promql, self.window, self.now)
        counts = [(edge, float(row[-1])) for edge, row in sorted(buckets.items())]
        if not counts or not math.isinf(counts[-1][0]) or not counts[-1][1] > 0:
            return None
        finite = [(edge, count / counts[-1][1]) for edge, count in counts[:-1] if 0 < edge < LONGEST and count >= 0]
        return LengthHistogram(*zip(*finite, strict=True)) if finite else None

    def _buckets(self, promql: str, window: Window, instants: Instants) -> dict[float, Floats]:
        """Return the rows of a histogram by the upper edge of their bucket; a label that is no number is left out."""
        found = {}
        for labels, row in self.queries.ask(promql, self.per, window, instants).like(self.subject):
            with suppress(ValueError):
                found[float(label_value(labels, "le"))] = row
        return found

    def step_times(self, tokens_held: float) -> tuple[float, float] | None:
        """Return the seconds of a step and of a prefilled token: the least squares over the time between scrapes.

        The tokens of preempted requests are prefilled again. None if the scrapes do not tell both.
        """
        promql = ("$window_seconds", "$engine_steps", "$prompt_tokens", "$preemptions")
        rows = [self.queries.ask(each, self.per, self.short, self.instants).of(self.subject) for each in promql]
        seconds, steps, prompts, preemptions = (np.zeros(0) if row is None else row for row in rows)
        if len({len(seconds), len(steps), len(prompts), len(preemptions)}) > 1:
            return None
        solution = _least_squares(steps, prompts + preemptions * tokens_held, seconds)
        return solution if solution and solution[0] > SHORTEST_STEP and solution[1] > 0 else None

    def mean_output_beyond(self, edge: float) -> float | None:
        """Return the mean output of prompts beyond an edge: the least squares over what finished between scrapes."""
        outputs = self.queries.ask("$finished_output_tokens", self.per, self.short, self.instants).of(self.subject)
        buckets = self._buckets(PROMPTS, self.short, self.instants)
        if outputs is None or not {edge, math.inf} <= buckets.keys():
            return None
        solution = _least_squares(buckets[edge], buckets[math.inf] - buckets[edge], outputs)
        return max(1.0, solution[1]) if solution else None


def _least_squares(first: Floats, second: Floats, result: Floats) -> tuple[float, float] | None:
    """Return the factors of two columns whose sum is the result; None if too few rows tell them apart."""
    matrix = np.stack([first, second], axis=1)
    known = np.isfinite(matrix).all(axis=1) & np.isfinite(result) & (matrix > 0).any(axis=1)
    if known.sum() < FEWEST_ROWS or not (matrix[known] > 0.5).any(axis=0).all():
        return None
    solution, _, rank, _ = np.linalg.lstsq(matrix[known], result[known], rcond=None)
    return (float(solution[0]), float(solution[1])) if rank == 2 else None


def find_pools(diagnosis: Diagnosis, queries: QueryCache, budget: float | None, cap: float | None) -> Pools | None:
    """Return the two pools that help most at an engine with a present incident; None if none helps or none can be told.

    `budget` and `cap` are the running --max-num-batched-tokens and --max-num-seqs. A fleet of more than a few servers
    gets no answer: each takes a fraction of a second.
    """
    if len(queries.subjects(("instance",))) > FEW:
        return None
    server = _Engine(diagnosis, queries)
    shown = server.numbers
    prompts, outputs = server.lengths(PROMPTS), server.lengths(OUTPUTS)
    if shown.keys() != NUMBERS.keys() or prompts is None or outputs is None or budget is None or cap is None:
        return None
    if shown["finished"] < FEWEST or min(shown["capacity"], shown["usage"]) <= 0:
        return None
    times = server.step_times(shown["mean_prompt"] + shown["mean_output"] / 2)
    clients = round(shown["time_in_server"] / shown["seconds"])  # Little's law; the gauges do not move within a step
    if times is None or not 1 <= clients <= MOST_CLIENTS:
        return None

    model = ServerModel(
        step=times[0],
        token=times[1],
        capacity=shown["capacity"],
        budget=budget,
        cap=cap,
        clients=clients,
        freeze=queries.contract.freeze_seconds,
    )
    present = ReplicaFigures(
        shown["finished"] / shown["seconds"], shown["ttft"], shown["usage"], shown["preemptions"], shown["paused"]
    )
    means = (shown["mean_prompt"] * shown["computed"], shown["mean_output"])
    edge = _split_point(prompts)
    long_mean = None if edge is None else server.mean_output_beyond(edge)
    if edge is None or long_mean is None:
        return None
    share_of_long = 1 - prompts.share_up_to(edge)

    def run(pools: tuple[int, int], is_open: bool, count: int) -> tuple[ReplicaFigures, Requests]:
        chance = np.random.default_rng(count)
        many = max(1, round(share_of_long * count))
        requests = draw(prompts, outputs, means, long_mean, chance.permutation(np.arange(count) < many).tolist())
        times = chance.exponential(1 / (present.rate * sum(pools)), 2 * count).cumsum().tolist() if is_open else ()
        return simulate(model, requests, pools, times), requests

    # requests that arrive at random, or clients that wait for an answer: whichever is more like the present
    both = [(is_open, *run((1, 0), is_open, BASE_REQUESTS)) for is_open in (True, False)]
    is_open, mixed, requests = min(both, key=lambda each: _error(each[1], present))
    error = _error(mixed, present)
    best: Pools | None = None
    for replicas in REPLICAS if error <= MOST_ERROR else ():
        long = min(max(1, round(replicas * _work_of_long(requests, mixed))), replicas - 1)
        split, _ = run((replicas - long, long), is_open, REQUESTS * replicas)
        helps = _harm(split) <= HELPS * _harm(mixed) and split.rate >= KEEPS * mixed.rate and split.ttft <= mixed.ttft
        if helps and (best is None or _harm(split) < _harm(best.split) - CLEARLY):
            best = Pools(edge, replicas - long, long, error, mixed, split)
    return best


def _split_point(prompts: LengthHistogram) -> float | None:
    """Return the edge that puts the most prompt tokens with the fewest requests on its far side; None if none does.

    Where hardly any prompt lies between several edges, it is the middle one of them.
    """
    lengths = np.array([prompts.at((k + 0.5) / 200) for k in range(200)])
    contrasts = {
        edge: float(lengths[lengths > edge].sum() / lengths.sum() - (1 - share))
        for edge, share in zip(prompts.edges, prompts.shares, strict=True)
        if LEAST_LONG <= 1 - share <= MOST_LONG
    }
    best = [edge for edge, contrast in contrasts.items() if contrast >= 0.98 * max(contrasts.values())]
    return best[len(best) // 2] if best else None


def _error(model: ReplicaFigures, present: ReplicaFigures) -> float:
    """Return the largest relative error of the model of the present: of load and latency, and of the larger harm."""
    harm = max((present.preemptions, model.preemptions), (present.paused, model.paused))
    figures = [(present.rate, model.rate), (present.ttft, model.ttft), (present.usage, model.usage), harm]
    return max(abs(ours - shown) / max(shown, 1e-9) for shown, ours in figures)


def _harm(outcome: ReplicaFigures) -> float:
    return outcome.preemptions + outcome.paused


def _work_of_long(requests: Requests, mixed: ReplicaFigures) -> float:
    """Return the share of the work that prompts beyond the split point are: of what they take most, cache or steps."""
    fills_cache = mixed.preemptions > mixed.paused
    work = [(prompt + output / 2) * output if fills_cache else prompt for prompt, output, _ in requests]
    return sum(each for each, (_, _, is_long) in zip(work, requests, strict=True) if is_long) / sum(work)
