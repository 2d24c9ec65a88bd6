"""The process that the others wait for, from the stacks of processes as vLLM 0.32 and earlier releases have them."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from diag.diagnosis.roll_call import RollCall, roll_call
from diag.exporter.process import stacks
from diag.exporter.process.server import Owner
from diag.exporter.process.stacks import ProcessStack, StackFrame
from diag.report.sentences import standing_rows

LOOP = ("worker_busy_loop (vllm/v1/executor/multiproc_executor.py:1040)",)
NEXT_STEP = ("acquire_read (vllm/distributed/device_communicators/shm_broadcast.py:864)", *LOOP)
MODEL = ("execute_model (vllm/v1/worker/gpu_model_runner.py:3940)", *LOOP)
ALL_REDUCE = ("all_reduce (vllm/distributed/parallel_state.py:724)", *MODEL)
SPINS = ("poll (zmq/sugar/poll.py:106)", "wait (vllm/distributed/device_communicators/shm_broadcast.py:210)")
ANSWERS = (*SPINS, *NEXT_STEP[:1], "get_response (vllm/v1/executor/multiproc_executor.py:433)")
IDLE = ("wait (threading.py:327)", "get (queue.py:171)", "_process_input_queue (vllm/v1/engine/core.py:1588)")
CLIENTS = ("run (asyncio/runners.py:118)", "run (uvloop/__init__.py:92)")
FULL = ("wait (threading.py:327)", "put (queue.py:140)", "step (vllm/v1/engine/core.py:700)")
GPU = ("synchronize (torch/cuda/streams.py:90)", *MODEL)


def stack(pid: int, role: str, rank: str, *calls: str, halted: str = "", line: int = 0) -> ProcessStack:
    frames = []
    for call in calls:
        function, _, place = call.rstrip(")").partition(" (")
        file, _, number = place.rpartition(":")
        frames.append(StackFrame(function, file, int(number) + line))
    return ProcessStack(pid, Owner(role, rank), halted, tuple(frames))


def server(engine: tuple[str, ...], *workers: tuple[str, ...], works: bool = False) -> RollCall:
    dump = [stack(1, "api_server", "0", *CLIENTS), stack(2, "engine", "0", *engine)]
    dump += [stack(10 + rank, "worker", str(rank), *calls) for rank, calls in enumerate(workers)]
    return roll_call("h:1", [dump, dump], works)


def test_the_rank_that_is_not_in_the_collective() -> None:
    found = server(ANSWERS, *[ALL_REDUCE] * 3, ("blocked (plugin.py:12)", *MODEL), *[ALL_REDUCE] * 4)
    assert (found.suspects, found.conclusion) == ((13,), "The others wait for worker 3.")
    assert found.standing[5].place == "blocked (plugin.py:12)"


def test_the_engine_for_which_all_ranks_wait() -> None:
    found = server(FULL, NEXT_STEP, NEXT_STEP)
    assert (found.suspects, found.conclusion) == ((2,), "The others wait for engine 0.")


def test_all_ranks_in_one_collective_name_none() -> None:
    found = server(ANSWERS, ALL_REDUCE, ALL_REDUCE)
    assert found.suspects == () and found.conclusion == "All 2 workers wait for each other." and "xid" in found.next


def test_a_lost_message_between_the_engine_and_its_workers() -> None:
    assert "is lost" in server(ANSWERS, NEXT_STEP, NEXT_STEP).conclusion


def test_an_api_server_that_stands_in_a_handler_does_not_wait_for_clients() -> None:
    dump = [stack(1, "api_server", "0", "tokenize (vllm/entrypoints/a.py:5)", *CLIENTS), stack(2, "engine", "0", *IDLE)]
    assert roll_call("h:1", [dump, dump], works=False).conclusion == "Look at API server 0."


def replicas(*engines: tuple[str, ...], workers: dict[str, tuple[str, ...]]) -> RollCall:
    dump = [stack(2 + rank, "engine", str(rank), *calls) for rank, calls in enumerate(engines)]
    dump += [stack(10 + at, "worker", rank, *calls) for at, (rank, calls) in enumerate(workers.items())]
    return roll_call("h:1", [dump, dump], works=False)


def test_the_replica_for_which_the_other_waits() -> None:
    waits = "_has_global_unfinished_reqs (vllm/v1/engine/core.py:2410)"
    found = replicas((waits,), FULL, workers={})
    assert (found.suspects, found.conclusion) == ((3,), "The others wait for engine 1.")


def test_a_rank_waits_only_for_the_ranks_of_its_own_engine() -> None:
    other_place = ("blocked (plugin.py:12)", *MODEL)
    workers = {"0.0": ALL_REDUCE, "0.1": other_place, "1.0": other_place, "1.1": other_place}
    assert replicas(ANSWERS, IDLE, workers=workers).suspects == (11,)


def test_ranks_whose_gpu_does_not_answer() -> None:
    assert server(ANSWERS, GPU, NEXT_STEP).conclusion == "The others wait for worker 0."


@pytest.mark.parametrize("engine", [IDLE, ANSWERS])
def test_a_server_without_a_fault_has_no_suspect(engine: tuple[str, ...]) -> None:
    works = engine is ANSWERS
    workers = (MODEL, ALL_REDUCE) if works else (NEXT_STEP, NEXT_STEP)
    assert server(engine, *workers, works=works).suspects == ()


def test_a_process_that_moves_is_no_suspect() -> None:
    calls = tuple(f"call_{number} (a.py:{number})" for number in range(6))
    before, now = (stack(10, "worker", "0", *calls, *LOOP), stack(10, "worker", "0", *MODEL))
    assert roll_call("h:1", [[before], [now]], works=False).suspects == ()


def test_a_loop_that_polls_does_not_move() -> None:
    before = stack(10, "worker", "0", "stat (pathlib.py:9)", "exists (pathlib.py:7)", "held (a.py:5)", *MODEL)
    now = stack(10, "worker", "0", "held (a.py:6)", *MODEL)
    assert roll_call("h:1", [[before], [now]], works=False).suspects == (10,)


def test_a_halted_process_comes_before_all_others() -> None:
    dump = [stack(10, "worker", "0", *ALL_REDUCE), stack(11, "worker", "1", *MODEL, halted="stopped")]
    found = roll_call("h:1", [dump, dump], works=False)
    assert found.suspects == (11,) and found.next.startswith("kill -CONT 11 ")


def test_without_stacks_the_reason_is_given() -> None:
    blind = ProcessStack(10, Owner("worker", "0"), problem="this user may not read its memory")
    assert "may not read" in roll_call("h:1", [[blind]], works=False).conclusion


def test_ranks_that_stand_at_one_place_share_a_row_and_the_suspect_comes_first() -> None:
    found = server(ANSWERS, *[ALL_REDUCE] * 3, ("blocked (plugin.py:12)", *MODEL))
    rows = standing_rows(found)
    assert rows[0] == ("worker 3", "did not move", "runs a step of the model: blocked (plugin.py:12)")
    assert ("worker 0, 1, 2", "did not move", "is in a collective: all_reduce (parallel_state.py:724)") in rows


def test_a_thread_that_holds_the_interpreters_lock_is_named() -> None:
    dump = [replace(stack(2, "engine", "0", "handler (a.py:1)"), holder="Thread-7")]
    (standing,) = roll_call("h:1", [dump, dump], works=False).standing
    assert standing.waits == "runs, while its thread Thread-7 holds the interpreter's lock"


DUMPED = """
import faulthandler, sys, threading, time
def spin(): time.sleep(60)
for _ in range(40): threading.Thread(target=spin, daemon=True).start()
def step():
    with open(sys.argv[1], "a") as file:
        for number in (1, 2):
            file.write(f"\\n>>> Call stack dump #{number} at {time.ctime()} due to feed timeout\\n\\n")
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.write("\\n" + "=" * 64 + "\\n")
threading.Thread(target=lambda: (time.sleep(0.5), step()), name="watchdog").start()
sys.path.insert(0, sys.argv[2])
import shm_broadcast
shm_broadcast.acquire_read()
"""
"""Writes what ThreadedWatchDog.dump_stack of vLLM 0.33's utils/watch_dog.py writes, with many threads beside."""


