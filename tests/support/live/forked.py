"""Servers that a template of vLLM forks (template.py): they are there in a quarter of the time of a new process."""

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

SCRIPT = Path(__file__).with_name("template.py")
IMPORTS = 600.0
"""Seconds in which the template must have imported vLLM."""
_asked = threading.Lock()


@functools.cache
def template(python: str) -> str:
    """Start the template of this test process with that interpreter once, and return the path of its socket."""
    folder = tempfile.TemporaryDirectory(prefix="vllm-template-")
    atexit.register(folder.cleanup)
    path = f"{folder.name}/socket"
    # room for the command line and for the environment of each server; a thread, as vLLM gives to a worker on one core
    command = [python, str(SCRIPT), path, "x" * 4096]
    told = {**os.environ, "OMP_NUM_THREADS": "1", "PADDING": "x" * 16384}
    with Path(folder.name, "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=told)
    atexit.register(process.kill)
    end = time.monotonic() + IMPORTS
    while not Path(path).exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    if not Path(path).exists():
        raise RuntimeError(f"no template of vLLM: {Path(folder.name, 'log').read_text(errors='replace')}")
    return path


class ForkedServer:
    """A server's first process, with what subprocess.Popen has of it."""

    def __init__(self, python: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Fork it; its output is appended to the log."""
        log.touch()
        asked = {"arguments": arguments, "environment": environment, "log": str(log)}
        with _asked:  # servers that start side by side share one template
            address = template(python)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            connection.sendall(json.dumps(asked).encode() + b"\n")
            self._told = connection.makefile("r", encoding="ascii")
        self.pid = int(self._told.readline())
        self.returncode: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._await_end, daemon=True).start()

    def _await_end(self) -> None:
        self.returncode = int(self._told.readline() or -signal.SIGKILL)
        self._ended.set()

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit status; subprocess.TimeoutExpired after `timeout` seconds."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("vllm", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)
