"""The moments that a pager is about, on a real vLLM: dead, restarting, stopped, failed, fixed.

Each is brought about for real; then the doctor, the alerts and `diag verify` are asked.
"""

import signal
import subprocess
import sys
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
DIED_AGO = 10.0
"""Seconds after a crash at which the restart is looked at: it is under way."""
OTHERS, SPIN = 6, "while True: pass"
"""Programs that want the server's core."""
BAD_FLAG = (*FLAGS, "--max-num-sequences", "32")
LARGE_CONTEXT = ("--max-model-len", "8192", "--block-size", "32", "--num-gpu-blocks-override", "128")
DEAD = everywhere("critical engine_dead", "engine_dead", livez="503")
DEAD_AND_FAILING = everywhere("critical engine_dead", "engine_dead or engine_dead, requests_failing", livez="503")
KEEPS_ALIVE = {"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}
STOPPED = everywhere("critical engine_stalled", "engine_stalled", livez="503")
GOES_ON = Row("healthy", "healthy", "warning engine_stalled (ended)", livez="200")
STOPPING = everywhere("warning shutdown_drops_requests", "shutdown_drops_requests", livez=NOT_ASKED)
DROPPED = everywhere("warning shutdown_drops_requests", "shutdown_drops_requests")
DROPPED_BEFORE = everywhere("warning shutdown_drops_requests (ended)", "shutdown_drops_requests")
ALL_FAIL = everywhere(
    "critical requests_failing or critical structured_output_failing",
    "structured_output_failing or requests_failing or requests_failing, structured_output_failing",
)
CLIENTS_FAIL = everywhere("no_incident", NONE)
ALL_REFUSED = everywhere("critical requests_refused", "requests_refused")
RESTARTING = everywhere("critical server_crashed", NOT_ASKED)
CRASHED = everywhere("warning server_crashed (ended)", "server_crashed or engine_dead, server_crashed")
CRASHED_TWICE = everywhere("critical server_crashed", "server_crashed or engine_dead, server_crashed")
ORPHANED = everywhere("critical engine_orphaned", "engine_orphaned or engine_dead, engine_orphaned", livez="503")
STARVED = everywhere(
    "warning host_cpu_starved or critical host_cpu_starved",
    "host_cpu_starved or contract_breached, host_cpu_starved",
)
CRASH_LOOP = everywhere("critical crash_loop", "crash_loop or crash_loop, startup_failed", livez=NOT_ASKED)
BAD_START = everywhere("critical startup_failed", "startup_failed", livez=NOT_ASKED)
TOO_LARGE = everywhere("critical gpu_out_of_memory", "gpu_out_of_memory", livez=NOT_ASKED)


def engine_killed(stage: Stage) -> Iterator[Outcome]:
    with stage.busy() as (vllm, who):
        since = time.time()
        vllm.signal("VLLM::EngineCore", signal.SIGKILL)
        yield outcome("SIGKILL of the engine", who, DEAD, look(who, DEAD)[0], since)


def engine_killed_while_idle(stage: Stage) -> Iterator[Outcome]:
    """The API server outlives its engine: /metrics answers, /health answers 503, and no request is in flight."""
    with stage.serving(**KEEPS_ALIVE) as (vllm, who):
        since = time.time()
        vllm.signal("VLLM::EngineCore", signal.SIGKILL)
        yield outcome("SIGKILL of an idle engine, the API server lives", who, DEAD, look(who, DEAD)[0], since)


def engine_killed_under_load(stage: Stage) -> Iterator[Outcome]:
    """The API server outlives its engine: every request fails at once and is never in flight."""
    with stage.busy(**KEEPS_ALIVE) as (vllm, who):
        since = time.time()
        vllm.signal("VLLM::EngineCore", signal.SIGKILL)
        got = look(who, DEAD_AND_FAILING)[0]
        yield outcome("SIGKILL of a busy engine, the API server lives", who, DEAD_AND_FAILING, got, since)


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
        cured = time.time()
        yield outcome("SIGSTOP of the engine", who, STOPPED, got, since)
        time.sleep(SETTLES)
        yield outcome("SIGCONT after it", who, GOES_ON, look(who, GOES_ON)[0], since, cured)


def every_answer_fails(stage: Stage) -> Iterator[Outcome]:
    """Each request has a grammar that does not compile: HTTP 500, and the engine idles."""
    with stage.serving() as (vllm, who), load.running(vllm.port, load.UNCOMPILABLE):
        since = time.time()
        time.sleep(SETTLES)
        yield outcome("every answer a 500", who, ALL_FAIL, look(who, ALL_FAIL)[0], since)


def clients_fail(stage: Stage) -> Iterator[Outcome]:
    """Prompts above the context show no health while other requests succeed; then none does."""
    with stage.serving() as (vllm, who):
        with load.running(vllm.port, *load.STEADY):
            time.sleep(SETTLES)
            with load.running(vllm.port, load.TOO_LONG):
                since = time.time()
                time.sleep(2 * SETTLES)
                yield outcome("a wave of 400 beside successes", who, CLIENTS_FAIL, look(who, CLIENTS_FAIL)[0], since)
        with load.running(vllm.port, load.TOO_LONG):
            since = time.time()
            time.sleep(2 * SETTLES)
            yield outcome("every answer a 400", who, ALL_REFUSED, look(who, ALL_REFUSED)[0], since)


def crashes(stage: Stage) -> Iterator[Outcome]:
    """The engine is killed twice, and a supervisor starts the server again: no start erases the crash before it."""
    slow = {"PYTHONPATH": str(slow_weights.installed(stage.folder / "plugin")), slow_weights.SECONDS: "60"}
    with stage.busy() as (first, who), ExitStack() as servers:
        vllm, since = first, time.time()
        for expected, when in ((CRASHED, "after a crash and a restart"), (CRASHED_TWICE, "after a second crash")):
            vllm.signal("VLLM::EngineCore", signal.SIGKILL)
            vllm.process.wait(60)
            flags = (*FLAGS, "--load-format", "slow")
            vllm = servers.enter_context(server.starting(stage.folder, "tiny", flags, vllm.port, **slow))
            if expected is CRASHED:
                time.sleep(DIED_AGO)
                yield outcome("restart under way after a crash", who, RESTARTING, look(who, RESTARTING)[0], since)
            server.wait_until_ready(vllm)
            time.sleep(SETTLES)
            yield outcome(when, who, expected, look(who, expected)[0], since)


def server_killed_alone(stage: Stage) -> Iterator[Outcome]:
    """SIGKILL of the API server alone, as by the OOM killer: its engine stays behind."""
    with stage.busy() as (vllm, who):
        since = time.time()
        vllm.process.kill()
        yield outcome("SIGKILL of the API server alone", who, ORPHANED, look(who, ORPHANED)[0], since)


def server_stopped(stage: Stage) -> Iterator[Outcome]:
    with stage.busy() as (vllm, who):
        since = time.time()
        vllm.process.send_signal(signal.SIGSTOP)
        yield outcome("SIGSTOP of the API server", who, DEAD, look(who, DEAD)[0], since)


def cpu_starved(stage: Stage) -> Iterator[Outcome]:
    """Other programs take the core that the server runs on; those who look at it have the other one."""
    with stage.busy() as (vllm, who):
        group = subprocess.run(["pgrep", "-g", str(vllm.process.pid)], capture_output=True, text=True, check=True)
        since = time.time()
        with ExitStack() as others:
            for pid in group.stdout.split():
                subprocess.run(["taskset", "-a", "-p", "-c", "1", pid], stdout=subprocess.DEVNULL, check=True)
            for _ in range(OTHERS):
                busy = others.enter_context(subprocess.Popen(["taskset", "-c", "1", sys.executable, "-c", SPIN]))
                others.callback(busy.kill)
            time.sleep(2 * SETTLES)
            yield outcome("other programs on its core", who, STARVED, look(who, STARVED)[0], since)


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
            got, _ = look(who, DROPPED)
            server.wait_until_ready(again)
            if time.time() - since < OVER_TWO_MINUTES:
                raise RuntimeError("the restart took less than two minutes")
            yield outcome("restart over two minutes", who, DROPPED, got, since)
            time.sleep(SETTLES)
            yield outcome("after that restart", who, DROPPED_BEFORE, look(who, DROPPED_BEFORE)[0], since)


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
    "engine_killed_while_idle": engine_killed_while_idle,
    "engine_killed_under_load": engine_killed_under_load,
    "server_killed": server_killed,
    "engine_stopped": engine_stopped,
    "server_stopped": server_stopped,
    "server_killed_alone": server_killed_alone,
    "crashes": crashes,
    "every_answer_fails": every_answer_fails,
    "slow_restart": slow_restart,
    "crash_loop": crash_loop,
    "bad_flag": bad_flag,
    "large_context": large_context,
}
"""Those whose servers mostly do nothing: several may run at a time."""
LOADED: Mapping[str, Scenario] = {
    "clients_fail": clients_fail,
    "more_capacity": more_capacity,
    "gateway_limit": gateway_limit,
    "api_key": api_key,
    "cpu_starved": cpu_starved,
}
"""Those that load the machine, and one whose verdict is that of a machine that nothing else loads."""
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
