"""Part d: a real vLLM on the card, healthy and ill, each stage a recording of the exporter's page with its truth."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from support.live import cure, load, model
from support.live import server as live
from support.live.load import Clients

from gpu import host
from gpu.judge import MISSING, TIME_IS_UP

COMMON = ("--served-model-name", "tiny", "--load-format", "dummy", "--dtype", "bfloat16", "--host", "127.0.0.1")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
READY = 300.0
"""Seconds that a server may take to start."""
START = 30.0
"""Seconds of each start that are recorded."""
WARM = 6.0
"""Seconds of load before a recording begins."""
SECONDS = 20.0
"""Seconds of a recording."""
QUEUE = (Clients(48, (100, 300), (100, 300)),)


@dataclass(frozen=True)
class Scale:
    """Models, flags and loads by which a card and the CPU show the same incidents.

    `prefills_stall` is whether a long prefill lasts longer than the default threshold of a stream pause: on a Hopper
    card a step of 8,192 prompt tokens of this model takes 0.24 s.
    """

    size: str
    flags: tuple[str, ...]
    healthy: tuple[Clients, ...]
    prefills: tuple[Clients, ...]
    prefills_stall: bool
    eager_flags: tuple[str, ...]
    cascade_size: str
    cascade_flags: tuple[str, ...]


CARD = Scale(
    size="large",
    flags=("--max-model-len", "16384", "--max-num-seqs", "64"),
    healthy=(Clients(12, (100, 1000), (60, 200), pause=0.3, stream=True),),
    prefills=(
        Clients(8, (16, 48), (150, 250), stream=True),
        Clients(6, (14_000, 15_000), (2, 4), pause=6.0, start=2.0),
    ),
    prefills_stall=False,
    eager_flags=(
        *("--max-model-len", "16384", "--max-num-seqs", "16", "--max-num-batched-tokens", "65536"),
        "--enforce-eager",
    ),
    cascade_size="large",
    cascade_flags=("--num-gpu-blocks-override", "256", "--max-model-len", "2048", "--max-num-seqs", "64"),
)
CPU = Scale(
    size="tiny",
    flags=("--max-model-len", "2048", "--max-num-seqs", "32", "--enforce-eager"),
    healthy=load.HEALTHY,
    prefills=load.CONTENTION,
    prefills_stall=True,
    eager_flags=(*cure.SMALL, "--enforce-eager", "--max-num-seqs", "16"),
    cascade_size="tiny",
    cascade_flags=(*cure.TINY, "--enforce-eager"),
)


class TimeUp(RuntimeError):
    """What comes next would end after the time that the run may take."""


class Run:
    """One run: its folder, vLLM's interpreter, the scale of models and loads, and when it ends by time.monotonic()."""

    def __init__(self, folder: Path, python: str, scale: Scale, end: float) -> None:
        self.folder, self.python, self.scale, self.end = folder, python, scale, end
        self.started_in = START
        for size in {scale.size, scale.cascade_size, "small" if scale is CPU else scale.size}:
            model.write(folder / size, size)

    def left(self, needed: float) -> float:
        """Return the seconds that are left; TimeUp if they are fewer than those that are needed."""
        left = self.end - time.monotonic()
        if left < needed:
            raise TimeUp(f"{TIME_IS_UP}: {needed:.0f} s are needed, {max(left, 0):.0f} s were left (--minutes)")
        return left

    @contextmanager
    def serving(self, name: str, size: str, flags: Sequence[str]) -> Iterator["Served"]:
        """Start a server with an exporter beside it, record its start, and wait until it answers."""
        with self.starting(name, size, flags) as served:
            more = ("--log", str(served.server.log), "--timeout", "10")
            with host.exporter(self.folder / f"{name}-exporter.log", served.server.url, *more) as served.exporter:
                with ThreadPoolExecutor(1) as beside:
                    start = beside.submit(host.recorded, served.exporter, self.folder / f"{name}_start", START)
                    served.wait()
                    start.result()
                yield served

    @contextmanager
    def starting(self, name: str, size: str, flags: Sequence[str]) -> Iterator["Served"]:
        """Start a server; end it with all of its processes."""
        self.left(self.started_in)
        files, port, log = str(self.folder / size), live.free_port(), self.folder / f"{name}.log"
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", files, *COMMON]
        command += ["--port", str(port), *flags]
        environment = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"} | ENVIRONMENT
        with log.open("ab") as written:
            process = subprocess.Popen(command, stdout=written, stderr=written, env=environment, start_new_session=True)
        server = live.Server(port, process, " ".join(["vllm serve", files, *COMMON, *flags]), log)
        try:
            yield Served(self, name, server)
        finally:
            server.stop()
            for left in session(server):
                left.kill()


