"""Recording rules of what is normal at this time of day: robust bands, a few series for each job and model.

A band is the median of the same hour on the last seven days, and the median absolute deviation (MAD) from it: one bad
day moves neither. `mad_over_time` is missing in Prometheus 2 and experimental in Prometheus 3, so the deviation is
taken by `quantile` over the days. Nothing alerts on a band: it is drawn beside what is measured.
"""

from typing import Any

from diag.knowledge.signals import ITL, RUNNING
from diag.promql import pretty

BY = "by (job, model_name)"
DAYS = 7
FEWEST_DAYS = 3
"""Days with a value, below which there is no band."""
INTERVAL = "1m"
TTFT, GENERATED = "vllm:time_to_first_token_seconds", "vllm:generation_tokens_total"


def _rate(metric: str) -> str:
    return f"sum {BY} (rate({metric}[5m]))"


def _mean(*histograms: str) -> str:
    """The mean of a histogram under the first of these names that there is."""
    return " or ".join(f"{_rate(f'{name}_sum')} / ({_rate(f'{name}_count')} > 0)" for name in histograms)


REQUESTS = f"sum {BY} (avg_over_time({RUNNING}[5m]))"
MEASURES = {
    "itl_seconds": _mean(*ITL),
    "ttft_seconds": _mean(TTFT),
    "output_tokens_per_running_request": f"{_rate(GENERATED)} / ({REQUESTS} > 0)",
    "requests_running": REQUESTS,
}
"""What has a band; the last one is the load, to read the others by."""


def group() -> dict[str, Any]:
    """All bands as one rule group, whose rules are evaluated in their order."""
    rules = [rule for name, promql in MEASURES.items() for rule in _band(name, promql)]
    return {"name": "diag-normal", "interval": INTERVAL, "rules": rules}


def _band(name: str, promql: str) -> list[dict[str, str]]:
    """The measure, its median of an hour, and the median and the MAD of that hour on the last days."""
    now, hour, median, mad = (f"job_model_name:{name}:{what}" for what in ("mean5m", "median1h", "median7d", "mad7d"))
    days = " or ".join(
        f'label_replace(last_over_time({hour}[10m] offset {24 * day - 1}h30m), "day", "{day}", "", "")'
        for day in range(1, DAYS + 1)
    )
    enough = f"count {BY} ({days}) >= {FEWEST_DAYS}"
    expressions = {
        now: promql,
        hour: f"quantile_over_time(0.5, {now}[1h])",
        median: f"quantile {BY} (0.5, {days}) and {enough}",
        mad: f"quantile {BY} (0.5, abs(({days}) - on (job, model_name) group_left () {median}))",
    }
    return [{"record": record, "expr": pretty(expression)} for record, expression in expressions.items()]
