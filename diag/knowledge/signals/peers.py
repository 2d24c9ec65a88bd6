"""Signals that compare an engine with its peers: all engines, itself included, that serve the same model name.

Peers are replicas, or the data-parallel ranks of one replica. A peer counts if it has three samples in the window.
"""

from diag.core.incident import Signal
from diag.knowledge.signals.expressions import RUNNING, WAITING, counted, gauge
from diag.knowledge.signals.forward_progress import requests_stuck

PEERS = "by (model_name)"
"""Every expression over peers contains this."""
MEDIAN = f"quantile {PEERS} (0.5, {{each}})"
AT_LEAST_ONE = f"clamp_min({MEDIAN}, 1)"
"""The median of the peers, at least 1: a multiple of zero is meaningless."""


def beside_peers(own: str, operator: str, of_all: str, each: str) -> str:
    """An engine's `own` value, an operator, and the aggregate `of_all` over the `{each}` of its peers.

    `own` and `each` are aggregated by ($by) and keep the name of the model until they have met.
    """
    one, all_of_them = (text.replace("$by", "$by, model_name") for text in (own, of_all.format(each=each)))
    return f"max by ($by) ({one} {operator} on (model_name) group_left () {all_of_them})"


LOAD = f"({gauge('avg_over_time(', RUNNING)} + {gauge('avg_over_time(', WAITING)})"
WAITS = gauge("quantile_over_time(0.5, ", WAITING)
WRITTEN = counted("vllm:generation_tokens_total")

load_of_peers = Signal(
    "requests / median of its peers",
    beside_peers(LOAD, "/", AT_LEAST_ONE, LOAD),
    "it holds {value} times as many requests as the median of its peers",
    "ratio",
)
load_beyond_peers = Signal(
    "requests above the median of its peers",
    beside_peers(LOAD, "-", MEDIAN, LOAD),
    "requests above the median of its peers: {value}",
    "requests",
)
peers_waiting = Signal(
    "requests waiting (median of its peers)",
    beside_peers(f"0 * {WAITS}", "+", MEDIAN, WAITS),
    "waiting requests at the median of its peers: {value}",
    "requests",
)
peers = Signal(
    "engines serving the same model",
    beside_peers(f"0 * {LOAD}", "+", f"count {PEERS} ({{each}})", LOAD),
    "engines serving the same model: {value}",
    "engines",
)
tokens_of_peers = Signal(
    "tokens generated / median of its peers",
    beside_peers(WRITTEN, "/", AT_LEAST_ONE, WRITTEN),
    "it generates {value} times as many tokens as the median of its peers",
    "ratio",
)

# -- the data-parallel engines of one server --------------------------------------------------------------------------

engines = Signal(
    "engines of the server",
    f"count by ($by) (count by (instance, engine) (count_over_time({RUNNING}[$window])))",
    "engines of this server: {value}",
    "engines",
)
requests_stuck_on_all_engines = Signal(
    "requests in flight while no engine makes progress",
    requests_stuck.promql,
    "requests in flight while none of the engines makes progress: {value}",
    "requests",
    throughout=True,
    culprit_promql=f"sum by (instance, engine) (min_over_time({RUNNING}[$window])) > 0",
    culprit_label="engine {engine}",
)
