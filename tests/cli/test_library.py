"""`import diag`: the example of its page, its tables and documents beside those of the commands, and its errors."""

import json
import re
import subprocess
import sys

import pytest
from support import cli
from support.paths import ROOT

import diag
from diag.core.errors import BadUsage, DiagError

CASCADE = cli.CASCADE


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout


def test_the_example_of_the_page_prints_what_it_says() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), re.S)
    (first,) = re.findall(r"report\.incidents\)  # (.*)", example)
    lines = python(example).splitlines()
    assert lines[0] == first
    assert any(
        re.match(r"kv_eviction_cascade +preemptions / finished request +1\.3\d* +0\.2", line.strip()) for line in lines
    )
    assert float(re.findall(r"^max +(.*)$", "\n".join(lines), re.MULTILINE)[0]) > 0.5


def test_an_import_loads_nothing_else() -> None:
    before, after = "{*sys.modules}", "import diag; print(sorted({*sys.modules} - before))"
    assert python(f"import sys; before = {before}; {after}") == "['diag']\n"


def test_documents_are_those_of_the_commands() -> None:
    report = diag.diagnose(CASCADE)
    assert report.to_dict() == json.loads(cli.diag("doctor", CASCADE, "--json").stdout)
    assert report.to_markdown() == cli.diag("doctor", CASCADE, "--markdown").stdout
    assert "<html" in report.to_html()
    command = "vllm serve Qwen/Qwen3-8B --swap-space 4"
    assert diag.lint_launch(command) == json.loads(cli.diag("lint", command, "--json").stdout)


def test_tables_have_their_columns() -> None:
    conditions, signals = diag.diagnose(CASCADE).frame, diag.signal_table(CASCADE)
    assert list(conditions.columns) == ["incident", "state", "subject", "signal", "value", "threshold"]
    assert list(signals.columns) == ["time", "instance", "engine", "gpu", "signal", "unit", "window", "value"]
    assert signals["time"].dt.tz is not None


@pytest.mark.parametrize("target", ["/nowhere", "http://127.0.0.1:1", "nothing at all"])
def test_what_cannot_be_read_is_an_error_of_one_sentence(target: str) -> None:
    with pytest.raises(DiagError, match=r"\A[^\n]+\Z"):
        diag.diagnose(target, seconds=0.1)


def test_no_target_is_bad_usage() -> None:
    with pytest.raises(BadUsage, match="no target is named"):
        diag.diagnose()


def test_what_is_not_offered_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="nothing_of_it"):
        _ = diag.nothing_of_it