def test_a_dump_of_vllms_watchdog_names_the_process_and_the_call_of_its_main_thread(tmp_path: Path) -> None:
    (tmp_path / "shm_broadcast.py").write_text("import time\ndef acquire_read():\n    time.sleep(3)\n")
    file = tmp_path / "VLLM_STACK_DUMP_for_worker_1_4242.log"
    subprocess.run([sys.executable, "-c", DUMPED, str(file), str(tmp_path)], check=True, timeout=60)
    ran = subprocess.run(
        [sys.executable, "-m", "diag", "doctor", str(file)], capture_output=True, text=True, check=False
    )
    said = " ".join(ran.stdout.split())
    assert ran.returncode == 3
    assert "'feed timeout'" in said
    assert "The main thread of worker 1 (PID 4242) runs in acquire_read (shm_broadcast.py:3)" in said


def test_the_dump_of_vllms_watchdog_stands_for_a_stack_that_py_spy_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    pid = os.getpid()
    block = "\n>>> Call stack dump #1 at Fri Nov 27 09:12:44 2026 due to {}\n\n{}\n" + "=" * 64 + "\n"
    calls = 'Current thread 0x1 (most recent call first):\n  File "/v/utils/watch_dog.py", line 91 in dump_stack\n\n'
    calls += 'Thread 0x2 (most recent call first):\n  File "/v/x/shm_broadcast.py", line 864 in acquire_read\n'
    file = tmp_path / f"VLLM_STACK_DUMP_for_engine_0_{pid}.log"
    launch = f"vllm serve m --watchdog-config.dump_dir {tmp_path}"
    for reason, place in (("shutdown", ""), ("feed timeout", "acquire_read (shm_broadcast.py:864)")):
        file.write_text(block.format(reason, calls))
        dump = stacks.take({pid: Owner("engine", "0")}, launch)
        (standing,) = roll_call("h:1", [dump, dump], works=False).standing
        assert standing.place == place
        assert ("dumped it at Fri Nov 27 09:12:44 2026" in standing.waits) is bool(place)
    (without,) = stacks.take({pid: Owner("engine", "0")}, "vllm serve m")
    assert without.problem and not without.frames
