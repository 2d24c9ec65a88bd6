"""A real vLLM with two ranks on the CPU: its exporter, its start in its log, and the process that the others wait for.

The stacks name that process in four hangs and in none.
"""

import fcntl
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import bad_servers
from support.live import blocked_calls, load, server, slow_weights
from support.scenarios import PHASES
from support.waiting import until

from diag.commands.exporter import Exporter, ExporterOptions
from diag.exporter.process.collector import ProcessCollector
from diag.exposition.scrapes import Target

pytestmark = [pytest.mark.live, server.needed]
DIAG = str(Path(sys.executable).parent / "diag")
TWO_RANKS = ("--tensor-parallel-size", "2", "--max-model-len", "2048")
BOUND = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def doctor(url: str, *options: str) -> dict[str, Any]:
    command = [DIAG, "doctor", url, "--every", "1", "--json", *options]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)


def looked_at(vllm: server.Server, seconds: int) -> dict[str, Any]:
    """The report of a doctor that reads the stacks, which stops no process."""
    with never_traced(vllm):
        return doctor(vllm.url, "--for", str(seconds), "--log", str(vllm.log), "--stacks")


def stacks(vllm: server.Server, seconds: int = 4) -> dict[str, Any]:
    (found,) = looked_at(vllm, seconds)["stacks"]
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
    """How soon a rank is at that call depends on what else the machine does: the call says when it stands still."""
    (folder / call).touch()
    try:
        until((folder / call).with_suffix(blocked_calls.ENTERED).exists)
        yield
    finally:
        (folder / call).unlink()


@contextmanager
def overheard(url: str) -> Iterator[tuple[str, list[bytes]]]:
    """A way to the server that remembers every page which it carried."""
    carried: list[bytes] = []

    def answer(request: bad_servers.Request) -> bad_servers.Reply:
        with urllib.request.urlopen(url + request.path, timeout=10) as reply:
            body = reply.read()
        carried.extend([body] if request.path == "/metrics" else [])
        return bad_servers.Reply(body)

    with bad_servers.serving(answer) as between:
        yield between.url, carried


def values(page: bytes, name: str) -> dict[tuple[str, ...], float]:
    """The values of a metric by their labels."""
    target = Target("h:1")
    target.add(0, page)
    table = target.table()
    rows = {tuple(sorted(table.labels[row].items())): float(table.values[row, 0]) for row in table.rows(name)}
    return {tuple(v for k, v in labels if k not in ("__name__", "instance")): value for labels, value in rows.items()}


def phase(page: bytes) -> str:
    """The phase that a start is in, "" where there is none."""
    return next((label for (label,), value in values(page, "diag_vllm_startup_phase").items() if value), "")


