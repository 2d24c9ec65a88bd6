"""Parts a, b and c: the driver's answers, the exporter's page under loads of the card, and the ceilings of the card."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from support import scripted_nvml
from support.live.server import free_port

from diag.exporter.gpu.driver import SELDOM
from gpu import nvml_calls
from gpu.stages import AWAITED, HOST_STAGES, NOT_READ, HostStage

LOAD = Path(__file__).with_name("torch_load.py")
DIAG = (sys.executable, "-m", "diag")
SMI = (
    "temperature.gpu,power.draw,clocks.sm,clocks.mem,memory.total,memory.reserved,memory.used,utilization.gpu,"
    "pcie.link.gen.max"
)
STARTS = 60.0
"""Seconds that an exporter or a load may take to start."""
WARM = 3.0
"""Seconds of load before a recording begins."""
SCRIPTED = 4.0
"""Seconds that are recorded of each stage of a scripted card."""


def record(folder: Path, parts: str, torch: str, *, scripted: bool) -> None:
    """Record the parts into files and folders of `folder`."""
    with scripted_driver() if scripted else nullcontext() as script:
        if "a" in parts:
            write(folder / "driver_calls.json", nvml_calls.every_call())
        if "b" in parts:
            with exporter(folder / "exporter.log") as url:
                for stage in HOST_STAGES:
                    _record_stage(folder, stage, url, torch, script)
        if "c" in parts and not (scripted and torch == sys.executable):
            command = [torch, LOAD, "ceilings", *["cpu"] * scripted]
            answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=120)
            write(folder / "ceilings.json", json.loads(answer.stdout))


def write(file: Path, content: object) -> None:
    """Write a JSON file."""
    file.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


@contextmanager
def scripted_driver() -> Iterator[Path]:
    """Let this process and those that it starts read the scripted library; yield the script."""
    with tempfile.TemporaryDirectory() as folder:
        library = scripted_nvml.build(Path(folder))
        script = Path(folder) / "script"
        scripted_nvml.write(script, [scripted_nvml.H100])
        os.environ |= scripted_nvml.environment(library.parent, script)
        scripted_nvml.load_into_process(library)
        yield script


def _record_stage(folder: Path, stage: HostStage, url: str, torch: str, script: Path | None) -> None:
    before = _values(url, stage.awaits)
    if script:
        with _played(script, stage):
            is_read = not stage.awaits or _changed(url, stage.awaits, before)
            recorded(url, folder / stage.name, SCRIPTED, every=0.5)
    else:
        with load(torch, stage.load, stage.seconds + SELDOM + AWAITED) if stage.load else nullcontext() as busy:
            if busy:
                time.sleep(SELDOM if stage.awaits else WARM)
            is_read = not stage.awaits or _changed(url, stage.awaits, before)
            recorded(url, folder / stage.name, stage.seconds)
            with suppress(OSError):  # the same values as another program reads them
                smi = subprocess.run(
                    ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv"], stdout=subprocess.PIPE, text=True, check=False
                )
                (folder / stage.name / "nvidia-smi.csv").write_text(smi.stdout, encoding="utf-8")
    if not is_read:
        (folder / stage.name / NOT_READ).touch()


def _values(url: str, family: str) -> list[str]:
    """Return the lines of a family on the exporter's page."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=AWAITED) as page:
        return [line for line in page.read().decode().splitlines() if family and line.startswith(family)]


def _changed(url: str, family: str, before: list[str]) -> bool:
    """Wait until the page has other values of a family than before; return False if it still has the same."""
    end = time.monotonic() + AWAITED
    while time.monotonic() < end:
        if _values(url, family) != before:
            return True
        time.sleep(0.5)
    return False


@contextmanager
def _played(script: Path, stage: HostStage) -> Iterator[None]:
    """Let the scripted card be as in the stage until the block ends."""
    begun, ended = time.monotonic(), threading.Event()
    _play(script, stage, 0.0)

    def play() -> None:
        while not ended.wait(0.2):
            _play(script, stage, time.monotonic() - begun)

    with ThreadPoolExecutor(1) as beside:
        playing = beside.submit(play)
        try:
            yield
        finally:
            ended.set()
        playing.result()


def _play(script: Path, stage: HostStage, seconds: float) -> None:
    """Let the scripted card be as in the stage; the time at the power cap grows where that is a reason.

    It grows by half of the time: a value that is written or scraped late on a busy host stays within the bounds.
    """
    gpu = {**scripted_nvml.H100, **stage.scripted}
    capped = int(gpu["reasons"]) & 4 and int(seconds * 5e8)  # type: ignore[call-overload]
    scripted_nvml.write(script, [{**gpu, "throttled_sw_power_cap": capped}])


@contextmanager
def load(torch: str, kind: tuple[str, ...], seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Load the card until the block ends; the process ends by itself after `seconds`."""
    command = [torch, str(LOAD), kind[0], str(seconds), *kind[1:]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout and process.stdout.readline() == "ready\n", "the load did not start"
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def exporter(log: Path, vllm: str = "http://127.0.0.1:9", *more: str) -> Iterator[str]:
    """Serve the exporter's page of a server, of one that nobody serves by default; yield its URL."""
    port = free_port()
    command = [*DIAG, "exporter", "--vllm", vllm, "--listen", f"127.0.0.1:{port}", *more]
    with log.open("ab") as written:
        process = subprocess.Popen(command, stdout=written, stderr=written)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url)
        yield url
    finally:
        process.terminate()
        process.wait()


def wait_for(url: str, seconds: float = STARTS) -> None:
    """Wait until an address answers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise RuntimeError(f"{url} did not answer within {seconds:.0f} s")


def recorded(url: str, folder: Path, seconds: float, every: float = 1.0) -> None:
    """Record the page for so many seconds."""
    command = [*DIAG, "record", url, str(folder), "--for", str(seconds), "--every", str(every), "--timeout", "10"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
