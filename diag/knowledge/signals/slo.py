"""Signals of the latency SLO: how fast the error budget burns."""

from diag.core.incident import Signal
from diag.knowledge.signals.expressions import counted, edge, itl


def promised(metric: str, seconds: str) -> tuple[str, str]:
    """All that a histogram counted, and what it counted in time."""
    return counted(f"{metric}_count"), counted(f"{metric}_bucket", edge(seconds))


PROMISES = {
    "first token": promised("vllm:time_to_first_token_seconds", "$ttft_seconds"),
    "next token": (itl("count"), itl("bucket", edge("$itl_seconds"))),
    "whole answer": promised("vllm:e2e_request_latency_seconds", "$e2e_seconds"),
}
# How many times as fast as it may each error budget burns; not at all where fewer than ten were counted.
BURNS = " or ".join(
    f"label_replace(({count} - {in_time}) / clamp_min({count}, 1) * ({count} >= bool 10) / (1 - $objective),"
    f' "promise", "{promise}", "", "")'
    for promise, (count, in_time) in PROMISES.items()
)
budget_burn = Signal(
    "error budget burn rate",
    # the worst of them, where each can be judged: an edge that a page lacks makes it unknown
    f"max by ($by) ({BURNS}) and {' and '.join(in_time for _, in_time in PROMISES.values())}",
    "the error budget burns at {value} times the sustainable rate",
    "ratio",
    culprit_promql=f"({BURNS}) > 1",
    culprit_label="{promise} {value}",
)