def test_two_ranks_from_their_start_to_a_stall(tmp_path: Path) -> None:
    """One server for all of it: two ranks on two cores take a minute to start."""
    calls = tmp_path / "calls"
    calls.mkdir()
    # Not paced: a rank that waits for its peer spins, by which the peer is named.
    plugin = slow_weights.installed(tmp_path / "plugin", Path(blocked_calls.__file__))
    environment = {**BOUND, "PYTHONPATH": str(plugin), blocked_calls.FOLDER: str(calls)}
    with (
        ThreadPoolExecutor(1) as meanwhile,
        (calls / "lock").open("w") as lock,
        server.starting(tmp_path, "tiny", TWO_RANKS, cold=True, **environment) as vllm,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        exporter = Exporter(ExporterOptions(vllm.url, log=str(vllm.log)))
        exporter.start()
        early = doctor(vllm.url, "--for", "4", "--log", str(vllm.log))
        phases = meanwhile.submit(follow, exporter, vllm)
        try:
            a_rank_waits_for_the_lock(vllm)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
        the_start_was_seen(early, phases.result(), exporter.page(8))
        assert suspects(stacks(vllm)) == []
        the_page_is_vllms_own_byte_for_byte(vllm)
        its_processes_are_known(vllm)
        with load.alone(), load.running(vllm.port, *load.STEADY) as clients:
            clients.wait_for(1, *load.STEADY)  # the first requests compile kernels
            the_ranks_work(exporter, vllm)
            vllm.signal("VLLM::Worker_TP1", signal.SIGSTOP)
            try:
                the_rank_is_named(exporter, looked_at(vllm, 20))
            finally:
                vllm.signal("VLLM::Worker_TP1", signal.SIGCONT)
            assert not stopped(exporter)
            a_call_that_does_not_return_is_named(vllm, calls)


def a_rank_waits_for_the_lock(vllm: server.Server) -> None:
    wait_for_title(vllm, "VLLM::Worker_TP1")
    (waits,) = until(lambda: suspects(stacks(vllm)))
    assert waits == ("worker", "1", "waits for a lock file that another process holds or has left behind")


def a_call_that_does_not_return_is_named(vllm: server.Server, calls: Path) -> None:
    with blocked(calls, "worker"):
        found = until(lambda: with_suspect(vllm))
        assert [each[:2] for each in suspects(found)] == [("worker", "1")]
        assert "held (blocked_calls.py:" in json.dumps(found)
    with blocked(calls, "queue"):
        found = until(lambda: with_suspect(vllm))
        assert suspects(found) == [("engine", "0", "waits for room in a queue that nobody empties")]


def with_suspect(vllm: server.Server) -> dict[str, Any] | None:
    """A look that names a process: one at the moment that a call begins to stand still may still see it work."""
    found = stacks(vllm, 8)
    return found if suspects(found) else None


def follow(exporter: Exporter, vllm: server.Server) -> list[str]:
    """The phases that the page goes through until vLLM answers."""
    seen: list[str] = []
    ready = threading.Thread(target=server.wait_until_ready, args=(vllm,))
    ready.start()
    while vllm.process.poll() is None and (ready.is_alive() or seen[-1:] != ["ready"]):
        now = phase(exporter.page(8))
        seen += [now] if now not in ("", *seen[-1:]) else []
        time.sleep(0.2)
    return seen


def the_start_was_seen(early: dict[str, Any], phases: list[str], page: bytes) -> None:
    assert [each["state"] for each in early["progress"]] == ["starting"]
    assert early["verdict"] == "unknown"
    assert phases[0] == "process_start"
    assert phases == [each for each in PHASES if each in phases]
    took = values(page, "diag_vllm_startup_phase_seconds")
    assert took[("process_start",)] > 5
    assert took[("load_weights",)] > 0, "the weights of a tiny model may load between two looks at the page"
    assert values(page, "diag_vllm_config")[("tensor_parallel_size",)] == 2


def the_page_is_vllms_own_byte_for_byte(vllm: server.Server) -> None:
    with overheard(vllm.url) as (url, carried):
        page = Exporter(ExporterOptions(url)).page(8)
    assert b"vllm:num_requests_running{" in carried[0]
    assert page.startswith(carried[0])


def its_processes_are_known(vllm: server.Server) -> None:
    processes = ProcessCollector(vllm.port)
    processes.collect()
    assert processes.server_pid() == vllm.process.pid
    assert "VLLM_CPU_OMP_THREADS_BIND='0|1'" in processes.launch()


def the_ranks_work(exporter: Exporter, vllm: server.Server) -> None:
    """Healthy, unless the machine has no core for each of them, which a look may tell instead; never more than that."""
    until(lambda: stacks(vllm)["conclusion"] == "The server makes progress: no process is suspect.")

    def works() -> bool:
        report = doctor(vllm.url, "--for", "20")
        present = {each["incident"] for each in report["diagnoses"] if each["state"] == "present"}
        assert present <= {"host_cpu_starved"}
        assert [engine["state"] for engine in report["progress"]] == ["busy"]
        return bool(present) or report["verdict"] == "healthy"

    until(works)
    owners = {labels[1:] for labels in values(exporter.page(8), "diag_vllm_process_cpu_seconds_total")}
    assert {("0", "engine"), ("0", "worker"), ("1", "worker")} <= owners


def the_rank_is_named(exporter: Exporter, report: dict[str, Any]) -> None:
    first = report["diagnoses"][0]
    assert (first["incident"], first["primary"]) == ("tp_communication_stall", True)
    assert "rank 1" in [name for each in first["symptoms"] for name in each["culprits"]]
    (found,) = report["stacks"]
    assert suspects(found) == [("worker", "1", "is stopped by a signal (SIGSTOP)")]
    assert stopped(exporter) == [("1", "worker")]


def stopped(exporter: Exporter) -> list[tuple[str, ...]]:
    """Ranks and roles of the processes that do not run."""
    page = values(exporter.page(8), "diag_vllm_process_stopped")
    return [labels[1:] for labels, value in page.items() if value]
