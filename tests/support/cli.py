"""Runs the command: as it is installed, or in this process, where a run takes a fraction of the time."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
from support.paths import ROOT

from diag.cli.app import main

DIAG = str(Path(sys.executable).parent / "diag")
CASCADE = "tests/recordings/kv_cascade"
DUMB = {"COLUMNS": "100", "TERM": "dumb"}


def installed(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The installed command in a process of its own: for what is loaded or read when it starts."""
    told = {**os.environ, **DUMB, "PYTHONUTF8": "1", **environment}
    return subprocess.run([DIAG, *words], capture_output=True, text=True, cwd=ROOT, env=told, check=False)


def diag(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process; return its output and exit status."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    told = patch.dict(os.environ, {**DUMB, **environment})
    argv = patch.object(sys, "argv", ["diag", *words])
    with told, argv, redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main()
        sys.exit()
    texts = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess([*words], ended.value.code or 0, *texts)
