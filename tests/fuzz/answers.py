"""Responses of a Prometheus that scraped a recorded server: from diag's own evaluator, or from a line of a text."""

import json
from collections.abc import Mapping
from functools import cache
from urllib.parse import parse_qs

import numpy as np
from support.bad_servers import Request
from support.paths import RECORDINGS

from diag import promql
from diag.core.errors import DiagError
from diag.sources.recording.reader import read


def odd(line: bytes, request: Request) -> tuple[int, bytes]:
    """Status and body: the line itself, behind its status, or the good answer changed by ~OLD~NEW."""
    if line.startswith(b"~"):
        old, _, new = line[1:].partition(b"~")
        status, body = good(request.path, request.body)
        return status, body.replace(old or b"metric", new, 20)
    status, _, body = line.partition(b" ")
    return (int(status), body) if status in (b"400", b"404", b"422", b"500", b"503") else (200, line)


@cache
def _recorded() -> tuple[promql.Samples, int]:
    seen = read(RECORDINGS / "kv_cascade")
    return seen.samples, int(seen.instants[-1])


@cache
def good(path: str, form: bytes) -> tuple[int, bytes]:
    """Return the response of a Prometheus that scraped the recorded server."""
    samples, end = _recorded()
    asked = {name: values[0] for name, values in parse_qs(form.decode()).items()}
    labels = [labels for block in samples.select(()) for labels in block.labels]
    if path.endswith("/series") or "/series?" in path:
        return 200, _document([known for known in labels if known["__name__"].startswith("vllm:num")])
    if "/rules" in path:
        return 200, _document({"groups": []})
    query = asked.get("query", "")
    if query.endswith("]"):
        return 200, _document({"resultType": "matrix", "result": _raw(samples, "up")})
    try:
        return 200, _document(_result(query, asked, samples, end))
    except DiagError as error:
        return 422, json.dumps({"status": "error", "errorType": "execution", "error": str(error)}).encode()


def _document(data: object) -> bytes:
    return json.dumps({"status": "success", "data": data}).encode()


def _raw(samples: promql.Samples, name: str) -> list[Mapping[str, object]]:
    return [
        {"metric": labels, "values": [[at / 1000, str(value)] for at, value in zip(block.times, row, strict=True)]}
        for block in samples.select(())
        for labels, row in zip(block.labels, block.values, strict=True)
        if labels["__name__"] == name
    ]


def _result(query: str, asked: Mapping[str, str], samples: promql.Samples, end: int) -> Mapping[str, object]:
    is_range = "start" in asked
    start = float(asked.get("start", asked.get("time", end / 1000)))
    step = float(asked.get("step", "1s").rstrip("s") or 1)
    stop = float(asked.get("end", start))
    instants = np.arange(round(start * 1000), round(stop * 1000) + 1, max(1, round(step * 1000)), dtype=np.int64)
    vector = promql.evaluate(query, samples, instants)
    rows = []
    for labels, values, present in zip(vector.labels or ({},), vector.values, vector.present, strict=False):
        points = [
            [int(at) / 1000, str(float(value))] for at, value in zip(instants[present], values[present], strict=True)
        ]
        rows.append({"metric": dict(labels), **({"values": points} if is_range else {"value": points[-1]})})
    return {"resultType": "matrix" if is_range else "vector", "result": rows}
