"""The rule for a release that is slower at the same load fires in a real promtool, and not where nothing is slower."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.alert_rules import metrics_read, only
from support.paths import RECORDINGS
from support.upgrades import EVERY, MINUTES, UPGRADE

from diag.promql import is_stale
from diag.sources.recording.reader import read

FIRST = 'min_over_time(timestamp(ALERTS{alertstate="firing"})[2h:1m])'


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: .ci/components installs it")
@pytest.mark.parametrize(("name", "fires"), [("version_regression", True), ("version_upgraded", False)])
def test_a_slower_release_alerts_within_the_hour(tmp_path: Path, name: str, fires: bool) -> None:
    expected = [{"expr": FIRST, "eval_time": f"{EVERY * (MINUTES - 1)}s", "exp_samples": []}]
    test = {"interval": f"{EVERY}s", "input_series": list(_series(name)), "promql_expr_test": expected}
    rules = str(only("version_regression", tmp_path))
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps({"rule_files": [rules], "evaluation_interval": f"{EVERY}s", "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert ('alertname="VllmVersionRegression"' in said, "SUCCESS" in said) == (fires, not fires)
    if fires:
        minute = float(said.partition("got:")[2].partition("} ")[2].split()[0]) / 60
        assert UPGRADE + 20 <= minute <= UPGRADE + 45


def _series(name: str) -> Iterator[dict[str, str]]:
    """Yield the series of a recording that the rules read."""
    for block in read(RECORDINGS / name).samples.select([]):
        for labels, values in zip(block.labels, block.values, strict=True):
            if labels["__name__"] in metrics_read():
                shown = ",".join(f"{label}={json.dumps(text)}" for label, text in labels.items() if label != "__name__")
                holes = is_stale(values)
                numbers = ("_" if hole else f"{value:.9g}" for value, hole in zip(values, holes, strict=True))
                yield {"series": f"{labels['__name__']}{{{shown}}}", "values": " ".join(numbers)}
