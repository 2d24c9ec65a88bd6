"""`python -m tests.gpu`, part d, with a real vLLM on the CPU: healthy, with a stopped engine, with a killed one."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.live import load, server
from support.paths import ROOT

pytestmark = [pytest.mark.live, pytest.mark.nightly, server.needed]


def test_stages_of_a_server_are_judged_as_expected(tmp_path: Path) -> None:
    vllm = ("--vllm", server.PYTHON, "--torch", server.PYTHON, "--cpu", "--quick", "--minutes", "20")
    command = [sys.executable, "-m", "tests.gpu", str(tmp_path / "run"), "--scripted", "--parts", "cd", *vllm]
    with load.alone():
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout
    stages = ("engine_killed", "engine_stopped", "healthy")
    rows = [line[3:61].rstrip() for line in done.stdout.splitlines() if line.endswith("as expected")]
    assert rows == [row for stage in stages for row in (stage, f"{stage}: alerts")]
    assert [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("c  name")] == [["name", "CPU"]]