def session(server: live.Server) -> list[psutil.Process]:
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
        """Wait for the first answer; RuntimeError if the server ends or takes too long."""
        begun = time.monotonic()
        most = min(READY, self.run.left(0))
        while time.monotonic() - begun < most:
            if self.server.process.poll() is not None:
                raise RuntimeError(f"vLLM ended with {self.server.process.returncode}: {self.server.log.name}")
            try:
                host.wait_for(f"{self.server.url}/health", 1)
            except RuntimeError:
                continue
            self.run.started_in = max(self.run.started_in, time.monotonic() - begun)
            print(f"  {self.name} ready after {time.monotonic() - begun:.0f} s", flush=True)
            return
        self.run.left(1)
        raise RuntimeError(f"vLLM did not answer within {READY:.0f} s: {self.server.log.name}")

    def engine(self) -> psutil.Process:
        """Return the process of the engine."""
        return next(process for process in session(self.server) if "EngineCore" in " ".join(process.cmdline()))

    def look(self) -> str:
        """Return what a user reads who diagnoses the live server on its host."""
        command = [*host.DIAG, "doctor", self.server.url, "--log", str(self.server.log), "--for", "12", "--verbose"]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout

    def stage(self, name: str, what: str, verdict: str, *present: str, seconds: float = SECONDS) -> None:
        """Record the exporter's page with the log until now, and write what is true of it."""
        self.run.left(seconds)
        folder = self.run.folder / name
        host.recorded(self.exporter, folder, seconds)
        shutil.copy(self.server.log, folder / "server.log")
        note_truth(folder, what, verdict, present)


