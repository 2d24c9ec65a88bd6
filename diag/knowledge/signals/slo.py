"""Signals of the latency SLO: how fast the error budget burns."""

from diag.core.incident import Part, Signal
from diag.knowledge.signals.expressions import edge

BUDGETS = {"TTFT": "ttft", "inter-token latency": "itl", "end-to-end latency": "e2e"}
"""The latencies that an SLO limits, and how the names of their parts begin."""
LATENCIES = {latency: (f"${name}_count", f"${name}_within_slo") for latency, name in BUDGETS.items()}
"""All observations of each latency, and those within the SLO."""


def _within(metric: str, limit: str) -> str:
    """Return the observations of a histogram at or below a limit."""
    return f"sum by ($by) (increase({metric}_bucket{{{edge(limit)}}}[$window]))"


def _burn_rate(name: str) -> str:
    """Return the burn rate of an error budget: 1 uses it up in exactly a month.

    A late observation of fewer than ten may be chance: it counts as 1, and where that is the highest, a budget may burn
    or not.
    """
    late = f"(${name}_count - ${name}_within_slo)"
    return f"{late} / (${name}_count >= 10) / (1 - $objective) or {late} > bool 0"


PARTS: tuple[Part, ...] = (
    Part("ttft_count", "$first_tokens", "requests"),
    Part("ttft_within_slo", _within("vllm:time_to_first_token_seconds", "$ttft_seconds"), "requests"),
    Part(
        "itl_within_slo",
        f"{_within('vllm:inter_token_latency_seconds', '$itl_seconds')}"
        f" or {_within('vllm:time_per_output_token_seconds', '$itl_seconds')}",
        "tokens",
    ),
    Part("e2e_count", "sum by ($by) (increase(vllm:e2e_request_latency_seconds_count[$window]))", "requests"),
    Part("e2e_within_slo", _within("vllm:e2e_request_latency_seconds", "$e2e_seconds"), "requests"),
    *(Part(f"{name}_burn_rate", _burn_rate(name), "ratio") for name in BUDGETS.values()),
    Part(
        "burn_rates",
        " or ".join(
            f'label_replace(${name}_burn_rate, "latency", "{latency}", "", "")' for latency, name in BUDGETS.items()
        ),
        "ratio",
    ),
)

error_budget_burn_rate = Signal(
    "error budget burn rate",
    # the highest of them, where each can be judged: a bucket edge that a server lacks makes it unknown
    "max by ($by) ($burn_rates) != 1 and $ttft_within_slo and $itl_within_slo and $e2e_within_slo",
    "the error budget burns at {value} times the sustainable rate",
    "ratio",
    needs="10 responses, of which some are late",
    culprit_promql="$burn_rates > 1",
    culprit_label="{latency} burn rate {value}",
)
