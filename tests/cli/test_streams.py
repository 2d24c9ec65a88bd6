"""A command whose standard output is closed, or that is interrupted before it has begun."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import DIAG
from support.paths import RECORDINGS, ROOT


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_exit_status_has_the_verdict_without_standard_output(closed: str) -> None:
    command = f'"{DIAG}" doctor "{RECORDINGS / "kv_cascade"}" {closed}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (2, "")


def test_an_interrupt_while_the_command_is_loaded_leaves_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(9)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "diag", "doctor"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
