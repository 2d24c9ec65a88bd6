"""Part d: a real vLLM on the card, healthy and ill, each stage a recording of the exporter's page with its truth."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from support.live import load, model
from support.live import server as live
from support.live.load import Clients

from gpu import host

COMMON = ("--served-model-name", "tiny", "--load-format", "dummy", "--dtype", "bfloat16", "--host", "127.0.0.1")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
READY = 300.0
WARM = 8.0
"""Seconds of load before a recording begins."""
PREFILLS = (Clients(8, (16, 48), (150, 250), stream=True), Clients(6, (14_000, 15_000), (2, 4), pause=1.0, start=2.0))
QUEUE = (Clients(48, (100, 300), (100, 300)),)
CHAT = (Clients(12, (100, 1000), (60, 200), pause=0.3, stream=True),)


@dataclass(frozen=True)
class Scale:
    """What differs between a card and the CPU: the model, common flags, and loads that bring about the same incidents."""

    size: str
    flags: tuple[str, ...]
    healthy: tuple[Clients, ...]
    prefills: tuple[Clients, ...]
    cascade_flags: tuple[str, ...]
    seconds: float


CARD = Scale(
    "large",
    ("--max-model-len", "16384", "--max-num-seqs", "64"),
    CHAT,
    PREFILLS,
    ("--num-gpu-blocks-override", "256", "--max-model-len", "2048", "--max-num-seqs", "64"),
    25,
)
CPU = Scale(
    "tiny",
    ("--max-model-len", "8192", "--max-num-batched-tokens", "8192", "--max-num-seqs", "32", "--enforce-eager"),
    load.HEALTHY,
    load.CONTENTION,
    ("--num-gpu-blocks-override", "128", "--block-size", "32", "--max-model-len", "2048", "--max-num-seqs", "64", "--enforce-eager"),
    25,
)


class Run:
    """One run: its folder, vLLM's interpreter, and the stages recorded so far."""

    def __init__(self, folder: Path, python: str, scale: Scale) -> None:
        self.folder, self.python, self.scale = folder, python, scale
        self.files = folder / "model"
        model.write(self.files, scale.size)

    @contextmanager
    def serving(self, name: str, flags: Sequence[str], *, ready: bool = True) -> Iterator["Served"]:
        """Start a server with an exporter beside it; wait until it answers."""
        with self.starting(name, flags) as served:
            if ready:
                served.wait()
            with host.exporter(self.folder / f"{name}-exporter.log", served.server.url, "--log", str(served.server.log), "--timeout", "10") as url:
                served.exporter = url
                yield served

    @contextmanager
    def starting(self, name: str, flags: Sequence[str]) -> Iterator["Served"]:
        port, log = live.free_port(), self.folder / f"{name}.log"
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.files), *COMMON]
        command += ["--port", str(port), *flags]
        with log.open("ab") as written:
            process = subprocess.Popen(
                command, stdout=written, stderr=written, env={**os.environ, **ENVIRONMENT}, start_new_session=True
            )
        server = live.Server(port, process, " ".join(["vllm serve", str(self.files), *COMMON, *flags]), log)
        try:
            yield Served(self, name, server)
        finally:
            server.stop()
            for child in served_processes(server):
                child.kill()


def served_processes(server: live.Server) -> list[psutil.Process]:
    """Return the processes of a server's session: a child of an API server that was killed has another parent."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == server.process.pid:
                found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


@dataclass
class Served:
    """A server under test, and the address of its exporter."""

    run: Run
    name: str
    server: live.Server
    exporter: str = ""

    def wait(self) -> None:
        """Wait for the first answer; the seconds until then are kept."""
        begun = time.monotonic()
        while time.monotonic() - begun < READY:
            if self.server.process.poll() is not None:
                raise RuntimeError(f"vLLM ended with {self.server.process.returncode}: {self.server.log}")
            try:
                host.wait_for(f"{self.server.url}/health", 1)
            except RuntimeError:
                continue
            print(f"  {self.name} ready after {time.monotonic() - begun:.0f} s", flush=True)
            return
        raise RuntimeError(f"vLLM did not answer within {READY:.0f} s: {self.server.log}")

    def engine(self) -> psutil.Process:
        """Return the process of the engine."""
        return next(each for each in served_processes(self.server) if "EngineCore" in " ".join(each.cmdline()))

    def stage(self, name: str, verdict: str, *present: str, what: str, seconds: float = 0) -> None:
        """Record the exporter's page with the log until now, and write what is true of it."""
        folder = self.run.folder / name
        host.recorded(self.exporter, folder, seconds or self.run.scale.seconds)
        shutil.copy(self.server.log, folder / "server.log")
        expect(folder, verdict, present, what)


