"""A spent error budget pages once: not again by its slow window, and not when the alert of its cause has ended.

A real promtool evaluates the generated rules over half an hour of health, 40 minutes of late first tokens, and an hour
of health or of fewer late ones.
"""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.alert_rules import groups_for
from support.sampling import some

STEP = 30
HEALTHY, SICK, DRAINING, AFTER = (minutes * 60 // STEP for minutes in (30, 40, 3, 57))
END = (HEALTHY + SICK + DRAINING + AFTER) * STEP
SPAN = f"{END}s"
SLO, CAUSE = "contract_breached", "kv_eviction_cascade"
LATE = {
    "vllm:time_to_first_token_seconds_count": (30, 30, 30),
    'vllm:time_to_first_token_seconds_bucket{le="40.0"}': (30, 0, 30),
    "vllm:inter_token_latency_seconds_count": (30, 30, 30),
    'vllm:inter_token_latency_seconds_bucket{le="2.5"}': (30, 30, 30),
    "vllm:e2e_request_latency_seconds_count": (30, 30, 30),
    'vllm:e2e_request_latency_seconds_bucket{le="1920.0"}': (30, 30, 30),
}
"""What each counter grows by in a scrape: before, in the sickness, and after it (as old requests end, and then)."""
FEWER = {**LATE, 'vllm:time_to_first_token_seconds_bucket{le="40.0"}': (30, 0, 27)}
"""Afterwards one request in ten is late: ten times the sustainable rate, which the slow window alone shows."""
CASCADE = {
    **LATE,
    "vllm:num_preemptions_total": (0, 30, 0),
    "vllm:request_success_total": (30, 30, 30),
}
GAUGES = {
    "vllm:kv_cache_usage_perc": (0.3, 1.0, 0.3),
    "vllm:num_requests_waiting": (0, 20, 0),
    "vllm:num_requests_running": (4, 8, 4),
}
QUIET = {name: (before, sick, 0) for name, (before, sick, _) in CASCADE.items()}
DRAINS = {**CASCADE, 'vllm:time_to_first_token_seconds_bucket{le="40.0"}': (30, 0, 0, 30)}
"""What has waited during the cascade is answered after it: late, without another cause."""


def answers(
    folder: Path,
    counters: Mapping[str, tuple[float, ...]],
    gauges: Mapping[str, tuple[float, ...]] = GAUGES,
    **promql: str,
) -> dict[str, float]:
    """Return a real Prometheus' result of each query at the end of that time, 0 without a sample."""
    series = [_counter(name, grows) for name, grows in counters.items()]
    series += [_gauge(name, values) for name, values in gauges.items()]
    queries = {f"max({text}) or vector(0)": name for name, text in promql.items()}
    expected = [{"expr": text, "eval_time": SPAN, "exp_samples": []} for text in queries]
    test = {"interval": f"{STEP}s", "input_series": series, "promql_expr_test": expected}
    (folder / "rules.yaml").write_text(json.dumps({"groups": list(_groups())}))
    file = folder / "test.yaml"
    file.write_text(json.dumps({"rule_files": ["rules.yaml"], "evaluation_interval": f"{STEP}s", "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    found = re.findall(r'expr: "(.*?)", time.*?got:\s*\{\} (\S+)', done.stdout + done.stderr, re.DOTALL)
    assert len(found) == len(queries), done.stdout + done.stderr
    return {queries[json.loads(f'"{text}"')]: float(value) for text, value in found}


def _groups() -> Iterator[dict[str, Any]]:
    """The rules of the two incidents, and what they read."""
    for group in groups_for([SLO, CAUSE]):
        yield {**group, "interval": f"{STEP}s"}


def firing(incident: str) -> str:
    return f'ALERTS{{alertstate="firing",incident="{incident}"}}'


def _counter(name: str, grows: tuple[float, ...]) -> dict[str, str]:
    values, at = [], 0.0
    for step, count in _spans(grows):
        values.append(f"{at:g}+{step:g}x{count - 1}")
        at += step * count
    return {"series": _of(name), "values": " ".join(values)}


def _gauge(name: str, values: tuple[float, ...]) -> dict[str, str]:
    return {"series": _of(name), "values": " ".join(f"{value:g}x{count - 1}" for value, count in _spans(values))}


def _spans(values: tuple[float, ...]) -> Iterator[tuple[float, int]]:
    return zip((*values, values[-1])[:4], (HEALTHY, SICK, DRAINING, AFTER), strict=True)


def _of(name: str) -> str:
    metric, _, rest = name.partition("{")
    engine = "" if metric.startswith("process_") else ',engine="0"'
    return f'{metric}{{instance="h:1"{engine}{"," + rest if rest else "}"}'


@pytest.mark.parametrize("counters", [LATE, FEWER], ids=["until it is cured", "while it burns more slowly"])
def test_one_alert_fires_without_a_break_until_the_slo_is_kept(
    tmp_path: Path, counters: dict[str, tuple[float, ...]]
) -> None:
    moments = f"timestamp({firing(SLO)})[{SPAN}:{STEP}s]"
    found = answers(
        tmp_path,
        counters,
        alerts=f"count(count_over_time({firing(SLO)}[{SPAN}]))",
        samples=f"count_over_time({firing(SLO)}[{SPAN}])",
        first=f"min_over_time({moments})",
        last=f"max_over_time({moments})",
    )
    assert found["alerts"] == 1
    assert found["last"] - found["first"] == STEP * (found["samples"] - 1)
    sick = HEALTHY * STEP
    cured = sick + SICK * STEP if counters == LATE else END
    assert sick < found["first"] < sick + 10 * 60
    assert 0 <= found["last"] - cured + STEP <= 5 * 60


@pytest.mark.parametrize("counters", [CASCADE, QUIET, DRAINS], ids=["the load goes on", "the load stops", "it drains"])
def test_a_violation_whose_cause_has_paged_never_pages(tmp_path: Path, counters: dict[str, tuple[float, ...]]) -> None:
    """Without the cause it pages: LATE, whose latencies are the same, shows that."""
    found = answers(
        tmp_path,
        counters,
        violated=f"count_over_time((instance_engine:error_budget_burn_rate:5m > 14.4)[{SPAN}:{STEP}s])",
        pages=f"count_over_time({firing(SLO)}[{SPAN}])",
        over=f"max_over_time(timestamp({firing(CAUSE)})[{SPAN}:{STEP}s])",
    )
    assert found["violated"] > 0
    assert found["pages"] == 0
    assert found["over"] < (HEALTHY + SICK) * STEP + 3 * 60, "the alert of the cause ends within three minutes"


def test_a_restarted_server_answers_for_its_own_requests(tmp_path: Path) -> None:
    """Two late requests in a hundred page nobody; nor do they beside those of the process before."""
    some = {**LATE, 'vllm:time_to_first_token_seconds_bucket{le="40.0"}': (30, 0, 29.4)}
    start = {"process_start_time_seconds": (1, 1, 2)}
    found = {}
    for name, gauges in (("the same process", GAUGES), ("another one", GAUGES | start)):
        (folder := tmp_path / name).mkdir()
        last = f"max_over_time(timestamp({firing(SLO)})[{SPAN}:{STEP}s])"
        found[name] = answers(folder, some, gauges, last=last)["last"] - (HEALTHY + SICK) * STEP
    assert found["another one"] <= 5 * 60 < found["the same process"]


HISTOGRAMS = sorted({name.partition("{")[0].rpartition("_")[0] for name in LATE})
WELL, GONE = (minutes * 60 // STEP for minutes in (16, 44))
"""After the cure, and after the series have ended: more than what is left of AFTER."""


@pytest.mark.parametrize("ends", some(["", *HISTOGRAMS], 2))
def test_a_series_that_ends_after_the_cure_revives_no_alert(tmp_path: Path, ends: str) -> None:
    """Killed a quarter of an hour after a bad half hour, a server leaves its long windows behind, but no guard."""
    series = [_counter(name, grows) for name, grows in CASCADE.items()]
    series += [_gauge(name, values) for name, values in GAUGES.items()]
    found = []
    for each in series:
        is_ending = each["series"].startswith(ends)
        found.append({**each, "values": _until(each["values"], WELL)} if is_ending else each)
    promql = f"max(max_over_time(timestamp({firing(SLO)})[{SPAN}:{STEP}s])) or vector(0)"
    test = {
        "interval": f"{STEP}s",
        "input_series": found,
        "promql_expr_test": [{"expr": promql, "eval_time": SPAN, "exp_samples": [{"labels": "{}", "value": 0}]}],
    }
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": list(_groups())}))
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps({"rule_files": ["rules.yaml"], "evaluation_interval": f"{STEP}s", "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _until(values: str, steps: int) -> str:
    """The values before the cure, as many after it, and none from then on."""
    *before, after = values.split()
    return " ".join([*before, re.sub(r"x\d+$", f"x{steps - 1}", after), "stale", f"_x{GONE - 2}"])
