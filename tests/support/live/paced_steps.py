"""A plugin of vLLM: each step takes a while, as on a GPU, and processes that wait for each other use no CPU.

A tiny model makes hundreds of steps a second, and between two steps each process asks again and again for the next
message: under any load a server takes two cores.
"""

import time
from functools import partial
from typing import Any

STEP_SECONDS = 0.02


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415 - only vLLM has it
    from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: PLC0415

    run = CPUWorker.execute_model

    def execute_model(worker: Any, *what: Any, **more: Any) -> Any:
        time.sleep(STEP_SECONDS)
        return run(worker, *what, **more)

    CPUWorker.execute_model = execute_model
    shm_broadcast.sched_yield = partial(time.sleep, 0.001)
    # After this many seconds without a message it waits for a notice, which it may miss; then the step is 5 s late.
    shm_broadcast.SpinCondition.__init__.__defaults__ = (3600.0,)
