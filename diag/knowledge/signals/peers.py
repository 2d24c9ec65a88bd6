"""Signals that compare an engine with its peers: all engines, itself included, that serve the same model name.

Peers are replicas, or the data-parallel ranks of one replica. A peer counts if it has three samples in the window. Of
three or more, the median shows what is usual; of two, the other one does.
"""

from diag.core.incident import Part, Signal

PEERS = "by (model_name)"
"""Every expression over peers contains this."""


def _beside_peers(own: str, operator: str, other: str, of_all: str) -> str:
    """Return an engine's own value, an operator, and the value of the other one of two, or the aggregate of all.

    `own`, `other` and `of_all` keep the name of the model until they have met.
    """
    return f"max by ($by) ({own} {operator} {other} or {own} {operator} on (model_name) group_left () {of_all})"


def _of_the_other(each: str) -> Part:
    """Return the value of the other engine where there are two."""
    both = f"(sum {PEERS} (${each}) and count {PEERS} (${each}) == 2)"
    return Part(f"{each}_of_the_other", f"-1 * (${each} - on (model_name) group_left () {both})")


PARTS: tuple[Part, ...] = (
    Part("load_of_model", "$requests_running_mean by ($by, model_name) + $requests_waiting_mean by ($by, model_name)"),
    Part("waiting_of_model", "$requests_waiting_median by ($by, model_name)", "requests"),
    Part("output_tokens_of_model", "$output_tokens by ($by, model_name)", "tokens"),
    Part(
        "token_counts_of_model",
        "sum by ($by, model_name) (changes(vllm:generation_tokens_total[$window]))",
        "changes",
    ),
    *map(_of_the_other, ("load_of_model", "waiting_of_model", "output_tokens_of_model", "token_counts_of_model")),
    Part("median_load_of_peers", f"quantile {PEERS} (0.5, $load_of_model)", "requests"),
)

load_of_peers = Signal(
    "requests / median of its peers",
    # at least 1: a multiple of zero is meaningless
    _beside_peers(
        "$load_of_model", "/", "clamp_min($load_of_model_of_the_other, 1)", "clamp_min($median_load_of_peers, 1)"
    ),
    "it holds {value} times as many requests as the median of its peers",
    "ratio",
)
load_beyond_peers = Signal(
    "requests above the median of its peers",
    _beside_peers("$load_of_model", "-", "$load_of_model_of_the_other", "$median_load_of_peers"),
    "requests above the median of its peers: {value}",
    "requests",
)
peers_waiting = Signal(
    "requests waiting (median of its peers)",
    _beside_peers(
        "0 * $waiting_of_model", "+", "$waiting_of_model_of_the_other", f"quantile {PEERS} (0.5, $waiting_of_model)"
    ),
    "waiting requests at the median of its peers: {value}",
    "requests",
)
peers = Signal(
    "engines serving the same model",
    # the other one of two counts where it generates tokens: a standby is idle on purpose
    _beside_peers(
        "0 * $load_of_model",
        "+",
        "1 + ($token_counts_of_model_of_the_other > bool 0)",
        f"count {PEERS} ($load_of_model)",
    ),
    "engines serving the same model: {value}",
    "engines",
)
tokens_of_peers = Signal(
    "tokens generated / median of its peers",
    _beside_peers(
        "$output_tokens_of_model",
        "/",
        "clamp_min($output_tokens_of_model_of_the_other, 1)",
        f"clamp_min(quantile {PEERS} (0.5, $output_tokens_of_model), 1)",
    ),
    "it generates {value} times as many tokens as the median of its peers",
    "ratio",
)

# -- the data-parallel engines of one server --------------------------------------------------------------------------

engines = Signal(
    "engines of the server",
    "count by ($by) (count by (instance, engine) (count_over_time(vllm:num_requests_running[$window])))",
    "engines of this server: {value}",
    "engines",
)
requests_stuck_on_all_engines = Signal(
    "requests in flight while no engine makes progress",
    "$requests_in_flight_without_progress",
    "requests in flight while none of the engines makes progress: {value}",
    "requests",
    throughout=True,
    culprit_promql="sum by (instance, engine) ($running_minimum_by_series) > 0",
    culprit_label="engine {engine}",
)
