"""Signals of the latency SLO: how fast the error budget burns."""

from diag.core.incident import Signal
from diag.knowledge.signals.expressions import counted, edge, itl


def slo_counts(metric: str, seconds: str) -> tuple[str, str]:
    """All observations of a latency histogram, and those within the SLO."""
    return counted(f"{metric}_count"), counted(f"{metric}_bucket", edge(seconds))


LATENCIES = {
    "TTFT": slo_counts("vllm:time_to_first_token_seconds", "$ttft_seconds"),
    "inter-token latency": (itl("count"), itl("bucket", edge("$itl_seconds"))),
    "end-to-end latency": slo_counts("vllm:e2e_request_latency_seconds", "$e2e_seconds"),
}
# The burn rate of each error budget: 1 uses it up in exactly a month. A late one of fewer than ten may be chance: it
# counts as 1, and where that is the highest, a budget may burn or not.
BURN_RATES = " or ".join(
    f"label_replace(({count} - {in_time}) / ({count} >= 10) / (1 - $objective) or ({count} - {in_time}) > bool 0,"
    f' "latency", "{latency}", "", "")'
    for latency, (count, in_time) in LATENCIES.items()
)
error_budget_burn_rate = Signal(
    "error budget burn rate",
    # the highest of them, where each can be judged: a bucket edge that a server lacks makes it unknown
    f"max by ($by) ({BURN_RATES}) != 1 and {' and '.join(in_time for _, in_time in LATENCIES.values())}",
    "the error budget burns at {value} times the sustainable rate",
    "ratio",
    needs="10 responses, of which some are late",
    culprit_promql=f"({BURN_RATES}) > 1",
    culprit_label="{latency} burn rate {value}",
)
