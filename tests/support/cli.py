"""Runs the installed command."""

import os
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT

DIAG = str(Path(sys.executable).parent / "diag")


CASCADE = "tests/recordings/kv_cascade"


def diag(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "100", "TERM": "dumb", "PYTHONUTF8": "1", **environment}
    return subprocess.run([DIAG, *words], capture_output=True, text=True, cwd=ROOT, env=env, check=False)
