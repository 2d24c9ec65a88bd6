"""A Prometheus out of a recording, over HTTP, whose answers a test may refuse, distort or replace.

It answers by our own evaluator; what real ones answer is what the other tests are for.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import numpy.typing as npt
from support.bad_servers import Reply, Request

from diag.core.errors import DiagError
from diag.promql import Evaluator, Vector, is_stale
from diag.promql.data import Matcher
from diag.sources.recording.reader import read

Document = dict[str, Any]
Mutate = Callable[[str, Document], Document | Reply]
"""What becomes of the answer to a query; what asks for series or rules is no query, ""."""
_RAW = re.compile(r"(\w+)\{.*\}\[(\d+)ms\]", re.DOTALL)
_JSON = {"Content-Type": "application/json"}
ODD_NUMBERS = ("NaN", "+Inf", "-Inf", "1e308", "-1e308", "1e-320", "-1", "0", "9" * 400)
ODD_DOCUMENTS: tuple[Any, ...] = (
    *({}, [], None, 0, "", {"status": "success"}, {"data": None}, {"data": {"result": None}}),
    *({"data": {"resultType": "vector", "result": [{}]}}, {"data": {"result": [{"metric": {}, "value": [1]}]}}),
    {"data": {"result": [{"metric": {"instance": 3}, "value": [1, "1"]}]}},
    {"data": {"result": [{"metric": {"instance": "127.0.0.1:8101"}, "value": ["x", "1"], "values": [[1, "1"]]}]}},
    {"data": {"result": [{"metric": {"instance": "127.0.0.1:8101"}, "value": [1e300, "1"]}]}},
)
PLAIN = {"data": {"resultType": "vector", "result": []}}


def refused(status: int = 422, reason: str = "this query is not allowed") -> Reply:
    return Reply(json.dumps({"status": "error", "errorType": "execution", "error": reason}).encode(), status, _JSON)


class ScriptedPrometheus:
    """Answers requests to its API as if the recording had just ended."""

    def __init__(self, recording: Path, mutate: Mutate = lambda _, answer: answer) -> None:
        observed = read(recording)
        self._evaluator, self._now = Evaluator(observed.samples), int(observed.instants[-1]) / 1000
        self._known: dict[str, str] = {}
        self.mutate = mutate

    def __call__(self, request: Request) -> Reply:
        url = urlsplit(request.path)
        asked = f"{url.query}&{request.body.decode()}"
        form = {name: texts[0] for name, texts in parse_qs(asked).items()}
        query = form.get("query", "")
        key = url.path + asked
        if key not in self._known:
            try:
                self._known[key] = json.dumps(self._data(url.path, query, form))
            except DiagError as error:
                return refused(400, str(error))
        answer = self.mutate(query, {"status": "success", "data": json.loads(self._known[key])})
        return answer if isinstance(answer, Reply) else Reply(json.dumps(answer).encode(), headers=_JSON)

    def _data(self, path: str, query: str, form: dict[str, str]) -> Any:
        if path.endswith("/rules"):
            return {"groups": []}
        if path.endswith("/series"):
            return list(self._labels(form["match[]"]))
        if path.endswith("/query_range"):
            start, end, step = (round(float(form[name]) * 1000) for name in ("start", "end", "step"))
            return {"resultType": "matrix", "result": self._result(query, np.arange(start, end + 1, step), "values")}
        if query == "vector(time())":
            return {"resultType": "vector", "result": [{"metric": {}, "value": [self._now, f"{self._now:.3f}"]}]}
        at, raw = round(float(form["time"]) * 1000), _RAW.fullmatch(query)
        if raw:
            return {"resultType": "matrix", "result": list(self._raw(raw[1], at, int(raw[2])))}
        return {"resultType": "vector", "result": self._result(query, np.array([at]), "value")}

    def _labels(self, match: str) -> Iterator[dict[str, str]]:
        pattern = re.findall(r'__name__=~"([^"]*)"', match)[0]
        for block in self._evaluator.samples.select([Matcher("__name__", "=~", pattern)]):
            yield from ({**labels, "job": "vllm"} for labels in block.labels)

    def _result(self, query: str, at: npt.NDArray[np.int64], holds: str) -> list[Document]:
        vector = self._evaluator.evaluate(query, at)
        return [_series(vector, row, at, holds) for row in range(len(vector.labels))]

    def _raw(self, name: str, at: int, span: int) -> Iterator[Document]:
        for block in self._evaluator.samples.select([Matcher("__name__", "=", name)]):
            for labels, values in zip(block.labels, block.values, strict=True):
                kept = (block.times > at - span) & (block.times <= at) & ~is_stale(values)
                yield {"metric": labels, "values": _pairs(block.times[kept], values[kept])}


def _series(vector: Vector, row: int, at: npt.NDArray[np.int64], holds: str) -> Document:
    pairs = _pairs(at[vector.present[row]], vector.values[row][vector.present[row]])
    return {"metric": vector.labels[row], holds: pairs if holds == "values" else pairs[0]}


def _pairs(times: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> list[list[object]]:
    return [[int(time) / 1000, repr(float(value))] for time, value in zip(times, values, strict=True)]


def distorted(answer: Document, chance: random.Random) -> Document:
    """The answer with one of its numbers or times odd, a series gone or twice, or none left."""
    series = answer["data"]["result"] if isinstance(answer["data"], dict) and "result" in answer["data"] else []
    if not series:
        return answer
    one = chance.choice(series)
    pair = chance.choice(one["values"]) if "values" in one else one["value"]
    match chance.randrange(6):
        case 0 | 1 | 2:
            pair[1] = chance.choice(ODD_NUMBERS)
        case 3:
            pair[0] += chance.choice((-1e6, 0.5, 1e6))
        case 4:
            series.remove(one)
        case 5:
            series.append(one)
    return answer


def hostile(seed: int) -> Mutate:
    """Refuses some queries, distorts some answers and replaces some, the same ones for the same seed."""
    chance = random.Random(seed)

    def mutate(query: str, answer: Document) -> Document | Reply:
        draw = chance.random()
        if query in ("", "vector(time())") and draw > 0.01:
            return answer  # or few runs would come far
        if draw < 0.05:
            return refused(chance.choice((400, 422, 500)))
        if draw < 0.055:
            return refused(503, "query timed out in expression evaluation")
        if draw < 0.07:
            return chance.choice([document for document in ODD_DOCUMENTS if isinstance(document, dict)])
        if draw < 0.075:
            return Reply(b"<html>busy</html>", chance.choice((200, 404, 500)))
        return distorted(answer, chance) if draw < 0.25 else answer

    return mutate
