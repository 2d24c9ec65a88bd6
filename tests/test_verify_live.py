"""A real vLLM on the CPU before and after a change: a cascade in a small pool, and the same clients on a larger one."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live import load, server

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        not server.PYTHON, reason="no vLLM: .ci/components makes one, DIAG_VLLM_PYTHON names its Python"
    ),
]
DIAG = str(Path(sys.executable).parent / "diag")
FLAGS = ("--max-model-len", "2048", "--block-size", "32", "--max-num-seqs", "64", "--num-gpu-blocks-override")
LOOK = ("--for", "30", "--every", "1")


def test_a_larger_pool_cures_a_cascade(tmp_path: Path) -> None:
    recording = tmp_path / "before"
    with server.running(tmp_path, "tiny", (*FLAGS, "128")) as small, load.running(small.port, *load.CASCADE):
        time.sleep(15)
        subprocess.run([DIAG, "record", small.url, str(recording), *LOOK, "--launch", small.command], check=True)
    with server.running(tmp_path, "tiny", (*FLAGS, "512")) as large, load.running(large.port, *load.CASCADE):
        time.sleep(15)
        command = [DIAG, "verify", str(recording), large.url, *LOOK, "--launch", large.command, "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    report = json.loads(done.stdout)
    (found,) = report["servers"]
    assert (report["verdict"], done.returncode) == ("cured", 0), json.dumps(report, indent=1)
    assert found["incidents"][0]["incident"] == "kv_eviction_cascade"
    assert {"name": "--num-gpu-blocks-override", "before": "128", "after": "512", "follows": False, "known": True} in (
        found["changes"]
    )
    felt = {each["name"]: each["change"] for each in found["users_feel"]}
    assert felt["preemptions / finished request"] == "better"
