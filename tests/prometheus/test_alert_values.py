"""The value in an alert's description as a real Prometheus writes it, by the unit of the signal."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from diag.artefacts.units import alert_value


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("share", 0.074, "7.4%"),
        ("share", 1, "100%"),
        ("seconds", 0.085, "85ms"),
        ("seconds", 754, "12m 34s"),
        ("bytes", 1.5 * 2**30, "1.5GiB"),
        ("celsius", 3, "3 °C"),
        ("watts", 412.5, "412 W"),
        ("bool", 1, "yes"),
        ("bool", 0, "no"),
        ("requests", 0.09, "0.09"),
        ("requests", 1.333, "1.33"),
        ("requests", 12345, "12345"),
        ("requests", -2, "-2"),
    ],
)
def test_a_value_is_written_with_its_unit(tmp_path: Path, unit: str, value: float, text: str) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool: .ci/components installs it")
    rule = {"alert": "A", "expr": "measured > -100", "annotations": {"description": alert_value(unit)}}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [rule]}]}))
    fired = {"exp_labels": {}, "exp_annotations": {"description": text}}
    test = {
        "interval": "1m",
        "input_series": [{"series": "measured", "values": f"{value}x2"}],
        "alert_rule_test": [{"alertname": "A", "eval_time": "1m", "exp_alerts": [fired]}],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [test]}))
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
