"""A plugin of vLLM whose calls do not return while a file exists in the folder that BLOCKED_CALLS names.

A call that stands still says so in a file beside it.
"""

import os
import queue
import time
from pathlib import Path
from typing import Any

FOLDER = "BLOCKED_CALLS"
ENTERED = ".entered"


def held(call: str) -> None:
    """Stand still in user code, as at a breakpoint."""
    file = Path(os.environ[FOLDER]) / call
    if file.exists():
        file.with_suffix(ENTERED).touch()
    while file.exists():
        time.sleep(0.05)


def full_queue() -> None:
    """Stand still in a queue that nobody empties."""
    full: queue.Queue[int] = queue.Queue(1)
    full.put(0)
    file = Path(os.environ[FOLDER]) / "queue"
    file.with_suffix(ENTERED).touch()
    while file.exists():
        try:
            full.put(1, timeout=30)
        except queue.Full:
            continue


def register() -> None:
    """Called by vLLM in each of its processes."""
    import filelock  # noqa: PLC0415 - vLLM has it
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank  # noqa: PLC0415 - only vLLM has it
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader  # noqa: PLC0415
    from vllm.v1.engine.core import EngineCoreProc  # noqa: PLC0415
    from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: PLC0415

    step, run, load = EngineCoreProc._process_engine_step, CPUWorker.execute_model, DummyModelLoader.load_weights

    def _process_engine_step(core: Any) -> bool:
        if (Path(os.environ[FOLDER]) / "queue").exists():
            full_queue()
        return step(core)

    def execute_model(worker: Any, *what: Any, **more: Any) -> Any:
        if worker.rank == 1:
            held("worker")
        return run(worker, *what, **more)

    def load_weights(loader: Any, *what: Any) -> None:
        if get_tensor_model_parallel_rank() == 1:
            with filelock.FileLock(Path(os.environ[FOLDER]) / "lock"):
                pass
        load(loader, *what)

    EngineCoreProc._process_engine_step = _process_engine_step
    CPUWorker.execute_model = execute_model
    DummyModelLoader.load_weights = load_weights
