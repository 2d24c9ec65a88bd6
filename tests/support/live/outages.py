"""The moments that a pager is about, on a real vLLM: dead, restarting, stopped, failed, fixed.

Each is brought about for real; then the doctor, the alerts and `diag verify` are asked.
"""

import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.live import load, server, slow_weights
from support.live.cascades import api_key, gateway_limit, more_capacity
from support.live.stage import FLAGS, NONE, NOT_ASKED, SETTLES, Outcome, Row, Scenario, Stage, everywhere, look, outcome

UNDER_WAY = 75.0
"""Seconds into a restart: longer than the window of a minute."""
LOADS, OVER_TWO_MINUTES = "110", 120.0
"""Seconds that the weights of a slow restart take, and what it takes in all."""
BAD_FLAG = (*FLAGS, "--max-num-sequences", "32")
LARGE_CONTEXT = ("--max-model-len", "8192", "--block-size", "32", "--num-gpu-blocks-override", "128")
DEAD = everywhere("critical engine_dead", "engine_dead", livez="503")
STOPPED = everywhere("critical engine_stalled", "engine_stalled", livez="503")
GOES_ON = Row("healthy", "healthy", "critical engine_stalled (ended)", livez="200")
STOPPING = everywhere("unknown", NONE, livez=NOT_ASKED)
STARTING = everywhere("unknown starting", NONE)
SERVES = everywhere("healthy", NONE)
ALL_FAIL = everywhere(
    "critical requests_failing or critical structured_output_failing",
    "requests_failing or structured_output_failing or requests_failing, structured_output_failing",
)
CRASH_LOOP = everywhere("critical crash_loop", "crash_loop or crash_loop, startup_failed", livez=NOT_ASKED)
BAD_START = everywhere("critical startup_failed", "startup_failed", livez=NOT_ASKED)
TOO_LARGE = everywhere("critical gpu_out_of_memory", "gpu_out_of_memory", livez=NOT_ASKED)


def engine_killed(stage: Stage) -> Iterator[Outcome]:
    with stage.busy() as (vllm, who):
        since = time.time()
        vllm.signal("VLLM::EngineCore", signal.SIGKILL)
        yield outcome("SIGKILL of the engine", who, DEAD, look(who, DEAD)[0], since)


def server_killed(stage: Stage) -> Iterator[Outcome]:
    with stage.busy() as (vllm, who):
        since = time.time()
        vllm.stop()
        yield outcome("SIGKILL of the server", who, DEAD, look(who, DEAD)[0], since)


def engine_stopped(stage: Stage) -> Iterator[Outcome]:
    with stage.busy() as (vllm, who):
        since = time.time()
        vllm.signal("VLLM::EngineCore", signal.SIGSTOP)
        got, _ = look(who, STOPPED)
        vllm.signal("VLLM::EngineCore", signal.SIGCONT)
        yield outcome("SIGSTOP of the engine", who, STOPPED, got, since)
        time.sleep(SETTLES)
        yield outcome("SIGCONT after it", who, GOES_ON, look(who, GOES_ON)[0], since)


def every_answer_fails(stage: Stage) -> Iterator[Outcome]:
    """Each request has a grammar that does not compile: HTTP 500, and the engine idles."""
    with stage.serving() as (vllm, who), load.running(vllm.port, load.UNCOMPILABLE):
        since = time.time()
        time.sleep(SETTLES)
        yield outcome("every answer a 500", who, ALL_FAIL, look(who, ALL_FAIL)[0], since)


def slow_restart(stage: Stage) -> Iterator[Outcome]:
    """SIGKILL half a minute after SIGTERM: vLLM 0.32 ends its engine at once, and its open streams never end."""
    slow = {"PYTHONPATH": str(slow_weights.installed(stage.folder / "plugin")), slow_weights.SECONDS: LOADS}
    with stage.busy() as (vllm, who):
        since = time.time()
        vllm.process.terminate()
        got, _ = look(who, STOPPING)
        yield outcome("SIGTERM of the busy server", who, STOPPING, got, since)
        vllm.stop()
        with server.starting(stage.folder, "tiny", (*FLAGS, "--load-format", "slow"), vllm.port, **slow) as again:
            time.sleep(UNDER_WAY)
            got, _ = look(who, STARTING)
            server.wait_until_ready(again)
            if time.time() - since < OVER_TWO_MINUTES:
                raise RuntimeError("the restart took less than two minutes")
            yield outcome("restart over two minutes", who, STARTING, got, since)
            time.sleep(SETTLES)
            yield outcome("after that restart", who, SERVES, look(who, SERVES)[0], since)


def crash_loop(stage: Stage) -> Iterator[Outcome]:
    with stage.busy() as (vllm, who):
        since = time.time()
        vllm.stop()
        with supervised(stage.folder, BAD_FLAG, vllm.port):
            time.sleep(UNDER_WAY)
            got, _ = look(who, CRASH_LOOP)
        yield outcome("crash loop after a change", who, CRASH_LOOP, got, since)


@contextmanager
def supervised(folder: Path, flags: Sequence[str], port: int) -> Iterator[None]:
    """A supervisor that starts a server again whenever it ends."""
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            with server.starting(folder, "tiny", flags, port) as vllm:
                while vllm.process.poll() is None and not over.wait(0.5):
                    pass
            over.wait(2)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def bad_flag(stage: Stage) -> Iterator[Outcome]:
    yield failed_start("failed start: a bad flag", stage, BAD_FLAG, BAD_START)


def large_context(stage: Stage) -> Iterator[Outcome]:
    yield failed_start("failed start: too large a context", stage, LARGE_CONTEXT, TOO_LARGE)


def failed_start(name: str, stage: Stage, flags: Sequence[str], expected: Row) -> Outcome:
    """The server ends by itself, and is looked at then."""
    with ExitStack() as loading:
        loading.enter_context(stage.loading)
        since = time.time()
        with stage.starting(flags) as (vllm, who):
            vllm.process.wait(server.READY_SECONDS)
            loading.close()
            return outcome(name, who, expected, look(who, expected)[0], since)


QUIET: Mapping[str, Scenario] = {
    "engine_killed": engine_killed,
    "server_killed": server_killed,
    "engine_stopped": engine_stopped,
    "every_answer_fails": every_answer_fails,
    "slow_restart": slow_restart,
    "crash_loop": crash_loop,
    "bad_flag": bad_flag,
    "large_context": large_context,
}
"""Those whose servers mostly do nothing: several may run at a time."""
LOADED: Mapping[str, Scenario] = {
    "more_capacity": more_capacity,
    "gateway_limit": gateway_limit,
    "api_key": api_key,
}
"""Those that load the machine."""
SCENARIOS = {**QUIET, **LOADED}


def run(names: Sequence[str], folder: Path, in_haste: bool = False) -> Iterator[Outcome]:
    """The outcomes of these scenarios, in their order; four at a time of those that allow it."""
    loading = threading.Semaphore(2)

    def one(name: str) -> list[Outcome]:
        place = folder / name
        place.mkdir()
        try:
            return list(SCENARIOS[name](Stage(place, in_haste, loading)))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # the others are worth their time
            return [Outcome(name, Row(), Row(live=f"not run: {error}"))]

    quiet = [name for name in names if name in QUIET]
    with ThreadPoolExecutor(4) as together:
        for outcomes in together.map(one, quiet):
            yield from outcomes
    for name in names:
        if name not in quiet:
            yield from one(name)