def expect(folder: Path, verdict: str, present: Sequence[str], what: str, **more: object) -> None:
    lines = {"verdict": verdict, "present": list(present), "what_happened": what, **more}
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items())
    (folder / "expected.toml").write_text(text, encoding="utf-8")


def record(folder: Path, python: str, *, cpu: bool) -> None:
    """Record all stages of a server."""
    run = Run(folder, python, CPU if cpu else CARD)
    scale = run.scale
    with run.serving("graphs", scale.flags) as served:
        budget(served, folder)
        with load.running(served.server.port, *scale.healthy):
            time.sleep(WARM)
            served.stage("healthy", "healthy", what="chat of a few clients, without a queue")
        with load.running(served.server.port, *scale.prefills):
            time.sleep(WARM)
            served.stage("long_prefills", "warning", "prefill_decode_contention", what="prompts of 14,000 tokens beside 8 streams")
        if not cpu:
            refused(run, folder)
            with host.load(sys.executable, ("hold", "0.9"), 120), load.running(served.server.port, *scale.healthy):
                time.sleep(WARM)
                served.stage("memory_held", "healthy", what="another process takes the free memory beside a server that has its own", seconds=12)
            with host.load(sys.executable, ("matmul",), 120), load.running(served.server.port, *scale.healthy):
                time.sleep(WARM)
                served.stage("neighbour_computes", "warning", what="another process computes on the card", seconds=20)
        with load.running(served.server.port, *load.STEADY):
            time.sleep(WARM)
            engine = served.engine()
            engine.send_signal(signal.SIGSTOP)
            time.sleep(1)
            served.stage("engine_stopped", "critical", "engine_stalled", what="SIGSTOP of the engine, with requests in flight", seconds=45)
            engine.send_signal(signal.SIGCONT)
            time.sleep(3)
            engine.kill()
            served.stage("engine_killed", "critical", "engine_dead", what="SIGKILL of the engine, with requests in flight", seconds=25)
    with run.serving("cascade", scale.cascade_flags) as served, load.running(served.server.port, *load.CASCADE):
        time.sleep(WARM)
        served.stage("kv_cascade", "critical", "kv_eviction_cascade", what="28 clients on a KV cache of 4,096 tokens")
    eager = ("--max-num-seqs", "8", "--max-model-len", "4096", "--enforce-eager")
    with run.serving("eager", eager) as served:
        with load.running(served.server.port, *(replace(each, count=min(each.count, 6)) for each in scale.healthy)):
            time.sleep(WARM)
            served.stage("healthy_eager", "healthy", what="the same chat of six clients, with --enforce-eager")
        with load.running(served.server.port, *QUEUE):
            time.sleep(WARM)
            served.stage("queue_at_the_cap", "warning", "queue_saturation", what="48 clients at --max-num-seqs 8")


def refused(run: Run, folder: Path) -> None:
    """Start a second server on a card whose memory the first one holds: vLLM refuses it."""
    with run.starting("refused", run.scale.flags) as served:
        end = time.monotonic() + 120
        while served.server.process.poll() is None and time.monotonic() < end:
            time.sleep(0.5)
        place = folder / "memory_refused"
        place.mkdir()
        shutil.copy(served.server.log, place / "server.log")
        expect(place, "critical", ("startup_failed",), "a second server on a card whose memory is taken", log_alone=True)


def budget(served: Served, folder: Path) -> None:
    """Keep the estimate of the server's memory, without and with its log."""
    for name, more in (("budget", ()), ("budget_with_log", ("--log", str(served.server.log)))):
        done = subprocess.run(
            [*host.DIAG, "budget", served.server.command, "--json", *more], capture_output=True, text=True, check=False
        )
        (folder / f"{name}.json").write_text(done.stdout or done.stderr, encoding="utf-8")
