"""The stacks of a real vLLM with two ranks: the process that the others wait for, in four hangs and in none."""

import fcntl
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.live import blocked_calls, load, server, slow_weights

pytestmark = [pytest.mark.live, server.needed]
DIAG = str(Path(sys.executable).parent / "diag")
RANKS = ("--tensor-parallel-size", "2", "--max-model-len", "2048")


def stacks(vllm: server.Server, seconds: int = 4) -> dict[str, Any]:
    """The stacks in the report of a doctor, which stops no process."""
    words = [DIAG, "doctor", vllm.url, "--every", "1", "--for", str(seconds), "--log", str(vllm.log)]
    with never_traced(vllm):
        answer = subprocess.run([*words, "--json", "--stacks"], stdout=subprocess.PIPE, check=False).stdout
    (found,) = json.loads(answer)["stacks"]
    return found


@contextmanager
def never_traced(vllm: server.Server) -> Iterator[None]:
    """Look at the state of each process every few milliseconds: none is in "tracing stop"."""
    listed = subprocess.run(["pgrep", "-g", str(vllm.process.pid)], stdout=subprocess.PIPE, check=True).stdout
    files, traced, is_over = [Path(f"/proc/{pid}/status") for pid in listed.decode().split()], [], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.003):
            traced.extend(file for file in files if "TracerPid:\t0\n" not in file.read_text())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()
    assert not traced


def wait_for_title(vllm: server.Server, title: str) -> None:
    search = ["pgrep", "-g", str(vllm.process.pid), "-f", title]
    while subprocess.run(search, stdout=subprocess.DEVNULL, check=False).returncode:
        time.sleep(1)


def suspects(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(each["role"], each["rank"], each["waits"]) for each in found["processes"] if each["suspect"]]


@contextmanager
def blocked(folder: Path, call: str) -> Iterator[None]:
    (folder / call).touch()
    try:
        time.sleep(8)
        yield
    finally:
        (folder / call).unlink()


def test_the_process_that_the_others_wait_for(tmp_path: Path) -> None:
    """One server for all of it: two ranks on two cores take a minute to start."""
    calls = tmp_path / "calls"
    calls.mkdir()
    plugin = slow_weights.installed(tmp_path / "plugin", Path(blocked_calls.__file__))
    environment = {"PYTHONPATH": str(plugin), blocked_calls.FOLDER: str(calls), "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with (calls / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with server.starting(tmp_path, "tiny", RANKS, **environment) as vllm:
            wait_for_title(vllm, "VLLM::Worker_TP1")
            time.sleep(10)
            found = stacks(vllm)
            assert suspects(found) == [
                ("worker", "1", "waits for a lock file that another process holds or has left behind")
            ]
            fcntl.flock(lock, fcntl.LOCK_UN)
            server.wait_until_ready(vllm)
            assert suspects(stacks(vllm)) == []
            with load.alone(), load.running(vllm.port, *load.STEADY):
                while stacks(vllm)["conclusion"] != "The server makes progress: no process is suspect.":
                    time.sleep(5)  # the first requests compile kernels
                vllm.signal("VLLM::Worker_TP1", signal.SIGSTOP)
                found = stacks(vllm)
                assert suspects(found) == [("worker", "1", "is stopped by a signal (SIGSTOP)")]
                vllm.signal("VLLM::Worker_TP1", signal.SIGCONT)
                with blocked(calls, "worker"):
                    found = stacks(vllm, 8)
                    assert [each[:2] for each in suspects(found)] == [("worker", "1")]
                    assert "held (blocked_calls.py:" in json.dumps(found)
                with blocked(calls, "queue"):
                    assert suspects(stacks(vllm, 8)) == [
                        ("engine", "0", "waits for room in a queue that nobody empties")
                    ]
