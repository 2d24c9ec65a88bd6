"""Normal values from a Prometheus: the bands of normal.rules.yaml, and a baseline that is learnt from its servers.

A band is of the same hour on seven days, of which one bad day moves neither median nor MAD.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest
from support.paths import RECORDINGS, ROOT
from support.prometheus_server import ANY, EACH, program, serving
from support.rule_files import groups_of

from diag.commands import verify
from diag.commands.observe import ObserveOptions
from diag.normal.baseline import read as read_baseline
from diag.sources.prometheus.scope import Scope, TimeSpan
from diag.sources.recording.reader import read

RULES = groups_of(ROOT / "alerts" / "normal.rules.yaml")[0]
ITL = (0.020, 0.018, 0.019, 0.200, 0.021, 0.022, 0.020, 0.040)
"""Seconds, day by day: the fourth was bad, and today is slow."""
DAY = 24 * 60
SERIES = '{{job="vllm",model_name="m",instance="{}",engine="0"}}'


@pytest.mark.parametrize("place", EACH)
def test_a_band_is_the_median_of_the_days_and_their_deviation(tmp_path: Path, place: str) -> None:
    """Two servers of one model share a band; an answer takes a token a second from each."""
    inputs = [series for server in ("a:1", "b:1") for series in _histogram(server)]
    recorded = [rule["record"] for rule in RULES["rules"] if "itl_seconds" in rule["record"]]
    expected = [{"expr": name, "eval_time": f"{len(ITL) * DAY - 60}m", "exp_samples": []} for name in recorded]
    test = {"interval": "1m", "input_series": inputs, "promql_expr_test": expected}
    group = {**RULES, "interval": "5m", "rules": [rule for rule in RULES["rules"] if rule["record"] in recorded]}
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [group]}))
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps({"rule_files": ["rules.yaml"], "evaluation_interval": "5m", "tests": [test]}))
    promtool = program(place).with_name("promtool")
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, check=False)
    found = re.findall(r'got: \{.*?:itl_seconds:(\w+)", job="vllm", model_name="m"\} (\S+)', done.stdout + done.stderr)
    assert {name: round(float(value), 4) for name, value in found} == {
        "mean5m": 0.04,
        "median1h": 0.04,
        "median7d": 0.02,
        "mad7d": 0.001,
    }


@pytest.mark.prometheus
def test_baseline_from_a_prometheus_equals_that_of_the_recording(tmp_path: Path) -> None:
    seen = read(RECORDINGS / "healthy")
    span = TimeSpan(since=f"{seen.instants[0] / 1000}", until=f"{seen.instants[-1] / 1000}")
    with serving(program(ANY), seen.samples.select([])) as server:
        verify.save_baseline(
            ObserveOptions([], prometheus=server.url, scope=Scope(span)), tmp_path / "there.json", False
        )
    verify.save_baseline(ObserveOptions([str(RECORDINGS / "healthy")]), tmp_path / "here.json", False)
    (there,), (here,) = (read_baseline(tmp_path / name) for name in ("there.json", "here.json"))
    assert (there.kind, there.starts, len(there.rows)) == (here.kind, here.starts, len(here.rows))
    assert [row["itl_seconds"] for row in there.rows] == pytest.approx(
        [row["itl_seconds"] for row in here.rows], rel=0.05
    )


def _histogram(server: str) -> list[dict[str, str]]:
    """The sum and the count of one server's ITL, a sample every minute."""
    sums, at = [], 0.0
    for seconds in ITL:
        sums.append(f"{at:.6g}+{60 * seconds:.6g}x{DAY - 1}")
        at += 60 * seconds * DAY
    values = {"sum": " ".join(sums), "count": f"0+60x{len(ITL) * DAY}"}
    return [
        {"series": f"vllm:inter_token_latency_seconds_{part}{SERIES.format(server)}", "values": numbers}
        for part, numbers in values.items()
    ]
