"""Signals of an engine's load and of the latency SLO: requests, queue time, burn rates, and forecasts of all three.

A forecast extends the present rate, and holds only while that rate stands out from chance. Chance is known by its
mechanism: requests arrive and end at random, and each takes or frees its KV blocks at once. Over a window in which F
requests ended, usage moves by the blocks of sqrt(2 F) requests of the usual scatter of lengths; a sawtooth or a plateau
adds what a straight line leaves unexplained. Requests that only grow, token by token, move usage without either.
"""

from diag.core.incident import BurnRateWindow, documented, judged
from diag.knowledge.signals.expressions import E2E, ITL, TTFT, declared, labelled

ENOUGH = 10
"""Finished requests below which a habit of the clients may be chance; a reasoning model may finish two a minute."""
BUDGETS = {"TTFT": "ttft", "inter-token latency": "itl", "end-to-end latency": "e2e"}
"""Latencies with an SLO, and the prefix of the names of their parts."""
HISTOGRAMS = {"ttft": TTFT, "itl": ITL, "e2e": E2E}
LATENCIES = {latency: (f"${name}_count", f"${name}_within_slo") for latency, name in BUDGETS.items()}
"""All observations of each latency, and those within the SLO."""
SCATTER = 1.4
"""Root mean square of the KV blocks of requests, as a multiple of their mean: that of exponential lengths (judged)."""
MONTH = 30 * 86_400
FORECAST_SECONDS, LAST_SECONDS = 900, 10
HORIZON = judged("a rate of the last minutes says little about what comes after a quarter of an hour")
WORKBOOK = "https://sre.google/workbook/alerting-on-slos/"
FAST_BURN, SLOW_BURN = BurnRateWindow(14.4, "1h", "5m"), BurnRateWindow(6, "6h", "30m")
SPENDS_BUDGET_FAST = documented(
    "{threshold} uses 2 % of a month's error budget in one hour; over six hours the threshold is "
    f"{SLOW_BURN.factor:g}",
    WORKBOOK,
)


def _burn_rate(name: str) -> str:
    """Return the part NAME_burn_rate, the burn rate of an error budget: 1 uses it up in exactly a month.

    A late observation among fewer than ten may be chance: it counts as 1; if that is the highest rate, the result is
    unknown.
    """
    late = f"(${name}_count - ${name}_within_slo)"
    return f"{name}_burn_rate: ratio = {late} / (${name}_count >= 10) / (1 - $objective) or {late} > bool 0"


def _of_latencies(part: str) -> str:
    """Return the parts `NAME_part` of all latencies with an SLO, each labelled with its latency."""
    return labelled("latency", {latency: f"${name}_{part}" for latency, name in BUDGETS.items()})


PARTS, SIGNALS = declared(
    vars(),
    *map(_burn_rate, BUDGETS.values()),
    *(
        f"{name}_p99{'_by_itself' * (name == 'ttft')}: seconds ="
        f" histogram_quantile(0.99, sum by ($by, le) (increase({histogram}_bucket[$window])))"
        for name, histogram in HISTOGRAMS.items()
    ),
    # a request has its first token before its last; interpolation within wide buckets may say otherwise
    "ttft_p99: seconds = ($e2e_p99 < $ttft_p99_by_itself) or $ttft_p99_by_itself",
)


full_soon = SIGNALS["time_until_full"].at_most(FORECAST_SECONDS, HORIZON)
ttft_missed_soon = SIGNALS["time_until_ttft_missed"].at_most(FORECAST_SECONDS, HORIZON)
budget_spent_early = SIGNALS["time_until_budget_spent"].below(
    MONTH, documented("a burn rate of 1 spends the error budget in exactly 30 days", WORKBOOK)
)
