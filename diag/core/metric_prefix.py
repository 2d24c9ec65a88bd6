"""The prefix of vLLM's metrics: `vllm:` from vLLM itself, others from software between vLLM and the reader.

A Prometheus 2 that negotiates OpenMetrics stores `vllm_`, KServe and RHOAI relabel to `kserve_vllm:`, Ray's agents
serve `ray_vllm:` or `ray_vllm_`. Expressions are written with `vllm:`; samples get that name before they are judged.

Ray changes more than the prefix (vllm/v1/metrics/ray_wrappers.py, Ray 2.49). Its page is that of a node: it may have
several replicas, each with an engine 0. A counter or a histogram has no series before it counts something, so a counter
of events that never happened is missing where vLLM's own page has 0.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from diag.core.declarations import Mistake, read

OWN = "vllm:"
ANY = "(?:[a-zA-Z0-9_]+_)?vllm[_:]"
"""Matches every prefix; a recording rule (`job:vllm:...`) has none."""


class MetricNames(NamedTuple):
    """The file vllm_metrics.toml: other names of a metric by its name in diag, without prefix and suffix."""

    renamed: Mapping[str, tuple[str, ...]]

    def mistakes(self) -> tuple[()]:
        names = [name for family in self.renamed.items() for name in (family[0], *family[1])]
        for name in names:
            if names.count(name) > 1:
                raise Mistake(f"'{name}' is a name of two metrics", ("renamed", name))
        return ()


_RENAMED = read(Path(__file__).parent / "vllm_metrics.toml", MetricNames).renamed
PROBE = "|".join(("num_requests_running", *_RENAMED.get("num_requests_running", ())))
"""The names of the metric that every release has from its first scrape on, as a regular expression."""


_RAY = "ray_"
_RAY_BESIDE = {
    "num_preemptions_total": "num_requests_running",
    "generation_tokens_total": "num_requests_running",
    "prompt_tokens_total": "num_requests_running",
    "request_success_total": "num_requests_running",
    "iteration_tokens_total_count": "num_requests_running",
    "prefix_cache_hits_total": "prefix_cache_queries_total",
}
"""Counters that every server has; a missing counter is 0 where its companion metric exists."""
_ON_PAGE = re.compile(rf"^({ANY})(?:{PROBE})[ {{]".encode(), re.MULTILINE)
_SERIES = re.compile(rb"^vllm:(\w+)(\{.*\}) ", re.MULTILINE)
_REPLICAS = [re.compile(rb"^vllm:.*[{,]" + label + rb'="([^"]+)"') for label in (b"ReplicaId", b"WorkerId")]
_ENGINE = re.compile(rb'([{,]engine="[^"]*)(")')
_IN_PROMQL = re.compile(r'(?<![\w:])vllm:(?=[a-z("])')
_SUFFIX = "(?:_(?:total|bucket|sum|count|created))?"


def metric(name: str) -> str:
    """Return the name of a metric of vLLM in expressions and samples, from its name in diag."""
    return OWN + name


RUNNING = metric("num_requests_running")
WAITING = metric("num_requests_waiting")
FINISHED = metric("request_success_total")
GENERATED = metric("generation_tokens_total")
PROMPTED = metric("prompt_tokens_total")
CACHE_INFO = metric("cache_config_info")
SERVES = f'{{__name__=~"{RUNNING}|{GENERATED}"}}'
"""Selects series that each server has."""


@cache
def _selections(name: str) -> re.Pattern[str]:
    """Return the pattern of a metric in PromQL: in a regular expression, in a call over a range, or on its own."""
    selector = rf"(?<![\w:]){OWN}{name}{_SUFFIX}(?![\w:])(?:\{{[^{{}}]*\}})?"
    ranged = rf"\b[a-z_]+\((?:[^()\[\]]*, )?{selector}\[[^\]]*\](?: offset \w+)?(?:, [^()]*)?\)"
    return re.compile(rf'(?P<listed>(?<=["|]){OWN}{name}{_SUFFIX}(?=["|]))|{ranged}|{selector}(?!\[)')


@lru_cache(maxsize=4096)
def in_any_release(promql: str) -> str:
    """Return PromQL that selects renamed metrics by all of their names, "increase(x[5m]) or increase(y[5m])"."""
    for name, others in _RENAMED.items() if OWN in promql else ():
        if OWN + name in promql:
            promql = _selections(name).sub(lambda selection: _by_all(selection, name, others), promql)  # noqa: B023
    return promql


def _by_all(selection: re.Match[str], name: str, others: tuple[str, ...]) -> str:
    texts = [re.sub(rf"{OWN}{name}(?={_SUFFIX}\b)", OWN + each, selection[0]) for each in (name, *others)]
    if selection["listed"]:
        return "|".join(texts)
    around = selection.string[: selection.start()][-1:] + selection.string[selection.end() :][:1]
    return " or ".join(texts) if around == "()" else f"({' or '.join(texts)})"


def _with_names_of_diag(page: bytes) -> bytes:
    """Return a page with renamed metrics under their names in diag, unless it has these as well."""
    for name, others in _RENAMED.items():
        for other in others:
            if b"vllm:" + other.encode() in page and b"\nvllm:" + name.encode() not in page:
                lines = rf"^((?:# (?:HELP|TYPE) )?vllm:){other}(?={_SUFFIX}[ {{])".encode()
                page = re.sub(lines, rb"\g<1>" + name.encode(), page, flags=re.MULTILINE)
    return page


def with_prefix(text: str, prefix: str) -> str:
    """Return PromQL, or a text that contains some, for metrics that are stored with this prefix."""
    if prefix == OWN:
        return text
    text = _IN_PROMQL.sub(prefix, text)
    if prefix.startswith(_RAY):
        for counter, beside in _RAY_BESIDE.items():  # a missing counter is 0
            call = re.compile(rf"\w+\(\s*{prefix}{counter}(\{{[^{{}}]*\}})?(\[[^]]+\])\s*\)")
            text = call.sub(rf"(\g<0> or 0 * last_over_time({prefix}{beside}\1\2))", text)
    return text


def named_as_ours(page: bytes) -> tuple[bytes, str]:
    """Return the page with vLLM's metrics by their names in diag, and the prefix that they had; "" for `vllm:`."""
    if b"\nvllm:" in page or page.startswith(b"vllm:"):
        return _with_names_of_diag(page), ""
    probe = _ON_PAGE.search(page)
    if probe is None:
        return page, ""
    metric_lines = re.compile(rb"^((?:# (?:HELP|TYPE) )?)" + probe[1], re.MULTILINE)
    page, prefix = _with_names_of_diag(metric_lines.sub(rb"\1vllm:", page)), probe[1].decode()
    if not prefix.startswith(_RAY):
        return page, prefix

    # complete the page of Ray's agent as vLLM would write it: with zeros, and with one engine for each replica
    labels: dict[str, set[bytes]] = defaultdict(set)
    for name, inside in _SERIES.findall(page):
        labels[name.decode()].add(inside)
    zeros = [
        f"vllm:{counter}".encode() + inside + b" 0\n"
        for counter, beside in _RAY_BESIDE.items()
        for inside in sorted(labels[beside] - labels[counter])
    ]
    whole, newline, rest = page.rpartition(b"\n")
    lines = (whole + newline + b"".join(zeros) + rest).split(b"\n")
    matches = ((at, label.match(line)) for at, line in enumerate(lines) for label in reversed(_REPLICAS))
    replicas = {at: match[1] for at, match in matches if match}
    if len(set(replicas.values())) > 1:
        for at, replica in replicas.items():
            lines[at] = _ENGINE.sub(rb"\1@" + replica + rb"\2", lines[at])  # engine "0" is "0@<replica>"
    return b"\n".join(lines), prefix


def relabelling(prefix: str) -> str:
    return (
        f"metric_relabel_configs: [{{source_labels: [__name__], regex: '{prefix}(.+)', target_label: __name__,"
        " replacement: 'vllm:$1'}]"
    )
