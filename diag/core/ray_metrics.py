"""What else differs where Ray exports vLLM's metrics (vllm/v1/metrics/ray_wrappers.py, Ray 2.49).

A page is that of a node: it may have several replicas, each with an engine 0. A counter or a histogram has no series
before it counts something, so that what never happened is missing where vLLM's own page has 0.
"""

import re
from collections import defaultdict

BESIDE = {
    "num_preemptions_total": "num_requests_running",
    "generation_tokens_total": "num_requests_running",
    "prompt_tokens_total": "num_requests_running",
    "request_success_total": "num_requests_running",
    "iteration_tokens_total_count": "num_requests_running",
    "prefix_cache_hits_total": "prefix_cache_queries_total",
}
"""Counters that every server has, each with a metric beside which its absence means 0."""
_SERIES = re.compile(rb"^vllm:(\w+)(\{.*\}) ", re.MULTILINE)
_REPLICAS = [re.compile(rb"^vllm:.*[{,]" + label + rb'="([^"]+)"') for label in (b"ReplicaId", b"WorkerId")]
_ENGINE = re.compile(rb'([{,]engine="[^"]*)(")')


def completed_page(page: bytes) -> bytes:
    """A page of Ray's agent, its metrics named `vllm:`, as one of vLLM would be: with zeros, and an engine for each."""
    return _with_replicas_as_engines(_with_zeros(page))


def completed_promql(promql: str, prefix: str) -> str:
    """PromQL for Ray's series in which a counter that has not counted yet is 0."""
    for counter, beside in BESIDE.items():
        known = re.compile(rf"\w+\(\s*{prefix}{counter}(\{{[^{{}}]*\}})?(\[[^]]+\])\s*\)")
        promql = known.sub(rf"(\g<0> or 0 * last_over_time({prefix}{beside}\1\2))", promql)
    return promql


def _with_zeros(page: bytes) -> bytes:
    labels: dict[str, set[bytes]] = defaultdict(set)
    for name, inside in _SERIES.findall(page):
        labels[name.decode()].add(inside)
    zeros = [
        f"vllm:{counter}".encode() + inside + b" 0\n"
        for counter, beside in BESIDE.items()
        for inside in sorted(labels[beside] - labels[counter])
    ]
    whole, newline, rest = page.rpartition(b"\n")
    return whole + newline + b"".join(zeros) + rest


def _with_replicas_as_engines(page: bytes) -> bytes:
    """Engine "0@<replica>" where there are several replicas."""
    lines = page.split(b"\n")
    of_line = {at: found[1] for at, line in enumerate(lines) if (found := _replica(line))}
    if len(set(of_line.values())) > 1:
        for at, replica in of_line.items():
            lines[at] = _ENGINE.sub(rb"\1@" + replica + rb"\2", lines[at])
    return b"\n".join(lines)


def _replica(line: bytes) -> re.Match[bytes] | None:
    return next((found for label in _REPLICAS if (found := label.match(line))), None)
