"""The whole exporter as a program: scripted GPUs, a log, a server; its page, its incidents, and a long life."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from support import scripted_nvml
from support.bad_servers import pages, serving
from support.exporter_server import vllms_page
from support.live.server import free_port
from support.paths import ROOT
from support.processes import TP2
from support.processes import serving as processes
from support.waiting import until

from diag.commands.exporter import WHERE

DIAG = str(Path(sys.executable).parent / "diag")
LOG = ROOT / "tests" / "recordings" / "tp2_long_stall" / "server.log"
HANG = ROOT / "tests" / "data" / "logs" / "v1_0.11.0_tp2_capture_hang.log"
SPAN, SPANS, AT_ONCE = 1_000, 24, 4
MOST_KIB = 256
"""Of memory that a span of scrapes may add: a quarter of a KiB for each."""


@dataclass(frozen=True)
class Running:
    """An exporter; `script` is what its GPUs say."""

    port: int
    process: subprocess.Popen[str]
    script: Path
    log: Path

    def page(self) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=20) as answer:
            assert answer.status == 200
            return answer.read()

    def asked(self, path: str) -> tuple[int, str]:
        """Return the response to a path."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def value(self, line: str) -> float | None:
        """The value of the line that begins so."""
        found = re.search(rf"^{re.escape(line)} (\S+)$", self.page().decode(), re.MULTILINE)
        return float(found[1]) if found else None

    def status(self, name: str) -> int:
        """A number of /proc/PID/status: VmRSS (kB), Threads."""
        return int(re.search(rf"^{name}:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text(), re.M)[1])

    def files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


@contextmanager
def exporting(folder: Path, gpus: list[dict[str, object]], vllm: str) -> Iterator[Running]:
    """The program over these GPUs; its log is a copy of that of two ranks that stood still."""
    script, log, port = folder / "gpus", folder / "server.log", free_port()
    log.write_bytes(LOG.read_bytes())
    scripted_nvml.write(script, gpus)
    environment = scripted_nvml.environment(scripted_nvml.build(folder).parent, script)
    command = [DIAG, "exporter", "--vllm", vllm, "--listen", f"127.0.0.1:{port}"]
    process = subprocess.Popen(
        [*command, "--log", str(log), "--log-timezone", "UTC"],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    running = Running(port, process, script, log)
    try:
        wait_for(running)
        yield running
    finally:
        process.terminate()
        process.communicate(timeout=120)


def wait_for(running: Running) -> None:
    """Until it listens and has read its log."""
    for _ in range(1200):
        try:
            if b"diag_vllm_log_events_total" in running.page():
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError("the exporter has not read its log")


def settled(page: bytes) -> str:
    """The page without what changes from run to run."""
    text = re.sub(r'^(diag_build_info\{version=)"[^"]+"', r'\1"VERSION"', page.decode(), flags=re.M)
    varies = r"diag_scrape_duration_seconds\S+|diag_vllm_log_last_line\S+|diag_host_(?:last_)?oom_kill\S+"
    text = re.sub(rf"^({varies}) \S+$", r"\1 T", text, flags=re.M)
    text = re.sub(r"^(?:# \w+ )?diag_vllm_stray_engine\b.*\n", "", text, flags=re.M)  # of a test beside this one
    return re.sub(r"^(diag_vllm_\S+timestamp_seconds\S*) [1-9]\S+$", r"\1 T", text, flags=re.M)


def test_budget_page_is_complete(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    own = re.sub(rb"(\nprocess_start_time_seconds) \S+", rb"\1 1.7953e+09", vllms_page())  # the log is of earlier runs
    with serving(pages(own)) as vllm, exporting(tmp_path, [scripted_nvml.H100] * 2, vllm.url) as running:
        page = running.page()
    assert page.startswith(own)
    golden("exporter.prom", settled(page[len(own) :]))


def test_exporter_probes_follow_the_judged_pages(tmp_path: Path) -> None:
    with serving(pages(vllms_page())) as vllm, exporting(tmp_path, [], vllm.url) as running:
        assert running.asked("/readyz") == (503, "cannot tell: nothing has been judged yet\n")
        until(lambda: running.asked("/readyz")[0] == 200)
        assert running.asked("/livez")[0] == 200
        assert running.asked("/") == (200, WHERE.decode())


def test_sigterm_ends_the_exporter(tmp_path: Path) -> None:
    with serving(pages(vllms_page())) as vllm, exporting(tmp_path, [], vllm.url) as running:
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(30) == 0


def test_the_doctor_judges_the_exporters_page(tmp_path: Path) -> None:
    """A T4 at 84 C that has throttled since the start, in front of a page that does not move."""
    hot = scripted_nvml.T4 | {"temperature": 84, "clock_sm": 700}

    def heat(seconds: float) -> dict[str, object]:
        return hot | {"throttled_sw_thermal": int(seconds * 1e9), "reasons": 0x20}

    with serving(pages(vllms_page())) as vllm, exporting(tmp_path, [heat(0)], vllm.url) as running:
        over, begun = threading.Event(), time.monotonic()

        def warm() -> None:
            while not over.wait(0.3):
                scripted_nvml.write(running.script, [heat(time.monotonic() - begun)])

        threading.Thread(target=warm, daemon=True).start()
        command = [DIAG, "doctor", f"127.0.0.1:{running.port}", "--for", "7", "--every", "0.5", "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        over.set()
    report = json.loads(done.stdout)
    found = next(each for each in report["diagnoses"] if each["incident"] == "gpu_thermal_throttling")
    assert (found["state"], found["severity"]) == ("present", "critical")
    assert found["fixes"][0]["name"] == "nvidia-smi -i 0 -pl 63"


def test_the_doctor_names_a_hang_in_graph_capture_before_there_is_a_page(tmp_path: Path) -> None:
    """The log is one of vLLM 0.11, as if written until five and a half minutes ago; its processes are still there."""
    log = tmp_path / "vllm.log"
    log.write_text(shifted(HANG.read_text(encoding="utf-8"), 330), encoding="utf-8")
    with processes(tmp_path, TP2, ready=False) as vllm:
        time.sleep(3)  # a process counts when it is two seconds old
        command = [DIAG, "doctor", f"127.0.0.1:{vllm.port}", "--for", "5", "--every", "1", "--json"]
        said = [*command, "--log", str(log), "--log-timezone", "UTC"]
        report = json.loads(subprocess.run(said, stdout=subprocess.PIPE, check=False).stdout)
    assert [each["state"] for each in report["progress"]] == ["starting"]
    primary = [each for each in report["diagnoses"] if each["primary"]]
    assert [each["incident"] for each in primary] == ["cuda_graph_capture_hang"]
    assert "--disable-custom-all-reduce" in [each["name"] for each in primary[0]["fixes"]]


def shifted(log: str, ago: float) -> str:
    """The log with its times moved so that the last line was written so many seconds ago."""
    times = re.findall(r"\d\d-\d\d \d\d:\d\d:\d\d", log)
    last = datetime.strptime(f"2026-{times[-1]}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    move = datetime.now(UTC) - timedelta(seconds=ago) - last

    def moved(found: re.Match[str]) -> str:
        then = datetime.strptime(f"2026-{found[0]}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC) + move
        return then.strftime("%m-%d %H:%M:%S")

    return re.sub(r"\d\d-\d\d \d\d:\d\d:\d\d", moved, log)


@pytest.fixture
def soaking(tmp_path: Path) -> Iterator[Running]:
    with (
        serving(pages(vllms_page())) as vllm,
        exporting(tmp_path, [scripted_nvml.H100] * 4, vllm.url) as running,
    ):
        yield running


@pytest.mark.nightly
def test_thousands_of_scrapes_leak_nothing(soaking: Running) -> None:
    """Four at a time, while GPUs vanish and come back and the log rotates.

    A leak takes more with every thousand scrapes, once what the start had left over is used up. What threads set aside
    for themselves, later on a busy machine, comes to an end: 2,000 scrapes then add next to nothing.
    """
    failed: list[str] = []
    over = threading.Event()
    disturbing = threading.Thread(target=disturb, args=(soaking, over), daemon=True)
    disturbing.start()
    held = [taken(soaking)]
    while len(held) <= SPANS and not calm(held):
        scrape(soaking, SPAN, failed)
        held.append(taken(soaking))
    over.set()
    disturbing.join()
    assert failed == []
    assert calm(held), held
    assert held[-1][1] <= held[1][1] + AT_ONCE, held
    assert held[-1][2] <= held[1][2] + AT_ONCE, held


def calm(held: Sequence[tuple[int, int, int]]) -> bool:
    """Return True if the last two spans added almost nothing; the first span is the start."""
    return len(held) > 3 and all(after[0] <= before[0] + MOST_KIB for before, after in pairwise(held[-3:]))


def taken(running: Running) -> tuple[int, int, int]:
    """KiB of memory, open files and threads."""
    return running.status("VmRSS"), running.files(), running.status("Threads")


def scrape(running: Running, count: int, failed: list[str]) -> None:
    """So many scrapes, some at once; what is wrong with a page is added to `failed`."""

    def some() -> None:
        for _ in range(count // AT_ONCE):
            try:
                page = running.page()
            except OSError as error:
                failed.append(str(error))
                continue
            if b"\ndiag_vllm_up 1.0\n" not in page or not page.startswith(vllm):
                failed.append("half a page")

    vllm = vllms_page()
    threads = [threading.Thread(target=some, daemon=True) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def disturb(running: Running, over: threading.Event) -> None:
    """A GPU is lost, comes back, is gone from the list; the log is rotated, truncated, and grows."""
    gone = [scripted_nvml.H100] * 3
    lost = [*gone, scripted_nvml.LOST]
    states = [lost, [scripted_nvml.H100] * 4, gone, [scripted_nvml.H100] * 4]
    turn = 0
    while not over.wait(0.2):
        scripted_nvml.write(running.script, states[turn % len(states)])
        if turn % 5 == 0:
            running.log.rename(running.log.with_suffix(".1"))
        if turn % 7 == 0:
            running.log.write_text("")
        with running.log.open("ab") as log:
            log.write(LOG.read_bytes()[:20_000])
        turn += 1
