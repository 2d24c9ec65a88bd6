"""What a server had to do before a ramp, and requests like those that it had."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from diag.core.contract import Contract
from diag.core.formatting import quantity
from diag.diagnosis.query_cache import QueryCache
from diag.knowledge.formulas import formula
from diag.promql import Formula
from diag.ramp.step import RATES, value
from diag.sources.observation import Observation, SampleSource

ASSUMED = 512, 128
"""Tokens of prompt and answer where the server has not finished a request yet."""
WIDEST = 0.9
"""Lengths vary from a tenth of their mean to nearly twice that at most."""
_TOTAL = "sum(last_over_time(vllm:request_{0}_tokens_{1}[1h]))"
_QUANTILE = "histogram_quantile({1}, sum by (le) (last_over_time(vllm:request_{0}_tokens_bucket[1h])))"
_CACHE = "sum(last_over_time(vllm:prefix_cache_{0}_total[1h]))"


class OwnTraffic(NamedTuple):
    """What the server had before the ramp, per second."""

    requests_per_second: float
    output_tokens_per_second: float


class RequestLengths(NamedTuple):
    """Tokens of a request: prompt (with `prefix` of them shared by all) and answer, each spread by a share of its mean.

    `source` says where they come from.
    """

    prompt: int
    output: int
    source: str
    prefix: int = 0
    spread: float = 0.0

    @property
    def shown(self) -> str:
        """In words."""
        spread = f" +- {quantity(self.spread, 'share')}" if self.spread >= 0.01 else ""
        prefix = f", {self.prefix} of them a shared prefix" if self.prefix else ""
        return f"{self.prompt} + {self.output} tokens a request{spread}{prefix} ({self.source})"


def own_traffic(seen: Observation, contract: Contract) -> OwnTraffic:
    """Over all that was watched, idle moments included."""
    queries = QueryCache(SampleSource(seen.samples, seen.instants, seen.interval), contract)
    seconds = queries.span + seen.interval
    return OwnTraffic(*((value(queries, RATES[name]) or 0.0) / seconds for name in OwnTraffic._fields))


def request_lengths(seen: Observation, prompt: int | None, output: int | None) -> RequestLengths:
    """As given, else like all requests that this server has finished; never longer than its context."""
    last = _Last(seen)
    own = [last.mean("prompt"), last.mean("generation")]
    if prompt and output:
        found = RequestLengths(prompt, output, "as given")
    elif all(own):
        found = RequestLengths(prompt or round(own[0]), output or round(own[1]), "as this server's own")
        found = found._replace(spread=last.spread(), prefix=math.floor(found.prompt * last.hit_rate()))
    else:
        found = RequestLengths(prompt or ASSUMED[0], output or ASSUMED[1], "assumed: it has finished none")
    return _within(found, last.longest())


def _within(lengths: RequestLengths, longest: float) -> RequestLengths:
    """Cut to --max-model-len: the answer to a quarter of it, the prompt to what is left."""
    room = longest - 16  # what a tokenizer adds
    if not longest or (lengths.prompt + lengths.output) * (1 + lengths.spread) <= room:
        return lengths
    output = max(1, min(lengths.output, round(room / 4)))
    prompt = max(1, min(lengths.prompt, round(room) - output))
    source = f"{lengths.source}, cut to --max-model-len"
    return RequestLengths(prompt, output, source, min(lengths.prefix, prompt // 2))


class _Last:
    """Numbers of the last scrape: counters since the server's start."""

    def __init__(self, seen: Observation) -> None:
        self._source = SampleSource(seen.samples, seen.instants[-1:], seen.interval)

    def mean(self, kind: str) -> float:
        """Mean length; 0 where none has finished."""
        return self._ratio(_TOTAL.format(kind, "sum"), _TOTAL.format(kind, "count"))

    def hit_rate(self) -> float:
        """Of the prefix cache, 0 where it is off."""
        return min(self._ratio(_CACHE.format("hits"), _CACHE.format("queries")), 0.95)

    def spread(self) -> float:
        """Half of the range of an even distribution with the same 10th and 90th percentiles, per mean, of both."""
        return sum(self._spreads()) / 2

    def _spreads(self) -> Iterator[float]:
        for kind in ("prompt", "generation"):
            low, high = (self._number(_QUANTILE.format(kind, share)) for share in (0.1, 0.9))
            mean = self.mean(kind)
            yield min(max(high - low, 0.0) / (1.6 * mean), WIDEST) if mean else 0.0

    def longest(self) -> float:
        """--max-model-len; 0 where it is not known."""
        return self._number(formula("$config_max_model_len", ("instance",), "1h", Contract()))

    def _ratio(self, above: str, below: str) -> float:
        total = self._number(below)
        return self._number(above) / total if total else 0.0

    def _number(self, promql: Formula | str) -> float:
        rows = list(self._source.ask(promql, self._source.instants).values())
        return float(rows[0][-1]) if rows and math.isfinite(rows[0][-1]) else 0.0
