"""An SLO that is violated slowly pages after hours: `diag doctor` says the same then, and a short look nothing."""

from pathlib import Path

import numpy as np
import pytest
from support import rewriting
from support.scenarios import present

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.core.contract import Contract
from diag.diagnosis.report import Report
from diag.knowledge.formulas import formula
from diag.promql import Block, Samples, evaluate

EDGES = {"time_to_first_token": "40.0", "inter_token_latency": "2.5", "e2e_request_latency": "1920.0"}


def page(minute: int, late: float) -> str:
    """100 requests finish a minute, of which this share is late for its first token."""
    in_time = {name: 100 * minute * (1 - late * name.startswith("time")) for name in EDGES}
    lines = [
        f'vllm:{name}_seconds_count{{engine="0"}} {100 * minute}\n'
        f'vllm:{name}_seconds_bucket{{engine="0",le="{edge}"}} {in_time[name]:.0f}\n'
        for name, edge in EDGES.items()
    ]
    gauges = 'vllm:num_requests_running{engine="0"} 4\nvllm:num_requests_waiting{engine="0"} 0\n'
    return "".join(lines) + gauges + f'vllm:generation_tokens_total{{engine="0"}} {9000 * minute}\n'


def watched(folder: Path, minutes: int, late: float) -> Report:
    scrapes = [(1.7e9 + 60 * minute, "h:8000", page(minute, late)) for minute in range(minutes + 1)]
    return doctor.run(ObserveOptions([str(rewriting.write(folder / "recording", scrapes))]))


@pytest.mark.parametrize(("minutes", "late", "pages"), [(90, 0.08, True), (90, 0.04, False), (25, 0.08, False)])
def test_slow_burn_is_reported_like_its_alert(tmp_path: Path, minutes: int, late: float, pages: bool) -> None:
    assert ("contract_breached" in present(watched(tmp_path, minutes, late))) == pages


@pytest.mark.parametrize(("last_token", "shown"), [(15.0, 14.95), (40.0, 19.9)])
def test_the_first_token_is_not_shown_later_than_the_last(last_token: float, shown: float) -> None:
    """100 requests wait for 10 - 20 s, and end within a narrower bucket, or a later one."""
    edges = {"time_to_first_token": (10.0, 20.0), "e2e_request_latency": (last_token - 5, last_token)}
    labels = tuple(
        {"__name__": f"vllm:{name}_seconds_bucket", "instance": "h:1", "engine": "0", "le": le}
        for name, buckets in edges.items()
        for le in (*map(str, buckets), "+Inf")
    )
    times = np.arange(0, 600_000, 15_000)
    values = np.array([(0 if index % 3 == 0 else 1) * times / 1000 for index in range(len(labels))])
    promql = formula("$ttft_p99", ("instance", "engine"), "5m", Contract()).written_out()
    vector = evaluate(promql, Samples([Block(labels, times, values)]), times[-1:])
    assert vector.values[0, -1] == pytest.approx(shown)