def note_truth(folder: Path, what: str, verdict: str, present: Sequence[str], *, log_alone: bool = False) -> None:
    """Add the truth of a stage to its recording.toml; `log_alone`: nothing but the log was recorded."""
    truth = {"what_happened": what, "verdict": verdict, "present": list(present), "log_alone": log_alone}
    with (folder / "recording.toml").open("a", encoding="utf-8") as file:
        file.write("\n[truth]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in truth.items()))


def record(folder: Path, python: str, end: float, *, cpu: bool, quick: bool) -> None:
    """Record the stages of each server; one that fails, or takes too long, does not take those of the others with it.

    What was planned and not recorded is written down with the reason. The run ends before `end` of time.monotonic().
    `quick` leaves out the second and the third server.
    """
    run, missing = Run(folder, python, CPU if cpu else CARD, end), dict[str, str]()
    others = () if cpu else ("memory_refused", "memory_held", "neighbour_computes")
    planned = {
        _with_graphs: ("healthy", *others, "engine_stopped", "engine_killed"),
        _with_small_cache: ("kv_cascade",),
        _eager: ("healthy_eager", "long_prefills", "queue_at_the_cap"),
    }
    for stages, names in [*planned.items()][: 1 if quick else None]:
        why = ""
        try:
            stages(run)
        except (RuntimeError, OSError, subprocess.SubprocessError, StopIteration) as error:
            why = str(error) or type(error).__name__
            print(f"  {stages.__name__} ended early: {why}", flush=True)
        missing |= {name: why for name in names if not (folder / name / "server.log").exists()}
    host.write(folder / MISSING, missing)


def _with_graphs(run: Run) -> None:
    scale = run.scale
    with run.serving("graphs", scale.size, scale.flags) as served:
        for name, more in (("budget", ()), ("budget_with_log", ("--log", str(served.server.log)))):
            command = [*host.DIAG, "budget", served.server.command, "--json", *more]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            (run.folder / f"{name}.json").write_text(done.stdout, encoding="utf-8")
        with load.running(served.server.port, *scale.healthy):
            time.sleep(WARM)
            with ThreadPoolExecutor(1) as beside:
                looked = beside.submit(served.look)
                served.stage("healthy", "chat of a few clients, without a queue", "healthy")
                (run.folder / "doctor.txt").write_text(looked.result(), encoding="utf-8")
        if scale is CARD:
            _beside_others(run, served)
        with load.running(served.server.port, *load.STEADY):
            time.sleep(WARM)
            engine = served.engine()
            engine.send_signal(signal.SIGSTOP)
            time.sleep(1)
            what = "SIGSTOP of the engine, with requests in flight"
            served.stage("engine_stopped", what, "critical", "engine_stalled", seconds=40)
            engine.send_signal(signal.SIGCONT)
            time.sleep(3)
            engine.kill()
            what = "SIGKILL of the engine, with requests in flight"
            served.stage("engine_killed", what, "critical", "engine_dead", seconds=25)


def _beside_others(run: Run, served: Served) -> None:
    """Record what other processes on the card do to the server: a second start, memory that is held, computation."""
    with run.starting("refused", run.scale.size, run.scale.flags) as second:
        second.server.process.wait(timeout=min(READY, run.left(0)))
        folder = run.folder / "memory_refused"
        folder.mkdir()
        shutil.copy(second.server.log, folder / "server.log")
        what = "a second server on a card whose memory is taken"
        note_truth(folder, what, "critical", ("startup_failed", "gpu_out_of_memory"), log_alone=True)
    with host.load(sys.executable, ("hold", "0.9"), 120), load.running(served.server.port, *run.scale.healthy):
        time.sleep(WARM)
        what = "another process takes the memory that the server has left"
        served.stage("memory_held", what, "warning", "gpu_memory_contended")
    with host.load(sys.executable, ("matmul",), 120), load.running(served.server.port, *run.scale.healthy):
        time.sleep(WARM)
        what = "another process computes on the card; ITL triples"
        served.stage("neighbour_computes", what, "warning", "gpu_compute_contended")


def _with_small_cache(run: Run) -> None:
    with (
        run.serving("cascade", run.scale.cascade_size, run.scale.cascade_flags) as served,
        load.running(served.server.port, *load.CASCADE),
    ):
        time.sleep(WARM)
        served.stage("kv_cascade", "28 clients on a KV cache of 4,096 tokens", "critical", "kv_eviction_cascade")


def _eager(run: Run) -> None:
    scale = run.scale
    with run.serving("eager", "small" if scale is CPU else scale.size, scale.eager_flags) as served:
        with load.running(served.server.port, *(replace(group, count=min(group.count, 6)) for group in scale.healthy)):
            time.sleep(WARM)
            served.stage("healthy_eager", "chat of six clients, with --enforce-eager", "healthy")
        with load.running(served.server.port, *scale.prefills):
            time.sleep(WARM)
            what = "prompts of thousands of tokens, several in one step, beside 8 streams"
            found = ("warning", "prefill_decode_contention") if scale.prefills_stall else ("healthy",)
            served.stage("long_prefills", what, *found, seconds=30)
        with load.running(served.server.port, *QUEUE):
            time.sleep(WARM)
            served.stage("queue_at_the_cap", "48 clients at --max-num-seqs 16", "warning", "queue_saturation")
